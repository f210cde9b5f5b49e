//! Runs a real NCCL in place of the simulated one, on the simulated driver: its host code as built, its kernels from
//! their PTX.
//!
//! `COLLECTIVES_TEST_NCCL` names the library. `COLLECTIVES_TEST_NCCL_KERNELS` names the files with the PTX of its
//! kernels, or folders of such files, separated by colons. The library must use the CUDA runtime as a shared library: a
//! built-in runtime asks the driver for tables that only NVIDIA's driver has. Nothing can be planted in a real NCCL, so
//! tests that plant something are skipped ([`nccl`] returns the real one, if any).
//!
//! Some settings are needed on the simulation, or save time. Each of these settings applies unless the environment sets
//! it:
//!
//! - `NCCL_MAX_CTAS=1`: a kernel of one block, because more blocks only make the interpreter slower.
//! - `NCCL_PROTO=^LL128`: that protocol needs all threads of a warp to store at once.
//! - `NCCL_NET=Socket`, `NCCL_IB_DISABLE=1`, `NCCL_SOCKET_IFNAME=lo`: all ranks are on this host.
//!
//! `NCCL_P2P_DISABLE` and `NCCL_SHM_DISABLE` choose the transport as usual: memory of the other process, shared
//! memory, or a network.

use std::env;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::Library;

use crate::library;

/// The variable that names the library.
const LIBRARY: &str = "COLLECTIVES_TEST_NCCL";
/// The variable that names the PTX of its kernels.
const KERNELS: &str = "COLLECTIVES_TEST_NCCL_KERNELS";
/// The variable in which the simulated runtime looks for PTX.
const RUNTIME_KERNELS: &str = "SIMGPU_KERNELS";

const SETTINGS: [(&str, &str); 5] =
    [("NCCL_MAX_CTAS", "1"), ("NCCL_PROTO", "^LL128"), ("NCCL_NET", "Socket"), ("NCCL_IB_DISABLE", "1"), ("NCCL_SOCKET_IFNAME", "lo")];

/// A real NCCL that the environment names.
#[derive(Debug)]
pub struct RealNccl {
    path: PathBuf,
    kernels: OsString,
    /// The release of the CUDA runtime that it uses.
    release: u32,
}

/// Returns the real NCCL that replaces the simulated one, or `None` if the environment names none.
///
/// # Panics
///
/// If the named library cannot be used here.
pub fn nccl() -> Option<&'static RealNccl> {
    static NAMED: OnceLock<Option<RealNccl>> = OnceLock::new();
    let named = || {
        let path = PathBuf::from(env::var_os(LIBRARY).filter(|path| !path.is_empty())?);
        let kernels =
            env::var_os(KERNELS).unwrap_or_else(|| panic!("{LIBRARY} names {}, but {KERNELS} no PTX of its kernels", path.display()));
        let needed = needed(&path).unwrap_or_else(|error| panic!("{}, which {LIBRARY} names, cannot be read: {error}", path.display()));
        let release = runtime_release(&needed).unwrap_or_else(|| {
            panic!("{} takes no CUDA runtime of release 12 or 13 as a shared library, but {needed:?}: it cannot run here", path.display())
        });
        Some(RealNccl { path, kernels, release })
    };
    NAMED.get_or_init(named).as_ref()
}

impl RealNccl {
    /// Installs the library for this process, with the runtime that it uses.
    pub(crate) fn install(&self) {
        static OPENED: OnceLock<Library> = OnceLock::new();
        OPENED.get_or_init(|| {
            for (name, value) in self.settings() {
                // SAFETY: the standard library keeps its own readers of the environment apart from this. The only C
                // code that reads the environment is NCCL and the libraries that it loads. They are opened once, after
                // this.
                unsafe { env::set_var(name, value) };
            }
            library::runtime(self.release);
            library::open(&self.path)
        });
    }

    /// Returns the environment variables that give a child process this library from its start.
    pub(crate) fn environment(&self) -> Vec<(&'static str, OsString)> {
        let mut preload = library::preload_runtime(self.release);
        preload.push(":");
        preload.push(&self.path);
        let mut all = self.settings();
        all.push(("LD_PRELOAD", preload));
        all
    }

