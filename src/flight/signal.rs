//! Writes the records of every communicator of the process on SIGUSR1, for programs that request it.
//!
//! The handler adds one to an eventfd, which signal handlers may do. A dedicated thread reads the eventfd and does the
//! rest. The eventfd is created once per process and never closed, even if the thread ends: the handler stays
//! installed, and must not write to another file that gets the same descriptor.

#![expect(unsafe_code, reason = "installs a signal handler")]

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

use rustix::event::{EventfdFlags, eventfd};

use super::living::living;
use crate::base::event;
use crate::base::fork::Process;
use crate::error::{Error, Result};

/// The folder that a signal writes to; set once the handler is installed.
static FOLDER: Mutex<Option<(PathBuf, Process)>> = Mutex::new(None);

/// The eventfd that the handler writes to, and the process in which it may do so. A static is never dropped, so the
/// descriptor is never closed.
static SIGNAL_EVENT: OnceLock<(OwnedFd, Process)> = OnceLock::new();

/// Installs a handler for SIGUSR1. When this process receives the signal, a thread writes the flight records of all its
/// communicators into `folder`. The records include calls that hang. If you call this function again, the new folder
/// replaces the old one. A program that does not call this function keeps its own handling of the signal.
///
/// # Errors
///
/// - `Unsupported`: the program has its own handler for the signal, which is kept. Let this handler wake a thread that
///   calls [`write_records`].
/// - `Unsupported`: this process was forked from a process that had called this function. Such a process has the
///   handler, but not the thread that writes the records.
/// - `Io`: the system refuses the handler or the thread.
pub fn write_records_on_sigusr1(folder: impl Into<PathBuf>) -> Result<()> {
    // The conversion runs the program's code, so it happens outside the lock.
    let folder = folder.into();
    let mut kept = event::lock(&FOLDER);
    if kept.as_ref().is_some_and(|(_, process)| process.is_foreign()) {
        let reason = "this process was forked from a process that handles SIGUSR1; install a handler for a different signal, and \
                      let it wake a thread that calls flight::write_records";
        return Err(Error::unsupported("writing flight records on SIGUSR1", reason));
    }
    if kept.is_none() {
        if !is_free()? {
            let reason = "the program has a handler of its own; have that wake a thread that calls flight::write_records";
            return Err(Error::unsupported("writing flight records on SIGUSR1", reason));
        }
        let event = event()?;
        std::thread::Builder::new()
            .name("flight records".to_owned())
            .spawn(move || attend(event))
            .map_err(|error| Error::io("starting the thread that writes flight records", error))?;
        install()?;
    }
    *kept = Some((folder, Process::this()));
    Ok(())
}

/// Writes the flight records of all communicators of this process into `folder`, and returns the paths of the files.
/// The records include calls that hang. The function takes some microseconds per record. While it runs, calls that fail
/// and calls that start in the background may have to wait.
///
/// # Errors
///
/// `Io` for the first file that cannot be written. The other files are still written.
pub fn write_records(folder: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
    write_all(folder.as_ref(), "asked for")
}

fn write_all(folder: &Path, reason: &str) -> Result<Vec<PathBuf>> {
    let written: Vec<_> = living().iter().map(|flight| flight.write(folder, reason)).collect();
    written.into_iter().collect()
}

/// Returns the eventfd, and creates it if needed. Called under the lock of the folder, so by one thread at a time.
fn event() -> Result<&'static OwnedFd> {
    if let Some((event, _)) = SIGNAL_EVENT.get() {
        return Ok(event);
    }
    let made = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| Error::io("making an eventfd for SIGUSR1", error))?;
    Ok(&SIGNAL_EVENT.get_or_init(|| (made, Process::this())).0)
}

/// Waits for the event as long as the process lives.
fn attend(event: &OwnedFd) {
    loop {
        let mut count = [0; 8];
        match rustix::io::read(event, &mut count) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => {
                return event::error!(%error, "flight records are no longer written on SIGUSR1");
            }
        }
        let Some((folder, _)) = event::lock(&FOLDER).clone() else { continue };
        match write_all(&folder, "SIGUSR1") {
            Ok(files) => event::info!(files = files.len(), folder = %folder.display(), "flight records are written"),
            Err(error) => event::warn!(%error, "flight records could not be written"),
        }
    }
}

/// Whether the signal has no handler.
fn is_free() -> Result<bool> {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: with a null pointer for the new handler the call only queries; `action` has room for the answer.
    if unsafe { libc::sigaction(libc::SIGUSR1, std::ptr::null(), action.as_mut_ptr()) } != 0 {
        return Err(Error::io("querying the handler of SIGUSR1", std::io::Error::last_os_error()));
    }
    // SAFETY: it was zeroed, which is a valid value of this structure of integers and an optional pointer, and the
    // call has filled it in.
    let handler = unsafe { action.assume_init() }.sa_sigaction;
    Ok(handler == libc::SIG_DFL || handler == libc::SIG_IGN)
}

/// Installs the handler.
fn install() -> Result<()> {
    // SAFETY: a structure of integers and an optional pointer, for which all zeros are a valid value: no handler, an
    // empty mask, no flags.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int) = handle_signal;
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: `action` is fully initialised, and null requests no old handler. The handler has the type required
    // without SA_SIGINFO, and lives as long as the program (this crate is not unloaded: the program is trusted in
    // that). It does only what a handler may do (see there).
    if unsafe { libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()) } != 0 {
        return Err(Error::io("handling SIGUSR1", std::io::Error::last_os_error()));
    }
    Ok(())
}

/// Handles the signal. Does nothing in a forked child, which shares the eventfd with its parent and would wake the
/// parent.
extern "C" fn handle_signal(_signal: libc::c_int) {
    // Both are loads of atomics: the event and the mark of this process were set before the handler was installed.
    let Some((event, process)) = SIGNAL_EVENT.get() else { return };
    if process.is_foreign() {
        return;
    }
    let one = 1_u64;
    // SAFETY: `__errno_location` may be called anywhere. It returns this thread's own error number, valid as long as
    // the thread lives. A handler runs on the thread that it interrupted, which does not use the number meanwhile.
    let error = unsafe { libc::__errno_location() };
    // SAFETY: the number is saved before and restored after, because the interrupted code may be about to read it. A
    // handler may call `write`, which reads eight bytes of a local variable. The descriptor is open: a static owns
    // it.
    unsafe {
        let kept = *error;
        libc::write(event.as_raw_fd(), (&raw const one).cast(), 8);
        *error = kept;
    }
}
