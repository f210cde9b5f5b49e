//! What the simulation saw its users do wrong, and the text of the last error.

use std::ffi::CString;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, whether or not a thread panicked while it held the lock: tests go on after a failed assertion.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

static REPORTS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Notes that a rule was broken. The same words are noted once: every rank of a communicator may notice the same thing.
pub(crate) fn report(text: impl Into<String>) {
    let text = text.into();
    let mut reports = lock(&REPORTS);
    if !reports.contains(&text) {
        eprintln!("simulated NCCL: {text}");
        reports.push(text);
    }
}

/// Hands over what was reported so far and forgets it.
pub(crate) fn take() -> Vec<String> {
    std::mem::take(&mut lock(&REPORTS))
}

static LAST: Mutex<Option<&'static std::ffi::CStr>> = Mutex::new(None);

/// Sets the text of the last error of this process. As with NCCL nothing ever clears it.
pub(crate) fn warn(text: &str) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // Leaked: callers keep the pointer for as long as they like.
    *lock(&LAST) = Some(Box::leak(text.into_boxed_c_str()));
}

/// The text of the last error of this process, empty before the first.
pub(crate) fn last() -> &'static std::ffi::CStr {
    lock(&LAST).unwrap_or(c"")
}
