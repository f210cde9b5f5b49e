//! Windows: memory of users that all ranks of a host map, so that a collective on it need not copy anything into slots.
//!
//! A window is one anonymous file with a segment for each rank, all of one size, and every rank maps all of it. A
//! rank's buffer is its own segment. Windows have the same numbers on every rank. So a number and an offset identify a
//! buffer, even for ranks that have it mapped at a different address.
//!
//! **How long a mapping lives.** A group holds every window that it was given. It releases one only between calls
//! ([`Windows::forget_dropped`], which needs exclusive access), after its user has dropped the buffer. So what
//! [`Windows::address`] returned stays mapped to the end of the call, even if another thread drops the buffer
//! meanwhile. No other rank's memory disappears either: a rank that drops its buffer gives back only the pages of its
//! own segment, and the others have mappings of their own. And no range that [`Windows::find`] knows can belong to
//! other memory by now, since the range is still mapped.
//!
//! **Which rank uses a segment when.** Only its own rank ever writes to it, through its own mapping. The others read it
//! only in calls to which that rank has lent it (see `lent`). While another rank may be reading, what it reads does not
//! change: the owner does not write, since the buffer is borrowed until the call has ended, and does not give back the
//! pages. A call that does not succeed gives the buffer back only when the segment is *private*: a [`PrivateView`] has
//! replaced the shared pages in the owner's mapping. The owner then still finds the same contents, and its writes stay
//! private. The others see the pages of the file as they were, for as long as they have them mapped. A private segment
//! is never lent again.

#![expect(unsafe_code, reason = "hands out addresses in mapped memory")]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::layout::HEAD_BYTES;
use super::pages::{self, Pages, PrivateView};
use super::region;
use super::shared_file::{self, ShareResult, SharedFile};
use crate::authentication::Secret;
use crate::base::deadline::Deadline;
use crate::base::fork::Process;
use crate::error::Error;
use crate::host::exchange::Exchange;

/// The position of a buffer in its rank's windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WindowOffset {
    /// The window's number: the same on all ranks, from 1, never reused.
    pub(super) window: u32,
    /// The offset within the rank's own segment, in bytes.
    pub(super) offset: usize,
}

/// What a rank publishes about its source and its destination: the windows that they lie in, 0 for none, and the
/// offsets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Offer {
    windows: [u32; 2],
    offsets: [u64; 2],
}

const _: () = assert!(size_of::<Offer>() == HEAD_BYTES, "an offer travels in a mailbox's header");

/// One of a rank's two buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(super) enum Side {
    Source = 0,
    Destination = 1,
}

impl Offer {
    pub(super) fn new(source: Option<WindowOffset>, destination: Option<WindowOffset>) -> Self {
        let places = [source, destination];
        Self {
            windows: places.map(|place| place.map_or(0, |place| place.window)),
            offsets: places.map(|place| place.map_or(0, |place| place.offset as u64)),
        }
    }

    /// Returns the window that a buffer lies in, 0 for none.
    pub(super) fn window(&self, side: Side) -> u32 {
        self.windows[side as usize]
    }

    /// Returns where a buffer lies from its byte `start` on. Returns `None` for a position that no address space has:
    /// any bytes can have been read as an offer.
    pub(super) fn place(&self, side: Side, start: usize) -> Option<WindowOffset> {
        let offset = usize::try_from(self.offsets[side as usize]).ok()?.checked_add(start)?;
        Some(WindowOffset { window: self.window(side), offset })
    }

    /// Returns the windows that it names.
    pub(super) fn windows(&self) -> impl Iterator<Item = u32> + use<> {
        self.windows.into_iter().filter(|window| *window != 0)
    }
}

/// The size of every rank's part of an allocation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    /// The bytes, not zero.
    pub(crate) bytes: usize,
    /// The alignment that the elements need.
    pub(crate) align: usize,
}

/// One rank's mapping of a window.
#[derive(Debug)]
pub(super) struct Window {
    number: u32,
    pages: Pages,
    /// Bytes from one rank's segment to the next.
    stride: usize,
    /// Bytes of a segment that are used.
    bytes: usize,
    me: usize,
    ranks: usize,
    own: Mutex<Own>,
}

