//! Ranks as threads of one process: no launcher, no variables, no ports.
//!
//! `cargo run --example threads`

use collectives::{Communicator, ReduceOp};

fn main() -> collectives::Result<()> {
    let words = ["collective", "communication", "between", "threads"];
    let longest = Communicator::run_local(words.len(), |comm| {
        let mut length = words[comm.rank()].len() as u32;
        comm.all_reduce(&mut length, ReduceOp::Max)?;
        Ok(length)
    })?;
    println!("every thread knows that the longest word has {} letters: {longest:?}", longest[0]);
    assert_eq!(longest, [13; 4]);
    Ok(())
}
