//! What NCCL can be told about a communicator.