    fn settings(&self) -> Vec<(&'static str, OsString)> {
        let unset = SETTINGS.iter().filter(|(name, _)| env::var_os(name).is_none());
        unset.map(|&(name, value)| (name, value.into())).chain([(RUNTIME_KERNELS, self.kernels.clone())]).collect()
    }
}

fn runtime_release(needed: &[String]) -> Option<u32> {
    needed.iter().find_map(|name| name.strip_prefix("libcudart.so.")?.parse().ok()).filter(|release| [12, 13].contains(release))
}

/// Returns the names of the shared libraries that this one needs (`DT_NEEDED`).
fn needed(path: &Path) -> io::Result<Vec<String>> {
    let file = std::fs::read(path)?;
    needed_of(&file).ok_or_else(|| io::Error::other("it is no shared library of a 64-bit little-endian machine"))
}

/// Reads a number of 2, 4 or 8 bytes in a file, `offset` bytes after `start`.
fn number(file: &[u8], start: usize, offset: usize, bytes: usize) -> Option<usize> {
    let (mut all, at) = ([0; 8], start.checked_add(offset)?);
    all[..bytes].copy_from_slice(file.get(at..at.checked_add(bytes)?)?);
    usize::try_from(u64::from_le_bytes(all)).ok()
}

fn needed_of(file: &[u8]) -> Option<Vec<String>> {
    const LOAD: usize = 1;
    const DYNAMIC: usize = 2;
    const NULL: usize = 0;
    const NEEDED: usize = 1;
    const STRINGS: usize = 5;
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (table, size, count) = (number(file, 0, 32, 8)?, number(file, 0, 54, 2)?, number(file, 0, 56, 2)?);
    // Kind, offset in the file, address, size in the file.
    let segment = |index: usize| {
        let at = table.checked_add(size * index)?;
        Some([number(file, at, 0, 4)?, number(file, at, 8, 8)?, number(file, at, 16, 8)?, number(file, at, 32, 8)?])
    };
    let segments = (0..count).map(segment).collect::<Option<Vec<_>>>()?;
    let [_, place, _, bytes] = *segments.iter().find(|[kind, ..]| *kind == DYNAMIC)?;
    let entry = |index: usize| Some((number(file, place, 16 * index, 8)?, number(file, place, 16 * index + 8, 8)?));
    let entries = (0..bytes / 16).map_while(entry).take_while(|(tag, _)| *tag != NULL).collect::<Vec<_>>();
    let address = entries.iter().find(|(tag, _)| *tag == STRINGS)?.1;
    let holds = |[kind, _, start, bytes]: &&[usize; 4]| *kind == LOAD && address.checked_sub(*start).is_some_and(|offset| offset < *bytes);
    let [_, in_file, start, _] = *segments.iter().find(holds)?;
    let strings = in_file.checked_add(address - start)?;
    let name = |offset: usize| {
        let rest = file.get(strings.checked_add(offset)?..)?;
        Some(String::from_utf8_lossy(rest.split(|&byte| byte == 0).next()?).into_owned())
    };
    entries.iter().filter(|(tag, _)| *tag == NEEDED).map(|&(_, offset)| name(offset)).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn a_library_says_what_it_takes() {
        let needed = needed(Path::new("/proc/self/exe")).unwrap();
        assert!(needed.iter().any(|name| name == "libc.so.6"), "{needed:?}");
        assert_eq!(runtime_release(&needed), None);
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<String>>();
        assert_eq!(runtime_release(&names(&["libc.so.6", "libcudart.so.13"])), Some(13));
        assert_eq!(runtime_release(&names(&["libcudart.so.11.0", "libcudart.so"])), None);
    }

    #[test]
    fn what_is_torn_is_no_library() {
        let whole = std::fs::read("/proc/self/exe").unwrap();
        assert!(needed_of(&whole).is_some());
        for length in (0..4096).chain([whole.len() / 2]) {
            // It must not panic; the part that is left may suffice.
            needed_of(&whole[..length]);
        }
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..2000 {
            let mut torn = whole[..whole.len().min(1 << 16)].to_vec();
            for _ in 0..4 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let at = (random >> 40) as usize % 1024;
                torn[at] = (random >> 32) as u8;
            }
            needed_of(&torn);
        }
        assert!(needed(Path::new("/nonexistent")).is_err());
    }
}
