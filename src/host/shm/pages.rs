//! Mapped memory that belongs to one value: pages of a file that several ranks map, or pages of this process alone.

#![expect(unsafe_code, reason = "owns a mapping")]

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// What the processor maps with one entry where it can.
pub(super) const HUGE_PAGE: usize = 2 << 20;

/// A mapping, readable and writable, that ends with its value.
#[derive(Debug)]
pub(crate) struct Pages {
    /// The whole of it: what lies before the aligned part, and behind, is never touched.
    reserved: NonNull<u8>,
    reserved_bytes: usize,
    base: NonNull<u8>,
}

// SAFETY: the mapping belongs to the value and to no thread, and is only reached through raw pointers, whose users answer for it.
unsafe impl Send for Pages {}
// SAFETY: what a shared reference gives is addresses, and advice to the kernel, which takes that from any thread.
unsafe impl Sync for Pages {}

/// A view of a part of a file that keeps to itself what is written through it. It is mapped beside the shared one, so that it can take its
/// place at once: that needs no descriptor, and nothing that could be lacking by then but a free entry in the process's list of mappings.
#[derive(Debug)]
pub(super) struct PrivateView {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns a mapping, which belongs to no thread, and to which nobody has an address.
unsafe impl Send for PrivateView {}

impl PrivateView {
    /// Of these bytes of a file, whole pages.
    pub(super) fn new(file: BorrowedFd<'_>, offset: usize, bytes: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // Memory is found for what is written, as for any memory of the process's own.
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, protection, flags, file, offset as u64)? };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        Ok(Self { base, bytes })
    }

    /// Moves to an address, in place of what is mapped there. Whoever reads there meanwhile finds one of the two, never nothing. If it fails, what
    /// was mapped there still is; if even that is lost, the process ends.
    ///
    /// # Safety
    ///
    /// The pages at `address` are the caller's, as many as this has, and show the same bytes of the same file.
    unsafe fn move_to(&self, address: *mut u8) -> io::Result<()> {
        let (base, bytes) = (self.base.as_ptr().cast(), self.bytes);
        // A program that locks all its memory has made the kernel copy these pages when it did so: the copies are outdated.
        // SAFETY: pages of this view, to which nobody has an address, and whose contents are the file's again afterwards.
        unsafe {
            rustix::mm::munlock(base, bytes)?;
            rustix::mm::madvise(base, bytes, Advice::LinuxDontNeed)?;
        }
        // SAFETY: the view is this value's; what it takes the place of is the caller's, and shows the same bytes, so that whoever has
        // addresses there finds at them what was there. The kernel looks first whether it can, and does it under one lock, on which
        // accesses wait that come in between.
        // Not by rustix: its backend for the C library passes the flag of `mmap`, so the call always fails.
        let moved = unsafe { libc::mremap(base, bytes, bytes, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, address.cast::<libc::c_void>()) };
        if moved != libc::MAP_FAILED {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        end_where_unmapped(address, bytes, &error);
        Err(error)
    }
}

/// Ends the process where a failed move has left a hole, in which somebody's slice lies. The kernel may still refuse for lack of memory after it
/// has taken away what was mapped.
fn end_where_unmapped(address: *mut u8, bytes: usize, error: &io::Error) {
    // SAFETY: asks the kernel to begin writing back pages that lie in memory, which changes nothing.
    if let Err(Errno::NOMEM) = unsafe { rustix::mm::msync(address.cast(), bytes, rustix::mm::MsyncFlags::ASYNC) } {
        eprintln!(
            "collectives: the system has no memory to make a shared buffer private ({error}), and has unmapped it: this process ends"
        );
        std::process::abort();
    }
}

impl Drop for PrivateView {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, not moved (whoever moves it forgets it), and nobody has an address in it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// The alignment of a part of so many bytes whose elements want `align`: a huge page where it fills one.
pub(super) fn alignment(bytes: usize, align: usize) -> usize {
    let page = rustix::param::page_size();
    align.max(if bytes >= HUGE_PAGE { HUGE_PAGE.max(page) } else { page })
}

impl Pages {
    /// `bytes` zeros of this process's own, at a multiple of `align` (a power of two).
    pub(super) fn private(bytes: usize, align: usize) -> io::Result<Self> {
        let pages = Self::reserve(bytes, align, ProtFlags::READ | ProtFlags::WRITE)?;
        if bytes >= HUGE_PAGE {
            pages.advise(0, bytes, Advice::LinuxHugepage);
        }
        Ok(pages)
    }

