//! NCCL's functions on one communicator.

#![expect(unsafe_code, reason = "NCCL is C")]

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::marker::PhantomData;

use cudarc::driver::sys::CUstream;
use half::{bf16, f16};
use nccl_sys::{
    Library, MissingSymbol, Version, cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclScalarResidence_t,
};

use super::{Reason, Refusal, check, data_type};
use crate::call::element::{DType, F8E4M3, F8E5M2};

/// A communicator that this thread may call now: no other thread calls it, its handle is valid, and its context is
/// current. The communicator blocks: outside of a group, a call is on its stream when it returns.
///
/// Methods that take addresses are unsafe. The addresses are device memory of this communicator's device, long enough
/// for the count, until the stream has completed the work. The stream is of the same context.
pub(crate) struct Raw<'a> {
    pub(crate) library: &'static Library,
    pub(crate) handle: ncclComm_t,
    in_progress: Cell<bool>,
    lent: PhantomData<&'a Cell<()>>,
}

impl Raw<'_> {
    pub(in crate::device) fn new(library: &'static Library, handle: ncclComm_t) -> Self {
        Self { library, handle, in_progress: Cell::new(false), lent: PhantomData }
    }

    /// Fails if a call continued in the background. With a communicator that blocks this never happens.
    #[inline]
    pub(in crate::device) fn check_done(&self) -> Result<(), Refusal> {
        if self.in_progress.get() { Err(not_blocking()) } else { Ok(()) }
    }

    /// Returns the release of the library.
    pub(crate) fn version(&self) -> Version {
        self.library.version()
    }

    #[inline]
    fn done(&self, call: &'static str, answer: Result<ncclResult_t, MissingSymbol>) -> Result<(), Refusal> {
        if check(self.library, self.handle, call, answer)? {
            self.in_progress.set(true);
        }
        Ok(())
    }

    /// Opens a group: the calls that follow are launched together by [`Raw::group_end`].
    pub(in crate::device) fn group_start(&self) -> Result<(), Refusal> {
        // SAFETY: the function has no preconditions; each caller here that opens a group also ends it.
        self.done("ncclGroupStart", unsafe { self.library.ncclGroupStart() })
    }

    /// Ends the group and launches its calls.
    pub(in crate::device) fn group_end(&self) -> Result<(), Refusal> {
        // SAFETY: the function requires nothing beyond what the calls in the group required.
        self.done("ncclGroupEnd", unsafe { self.library.ncclGroupEnd() })
    }

    /// # Safety
    /// The addresses are memory of this communicator's device, long enough for `count`, until the stream has completed
    /// the work. The stream is one of its context.
    #[inline]
    pub(crate) unsafe fn all_reduce(
        &self,
        send: u64,
        receive: u64,
        count: usize,
        dtype: ncclDataType_t,
        op: ncclRedOp_t,
        stream: CUstream,
    ) -> Result<(), Refusal> {
        // SAFETY: while a `Raw` is lent, the handle is valid and only this thread is inside. Memory and stream: this
        // function's contract.
        let answer = unsafe { self.library.ncclAllReduce(source(send), target(receive), count, dtype, op, self.handle, queue(stream)) };
        self.done("ncclAllReduce", answer)
    }

    /// # Safety
    /// The addresses are memory of this communicator's device, long enough for `count`, until the stream has completed
    /// the work. The stream is one of its context.
    #[expect(clippy::too_many_arguments, reason = "as many as NCCL's function has")]
    #[inline]
    pub(crate) unsafe fn reduce(
        &self,
        send: u64,
        receive: u64,
        count: usize,
        dtype: ncclDataType_t,
        op: ncclRedOp_t,
        root: usize,
        stream: CUstream,
    ) -> Result<(), Refusal> {
        // SAFETY: while a `Raw` is lent, the handle is valid and only this thread is inside. Memory and stream: this
        // function's contract.
        let answer =
            unsafe { self.library.ncclReduce(source(send), target(receive), count, dtype, op, number(root), self.handle, queue(stream)) };
        self.done("ncclReduce", answer)
    }

    /// # Safety
    /// The addresses are memory of this communicator's device, long enough for `count`, until the stream has completed
    /// the work. The stream is one of its context.
    #[inline]
    pub(crate) unsafe fn broadcast(
        &self,
        send: u64,
        receive: u64,
        count: usize,
        dtype: ncclDataType_t,
        root: usize,
        stream: CUstream,
    ) -> Result<(), Refusal> {
        // SAFETY: while a `Raw` is lent, the handle is valid and only this thread is inside. Memory and stream: this
        // function's contract.
        let answer =
            unsafe { self.library.ncclBroadcast(source(send), target(receive), count, dtype, number(root), self.handle, queue(stream)) };
        self.done("ncclBroadcast", answer)
    }

    /// Gathers `count` elements from each rank.
    ///
    /// # Safety
    /// The addresses are memory of this communicator's device, long enough for `count`, until the stream has completed
    /// the work. The stream is one of its context.
    #[inline]
    pub(crate) unsafe fn all_gather(
        &self,
        send: u64,
        receive: u64,
        count: usize,
        dtype: ncclDataType_t,
        stream: CUstream,
    ) -> Result<(), Refusal> {
        // SAFETY: while a `Raw` is lent, the handle is valid and only this thread is inside. Memory and stream: this
        // function's contract.
        let answer = unsafe { self.library.ncclAllGather(source(send), target(receive), count, dtype, self.handle, queue(stream)) };
        self.done("ncclAllGather", answer)
    }

    /// Reduces, and scatters `count` elements to each rank.
    ///
    /// # Safety
    /// The addresses are memory of this communicator's device, long enough for `count`, until the stream has completed
    /// the work. The stream is one of its context.
    #[inline]
    pub(crate) unsafe fn reduce_scatter(
        &self,
        send: u64,
        receive: u64,
        count: usize,
        dtype: ncclDataType_t,
        op: ncclRedOp_t,
        stream: CUstream,
    ) -> Result<(), Refusal> {
        // SAFETY: while a `Raw` is lent, the handle is valid and only this thread is inside. Memory and stream: this
        // function's contract.
        let answer = unsafe { self.library.ncclReduceScatter(source(send), target(receive), count, dtype, op, self.handle, queue(stream)) };
        self.done("ncclReduceScatter", answer)
    }

    /// # Safety
    /// The addresses are memory of this communicator's device, long enough for `count`, until the stream has completed
    /// the work. The stream is one of its context.
    #[inline]
    pub(crate) unsafe fn send(
        &self,
        address: u64,
        count: usize,
        dtype: ncclDataType_t,
        peer: usize,
        stream: CUstream,
    ) -> Result<(), Refusal> {
        // SAFETY: while a `Raw` is lent, the handle is valid and only this thread is inside. Memory and stream: this
        // function's contract.
        let answer = unsafe { self.library.ncclSend(source(address), count, dtype, number(peer), self.handle, queue(stream)) };
        self.done("ncclSend", answer)
    }

    /// # Safety
    /// The addresses are memory of this communicator's device, long enough for `count`, until the stream has completed
    /// the work. The stream is one of its context.
    #[inline]
    pub(crate) unsafe fn recv(
        &self,
        address: u64,
        count: usize,
        dtype: ncclDataType_t,
        peer: usize,
        stream: CUstream,
    ) -> Result<(), Refusal> {
        // SAFETY: while a `Raw` is lent, the handle is valid and only this thread is inside. Memory and stream: this
        // function's contract.
        let answer = unsafe { self.library.ncclRecv(target(address), count, dtype, number(peer), self.handle, queue(stream)) };
        self.done("ncclRecv", answer)
    }

    /// Sends `count` elements from each rank to each rank. Needs NCCL 2.28.3.
    ///
    /// # Safety
    /// The addresses are memory of this communicator's device, long enough for `count`, until the stream has completed
    /// the work. The stream is one of its context.
    #[inline]
    pub(crate) unsafe fn all_to_all(
        &self,
        send: u64,
        receive: u64,
        count: usize,
        dtype: ncclDataType_t,
        stream: CUstream,
    ) -> Result<(), Refusal> {
        // SAFETY: while a `Raw` is lent, the handle is valid and only this thread is inside. Memory and stream: this
        // function's contract.
        let answer = unsafe { self.library.ncclAlltoAll(source(send), target(receive), count, dtype, self.handle, queue(stream)) };
        self.done("ncclAlltoAll", answer)
    }

    /// Gathers `count` elements from each rank. Needs NCCL 2.28.3.
    ///
    /// # Safety
    /// The addresses are memory of this communicator's device, long enough for `count`, until the stream has completed
    /// the work. The stream is one of its context.
    #[inline]
    pub(crate) unsafe fn gather(
        &self,
        send: u64,
        receive: u64,
        count: usize,
        dtype: ncclDataType_t,
        root: usize,
        stream: CUstream,
    ) -> Result<(), Refusal> {
        // SAFETY: while a `Raw` is lent, the handle is valid and only this thread is inside. Memory and stream: this
        // function's contract.
        let answer =
            unsafe { self.library.ncclGather(source(send), target(receive), count, dtype, number(root), self.handle, queue(stream)) };
        self.done("ncclGather", answer)
    }

    /// Scatters `count` elements to each rank. Needs NCCL 2.28.3.
    ///
    /// # Safety
    /// The addresses are memory of this communicator's device, long enough for `count`, until the stream has completed
    /// the work. The stream is one of its context.
    #[inline]
    pub(crate) unsafe fn scatter(
        &self,
        send: u64,
        receive: u64,
        count: usize,
        dtype: ncclDataType_t,
        root: usize,
        stream: CUstream,
    ) -> Result<(), Refusal> {
        // SAFETY: while a `Raw` is lent, the handle is valid and only this thread is inside. Memory and stream: this
        // function's contract.
        let answer =
            unsafe { self.library.ncclScatter(source(send), target(receive), count, dtype, number(root), self.handle, queue(stream)) };
        self.done("ncclScatter", answer)
    }

    /// Creates an op of this communicator that multiplies this rank's elements by a scalar, which is rounded to their
    /// type, and sums the products. Floats only. It may be destroyed as soon as the calls that use it have been made.
    pub(crate) fn pre_mul_sum(&self, scalar: f64, dtype: DType) -> Result<ncclRedOp_t, Refusal> {
        const CALL: &str = "ncclRedOpCreatePreMulSum";
        let invalid = || Refusal {
            call: CALL,
            reason: Reason::Code(ncclResult_t::ncclInvalidArgument, format!("this NCCL has no PreMulSum of {dtype}")),
            grouped: false,
        };
        let (mut bytes, code) = scalar_bytes(scalar, dtype).zip(data_type(dtype, self.version())).ok_or_else(invalid)?;
        let mut op = ncclRedOp_t::ncclNumOps;
        let host = ncclScalarResidence_t::ncclScalarHostImmediate;
        // SAFETY: the scalar is our variable with as many bytes as its type has; the call reads it before it
        // returns.
        let answer = unsafe { self.library.ncclRedOpCreatePreMulSum(&mut op, bytes.as_mut_ptr().cast(), code, host, self.handle) };
        self.done(CALL, answer)?;
        Ok(op)
    }

    /// Destroys an op that [`Raw::pre_mul_sum`] created.
    pub(crate) fn destroy_op(&self, op: ncclRedOp_t) -> Result<(), Refusal> {
        // SAFETY: the handle is alive while a `Raw` is lent, and NCCL refuses a number that is not an op of this
        // communicator.
        self.done("ncclRedOpDestroy", unsafe { self.library.ncclRedOpDestroy(op, self.handle) })
    }
}