/// Whether this rank's own segment is shared.
#[derive(Debug)]
enum Own {
    /// All ranks see the data that this rank writes. The private view can replace the segment. There is no view if
    /// ranks share one mapping, because the view would replace that mapping for all ranks.
    Shared(Option<PrivateView>),
    /// The other ranks see the data that was there when the segment became private.
    Private,
}

impl Window {
    /// Returns where this rank's own segment begins.
    fn own(&self) -> *mut u8 {
        self.pages.at(self.me * self.stride)
    }

    /// Makes this rank's own segment private. Its bytes are the same before and after, and the others continue to see
    /// them.
    fn keep_own(&self) -> io::Result<()> {
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        let Own::Shared(view) = &mut *own else { return Ok(()) };
        let view_of_it = view.take().ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, "the ranks share one mapping"))?;
        match self.pages.replace(self.me * self.stride, view_of_it) {
            Ok(()) => {
                *own = Own::Private;
                Ok(())
            }
            Err((view_of_it, error)) => {
                *view = Some(view_of_it);
                Err(error)
            }
        }
    }

    /// Frees the memory of this rank's own segment, as far as no other rank may need it.
    fn give_back_own(&self) {
        let (offset, bytes) = (self.me * self.stride, used(self.bytes));
        let is_shared = matches!(&*self.own.lock().unwrap_or_else(PoisonError::into_inner), Own::Shared(_));
        if is_shared {
            self.pages.give_back(offset, bytes);
        } else {
            // The file's pages may still be read, and are freed with the last mapping of them.
            self.pages.discard(offset, bytes);
        }
    }
}

/// A rank's own segment of a window, which is given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Segment {
    window: Arc<Window>,
    process: Process,
    /// Dropped after the window, so that a group that sees the notice finds the window released.
    _notice: DropNotice,
}

impl Drop for Segment {
    fn drop(&mut self) {
        // A call that uses it borrows or owns the buffer that holds this. So none is in progress, and each earlier call
        // has ended for all ranks or has made the segment private.
        if !self.process.is_foreign() {
            self.window.give_back_own();
        }
    }
}

/// A notice to the group, given on drop, that a segment is gone.
#[derive(Debug)]
struct DropNotice(Arc<AtomicBool>);

impl Drop for DropNotice {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A user's memory that the crate has handed out.
#[derive(Debug)]
pub(crate) enum Storage {
    /// This rank's part of a window.
    Window(Segment),
    /// Memory of this process alone.
    Private(Pages),
}

impl Storage {
    /// Returns where it begins.
    pub(crate) fn base(&self) -> NonNull<u8> {
        match self {
            Storage::Private(pages) => pages.base(),
            // SAFETY: this rank's index is less than the number of segments, of `stride` bytes each, that the mapping
            // holds; so this is inside it.
            Storage::Window(segment) => unsafe { segment.window.pages.base().add(segment.window.me * segment.window.stride) },
        }
    }

