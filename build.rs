//! Sets where the crate finds the images of the device's kernels (`kernels/compile.rs`).
//!
//! Sets `cfg(simgpu)` if the simulated GPU is present. Some of the library's tests need it; published packages omit it.
//!
//! With `COLLECTIVES_LOOM`, only the library's tests can be built, for the models of loom. The flag is set here, not in
//! `RUSTFLAGS`, which would compile every dependency again.

#[path = "kernels/compile.rs"]
mod compile;

use std::env;
use std::error::Error;
use std::path::PathBuf;

const SIMULATED_GPU: &str = "simgpu/Cargo.toml";
const LOOM: &str = "COLLECTIVES_LOOM";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-env-changed={LOOM}");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=kernels/compile.rs");
    if env::var_os(LOOM).is_some_and(|value| !value.is_empty()) {
        println!("cargo::rustc-cfg=loom");
    }
    if PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join(SIMULATED_GPU).exists() {
        println!("cargo::rustc-cfg=simgpu");
    }
    compile::say_where(&["bits", "average", "sum", "premul", "check"])
}
