//! Sets where the crate finds its kernel images. By default these are the committed ones, which need no compiler. If
//! `COLLECTIVES_NVCC` names a compiler, the build compiles the sources with it, and fails if that fails.
//!
//! Build scripts of packages with kernels include this file.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The suffixes of the images' names, and the architectures that they are for.
const TARGETS: [(&str, &str); 2] = [("sm70", "compute_70"), ("sm80", "compute_80")];
const NVCC: &str = "COLLECTIVES_NVCC";

/// Passes the folder with the images of these families to the crate.
pub(super) fn say_where(families: &[&str]) -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-env-changed={NVCC}");
    let sources = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("kernels");
    let images = match env::var_os(NVCC) {
        Some(nvcc) if !nvcc.is_empty() => {
            println!("cargo::rerun-if-changed=kernels");
            compile_all(Path::new(&nvcc), &sources, families)?
        }
        _ => sources.join("ptx"),
    };
    println!("cargo::rustc-env=COLLECTIVES_KERNELS={}", images.display());
    Ok(())
}

/// Compiles every family for both targets, and returns the folder with the images.
fn compile_all(nvcc: &Path, sources: &Path, families: &[&str]) -> Result<PathBuf, Box<dyn Error>> {
    let images = Path::new(&env::var("OUT_DIR")?).join("kernels");
    fs::create_dir_all(&images)?;
    let known = run(Command::new(nvcc).arg("--list-gpu-arch"))?;
    for (suffix, wanted) in TARGETS {
        // From 13.0 on, nvcc starts at 7.5. A device refuses images for newer architectures, with an error.
        let architecture =
            if known.lines().any(|line| line.trim() == wanted) { wanted } else { known.lines().next().unwrap_or(wanted).trim() };
        for family in families {
            let image = images.join(format!("{family}_{suffix}.ptx"));
            let source = sources.join(format!("{family}.cu"));
            // A product and a sum are rounded separately, so that the results are those of the processor, bit for bit.
            let mut command = Command::new(nvcc);
            command.args(["-ptx", "-std=c++17", "--fmad=false", "-arch", architecture, "-o"]).args([&image, &source]);
            run(&mut command)?;
        }
    }
    Ok(images)
}

/// Runs a command and returns what it prints.
fn run(command: &mut Command) -> Result<String, Box<dyn Error>> {
    let done = command.output().map_err(|error| format!("{command:?}: {error}; {NVCC} must name the CUDA compiler, or be unset"))?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        return Err(format!("{command:?}: {}\n{said}\nunset {NVCC} to use the committed images", done.status).into());
    }
    Ok(String::from_utf8(done.stdout)?)
}
