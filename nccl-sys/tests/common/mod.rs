//! What the tests share: the NCCL releases they are made against, and a C compiler.

#![allow(dead_code, reason = "each test uses some of it")]

pub(crate) mod header;
#[macro_use]
pub(crate) mod release;

use std::path::{Path, PathBuf};
use std::process::Command;

use nccl_sys::Version;

/// The releases that tests look at: the oldest that the device backend supports, one in the middle, and the one that was bound.
pub(crate) const RELEASES: [Release; 3] = [
    Release { package: "nvidia-nccl-cu12", version: Version::new(2, 18, 3) },
    Release { package: "nvidia-nccl-cu13", version: Version::new(2, 28, 9) },
    NEWEST,
];
pub(crate) const NEWEST: Release = Release { package: "nvidia-nccl-cu13", version: Version::new(2, 32, 3) };

/// An NCCL release, as a Python wheel of hundreds of megabytes that `.ci/wheel` fetches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Release {
    pub(crate) package: &'static str,
    pub(crate) version: Version,
}

impl Release {
    /// The folder with `include` and `lib`. Where the wheel was not fetched, says so and how to.
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

/// A C compiler that finds what NCCL's headers want of CUDA's.
pub(crate) fn cc() -> Command {
    let mut cc = Command::new("cc");
    cc.arg("-I").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("generate/cuda")).args(["-DNCCL_OS_LINUX", "-Wno-deprecated-declarations"]);
    cc
}

/// Runs a command that must succeed, and gives what it printed.
pub(crate) fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Compiles a C program against `header`, runs it and gives what it printed.
pub(crate) fn run_c(header: &Path, source: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let (file, program) = (folder.path().join("program.c"), folder.path().join("program"));
    std::fs::write(&file, source).unwrap();
    output(cc().arg("-I").arg(header.parent().unwrap()).arg(&file).arg("-o").arg(&program));
    output(&mut Command::new(program))
}

/// A shared library made of C source, with a name of its own where one is given.
pub(crate) fn shared_object(file: &Path, soname: Option<&str>, source: &str) {
    let text = file.with_extension("c");
    std::fs::write(&text, source).unwrap();
    let soname = soname.map(|name| format!("-Wl,-soname,{name}"));
    output(cc().args(["-shared", "-fPIC"]).args(soname).arg(&text).arg("-o").arg(file));
    std::fs::remove_file(text).unwrap();
}
