use std::ffi::{c_uchar, c_uint, c_ushort};
use std::sync::Arc;

use crate::call::driver;
use crate::capture;
use crate::checker::Verb;
use crate::code::{Code, Outcome};
use crate::job::{Span, Task, Work};
use crate::state::{Guard, Handle, State};
use crate::stream;
use crate::submit::{self, known};

/// One end of a copy, as specified by the caller.
#[derive(Clone, Copy)]
enum End {
    Device(u64),
    Host(u64),
    /// Device or host memory, depending on the address.
    Either(u64),
}

impl End {
    fn address(self) -> u64 {
        match self {
            End::Device(address) | End::Host(address) | End::Either(address) => address,
        }
    }

    /// Whether the driver knows the memory, so that a device can reach it directly.
    fn resolve(self, state: &State) -> bool {
        match self {
            End::Device(_) => true,
            End::Host(address) | End::Either(address) => state.memory.at(address).is_some(),
        }
    }
}

/// Whether the call returns before the copy is over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Return {
    AtOnce,
    /// When it is over, if one end is in plain host memory, or if one end is the host and no stream is named.
    WhenSafe,
}

fn submit_copy(function: &str, to: End, from: End, bytes: usize, named: Option<Handle>) -> Outcome {
    let mut state = stream::with_room(named.unwrap_or(0));
    let stream = state.stream(named.unwrap_or(0))?;
    if named.is_none() {
        capture::unsafe_call(&mut state)?;
    }
    if bytes == 0 {
        return Ok(());
    }
    if to.address() == 0 || from.address() == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let (to_known, from_known) = (to.resolve(&state), from.resolve(&state));
    let capturing = state.streams[&stream].capture.is_some();
    let span = |end: End, verb, known| Span { start: end.address(), bytes: bytes as u64, verb, known };
    let mut spans = vec![span(to, Verb::Write, to_known), span(from, Verb::Read, from_known)];
    let work = if from_known || capturing {
        Work::Copy { to: to.address(), from: from.address(), bytes }
    } else {
        spans.pop();
        // SAFETY: the caller guarantees `bytes` bytes at this address.
        let taken: Arc<[u8]> = unsafe { std::slice::from_raw_parts(from.address() as *const u8, bytes) }.into();
        Work::Upload { to: to.address(), from: taken }
    };
    submit::submit(&mut state, stream, Task { work, what: function.into(), spans })?;
    let between_devices = matches!((to, from), (End::Device(_), End::Device(_)));
    let back = if capturing || between_devices || named.is_some() && to_known { Return::AtOnce } else { Return::WhenSafe };
    finish(state, stream, back)
}

fn finish(state: Guard<'_>, stream: Handle, back: Return) -> Outcome {
    match back {
        Return::AtOnce => Ok(()),
        Return::WhenSafe => stream::synchronise(state, stream).1,
    }
}

fn fill(function: &str, to: u64, element: [u8; 4], width: usize, count: usize, named: Option<Handle>) -> Outcome {
    let mut state = stream::with_room(named.unwrap_or(0));
    let stream = state.stream(named.unwrap_or(0))?;
    if named.is_none() {
        capture::unsafe_call(&mut state)?;
    }
    let bytes = count.checked_mul(width).ok_or(Code::INVALID_VALUE)?;
    if !to.is_multiple_of(width as u64) {
        return Err(Code::INVALID_VALUE);
    }
    if bytes == 0 {
        return Ok(());
    }
    let task = Task { work: Work::Fill { to, element, width, count }, what: function.into(), spans: vec![known(to, bytes, Verb::Write)] };
    submit::submit(&mut state, stream, task).map(drop)
}

fn short(value: c_ushort) -> [u8; 4] {
    let [low, high] = value.to_ne_bytes();
    [low, high, 0, 0]
}

driver! {
    fn cuMemcpyHtoD_v2(to: u64, from: u64, bytes: usize) {
        submit_copy("cuMemcpyHtoD", End::Device(to), End::Host(from), bytes, None)
    }

    fn cuMemcpyDtoH_v2(to: u64, from: u64, bytes: usize) {
        submit_copy("cuMemcpyDtoH", End::Host(to), End::Device(from), bytes, None)
    }

    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) {
        submit_copy("cuMemcpyDtoD", End::Device(to), End::Device(from), bytes, None)
    }

    fn cuMemcpy(to: u64, from: u64, bytes: usize) {
        submit_copy("cuMemcpy", End::Either(to), End::Either(from), bytes, None)
    }

    fn cuMemcpyPeer(to: u64, _to_context: usize, from: u64, _from_context: usize, bytes: usize) {
        submit_copy("cuMemcpyPeer", End::Device(to), End::Device(from), bytes, None)
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) {
        submit_copy("cuMemcpyHtoDAsync", End::Device(to), End::Host(from), bytes, Some(stream))
    }

    fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) {
        submit_copy("cuMemcpyDtoHAsync", End::Host(to), End::Device(from), bytes, Some(stream))
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) {
        submit_copy("cuMemcpyDtoDAsync", End::Device(to), End::Device(from), bytes, Some(stream))
    }

    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: usize) {
        submit_copy("cuMemcpyAsync", End::Either(to), End::Either(from), bytes, Some(stream))
    }

    fn cuMemcpyPeerAsync(to: u64, _to_context: usize, from: u64, _from_context: usize, bytes: usize, stream: usize) {
        submit_copy("cuMemcpyPeerAsync", End::Device(to), End::Device(from), bytes, Some(stream))
    }

    fn cuMemsetD8_v2(to: u64, value: c_uchar, count: usize) {
        fill("cuMemsetD8", to, [value, 0, 0, 0], 1, count, None)
    }

    fn cuMemsetD16_v2(to: u64, value: c_ushort, count: usize) {
        fill("cuMemsetD16", to, short(value), 2, count, None)
    }

    fn cuMemsetD32_v2(to: u64, value: c_uint, count: usize) {
        fill("cuMemsetD32", to, value.to_ne_bytes(), 4, count, None)
    }

    fn cuMemsetD8Async(to: u64, value: c_uchar, count: usize, stream: usize) {
        fill("cuMemsetD8Async", to, [value, 0, 0, 0], 1, count, Some(stream))
    }

    fn cuMemsetD16Async(to: u64, value: c_ushort, count: usize, stream: usize) {
        fill("cuMemsetD16Async", to, short(value), 2, count, Some(stream))
    }

    fn cuMemsetD32Async(to: u64, value: c_uint, count: usize, stream: usize) {
        fill("cuMemsetD32Async", to, value.to_ne_bytes(), 4, count, Some(stream))
    }
}
