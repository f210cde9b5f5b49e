//! The kernels that libraries register. Each is identified by the address of its stub on the host, and is found by its
//! name in PTX.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::CString;
use std::os::unix::ffi::OsStringExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use simgpu_driver::{self as driver, Error, Outcome};

use crate::device::{current, ready};

/// The variable that names the files with PTX, or folders of such files, separated by colons.
const VARIABLE: &str = "SIMGPU_KERNELS";

#[derive(Default)]
struct Registry {
    binaries: usize,
    /// By the address of the stub: the name, and the binary that registered it.
    kernels: HashMap<usize, (CString, usize)>,
    /// By context: the module loaded into it.
    modules: HashMap<usize, usize>,
    /// By context and stub.
    found: HashMap<(usize, usize), usize>,
}

static REGISTRY: Mutex<Option<Registry>> = Mutex::new(None);

struct Locked(MutexGuard<'static, Option<Registry>>);

impl Locked {
    fn registry(&mut self) -> &mut Registry {
        self.0.get_or_insert_default()
    }
}

fn lock() -> Locked {
    Locked(REGISTRY.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Registers the machine code of a library. Returns a number for it, which is not 0.
pub(crate) fn add_binary() -> usize {
    let mut locked = lock();
    let registry = locked.registry();
    registry.binaries += 1;
    registry.binaries
}

/// Registers a kernel of a library.
pub(crate) fn add_kernel(binary: usize, stub: usize, name: CString) {
    lock().registry().kernels.insert(stub, (name, binary));
}

/// Removes the stubs of a library that is closed.
pub(crate) fn remove_binary(binary: usize) {
    let mut locked = lock();
    let registry = locked.registry();
    registry.kernels.retain(|_, (_, of)| *of != binary);
    let Registry { kernels, found, .. } = registry;
    found.retain(|(_, stub), _| kernels.contains_key(stub));
}

/// Checks that a stub was registered.
pub(crate) fn known(stub: usize) -> Outcome {
    if lock().registry().kernels.contains_key(&stub) { Ok(()) } else { Err(Error::INVALID_DEVICE_FUNCTION) }
}

/// Loads all PTX into the current context.
fn load() -> Outcome<usize> {
    let Some(names) = std::env::var_os(VARIABLE) else {
        driver::report(&format!("a kernel of a library was asked for, but {VARIABLE} names no file with PTX"));
        return Err(Error::NO_KERNEL_IMAGE_FOR_DEVICE);
    };
    let names = CString::new(names.into_vec()).map_err(|_| Error::INVALID_VALUE)?;
    let mut module = 0;
    // SAFETY: the names end with a NUL, and the variable is on the stack here.
    unsafe { driver::simgpu_load_kernels(&raw mut module, names.as_ptr())? };
    Ok(module)
}

/// Returns the driver's handle of a kernel in the current context.
pub(crate) fn find(stub: usize) -> Outcome<usize> {
    ready()?;
    let context = current()?;
    let mut locked = lock();
    let registry = locked.registry();
    if let Some(&function) = registry.found.get(&(context, stub)) {
        return Ok(function);
    }
    let (name, _) = registry.kernels.get(&stub).ok_or(Error::INVALID_DEVICE_FUNCTION)?;
    let name = name.clone();
    let module = *match registry.modules.entry(context) {
        Entry::Occupied(loaded) => loaded.into_mut(),
        Entry::Vacant(place) => place.insert(load()?),
    };
    let mut function = 0;
    // SAFETY: the name ends with a NUL, and the variable is on the stack here.
    if unsafe { driver::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) }.is_ok() {
        registry.found.insert((context, stub), function);
        return Ok(function);
    }
    driver::report(&format!("kernel {name:?} of a library is in no file that {VARIABLE} names"));
    Err(Error::INVALID_DEVICE_FUNCTION)
}
