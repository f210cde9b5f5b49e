//! Announces to other ranks whether a call becomes part of a graph.
//!
//! Before ranks compare a call, they notify each other whether the call becomes part of a graph, and then wait for each
//! other. During this wait, another thread may begin or end a capture of the stream. The call is then refused, because
//! the other ranks would wait for a call that runs only when its graph is launched, or never.

use std::sync::atomic::{AtomicU8, Ordering};

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

use crate::device::nccl::Refusal;

/// The announcement for the calls that are being made: captured, not captured, or none.
#[derive(Debug, Default)]
pub(super) struct AnnouncedCapture(AtomicU8);

impl AnnouncedCapture {
    const UNCAPTURED: u8 = 1;
    const CAPTURED: u8 = 2;

    fn code(is_captured: bool) -> u8 {
        if is_captured { Self::CAPTURED } else { Self::UNCAPTURED }
    }

    pub(super) fn set(&self, is_captured: Option<bool>) {
        self.0.store(is_captured.map_or(0, Self::code), Ordering::Relaxed);
    }

    /// Refuses a call whose announcement turned out wrong.
    #[inline]
    pub(super) fn check(&self, is_captured: bool) -> std::result::Result<(), Refusal> {
        if self.0.load(Ordering::Relaxed) == Self::code(!is_captured) { Err(Self::changed(is_captured)) } else { Ok(()) }
    }

    #[cold]
    fn changed(is_captured: bool) -> Refusal {
        let (what, error) = if is_captured {
            (
                "another thread began to capture the stream after the ranks had compared the call",
                CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            )
        } else {
            (
                "another thread ended the capture of the stream after the ranks had compared the call",
                CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            )
        };
        Refusal::driver(what, DriverError(error))
    }
}
