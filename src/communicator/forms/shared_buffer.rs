//! Buffers that the crate hands out: memory that the ranks of a host have in common.

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

/// A buffer that [`Communicator::alloc`] has handed out: a slice of `T` that any call takes, whole or in part.
///
/// It belongs to this rank alone, as a vector does, and can be sent to other threads and outlive its communicator. Other ranks read
/// it, inside collectives that this rank calls with it, and nobody else ever writes to it. After a call that failed its destination holds
/// anything, its source what it held. Others may still be reading the buffer then; they do not see what this rank writes to it, for which
/// the system finds memory page by page. (A device or a network card that was given its addresses has to be given them again.)
pub struct SharedBuffer<T> {
    /// Of `len` elements.
    base: NonNull<T>,
    len: usize,
    /// What keeps it mapped; `None` where there is nothing in it.
    _storage: Option<Storage>,
    elements: PhantomData<T>,
}

// SAFETY: it owns its elements as a vector does, and `Data` is `Send`; the mapping belongs to no thread.
unsafe impl<T: Data> Send for SharedBuffer<T> {}
// SAFETY: a shared reference gives shared references to elements alone, and `Data` is `Sync`.
unsafe impl<T: Data> Sync for SharedBuffer<T> {}

impl<T: Data> SharedBuffer<T> {
    /// `len` zeros in memory that was handed out for them.
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
        // - nobody writes while this is borrowed: this rank does so through this value alone, and the others, which map it too, never do
        //   (trusted of them: they run this crate). The pages may become private to this rank meanwhile, with the same bytes.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl<T: Data> DerefMut for SharedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as many elements as the storage was asked for, aligned, initialised and mapped as long as this lives. The borrow is
        // exclusive in this rank. Other ranks read these pages only in calls to which this rank has lent them, which borrow or own
        // the buffer; after one that failed they go on reading pages of the file, which are no longer these.
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

/// An allocation in words, as its ranks tell it: the element type's code, its alignment, and how many.
fn in_words([code, align, len]: [u64; 3]) -> String {
    let element = u32::try_from(code).ok().and_then(TypeTag::from_code).map_or("unknown elements".to_owned(), |tag| tag.to_string());
    let aligned = if align > COMMON_ALIGNMENT { format!(", aligned to {align} B") } else { String::new() };
    format!("alloc({element}, count {len}{aligned})")
}

/// To what buffers are aligned whatever their elements want.
const COMMON_ALIGNMENT: u64 = 4096;

impl Communicator {
    /// A buffer of `len` zeros in memory that all ranks of this host have in common, so that collectives on it, or on parts of it, can
    /// reach from one rank's buffer into another's. Collective: every rank calls it with the same type and length, and gets a buffer
    /// of its own.
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
    /// Between ranks that share no host, or with `Transport::Tcp`, it is ordinary memory at a page's beginning, so programs need no
    /// second way. On several hosts each host's ranks share theirs.
    ///
    /// **What it costs.** The bytes of every rank's buffer exist once on the host, and are there when this returns: 3 to 6 µs
    /// for each page of 4 KiB were measured. Each rank maps all of them, and its own once more: as many times `len` elements, rounded up to
    /// pages (of 2 MiB where a buffer fills one), as the host has ranks and one, of address space. Another rank's page is mapped when a call first reaches it, for
    /// about 1 µs. So allocate once and use it often. Huge pages are used where the system gives them to shared memory
    /// (`/sys/kernel/mm/transparent_hugepage/shmem_enabled` at `advise`).
    ///
    /// Dropping the buffer is this rank's own affair: its memory is free again at once, and its address space with the next collective
    /// of this communicator. The others' buffers stay as they are; collectives on them then go through memory of the communicator's.
    /// After a call that failed other ranks may still be reading what was in the buffer: that memory is free when all ranks of the
    /// host have dropped theirs and the communicator.
    ///
    /// # Errors
    ///
    /// `Mismatch` where ranks ask for different things, `InvalidArgument` for what no address space holds, `Io` naming the rank that
    /// could not get its memory (all ranks fail then); none of these ends the communicator. And those of collectives.
    #[doc(alias("ncclMemAlloc", "ncclCommWindowRegister", "MPI_Win_allocate_shared"))]
    pub fn alloc<T: Data>(&self, len: usize) -> Result<SharedBuffer<T>> {
        let (tag, size) = element::<T>("alloc")?;
        let asked = [u64::from(tag.to_code()), COMMON_ALIGNMENT.max(align_of::<T>() as u64), len as u64];
        self.composite("alloc", || self.allocate(len, size, asked))
    }

    /// A buffer of `len` elements of `size` bytes, as all ranks ask for.
    fn allocate<T: Data>(&self, len: usize, size: usize, asked: [u64; 3]) -> Result<SharedBuffer<T>> {
        self.same_allocation(asked)?;
        let bytes = len.checked_mul(size).filter(|bytes| *bytes <= isize::MAX as usize);
        let too_much = || Error::argument("alloc", format!("{len} elements of {size} B are more than an address space holds"));
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

    /// Memory for this rank's buffer, once every rank has its own.
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