    /// The first `bytes` bytes of a file, at a multiple of `align`. The file is at least so long and never gets shorter.
    pub(super) fn of_file(file: BorrowedFd<'_>, bytes: usize, align: usize) -> io::Result<Self> {
        let pages = Self::reserve(bytes, align, ProtFlags::empty())?;
        // SAFETY: takes the place of a part of the reservation, which nothing refers to yet; as long as the file at most (the caller's
        // word), so that no access is a bus error.
        let mapped = unsafe {
            rustix::mm::mmap(pages.at(0).cast(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED, file, 0)
        };
        if let Err(error) = mapped {
            // The kernel may have taken the reservation away before it failed, and another thread may have the place by now.
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

    /// What stands in for a file under Miri, which maps none: memory that the threads of the process know by a number.
    #[cfg(miri)]
    pub(super) fn numbered(number: u64, bytes: usize, align: usize) -> io::Result<Self> {
        one_mapping::known((0, number), Self::private(bytes, align)?)
    }

    /// Reserves address space for `bytes` bytes at a multiple of `align`.
    fn reserve(bytes: usize, align: usize, protection: ProtFlags) -> io::Result<Self> {
        let slack = if align > rustix::param::page_size() { align } else { 0 };
        let too_much = || io::Error::new(io::ErrorKind::OutOfMemory, "more than an address space holds");
        let reserved_bytes = bytes.checked_add(slack).filter(|bytes| *bytes <= isize::MAX as usize).ok_or_else(too_much)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), reserved_bytes, protection, MapFlags::PRIVATE)? }.cast::<u8>();
        let reserved = NonNull::new(start).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        // SAFETY: less than `align` bytes on, which the reservation has beyond `bytes`; an address that is a multiple of the page
        // size needs none where `align` is no more than that.
        let base = unsafe { reserved.add(start.addr().next_multiple_of(align) - start.addr()) };
        Ok(Self { reserved, reserved_bytes, base })
    }

    /// The byte at this offset.
    #[inline]
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        self.base.as_ptr().wrapping_add(offset)
    }

    /// Where it begins.
    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Has the kernel find memory for a part of a file now, and map it. That there is none is an error here, where it would be a bus
    /// error at the first touch.
    pub(super) fn populate(&self, file: BorrowedFd<'_>, offset: usize, bytes: usize) -> io::Result<()> {
        if bytes >= HUGE_PAGE {
            // Helps where /sys/kernel/mm/transparent_hugepage/shmem_enabled says so.
            self.advise(offset, bytes, Advice::LinuxHugepage);
        }
        // SAFETY: pages of this mapping; whoever else maps them finds the same bytes in them.
        match unsafe { rustix::mm::madvise(self.at(offset).cast(), bytes, Advice::LinuxPopulateWrite) } {
            // A kernel before 5.14.
            Err(Errno::INVAL) => Ok(rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), offset as u64, bytes as u64)?),
            result => Ok(result?),
        }
    }

    /// Gives the memory of a part of a file back to the system, for all who map it; it reads as zeros from then on.
    pub(super) fn give_back(&self, offset: usize, bytes: usize) {
        self.advise(offset, bytes, Advice::LinuxRemove);
    }

    /// Puts a view in the place of the pages from `offset` on, which show the same bytes of the same file (the caller's word): from then on
    /// what is written there stays with this mapping. Gives the view back where that fails, with everything as it was.
    pub(super) fn replace(&self, offset: usize, view: PrivateView) -> Result<(), (PrivateView, io::Error)> {
        // SAFETY: pages of this mapping, of the same bytes.
        match unsafe { view.move_to(self.at(offset)) } {
            Ok(()) => {
                // Part of this mapping now, and unmapped with it.
                std::mem::forget(view);
                Ok(())
            }
            Err(error) => Err((view, error)),
        }
    }

    /// Gives back what was written to pages that a view had replaced; they read as the file does from then on.
    pub(super) fn discard(&self, offset: usize, bytes: usize) {
        self.advise(offset, bytes, Advice::LinuxDontNeed);
    }

    /// Advice that may be refused.
    fn advise(&self, offset: usize, bytes: usize, advice: Advice) {
        if cfg!(miri) {
            return;
        }
        // SAFETY: pages of this mapping, and none of the advices given here takes the mapping away. Two change what the bytes are, which
        // those who ask for them answer for (`Segment`): removal, after which they are zeros for all, and what a part of this mapping's
        // own is not needed for any more.
        if let Err(error) = unsafe { rustix::mm::madvise(self.at(offset).cast(), bytes, advice) } {
            crate::base::event::debug!(%error, ?advice, bytes, "advice was refused");
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

/// For the thread sanitizer, which takes two mappings for different memory, and for Miri, which maps no files: ranks that are threads of
/// one process get one mapping between them, so that it is seen what they do to it (`tests/sanitize`).
#[cfg(any(one_mapping, miri))]
mod one_mapping {
    use std::sync::{Mutex, PoisonError};

    use super::*;

    /// A file by its device and inode, or by a number; its one mapping, and how many have that.
    struct Mapped {
        file: (u64, u64),
        reserved: NonNull<u8>,
        base: NonNull<u8>,
        holders: usize,
    }

    // SAFETY: addresses, which belong to no thread.
    unsafe impl Send for Mapped {}

    static MAPPED: Mutex<Vec<Mapped>> = Mutex::new(Vec::new());

    /// What this process has of the file already, or else these pages.
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

    /// Counts a holder out; whether nobody else has these pages.
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
            // SAFETY: inside the mapping, which nobody else knows.
            assert_eq!(unsafe { (pages.at(0).read(), pages.at(bytes - 1).read()) }, (0, 0));
        }
    }

    #[test]
    fn what_no_address_space_holds_is_refused() {
        assert!(Pages::private(isize::MAX as usize, HUGE_PAGE).is_err());
        assert!(Pages::private(1 << 62, 1).is_err());
    }
}
