//! Kernels of libraries: accesses that our own kernels may not make, and faults that are still found.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "the driver is C")]

use std::ffi::{CString, c_void};
use std::path::PathBuf;
use std::ptr::with_exposed_provenance;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{self, CUdeviceptr, CUresult, CUstream};
use cudarc::driver::{CudaContext, result};
use simgpu::Gate;

const WORDS: usize = 32;

/// `trade` writes to another device, raises its flag and waits for its own. `visit` waits for an address and writes
/// there; `invite` names one and waits for the data. `peek` reads three words. `unset` adds to a register that was
/// never set.
const KERNELS: &str = "
.version 8.0
.target sm_120
.address_size 64
.extern .func (.reg .b32 out) one();
.visible .global .u32 table[4] = {4, 3, 2, 1};

.visible .entry trade(.param .u64 own, .param .u64 theirs, .param .u64 data, .param .u32 round)
{
    .reg .pred %p<3>; .reg .b32 %r<5>; .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [own]; ld.param.u64 %rd2, [theirs]; ld.param.u64 %rd3, [data]; ld.param.u32 %r1, [round];
    mov.u32 %r2, %tid.x; mad.wide.u32 %rd4, %r2, 4, %rd3; add.s32 %r3, %r2, %r1; st.global.u32 [%rd4], %r3;
    bar.sync 0; setp.ne.u32 %p1, %r2, 0; @%p1 bra END;
    st.release.sys.global.u32 [%rd2], %r1;
SPIN: ld.acquire.sys.global.u32 %r4, [%rd1]; setp.lt.u32 %p2, %r4, %r1; @%p2 bra SPIN;
END: bar.sync 0; ret;
}

.visible .entry visit(.param .u64 box, .param .u32 value)
{
    .reg .pred %p; .reg .b32 %r; .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [box]; ld.param.u32 %r, [value];
SPIN: ld.volatile.global.u64 %rd2, [%rd1]; setp.eq.u64 %p, %rd2, 0; @%p bra SPIN;
    st.global.u32 [%rd2], %r; ret;
}

.visible .entry invite(.param .u64 box, .param .u64 word)
{
    .reg .pred %p; .reg .b32 %r; .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [box]; ld.param.u64 %rd2, [word]; st.volatile.global.u64 [%rd1], %rd2;
SPIN: ld.volatile.global.u32 %r, [%rd2]; setp.eq.u32 %p, %r, 0; @%p bra SPIN;
    ret;
}

.visible .entry peek(.param .u64 word)
{
    .reg .b32 %r; .reg .b64 %rd; .reg .pred %p;
    ld.param.u64 %rd, [word]; ld.global.u32 %r, [%rd]; ld.global.u32 %r, [%rd+4]; ld.global.u32 %r, [%rd+8];
    setp.eq.u32 %p, %r, 1; @%p trap; ret;
}

.visible .entry unset(.param .u64 out)
{
    .reg .b32 %r<3>; .reg .b64 %rd;
    ld.param.u64 %rd, [out]; call (%r2), one; add.s32 %r2, %r2, %r1; st.global.u32 [%rd], %r2; ret;
}
";

/// The function that `unset` calls, in a separate text.
const ONE: &str = ".version 8.0\n.target sm_120\n.address_size 64\n.visible .func (.reg .b32 out) one() { mov.u32 out, 1; ret; }\n";

