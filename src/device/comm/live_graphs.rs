//! Tracks the graphs into which a communicator's calls were captured, and which of these calls are running.
//!
//! NCCL keeps a communicator as long as such a graph exists. If the communicator were ended before, that would wait
//! forever. A launch of a graph is not a call of this crate, so no code of this crate runs when a captured call begins.
//!
//! So each capture gets a *user object*, whose destructor the driver calls when the graph, everything made from it and
//! all their launches are gone. Each captured call also gets two small nodes. The node before the call writes the
//! call's number to a word of pinned memory, and the node after the call writes zero. From time to time, the host reads
//! the word, and marks the number that it has seen there. If the mark is still there at the next read, the same run of
//! the same call is still running, because every run overwrites the mark.
//!
//! Calls of one capture on one stream run one after the other, so they share a word. Branches have words of their own.
//! Launches of one executable graph follow each other by the driver's rules. If a program runs two executables of one
//! graph at the same time, which NCCL forbids, the end of one run hides that the other run is still in progress. A call
//! that is stuck in the other run is then noticed late or not at all, but no call is wrongly considered stuck. A launch
//! that the driver refuses writes nothing. If a capture fails in the middle of a call, a launch of its graph would
//! leave a number behind. The communicator of that call has ended by then.
//!
//! CUDA's documentation does not say whether such a node may write pinned memory. If a driver refuses the first node,
//! calls are captured without these nodes, and their launches are not watched.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use cudarc::driver::{CudaContext, CudaStream, DriverError};

use super::graph_memory::{Page, Word};
use crate::base::event;
use crate::device::driver;

/// Set by the host in a word whose number it has seen.
const SEEN: u32 = 1 << 31;

/// The graphs of one communicator.
#[derive(Debug, Default)]
pub(super) struct LiveGraphs {
    records: Mutex<Vec<Arc<Record>>>,
    /// The source of the next words.
    page: Mutex<Option<Arc<Page>>>,
    /// Whether the driver has refused a node that writes a word. Launches are not watched then.
    are_unwatched: AtomicBool,
}

/// The calls of one capture on one stream. The graph keeps it too, so it outlives both.
#[derive(Debug)]
struct Record {
    capture: u64,
    /// The stream's handle, to recognise it.
    stream: usize,
    word: Word,
    calls: Mutex<Vec<CapturedCall>>,
    /// When the number that is marked in the word was first seen.
    since: Mutex<Option<Instant>>,
    /// Whether the graph, and everything made from it, is gone.
    is_gone: AtomicBool,
}

/// A call in a graph: its fingerprint, and the longest time it may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct CapturedCall {
    pub(super) label: [u64; 4],
    pub(super) limit: Duration,
}

/// A captured call that is running.
#[derive(Debug, Clone, Copy)]
pub(super) struct Launched {
    pub(super) label: [u64; 4],
    pub(super) limit: Duration,
    /// When it was first seen.
    pub(super) since: Instant,
}

/// A call that is being captured. Its beginning is in the graph, except when launches are not watched.
#[derive(Debug)]
pub(super) struct Captured(Option<Arc<Record>>);

impl LiveGraphs {
    /// Returns the number of captures that still have a graph, or something made from it.
    pub(super) fn count(&self) -> usize {
        let records = self.living();
        records.iter().enumerate().filter(|(at, record)| records[..*at].iter().all(|other| other.capture != record.capture)).count()
    }

    /// Puts the beginning of a call into the graph that the stream is captured into; returns `None` if there is none.
    pub(super) fn begin(
        &self,
        context: &Arc<CudaContext>,
        stream: &CudaStream,
        call: CapturedCall,
    ) -> Result<Option<Captured>, DriverError> {
        let Some((capture, graph)) = driver::capture_of(stream)? else { return Ok(None) };
        driver::bind(context)?;
        let handle = stream.cu_stream().addr();
        let is_it = |record: &&Arc<Record>| record.capture == capture && record.stream == handle;
        let known = self.living().iter().find(is_it).map(Arc::clone);
        let record = match known {
            Some(record) => record,
            None => self.attach(context, capture, graph, handle)?,
        };
        if self.are_unwatched.load(Ordering::Relaxed) {
            return Ok(Some(Captured(None)));
        }
        let marked = record.word.set_in_order(record.add(call), stream);
        match marked {
            Ok(()) => Ok(Some(Captured(Some(record)))),
            Err(error) if is_refusal(error) => {
                event::warn!(%error, "the driver refuses to mark calls in graphs: a call that is stuck in a launched graph is not noticed");
                self.are_unwatched.store(true, Ordering::Relaxed);
                Ok(Some(Captured(None)))
            }
            Err(error) => Err(error),
        }
    }

    /// Makes a graph report its end.
    fn attach(&self, context: &Arc<CudaContext>, capture: u64, graph: sys::CUgraph, stream: usize) -> Result<Arc<Record>, DriverError> {
        let word = self.word(context)?;
        let (calls, since, is_gone) = (Mutex::default(), Mutex::default(), AtomicBool::new(false));
        let record = Arc::new(Record { capture, stream, word, calls, since, is_gone });
        tie(&record, graph)?;
        lock(&self.records).push(Arc::clone(&record));
        Ok(record)
    }

