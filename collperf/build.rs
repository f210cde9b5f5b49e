//! Says whether the simulated GPU is there (`cfg(simgpu)`), which a test runs on: a published package leaves it out.

use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/simgpu/Cargo.toml").exists() {
        println!("cargo::rustc-cfg=simgpu");
    }
}
