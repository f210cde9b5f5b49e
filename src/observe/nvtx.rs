//! Ranges for NVIDIA's profilers.
//!
//! NVTX is a header that C programs include. On first use, it loads the library that a tool has named in the
//! environment. It offers the library a table of slots, which the tool fills with the functions that the program should
//! call. This module does the same without the header, for the functions used here.

#![expect(unsafe_code, reason = "a tool's library is loaded and called")]

use std::array;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use libloading::Library;

use super::CallReport;
use crate::base::event::{self, Quiet};

/// The NVTX version that these tables follow.
const VERSION: u16 = 3;

/// The number of slots of each module: none, core, CUDA, OpenCL, CUDA runtime, core with domains, synchronisation.
/// The first slot of each is unused.
const SIZES: [usize; 7] = [0, 16, 9, 15, 7, 16, 7];
const LARGEST: usize = 16;

/// The module of functions with a domain, and the slots of the functions called here.
const DOMAINS: usize = 5;
const RANGE_PUSH: usize = 4;
const RANGE_POP: usize = 5;
const CREATE: usize = 12;

type Slot = AtomicPtr<c_void>;

/// The slots that a tool fills.
static SLOTS: [[Slot; LARGEST]; SIZES.len()] = [const { [const { AtomicPtr::new(ptr::null_mut()) }; LARGEST] }; SIZES.len()];

/// One table of pointers to slots for each module, with a null pointer before and after them.
static TABLES: OnceLock<[[AtomicPtr<Slot>; LARGEST + 1]; SIZES.len()]> = OnceLock::new();

/// The callbacks through which a tool asks for tables.
#[repr(C)]
struct Callbacks {
    struct_size: usize,
    table: extern "C" fn(c_int, *mut *mut c_void, *mut c_uint) -> c_int,
}

#[repr(C)]
struct VersionInfo {
    struct_size: usize,
    version: u32,
    reserved: u32,
    set_injection_version: extern "C" fn(u32),
}

static CALLBACKS: Callbacks = Callbacks { struct_size: size_of::<Callbacks>(), table };
static VERSION_INFO: VersionInfo =
    VersionInfo { struct_size: size_of::<VersionInfo>(), version: VERSION as u32, reserved: 0, set_injection_version };

/// The attributes of a range: `nvtxEventAttributes_t`.
#[repr(C)]
struct Attributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_char,
}

const _: () = assert!(size_of::<Attributes>() == 48, "as NVTX has it");

const COLOR_ARGB: i32 = 1;
const PAYLOAD_U64: i32 = 1;
const MESSAGE_ASCII: i32 = 1;

type Initialize = unsafe extern "C" fn(extern "C" fn(u32) -> *const c_void) -> c_int;
type Create = unsafe extern "C" fn(*const c_char) -> *mut c_void;
type Push = unsafe extern "C" fn(*mut c_void, *const Attributes) -> c_int;
type Pop = unsafe extern "C" fn(*mut c_void) -> c_int;

/// Returns a module's table: `table` receives its address, `size` the number of its entries.
extern "C" fn table(module: c_int, table: *mut *mut c_void, size: *mut c_uint) -> c_int {
    let Some(module) = usize::try_from(module).ok().filter(|module| (1..SIZES.len()).contains(module)) else { return 0 };
    let pointers = |module: usize| {
        array::from_fn(|place| {
            let slot = SLOTS[module].get(place).filter(|_| (1..SIZES[module]).contains(&place));
            AtomicPtr::new(slot.map_or(ptr::null_mut(), |slot| ptr::from_ref(slot).cast_mut()))
        })
    };
    let tables = TABLES.get_or_init(|| array::from_fn(pointers));
    // SAFETY: a tool passes null, or a pointer to where it wants the answer (NVTX's contract).
    unsafe {
        if !table.is_null() {
            table.write(tables[module].as_ptr().cast_mut().cast());
        }
        if !size.is_null() {
            size.write(SIZES[module] as c_uint);
        }
    }
    1
}

extern "C" fn set_injection_version(_version: u32) {}

/// Returns the table that a tool asks for first.
extern "C" fn export_table(id: u32) -> *const c_void {
    match id {
        1 => ptr::from_ref(&CALLBACKS).cast(),
        3 => ptr::from_ref(&VERSION_INFO).cast(),
        _ => ptr::null(),
    }
}

