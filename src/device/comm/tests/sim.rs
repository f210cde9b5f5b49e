//! The simulation, for one test at a time.

use std::time::Duration;

use crate::deadline::Deadline;

/// The simulation for this test alone, with nothing planted.
pub(super) struct Sim(#[expect(dead_code, reason = "held, never read")] simgpu::Alone);

impl Sim {
    pub(super) fn new() -> Self {
        simgpu::install();
        let alone = simgpu::alone();
        simgpu::nccl::reset();
        Self(alone)
    }

    /// Nothing was found wrong, and nothing is left.
    pub(super) fn finish(self) {
        self.wait_until_none_is_left();
        assert_eq!(simgpu::nccl::reports(), Vec::<String>::new());
        assert_eq!(simgpu::reports(), Vec::<String>::new());
    }

    /// Aborts go on in the background, and hold on to the context; a broken one is whole again when all have let go of it.
    pub(super) fn wait_until_none_is_left(&self) {
        let deadline = Deadline::after(Duration::from_secs(30));
        while simgpu::nccl::counts() != simgpu::nccl::Counts::default() || simgpu::counts() != simgpu::Counts::default() {
            assert!(!deadline.has_passed(), "left: {:?}, {:?}", simgpu::nccl::counts(), simgpu::counts());
            std::thread::yield_now();
        }
    }
}
