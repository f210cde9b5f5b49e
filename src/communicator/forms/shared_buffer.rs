//! Buffers that the crate allocates, in memory that the ranks of a host share.

#![expect(unsafe_code, reason = "a slice over mapped memory")]

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::base::deadline::Deadline;
use crate::call::buffer::{Buffer, BufferMut, Memory, MemoryMut, StableMemory};
use crate::call::element::{Data, TypeTag};
use crate::communicator::Communicator;
use crate::communicator::life::bootstrap::ParentExchange;
use crate::communicator::prepare::prepared::element;
use crate::error::{Error, Result};
use crate::host::shm::{ShareError, Size, Storage};

/// A buffer allocated by [`Communicator::alloc`]. It dereferences to a slice of `T`, and any call can take the slice or
/// a part of it. The guide calls such a buffer a *window*.
///
/// Like a vector, the buffer belongs to this rank alone. It can be moved to other threads, and can outlive its
/// communicator. In collectives that this rank calls with the buffer, other ranks read it, but never write to it.
///
/// After a failed call, a destination contains unspecified data, and a source is unchanged. Other ranks may still be
/// reading the buffer then, but they do not see this rank's later writes, because the system allocates new memory for
/// these writes, page by page. (If you gave the buffer's addresses to a device or a network card, give it the addresses
/// again after a failed call.)
pub struct SharedBuffer<T> {
    /// The first of `len` elements.
    base: NonNull<T>,
    len: usize,
    /// Keeps the memory mapped; `None` if the buffer has no bytes.
    _storage: Option<Storage>,
    elements: PhantomData<T>,
}

// SAFETY: it owns its elements as a vector does, and `Data` is `Send`; the mapping belongs to no thread.
unsafe impl<T: Data> Send for SharedBuffer<T> {}
// SAFETY: a shared reference gives only shared references to elements, and `Data` is `Sync`.
unsafe impl<T: Data> Sync for SharedBuffer<T> {}

impl<T: Data> SharedBuffer<T> {
    /// Makes a buffer of `len` zeros in the memory allocated for them.
    fn new(storage: Option<Storage>, len: usize) -> Self {
        let base = storage.as_ref().map_or(NonNull::dangling(), |storage| storage.base().cast());
        Self { base, len, _storage: storage, elements: PhantomData }
    }
}

impl<T: Data> Deref for SharedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: - as many elements as the storage was asked for, aligned to them, mapped as long as this lives;
        // - initialised: zeros at first, which are a value of any `Data`, and of every element type;
        // - no rank writes while this is borrowed: this rank writes only through this value, and the others, which map
        //   it too, never write (they are trusted: they run this crate). The pages may become private to this rank
        //   meanwhile, with the same bytes.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl<T: Data> DerefMut for SharedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as many elements as the storage was asked for, aligned, initialised and mapped as long as this lives.
        // The borrow is exclusive in this rank. Other ranks read these pages only in calls to which this rank has lent
        // them, and those calls borrow or own the buffer. After a failed call they keep reading pages of the file,
        // which are no longer these.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl<T: Data + fmt::Debug> fmt::Debug for SharedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

// SAFETY: it lends its one allocation.
unsafe impl<T: Data> StableMemory for SharedBuffer<T> {}

impl<T: Data> Buffer for SharedBuffer<T> {
    type Element = T;

    fn memory(&self) -> Memory<'_, T> {
        Memory::from(&self[..])
    }
}

impl<T: Data> BufferMut for SharedBuffer<T> {
    fn memory_mut(&mut self) -> MemoryMut<'_, T> {
        MemoryMut::from(&mut self[..])
    }
}

/// Describes an allocation from the words that ranks exchange: the element type's code, its alignment, and the number
/// of elements.
fn in_words([code, align, len]: [u64; 3]) -> String {
    let element = u32::try_from(code).ok().and_then(TypeTag::from_code).map_or("unknown elements".to_owned(), |tag| tag.to_string());
    let aligned = if align > COMMON_ALIGNMENT { format!(", aligned to {align} B") } else { String::new() };
    format!("alloc({element}, count {len}{aligned})")
}

/// The alignment of buffers in bytes, unless their elements need more.
const COMMON_ALIGNMENT: u64 = 4096;

