//! One NCCL communicator: made, used, split and ended without ever blocking for longer than a deadline.
