//! Says where the images of the device's kernels are (`kernels/compile.rs`).
//!
//! Says whether the simulated GPU is there (`cfg(simgpu)`), which some of the library's tests run on: a published package leaves it out.
//!
//! With `COLLECTIVES_LOOM` the library's tests are built for its models, and nothing else can be. The flag is set here, not in
//! `RUSTFLAGS`, which would have every dependency compiled once more.

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