/// A temporary folder with the texts, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("simgpu-libraries-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join("a.ptx"), KERNELS).unwrap();
        std::fs::write(path.join("b.ptx"), ONE).unwrap();
        std::fs::write(path.join("notes.txt"), "no PTX").unwrap();
        Folder(path)
    }

    fn name(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A device with a stream, the kernels of a library, and memory that another device may access.
struct Rank {
    context: Arc<CudaContext>,
    stream: CUstream,
    module: *mut c_void,
    flag: CUdeviceptr,
    data: CUdeviceptr,
}

impl Rank {
    fn new(device: usize, kernels: &str) -> Rank {
        let context = CudaContext::new(device).unwrap();
        context.bind_to_thread().unwrap();
        let module = simgpu::load_library_kernels(kernels).unwrap();
        let (flag, data) = (memory(4), memory(4 * WORDS));
        Rank { context, stream: stream(), module, flag, data }
    }

    fn launch(&self, stream: CUstream, kernel: &str, threads: u32, arguments: &[u64]) {
        self.context.bind_to_thread().unwrap();
        let name = CString::new(kernel).unwrap();
        // SAFETY: the module and the stream are alive; each argument has as many bytes as the parameter, or more.
        unsafe {
            let function = result::module::get_function(self.module.cast(), name).unwrap();
            let mut pointers: Vec<*mut c_void> = arguments.iter().map(|argument| (&raw const *argument).cast_mut().cast()).collect();
            result::launch_kernel(function, (1, 1, 1), (threads, 1, 1), 0, stream, &mut pointers).unwrap();
        }
    }

    fn trade(&self, other: &Rank, round: u32) {
        self.launch(self.stream, "trade", WORDS as u32, &[self.flag, other.flag, other.data, round.into()]);
    }

    fn wait(&self) -> Result<(), CUresult> {
        self.context.bind_to_thread().unwrap();
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.stream) }.map_err(|error| error.0)
    }

    fn read(&self, stream: CUstream) -> Vec<u32> {
        self.context.bind_to_thread().unwrap();
        let mut words = vec![0; WORDS];
        // SAFETY: the words live until the test has waited for the stream.
        unsafe {
            result::memcpy_dtoh_async(&mut words, self.data, stream).unwrap();
            result::stream::synchronize(stream).unwrap();
        }
        words
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: each is freed once, after its last use.
            unsafe {
                let _ = result::stream::synchronize(self.stream);
                let _ = result::stream::destroy(self.stream);
                let _ = result::module::unload(self.module.cast());
                [self.flag, self.data].into_iter().for_each(|start| result::free_sync(start).unwrap_or_default());
            }
        }
    }
}

/// Allocates zeroed memory on the current device.
fn memory(bytes: usize) -> CUdeviceptr {
    // SAFETY: the bytes set are those allocated.
    unsafe {
        let start = result::malloc_sync(bytes).unwrap();
        result::memset_d8_sync(start, 0, bytes).unwrap();
        sys::cuCtxSynchronize().result().unwrap();
        start
    }
}

fn stream() -> CUstream {
    result::stream::create(result::stream::StreamKind::NonBlocking).unwrap()
}

fn meet(a: &Rank, b: &Rank) {
    for (own, other) in [(a, b), (b, a)] {
        own.context.bind_to_thread().unwrap();
        // SAFETY: both contexts are alive.
        unsafe { sys::cuCtxEnablePeerAccess(other.context.cu_ctx(), 0) }.result().unwrap();
    }
}

fn expected(round: u32) -> Vec<u32> {
    (0..WORDS as u32).map(|word| word + round).collect()
}

fn none() {
    assert_eq!(simgpu::reports(), [""; 0]);
}

/// Returns two devices that may access each other.
fn pair(folder: &Folder) -> (Rank, Rank) {
    let (a, b) = (Rank::new(0, folder.name()), Rank::new(1, folder.name()));
    meet(&a, &b);
    (a, b)
}

/// Tests everything that needs peer access, because that lasts as long as a context.
#[test]
fn kernels_of_two_devices_order_what_they_do_by_flags() {
    let _alone = simgpu::alone();
    let folder = Folder::new("flags");
    let (a, b) = pair(&folder);
    several_rounds(&a, &b);
    another_stream_that_waits_for_nobody(&a, &b);
    kernels_of_one_device(&a);
    neighbours_in_a_word(&a);
    a_buffer_that_comes_late(&a, &b, true);
    none();
    a_buffer_that_comes_late(&a, &b, false);
    let reports = simgpu::reports();
    assert!(!reports.is_empty() && reports.iter().all(|report| report.contains("written by kernel visit")), "{reports:#?}");
    a_buffer_that_goes_early(&a, &b);
}

