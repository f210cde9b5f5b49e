//! Hands a communicator's host plane back and forth between its caller and its worker, without a lock.

#![expect(unsafe_code, reason = "exclusive access is passed on by a counter instead of a lock")]

use std::cell::Cell;
use std::sync::{OnceLock, PoisonError};

use crate::fork::Process;
use crate::sync::{AtomicUsize, Condvar, Mutex, Ordering, ThreadId, UnsafeCell, current};

/// A value that belongs to the worker while jobs are pending, and to the caller while none are.
///
/// Jobs are submitted by the caller alone, so once it has seen none pending it keeps the value until it submits again.
#[derive(Debug)]
pub(super) struct HandOff<T> {
    value: UnsafeCell<T>,
    pending: AtomicUsize,
    /// The worker, once it has run a job.
    worker: OnceLock<ThreadId>,
    /// Wakes a caller that waits for the jobs to end.
    idle: (Mutex<()>, Condvar),
    /// The worker's process.
    process: Process,
}

// SAFETY: the value is reached from one thread at a time, by the contracts of `as_caller` and `as_worker`; it is `Send`.
unsafe impl<T: Send> Sync for HandOff<T> {}

/// The caller's side. One exists for each hand-off; it cannot be shared between threads, nor entered twice.
#[derive(Debug, Default)]
pub(super) struct CallerSide {
    busy: Cell<bool>,
}

/// Gives the caller's side free again, also when a fold panics.
struct Busy<'a>(&'a Cell<bool>);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// Counts a job out at its end, also when it panics: the caller would wait for ever.
struct Running<'a, T>(&'a HandOff<T>);

impl<T> Drop for Running<'_, T> {
    fn drop(&mut self) {
        if self.0.pending.fetch_sub(1, Ordering::Release) == 1 {
            let _guard = self.0.idle.0.lock().unwrap_or_else(PoisonError::into_inner);
            self.0.idle.1.notify_all();
        }
    }
}

impl<T> HandOff<T> {
    /// A hand-off in the caller's hands.
    pub(super) fn new(value: T) -> Self {
        let idle = (Mutex::new(()), Condvar::new());
        Self { value: UnsafeCell::new(value), pending: AtomicUsize::new(0), worker: OnceLock::new(), idle, process: Process::this() }
    }

    /// Runs `work` on the caller's thread once every submitted job has ended. `None` where it is entered from within itself or
    /// from within a job, which would wait for its own end (a custom op that calls its own communicator), and in a forked child that
    /// would wait for a worker that it has not got.
    ///
    /// # Safety
    ///
    /// `side` is the only caller's side of this hand-off.
    pub(super) unsafe fn as_caller<R>(&self, side: &CallerSide, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        if side.busy.replace(true) {
            return None;
        }
        let _busy = Busy(&side.busy);
        if self.pending.load(Ordering::Acquire) != 0 {
            if self.is_worker() || self.process.is_foreign() {
                return None;
            }
            self.wait_idle();
        }
        // SAFETY: - exclusive on this thread: `busy` was clear, and `side` is the only one (trusted of the caller);
        // - exclusive against the worker: no job is pending (Acquire, pairs with the worker's Release), and only the owner of
        //   `side`, which is not `Sync` and is in use here, can submit one.
        Some(self.value.with_mut(|value| work(unsafe { &mut *value })))
    }

    /// Counts a job in; the worker must end it with [`HandOff::as_worker`].
    pub(super) fn submit(&self) {
        self.pending.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a job out that never reached the worker.
    pub(super) fn withdraw(&self) {
        self.pending.fetch_sub(1, Ordering::Release);
    }

    /// Runs one submitted job on the worker's thread.
    ///
    /// # Safety
    ///
    /// Called by one worker thread only, once for each [`HandOff::submit`].
    pub(super) unsafe fn as_worker<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        let _ = self.worker.set(current().id());
        let _running = Running(self);
        // SAFETY: - exclusive against the caller: this job was counted in before it was handed over, and is counted out by `_running`, which
        //   is dropped after the borrow has ended, so the caller finds it pending and stays away (Release there, Acquire in `as_caller`);
        // - exclusive on this side: there is one worker, which runs one job at a time (trusted of the caller).
        self.value.with_mut(|value| work(unsafe { &mut *value }))
    }

    /// Whether this thread is the worker.
    pub(super) fn is_worker(&self) -> bool {
        self.worker.get() == Some(&current().id())
    }

