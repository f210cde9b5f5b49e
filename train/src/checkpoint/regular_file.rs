//! Reads files whose names come from outside: opens them without waiting for the other end of a pipe, refuses them if
//! they are not regular files, and limits the bytes that are read.

use std::fs::{File, Metadata};
use std::io::{self, ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;

use rustix::fs::{Mode, OFlags};
use rustix::path::Arg;

/// Opens a regular file of a folder for reading, whatever the folder's present name.
pub(super) fn open_in(folder: impl AsFd, name: impl Arg) -> io::Result<(File, Metadata)> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::from(rustix::fs::openat(folder, name, flags, Mode::empty())?);
    let facts = file.metadata()?;
    if facts.is_file() { Ok((file, facts)) } else { Err(invalid(format!("this is {}, not a regular file", kind(&facts)))) }
}

/// Returns the bytes of an opened file, if they are no more than `most`.
pub(super) fn whole((file, facts): (File, Metadata), most: u64) -> io::Result<Vec<u8>> {
    within(facts.len(), most)?;
    let mut bytes = Vec::new();
    // The file may grow while it is read.
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    within(bytes.len() as u64, most)?;
    Ok(bytes)
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