/// A tool that receives ranges.
#[derive(Debug)]
pub(super) struct Nvtx {
    /// Null for the default domain, which all programs share.
    domain: *mut c_void,
    push: Push,
    pop: Pop,
}

// SAFETY: any thread may call the functions, with any domain (NVTX's contract).
unsafe impl Send for Nvtx {}
// SAFETY: nothing in it changes after construction, and several threads may call the functions at once (NVTX's
// contract).
unsafe impl Sync for Nvtx {}

impl Nvtx {
    /// Returns the tool of this library, which is loaded once. Returns `None` if the library cannot be loaded
    /// (reported once) or wants no ranges.
    pub(super) fn get(library: &Path) -> Option<&'static Self> {
        static TOOL: OnceLock<Option<Nvtx>> = OnceLock::new();
        // A subscriber that receives the failure may make a communicator, and so call this again.
        let _quiet = Quiet::new();
        let load = || Self::load(library).inspect_err(|reason| event::warn!(library = %library.display(), reason, "no NVTX ranges"));
        TOOL.get_or_init(|| load().ok()).as_ref()
    }

    fn load(library: &Path) -> Result<Self, String> {
        // SAFETY: the party that set the variable is responsible for what the library does when it is loaded.
        let library = unsafe { Library::new(library) }.map_err(|error| error.to_string())?;
        // SAFETY: the function by which NVTX identifies its tools has this type.
        let initialize = unsafe { library.get::<Initialize>(c"InitializeInjectionNvtx2") }.map_err(|error| error.to_string())?;
        // SAFETY: the symbol has the name that NVTX gives to a function of this type. The library is loaded, and the
        // function passed to it lives as long as the program.
        if unsafe { initialize(export_table) } == 0 {
            return Err("the tool did not start".to_owned());
        }
        // The slots now point into the library.
        std::mem::forget(library);
        let filled = |place: usize| Some(SLOTS[DOMAINS][place].load(Ordering::Acquire)).filter(|function| !function.is_null());
        let (Some(push), Some(pop)) = (filled(RANGE_PUSH), filled(RANGE_POP)) else {
            return Err("the tool does not record ranges".to_owned());
        };
        // SAFETY: what a tool puts into these slots has these types (NVTX's contract), and stays a function
        // permanently.
        let (push, pop) = unsafe { (std::mem::transmute::<*mut c_void, Push>(push), std::mem::transmute::<*mut c_void, Pop>(pop)) };
        let create = filled(CREATE).map(|create| {
            // SAFETY: what a tool puts into this slot is a function of this type (NVTX's contract). It stays valid,
            // because its library stays loaded.
            unsafe { std::mem::transmute::<*mut c_void, Create>(create) }
        });
        // SAFETY: the name is a zero-terminated string, which the tool copies.
        let domain = create.map_or(ptr::null_mut(), |create| unsafe { create(c"collectives".as_ptr()) });
        Ok(Self { domain, push, pop })
    }

    /// Opens a range on this thread. It ends when the returned value is dropped.
    pub(super) fn range(&'static self, report: &CallReport<'_>) -> Range {
        let peer = report.peer.map_or_else(String::new, |peer| format!(" rank {peer}"));
        let op = report.op.as_deref().map_or_else(String::new, |op| format!(" {op}"));
        let text = format!("{}{op}{peer} {} B", report.kind, report.bytes);
        let message = CString::new(text).unwrap_or_default();
        let attributes = Attributes {
            version: VERSION,
            size: size_of::<Attributes>() as u16,
            category: 0,
            color_type: COLOR_ARGB,
            color: 0xff_00_72_b2,
            payload_type: PAYLOAD_U64,
            reserved: 0,
            payload: report.bytes,
            message_type: MESSAGE_ASCII,
            message: message.as_ptr(),
        };
        // SAFETY: the attributes and the string live until the tool has returned, and the tool copies them.
        unsafe { (self.push)(self.domain, &raw const attributes) };
        Range { nvtx: self }
    }
}

/// An open range.
pub(super) struct Range {
    nvtx: &'static Nvtx,
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: the domain is the tool's own. Ranges are closed by the thread that opened them, because this one is
        // a local variable of `Watch::around`.
        unsafe { (self.nvtx.pop)(self.nvtx.domain) };
    }
}
