//! Finds NCCL, opens it once and permanently, and looks functions up when they are first called.

#![expect(unsafe_code, reason = "the system's loader is C")]

use std::error::Error;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::{null, null_mut, without_provenance_mut};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};
use std::{fmt, fs};

use libloading::os::unix::{Library as Opened, RTLD_LAZY, RTLD_LOCAL};

use crate::bindings::Slots;
use crate::{Attempt, LoadError, MissingSymbol, Reason, Version, ncclResult_t};

/// The names under which NCCL is installed. Only packages for developers contain the second name.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// Linux's flag of `dlopen`: opens only a library that is already in the process.
const RTLD_NOLOAD: c_int = 4;

/// All libraries that were opened, in order. They are never closed, because NCCL's threads cannot run once their code
/// is unloaded.
static OPEN: Mutex<Vec<&Library>> = Mutex::new(Vec::new());

/// An NCCL library that is loaded in this process. A method with the name of an NCCL function calls that function.
///
/// A call costs one atomic load more than the same call from C. The first call of each function also searches the
/// library for the function's name.
pub struct Library {
    opened: Opened,
    /// The address of `ncclGetVersion`, which distinguishes libraries.
    identity: usize,
    version: Version,
    path: String,
    pub(crate) slots: Slots,
}

impl Library {
    /// Opens NCCL, or returns the library that is already open.
    ///
    /// Tries, in this order:
    ///
    /// - the first library that this crate has already opened;
    /// - a library that other code, such as PyTorch, has loaded into the process;
    /// - `libnccl.so.2` and then `libnccl.so`, if the system's loader finds such a file.
    ///
    /// A library is never unloaded. Its initialisers run when it is opened. If the system's loader finds a file with
    /// NCCL's name, `open` trusts that the file is NCCL, as a program that links NCCL does. So the installed packages
    /// and `LD_LIBRARY_PATH` determine which code the process runs.
    ///
    /// # Errors
    /// [`LoadError`] if no file is usable. A file is unusable if it cannot be opened, or if its `ncclGetVersion` is
    /// missing or fails.
    pub fn open() -> Result<&'static Self, LoadError> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut attempts = Vec::new();
        if let Some(first) = open.first() {
            return Ok(first);
        }
        // SAFETY: a library with NCCL's name in this process, or where the loader looks, is trusted to be NCCL, as
        // stated above.
        let present = NAMES.iter().find_map(|name| unsafe { Self::load(OsStr::new(name), RTLD_NOLOAD) }.ok());
        // SAFETY: the same names, where the loader looks.
        let found = present.or_else(|| NAMES.iter().find_map(|name| unsafe { attempt(OsStr::new(name), &mut attempts) }));
        found.map(|library| keep(library, &mut open)).ok_or(LoadError { attempts })
    }

    /// Opens `file` and tries no other file. Returns the library of `file` if it is already open. Several files may be
    /// open at the same time.
    ///
    /// # Errors
    /// [`LoadError`] if the file cannot be opened, or if its `ncclGetVersion` is missing or fails.
    ///
    /// # Safety
    /// The file must be an NCCL library, because its initialisers run when it is opened, and its functions are called
    /// with NCCL's signatures.
    pub unsafe fn open_file(file: &Path) -> Result<&'static Self, LoadError> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut attempts = Vec::new();
        // SAFETY: the file is an NCCL, which is the caller's promise.
        let found = unsafe { attempt(file.as_os_str(), &mut attempts) };
        found.map(|library| keep(library, &mut open)).ok_or(LoadError { attempts })
    }

    /// Returns the release of the loaded library, as the library reports it.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Returns the path of the loaded file, with symbolic links resolved.
    pub fn path(&self) -> String {
        self.path.clone()
    }

    /// Whether the loaded library has a function of this name, even if this crate does not know the name. Every call of
    /// this method searches the library.
    pub fn has(&self, function: &str) -> bool {
        find(&self.opened, function).is_some()
    }

    /// # Safety
    ///
    /// The file that the loader finds under this name must be an NCCL.
    unsafe fn load(name: &OsStr, flags: c_int) -> Result<Self, Reason> {
        // SAFETY: the initialisers of NCCL have no preconditions, and by this function's contract the file is an NCCL.
        let opened =
            unsafe { Opened::open(Some(name), RTLD_LAZY | RTLD_LOCAL | flags) }.map_err(|error| Reason::NotOpened(words(&error)))?;
        let found = find(&opened, "ncclGetVersion").ok_or(Reason::NotNccl).and_then(|address| Ok((address, version(address)?)));
        match found {
            Ok((address, version)) => {
                Ok(Self { opened, identity: address.addr(), version, path: file_of(address, name), slots: Slots::default() })
            }
            Err(reason) => {
                // The library's initialisers have run and may have started threads. So it remains loaded, but is not
                // used.
                std::mem::forget(opened);
                Err(reason)
            }
        }
    }

    /// Returns the address of the function that `slot` is for.
    #[inline]
    pub(crate) fn address(&self, slot: &Slot, symbol: &'static str, since: Version) -> Result<*mut c_void, MissingSymbol> {
        // A thread that holds the library has synchronised with its opening, and only the address itself is published
        // here.
        let address = slot.0.load(Ordering::Relaxed);
        let address = if address.is_null() { self.resolve(slot, symbol) } else { address };
        if address == ABSENT { Err(MissingSymbol { symbol, since, loaded: self.version }) } else { Ok(address) }
    }

    #[cold]
    fn resolve(&self, slot: &Slot, symbol: &str) -> *mut c_void {
        let address = find(&self.opened, symbol).unwrap_or(ABSENT);
        slot.0.store(address, Ordering::Relaxed);
        address
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("version", &self.version).field("path", &self.path).finish_non_exhaustive()
    }
}

