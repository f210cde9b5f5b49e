//! One NCCL communicator shared by a Python rank and a Rust rank. Needs a GPU (`COLLECTIVES_TEST_GPU=real`) and a
//! Python whose PyTorch can use it (`COLLECTIVES_INTEROP_PYTHON`).

use std::process::Command;

use crate::{peer, python, skip};

#[test]
fn one_communicator_has_a_rank_of_python_and_one_of_rust() {
    let python = python!();
    if std::env::var("COLLECTIVES_TEST_GPU").as_deref() != Ok("real") {
        skip!("no GPU here (COLLECTIVES_TEST_GPU=real takes those that are there)");
    }
    let (script, program) = (concat!(env!("CARGO_MANIFEST_DIR"), "/benches/gpu/beside-torch"), peer::example("beside_torch"));
    let output = Command::new(python.program()).arg(script).arg(program).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
}
