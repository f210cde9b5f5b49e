//! Shared code of the tests: the NCCL releases that they use, and a C compiler.

#![allow(dead_code, reason = "each test uses some of it")]

pub(crate) mod header;
#[macro_use]
pub(crate) mod release;

use std::path::{Path, PathBuf};
use std::process::Command;

use nccl_sys::Version;

/// The tested releases: the oldest that the device backend supports, one in the middle, and the one of the bindings.
pub(crate) const RELEASES: [Release; 3] = [
    Release { package: "nvidia-nccl-cu12", version: Version::new(2, 18, 3) },
    Release { package: "nvidia-nccl-cu13", version: Version::new(2, 28, 9) },
    NEWEST,
];
pub(crate) const NEWEST: Release = Release { package: "nvidia-nccl-cu13", version: Version::new(2, 32, 3) };

/// An NCCL release, as a Python wheel of hundreds of megabytes, which `.ci/wheel` fetches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Release {
    pub(crate) package: &'static str,
    pub(crate) version: Version,
}

impl Release {
    /// Returns the folder with `include` and `lib`. If the wheel was not fetched, prints how to fetch it.
    pub(crate) fn folder(self) -> Option<PathBuf> {
        let wheel = root().join(format!("target/wheels/{}-{}", self.package, self.version));
        if !wheel.join(".complete").exists() {
            eprintln!("skipped: no NCCL {} here; `.ci/wheel {} {}` fetches it", self.version, self.package, self.version);
            return None;
        }
        Some(wheel.join("nvidia/nccl"))
    }

    pub(crate) fn header(self) -> Option<PathBuf> {
        self.folder().map(|folder| folder.join("include/nccl.h"))
    }

    pub(crate) fn library(self) -> Option<PathBuf> {
        self.folder().map(|folder| folder.join("lib/libnccl.so.2"))
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Returns a C compiler command that finds the parts of CUDA's headers that NCCL's need.
pub(crate) fn cc() -> Command {
    let mut cc = Command::new("cc");
    cc.arg("-I").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("generate/cuda")).args(["-DNCCL_OS_LINUX", "-Wno-deprecated-declarations"]);
    cc
}

/// Runs a command that must succeed, and returns its output.
pub(crate) fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Compiles a C program against `header`, runs it, and returns its output.
pub(crate) fn run_c(header: &Path, source: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let (file, program) = (folder.path().join("program.c"), folder.path().join("program"));
    std::fs::write(&file, source).unwrap();
    output(cc().arg("-I").arg(header.parent().unwrap()).arg(&file).arg("-o").arg(&program));
    output(&mut Command::new(program))
}

/// Compiles C source to a shared library, with its own `soname` if one is given.
pub(crate) fn shared_object(file: &Path, soname: Option<&str>, source: &str) {
    let text = file.with_extension("c");
    std::fs::write(&text, source).unwrap();
    let soname = soname.map(|name| format!("-Wl,-soname,{name}"));
    output(cc().args(["-shared", "-fPIC"]).args(soname).arg(&text).arg("-o").arg(file));
    std::fs::remove_file(text).unwrap();
}
