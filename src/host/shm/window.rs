//! Windows: memory of users that all ranks of a host map, so that a collective on it need not copy anything into slots.
//!
//! A window is one anonymous file with a segment for each rank, all of one size, and every rank maps all of it. A rank's buffer is its
//! own segment. Windows are numbered alike on every rank, so that a number and an offset say where a buffer lies to ranks that have it
//! mapped elsewhere.
//!
//! **How long a mapping lives.** A group holds every window that it was given. It lets go of one only between calls
//! ([`Windows::forget_dropped`], which wants them to itself), after its user has dropped the buffer. So what [`Windows::address`] gave stays
//! mapped to the end of the call, also where another thread drops the buffer meanwhile. Nobody else's memory goes away either: a rank that
//! drops its buffer gives back the pages of its own segment alone, and the others have mappings of their own. And no range that
//! [`Windows::find`] knows can be somebody else's memory by now, since it is still mapped.
//!
//! **Who uses a segment when.** Only its rank ever writes to it, through its own mapping. The others read it only in calls to which that rank
//! has lent it (see `lent`). While one may be reading, nothing changes that it reads: its rank does not write, since the buffer is borrowed
//! until the call has ended, and does not give back the pages. A call that does not end as it should gives the buffer back only when the
//! segment is *private*: a [`PrivateView`] has taken the place of the shared pages in its rank's mapping. The rank then still finds there what
//! was there, and keeps to itself what it writes. The others see the pages of the file as they were, for as long as they have them mapped. A
//! private segment is lent no more.

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

/// Where a buffer lies in its rank's windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WindowOffset {
    /// The window's number: the same on all ranks, from 1, never used again.
    pub(super) window: u32,
    /// Within the rank's own segment.
    pub(super) offset: usize,
}

/// What a rank says of its source and its destination: the windows they lie in, 0 for none, and where.
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

    /// The window that a buffer lies in, 0 for none.
    pub(super) fn window(&self, side: Side) -> u32 {
        self.windows[side as usize]
    }

    /// Where a buffer lies from its byte `start` on. `None` for a place that no address space has: any bytes can have been read as an offer.
    pub(super) fn place(&self, side: Side, start: usize) -> Option<WindowOffset> {
        let offset = usize::try_from(self.offsets[side as usize]).ok()?.checked_add(start)?;
        Some(WindowOffset { window: self.window(side), offset })
    }

    /// The windows that it names.
    pub(super) fn windows(&self) -> impl Iterator<Item = u32> + use<> {
        self.windows.into_iter().filter(|window| *window != 0)
    }
}

/// What every rank gets of an allocation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    /// Not zero.
    pub(crate) bytes: usize,
    /// What the elements want to be aligned to.
    pub(crate) align: usize,
}

/// One rank's mapping of a window.
#[derive(Debug)]
pub(super) struct Window {
    number: u32,
    pages: Pages,
    /// From one rank's segment to the next.
    stride: usize,
    /// What of a segment is used.
    bytes: usize,
    me: usize,
    ranks: usize,
    own: Mutex<Own>,
}

/// Whose this rank's own segment is.
#[derive(Debug)]
enum Own {
    /// Everybody sees what this rank writes. The view can take its place; there is none where ranks share one mapping, which it would
    /// be for all of them.
    Shared(Option<PrivateView>),
    /// The others see what was there when it became this rank's alone.
    Private,
}

impl Window {
    /// Where this rank's own segment begins.
    fn own(&self) -> *mut u8 {
        self.pages.at(self.me * self.stride)
    }

    /// Makes this rank's own segment its own, whose bytes are the same before and after, and which the others go on seeing.
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

    /// Frees the memory of this rank's own segment, as far as nobody else may need it.
    fn give_back_own(&self) {
        let (offset, bytes) = (self.me * self.stride, used(self.bytes));
        let is_shared = matches!(&*self.own.lock().unwrap_or_else(PoisonError::into_inner), Own::Shared(_));
        if is_shared {
            self.pages.give_back(offset, bytes);
        } else {
            // The file's pages may still be read, and go with the last mapping of them.
            self.pages.discard(offset, bytes);
        }
    }
}

/// A rank's own segment of a window, which is given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Segment {
    window: Arc<Window>,
    process: Process,
    /// Dropped after the window, so that whoever hears of it finds the window let go.
    _notice: DropNotice,
}

