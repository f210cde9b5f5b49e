//! Measures collectives in the manner of nccl-tests.
fn main() {}