fn several_rounds(a: &Rank, b: &Rank) {
    for round in 1..20 {
        a.trade(b, round);
        b.trade(a, round);
        // Data written to the memory of a device is there once the device's own kernel is over.
        assert_eq!((b.read(b.stream), a.read(a.stream)), (expected(round), expected(round)), "{round}");
    }
    none();
}

fn another_stream_that_waits_for_nobody(a: &Rank, b: &Rank) {
    b.context.bind_to_thread().unwrap();
    let other = stream();
    let gate = Gate::close(a.stream.cast());
    a.trade(b, 20);
    b.trade(a, 20);
    b.read(other);
    gate.open();
    a.wait().unwrap();
    b.wait().unwrap();
    let reports = simgpu::reports();
    let found = |report: &String| report.contains("written by kernel trade") && report.contains("read by cuMemcpyDtoHAsync");
    assert!(reports.iter().filter(|report| found(report)).count() == 1 && reports.len() == 1, "{reports:#?}");
    // SAFETY: it is no longer used.
    unsafe { result::stream::destroy(other) }.unwrap();
}

fn kernels_of_one_device(a: &Rank) {
    a.context.bind_to_thread().unwrap();
    let other = stream();
    a.launch(a.stream, "unset", 1, &[a.data]);
    a.launch(other, "unset", 1, &[a.data]);
    // SAFETY: the streams are alive.
    unsafe { [a.stream, other].into_iter().for_each(|stream| result::stream::synchronize(stream).unwrap()) };
    let reports = simgpu::reports();
    assert!(reports.len() == 1 && reports[0].contains("written by kernel unset"), "{reports:#?}");
    assert_eq!(a.read(a.stream)[0], 1, "a register that was never set holds zero");
    // SAFETY: it is no longer used.
    unsafe { result::stream::destroy(other) }.unwrap();
}

/// Checks that other writes beside the data of a kernel that reads whole words are allowed, but not writes into it.
fn neighbours_in_a_word(a: &Rank) {
    a.context.bind_to_thread().unwrap();
    let other = stream();
    for (offset, bytes, found) in [(0, 1, 0), (0, 3, 0), (9, 3, 0), (0, 4, 1), (8, 1, 1), (4, 4, 1)] {
        a.launch(a.stream, "peek", 1, &[a.data]);
        // SAFETY: the bytes lie inside; the streams are alive.
        unsafe {
            result::memset_d8_async(a.data + offset, 0, bytes, other).unwrap();
            [a.stream, other].into_iter().for_each(|stream| result::stream::synchronize(stream).unwrap());
        }
        assert_eq!(simgpu::reports().len(), found, "{bytes} bytes at {offset}");
    }
    // SAFETY: it is no longer used.
    unsafe { result::stream::destroy(other) }.unwrap();
}

/// Allocates a word of host memory that a kernel polls.
fn open_box(a: &Rank) -> (*mut c_void, &'static AtomicU64) {
    a.context.bind_to_thread().unwrap();
    // SAFETY: eight bytes are allocated and set before any thread reads them; they live until they are freed.
    unsafe {
        let place = result::malloc_host(8, 0).unwrap();
        place.cast::<u64>().write(0);
        (place, &*with_exposed_provenance::<AtomicU64>(place.expose_provenance()))
    }
}

