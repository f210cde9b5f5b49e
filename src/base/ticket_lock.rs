//! A lock that is granted in the order of requests: tickets are drawn, and served one after the other.
//!
//! # Design
//!
//! A communicator's calls run in the order in which its threads make them. A background call has its place in that
//! order before its thread begins to run it. So a ticket can be drawn now and used later, by another thread. Taking a
//! free lock is one atomic addition, and leaving it is one store: together about 5 ns. A mutex needs two locked
//! instructions.
//!
//! A thread that holds a turn ([`TicketLock::enter`]) may use the value as often as it likes, one use after the other.
//! Calls that consist of several collectives do so, and no other thread's call comes in between.
//!
//! A thread that leaves does not wait until its store is visible before it checks for sleepers, so it can miss a thread
//! that is just falling asleep. That is why the first nap is short. A thread that gives up leaves its ticket behind,
//! and the next waiter passes over it.

#![expect(unsafe_code, reason = "exclusive access is passed on by a counter instead of a mutex")]

use std::collections::BTreeSet;
use std::marker::PhantomData;
use std::time::Duration;

use crate::base::deadline::Deadline;
use crate::base::fork::Process;
use crate::base::sync::{AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, UnsafeCell, doze, thread_key};
use crate::base::tuning::ticket_lock::{FIRST_NAP, LOOKS, NAP};

/// The flag that is set next to a thread's key while the thread uses the value.
const USED: usize = 1;

/// The reason why a thread did not get the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoTurn {
    /// This thread already has the lock and uses the value, so it would wait for itself.
    Inside,
    /// The time limit passed before the thread's turn came.
    Late,
    /// The thread that has the lock is in another process, from which this process was forked.
    Forked,
}

/// A place in the order. It must be used or given up, or the lock waits for it forever.
#[derive(Debug)]
#[must_use = "later tickets wait until this one is used or given up"]
pub(crate) struct Ticket(usize);

/// The lock; see the module's documentation.
#[derive(Debug)]
pub(crate) struct TicketLock<T> {
    value: UnsafeCell<T>,
    /// The next ticket to be drawn.
    next: AtomicUsize,
    /// The ticket whose turn it is.
    serving: AtomicUsize,
    /// Twice the key of the thread that has the lock, plus one while it uses the value; 0 for none.
    inside: AtomicUsize,
    /// The number of sleeping threads.
    sleepers: AtomicUsize,
    /// Tickets that will not be used.
    given_up: Mutex<BTreeSet<usize>>,
    /// Notified when the turn has passed on while a thread sleeps.
    passed: Condvar,
    /// The process of the lock's threads.
    process: Process,
}

// SAFETY: only one thread at a time accesses the value, the one whose ticket is served, and the value is `Send`;
// everything else is `Sync`.
unsafe impl<T: Send> Sync for TicketLock<T> {}

/// A held turn. The turn passes on when this is dropped, even by a panic. It belongs to its thread.
#[must_use = "the turn passes to the next ticket when this value is dropped"]
pub(crate) struct Turn<'a, T> {
    lock: &'a TicketLock<T>,
    ticket: usize,
    thread: PhantomData<*const ()>,
}

/// A use of the value. It ends when this is dropped, even by a panic.
struct Use<'a, T>(&'a TicketLock<T>);

impl<T> Drop for Use<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.0.inside.store(thread_key() << 1, Ordering::Relaxed);
    }
}

impl<T> Drop for Turn<'_, T> {
    #[inline]
    fn drop(&mut self) {
        let Self { lock, ticket, .. } = *self;
        lock.inside.store(0, Ordering::Relaxed);
        lock.serving.store(ticket.wrapping_add(1), Ordering::Release);
        if lock.sleepers.load(Ordering::Relaxed) != 0 {
            lock.wake();
        }
    }
}

impl<T> TicketLock<T> {
    /// Creates a free lock.
    pub(crate) fn new(value: T) -> Self {
        Self {
            value: UnsafeCell::new(value),
            next: AtomicUsize::new(0),
            serving: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
            sleepers: AtomicUsize::new(0),
            given_up: Mutex::default(),
            passed: Condvar::new(),
            process: Process::this(),
        }
    }

    /// Runs `work` when its turn comes, after all tickets drawn before. If this thread already holds a turn, runs it at
    /// once.
    #[inline]
    pub(crate) fn with<R>(&self, limit: Duration, work: impl FnOnce(&mut T) -> R) -> Result<R, NoTurn> {
        // A thread sees what it stored itself. No other thread stores this thread's key.
        match self.inside.load(Ordering::Relaxed) {
            inside if inside >> 1 != thread_key() => self.with_ticket(self.draw(), limit, work),
            inside if inside & USED == 0 => Ok(self.used(work)),
            _ => Err(NoTurn::Inside),
        }
    }

