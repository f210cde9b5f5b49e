//! Says whether the simulated GPU is there (`cfg(simgpu)`), which a test runs on: a published package leaves it out.

use std::path::PathBuf;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Asked when it runs: what was compiled in one folder may run for another that shares its target directory.
    let folder = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    if folder.is_some_and(|folder| folder.join("../simgpu/Cargo.toml").exists()) {
        println!("cargo::rustc-cfg=simgpu");
    }
}