/// Checks that a kernel may receive an address while it runs: from a kernel of the device it writes to, or from the
/// host.
fn a_buffer_that_comes_late(a: &Rank, b: &Rank, invited: bool) {
    let (place, told) = open_box(a);
    a.launch(a.stream, "visit", 1, &[place as u64, 77]);
    // The kernel may be polling already.
    b.context.bind_to_thread().unwrap();
    let late = memory(4);
    if invited {
        b.launch(b.stream, "invite", 1, &[place as u64, late]);
    } else {
        told.store(late, Ordering::Release);
    }
    a.wait().unwrap();
    b.wait().unwrap();
    let mut word = [0_u32];
    // SAFETY: the word is filled when the call returns; each memory is freed once.
    unsafe {
        result::memcpy_dtoh_sync(&mut word, late).unwrap();
        result::free_sync(late).unwrap();
        result::free_host(place).unwrap();
    }
    assert_eq!(word, [77]);
}

/// Checks that a rank that is ahead may free its buffer, in stream order, before the other one has even launched.
fn a_buffer_that_goes_early(a: &Rank, b: &Rank) {
    b.context.bind_to_thread().unwrap();
    let round = 21_u32;
    // SAFETY: freed in stream order, after the kernel that represents all its uses.
    let early = unsafe { result::malloc_async(b.stream, 4 * WORDS) }.unwrap();
    b.wait().unwrap();
    b.trade(a, round);
    // SAFETY: see above.
    unsafe { result::free_async(early, b.stream) }.unwrap();
    a.launch(a.stream, "trade", WORDS as u32, &[a.flag, b.flag, early, round.into()]);
    assert_eq!((a.wait(), b.wait()), (Ok(()), Ok(())));
    none();
}

#[test]
fn the_bounds_of_memory_hold_for_libraries_too() {
    let _alone = simgpu::alone();
    let folder = Folder::new("bounds");
    let rank = Rank::new(6, folder.name());
    rank.launch(rank.stream, "trade", 1, &[rank.flag, rank.flag, rank.data + 4 * WORDS as u64, 1]);
    assert_eq!(rank.wait(), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    let reports = simgpu::reports();
    assert!(reports.len() == 1 && reports[0].contains("kernel trade"), "{reports:#?}");
}

#[test]
fn variables_are_found_by_their_names() {
    let _alone = simgpu::alone();
    let folder = Folder::new("variables");
    let rank = Rank::new(4, folder.name());
    let place = |name: &str| {
        let (mut start, mut bytes, name) = (0, 0, CString::new(name).unwrap());
        // SAFETY: the module is alive, and the variables are on the stack here.
        unsafe { sys::cuModuleGetGlobal_v2(&raw mut start, &raw mut bytes, rank.module.cast(), name.as_ptr()) }
            .result()
            .map(|()| (start, bytes))
    };
    let (start, bytes) = place("table").unwrap();
    let mut words = [0_u32; 4];
    // SAFETY: the words are filled when the call returns.
    unsafe { result::memcpy_dtoh_sync(&mut words, start) }.unwrap();
    assert_eq!((bytes, words), (16, [4, 3, 2, 1]));
    assert_eq!(place("chair").unwrap_err().0, CUresult::CUDA_ERROR_NOT_FOUND);
    none();
}

#[test]
fn texts_are_linked_once_and_what_is_wrong_with_them_is_said() {
    let _alone = simgpu::alone();
    let folder = Folder::new("once");
    drop(Rank::new(2, folder.name()));
    let name = folder.name().to_string();
    drop(folder);
    // The files are deleted, and are not read again.
    drop(Rank::new(3, &name));
    none();
    assert_eq!(simgpu::load_library_kernels(&format!("{name}/a.ptx")), Err(sys::CUresult::CUDA_ERROR_FILE_NOT_FOUND as u32));
    assert!(simgpu::reports()[0].contains("a.ptx cannot be read"));
    let folder = Folder::new("broken");
    let alone = format!("{}/a.ptx", folder.name());
    assert_eq!(simgpu::load_library_kernels(&alone), Err(sys::CUresult::CUDA_ERROR_INVALID_PTX as u32));
    let reports = simgpu::reports();
    assert!(reports[0].contains("a.ptx") && reports[0].contains("one"), "{reports:#?}");
}
