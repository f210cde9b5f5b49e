//! How this crate calls listeners.
//!
//! A listener is the program's code: a subscriber of `tracing`, an observer, the drop of a buffer. It may panic, and it
//! may call this crate. So two rules hold for every call of a listener:
//!
//! - **A panic ends nothing in this crate.** It is caught and reported; see [`caught`].
//! - **No lock is held.** Locks under which listeners might be notified are taken with [`lock`]. A notification made
//!   while a thread holds such a lock waits, and the same thread delivers it when it has released the last lock. So
//!   events own their data.
//!
//! `tests/structure` fails if an event is sent to `tracing` from anywhere else. The cost is a counter of the thread for
//! each lock, and an allocation for each event that waits.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::pipe::PIPE_BUF;
use tracing::dispatcher::get_default;
use tracing::subscriber::NoSubscriber;

/// A notification that waits.
type Telling = Box<dyn FnOnce()>;

/// The bit of `LOCKS` that is set while notifications wait.
const WAITING: usize = 1 << (usize::BITS - 1);

thread_local! {
    /// The number of locks held by this thread under which no listener may be called, and a flag that notifications
    /// wait.
    static LOCKS: Cell<usize> = const { Cell::new(0) };
    /// The notifications that wait; empty if there are none. It has no destructor, so it is also available to the
    /// destructors of other thread locals, which may be the program's code.
    static QUEUE: RefCell<ManuallyDrop<Vec<Telling>>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

/// Runs a listener's code: now, or once this thread holds no lock. A panic in it is caught.
pub(crate) fn tell(who: &'static str, telling: impl FnOnce() + 'static) {
    if LOCKS.get() == 0 {
        caught(who, telling);
        return;
    }
    let telling: Telling = Box::new(move || {
        caught(who, telling);
    });
    QUEUE.with_borrow_mut(|queue| queue.push(telling));
    LOCKS.set(LOCKS.get() | WAITING);
}

/// Delivers the notifications that have waited for the release of the last lock.
#[cold]
fn tell_waiting() {
    LOCKS.set(0);
    // A listener may take locks, and so add more notifications.
    let waiting = QUEUE.with_borrow_mut(|queue| std::mem::take(&mut **queue));
    waiting.into_iter().for_each(|telling| telling());
}

/// Runs a listener's code at once. If it panics, the panic is reported and `None` is returned. Call it only without
/// holding a lock.
pub(crate) fn caught<R>(who: &str, run: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => Some(result),
        Err(panic) => {
            let_go(panic);
            let say = || tracing::error!(target: "collectives::call", "{who} panicked; its message is on standard error");
            // A subscriber that panics at every event also panics at this one.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(say)) {
                let_go(panic);
            }
            None
        }
    }
}

/// Frees a panic's payload, unless it is a type of the program: its drop would be the program's code again.
fn let_go(panic: Box<dyn Any + Send>) {
    if !panic.is::<&str>() && !panic.is::<String>() {
        std::mem::forget(panic);
    }
}

/// Reports a message that the user of a hanging program must see. If there is a subscriber of `tracing`, `otherwise`
/// reports it, even if the subscriber filters it out. Else the line goes to standard error, if there is one.
pub(crate) fn tell_aloud(line: Option<String>, otherwise: impl FnOnce() + 'static) {
    tell(SUBSCRIBER, move || {
        if !get_default(|subscriber| subscriber.is::<NoSubscriber>()) {
            otherwise();
        } else if let Some(line) = line {
            write_to_standard_error(&format!("collectives: {line}\n"));
        }
    });
}

/// Writes a line if there is room for it. Neither a reader that does not read nor a thread that holds the standard
/// library's lock can block this.
fn write_to_standard_error(line: &str) {
    let error = std::io::stderr();
    let mut watched = [PollFd::new(&error, PollFlags::OUT)];
    let has_room = rustix::event::poll(&mut watched, Some(&Timespec::default())).is_ok() && watched[0].revents() == PollFlags::OUT;
    if has_room {
        let bytes = line.as_bytes();
        // If that fails, there is nowhere else to report it. A pipe that has any room takes this many bytes.
        let _ = rustix::io::write(error.as_fd(), &bytes[..bytes.len().min(PIPE_BUF)]);
    }
}

/// While this value lives, no listener is called on this thread.
pub(crate) struct Quiet {
    /// Binds the value to its thread.
    thread: PhantomData<*const ()>,
}

