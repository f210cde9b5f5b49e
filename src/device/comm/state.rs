//! What a communicator consists of, who may use it now, and what became of it.

use std::ffi::CString;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaStream, DriverError};
use nccl_sys::{Library, ncclComm, ncclResult_t};

use super::lane::Lane;
use super::lock::{Device, Pace, lock_within, try_lock};
use crate::call::Call;
use crate::deadline::Deadline;
use crate::device::driver;
use crate::device::lookout::Lookout;
use crate::device::nccl::{self, Raw, Refusal};
use crate::error::{Error, Peer, Result};

/// How long giving something back waits for the device, at most.
const REST_PATIENCE: Duration = Duration::from_secs(600);

/// What threads that use a communicator and the watchdog share.
#[derive(Debug)]
pub(in crate::device) struct Inner {
    pub(super) library: &'static Library,
    pub(super) device: &'static Device,
    pub(super) context: Arc<CudaContext>,
    /// NCCL's handle; null once it has been given back. Loaded, used and taken away under the lock of the device.
    pub(super) handle: AtomicPtr<ncclComm>,
    /// The order in which several communicators are locked.
    pub(super) number: u64,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// Held for the whole of a call, also while it is in progress and nobody is inside NCCL; keeps the lane of the last call.
    pub(super) gate: Mutex<Option<Arc<Lane>>>,
    lanes: Mutex<Vec<Arc<Lane>>>,
    /// Whether calls are refused for good.
    pub(super) ended: AtomicBool,
    /// Whether only splits, shrinks and the end remain.
    pub(super) revoked: AtomicBool,
    pub(super) failure: OnceLock<Arc<Error>>,
    /// How many times a thread has entered NCCL, times two, plus one while one is inside.
    entries: AtomicU64,
    /// How long the device may take for a call, in nanoseconds.
    limit: AtomicU64,
    /// The fingerprint of the last call; words of two calls may be mixed where one is being made just now.
    label: [AtomicU64; 4],
    /// When a call that the device has not done is warned of, and since when the one has been waiting that was.
    stall: Mutex<(Duration, Option<Instant>)>,
    /// Who knows more about the other ranks, if anybody does.
    lookout: Mutex<Option<Arc<dyn Lookout>>>,
    /// What only the watchdog knows: the entry it saw last, and when it saw it first.
    seen: Mutex<Option<(u64, Instant)>>,
    /// The configuration's, which NCCL may look at for as long as the communicator lives.
    _strings: [Option<CString>; 2],
}

/// What a communicator is made from.
#[derive(Debug, Clone)]
pub(super) struct Parts {
    pub(super) library: &'static Library,
    pub(super) device: &'static Device,
    pub(super) context: Arc<CudaContext>,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) lookout: Option<Arc<dyn Lookout>>,
}

