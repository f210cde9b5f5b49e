/* What nccl.h needs of C's header of this name, so that bindings are the same on every machine. */
#pragma once
#define NULL ((void *)0)
typedef __SIZE_TYPE__ size_t;
