/* Stands in for CUDA's header of this name, of which nccl.h uses nothing. */
