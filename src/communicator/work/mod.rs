//! Handles of calls that run in the background.

pub(in crate::communicator) mod completion;
pub(in crate::communicator) mod message;
pub(in crate::communicator) mod pinned;
pub(in crate::communicator) mod thread;

use std::any::Any;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use crate::base::deadline::Deadline;
use crate::base::fork::Process;
use crate::communicator::work::completion::{Finished, State, is_waking};
use crate::communicator::work::message::Received;
use crate::error::Error;
use crate::error::Result;
use crate::host::health::forked;

/// The handle of a background call, with the buffer that the call works on.
///
/// [`Work::wait`] gives the buffer back. If the call failed, `wait` returns the error instead, and the buffer is freed.
/// If a device may still use the buffer at that time, the buffer is freed when the device's stream has reached the end
/// of the call. If you drop the handle, the call continues, and the buffer is freed when the call has ended. If you
/// leak the handle, only the buffer leaks.
///
/// You can:
/// - wait for the call ([`wait`](Self::wait)), or for the first of several ([`wait_any`](Self::wait_any)),
/// - poll the call ([`is_done`](Self::is_done)),
/// - await the call with any executor,
/// - register a callback ([`on_end`](Self::on_end)).
///
/// None of these needs a thread for each call.
///
/// ```
/// # use collectives::{Communicator, ReduceOp};
/// let got = Communicator::run_local(2, |comm| {
///     let mut work = comm.start_all_reduce(vec![1u32; 64], ReduceOp::Sum)?;
///     while work.wait_timeout(std::time::Duration::from_millis(1))?.is_none() {
///         // … do something else …
///     }
///     Ok(work.is_done())
/// })?;
/// assert_eq!(got, [true, true]);
/// # Ok::<(), collectives::Error>(())
/// ```
#[must_use = "`wait` returns the buffer of the call, or the call's error"]
pub struct Work<B> {
    state: Arc<State>,
    /// Takes the buffer out of its box.
    unpack: Unpack<B>,
    /// For messages: the driver that advances them while a thread waits. Collectives have their own thread.
    driver: Option<Arc<dyn Drive>>,
    /// For collectives: the queue in which they take their turns.
    turns: Option<Weak<dyn Turns>>,
    /// The process that started the call: a forked child has no thread that advances the call.
    process: Process,
}

/// Why a thread may not wait for a call.
const FOR_ITSELF: &str = "this wait would never end: either it was called inside a call of the same communicator, and the awaited call is \
                          queued behind that call, or it was called in a callback on the thread that must complete the awaited call";

/// How long a waiter lets another thread advance messages before the waiter tries to advance them itself.
const OTHERS_TURN: Duration = Duration::from_micros(50);

/// The longest sleep of [`Work::wait_any`] before it checks again: a clock cannot be set arbitrarily far ahead.
const LONGEST_PARK: Duration = Duration::from_secs(3600);

/// The longest sleep of [`Work::wait_any`] if no other thread can wake it.
const NAP: Duration = Duration::from_millis(1);

/// The queue in which background collectives take their turns.
pub(in crate::communicator) trait Turns: Send + Sync {
    /// Returns whether this thread would wait forever for a call in this queue. A thread would wait forever if it
    /// already has a turn in this queue, or if it runs the background calls.
    fn would_wait_for_itself(&self) -> bool;
}

/// Advances background calls on the thread that waits for them.
pub(in crate::communicator) trait Drive: Send + Sync {
    /// Advances the calls that can make progress. If no call can make progress, waits for at most `limit`. Returns
    /// `false` if another thread is already advancing the calls.
    fn drive(&self, limit: Duration) -> bool;

    /// Returns whether the call has ended. Does not wait. If another thread is already checking, does not check.
    fn poll(&self) -> bool {
        false
    }

    /// Makes sure that the end of the call is noticed while no thread waits for the call.
    fn attend(self: Arc<Self>) {}

    /// Returns whether this thread is the thread that notices the end of calls. That thread must not sleep, because no
    /// other thread would wake it.
    fn is_noticed_here(&self) -> bool {
        false
    }
}

/// Extracts the result of [`Work::wait`] from the values that a call leaves behind.
enum Unpack<B> {
    As(fn(Finished) -> Option<B>),
    By(Box<dyn FnOnce(Finished) -> Option<B> + Send + Sync>),
    Gone,
}

