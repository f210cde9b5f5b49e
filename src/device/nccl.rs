//! The only caller of nccl-sys: one function a call, errors with names.