impl Communicator {
    /// Allocates a buffer of `len` zeros in memory that all ranks of this host share. In collectives on such buffers,
    /// or on parts of them, a rank can read other ranks' buffers directly. `alloc` is a collective: every rank must
    /// call it with the same type and length, and gets its own buffer.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// let sums = Communicator::run_local(2, |comm| {
    ///     let mut gradient = comm.alloc::<f32>(1000)?;
    ///     gradient.fill(comm.rank() as f32 + 1.0);
    ///     comm.all_reduce(&mut gradient, ReduceOp::Sum)?;
    ///     comm.all_reduce(&mut gradient[..10], ReduceOp::Max)?; // parts are as good
    ///     Ok(gradient[999])
    /// })?;
    /// assert_eq!(sums, [3.0, 3.0]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// If the transport is `Transport::Tcp`, or if no other rank is on this rank's host, the buffer is ordinary memory
    /// that begins at a page boundary. `alloc` can be called in these cases too, so programs need no separate code for
    /// them. If the ranks are on several hosts, each rank shares memory only with the ranks of its own host.
    ///
    /// **Cost.**
    /// - Memory: the bytes of every rank's buffer exist once on the host, and `alloc` allocates them before it returns.
    ///   The allocation takes 3 to 6 µs per page of 4 KiB (measured with 2 virtual CPUs, Zen 5;
    ///   `benches/record/design-figures.md`).
    /// - Address space: each rank maps the buffers of all ranks on its host, and maps its own buffer twice. So each
    ///   rank needs address space for (ranks on the host + 1) × `len` elements. The size of each buffer is rounded up
    ///   to whole pages. If a buffer has at least 2 MiB, its size is rounded up to whole pages of 2 MiB.
    /// - First use: when a call first reaches a page of another rank, the system maps that page. The mapping of a page
    ///   takes about 1 µs (measured with 2 virtual CPUs, Zen 5). So allocate a buffer once and use it often.
    ///
    /// Huge pages are used if the system allows them for shared memory
    /// (`/sys/kernel/mm/transparent_hugepage/shmem_enabled` is `advise`).
    ///
    /// A rank can drop its buffer while the other ranks keep theirs. The memory of this buffer is freed immediately,
    /// and its address space at the next collective of this communicator. Collectives on the remaining buffers then
    /// copy through the communicator's own shared memory. After a failed call, other ranks may still be reading the
    /// dropped buffer, so its memory is freed only when all ranks of the host have dropped their buffers and the
    /// communicator.
    ///
    /// # Errors
    ///
    /// The errors common to all collectives, and the following errors, after which the communicator stays usable:
    /// - `Mismatch` if ranks ask for different types or lengths.
    /// - `InvalidArgument` if the buffer is too large for an address space.
    /// - `Io` if a rank cannot get its memory. All ranks get this error, which names that rank.
    #[doc(alias("ncclMemAlloc", "ncclCommWindowRegister", "MPI_Win_allocate_shared"))]
    pub fn alloc<T: Data>(&self, len: usize) -> Result<SharedBuffer<T>> {
        let (tag, size) = element::<T>("alloc")?;
        let asked = [u64::from(tag.to_code()), COMMON_ALIGNMENT.max(align_of::<T>() as u64), len as u64];
        self.composite("alloc", || self.allocate(len, size, asked))
    }

    /// Allocates a buffer of `len` elements of `size` bytes. All ranks must agree on `asked`.
    fn allocate<T: Data>(&self, len: usize, size: usize, asked: [u64; 3]) -> Result<SharedBuffer<T>> {
        self.same_allocation(asked)?;
        let bytes = len.checked_mul(size).filter(|bytes| *bytes <= isize::MAX as usize);
        let too_much = || Error::argument("alloc", format!("{len} elements of {size} B do not fit into the address space"));
        match bytes.ok_or_else(too_much)? {
            0 => Ok(SharedBuffer::new(None, len)),
            bytes => Ok(SharedBuffer::new(Some(self.storage(Size { bytes, align: align_of::<T>() }, asked)?), len)),
        }
    }

    /// Refuses allocations that differ between ranks.
    fn same_allocation(&self, asked: [u64; 3]) -> Result<()> {
        let mut all = vec![[0_u64; 3]; self.world_size()];
        self.all_gather_into(&[asked], &mut all)?;
        let Some(other) = all.iter().position(|other| *other != all[0]) else { return Ok(()) };
        let peer = |rank: usize| self.peers()[rank].clone();
        Err(Error::Mismatch { first: peer(0), first_call: in_words(all[0]), second: peer(other), second_call: in_words(all[other]) })
    }

    /// Returns memory for this rank's buffer, once every rank has its own.
    fn storage(&self, size: Size, asked: [u64; 3]) -> Result<Storage> {
        let deadline = Deadline::after(self.timeout());
        let everyone: Vec<usize> = (0..self.world_size()).collect();
        let mut exchange = ParentExchange::new(self, &everyone);
        let opened = match self.with_backend(|backend| backend.site()).map_err(|why| self.no_turn("alloc", why))? {
            Some(site) => site.open(&mut exchange, size, &deadline).map(Storage::Window),
            None => Storage::alone(&mut exchange, size, &deadline),
        };
        let refused = |rank: usize| format!("{} on {}", in_words(asked), self.peers()[rank]);
        let storage = opened.map_err(|error| match error {
            ShareError::Here(Error::Io { doing, error }) => Error::Io { doing: format!("{}: {doing}", refused(self.rank())), error },
            ShareError::Here(error) | ShareError::Exchange(error) => error,
            ShareError::There(rank, reason) => Error::io(refused(rank), std::io::Error::other(reason)),
        })?;
        if let Storage::Window(segment) = &storage {
            self.with_backend(|backend| backend.admit(segment)).map_err(|why| self.no_turn("alloc", why))?;
        }
        Ok(storage)
    }
}
