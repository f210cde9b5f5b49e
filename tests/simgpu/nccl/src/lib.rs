//! An NCCL over host memory.
