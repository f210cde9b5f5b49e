//! The streams on which a communicator's calls were put, and their progress.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, CudaStream, DriverError};

use crate::base::tuning::device::MARKS;
use crate::device::driver::{self, Event};

/// One stream that a communicator uses. Its numbers are read without a lock, because the holder of the marks' lock may
/// be stuck in the driver.
#[derive(Debug)]
pub(super) struct StreamTracker {
    pub(super) stream: Arc<CudaStream>,
    /// The recorder's number for the tracker.
    pub(super) number: u8,
    /// The number of calls that have been put on the stream.
    issued: AtomicU64,
    /// The number of these calls that the newest mark covers.
    covered: AtomicU64,
    /// The number of calls at the time when a capture last prevented a mark on the stream.
    excused: AtomicU64,
    /// The number of calls that are known to be done, because a thread waited for them.
    settled: AtomicU64,
    /// The number of marks that the stream has not reached.
    pending: AtomicUsize,
    marks: Mutex<Marks>,
}

/// The time that calls may take: a limit that successive calls of one communicator share, and its number among such
/// limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Term {
    pub(super) number: u64,
    pub(super) limit: Duration,
}

/// The term of unfinished calls, and the time at which they were marked.
pub(super) type Outstanding = (Term, Instant);

/// An event on a stream, after calls that were put there.
#[derive(Debug)]
struct Mark {
    event: Event,
    /// The time at which the event was put there.
    since: Instant,
    /// The number of calls that were on record before.
    noted: u64,
    /// The term of the calls, which is the same for all of them.
    term: Term,
}

/// The marks, oldest first.
#[derive(Debug, Default)]
struct Marks {
    pending: VecDeque<Mark>,
    spare: Vec<Event>,
}

impl StreamTracker {
    pub(super) fn new(stream: &Arc<CudaStream>, number: u8) -> Self {
        let [issued, covered, excused, settled] = Default::default();
        Self {
            stream: Arc::clone(stream),
            number,
            issued,
            covered,
            excused,
            settled,
            pending: AtomicUsize::new(0),
            marks: Mutex::default(),
        }
    }

    #[inline]
    pub(super) fn is(&self, stream: &CudaStream) -> bool {
        self.stream.cu_stream() == stream.cu_stream()
    }

    /// Counts a call that is on the stream now. One thread at a time does this: the thread that has the communicator.
    #[inline]
    pub(super) fn count(&self) {
        self.issued.store(self.issued.load(Ordering::Relaxed) + 1, Ordering::Release);
    }

    /// Returns the number of calls that have been put on the stream.
    pub(super) fn issued(&self) -> u64 {
        self.issued.load(Ordering::Acquire)
    }

    /// Notes that the first `calls` calls are done. For a stream that differs on each thread, this cannot be known.
    pub(super) fn settle(&self, calls: u64) {
        if self.is_followed() {
            self.settled.fetch_max(calls, Ordering::AcqRel);
        }
    }

    /// Whether calls may be under way.
    pub(super) fn may_be_at_work(&self) -> bool {
        let is_idle = self.is_idle() && self.is_followed();
        !is_idle && self.settled.load(Ordering::Acquire) < self.issued()
    }

    /// Whether calls were put on the stream that no mark covers.
    pub(super) fn has_new_calls(&self) -> bool {
        self.covered.load(Ordering::Acquire) != self.issued.load(Ordering::Acquire)
    }

    /// Returns the number of marked calls, if there are other calls that could be marked.
    pub(super) fn unmarked_behind(&self) -> Option<u64> {
        let (covered, excused) = (self.covered.load(Ordering::Acquire), self.excused.load(Ordering::Acquire));
        (self.issued.load(Ordering::Acquire) > covered.max(excused)).then_some(covered)
    }

    /// Whether the stream's calls can be followed at all.
    pub(super) fn is_followed(&self) -> bool {
        !driver::is_per_thread(&self.stream)
    }

    /// Whether all calls are known to be done.
    pub(super) fn is_idle(&self) -> bool {
        // In this order: a mark is pending before its calls count as marked.
        !self.has_new_calls() && self.pending.load(Ordering::Acquire) == 0
    }