impl Inner {
    pub(super) fn new(parts: Parts, handle: *mut ncclComm, strings: [Option<CString>; 2]) -> Arc<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let Parts { library, device, context, rank, world_size, lookout } = parts;
        Arc::new(Self {
            library,
            device,
            context,
            handle: AtomicPtr::new(handle),
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            rank,
            world_size,
            gate: Mutex::default(),
            lanes: Mutex::default(),
            ended: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            failure: OnceLock::new(),
            entries: AtomicU64::new(0),
            limit: AtomicU64::new(u64::MAX),
            label: Default::default(),
            stall: Mutex::new((Duration::MAX, None)),
            lookout: Mutex::new(lookout),
            seen: Mutex::default(),
            _strings: strings,
        })
    }

    /// Whether calls are refused for good.
    pub(in crate::device) fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Whether collectives are refused.
    pub(super) fn is_over(&self) -> bool {
        self.is_ended() || self.revoked.load(Ordering::Acquire)
    }

    /// Whether collectives are refused and the rest is not.
    pub(super) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire) && !self.is_ended()
    }

    /// Why calls are refused.
    pub(super) fn cause(&self) -> Arc<Error> {
        let by = Peer::unknown(self.rank);
        let closed = || Arc::new(Error::Aborted { doing: "the communicator was revoked or closed".to_owned(), by });
        self.failure.get().cloned().unwrap_or_else(closed)
    }

    /// The refusal of a call.
    #[cold]
    pub(super) fn refuse(&self, doing: &dyn Fn() -> String) -> Error {
        Error::Poisoned { call: doing(), cause: self.cause() }
    }

    /// Takes the communicator for one call.
    #[inline]
    pub(super) fn enter(self: &Arc<Self>, doing: &dyn Fn() -> String, limit: Duration) -> Result<MutexGuard<'_, Option<Arc<Lane>>>> {
        let Some(gate) = lock_within(&self.gate, limit) else { return Err(self.expire(doing, limit)) };
        if self.is_over() { Err(self.refuse(doing)) } else { Ok(gate) }
    }

    /// Calls into NCCL; `true` where it is still in progress. What fails ends the communicator, unless it is harmless.
    #[inline]
    pub(super) fn inside(
        self: &Arc<Self>,
        doing: &dyn Fn() -> String,
        limit: Duration,
        work: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
    ) -> Result<bool> {
        let outcome = {
            let Some(_lock) = lock_within(&self.device.lock, limit) else { return Err(self.expire(doing, limit)) };
            let handle = self.handle.load(Ordering::Acquire);
            if handle.is_null() || self.is_ended() {
                return Err(self.refuse(doing));
            }
            self.call(handle, work)
        };
        outcome.map_err(|refusal| self.refused(refusal, doing))
    }

    /// The lock of the device is held, and the handle is alive.
    #[inline]
    pub(super) fn call(
        &self,
        handle: *mut ncclComm,
        work: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
    ) -> std::result::Result<bool, Refusal> {
        driver::bind(&self.context).map_err(|error| Refusal::driver("cuCtxSetCurrent", error))?;
        let _entry = Entry::new(&self.entries);
        let raw = Raw::new(self.library, handle);
        work(&raw)?;
        Ok(raw.is_in_progress())
    }

    /// What NCCL says of the communicator now; nothing where the device was not free within the limit.
    pub(super) fn state(&self, limit: Duration) -> Option<std::result::Result<ncclResult_t, Refusal>> {
        const CALL: &str = "ncclCommGetAsyncError";
        let _lock = lock_within(&self.device.lock, limit)?;
        let handle = self.handle.load(Ordering::Acquire);
        if handle.is_null() {
            return None;
        }
        if let Err(error) = driver::bind(&self.context) {
            return Some(Err(Refusal::driver("cuCtxSetCurrent", error)));
        }
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the handle is alive while the lock of the device is held, and the answer goes to a variable of ours.
        let answer = unsafe { self.library.ncclCommGetAsyncError(handle, &mut state) };
        let judged = nccl::check(self.library, handle, CALL, answer).and_then(|_| match state {
            ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress => Ok(state),
            code => Err(nccl::refused(self.library, handle, CALL, code)),
        });
        Some(judged)
    }

    /// Ends the communicator if NCCL says that something went wrong in the background.
    pub(in crate::device) fn look(self: &Arc<Self>) {
        if self.is_ended() {
            return;
        }
        if let Some(Err(refusal)) = self.state(Duration::ZERO) {
            let error = self.explained(refusal.into_error(self.last_call()));
            self.fail(error, Duration::ZERO);
        }
    }

    /// Puts a call on record that is on the stream now.
    #[inline]
    pub(super) fn note(&self, last: &mut Option<Arc<Lane>>, stream: &Arc<CudaStream>, limit: Duration) {
        self.limit.store(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        match last {
            Some(lane) if lane.is(stream) => lane.count(),
            _ => last.insert(self.lane(stream)).count(),
        }
    }

    #[cold]
    fn lane(&self, stream: &Arc<CudaStream>) -> Arc<Lane> {
        let mut lanes = self.lanes();
        if let Some(known) = lanes.iter().find(|lane| lane.is(stream)) {
            return Arc::clone(known);
        }
        let lane = Arc::new(Lane::new(stream));
        lanes.push(Arc::clone(&lane));
        lane
    }

    fn lanes(&self) -> MutexGuard<'_, Vec<Arc<Lane>>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn label(&self, words: [u64; 4]) {
        for (kept, word) in self.label.iter().zip(words) {
            kept.store(word, Ordering::Relaxed);
        }
    }

    /// The last call in words.
    pub(super) fn last_call(&self) -> String {
        let words = std::array::from_fn(|index| self.label[index].load(Ordering::Relaxed));
        let who = format!("rank {} of {}", self.rank, self.world_size);
        Call::from_fingerprint(words).map_or_else(|| format!("{who}: the last call"), |call| format!("{who}: {call}"))
    }

    /// How long the device may take for a call.
    pub(in crate::device) fn limit(&self) -> Duration {
        Duration::from_nanos(self.limit.load(Ordering::Relaxed))
    }

    /// One round of the watchdog: marks new work, and ends the communicator where old work has not come to its end in time.
    pub(in crate::device) fn patrol(self: &Arc<Self>, now: Instant) {
        self.look();
        let trouble = match self.oldest(now) {
            Err(error) => Some(driver::cuda_error(self.last_call(), error)),
            Ok(since) => [since, self.stuck_since(now)].into_iter().flatten().min().and_then(|since| {
                self.warn_of_stall(since, now);
                let waited = now - since;
                self.overdue(waited).or_else(|| self.trouble(&|| self.last_call(), waited))
            }),
        };
        if let Some(error) = trouble.filter(|_| !self.is_ended()) {
            self.fail(error, Duration::ZERO);
        }
    }

    /// Warns, once, of what has been waiting on the device since then.
    fn warn_of_stall(&self, since: Instant, now: Instant) {
        let mut stall = self.stall.lock().unwrap_or_else(PoisonError::into_inner);
        let (after, elapsed) = (stall.0.min(self.limit() / 2), now - since);
        if stall.0 == Duration::MAX || elapsed < after || stall.1 == Some(since) {
            return;
        }
        stall.1 = Some(since);
        let (waited, limit) = (elapsed.as_secs_f64(), self.limit().as_secs_f64());
        tracing::warn!(
            rank = self.rank,
            call = self.last_call(),
            "the device has not done what was queued {waited:.1} s ago, up to this call at most; giving up after {limit:.1} s"
        );
    }

    /// After how long a call that the device has not done is warned of; zero for never.
    pub(in crate::device) fn warn_after(&self, after: Duration) {
        let after = if after.is_zero() { Duration::MAX } else { after };
        self.stall.lock().unwrap_or_else(PoisonError::into_inner).0 = after;
    }

    fn overdue(&self, elapsed: Duration) -> Option<Error> {
        (elapsed > self.limit()).then(|| self.timeout(self.last_call(), elapsed))
    }

    /// The error of a deadline that has passed, which names who is known not to run.
    pub(super) fn timeout(&self, doing: String, elapsed: Duration) -> Error {
        let missing = self.lookout().map_or_else(Vec::new, |lookout| lookout.standing_still());
        Error::Timeout { doing, elapsed, missing, arrived: Vec::new() }
    }

    /// Why nothing will come of what has been waiting for so long, as far as the lookout knows.
    pub(super) fn trouble(&self, doing: &dyn Fn() -> String, waited: Duration) -> Option<Error> {
        self.lookout()?.trouble(doing, waited)
    }

    /// An error of NCCL's about some other rank names that, where it is known which.
    pub(super) fn explained(&self, error: Error) -> Error {
        match &error {
            Error::Nccl { code, doing, .. } if *code == ncclResult_t::ncclRemoteError.0 => {
                let lookout = self.lookout();
                lookout.and_then(|lookout| lookout.culprit(&|| doing.clone())).unwrap_or(error)
            }
            _ => error,
        }
    }

    pub(super) fn lookout(&self) -> Option<Arc<dyn Lookout>> {
        self.lookout.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Has somebody else look out.
    pub(super) fn look_out(&self, lookout: Arc<dyn Lookout>) {
        *self.lookout.lock().unwrap_or_else(PoisonError::into_inner) = Some(lookout);
    }

    /// Since when the oldest call that the device has not done has been waiting.
    fn oldest(&self, now: Instant) -> std::result::Result<Option<Instant>, DriverError> {
        let mut lanes = self.lanes();
        if lanes.iter().all(|lane| lane.is_idle()) && lanes.iter().all(|lane| Arc::strong_count(lane) > 1) {
            return Ok(None);
        }
        driver::bind(&self.context)?;
        let mut oldest = None;
        for lane in lanes.iter() {
            if lane.has_news()
                && let Some(_lock) = try_lock(&self.device.lock)
            {
                lane.mark(&self.context, now)?;
            }
            oldest = [oldest, lane.waiting_since()?].into_iter().flatten().min();
        }
        // A stream that is not in use any more need not be kept alive.
        lanes.retain(|lane| Arc::strong_count(lane) > 1 || !lane.is_idle());
        Ok(oldest)
    }

    /// Since when one thread has been inside NCCL, at least.
    fn stuck_since(&self, now: Instant) -> Option<Instant> {
        let entry = self.entries.load(Ordering::Relaxed);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        match *seen {
            _ if entry.is_multiple_of(2) => *seen = None,
            Some((known, _)) if known == entry => {}
            _ => *seen = Some((entry, now)),
        }
        seen.map(|(_, since)| since)
    }

    /// Makes a call once the device has done all that is on record, and waits for its end. A communicator that has ended needs none, and one
    /// that the device does not come to rest for is ended.
    pub(in crate::device) fn manage_at_rest(
        self: &Arc<Self>,
        doing: &dyn Fn() -> String,
        work: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
    ) {
        let deadline = Deadline::after(self.limit().min(REST_PATIENCE));
        let Some(_gate) = lock_within(&self.gate, deadline.remaining()).filter(|_| !self.is_ended()) else { return };
        let outcome = match self.quiesce(&deadline) {
            Ok(true) => self.inside(doing, deadline.remaining(), work).and_then(|_| self.settled(doing, &deadline)),
            Ok(false) => Err(self.expire(doing, deadline.elapsed())),
            Err(error) => Err(self.end(driver::cuda_error(doing(), error), doing)),
        };
        if let Err(error) = outcome {
            tracing::warn!(%error, "a call that gives something back to NCCL failed");
        }
    }

    /// Waits until the device has done all that is on record.
    pub(super) fn quiesce(&self, deadline: &Deadline) -> std::result::Result<bool, DriverError> {
        driver::bind(&self.context)?;
        let mut pace = Pace::default();
        loop {
            let now = Instant::now();
            if self.is_ended() || (self.oldest(now)?.is_none() && !self.lanes().iter().any(|lane| lane.has_waitable_news())) {
                return Ok(true);
            }
            if deadline.has_passed() {
                return Ok(false);
            }
            pace.rest();
        }
    }
}

