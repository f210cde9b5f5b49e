//! Mapped memory that belongs to one value: pages of a file that several ranks map, or pages of this process alone.

#![expect(unsafe_code, reason = "owns a mapping")]

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// The bytes that a processor maps with a single entry if it can.
pub(super) const HUGE_PAGE: usize = 2 << 20;

/// A readable and writable mapping that is removed when the value is dropped.
#[derive(Debug)]
pub(crate) struct Pages {
    /// The whole mapping. The bytes before and after the aligned part are never touched.
    reserved: NonNull<u8>,
    reserved_bytes: usize,
    base: NonNull<u8>,
}

// SAFETY: the mapping belongs to the value and to no thread. It is only accessed through raw pointers, whose users are
// responsible for that.
unsafe impl Send for Pages {}
// SAFETY: a shared reference gives addresses, and advice to the kernel, which accepts that from any thread.
unsafe impl Sync for Pages {}

/// A view of a part of a file, in which writes stay private. It is mapped in advance, beside the shared mapping, so
/// that it can replace that mapping at once. Replacing it needs no descriptor, and no resource that could be lacking by
/// then except a free entry in the process's list of mappings.
#[derive(Debug)]
pub(super) struct PrivateView {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns a mapping that belongs to no thread and whose address nothing else has.
unsafe impl Send for PrivateView {}

impl PrivateView {
    /// Creates a view of these bytes of a file, which are whole pages.
    pub(super) fn new(file: BorrowedFd<'_>, offset: usize, bytes: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // Memory is allocated for what is written, as for any memory of the process.
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, protection, flags, file, offset as u64)? };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        Ok(Self { base, bytes })
    }

    /// Moves the view to an address, in place of what is mapped there. A concurrent reader finds one of the two, never
    /// nothing. If this fails, the old mapping is still there; if even that is lost, the process ends.
    ///
    /// # Safety
    ///
    /// The pages at `address` are the caller's, as many as this view has, and show the same bytes of the same file.
    unsafe fn move_to(&self, address: *mut u8) -> io::Result<()> {
        let (base, bytes) = (self.base.as_ptr().cast(), self.bytes);
        // If the program locks all its memory, the kernel copied these pages at that time, and the copies are outdated.
        // SAFETY: pages of this view, whose address nothing else has, and whose contents are the file's again
        // afterwards.
        unsafe {
            rustix::mm::munlock(base, bytes)?;
            rustix::mm::madvise(base, bytes, Advice::LinuxDontNeed)?;
        }
        // SAFETY: the view is this value's. The memory that it replaces is the caller's and shows the same bytes, so
        // that a holder of addresses there finds unchanged contents. The kernel checks first whether it can, and does
        // it under one lock; accesses that come in between wait for that. Not through rustix: its backend for the C
        // library passes the flag of `mmap`, so the call always fails.
        let moved = unsafe { libc::mremap(base, bytes, bytes, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, address.cast::<libc::c_void>()) };
        if moved != libc::MAP_FAILED {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        end_where_unmapped(address, bytes, &error);
        Err(error)
    }
}

/// Ends the process if a failed move has left a hole where a caller's slice lies. The kernel may still refuse for lack
/// of memory after it has removed what was mapped.
fn end_where_unmapped(address: *mut u8, bytes: usize, error: &io::Error) {
    // SAFETY: this asks the kernel to begin writing back pages that lie in memory, which changes nothing.
    if let Err(Errno::NOMEM) = unsafe { rustix::mm::msync(address.cast(), bytes, rustix::mm::MsyncFlags::ASYNC) } {
        eprintln!(
            "collectives: the system has no memory to make a shared buffer private ({error}), and has unmapped it: this process aborts"
        );
        std::process::abort();
    }
}

impl Drop for PrivateView {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, not moved (code that moves it forgets it), and nothing has an
        // address in it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Returns the alignment of a part of `bytes` bytes whose elements need `align`: a huge page if the part fills one.
pub(super) fn alignment(bytes: usize, align: usize) -> usize {
    let page = rustix::param::page_size();
    align.max(if bytes >= HUGE_PAGE { HUGE_PAGE.max(page) } else { page })
}

impl Pages {
    /// Maps `bytes` zero bytes for this process alone, at a multiple of `align` (a power of two).
    pub(super) fn private(bytes: usize, align: usize) -> io::Result<Self> {
        let pages = Self::reserve(bytes, align, ProtFlags::READ | ProtFlags::WRITE)?;
        if bytes >= HUGE_PAGE {
            pages.advise(0, bytes, Advice::LinuxHugepage);
        }
        Ok(pages)
    }

