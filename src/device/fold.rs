//! Reductions that NCCL lacks: exchange, our kernel, exchange, in chunks.
