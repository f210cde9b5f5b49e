//! The examples are programs: each runs to its end on several ranks.

use std::process::Command;

use crate::common::programs::example;
use crate::common::ranks::run_ranks;

/// Runs an example on `ranks` ranks and returns what they printed.
fn launch(ranks: usize, name: &str) -> String {
    let program = example(name).unwrap();
    let mut printed = String::new();
    for (rank, output) in run_ranks(ranks, || Command::new(&program)).into_iter().enumerate() {
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{name}, rank {rank} of {ranks}: {}\n{out}\n{err}", output.status);
        printed += &out;
    }
    printed
}

#[test]
fn hello() {
    assert_eq!(launch(4, "hello").matches("the mean of all ranks is 1.5").count(), 4);
    assert!(launch(1, "hello").contains("rank 0 of 1: the mean of all ranks is 0"));
}

#[test]
fn gradient_averaging_learns_and_keeps_the_ranks_alike() {
    for ranks in [1, 4] {
        let printed = launch(ranks, "gradient_averaging");
        assert!(printed.contains(&format!("parameters alike on all {ranks} ranks, bit for bit: true")), "{printed}");
    }
}

#[test]
fn ring() {
    let printed = launch(4, "ring");
    assert!(printed.contains("the token came back with 6, expected 6"), "{printed}");
    assert!(launch(1, "ring").contains("the token came back with 0"));
}

#[test]
fn subgroup() {
    let printed = launch(5, "subgroup");
    assert!(printed.contains("rank 4 is 2 of the even ranks, whose sum is 6") && printed.contains("rank 3: my row is [2, 3]"), "{printed}");
}

#[test]
fn custom_op() {
    let printed = launch(4, "custom_op");
    assert_eq!(printed.matches("the greatest is 3 on rank 0").count(), 4, "{printed}");
}

#[test]
fn threads() {
    let output = Command::new(example("threads").unwrap()).output().unwrap();
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("13 letters: [13, 13, 13, 13]"));
}

#[test]
fn a_stack_of_layers_is_called_by_a_pool_of_threads() {
    for ranks in [1, 2, 4] {
        let printed = launch(ranks, "tensor_parallel");
        assert_eq!(printed.matches("32 of 32 answers are right").count(), ranks, "{printed}");
    }
}

#[test]
fn a_service_awaits_calls_of_two_communicators() {
    for (ranks, mean) in [(1, "0"), (2, "0.5"), (3, "1")] {
        let printed = launch(ranks, "service");
        let expected = format!("mean {mean}, token after 10 hops, 1000 ticks meanwhile");
        assert_eq!(printed.matches(&expected).count(), ranks, "{printed}");
    }
}
