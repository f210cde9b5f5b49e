//! Says where the images of the device's kernels are (`kernels/compile.rs`).
//!
//! Says whether the simulated GPU is there (`cfg(simgpu)`), which some of the library's tests run on: a published package leaves it out.

#[path = "kernels/compile.rs"]
mod compile;

use std::env;
use std::error::Error;
use std::path::PathBuf;

const SIMULATED_GPU: &str = "../simgpu/Cargo.toml";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=kernels/compile.rs");
    if PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join(SIMULATED_GPU).exists() {
        println!("cargo::rustc-cfg=simgpu");
    }
    compile::say_where(&["train"])
}
