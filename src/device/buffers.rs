//! NCCL's memory, and buffers that are registered with it, as buffers of calls.

use cudarc::driver::{DevicePtr, DevicePtrMut};

use crate::buffer::device_buffers::{readable, writable};
use crate::device::{NcclBuffer, Registration, Window};
use crate::element::Data;

readable!([T: Data] NcclBuffer<T>, [T: Data, B: DevicePtr<T>] Registration<T, B>, [T: Data, B: DevicePtr<T>] Window<T, B>);
writable!([T: Data] NcclBuffer<T>, [T: Data, B: DevicePtr<T> + DevicePtrMut<T>] Registration<T, B>, [T: Data, B: DevicePtr<T> + DevicePtrMut<T>] Window<T, B>);
