//! The misuses that the simulation has found, and the text of the last error.

use std::ffi::CString;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex even if a thread panicked while it held the lock: tests go on after a failed assertion.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

static REPORTS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Records that a rule was broken. Equal texts are recorded once, because every rank of a communicator may notice the
/// same fault.
pub(crate) fn report(text: impl Into<String>) {
    let text = text.into();
    let mut reports = lock(&REPORTS);
    if !reports.contains(&text) {
        eprintln!("simulated NCCL: {text}");
        reports.push(text);
    }
}

/// Returns the reports so far and forgets them.
pub(crate) fn take() -> Vec<String> {
    std::mem::take(&mut lock(&REPORTS))
}

static LAST: Mutex<Option<&'static std::ffi::CStr>> = Mutex::new(None);

/// Sets the text of the last error of this process. As with NCCL, it is never cleared.
pub(crate) fn warn(text: &str) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // Leaked: callers may keep the pointer for any time.
    *lock(&LAST) = Some(Box::leak(text.into_boxed_c_str()));
}

/// Returns the text of the last error of this process, empty before the first.
pub(crate) fn last() -> &'static std::ffi::CStr {
    lock(&LAST).unwrap_or(c"")
}
