//! Finds the simulated libraries and opens them under the names of the real ones.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

const CUDA: &str = "libfakecuda.so";
const MANAGEMENT: &str = "libfakenvml.so";
pub(crate) const NCCL: &str = "libfakenccl.so";

/// Returns the path of a library. Cargo puts them beside the tests, which lie in `target/…/deps`. Programs lie in the
/// folder above, and examples in a folder beside `deps`.
pub(crate) fn path(name: &str) -> PathBuf {
    let program = std::env::current_exe().unwrap_or_else(|error| panic!("looking for {name}: where is this program? {error}"));
    let folders: Vec<PathBuf> = program.ancestors().skip(1).take(2).flat_map(|folder| [folder.into(), folder.join("deps")]).collect();
    let found = folders.iter().map(|folder| folder.join(name)).find(|path| path.exists());
    found.unwrap_or_else(|| panic!("{name} is in none of {folders:?}; the packages beside this one make it"))
}

/// Opens a library permanently. It carries the name of the real one, so every later look-up by that name finds it.
pub(crate) fn open(path: &Path) -> Library {
    // SAFETY: the libraries belong to this workspace; they do nothing when opened.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.unwrap_or_else(|error| panic!("opening {}: {error}", path.display()))
}

pub(crate) fn cuda() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| open(&cuda_path()))
}

/// The functions of the simulated driver that drivers of CUDA 12.0 lack.
const SINCE_12_0: [&str; 7] = [
    "cuCtxCreate_v4",
    "cuCtxSetFlags",
    "cuEventElapsedTime_v2",
    "cuGraphAddDependencies_v2",
    "cuStreamGetCaptureInfo_v3",
    "cuStreamGetDevice",
    "cuStreamUpdateCaptureDependencies_v2",
];

/// Returns the path of the driver. With `SIMGPU_DRIVER=12.0` it is a copy that lacks what CUDA 12.0 did not have yet.
fn cuda_path() -> PathBuf {
    let newest = path(CUDA);
    match std::env::var("SIMGPU_DRIVER").as_deref() {
        Err(_) => newest,
        Ok("12.0") => {
            static COPY: OnceLock<PathBuf> = OnceLock::new();
            COPY.get_or_init(|| without(&newest, &SINCE_12_0)).clone()
        }
        Ok(other) => panic!("SIMGPU_DRIVER is {other:?}: it must be 12.0 or not set"),
    }
}

/// Makes a copy of a library in which these names lead nowhere: each gets another first letter in the table of names.
fn without(library: &Path, names: &[&str]) -> PathBuf {
    let mut bytes = std::fs::read(library).unwrap_or_else(|error| panic!("reading {}: {error}", library.display()));
    for name in names {
        let entry = [b"\0", name.as_bytes(), b"\0"].concat();
        let places: Vec<usize> = bytes.windows(entry.len()).enumerate().filter(|(_, part)| *part == entry).map(|(at, _)| at).collect();
        assert!(!places.is_empty(), "{} has no {name}", library.display());
        places.into_iter().for_each(|at| bytes[at + 1] = b'_');
    }
    let copy = library.with_file_name(format!("libfakecuda-12.0-{}.so", std::process::id()));
    std::fs::write(&copy, bytes).unwrap_or_else(|error| panic!("writing {}: {error}", copy.display()));
    let place = library.with_file_name("libfakecuda-12.0.so");
    // Another process may have made the same copy.
    std::fs::rename(&copy, &place).unwrap_or_else(|error| panic!("writing {}: {error}", place.display()));
    place
}

/// Installs the simulated driver and the simulated NCCL for this process, or the real NCCL that the environment names
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

/// Installs only the driver, as on a machine without NCCL. An NCCL that the system has can then be found.
///
/// # Panics
///
/// In the same cases as [`install`].
pub fn install_cuda_only() {
    cuda();
}

fn runtime_path(release: u32) -> PathBuf {
    path(&format!("libfakecudart{release}.so"))
}

/// Installs the simulated CUDA runtime of a release, 12 or 13, and the management library for this process. A library
/// that was linked with `libcudart.so.12` or `.13` then finds them. Calls after the first return the same library.
///
/// # Panics
///
/// If the runtime of the other release is installed, or the libraries were not built or cannot be opened.
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

/// Installs the simulated management library, `libnvidia-ml.so.1`, for this process.
///
/// # Panics
///
/// If it was not built, or cannot be opened.
pub fn management() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    cuda();
    LIBRARY.get_or_init(|| open(&path(MANAGEMENT)))
}

/// Returns the value of `LD_PRELOAD` that gives a child process the simulated driver, runtime and management library
/// from its start. It includes no NCCL, so a real one can be used.
///
/// # Panics
///
/// If the libraries were not built.
pub fn preload_runtime(release: u32) -> OsString {
    let mut paths = cuda_path().into_os_string();
    for library in [runtime_path(release), path(MANAGEMENT)] {
        paths.push(":");
        paths.push(library);
    }
    paths
}

/// Returns the environment variables that give a child process, from its start, what [`install`] installs.
///
/// # Panics
///
/// In the same cases as [`install`].
pub fn environment() -> Vec<(&'static str, OsString)> {
    if let Some(real) = crate::real::nccl() {
        return real.environment();
    }
    let mut paths = cuda_path().into_os_string();
    paths.push(":");
    paths.push(path(NCCL));
    vec![("LD_PRELOAD", paths)]
}