impl<B> Unpack<B> {
    fn run(self, finished: Finished) -> Option<B> {
        match self {
            Unpack::As(unpack) => unpack(finished),
            Unpack::By(unpack) => unpack(finished),
            Unpack::Gone => None,
        }
    }
}

impl<B: Send + 'static> Work<B> {
    /// Makes the handle of a call that reports its end to `state`, with a boxed `B`.
    pub(in crate::communicator) fn new(state: Arc<State>, driver: Option<Arc<dyn Drive>>) -> Self {
        let unpack = |finished: Finished| finished.buffer.downcast::<B>().ok().map(|buffer| *buffer);
        Self { state, unpack: Unpack::As(unpack), driver, turns: None, process: Process::this() }
    }

    /// Makes the handle of a receive into a `B`.
    pub(in crate::communicator) fn receiving(state: Arc<State>, driver: Option<Arc<dyn Drive>>) -> Work<(B, Received)> {
        let unpack = |finished: Finished| Some((*finished.buffer.downcast::<B>().ok()?, finished.received?));
        Work { state, unpack: Unpack::As(unpack), driver, turns: None, process: Process::this() }
    }

    /// Marks the call as a collective that takes its turn at `turns`.
    pub(in crate::communicator) fn taking_turns(mut self, turns: Weak<dyn Turns>) -> Self {
        self.turns = Some(turns);
        self
    }

    /// Returns whether this thread would wait for itself, because the thread is inside a call of the communicator, and
    /// this work is queued behind that call.
    fn would_wait_for_itself(&self) -> bool {
        self.turns.as_ref().and_then(Weak::upgrade).is_some_and(|turns| turns.would_wait_for_itself())
    }

    /// Returns whether this thread would sleep forever, because only this thread could end the call, or notice its end.
    fn would_sleep_in_vain(&self) -> bool {
        self.would_wait_for_itself() || self.driver.as_ref().is_some_and(|driver| driver.is_noticed_here())
    }

    /// Erases the type of the buffer, so that `Work`s of several types fit in one list. [`wait`](Self::wait) then gives
    /// back the same value, as a boxed [`Any`].
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp, Work};
    /// Communicator::run_local(2, |comm| {
    ///     let mut works = vec![
    ///         comm.start_all_reduce(vec![1u32; 8], ReduceOp::Sum)?.erased(),
    ///         comm.start_broadcast([0.5f64; 3], 0)?.erased(),
    ///     ];
    ///     let first = works.remove(0).wait()?;
    ///     assert_eq!(first.downcast_ref::<Vec<u32>>(), Some(&vec![2; 8]));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), collectives::Error>(())
    /// ```
    pub fn erased(mut self) -> Work<Box<dyn Any + Send>> {
        let unpack = std::mem::replace(&mut self.unpack, Unpack::Gone);
        let unpack = Box::new(move |finished| unpack.run(finished).map(|buffer| Box::new(buffer) as Box<dyn Any + Send>));
        Work {
            state: Arc::clone(&self.state),
            unpack: Unpack::By(unpack),
            driver: self.driver.take(),
            turns: self.turns.take(),
            process: self.process,
        }
    }

    /// Calls `callback` once when the call has ended, even if the call failed. The callback runs on the thread that
    /// ends the call. If the call has ended already, the callback runs immediately, on this thread.
    ///
    /// The callback should be short, and must not wait for a call of this communicator. Callbacks of two communicators
    /// must not wait for each other's calls either. A panic in the callback is caught. A thread that waits for the call
    /// may return before the callback has run. In a forked child, the callback never runs.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// Communicator::run_local(2, |comm| {
    ///     let (sender, ended) = std::sync::mpsc::channel();
    ///     let work = comm.start_all_reduce(vec![1u32; 8], ReduceOp::Sum)?;
    ///     work.on_end(move || drop(sender.send("first")));
    ///     assert_eq!(ended.recv(), Ok("first"));
    ///     assert!(work.is_done());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), collectives::Error>(())
    /// ```
    pub fn on_end(&self, callback: impl FnOnce() + Send + 'static) {
        if self.process.is_foreign() {
            return;
        }
        self.state.on_end(Box::new(callback));
        self.attend();
    }

    /// Makes sure that the end of the call is noticed even if no thread waits for the call.
    fn attend(&self) {
        if let Some(driver) = &self.driver {
            Arc::clone(driver).attend();
        }
    }

    /// Waits until one of `works` ends, and returns its index (the lowest, if several have ended). Returns `None` if
    /// `limit` passes before one of them ends, or if `works` is empty.
    ///
    /// If no work has ended, returns `None` immediately in two further cases:
    /// - the caller is inside a call, and one of `works` is queued behind that call,
    /// - the caller is a callback on the thread that ends one of `works`.
    ///
    /// To list works of different types, call [`erased`](Self::erased) on each.
    ///
    /// ```
    /// # use collectives::{Communicator, Envelope, Work};
    /// # use std::time::Duration;
    /// Communicator::run_local(2, |comm| {
    ///     let later = Envelope::rank(1 - comm.rank()).tag(5);
    ///     if comm.rank() == 0 {
    ///         comm.send(&7u8, 1)?;
    ///         comm.recv(&mut 0u8, 1)?; // rank 1 has received the first message
    ///         return comm.send(&8u8, later);
    ///     }
    ///     let mut works = vec![comm.start_recv(vec![0u8], later)?, comm.start_recv(vec![0u8], 0)?];
    ///     let first = Work::wait_any(&works, Duration::from_secs(10)).expect("one has come");
    ///     assert_eq!(works.swap_remove(first).wait()?.0, [7]);
    ///     comm.send(&0u8, 0)?;
    ///     assert_eq!(works.swap_remove(0).wait()?.0, [8]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), collectives::Error>(())
    /// ```
    #[doc(alias("MPI_Waitany"))]
    pub fn wait_any(works: &[Self], limit: Duration) -> Option<usize> {
        let ended = || works.iter().position(Self::is_done);
        if works.is_empty() || works.iter().any(|work| work.process.is_foreign() || work.would_sleep_in_vain()) {
            return ended();
        }
        let deadline = Deadline::after(limit);
        // In the destructor of another thread-local, the waker may be gone.
        let waker = UNPARK.try_with(Waker::clone).ok();
        for work in works {
            waker.iter().for_each(|waker| work.state.wake_thread(waker));
            work.attend();
        }
        loop {
            let left = deadline.remaining();
            match ended() {
                Some(place) => return Some(place),
                None if left.is_zero() => return None,
                None if waker.is_none() => std::thread::sleep(left.min(NAP)),
                None => std::thread::park_timeout(left.min(LONGEST_PARK)),
            }
        }
    }

    /// Returns whether the call has ended, even if the call failed. Never blocks. In a forked child, always returns
    /// `true`, and [`wait`](Self::wait) returns an error that says why the call cannot end.
    #[must_use]
    pub fn is_done(&self) -> bool {
        if self.process.is_foreign() {
            return true;
        }
        if let Some(driver) = &self.driver {
            driver.poll();
        }
        self.state.has_ended()
    }

    /// Waits until the call ends, and gives the buffer back.
    ///
    /// # Errors
    ///
    /// - The errors of the call itself. The communicator's timeout limits the call and the calls before it, so the
    ///   timeout also limits this wait.
    /// - `InvalidArgument` inside a call of the same communicator, for example in a custom op, because the thread would
    ///   wait for itself.
    /// - `Unsupported` in a forked child.
    pub fn wait(mut self) -> Result<B> {
        loop {
            if let Some(buffer) = self.wait_timeout(Duration::MAX)? {
                return Ok(buffer);
            }
        }
    }

    /// Waits until the call ends, for at most `limit`. Returns the buffer. If the call does not end within `limit`,
    /// returns `None`, and the call continues.
    ///
    /// # Errors
    ///
    /// - The errors of [`wait`](Self::wait).
    /// - `InvalidArgument` if the buffer was already given back.
    pub fn wait_timeout(&mut self, limit: Duration) -> Result<Option<B>> {
        if self.process.is_foreign() {
            // The lock is not touched either: if the lock was held when this process was forked, it stays held forever.
            return Err(forked("waiting for a started call".to_owned()));
        }
        if !self.is_done() && self.would_wait_for_itself() {
            return Err(Error::argument("wait", FOR_ITSELF));
        }
        let deadline = Deadline::after(limit);
        while !self.is_done() {
            let left = deadline.remaining();
            if left.is_zero() {
                return Ok(None);
            }
            match &self.driver {
                Some(driver) if driver.drive(left) => {}
                Some(_) => self.state.wait_pending(left.min(OTHERS_TURN)),
                None => self.state.wait_pending(left),
            }
        }
        let taken = self.state.take();
        let result = taken.ok_or_else(|| Error::argument("wait_timeout", "the buffer of this work has already been returned"))?;
        Ok(std::mem::replace(&mut self.unpack, Unpack::Gone).run(result?))
    }
}

