//! The examples are programs: each runs to its end on several ranks, started by collrun.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;
use std::process::Command;

/// The built example, beside this test's own program.
fn example(name: &str) -> PathBuf {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    path.push("examples");
    path.push(name);
    assert!(path.exists(), "{} is not built: run `cargo build --examples`", path.display());
    path
}

/// Runs an example on `ranks` ranks and gives back what it printed.
fn launch(ranks: usize, name: &str) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_collrun"))
        .args(["--nproc-per-node", &ranks.to_string(), "--"])
        .arg(example(name))
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned());
    assert!(output.status.success(), "{name} on {ranks} ranks: {}\n{out}\n{err}", output.status);
    out
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
    let output = Command::new(example("threads")).output().unwrap();
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("13 letters: [13, 13, 13, 13]"));
}