impl Quiet {
    #[inline]
    pub(crate) fn new() -> Self {
        LOCKS.set(LOCKS.get() + 1);
        Self { thread: PhantomData }
    }
}

impl Drop for Quiet {
    #[inline]
    fn drop(&mut self) {
        let left = LOCKS.get() - 1;
        LOCKS.set(left);
        if left == WAITING {
            tell_waiting();
        }
    }
}

/// A held lock. When this is dropped, the lock is released first, and then waiting notifications are delivered.
pub(crate) struct Locked<'a, T> {
    guard: MutexGuard<'a, T>,
    _quiet: Quiet,
}

impl<T> Deref for Locked<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for Locked<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// Takes a lock, even if its holder panicked: the data under these locks is consistent between any two statements that
/// may panic.
#[inline]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> Locked<'_, T> {
    Locked { guard: mutex.lock().unwrap_or_else(PoisonError::into_inner), _quiet: Quiet::new() }
}

/// Takes a lock if it is free; else returns `None`.
#[inline]
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<Locked<'_, T>> {
    let guard = match mutex.try_lock() {
        Ok(guard) => guard,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return None,
    };
    Some(Locked { guard, _quiet: Quiet::new() })
}

/// Turns a field's value into one that an event can own until it is delivered.
pub(crate) trait Own {
    type Owned: tracing::Value + 'static;

    fn own(self) -> Self::Owned;
}

impl Own for &str {
    type Owned = String;

    fn own(self) -> String {
        self.to_owned()
    }
}

impl Own for &String {
    type Owned = String;

    fn own(self) -> String {
        self.clone()
    }
}

impl<T: Own> Own for Option<T> {
    type Owned = Option<T::Owned>;

    fn own(self) -> Self::Owned {
        self.map(Own::own)
    }
}

/// Values that borrow nothing.
macro_rules! owned {
    ($($kind:ty),*) => {$(
        impl Own for $kind {
            type Owned = Self;

            fn own(self) -> Self {
                self
            }
        }
    )*};
}

owned!(String, bool, u16, u32, u64, usize, i32, i64, f64);

/// Sends an event. Takes the same arguments as `tracing::event!`, except that the level comes first and bare, and field
/// names have no dots.
macro_rules! event {
    ($level:ident, target: $target:expr, $($rest:tt)+) => { $crate::base::event::event!(@ $level, $target, [], $($rest)+) };
    (@ $level:ident, $target:expr, [$($field:tt)*], % $name:ident, $($rest:tt)+) => {
        $crate::base::event::event!(@ $level, $target, [$($field)* ($name, tracing::field::display($name.to_string()))], $($rest)+)
    };
    (@ $level:ident, $target:expr, [$($field:tt)*], ? $name:ident, $($rest:tt)+) => {
        $crate::base::event::event!(@ $level, $target, [$($field)* ($name, tracing::field::display(format!("{:?}", $name)))], $($rest)+)
    };
    (@ $level:ident, $target:expr, [$($field:tt)*], $name:ident = % $value:expr, $($rest:tt)+) => {
        $crate::base::event::event!(@ $level, $target, [$($field)* ($name, tracing::field::display($value.to_string()))], $($rest)+)
    };
    (@ $level:ident, $target:expr, [$($field:tt)*], $name:ident = ? $value:expr, $($rest:tt)+) => {
        $crate::base::event::event!(@ $level, $target, [$($field)* ($name, tracing::field::display(format!("{:?}", $value)))], $($rest)+)
    };
    (@ $level:ident, $target:expr, [$($field:tt)*], $name:ident = $value:expr, $($rest:tt)+) => {
        $crate::base::event::event!(@ $level, $target, [$($field)* ($name, $crate::base::event::Own::own($value))], $($rest)+)
    };
    (@ $level:ident, $target:expr, [$($field:tt)*], $name:ident, $($rest:tt)+) => {
        $crate::base::event::event!(@ $level, $target, [$($field)* ($name, $crate::base::event::Own::own($name))], $($rest)+)
    };
    (@ $level:ident, $target:expr, [$(($name:ident, $value:expr))*], $message:literal $(, $argument:expr)* $(,)?) => {
        if tracing::Level::$level <= tracing::level_filters::LevelFilter::current() {
            let message = format!($message $(, $argument)*);
            $(let $name = $value;)*
            $crate::base::event::tell($crate::base::event::SUBSCRIBER, move || {
                tracing::event!(target: $target, tracing::Level::$level, $($name,)* "{message}");
            });
        }
    };
    ($level:ident, $($rest:tt)+) => { $crate::base::event::event!(@ $level, module_path!(), [], $($rest)+) };
}

