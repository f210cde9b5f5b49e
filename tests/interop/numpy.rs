//! Tensors are passed to another program's library and returned, with numpy if Python has it.

use std::path::PathBuf;
use std::process::Command;

/// Returns the path of the library, which is built beside this test binary.
fn library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let folder = program.parent().unwrap().parent().unwrap().join("examples");
    let path = folder.join("libtensor_library.so");
    assert!(path.exists(), "{} is not built: run `cargo build --examples`", path.display());
    path
}

#[test]
fn numpy_gives_and_takes_tensors_through_dlpack() {
    let has_numpy = Command::new("python3").args(["-c", "import numpy; assert int(numpy.__version__.split('.')[0]) >= 2"]).output();
    if !has_numpy.is_ok_and(|output| output.status.success()) {
        println!("skipped: there is no python3 with numpy 2");
        return;
    }
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/interop/with_numpy.py");
    let output = Command::new("python3").arg(script).arg(library()).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("agrees"), "{}\n{out}\n{err}", output.status);
}
