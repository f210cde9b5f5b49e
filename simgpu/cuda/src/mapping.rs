//! Pages of the host that represent memory of a device, between two inaccessible pages.
//!
//! Memory that other processes may open lies in a file without a name. Its owner holds a descriptor of it as long as
//! the memory lives, and others open it through `/proc`. So nothing is left when a process is killed, freed memory
//! cannot be opened any more, and memory opened before that stays intact for those that opened it.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;

use crate::code::{Code, Outcome};

/// The byte that fills fresh memory.
pub(crate) const FRESH: u8 = 0xA5;
/// The byte that fills freed memory.
pub(crate) const DEAD: u8 = 0xDD;
const TAIL: u8 = 0xC3;
const PAGE: usize = 4096;

/// The location of a mapping's file, and its identity.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    pub(crate) process: u32,
    descriptor: u32,
    file_system: u64,
    number: u64,
}

impl Identity {
    fn of(file: &File, process: u32, descriptor: u32) -> Option<Identity> {
        let about = file.metadata().ok()?;
        Some(Identity { process, descriptor, file_system: about.dev(), number: about.ino() })
    }

    /// Whether both are the same file, whichever process opened it.
    pub(crate) fn same(&self, other: &Identity) -> bool {
        (self.file_system, self.number) == (other.file_system, other.number)
    }
}

#[derive(Debug)]
pub(crate) struct Mapping {
    base: usize,
    /// Bytes of the accessible pages.
    length: usize,
    /// Bytes of those that were requested.
    bytes: usize,
    /// The file behind the pages, if other processes may open it or one of them made it.
    file: Option<File>,
    buried: bool,
}

impl Mapping {
    /// Makes fresh pages that only this process sees.
    pub(crate) fn private(bytes: usize) -> Outcome<Mapping> {
        let mapping = Mapping::reserve(bytes)?;
        mapping.place(None)?;
        mapping.freshen();
        Ok(mapping)
    }

    /// Makes fresh pages that other processes may open.
    pub(crate) fn shared(bytes: usize) -> Outcome<Mapping> {
        let mut mapping = Mapping::reserve(bytes)?;
        // SAFETY: the name ends with a NUL; the call returns a descriptor that no other code has, or an error.
        let descriptor = unsafe { libc::memfd_create(c"simgpu".as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(Code::OUT_OF_MEMORY);
        }
        // SAFETY: the descriptor was just made, so no other code closes it.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len(mapping.length as u64).map_err(|_| Code::OUT_OF_MEMORY)?;
        mapping.place(Some(&file))?;
        mapping.file = Some(file);
        mapping.freshen();
        Ok(mapping)
    }

    /// Opens the pages of another process, if they still are those that `identity` names.
    pub(crate) fn open(identity: Identity, bytes: usize) -> Outcome<Mapping> {
        let mut mapping = Mapping::reserve(bytes)?;
        let path = format!("/proc/{}/fd/{}", identity.process, identity.descriptor);
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|_| Code::INVALID_HANDLE)?;
        let found = Identity::of(&file, identity.process, identity.descriptor).ok_or(Code::INVALID_HANDLE)?;
        let length = file.metadata().map_err(|_| Code::INVALID_HANDLE)?.len();
        // The descriptor may refer to another file by now.
        if !found.same(&identity) || length != mapping.length as u64 {
            return Err(Code::INVALID_HANDLE);
        }
        mapping.place(Some(&file)).map_err(|_| Code::MAP_FAILED)?;
        mapping.file = Some(file);
        Ok(mapping)
    }

    /// Returns the identity of the file behind the pages; `None` if no other process sees them.
    pub(crate) fn identity(&self) -> Option<Identity> {
        let file = self.file.as_ref()?;
        Identity::of(file, std::process::id(), u32::try_from(file.as_raw_fd()).ok()?)
    }

    /// Reserves addresses for `bytes` bytes, with an inaccessible page at either end.
    fn reserve(bytes: usize) -> Outcome<Mapping> {
        let length = bytes.checked_next_multiple_of(PAGE).ok_or(Code::OUT_OF_MEMORY)?;
        let all = length.checked_add(2 * PAGE).ok_or(Code::OUT_OF_MEMORY)?;
        // SAFETY: a fresh private mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), all, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1, 0)
        };
        if base == libc::MAP_FAILED {
            return Err(Code::OUT_OF_MEMORY);
        }
        Ok(Mapping { base: base as usize, length, bytes, file: None, buried: false })
    }

    /// Maps pages between the inaccessible ones: those of a file, or empty ones.
    fn place(&self, file: Option<&File>) -> Outcome {
        let kind = if file.is_some() { libc::MAP_SHARED } else { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS };
        let descriptor = file.map_or(-1, |file| file.as_raw_fd());
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the pages replaced are those between the inaccessible ones, which this mapping owns; the descriptor
        // is open or -1.
        let placed = unsafe { libc::mmap(self.start() as *mut libc::c_void, self.length, access, kind | libc::MAP_FIXED, descriptor, 0) };
        if placed == libc::MAP_FAILED { Err(Code::OUT_OF_MEMORY) } else { Ok(()) }
    }

    pub(crate) fn start(&self) -> usize {
        self.base + PAGE
    }

    fn freshen(&self) {
        self.fill(FRESH);
        // SAFETY: the range from the end of the requested bytes to the end of the accessible pages.
        unsafe { std::ptr::write_bytes((self.start() + self.bytes) as *mut u8, TAIL, self.length - self.bytes) };
    }

    fn fill(&self, value: u8) {
        // SAFETY: `bytes` from the start lie inside the accessible pages, which live as long as this.
        unsafe { std::ptr::write_bytes(self.start() as *mut u8, value, self.bytes) };
    }

    /// Overwrites freed memory; other processes keep their mappings unchanged.
    pub(crate) fn bury(&mut self) {
        self.buried = true;
        if self.file.take().is_none() || self.place(None).is_ok() {
            self.fill(DEAD);
        }
    }

    /// Whether it was overwritten.
    pub(crate) fn buried(&self) -> bool {
        self.buried
    }

    /// Whether the bytes after the requested ones are unchanged.
    pub(crate) fn tail_is_whole(&self) -> bool {
        // SAFETY: these bytes lie inside the accessible pages; only a wild write touches them.
        let tail = unsafe { std::slice::from_raw_parts((self.start() + self.bytes) as *const u8, self.length - self.bytes) };
        tail.iter().all(|&byte| byte == TAIL)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the addresses were reserved for this mapping and are given up once.
        unsafe { libc::munmap(self.base as *mut libc::c_void, self.length + 2 * PAGE) };
    }
}