impl Drop for Segment {
    fn drop(&mut self) {
        // A call that has it borrows or owns the buffer that holds this, so none is under way, and each that was has ended for all ranks
        // or has made the segment private.
        if !self.process.is_foreign() {
            self.window.give_back_own();
        }
    }
}

/// Tells the group, by its drop, that a segment is gone.
#[derive(Debug)]
struct DropNotice(Arc<AtomicBool>);

impl Drop for DropNotice {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Memory of a user's that the crate has handed out.
#[derive(Debug)]
pub(crate) enum Storage {
    /// This rank's part of a window.
    Window(Segment),
    /// Of this process alone.
    Private(Pages),
}

impl Storage {
    /// Where it begins.
    pub(crate) fn base(&self) -> NonNull<u8> {
        match self {
            Storage::Private(pages) => pages.base(),
            // SAFETY: this rank's number is less than that of the segments, of `stride` bytes each, that the mapping holds; so this is inside it.
            Storage::Window(segment) => unsafe { segment.window.pages.base().add(segment.window.me * segment.window.stride) },
        }
    }

    /// Memory of this rank alone, in as many rounds of the exchange as a window takes.
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

/// The pages that so many bytes use.
fn used(bytes: usize) -> usize {
    bytes.next_multiple_of(rustix::param::page_size())
}

/// A window that is to be: its number, and who its ranks are.
pub(crate) struct Site {
    number: u32,
    me: usize,
    ranks: usize,
    /// The rank of the exchange that makes the file.
    leader: usize,
    /// What the others have to know to get the file.
    secret: Option<Secret>,
    dropped: Arc<AtomicBool>,
}

impl Site {
    /// Makes the window. Every rank of the communicator takes part in two rounds of the exchange: those of the host with the same
    /// site and size, the others with sites of theirs or by [`Storage::alone`].
    ///
    /// # Errors
    ///
    /// Where this rank or another one could not get the memory, or map it; and whatever the exchange says.
    pub(crate) fn open(&self, exchange: &mut dyn Exchange, size: Size, deadline: &Deadline) -> ShareResult<Segment> {
        let align = pages::alignment(size.bytes, size.align);
        let strides = size.bytes.checked_next_multiple_of(align);
        let Some((stride, whole)) = strides.and_then(|stride| Some((stride, stride.checked_mul(self.ranks)?))) else {
            let error =
                Error::io("laying out a shared buffer", io::Error::new(io::ErrorKind::OutOfMemory, "more than an address space holds"));
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

    /// Maps the file, and has the kernel find memory for this rank's segment: near the processor that it runs on, where there are
    /// several memories.
    fn enter(&self, file: OwnedFd, bytes: usize, stride: usize, align: usize) -> io::Result<Window> {
        let whole = stride * self.ranks;
        region::check(file.as_fd(), whole)?;
        let pages = Pages::of_file(file.as_fd(), whole, align)?;
        pages.populate(file.as_fd(), self.me * stride, used(bytes))?;
        let view = if cfg!(one_mapping) { None } else { Some(PrivateView::new(file.as_fd(), self.me * stride, used(bytes))?) };
        Ok(self.window(pages, view, bytes, stride))
    }

    /// The same for the threads of one process, where memory has a number in place of a file.
    #[cfg(miri)]
    fn numbered(&self, number: u64, bytes: usize, stride: usize, align: usize) -> io::Result<Window> {
        Ok(self.window(Pages::numbered(number, stride * self.ranks, align)?, None, bytes, stride))
    }

    /// This rank's mapping of the window.
    fn window(&self, pages: Pages, view: Option<PrivateView>, bytes: usize, stride: usize) -> Window {
        let own = Mutex::new(Own::Shared(view));
        Window { number: self.number, pages, stride, bytes, me: self.me, ranks: self.ranks, own }
    }
}

/// Makes the file: its size fixed, its bytes zero, `used` of them to be used. Memory is found for it later; where the system is known
/// not to have so much, that is not tried, since it would end processes to find it.
fn create(bytes: usize, used: usize) -> io::Result<OwnedFd> {
    if let Some(available) = available_memory().filter(|available| *available < used) {
        let message = format!("{used} B are needed on this host and {available} B are available");
        return Err(io::Error::new(io::ErrorKind::OutOfMemory, message));
    }
    region::create("collectives-buffer", bytes)
}

/// What the system could give to programs now, swap included, in bytes; `None` where it does not say.
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
    /// In the order of their numbers.
    open: Vec<Arc<Window>>,
    /// Where this rank's segments begin, ascending, how long they are, and of which window.
    own: Vec<(usize, usize, u32)>,
    /// The last number that was given out.
    number: u32,
    /// What whoever is to get a window's file has to know.
    secret: Option<Secret>,
    /// Whether a segment of `open` was dropped since they were looked through.
    dropped: Arc<AtomicBool>,
}

impl Windows {
    /// None yet.
    pub(super) fn new(secret: Option<&Secret>) -> Self {
        Self { secret: secret.cloned(), ..Self::default() }
    }