/// The address of one function: null until it is first needed.
#[derive(Default)]
pub(crate) struct Slot(AtomicPtr<c_void>);

/// Stands for the address of a function that the library does not have.
const ABSENT: *mut c_void = without_provenance_mut(1);

/// # Safety
///
/// The file that the loader finds under this name must be an NCCL.
unsafe fn attempt(name: &OsStr, attempts: &mut Vec<Attempt>) -> Option<Library> {
    // SAFETY: this function's contract.
    match unsafe { Library::load(name, 0) } {
        Ok(library) => Some(library),
        Err(reason) => {
            attempts.push(Attempt { name: name.to_string_lossy().into_owned(), reason });
            None
        }
    }
}

/// Keeps the library permanently, or returns the same library if it is already open.
fn keep(library: Library, open: &mut Vec<&'static Library>) -> &'static Library {
    if let Some(known) = open.iter().find(|known| known.identity == library.identity) {
        // Closing the library here only undoes one of two openings.
        return known;
    }
    let library = Box::leak(Box::new(library));
    open.push(library);
    library
}

fn find(opened: &Opened, symbol: &str) -> Option<*mut c_void> {
    // SAFETY: the type states only that it is an address; each caller gives it its own type.
    let address = unsafe { opened.get::<*mut c_void>(symbol) }.ok()?.into_raw();
    (!address.is_null()).then_some(address)
}

fn version(address: *mut c_void) -> Result<Version, Reason> {
    // SAFETY: the address is that of the library's `ncclGetVersion`, which has had this signature in all releases.
    let function = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> ncclResult_t>(address) };
    let mut code = 0;
    // SAFETY: the function writes one integer.
    match unsafe { function(&mut code) } {
        ncclResult_t::ncclSuccess => Ok(Version::from_code(code)),
        failed => Err(Reason::VersionFailed(failed)),
    }
}

/// Returns the system loader's own text.
fn words(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// C's `Dl_info`.
#[repr(C)]
struct Place {
    file: *const c_char,
    base: *mut c_void,
    symbol: *const c_char,
    address: *mut c_void,
}

unsafe extern "C" {
    fn dladdr(address: *const c_void, place: *mut Place) -> c_int;
}

/// Returns the file that `address` was loaded from, or `name` if the system does not report it.
fn file_of(address: *mut c_void, name: &OsStr) -> String {
    let mut place = Place { file: null(), base: null_mut(), symbol: null(), address: null_mut() };
    // SAFETY: any address may be passed; the answer is written to a struct of C's layout.
    let known = unsafe { dladdr(address, &mut place) } != 0 && !place.file.is_null();
    let file = if known {
        // SAFETY: the loader's string lives as long as the library, which is in use.
        unsafe { CStr::from_ptr(place.file) }.to_string_lossy()
    } else {
        name.to_string_lossy()
    };
    fs::canonicalize(&*file).map_or_else(|_| file.to_string(), |whole| whole.to_string_lossy().into_owned())
}
