//! The example runs to its end on several ranks.

use std::process::Command;

use crate::common::programs::example;
use crate::common::ranks::run_ranks;

#[test]
fn a_trainer_owns_its_communicator_and_runs_in_a_thread() {
    let program = example("trainer").unwrap();
    for ranks in [1, 3] {
        let mut printed = String::new();
        for (rank, output) in run_ranks(ranks, || Command::new(&program)).into_iter().enumerate() {
            let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert!(output.status.success(), "rank {rank} of {ranks}: {}\n{out}\n{err}", output.status);
            printed += &out;
        }
        assert_eq!(printed.matches("y = 3.00 x + -1.00, loss 0.00000").count(), ranks, "{printed}");
    }
}
