//! PyTorch tensors are passed to a library built on this crate and returned, through DLPack.

use crate::peer::{Peer, example};
use crate::python;

#[test]
fn torch_gives_and_takes_tensors_through_dlpack() {
    let python = python!();
    let library = example("libtensor_library.so");
    let printed = Peer::start(&mut python.script("dlpack.py", &[library.to_str().unwrap()])).finish();
    assert!(printed.contains("agrees"), "{printed}");
}
