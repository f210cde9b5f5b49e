//! The bytes of a tensor on a GPU, once the stream that orders its uses is known.

use std::ffi::c_void;

use crate::interop::{AsDevicePtr, AsDevicePtrMut, ForeignBuffer};

/// A tensor's bytes on a GPU, as a buffer.
pub(super) type OnGpu = ForeignBuffer<Bytes>;

/// The location of a tensor's bytes on a GPU.
#[derive(Debug)]
pub(super) struct Bytes {
    pub(super) address: u64,
    pub(super) length: usize,
    pub(super) at: Place,
}

// SAFETY: - this many bytes are there as long as the tensor lives, which owns this;
// - the stream lives as long, and the tensor's uses follow it (promised to `Tensor::order_by`).
unsafe impl AsDevicePtr for Bytes {
    type Element = u8;

    fn device_ptr(&self) -> u64 {
        self.address
    }

    fn elements(&self) -> usize {
        self.length
    }

    fn device(&self) -> usize {
        self.at.device
    }

    fn raw_stream(&self) -> *mut c_void {
        self.at.stream
    }
}

// SAFETY: it is lent for writing only by tensors that may be written and are borrowed mutably.
unsafe impl AsDevicePtrMut for Bytes {}

/// A device, and the stream whose order the tensor's uses follow.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) device: usize,
    pub(super) stream: *mut c_void,
}

// SAFETY: a handle, which may be used on any thread.
unsafe impl Send for Place {}