    /// Allocates memory for this rank alone, in as many rounds of the exchange as a window takes.
    ///
    /// # Errors
    ///
    /// As [`Site::open`].
    pub(crate) fn alone(exchange: &mut dyn Exchange, size: Size, deadline: &Deadline) -> ShareResult<Self> {
        let pages = Pages::private(size.bytes, pages::alignment(size.bytes, size.align));
        let pages = pages.map_err(|error| Error::io(format!("mapping {} B of memory", size.bytes), error));
        shared_file::exchange_outcome(exchange, pages, deadline).map(Storage::Private)
    }
}

/// Returns the bytes of the pages that `bytes` bytes use.
fn used(bytes: usize) -> usize {
    bytes.next_multiple_of(rustix::param::page_size())
}

/// A window that is yet to be made: its number, and its ranks.
pub(crate) struct Site {
    number: u32,
    me: usize,
    ranks: usize,
    /// The rank of the exchange that makes the file.
    leader: usize,
    /// The secret that the others have to know to get the file.
    secret: Option<Secret>,
    dropped: Arc<AtomicBool>,
}

impl Site {
    /// Makes the window. Every rank of the communicator takes part in two rounds of the exchange: those of the host
    /// with the same site and size, the others with sites of their own or by [`Storage::alone`].
    ///
    /// # Errors
    ///
    /// An error if this rank or another one could not get the memory or map it, and the errors of the exchange.
    pub(crate) fn open(&self, exchange: &mut dyn Exchange, size: Size, deadline: &Deadline) -> ShareResult<Segment> {
        let align = pages::alignment(size.bytes, size.align);
        let strides = size.bytes.checked_next_multiple_of(align);
        let Some((stride, whole)) = strides.and_then(|stride| Some((stride, stride.checked_mul(self.ranks)?))) else {
            let reason = "the buffer would not fit in an address space";
            let error = Error::io("laying out a shared buffer", io::Error::new(io::ErrorKind::OutOfMemory, reason));
            return shared_file::exchange_outcome(exchange, Err(error), deadline);
        };
        let name = format!("a shared buffer of {} times {} B", self.ranks, size.bytes);
        let enter = |file| self.enter(file, size.bytes, stride, align).map_err(|error| Error::io(format!("mapping {name}"), error));
        let shared_file = SharedFile {
            name: name.clone(),
            make: &|| create(whole, size.bytes.saturating_mul(self.ranks)),
            enter: &enter,
            #[cfg(miri)]
            enter_numbered: &|number| self.numbered(number, size.bytes, stride, align),
            secret: self.secret.as_ref(),
        };
        let window = shared_file.share(exchange, self.me == 0, self.leader, deadline)?;
        Ok(Segment { window: Arc::new(window), process: Process::this(), _notice: DropNotice(Arc::clone(&self.dropped)) })
    }

    /// Maps the file, and makes the kernel allocate memory for this rank's segment: near the processor that it runs on,
    /// if the host has several memory nodes.
    fn enter(&self, file: OwnedFd, bytes: usize, stride: usize, align: usize) -> io::Result<Window> {
        let whole = stride * self.ranks;
        region::check(file.as_fd(), whole)?;
        let pages = Pages::of_file(file.as_fd(), whole, align)?;
        pages.populate(file.as_fd(), self.me * stride, used(bytes))?;
        let view = if cfg!(one_mapping) { None } else { Some(PrivateView::new(file.as_fd(), self.me * stride, used(bytes))?) };
        Ok(self.window(pages, view, bytes, stride))
    }

    /// Makes the window for the threads of one process, where memory has a number instead of a file.
    #[cfg(miri)]
    fn numbered(&self, number: u64, bytes: usize, stride: usize, align: usize) -> io::Result<Window> {
        Ok(self.window(Pages::numbered(number, stride * self.ranks, align)?, None, bytes, stride))
    }

    /// Returns this rank's mapping of the window.
    fn window(&self, pages: Pages, view: Option<PrivateView>, bytes: usize, stride: usize) -> Window {
        let own = Mutex::new(Own::Shared(view));
        Window { number: self.number, pages, stride, bytes, me: self.me, ranks: self.ranks, own }
    }
}

/// Creates the file: its size is fixed, its bytes are zero, and `used` of them are to be used. Its memory is allocated
/// later. If the system is known not to have that much, this fails at once, since the system would otherwise end
/// processes to find the memory.
fn create(bytes: usize, used: usize) -> io::Result<OwnedFd> {
    if let Some(available) = available_memory().filter(|available| *available < used) {
        let message = format!("{used} B are needed on this host, but only {available} B are available");
        return Err(io::Error::new(io::ErrorKind::OutOfMemory, message));
    }
    region::create("collectives-buffer", bytes)
}

/// Returns what the system could give to programs now, including swap, in bytes; `None` if it does not report that.
fn available_memory() -> Option<usize> {
    let description = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kilobytes = |name: &str| {
        let line = description.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()
    };
    kilobytes("MemAvailable:")?.checked_add(kilobytes("SwapFree:").unwrap_or(0))?.checked_mul(1024)
}

/// The windows of a group.
#[derive(Debug, Default)]
pub(super) struct Windows {
    /// The windows in the order of their numbers.
    open: Vec<Arc<Window>>,
    /// The segments of this rank, ascending: where they begin, their lengths, and their windows.
    own: Vec<(usize, usize, u32)>,
    /// The last number that was given out.
    number: u32,
    /// The secret that a process has to know to get a window's file.
    secret: Option<Secret>,
    /// Whether a segment of `open` was dropped since they were last checked.
    dropped: Arc<AtomicBool>,
}

impl Windows {
    /// Creates an empty set.
    pub(super) fn new(secret: Option<&Secret>) -> Self {
        Self { secret: secret.cloned(), ..Self::default() }
    }