    /// Marks the end of the stream's work so far. The stream's context is current.
    ///
    /// `term` is evaluated after the calls were counted, under the lock of the marks. A thread that begins another term
    /// first marks the counted calls, under that lock. So all calls after the last mark have the term that is found.
    pub(super) fn mark(
        &self,
        context: &Arc<CudaContext>,
        now: Instant,
        noted: u64,
        term: impl FnOnce() -> Term,
    ) -> Result<(), DriverError> {
        let mut marks = self.marks();
        let issued = self.issued.load(Ordering::Acquire);
        let term = term();
        if driver::is_per_thread(&self.stream) {
            self.covered.store(issued, Ordering::Release);
            return Ok(());
        }
        if !driver::capture_status(&self.stream)? {
            let event = marks.spare.pop().map_or_else(|| Event::new(context), Ok)?;
            event.record(&self.stream)?;
            // The stream's owner may have begun a capture in between. The mark then belongs to that capture. This is
            // harmless as long as the mark is not queried, because a query would end the capture.
            if !driver::capture_status(&self.stream)? {
                marks.pending.push_back(Mark { event, since: now, noted, term });
                self.pending.store(marks.pending.len(), Ordering::Release);
                self.covered.store(issued, Ordering::Release);
                return Ok(());
            }
        }
        self.excused.store(issued, Ordering::Release);
        Ok(())
    }

    /// Whether the stream has as many marks as the watchdog may make.
    pub(super) fn is_full(&self) -> bool {
        self.pending.load(Ordering::Acquire) >= MARKS
    }

    /// Returns the term of the oldest unfinished call, and the time at which it was marked. If calls have completed
    /// since the last query, also returns the number of calls that were on record before their mark. The context is
    /// current.
    pub(super) fn progress(&self) -> Result<(Option<Outstanding>, Option<u64>), DriverError> {
        let mut marks = self.marks();
        let mut done = None;
        while let Some(Mark { event, since, noted, term }) = marks.pending.front() {
            match event.is_complete() {
                Ok(false) => return Ok((Some((*term, *since)), done)),
                Ok(true) => done = Some(*noted),
                // The mark belongs to a capture that began and ended around it, and proves nothing about the calls
                // before it. Calls that no later mark covers must be marked again.
                Err(DriverError(CUresult::CUDA_ERROR_CAPTURED_EVENT)) if marks.pending.len() == 1 => {
                    self.covered.store(0, Ordering::Release)
                }
                Err(DriverError(CUresult::CUDA_ERROR_CAPTURED_EVENT)) => {}
                Err(error) => return Err(error),
            }
            if let Some(Mark { event, .. }) = marks.pending.pop_front() {
                marks.spare.push(event);
            }
            self.pending.store(marks.pending.len(), Ordering::Release);
        }
        Ok((None, done))
    }

    fn marks(&self) -> std::sync::MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[cfg(simgpu)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;

    use super::*;

    const TERM: Term = Term { number: 0, limit: Duration::from_secs(1) };

    #[test]
    fn a_mark_that_a_capture_took_ends_no_call() {
        simgpu::install();
        let gpu = driver::open(6).unwrap();
        let tracker = StreamTracker::new(&gpu.context.new_stream().unwrap(), 0);
        tracker.count();
        // As if the stream's owner captured between the two queries of `mark`.
        tracker.stream.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        let event = Event::new(&gpu.context).unwrap();
        event.record(&tracker.stream).unwrap();
        drop(tracker.stream.end_capture(cudarc::driver::sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH));
        tracker.marks().pending.push_back(Mark { event, since: Instant::now(), noted: 1, term: TERM });
        tracker.pending.store(1, Ordering::Release);
        tracker.covered.store(1, Ordering::Release);
        assert_eq!(tracker.progress().unwrap(), (None, None));
        assert!(tracker.may_be_at_work() && tracker.has_new_calls());
        tracker.mark(&gpu.context, Instant::now(), 1, || TERM).unwrap();
        tracker.stream.synchronize().unwrap();
        assert_eq!(tracker.progress().unwrap(), (None, Some(1)));
        assert!(!tracker.may_be_at_work());
    }
}
