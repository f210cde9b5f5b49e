//! Steers the simulated NCCL.

use std::ffi::{CString, c_char, c_int, c_void};

use libloading::os::unix::Library;

/// The simulation for this test alone, with nothing planted; when the test is over it has nothing to report.
pub(super) struct Sim {
    _alone: simgpu::Alone,
    library: Library,
}

macro_rules! call {
    ($self:ident, $name:ident($($argument:expr => $type:ty),*) $(-> $result:ty)?) => {{
        // SAFETY: the simulated libraries are of this workspace, and have this function with this signature.
        unsafe {
            let function = $self.library.get::<unsafe extern "C" fn($($type),*) $(-> $result)?>(stringify!($name)).unwrap();
            function($($argument),*)
        }
    }};
}

impl Sim {
    pub(super) fn new() -> Self {
        simgpu::install();
        let sim = Self { _alone: simgpu::alone(), library: Library::this() };
        call!(sim, simgpu_nccl_reset());
        sim.reports();
        sim
    }

    /// The `nth` call of a function from now on fails.
    pub(super) fn fail(&self, function: &str, nth: u64, code: c_int) {
        let name = CString::new(function).unwrap();
        call!(self, simgpu_nccl_fail(name.as_ptr() => *const c_char, nth => u64, code => c_int, 1 => c_int));
    }

    /// After a function, a communicator is in progress for so many looks.
    pub(super) fn in_progress(&self, function: &str, looks: u32) {
        let name = CString::new(function).unwrap();
        call!(self, simgpu_nccl_in_progress(name.as_ptr() => *const c_char, looks => u32));
    }

    /// A rank's process seems to die.
    pub(super) fn lose(&self, rank: usize) {
        assert!(call!(self, simgpu_nccl_lose(rank => usize) -> usize) > 0);
    }

    pub(super) fn set_version(&self, version: c_int) {
        call!(self, simgpu_nccl_set_version(version => c_int));
    }

    /// How many groups this thread has open.
    pub(super) fn group_depth(&self) -> usize {
        call!(self, simgpu_nccl_group_depth() -> usize)
    }

    pub(super) fn calls(&self, function: &str) -> u64 {
        let name = CString::new(function).unwrap();
        call!(self, simgpu_nccl_calls(name.as_ptr() => *const c_char, 1 => c_int) -> u64)
    }

    /// How many things are alive.
    pub(super) fn live(&self, what: &str) -> usize {
        let name = CString::new(what).unwrap();
        call!(self, simgpu_nccl_live(name.as_ptr() => *const c_char) -> usize)
    }

    /// Waits until nothing of a kind is alive any more: aborts go on in the background.
    pub(super) fn wait_until_none(&self, what: &str) {
        let deadline = super::Deadline::after(super::LONG);
        while self.live(what) > 0 {
            assert!(!deadline.has_passed(), "{} {what} are left", self.live(what));
            std::thread::yield_now();
        }
    }

    /// What either library found wrong.
    pub(super) fn reports(&self) -> Vec<String> {
        extern "C" fn sink(list: *mut c_void, text: *const u8, bytes: usize) {
            // SAFETY: the list is the one below, and the text has as many bytes as is said.
            unsafe {
                let text = String::from_utf8_lossy(std::slice::from_raw_parts(text, bytes)).into_owned();
                (*list.cast::<Vec<String>>()).push(text);
            }
        }
        let mut list: Vec<String> = simgpu::reports();
        type Sink = extern "C" fn(*mut c_void, *const u8, usize);
        call!(self, simgpu_nccl_take_reports(sink => Sink, std::ptr::from_mut(&mut list).cast() => *mut c_void));
        list
    }

    /// Nothing was found wrong, and no communicator is left.
    pub(super) fn finish(self) {
        self.wait_until_none("communicators");
        assert_eq!(self.reports(), Vec::<String>::new());
    }
}