impl<B> Drop for Work<B> {
    fn drop(&mut self) {
        if self.process.is_foreign() {
            // Freeing buffers and an event of a device would call a driver that does not know this process.
            std::mem::forget((self.driver.take(), Arc::clone(&self.state)));
        }
    }
}

thread_local! {
    /// This thread's waker. All waits of the thread use the same waker, so that a call recognises it.
    static UNPARK: Waker = Waker::from(Arc::new(Unpark(std::thread::current())));
}

/// Wakes a thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl<B: Send + 'static> IntoFuture for Work<B> {
    type Output = Result<B>;
    type IntoFuture = WorkFuture<B>;

    /// Returns a future that completes when the call ends. It works with any executor, because it only wakes its task.
    /// Like [`wait`](Work::wait), it returns `InvalidArgument` immediately inside a call of the same communicator, and
    /// in a callback on the thread that ends the call. It does not do so in a task that is polled inside its waker.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// # fn block_on<F: Future>(future: F) -> F::Output {
    /// #     let mut future = std::pin::pin!(future);
    /// #     let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    /// #     loop {
    /// #         match future.as_mut().poll(&mut context) {
    /// #             std::task::Poll::Ready(output) => return output,
    /// #             std::task::Poll::Pending => std::thread::yield_now(),
    /// #         }
    /// #     }
    /// # }
    /// let sums = Communicator::run_local(2, |comm| {
    ///     block_on(async {
    ///         let sum = comm.start_all_reduce(vec![1.0f32; 1000], ReduceOp::Sum)?.await?;
    ///         Ok(sum[999])
    ///     })
    /// })?;
    /// assert_eq!(sums, [2.0, 2.0]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    fn into_future(self) -> WorkFuture<B> {
        WorkFuture(Some(self))
    }
}