    /// The next one, of the rank `me` of `ranks`. `None` once the numbers are used up.
    pub(super) fn site(&mut self, me: usize, ranks: usize, leader: usize) -> Option<Site> {
        self.number = self.number.checked_add(1)?;
        Some(Site { number: self.number, me, ranks, leader, secret: self.secret.clone(), dropped: Arc::clone(&self.dropped) })
    }

    /// Whether there has ever been one.
    #[inline]
    pub(super) fn has_had_any(&self) -> bool {
        self.number != 0
    }

    /// Lists a window.
    pub(super) fn insert(&mut self, Segment { window, .. }: &Segment) {
        let start = window.own().addr();
        let at = self.own.partition_point(|(other, ..)| *other < start);
        self.own.insert(at, (start, window.bytes, window.number));
        let at = self.open.partition_point(|other| other.number < window.number);
        self.open.insert(at, Arc::clone(window));
    }

    /// Lets go of the windows whose segments were dropped here.
    #[inline]
    pub(super) fn forget_dropped(&mut self) {
        if !self.open.is_empty() && self.dropped.load(Ordering::Relaxed) {
            self.look_through();
        }
    }

    /// The same, where there are some.
    #[cold]
    fn look_through(&mut self) {
        // Before the look, so that one that is dropped during it is looked for again.
        self.dropped.swap(false, Ordering::Acquire);
        self.open.retain(is_held);
        let open = &self.open;
        self.own.retain(|(.., number)| open.binary_search_by_key(number, |window| window.number).is_ok());
    }

    /// How many are listed.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        assert_eq!(self.open.len(), self.own.len());
        self.open.len()
    }

    /// Takes the view of a window away, as where the kernel would not put it in its place.
    #[cfg(test)]
    pub(super) fn lose_view(&self, number: u32) {
        if let Some(window) = self.get(number) {
            *window.own.lock().unwrap() = Own::Shared(None);
        }
    }

    /// Makes this rank's segment of a window its own, which is then found in no window any more.
    #[cold]
    pub(super) fn keep_own(&mut self, number: u32) -> io::Result<()> {
        if let Ok(at) = self.open.binary_search_by_key(&number, |window| window.number) {
            self.open[at].keep_own()?;
            self.own.retain(|(.., other)| *other != number);
        }
        Ok(())
    }

    /// Which window a buffer of this rank lies in, with all of its bytes, and where.
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

    /// Where `bytes` bytes at this place of a rank's segment lie in this rank's mapping. `None` where this rank has dropped the window,
    /// or they do not fit. The address is good to the end of the call (see the head of this file); whether its bytes may be read or
    /// written is what the ranks agree on in that call.
    #[inline]
    pub(super) fn address(&self, rank: usize, place: WindowOffset, bytes: usize) -> Option<*mut u8> {
        let window = self.get(place.window)?;
        let fits = rank < window.ranks && bytes <= window.bytes.checked_sub(place.offset)?;
        fits.then(|| window.pages.at(rank * window.stride + place.offset))
    }

    /// The window of this number, unless its segment was dropped here.
    fn get(&self, number: u32) -> Option<&Arc<Window>> {
        let at = self.open.binary_search_by_key(&number, |window| window.number).ok()?;
        Some(&self.open[at]).filter(|window| is_held(window))
    }
}

/// Whether anyone beside the group has the window: its segment.
fn is_held(window: &Arc<Window>) -> bool {
    Arc::strong_count(window) > 1
}