    /// Maps the first `bytes` bytes of a file, at a multiple of `align`. The file is at least that long and never gets
    /// shorter.
    pub(super) fn of_file(file: BorrowedFd<'_>, bytes: usize, align: usize) -> io::Result<Self> {
        let pages = Self::reserve(bytes, align, ProtFlags::empty())?;
        // SAFETY: this replaces a part of the reservation, which nothing refers to yet. It is at most as long as the
        // file (as the caller promised), so that no access is a bus error.
        let mapped = unsafe {
            rustix::mm::mmap(pages.at(0).cast(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED, file, 0)
        };
        if let Err(error) = mapped {
            // The kernel may have removed the reservation before it failed, and another thread may use that address by
            // now.
            std::mem::forget(pages);
            return Err(error.into());
        }
        #[cfg(one_mapping)]
        let pages = {
            let status = rustix::fs::fstat(file)?;
            one_mapping::known((status.st_dev, status.st_ino), pages)?
        };
        Ok(pages)
    }

    /// Returns memory that stands in for a file under Miri, which maps none. The threads of the process know it by a
    /// number.
    #[cfg(miri)]
    pub(super) fn numbered(number: u64, bytes: usize, align: usize) -> io::Result<Self> {
        one_mapping::known((0, number), Self::private(bytes, align)?)
    }

    /// Reserves address space for `bytes` bytes at a multiple of `align`.
    fn reserve(bytes: usize, align: usize, protection: ProtFlags) -> io::Result<Self> {
        let slack = if align > rustix::param::page_size() { align } else { 0 };
        let too_much = || io::Error::new(io::ErrorKind::OutOfMemory, "the memory would not fit in an address space");
        let reserved_bytes = bytes.checked_add(slack).filter(|bytes| *bytes <= isize::MAX as usize).ok_or_else(too_much)?;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), reserved_bytes, protection, MapFlags::PRIVATE)? }.cast::<u8>();
        let reserved = NonNull::new(start).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        // SAFETY: less than `align` bytes further, which the reservation has beyond `bytes`. An address that is a
        // multiple of the page size needs no offset if `align` is no larger than that.
        let base = unsafe { reserved.add(start.addr().next_multiple_of(align) - start.addr()) };
        Ok(Self { reserved, reserved_bytes, base })
    }

    /// Returns the address of the byte at this offset.
    #[inline]
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        self.base.as_ptr().wrapping_add(offset)
    }

    /// Returns where it begins.
    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Makes the kernel allocate memory for a part of a file now, and map it. If there is no memory, this returns an
    /// error; later, the first access would be a bus error.
    pub(super) fn populate(&self, file: BorrowedFd<'_>, offset: usize, bytes: usize) -> io::Result<()> {
        if bytes >= HUGE_PAGE {
            // Helps if /sys/kernel/mm/transparent_hugepage/shmem_enabled permits it.
            self.advise(offset, bytes, Advice::LinuxHugepage);
        }
        // SAFETY: pages of this mapping; other mappings of them show the same bytes.
        match unsafe { rustix::mm::madvise(self.at(offset).cast(), bytes, Advice::LinuxPopulateWrite) } {
            // A kernel before 5.14.
            Err(Errno::INVAL) => Ok(rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), offset as u64, bytes as u64)?),
            result => Ok(result?),
        }
    }

    /// Gives the memory of a part of a file back to the system, for all processes that map it. From then on it reads as
    /// zeros.
    pub(super) fn give_back(&self, offset: usize, bytes: usize) {
        self.advise(offset, bytes, Advice::LinuxRemove);
    }

    /// Puts a view in place of the pages from `offset` on, which show the same bytes of the same file (as the caller
    /// promises). From then on, what is written there stays with this mapping. If that fails, returns the view, with
    /// everything unchanged.
    pub(super) fn replace(&self, offset: usize, view: PrivateView) -> Result<(), (PrivateView, io::Error)> {
        // SAFETY: pages of this mapping, which show the same bytes.
        match unsafe { view.move_to(self.at(offset)) } {
            Ok(()) => {
                // It is part of this mapping now, and unmapped with it.
                std::mem::forget(view);
                Ok(())
            }
            Err(error) => Err((view, error)),
        }
    }

    /// Discards what was written to pages that a view had replaced. From then on they read as the file does.
    pub(super) fn discard(&self, offset: usize, bytes: usize) {
        self.advise(offset, bytes, Advice::LinuxDontNeed);
    }

    /// Gives advice that may be refused.
    fn advise(&self, offset: usize, bytes: usize, advice: Advice) {
        if cfg!(miri) {
            return;
        }
        // SAFETY: pages of this mapping, and no advice given here removes the mapping. Two change what the bytes are,
        // and their callers are responsible for that (`Segment`): removal, after which the bytes are zeros for all, and
        // discarding private contents of this mapping that are no longer needed.
        if let Err(error) = unsafe { rustix::mm::madvise(self.at(offset).cast(), bytes, advice) } {
            crate::base::event::debug!(%error, ?advice, bytes, "the kernel refused advice on memory");
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        #[cfg(any(one_mapping, miri))]
        if !one_mapping::is_last(self) {
            return;
        }
        // SAFETY: mapped by `reserve` with this length; pointers into it belong to holders of this value.
        let _ = unsafe { rustix::mm::munmap(self.reserved.as_ptr().cast(), self.reserved_bytes) };
    }
}

