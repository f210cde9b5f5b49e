//! Says where the images of the device's kernels are: the committed ones, which need no compiler, or, where `COLLECTIVES_NVCC`
//! names one, those that it makes of `kernels/`. A compiler that fails fails the build: there is no silent way back.
//!
//! Says whether the simulated GPU is there (`cfg(simgpu)`), which some of the library's tests run on: a published package leaves it out.
//!
//! With `COLLECTIVES_LOOM` the library's tests are built for its models, and nothing else can be. The flag is set here, not in
//! `RUSTFLAGS`, which would have every dependency compiled once more.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

const FAMILIES: [&str; 6] = ["bits", "average", "sum", "premul", "train", "check"];
/// The ends of the images' names, and the architectures that they are for.
const TARGETS: [(&str, &str); 2] = [("sm70", "compute_70"), ("sm80", "compute_80")];
const SIMULATED_GPU: &str = "simgpu/Cargo.toml";
const NVCC: &str = "COLLECTIVES_NVCC";
const LOOM: &str = "COLLECTIVES_LOOM";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-env-changed={NVCC}");
    println!("cargo::rerun-if-env-changed={LOOM}");
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os(LOOM).is_some_and(|value| !value.is_empty()) {
        println!("cargo::rustc-cfg=loom");
    }
    let package = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    if package.join(SIMULATED_GPU).exists() {
        println!("cargo::rustc-cfg=simgpu");
    }
    let sources = package.join("kernels");
    let images = match env::var_os(NVCC) {
        Some(nvcc) if !nvcc.is_empty() => {
            println!("cargo::rerun-if-changed=kernels");
            compile_all(Path::new(&nvcc), &sources)?
        }
        _ => sources.join("ptx"),
    };
    println!("cargo::rustc-env=COLLECTIVES_KERNELS={}", images.display());
    Ok(())
}

/// Compiles every family for both targets; the folder with the images.
fn compile_all(nvcc: &Path, sources: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let images = Path::new(&env::var("OUT_DIR")?).join("kernels");
    fs::create_dir_all(&images)?;
    let known = run(Command::new(nvcc).arg("--list-gpu-arch"))?;
    for (suffix, wanted) in TARGETS {
        // From 13.0 on, nvcc begins at 7.5. The device loads no image for a newer one than it is, and says so.
        let architecture =
            if known.lines().any(|line| line.trim() == wanted) { wanted } else { known.lines().next().unwrap_or(wanted).trim() };
        for family in FAMILIES {
            let image = images.join(format!("{family}_{suffix}.ptx"));
            let source = sources.join(format!("{family}.cu"));
            // A product and a sum must not become one rounding: the results are those of the processor, bit for bit.
            let mut command = Command::new(nvcc);
            command.args(["-ptx", "-std=c++17", "--fmad=false", "-arch", architecture, "-o"]).args([&image, &source]);
            run(&mut command)?;
        }
    }
    Ok(images)
}

/// What a command prints.
fn run(command: &mut Command) -> Result<String, Box<dyn Error>> {
    let done = command.output().map_err(|error| format!("{command:?}: {error}; {NVCC} must name the CUDA compiler, or be unset"))?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        return Err(format!("{command:?}: {}\n{said}\nunset {NVCC} to use the committed images", done.status).into());
    }
    Ok(String::from_utf8(done.stdout)?)
}
