//! Files whose names come from outside. They are opened without blocking, refused if they are pipes or devices, and
//! read up to a limit.
//!
//! Opening a named pipe waits for its other end, and reading a device may never end. Neither must block the program.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Opens a regular file for reading.
///
/// # Errors
///
/// The errors of the system, and `InvalidData` if `path` is not a regular file.
pub fn open(path: &Path) -> io::Result<File> {
    opened(path, OpenOptions::new().read(true)).map(|(file, _)| file)
}

/// Opens a regular file for writing. Creates the file if it does not exist, and truncates it if it does.
///
/// # Errors
///
/// The errors of [`open`].
pub fn create(path: &Path) -> io::Result<File> {
    // Truncated only once it is known to be a regular file.
    let (file, _) = opened(path, OpenOptions::new().write(true).create(true).truncate(false))?;
    file.set_len(0)?;
    Ok(file)
}

/// Reads a regular file of at most `most` bytes.
///
/// # Errors
///
/// The errors of [`open`], and `InvalidData` if the file has more than `most` bytes.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    whole(opened(path, OpenOptions::new().read(true))?, most)
}

/// Returns the bytes of an opened file, if they are no more than `most`.
pub(crate) fn whole((file, facts): (File, Metadata), most: u64) -> io::Result<Vec<u8>> {
    within(facts.len(), most)?;
    let mut bytes = Vec::new();
    // The file may grow while it is read.
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    within(bytes.len() as u64, most)?;
    Ok(bytes)
}

/// Opens with `options`, without waiting for the other end of a pipe.
pub(crate) fn opened(path: &Path, options: &mut OpenOptions) -> io::Result<(File, Metadata)> {
    checked(options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?)
}

/// Returns the file if it is a regular file.
fn checked(file: File) -> io::Result<(File, Metadata)> {
    let facts = file.metadata()?;
    if facts.is_file() { Ok((file, facts)) } else { Err(invalid(format!("this is {}, not a regular file", kind(&facts)))) }
}

fn within(bytes: u64, most: u64) -> io::Result<()> {
    if bytes <= most { Ok(()) } else { Err(invalid(format!("the file has at least {bytes} bytes, and the limit is {most}"))) }
}

fn kind(facts: &Metadata) -> &'static str {
    let kind = facts.file_type();
    match () {
        () if kind.is_dir() => "a folder",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    }
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pipe(folder: &Path) -> std::path::PathBuf {
        let path = folder.join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        path
    }

    #[test]
    fn pipes_devices_and_folders_are_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = pipe(folder.path());
        for (path, words) in [(&*pipe, "a pipe"), (Path::new("/dev/zero"), "a device"), (folder.path(), "a folder")] {
            for error in [open(path).map(drop), read(path, 9).map(drop)].map(Result::unwrap_err) {
                assert!(error.to_string().contains(words), "{error}");
            }
        }
        // First without a reader of the pipe, then with one.
        assert!(create(&pipe).is_err());
        let _reader = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&pipe).unwrap();
        assert!(create(&pipe).unwrap_err().to_string().contains("a pipe"));
    }

    #[test]
    fn no_more_is_read_than_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "four").unwrap();
        assert_eq!(read(&path, 4).unwrap(), b"four");
        assert!(read(&path, 3).unwrap_err().to_string().contains("the limit is 3"));
        // Its length is not known in advance.
        assert!(read(Path::new("/proc/self/status"), 3).is_err());
        drop(create(&path).unwrap());
        assert_eq!(read(&path, 0).unwrap(), b"");
    }
}