    /// Returns the next site, for rank `me` of `ranks`. Returns `None` once the numbers are exhausted.
    pub(super) fn site(&mut self, me: usize, ranks: usize, leader: usize) -> Option<Site> {
        self.number = self.number.checked_add(1)?;
        Some(Site { number: self.number, me, ranks, leader, secret: self.secret.clone(), dropped: Arc::clone(&self.dropped) })
    }

    /// Whether there has ever been a window.
    #[inline]
    pub(super) fn has_had_any(&self) -> bool {
        self.number != 0
    }

    /// Adds a window.
    pub(super) fn insert(&mut self, Segment { window, .. }: &Segment) {
        let start = window.own().addr();
        let at = self.own.partition_point(|(other, ..)| *other < start);
        self.own.insert(at, (start, window.bytes, window.number));
        let at = self.open.partition_point(|other| other.number < window.number);
        self.open.insert(at, Arc::clone(window));
    }

    /// Releases the windows whose segments were dropped here.
    #[inline]
    pub(super) fn forget_dropped(&mut self) {
        if !self.open.is_empty() && self.dropped.load(Ordering::Relaxed) {
            self.look_through();
        }
    }

    /// Checks all windows, if there are any.
    #[cold]
    fn look_through(&mut self) {
        // Before the check, so that one that is dropped during it is found next time.
        self.dropped.swap(false, Ordering::Acquire);
        self.open.retain(is_held);
        let open = &self.open;
        self.own.retain(|(.., number)| open.binary_search_by_key(number, |window| window.number).is_ok());
    }

    /// Returns the number of windows.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        assert_eq!(self.open.len(), self.own.len());
        self.open.len()
    }

    /// Removes the view of a window, as if the kernel refused to put it in place.
    #[cfg(test)]
    pub(super) fn lose_view(&self, number: u32) {
        if let Some(window) = self.get(number) {
            *window.own.lock().unwrap() = Own::Shared(None);
        }
    }

    /// Makes this rank's segment of a window private. After that, no buffer is found in it.
    #[cold]
    pub(super) fn keep_own(&mut self, number: u32) -> io::Result<()> {
        if let Ok(at) = self.open.binary_search_by_key(&number, |window| window.number) {
            self.open[at].keep_own()?;
            self.own.retain(|(.., other)| *other != number);
        }
        Ok(())
    }

    /// Returns the window that contains a whole buffer of this rank, and the offset in it.
    #[inline]
    pub(super) fn find(&self, address: *const u8, bytes: usize) -> Option<WindowOffset> {
        if self.own.is_empty() {
            return None;
        }
        let before = self.own.partition_point(|(start, ..)| *start <= address.addr());
        let (start, length, window) = *self.own.get(before.checked_sub(1)?)?;
        let offset = address.addr() - start;
        (bytes <= length.checked_sub(offset)?).then_some(WindowOffset { window, offset })
    }

    /// Returns where `bytes` bytes at this position of a rank's segment lie in this rank's mapping. Returns `None` if
    /// this rank has dropped the window, or if they do not fit. The address is valid to the end of the call (see the
    /// top of this file). Whether its bytes may be read or written is what the ranks agree on in that call.
    #[inline]
    pub(super) fn address(&self, rank: usize, place: WindowOffset, bytes: usize) -> Option<*mut u8> {
        let window = self.get(place.window)?;
        let fits = rank < window.ranks && bytes <= window.bytes.checked_sub(place.offset)?;
        fits.then(|| window.pages.at(rank * window.stride + place.offset))
    }

    /// Returns the window of this number, unless its segment was dropped here.
    fn get(&self, number: u32) -> Option<&Arc<Window>> {
        let at = self.open.binary_search_by_key(&number, |window| window.number).ok()?;
        Some(&self.open[at]).filter(|window| is_held(window))
    }
}

/// Whether anything but the group holds the window: its segment.
fn is_held(window: &Arc<Window>) -> bool {
    Arc::strong_count(window) > 1
}