/// A future that completes when a background call ends; see [`Work`]. If you drop the future, the call continues, as it
/// does when you drop a `Work`.
#[must_use = "await this future to get the buffer of the call, or the call's error"]
pub struct WorkFuture<B>(Option<Work<B>>);

impl<B: Send + 'static> Future for WorkFuture<B> {
    type Output = Result<B>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<B>> {
        let Some(work) = &mut self.0 else {
            return Poll::Ready(Err(Error::argument("await", "the buffer of this work has already been returned")));
        };
        if !work.process.is_foreign() && !work.is_done() {
            // An executor that polls a task inside its waker does not wait.
            if !is_waking() && work.would_sleep_in_vain() {
                self.0 = None;
                return Poll::Ready(Err(Error::argument("await", FOR_ITSELF)));
            }
            work.state.wake(context.waker());
            work.attend();
            // If the call has ended in the meantime, it does not wake the task.
            if !work.is_done() {
                return Poll::Pending;
            }
        }
        match self.0.take() {
            Some(work) => Poll::Ready(work.wait()),
            None => Poll::Pending,
        }
    }
}

// Nothing in it relies on being pinned.
impl<B> Unpin for WorkFuture<B> {}

impl<B> fmt::Debug for WorkFuture<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkFuture").finish_non_exhaustive()
    }
}

impl<B> fmt::Debug for Work<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").finish_non_exhaustive()
    }
}

/// A buffer that a background call can own.
pub trait OwnedBuffer: crate::call::buffer::BufferMut + Send + 'static {}

impl<B: crate::call::buffer::BufferMut + Send + 'static> OwnedBuffer for B {}

/// A buffer that a background call can own and only reads. It may have other owners too.
pub trait OwnedSource: crate::call::buffer::Buffer + Send + 'static {}

impl<B: crate::call::buffer::Buffer + Send + 'static> OwnedSource for B {}
