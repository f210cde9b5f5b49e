//! Raw bindings to NCCL.
