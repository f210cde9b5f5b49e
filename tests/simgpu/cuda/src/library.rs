//! Code of libraries that know nothing of this simulation, such as NVIDIA's NCCL. It is run less strictly than kernels of ours: registers
//! that are read before they are set hold zero, and a kernel may spin for what others write for as long as it takes, since nothing ends a
//! kernel on a GPU either. Bounds and alignment of its accesses are checked all the same.
//!
//! It is linked once per process, however many devices load it.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use simgpu_ptx::{Limits, Module, Options, Unset};

use crate::code::Code;

/// How long a kernel may run, and how its threads take turns.
pub(crate) fn limits() -> Limits {
    Limits { patience: Duration::MAX, ..Limits::default() }
}

/// The module that all files with PTX make up together. `names` has them with colons between; a folder stands for all in it that end in
/// `.ptx`. What is wrong comes in words.
pub(crate) fn module(names: &[u8]) -> Result<Module, (Code, String)> {
    static LINKED: Mutex<Option<HashMap<Vec<u8>, Module>>> = Mutex::new(None);
    let mut linked = LINKED.lock().unwrap_or_else(PoisonError::into_inner);
    let linked = linked.get_or_insert_default();
    if let Some(module) = linked.get(names) {
        return Ok(module.clone());
    }
    let module = link(&files(names)?)?;
    linked.insert(names.to_vec(), module.clone());
    Ok(module)
}

fn files(names: &[u8]) -> Result<Vec<PathBuf>, (Code, String)> {
    let mut files = Vec::new();
    for name in names.split(|&byte| byte == b':').filter(|name| !name.is_empty()) {
        let path = Path::new(OsStr::from_bytes(name));
        if !path.is_dir() {
            files.push(path.to_owned());
            continue;
        }
        let entries = std::fs::read_dir(path).map_err(|error| missing(path, &error))?;
        let mut inside: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        inside.retain(|path| path.extension().is_some_and(|extension| extension == "ptx"));
        inside.sort();
        files.append(&mut inside);
    }
    Ok(files)
}

fn link(files: &[PathBuf]) -> Result<Module, (Code, String)> {
    let read = |path: &PathBuf| std::fs::read_to_string(path).map_err(|error| missing(path, &error));
    let texts = files.iter().map(read).collect::<Result<Vec<String>, _>>()?;
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    Module::link(&texts, Options { unset: Unset::Holds(0), late: true })
        .map_err(|error| (Code::INVALID_PTX, format!("{}: {error}", files[error.text].display())))
}

fn missing(path: &Path, error: &std::io::Error) -> (Code, String) {
    (Code::FILE_NOT_FOUND, format!("{} cannot be read: {error}", path.display()))
}
