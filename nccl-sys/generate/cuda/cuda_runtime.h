/* Stands in for CUDA's header of this name. It is all that nccl.h needs of it: two kinds of opaque pointers and C's own types. */
#pragma once
#include <stddef.h>
#define CUDART_VERSION 13000
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