    /// Takes the next turn, and holds it as long as the returned value lives.
    pub(crate) fn enter(&self, limit: Duration) -> Result<Turn<'_, T>, NoTurn> {
        if self.is_inside() { Err(NoTurn::Inside) } else { self.take(self.draw(), limit) }
    }

    /// Draws a ticket, which any thread can use later.
    #[inline]
    pub(crate) fn draw(&self) -> Ticket {
        Ticket(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Runs `work` when the turn of a ticket comes.
    #[inline]
    pub(crate) fn with_ticket<R>(&self, ticket: Ticket, limit: Duration, work: impl FnOnce(&mut T) -> R) -> Result<R, NoTurn> {
        let _turn = self.take(ticket, limit)?;
        Ok(self.used(work))
    }

    /// Uses the value in a turn that this thread holds and in which it does not use the value yet.
    #[inline]
    fn used<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        self.inside.store(thread_key() << 1 | USED, Ordering::Relaxed);
        let _use = Use(self);
        // SAFETY: - no other thread has the value: the ticket of this thread's turn was drawn once and used once, it
        // is being served, and it is served until the turn is dropped, which is on this thread and after this function;
        // - this thread has it once: `inside` marks it as used until `_use` is dropped, and a caller that finds that is
        //   refused;
        // - the effects of the previous turn are visible: it stored `serving` with Release, and `take` loaded it with
        //   Acquire.
        self.value.with_mut(|value| work(unsafe { &mut *value }))
    }

    #[inline]
    fn take(&self, ticket: Ticket, limit: Duration) -> Result<Turn<'_, T>, NoTurn> {
        if self.serving.load(Ordering::Acquire) != ticket.0 {
            self.wait(&ticket, limit)?;
        }
        self.inside.store(thread_key() << 1, Ordering::Relaxed);
        Ok(Turn { lock: self, ticket: ticket.0, thread: PhantomData })
    }

    /// Lets the tickets behind this one pass.
    pub(crate) fn give_up(&self, ticket: Ticket) {
        let mut given_up = self.given_up();
        given_up.insert(ticket.0);
        self.pass_over(&mut given_up);
    }

    /// Returns whether this thread has the lock.
    #[inline]
    pub(crate) fn is_inside(&self) -> bool {
        self.inside.load(Ordering::Relaxed) >> 1 == thread_key()
    }

    /// Returns whether this thread has the lock and uses the value: it is in a call that has in turn called the
    /// program's code.
    pub(crate) fn is_used_here(&self) -> bool {
        self.inside.load(Ordering::Relaxed) == thread_key() << 1 | USED
    }

    /// Waits for a ticket's turn. If the limit expires, the ticket is given up.
    #[cold]
    fn wait(&self, ticket: &Ticket, limit: Duration) -> Result<(), NoTurn> {
        if self.process.is_foreign() {
            return Err(NoTurn::Forked);
        }
        for _ in 0..LOOKS {
            if self.serving.load(Ordering::Acquire) == ticket.0 {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let deadline = Deadline::after(limit);
        let mut given_up = self.given_up();
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut nap = FIRST_NAP;
        let outcome = loop {
            self.pass_over(&mut given_up);
            if self.serving.load(Ordering::Acquire) == ticket.0 {
                break Ok(());
            }
            let left = deadline.remaining();
            if left.is_zero() {
                given_up.insert(ticket.0);
                break Err(NoTurn::Late);
            }
            given_up = doze(&self.passed, &self.given_up, given_up, left.min(nap));
            nap = NAP;
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        outcome
    }

    /// Passes over the given-up tickets whose turn it is. Only the holder of the mutex does so.
    fn pass_over(&self, given_up: &mut BTreeSet<usize>) {
        let mut serving = self.serving.load(Ordering::Acquire);
        while given_up.remove(&serving) {
            serving = serving.wrapping_add(1);
            self.serving.store(serving, Ordering::Release);
            self.passed.notify_all();
        }
    }

    #[cold]
    fn wake(&self) {
        // With the mutex: a sleeper that has checked is asleep before this can continue.
        let _given_up = self.given_up();
        self.passed.notify_all();
    }

    fn given_up(&self) -> MutexGuard<'_, BTreeSet<usize>> {
        self.given_up.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::sync::{Arc, Barrier};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_panic_inside_passes_the_turn_on() {
        let lock = TicketLock::new(vec![]);
        for round in 0..100 {
            let work = |done: &mut Vec<u32>| {
                done.push(round);
                // Bypasses the hook, which would print each.
                resume_unwind(Box::new("inside"));
            };
            assert!(catch_unwind(AssertUnwindSafe(|| lock.with(LONG, work))).is_err());
        }
        assert_eq!(lock.with(LONG, |done| done.len()), Ok(100));
    }

    #[test]
    fn whoever_is_inside_is_refused() {
        let lock = TicketLock::new(());
        assert_eq!(lock.with(LONG, |()| lock.with(LONG, |()| ())), Ok(Err(NoTurn::Inside)));
        assert_eq!(lock.with(LONG, |()| lock.is_inside() && lock.is_used_here()), Ok(true));
        assert!(!lock.is_inside());
    }

    #[test]
    fn a_turn_that_is_held_lets_its_thread_use_the_value_again_and_nobody_else() {
        let lock = TicketLock::new(vec![]);
        let turn = lock.enter(LONG).unwrap();
        assert!(lock.is_inside() && !lock.is_used_here());
        std::thread::scope(|scope| {
            let other = scope.spawn(|| lock.with(LONG, |order| order.push("other")));
            assert_eq!(lock.enter(LONG).map(drop), Err(NoTurn::Inside));
            for _ in 0..2 {
                assert_eq!(lock.with(LONG, |order| order.push("own")), Ok(()));
                assert_eq!(lock.with(LONG, |_| lock.with(LONG, |_| ())), Ok(Err(NoTurn::Inside)));
            }
            drop(turn);
            other.join().unwrap().unwrap();
        });
        assert_eq!(lock.with(LONG, |order| order.clone()), Ok(vec!["own", "own", "other"]));
    }

    #[test]
    fn turns_are_taken_in_the_order_of_the_tickets() {
        let lock = Arc::new(TicketLock::new(vec![]));
        let tickets: Vec<_> = (0..8).map(|number| (number, lock.draw())).collect();
        let start = Arc::new(Barrier::new(8));
        let threads: Vec<_> = tickets
            .into_iter()
            .rev()
            .map(|(number, ticket)| {
                let (lock, start) = (Arc::clone(&lock), Arc::clone(&start));
                std::thread::spawn(move || {
                    start.wait();
                    lock.with_ticket(ticket, LONG, |order| order.push(number)).unwrap();
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(lock.with(LONG, |order| order.clone()), Ok((0..8).collect()));
    }

    #[test]
    fn who_waits_too_long_gives_up_and_is_passed_over() {
        let lock = TicketLock::new(0);
        let first = lock.draw();
        assert_eq!(lock.with(Duration::ZERO, |_| ()), Err(NoTurn::Late));
        assert_eq!(lock.with(Duration::from_millis(2), |_| ()), Err(NoTurn::Late));
        assert_eq!(lock.with_ticket(first, LONG, |count| *count += 1), Ok(()));
        assert_eq!(lock.with(LONG, |count| *count), Ok(1));
        let unused = lock.draw();
        lock.give_up(unused);
        assert_eq!(lock.with(LONG, |count| *count), Ok(1));
    }

    #[test]
    fn many_threads_lose_no_turn() {
        let lock = Arc::new(TicketLock::new(0_u64));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let lock = Arc::clone(&lock);
                std::thread::spawn(move || (0..5000).for_each(|_| lock.with(LONG, |count| *count += 1).unwrap()))
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(lock.with(LONG, |count| *count), Ok(20_000));
    }
}

#[cfg(all(test, loom))]
mod models {
    //! Run with `COLLECTIVES_LOOM=1 cargo test --lib ticket_lock`.

    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn two_threads_have_the_value_one_after_the_other() {
        loom::model(|| {
            let lock = Arc::new(TicketLock::new(0));
            let other = Arc::clone(&lock);
            let thread = thread::spawn(move || other.with(LONG, |count| *count += 1).unwrap());
            lock.with(LONG, |count| *count += 1).unwrap();
            thread.join().unwrap();
            assert_eq!(lock.with(LONG, |count| *count), Ok(2));
        });
    }

    #[test]
    fn a_ticket_drawn_before_is_served_before() {
        loom::model(|| {
            let lock = Arc::new(TicketLock::new(vec![]));
            let ticket = lock.draw();
            let worker = Arc::clone(&lock);
            let thread = thread::spawn(move || worker.with_ticket(ticket, LONG, |order| order.push(1)).unwrap());
            lock.with(LONG, |order| order.push(2)).unwrap();
            thread.join().unwrap();
            assert_eq!(lock.with(LONG, |order| order.clone()), Ok(vec![1, 2]));
        });
    }

    #[test]
    fn a_ticket_that_is_given_up_is_passed_over() {
        for is_given_up_first in [true, false] {
            loom::model(move || {
                let lock = Arc::new(TicketLock::new(0));
                let (first, unused) = (lock.draw(), lock.draw());
                let waiter = Arc::clone(&lock);
                let waiting = thread::spawn(move || waiter.with(LONG, |count| *count += 1).unwrap());
                let mut unused = Some(unused);
                let mut give_up = |now: bool| unused.take_if(|_| now).into_iter().for_each(|ticket| lock.give_up(ticket));
                give_up(is_given_up_first);
                lock.with_ticket(first, LONG, |count| *count += 1).unwrap();
                give_up(true);
                waiting.join().unwrap();
                assert_eq!(lock.with(LONG, |count| *count), Ok(2));
            });
        }
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn a_ticket_that_is_used_twice_meets_the_next_one() {
        loom::model(|| {
            let lock = Arc::new(TicketLock::new(0));
            let (ticket, forged) = (lock.draw(), Ticket(0));
            let other = Arc::clone(&lock);
            let thread = thread::spawn(move || other.with_ticket(forged, LONG, |count| *count += 1));
            let _ = lock.with_ticket(ticket, LONG, |count| *count += 1);
            let _ = thread.join().unwrap();
        });
    }
}