/// Waits until no call of these communicators is in progress any more. `stop` is asked now and then whether to go on.
pub(super) fn settle(
    inners: &[&Arc<Inner>],
    doing: &dyn Fn() -> String,
    deadline: &Deadline,
    stop: impl Fn(&Inner) -> bool,
) -> std::result::Result<(), (usize, Error)> {
    let mut pace = Pace::default();
    loop {
        let mut in_progress = None;
        for (index, inner) in inners.iter().enumerate() {
            match inner.state(deadline.remaining()) {
                _ if inner.is_ended() || stop(inner) => return Err((index, inner.refuse(doing))),
                Some(Ok(ncclResult_t::ncclSuccess)) => {}
                Some(Ok(_)) | None => in_progress = Some(index),
                Some(Err(refusal)) => return Err((index, refusal.into_error(doing()))),
            }
        }
        let Some(late) = in_progress else { return Ok(()) };
        if deadline.has_passed() {
            return Err((late, inners[late].timeout(doing(), deadline.elapsed())));
        }
        if let Some(error) = inners[late].trouble(doing, deadline.elapsed()) {
            return Err((late, error));
        }
        pace.rest();
    }
}

/// A thread's stay inside NCCL.
struct Entry<'a>(&'a AtomicU64);

impl<'a> Entry<'a> {
    #[inline]
    fn new(entries: &'a AtomicU64) -> Self {
        // One thread at a time, the one that holds the lock of the device.
        entries.store(entries.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        Self(entries)
    }
}

impl Drop for Entry<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(self.0.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}

/// A handle that is none.
pub(super) const NONE: *mut ncclComm = ptr::null_mut();