#[cold]
fn not_blocking() -> Refusal {
    let text = "it continues in the background on a communicator that was created as blocking: is NCCL_COMM_BLOCKING=0 set, in the \
                environment or in nccl.conf? Unset it";
    Refusal { call: "a call", reason: Reason::Code(ncclResult_t::ncclInProgress, text.to_owned()), grouped: false }
}

fn source(address: u64) -> *const c_void {
    address as usize as *const c_void
}

fn target(address: u64) -> *mut c_void {
    address as usize as *mut c_void
}

fn queue(stream: CUstream) -> cudaStream_t {
    stream.cast()
}

/// Converts a rank to C's type. A rank that is out of range becomes negative, which NCCL refuses.
fn number(rank: usize) -> c_int {
    c_int::try_from(rank).unwrap_or(-1)
}

/// Returns the bytes of a scalar, rounded once to a float type; `None` for other types.
pub(super) fn scalar_bytes(scalar: f64, dtype: DType) -> Option<[u8; 8]> {
    let (scalar, mut bytes) = (dtype.nearest(scalar), [0; 8]);
    // The conversions below are exact.
    match dtype {
        DType::F32 => bytes[..4].copy_from_slice(&(scalar as f32).to_ne_bytes()),
        DType::F64 => bytes = scalar.to_ne_bytes(),
        DType::F16 => bytes[..2].copy_from_slice(&f16::from_f32(scalar as f32).to_ne_bytes()),
        DType::Bf16 => bytes[..2].copy_from_slice(&bf16::from_f32(scalar as f32).to_ne_bytes()),
        DType::F8E4M3 => bytes[0] = F8E4M3::from_f32(scalar as f32).to_bits(),
        DType::F8E5M2 => bytes[0] = F8E5M2::from_f32(scalar as f32).to_bits(),
        _ => return None,
    }
    Some(bytes)
}