macro_rules! error {
    ($($rest:tt)+) => { $crate::base::event::event!(ERROR, $($rest)+) };
}

macro_rules! warning {
    ($($rest:tt)+) => { $crate::base::event::event!(WARN, $($rest)+) };
}

macro_rules! info {
    ($($rest:tt)+) => { $crate::base::event::event!(INFO, $($rest)+) };
}

macro_rules! debug {
    ($($rest:tt)+) => { $crate::base::event::event!(DEBUG, $($rest)+) };
}

pub(crate) use {debug, error, event, info, warning as warn};

/// The receiver of spans and events, as named in reports of its panics.
pub(crate) const SUBSCRIBER: &str = "the tracing subscriber";

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    #[test]
    fn what_is_told_under_locks_waits_for_the_last_of_them() {
        let (outer, inner) = (Mutex::new(()), Mutex::new(()));
        let told = Rc::new(RefCell::new(Vec::new()));
        let tell_of = |what: &'static str| {
            let told = Rc::clone(&told);
            tell("a test", move || told.borrow_mut().push(what));
        };
        tell_of("at once");
        let held = lock(&outer);
        tell_of("under one");
        let more = try_lock(&inner);
        assert!(more.is_some() && try_lock(&inner).is_none());
        tell_of("under two");
        drop(more);
        assert_eq!(*told.borrow(), ["at once"]);
        drop(held);
        assert_eq!(*told.borrow(), ["at once", "under one", "under two"]);
        tell_of("at once again");
        assert_eq!(told.borrow().len(), 4);
    }

    #[test]
    fn whoever_is_told_may_take_the_lock_and_tell_of_more() {
        let mutex: &'static Mutex<Vec<u32>> = Box::leak(Box::default());
        let held = lock(mutex);
        tell("a test", move || {
            let mut list = lock(mutex);
            tell("a test", move || lock(mutex).push(2));
            list.push(1);
        });
        tell("a test", move || lock(mutex).push(3));
        drop(held);
        assert_eq!(*lock(mutex), [1, 2, 3]);
    }

    #[test]
    fn a_panic_of_a_listener_and_of_what_it_threw_ends_there() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("the drop of what was thrown");
            }
        }
        assert_eq!(caught("a test", || 1), Some(1));
        assert_eq!(caught("a test", || std::panic::panic_any(Bomb)), None);
        let (mutex, told) = (Mutex::new(()), Rc::new(Cell::new(false)));
        let held = lock(&mutex);
        tell("a test", || panic!("a listener"));
        let then = Rc::clone(&told);
        tell("a test", move || then.set(true));
        drop(held);
        assert!(told.get());
    }

    #[test]
    fn what_the_destructor_of_a_thread_local_tells_under_a_lock_is_told() {
        struct Late(RefCell<Option<std::sync::mpsc::Sender<u32>>>);
        impl Drop for Late {
            fn drop(&mut self) {
                let (mutex, sender) = (Mutex::new(()), self.0.take());
                let held = lock(&mutex);
                tell("a test", move || sender.into_iter().for_each(|sender| sender.send(7).unwrap()));
                drop(held);
            }
        }
        thread_local! {
            static LATE: Late = const { Late(RefCell::new(None)) };
        }
        let (sender, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            LATE.with(|late| late.0.replace(Some(sender)));
            // The thread's queue is first used after that. A value with a destructor would be gone by then.
            let mutex = Mutex::new(());
            let held = lock(&mutex);
            tell("a test", || ());
            drop(held);
        });
        assert_eq!(told.recv_timeout(std::time::Duration::from_secs(60)), Ok(7));
    }

    #[test]
    fn a_panic_under_a_lock_leaves_the_thread_free_to_tell() {
        let mutex = Mutex::new(());
        let unwound = caught("a test", || {
            let _held = lock(&mutex);
            panic!("under the lock");
        });
        assert_eq!(unwound, None);
        let told = Rc::new(Cell::new(false));
        let then = Rc::clone(&told);
        tell("a test", move || then.set(true));
        assert!(told.get() && try_lock(&mutex).is_some());
    }
}
