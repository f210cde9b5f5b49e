//! Finds the simulated libraries and opens them under the names of the real ones.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

const CUDA: &str = "libfakecuda.so";
const MANAGEMENT: &str = "libfakenvml.so";
pub(crate) const NCCL: &str = "libfakenccl.so";

/// Cargo puts them beside the tests, which lie in `target/…/deps`; programs lie above, examples beside that.
pub(crate) fn path(name: &str) -> PathBuf {
    let program = std::env::current_exe().unwrap_or_else(|error| panic!("looking for {name}: where is this program? {error}"));
    let folders: Vec<PathBuf> = program.ancestors().skip(1).take(2).flat_map(|folder| [folder.into(), folder.join("deps")]).collect();
    let found = folders.iter().map(|folder| folder.join(name)).find(|path| path.exists());
    found.unwrap_or_else(|| panic!("{name} is in none of {folders:?}; the packages beside this one make it"))
}

/// Opens a library for good. It gives its own name as that of the real one, so every later look-up by that name ends here.
pub(crate) fn open(path: &Path) -> Library {
    // SAFETY: the libraries are of this workspace; they do nothing when opened.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.unwrap_or_else(|error| panic!("opening {}: {error}", path.display()))
}

pub(crate) fn cuda() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| open(&path(CUDA)))
}

/// Puts the simulated driver and the simulated NCCL in place for this process, or the real NCCL that the environment names
/// ([`crate::real`]). Calls after the first do nothing.
///
/// # Panics
///
/// If they were not built, or cannot be opened.
pub fn install() {
    match crate::real::nccl() {
        Some(real) => real.install(),
        None => {
            crate::nccl::library();
        }
    }
}

/// Puts only the driver in place: a machine that has no NCCL. What of NCCL the system has can then be found.
///
/// # Panics
///
/// As [`install`].
pub fn install_cuda_only() {
    cuda();
}

fn runtime_path(release: u32) -> PathBuf {
    path(&format!("libfakecudart{release}.so"))
}

/// Puts the simulated CUDA runtime of a release, 12 or 13, and the management library in place for this process. It is what a library that
/// was linked with `libcudart.so.12` or `.13` finds then. Calls after the first give the same library.
///
/// # Panics
///
/// If that of the other release is in place, or they were not built, or cannot be opened.
pub fn runtime(release: u32) -> &'static Library {
    static LIBRARY: OnceLock<(u32, Library)> = OnceLock::new();
    let (installed, library) = LIBRARY.get_or_init(|| {
        cuda();
        management();
        (release, open(&runtime_path(release)))
    });
    assert_eq!(*installed, release, "the runtime of release {installed} is in place in this process, so that of {release} cannot be");
    library
}

/// Puts the simulated management library, `libnvidia-ml.so.1`, in place for this process.
///
/// # Panics
///
/// If it was not built, or cannot be opened.
pub fn management() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    cuda();
    LIBRARY.get_or_init(|| open(&path(MANAGEMENT)))
}

/// The value of `LD_PRELOAD` with which a child process has the simulated driver, runtime and management library from its start, but no
/// NCCL: a real one can then be used.
///
/// # Panics
///
/// If the libraries were not built.
pub fn preload_runtime(release: u32) -> OsString {
    let mut paths = path(CUDA).into_os_string();
    for library in [runtime_path(release), path(MANAGEMENT)] {
        paths.push(":");
        paths.push(library);
    }
    paths
}

/// What a child process needs in its environment to have what [`install`] puts in place from its start.
///
/// # Panics
///
/// As [`install`].
pub fn environment() -> Vec<(&'static str, OsString)> {
    if let Some(real) = crate::real::nccl() {
        return real.environment();
    }
    let mut paths = path(CUDA).into_os_string();
    paths.push(":");
    paths.push(path(NCCL));
    vec![("LD_PRELOAD", paths)]
}
