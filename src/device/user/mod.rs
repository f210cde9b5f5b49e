//! Kernels of the caller: a CUDA C expression, compiled by NVRTC, or a PTX image.