    /// Waits until no job is pending.
    fn wait_idle(&self) {
        let mut guard = self.idle.0.lock().unwrap_or_else(PoisonError::into_inner);
        while self.pending.load(Ordering::Acquire) != 0 {
            guard = self.idle.1.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::sync::Arc;

    use super::*;

    // No model: loom runs all threads on one, and an unwinding that is interrupted looks like everybody's there. The way by which a job is
    // counted out is the one that the models go through.
    #[test]
    fn a_job_that_panics_is_counted_out_and_the_next_one_runs() {
        let (hand_off, side) = (Arc::new(HandOff::new(vec![])), CallerSide::default());
        for round in 0..100 {
            hand_off.submit();
            hand_off.submit();
            let worker = Arc::clone(&hand_off);
            let job = move |job: u32, panics: bool| {
                let work = |done: &mut Vec<u32>| {
                    done.push(job);
                    // Past the hook, which would print each.
                    if panics {
                        resume_unwind(Box::new("in the middle of a job"));
                    }
                };
                // SAFETY: one worker at a time, each waited for below; two jobs were submitted to it, and it runs two.
                assert_eq!(catch_unwind(AssertUnwindSafe(|| unsafe { worker.as_worker(work) })).is_err(), panics);
            };
            let thread = std::thread::spawn(move || {
                job(2 * round, true);
                job(2 * round + 1, false);
            });
            // SAFETY: there is one side.
            let done = unsafe { hand_off.as_caller(&side, |done| done.clone()) };
            assert_eq!(done, Some((0..2 * round + 2).collect()));
            thread.join().unwrap();
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    //! Run with `COLLECTIVES_LOOM=1 cargo test --lib communicator::hand_off`.

    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    fn as_caller<R>(hand_off: &HandOff<Vec<u32>>, side: &CallerSide, work: impl FnOnce(&mut Vec<u32>) -> R) -> Option<R> {
        // SAFETY: each model has one side.
        unsafe { hand_off.as_caller(side, work) }
    }

    /// A worker that runs these jobs.
    fn worker(hand_off: &Arc<HandOff<Vec<u32>>>, jobs: [u32; 2]) -> thread::JoinHandle<()> {
        let hand_off = Arc::clone(hand_off);
        thread::spawn(move || {
            for job in jobs {
                // SAFETY: each model has one worker, and submits as many jobs.
                unsafe { hand_off.as_worker(|done| done.push(job)) };
            }
        })
    }

    #[test]
    fn a_caller_waits_for_every_job_and_sees_what_it_did() {
        loom::model(|| {
            let (hand_off, side) = (Arc::new(HandOff::new(vec![0])), CallerSide::default());
            as_caller(&hand_off, &side, |done| done.push(1));
            hand_off.submit();
            hand_off.submit();
            let worker = worker(&hand_off, [2, 3]);
            assert_eq!(as_caller(&hand_off, &side, |done| done.clone()), Some(vec![0, 1, 2, 3]));
            worker.join().unwrap();
        });
    }

    #[test]
    fn jobs_that_are_submitted_meanwhile_are_waited_for_too() {
        loom::model(|| {
            let (hand_off, side) = (Arc::new(HandOff::new(vec![])), CallerSide::default());
            hand_off.submit();
            // The worker may have come to the end of its queue, or not, when the next job comes.
            let (queue, jobs) = loom::sync::mpsc::channel::<u32>();
            let other = Arc::clone(&hand_off);
            let worker = thread::spawn(move || {
                while let Ok(job) = jobs.recv() {
                    if job == 0 {
                        break;
                    }
                    // SAFETY: this is the model's one worker, and it is sent one job for each that was submitted.
                    unsafe { other.as_worker(|done| done.push(job)) };
                }
            });
            queue.send(1).unwrap();
            hand_off.submit();
            queue.send(2).unwrap();
            assert_eq!(as_caller(&hand_off, &side, |done| done.clone()), Some(vec![1, 2]));
            hand_off.submit();
            hand_off.withdraw();
            assert_eq!(as_caller(&hand_off, &side, |done| done.len()), Some(2));
            queue.send(0).unwrap();
            worker.join().unwrap();
        });
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn a_job_that_was_not_counted_in_meets_the_caller() {
        loom::model(|| {
            let (hand_off, side) = (Arc::new(HandOff::new(vec![])), CallerSide::default());
            hand_off.submit();
            let worker = worker(&hand_off, [1, 2]);
            as_caller(&hand_off, &side, |done| done.push(3));
            worker.join().unwrap();
        });
    }
}
