//! Code of libraries that know nothing of this simulation, such as NVIDIA's NCCL. It runs less strictly than our
//! kernels: registers that are read before they are set hold zero, and a kernel may spin for any time, since a GPU
//! ends no kernel either. Bounds and alignment of its accesses are still checked.
//!
//! It is linked once per process, for all devices that load it. Of a hundred megabytes of PTX, linking reads one: the
//! outlines, which are cached in a file for later processes ([`crate::outlines`]). The body of a function is read from
//! its text at its first call.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use simgpu_ptx::{Limits, Module, Texts, Unset};

use crate::code::Code;
use crate::outlines;

/// Steps of a thread before the next thread's turn. If all threads of a block spin, this many steps per thread pass
/// before one sees that it can stop.
const TURN: u64 = 250;

/// Returns how long a kernel may run, and how its threads take turns.
pub(crate) fn limits() -> Limits {
    Limits { patience: Duration::MAX, turn: TURN, ..Limits::default() }
}

/// Returns the module that all files with PTX form together. `names` separates them with colons; a folder stands for
/// all its files that end in `.ptx`. Errors come with a text.
pub(crate) fn module(names: &[u8]) -> Result<Module, (Code, String)> {
    static LINKED: Mutex<Option<HashMap<Vec<u8>, Module>>> = Mutex::new(None);
    let mut linked = LINKED.lock().unwrap_or_else(PoisonError::into_inner);
    let linked = linked.get_or_insert_default();
    if let Some(module) = linked.get(names) {
        return Ok(module.clone());
    }
    let files = files(names).map_err(|why| (Code::FILE_NOT_FOUND, why))?;
    let module = link(&files)?;
    linked.insert(names.to_vec(), module.clone());
    Ok(module)
}

fn files(names: &[u8]) -> Result<Vec<PathBuf>, String> {
    let mut files = Vec::new();
    for name in names.split(|&byte| byte == b':').filter(|name| !name.is_empty()) {
        let path = Path::new(OsStr::from_bytes(name));
        if !path.is_dir() {
            files.push(path.to_owned());
            continue;
        }
        let entries = std::fs::read_dir(path).map_err(|error| unread(path, &error))?;
        let mut inside: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        inside.retain(|path| path.extension().is_some_and(|extension| extension == "ptx"));
        inside.sort();
        files.append(&mut inside);
    }
    Ok(files)
}

fn link(files: &[PathBuf]) -> Result<Module, (Code, String)> {
    let wrong = |error: simgpu_ptx::ParseError| (Code::INVALID_PTX, format!("{}: {error}", files[error.text].display()));
    let (outlines, opened) = outlines::of(files).map_err(|error| match error {
        outlines::Error::Unread(why) => (Code::FILE_NOT_FOUND, why),
        outlines::Error::Wrong(error) => wrong(error),
    })?;
    let outlines: Vec<&str> = outlines.iter().map(String::as_str).collect();
    Module::link_outlines(&outlines, Unset::Holds(0), Box::new(Opened(opened))).map_err(wrong)
}

pub(crate) fn unread(path: &Path, error: &std::io::Error) -> String {
    format!("{} cannot be read: {error}", path.display())
}

/// The open files with the texts.
struct Opened(Vec<File>);

impl Texts for Opened {
    fn part(&self, text: usize, place: Range<usize>) -> Result<String, String> {
        let file = self.0.get(text).ok_or("there is no such file")?;
        let mut bytes = vec![0; place.len()];
        file.read_exact_at(&mut bytes, place.start as u64).map_err(|error| error.to_string())?;
        String::from_utf8(bytes).map_err(|error| error.to_string())
    }
}
