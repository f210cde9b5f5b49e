//! The file to which a process writes its join address. A launcher reads the file, and passes the address to a process
//! that is to join the job.

use std::ffi::OsString;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use crate::error::{Error, Result};

/// Writes the address and a line feed. A reader sees either the whole line or no file, because the file is renamed.
pub(super) fn write(path: &Path, address: SocketAddr) -> Result<()> {
    let mut name = OsString::from(path);
    name.push(format!(".{}", std::process::id()));
    let unfinished = Path::new(&name);
    let written = fs::write(unfinished, format!("{address}\n")).and_then(|()| fs::rename(unfinished, path));
    written.map_err(|error| {
        // The folder may be gone, or this process may not write to it.
        let _ = fs::remove_file(unfinished);
        Error::io(format!("writing this rank's join address to COLLECTIVES_JOIN_FILE={:?}", path.display().to_string()), error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_the_last_address_and_no_other_file_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("join address");
        for address in ["127.0.0.1:80", "[::1]:81"] {
            write(&path, address.parse().unwrap()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), format!("{address}\n"));
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path().join("absent/file"), folder.path().to_owned()] {
            let error = write(&path, "127.0.0.1:80".parse().unwrap()).unwrap_err();
            assert!(error.to_string().contains(&path.display().to_string()), "{error}");
        }
    }
}