/// One mapping for ranks that are threads of one process, so that their accesses to it are checked (`tests/sanitize`).
/// The thread sanitizer takes two mappings for different memory, and Miri maps no files.
#[cfg(any(one_mapping, miri))]
mod one_mapping {
    use std::sync::{Mutex, PoisonError};

    use super::*;

    /// A file by its device and inode, or by a number; its one mapping, and the number of holders.
    struct Mapped {
        file: (u64, u64),
        reserved: NonNull<u8>,
        base: NonNull<u8>,
        holders: usize,
    }

    // SAFETY: it holds addresses, which belong to no thread.
    unsafe impl Send for Mapped {}

    static MAPPED: Mutex<Vec<Mapped>> = Mutex::new(Vec::new());

    /// Returns the existing mapping of the file in this process, or else these pages.
    pub(super) fn known(file: (u64, u64), mut pages: Pages) -> io::Result<Pages> {
        let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(known) = mapped.iter_mut().find(|known| known.file == file) else {
            mapped.push(Mapped { file, reserved: pages.reserved, base: pages.base, holders: 1 });
            return Ok(pages);
        };
        known.holders += 1;
        // SAFETY: mapped a moment ago, and not handed out.
        unsafe { rustix::mm::munmap(pages.reserved.as_ptr().cast(), pages.reserved_bytes)? };
        (pages.reserved, pages.base) = (known.reserved, known.base);
        Ok(pages)
    }

    /// Removes a holder. Returns whether it was the last one.
    pub(super) fn is_last(pages: &Pages) -> bool {
        let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = mapped.iter().position(|known| known.reserved == pages.reserved) else { return true };
        mapped[at].holders -= 1;
        let is_last = mapped[at].holders == 0;
        if is_last {
            mapped.swap_remove(at);
        }
        is_last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_zero() {
        for (bytes, align) in [(1, 1), (5000, 8192), (3 << 20, HUGE_PAGE)] {
            let align = alignment(bytes, align);
            let pages = Pages::private(bytes, align).unwrap();
            assert_eq!(pages.at(0).addr() % align, 0);
            // SAFETY: inside the mapping, which nothing else refers to.
            assert_eq!(unsafe { (pages.at(0).read(), pages.at(bytes - 1).read()) }, (0, 0));
        }
    }

    #[test]
    fn what_no_address_space_holds_is_refused() {
        assert!(Pages::private(isize::MAX as usize, HUGE_PAGE).is_err());
        assert!(Pages::private(1 << 62, 1).is_err());
    }
}