    /// Returns a new word. Called by one thread at a time: the thread that has the communicator.
    fn word(&self, context: &Arc<CudaContext>) -> Result<Word, DriverError> {
        let page = lock(&self.page).clone();
        if let Some(word) = page.and_then(|page| page.word()) {
            return Ok(word);
        }
        let page = Page::new(context)?;
        let word = page.word().ok_or(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY))?;
        *lock(&self.page) = Some(page);
        Ok(word)
    }

    /// Returns the running captured call that has the least time left. Only the timekeeper may call this, because it
    /// marks the numbers that it sees.
    pub(super) fn launched(&self, now: Instant) -> Option<Launched> {
        let left = |launched: &Launched| launched.limit.saturating_sub(now - launched.since);
        self.living().iter().filter_map(|record| record.launched(now)).min_by_key(left)
    }

    /// Returns the value of the first record's word, and replaces the value by `new` if there is one.
    #[cfg(test)]
    #[cfg(simgpu)]
    pub(super) fn first_word(&self, new: Option<u32>) -> u32 {
        let word = &self.living()[0].word;
        new.map_or_else(|| word.value().load(Ordering::Acquire), |new| word.value().swap(new, Ordering::AcqRel))
    }

    /// Returns the records whose graphs exist; the others are forgotten.
    fn living(&self) -> MutexGuard<'_, Vec<Arc<Record>>> {
        let mut records = lock(&self.records);
        records.retain(|record| !record.is_gone.load(Ordering::Acquire));
        records
    }
}

/// Whether the driver does not permit a node, rather than fails to make one.
fn is_refusal(error: DriverError) -> bool {
    use sys::CUresult::{
        CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_PERMITTED, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    };
    matches!(
        error.0,
        CUDA_ERROR_INVALID_VALUE | CUDA_ERROR_NOT_PERMITTED | CUDA_ERROR_NOT_SUPPORTED | CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    )
}

/// Gives a graph a reference to a record. The graph gives the reference back at its end.
fn tie(record: &Arc<Record>, graph: sys::CUgraph) -> Result<(), DriverError> {
    let data = Arc::into_raw(Arc::clone(record)).cast_mut().cast::<c_void>();
    let flags = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
    let mut object: sys::CUuserObject = std::ptr::null_mut();
    // SAFETY: the destructor may be called once, by any thread, with this data: a reference that is counted for it. The
    // answer goes to our variable.
    let created = unsafe { sys::cuUserObjectCreate(&mut object, data, Some(graph_is_gone), 1, flags) }.result();
    if let Err(error) = created {
        // SAFETY: the driver did not take the reference that was counted above, so it is given back here, once.
        drop(unsafe { Arc::from_raw(data.cast::<Record>()) });
        return Err(error);
    }
    let moved = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32;
    // SAFETY: the graph is the one that a stream is being captured into (`capture_of`, a moment ago, on the capturing
    // thread); the object is ours.
    let retained = unsafe { sys::cuGraphRetainUserObject(graph, object, 1, moved) }.result();
    if retained.is_err() {
        // SAFETY: the object's one reference is still ours; the destructor follows.
        let _ = unsafe { sys::cuUserObjectRelease(object, 1) };
    }
    retained
}

/// Notes that a graph is gone: the destructor of a user object, on a thread of the driver. It makes no driver call and
/// waits for nothing.
///
/// # Safety
///
/// `data` is a reference to a record that was counted for this call.
unsafe extern "C" fn graph_is_gone(data: *mut c_void) {
    // SAFETY: this function's contract.
    let record = unsafe { Arc::from_raw(data.cast::<Record>()) };
    record.is_gone.store(true, Ordering::Release);
}

impl Record {
    /// Adds a call; returns its number, from 1.
    fn add(&self, call: CapturedCall) -> u32 {
        let mut calls = lock(&self.calls);
        calls.push(call);
        calls.len() as u32 & !SEEN
    }

    /// Returns the call that is running, if any.
    fn launched(&self, now: Instant) -> Option<Launched> {
        let (word, mut since) = (self.word.value(), lock(&self.since));
        let value = word.load(Ordering::Acquire);
        let number = value & !SEEN;
        if number == 0 {
            *since = None;
            return None;
        }
        if value & SEEN == 0 || since.is_none() {
            // If the device has written since, the next read sees that.
            let _ = word.compare_exchange(value, value | SEEN, Ordering::AcqRel, Ordering::Acquire);
            *since = Some(now);
        }
        let CapturedCall { label, limit } = *lock(&self.calls).get(number as usize - 1)?;
        Some(Launched { label, limit, since: since.unwrap_or(now) })
    }
}

impl Captured {
    /// Puts the call's end into the graph. The context is current.
    pub(super) fn end(self, stream: &CudaStream) -> Result<(), DriverError> {
        self.0.map_or(Ok(()), |record| record.word.set_in_order(0, stream))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
