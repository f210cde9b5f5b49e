//! A communicator on one device without a host backend: for engines that bring their own start-up, streams and memory.

#![expect(unsafe_code, reason = "calls on addresses that the caller vouches for")]

use std::fmt;
use std::sync::{Arc, Weak};

use cudarc::driver::{CudaContext, CudaStream};
use nccl_sys::ncclUniqueId;

use super::arguments::Arguments;
use super::backend::{DeviceBackend, Options};
use super::comm::{self, NcclComm, Setup};
use super::driver::{self, Gpu};
use super::memory::{NcclBuffer, Registrable, Registration};
use super::nccl;
use super::plan::{Job, Message, Reduction};
use crate::base::deadline::Deadline;
use crate::call::Collective;
use crate::call::element::{DType, Data, TypeTag};
use crate::call::op::ReduceOp;
use crate::config::Config;
use crate::config::nccl::NcclLibrary;
use crate::error::{Error, Result};

/// By what the ranks of a new [`NcclCommunicator`] find each other: one rank makes it and brings it to the others. Good for one
/// communicator. It is no secret to be kept, but whoever has it can join: send it over a connection you trust.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; size_of::<ncclUniqueId>()]);

impl UniqueId {
    /// A new id. It opens a port, on which this process waits for the ranks.
    ///
    /// # Errors
    ///
    /// `NoDevice` where no NCCL is found (`library` names its file, `None` leaves it to the loader), `Nccl`.
    #[doc(alias = "ncclGetUniqueId")]
    pub fn new(library: Option<&NcclLibrary>) -> Result<Self> {
        let library = nccl::library(library).map_err(|reason| Error::NoDevice { call: "UniqueId::new".to_owned(), reason })?;
        comm::unique_id(library).map(Self::from_nccl)
    }

    /// As it travels.
    #[must_use]
    pub fn to_bytes(self) -> [u8; size_of::<ncclUniqueId>()] {
        self.0
    }

    /// As it came.
    #[must_use]
    pub fn from_bytes(bytes: [u8; size_of::<ncclUniqueId>()]) -> Self {
        Self(bytes)
    }

    pub(crate) fn from_nccl(id: ncclUniqueId) -> Self {
        Self(id.internal.map(|byte| byte as u8))
    }

    pub(crate) fn to_nccl(self) -> ncclUniqueId {
        ncclUniqueId { internal: self.0.map(|byte| byte as std::ffi::c_char) }
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(…)")
    }
}

/// One rank of a communicator of NCCL's, with this crate's deadlines, watchdog and kernels: [`Communicator`](crate::Communicator)
/// without the host backend.
///
/// Its calls come in two kinds:
///
/// - **Typed** calls ([`all_reduce`](Self::all_reduce) and the other collectives; [`send`](Self::send), [`recv`](Self::recv), [`group`](Self::group))
///   are safe: they take buffers, order them among their other uses, and are compared with the other ranks' calls, over NCCL itself, before
///   anything is queued. Take these, and [`CheckDeviceCalls::unchecked_after`](crate::nccl::CheckDeviceCalls::unchecked_after) where the comparison costs too much.
/// - **Raw** calls ([`call`](Self::call), [`message`](Self::message)) are `unsafe`: they take addresses of any element type known at run time, order
///   nothing and compare nothing. Take these where an engine owns memory and order, and knows that its ranks do alike. The devices of all
///   ranks then have the same compute capability, and all pass the same [`Config::device_scratch_bytes`] and [`Config::reproducible`].
///
/// Every wait ends at [`Config::timeout`]: the communicator is then aborted, and says why.
///
/// ```no_run
/// # use collectives::{Config, ReduceOp, nccl::{NcclCommunicator, RawBuffer, RawCall, UniqueId}};
/// # use std::sync::Arc;
/// # use cudarc::driver::{CudaContext, CudaSlice};
/// # fn example(context: &Arc<CudaContext>, id: UniqueId, rank: usize, gradient: &mut CudaSlice<f32>, raw: RawBuffer) -> collectives::Result<()> {
/// let comm = NcclCommunicator::create(context, &[id], rank, 2, &Config::default())?;
/// let stream = context.default_stream();
/// comm.all_reduce(gradient, ReduceOp::Avg, &stream)?;
/// // SAFETY: memory of this device, for this call's use until the stream has done it; both ranks make this call, of this length.
/// unsafe { comm.call(RawCall::AllReduce(ReduceOp::Sum), raw, raw, &stream)? };
/// comm.close()
/// # }
/// ```
///
/// A clone is the same communicator. Threads that share one queue their calls one after the other, in the order in which they come. What a
/// [`Communicator`](crate::Communicator) has by [`Device::raw`](crate::Device::raw) is one of these, too; all ranks make a call either
/// through it, or through the `Communicator`, which compares over its host backend: where they do not, both wait until the deadline.
#[derive(Debug, Clone)]
pub struct NcclCommunicator(Arc<Inner>);

/// What all clones share.
#[derive(Debug)]
struct Inner {
    backend: DeviceBackend,
    config: Config,
}

/// It may be kept anywhere, and used from any thread.
const _: () = {
    const fn shareable<T: Clone + Send + Sync + 'static>() {}
    shareable::<NcclCommunicator>();
};

/// Ends an [`NcclCommunicator`] from any thread.
#[derive(Debug, Clone)]
pub struct NcclAbortHandle(Weak<NcclComm>);

impl NcclAbortHandle {
    /// Ends it at once: what waits on the device for other ranks returns, and its results are worth nothing. Idempotent.
    pub fn abort(&self) {
        if let Some(comm) = self.0.upgrade() {
            comm.abort();
        }
    }
}

/// What becomes of the parent of a communicator that is shrunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShrinkMode {
    /// It goes on; nothing may be in flight on it.
    #[doc(alias = "NCCL_SHRINK_DEFAULT")]
    Keep,
    /// What is in flight on it is stopped first, for example because a rank died in it; only dropping it remains.
    #[doc(alias = "NCCL_SHRINK_ABORT")]
    Abort,
}

/// An address for a raw call, and the length in elements behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawBuffer {
    /// The device address; 0 only where nothing is read or written.
    pub address: u64,
    /// How many elements.
    pub count: usize,
    /// Of what type.
    pub dtype: DType,
}

/// One raw collective.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum RawCall {
    /// Source and destination have the same length; they may be the same.
    AllReduce(ReduceOp),
    /// As `AllReduce`; the destination matters on the root alone.
    Reduce(ReduceOp, usize),
    /// As `AllReduce`; the source matters on the root alone.
    Broadcast(usize),
    /// The destination is world size × the source.
    AllGather,
    /// The source is world size × the destination.
    ReduceScatter(ReduceOp),
    /// Source and destination have the same length, a multiple of the world size.
    AllToAll,
}

impl NcclCommunicator {
    /// Joins the communicator of these ids on the device of this context, and waits for all other ranks to do so. Several ids spread
    /// the work of starting thousands of ranks; all ranks pass the same in the same order.
    ///
    /// # Errors
    ///
    /// `NoDevice` where driver or NCCL is missing; `Nccl`; `Timeout` where ranks do not come.
    #[doc(alias("ncclCommInitRankConfig", "ncclCommInitRankScalable"))]
    pub fn create(context: &Arc<CudaContext>, ids: &[UniqueId], rank: usize, world_size: usize, config: &Config) -> Result<Self> {
        let no_device = |reason| Error::NoDevice { call: "making a communicator".to_owned(), reason };
        driver::check().map_err(no_device)?;
        let gpu = driver::of(context).map_err(no_device)?;
        let library = nccl::library(config.nccl_library.as_ref()).map_err(no_device)?;
        let ids: Vec<_> = ids.iter().map(|id| id.to_nccl()).collect();
        let deadline = Deadline::after(config.timeout);
        let comm = NcclComm::create(Setup {
            library,
            gpu: &gpu,
            ids: &ids,
            rank,
            world_size,
            config: &config.nccl,
            deadline: &deadline,
            liveness_probe: None,
            end_notice: None,
        })?;
        let capability = gpu.capability;
        Self::around(gpu, comm, config, capability, false)
    }

    /// What this crate puts around a communicator of NCCL's. Ranks go the same way only where they know the same: of the least capability, and
    /// whether NCCL may add in the NVLink switch.
    pub(crate) fn around(gpu: Gpu, comm: NcclComm, config: &Config, least_capability: (i32, i32), has_switch: bool) -> Result<Self> {
        let options = Options::of(config, least_capability, has_switch);
        comm.inner().warn_after(config.stall_warning);
        Ok(Self(Arc::new(Inner { backend: DeviceBackend::new(gpu, comm, &options)?, config: config.clone() })))
    }

    /// A communicator made of ranks of this one.
    pub(crate) fn descendant(&self, comm: NcclComm) -> Result<Self> {
        let backend = &self.0.backend;
        Self::around(backend.gpu().clone(), comm, &self.0.config, backend.least_capability(), backend.has_switch())
    }

    /// A deadline by the timeout of its settings.
    pub(crate) fn deadline(&self) -> Deadline {
        Deadline::after(self.0.config.timeout)
    }

    /// This rank's number, from 0.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.0.backend.comm().rank()
    }

    /// How many ranks there are.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.0.backend.comm().world_size()
    }

    /// A communicator of all ranks but those listed, called by the others alone. NCCL 2.27.3.
    ///
    /// # Errors
    ///
    /// `InvalidArgument`, `Unsupported` with an older NCCL, `Nccl`, `Timeout`.
    #[doc(alias = "ncclCommShrink")]
    pub fn shrink(&self, excluded: &[usize], parent: ShrinkMode) -> Result<Self> {
        let comm = self.0.backend.comm().shrink(excluded, parent == ShrinkMode::Abort, &self.0.config.nccl, &self.deadline())?;
        self.descendant(comm)
    }

    /// Stops what is in flight and refuses collectives from now on; [`shrink`](Self::shrink), [`split`](Self::split) and dropping
    /// remain. NCCL 2.28.7.
    ///
    /// # Errors
    ///
    /// `Unsupported` with an older NCCL, `Nccl`.
    #[doc(alias = "ncclCommRevoke")]
    pub fn revoke(&self) -> Result<()> {
        self.0.backend.comm().revoke(&self.deadline())
    }

    /// A handle that any thread can use to end this communicator.
    #[must_use]
    pub fn abort_handle(&self) -> NcclAbortHandle {
        NcclAbortHandle(Arc::downgrade(self.0.backend.comm()))
    }

    /// Waits for what is in flight on the streams that were used, then closes. All ranks do this.
    ///
    /// # Errors
    ///
    /// `Timeout`, and what NCCL or the driver met: the communicator is gone either way. `InvalidArgument` while captured graphs hold its calls: it then
    /// stays as it is, and is closed once they are dropped.
    #[doc(alias("ncclCommFinalize", "ncclCommDestroy"))]
    pub fn close(&self) -> Result<()> {
        let deadline = self.deadline();
        self.0.backend.comm().refuse_live_graphs("close")?;
        self.0.backend.synchronize(&deadline)?;
        self.0.backend.comm().finalize(&deadline)
    }

    /// What went wrong in the background: a lost peer, a call that did not end in time. The communicator is then ended.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.0.backend.comm().async_error()
    }

    /// NCCL's own communicator, which blocks, for calls that this crate does not have; null once it has ended. It is used by one thread at a time, and
    /// never destroyed, aborted or split by others: it shares its abort flags with one that this crate keeps.
    #[must_use]
    pub fn nccl_handle(&self) -> nccl_sys::ncclComm_t {
        self.0.backend.comm().handle()
    }

    /// The device backend.
    pub(crate) fn backend(&self) -> &DeviceBackend {
        &self.0.backend
    }

    /// The settings that it was made with.
    pub(crate) fn config(&self) -> &Config {
        &self.0.config
    }

    /// Queues a collective on `stream`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for lengths that do not fit, `Unsupported` for an op that the type does not have, `Nccl`, `Poisoned`.
    ///
    /// # Safety
    ///
    /// Both buffers are memory of this device, as long as they say, until the stream has done the call; nobody else writes them, nor
    /// reads the destination, meanwhile. They are the same or lie apart; for `AllGather` and `ReduceScatter` the shorter may also be
    /// this rank's block of the longer. The source holds elements of its type. All ranks make the same call, with the same op, root, type
    /// and counts, as their next one on this communicator, typed calls and those of other threads counted; it was made with the same
    /// [`Config`] on devices of one compute capability. Nobody compares that, and NCCL writes what it is sent.
    pub unsafe fn call(&self, call: RawCall, source: RawBuffer, destination: RawBuffer, stream: &Arc<CudaStream>) -> Result<()> {
        let mut job = self.job(call, source, destination)?;
        self.0.backend.number([&mut job]);
        // SAFETY: the buffers are as long as the job says, on this device, free of other users and apart or one as it says: this
        // function's contract. Their lengths fit the call and each other (checked by `job`).
        unsafe { self.0.backend.enqueue(&job, stream, self.0.config.timeout) }
    }

    /// Queues a send to (`sends`) or a receive from a peer. Messages of one pair are matched in order, and have the same length at both
    /// ends.
    ///
    /// # Errors
    ///
    /// `InvalidArgument`, `Nccl`, `Poisoned`.
    ///
    /// # Safety
    ///
    /// The buffer is memory of this device, as long as it says, until the stream has done the message; nobody else writes it meanwhile, nor
    /// reads what a receive writes. What is sent are elements of the type. The other end names the same type and count for the message that
    /// this one meets: nobody compares them, and NCCL writes what it is sent.
    pub unsafe fn message(&self, peer: usize, sends: bool, buffer: RawBuffer, stream: &Arc<CudaStream>) -> Result<()> {
        self.check_peer("message", peer)?;
        let Some(bytes) = buffer.count.checked_mul(buffer.dtype.size_bytes()) else {
            return Err(Error::argument("message", format!("{} elements are more than an address space has", buffer.count)));
        };
        let message = Message { peer, sends, address: buffer.address, bytes, element: TypeTag::Scalar(buffer.dtype) };
        // SAFETY: the buffer is memory of this device of that length until the stream has done the message, and nobody else uses it: this
        // function's contract.
        unsafe { DeviceBackend::enqueue_group(&[(&self.0.backend, &[], &[message], stream)], self.0.config.timeout) }
    }

    /// Refuses a rank that is not there, and this one.
    pub(crate) fn check_peer(&self, call: &'static str, peer: usize) -> Result<()> {
        if peer < self.world_size() && peer != self.rank() {
            return Ok(());
        }
        Err(Error::argument(call, format!("rank {peer} is no peer of rank {} of {}", self.rank(), self.world_size())))
    }

    /// Checks a raw call, and describes it.
    fn job(&self, call: RawCall, source: RawBuffer, destination: RawBuffer) -> Result<Job> {
        let (kind, op, root) = match call {
            RawCall::AllReduce(op) => (Collective::AllReduce, Some(op), None),
            RawCall::Reduce(op, root) => (Collective::Reduce, Some(op), Some(root)),
            RawCall::Broadcast(root) => (Collective::Broadcast, None, Some(root)),
            RawCall::AllGather => (Collective::AllGather, None, None),
            RawCall::ReduceScatter(op) => (Collective::ReduceScatter, Some(op), None),
            RawCall::AllToAll => (Collective::AllToAll, None, None),
        };
        if source.dtype != destination.dtype {
            let reason = format!("the source has {} and the destination {}", source.dtype, destination.dtype);
            return Err(Error::argument(kind.name(), reason));
        }
        op.map_or(Ok(()), |op| op.check(source.dtype))?;
        let is_one_buffer = source.address == destination.address && source.count == destination.count;
        // Of these the shorter one is named by its own address, also where it lies in the longer one.
        let in_place = is_one_buffer && (self.world_size() == 1 || !matches!(kind, Collective::AllGather | Collective::ReduceScatter));
        let arguments = Arguments {
            kind,
            root,
            reduction: (op.map_or(0, |op| op.code().into()), op.map(Reduction::Builtin)),
            element: TypeTag::Scalar(source.dtype),
            source: (!in_place).then_some(source.count),
            destination: Some(destination.count),
            in_place,
        };
        let mut job = arguments.job(self.world_size())?;
        (job.memory.source, job.memory.destination) = (source.address, destination.address);
        Ok(job)
    }

    /// Device memory of NCCL's, of zero bytes, which `stream` writes: registrations and windows can do most with it. NCCL 2.19.1.
    ///
    /// # Errors
    ///
    /// `Unsupported` with an older NCCL, `Nccl`, `Cuda`.
    #[doc(alias = "ncclMemAlloc")]
    pub fn allocate<T: Data>(&self, stream: &Arc<CudaStream>, count: usize) -> Result<NcclBuffer<T>> {
        NcclBuffer::zeroed(self.0.backend.comm(), stream, count)
    }

    /// Registers a buffer, so that NCCL can use it without copies. NCCL 2.19.1.
    ///
    /// Only buffers whose address can be trusted are taken. A type of the caller's names none, though cudarc's traits are safe to implement:
    ///
    /// ```compile_fail,E0277
    /// # use collectives::nccl::NcclCommunicator;
    /// # use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DeviceSlice, SyncOnDrop};
    /// # use std::sync::Arc;
    /// struct Anywhere(CudaSlice<f32>);
    /// # impl DeviceSlice<f32> for Anywhere {
    /// #     fn len(&self) -> usize { self.0.len() }
    /// #     fn stream(&self) -> &Arc<CudaStream> { self.0.stream() }
    /// # }
    /// impl DevicePtr<f32> for Anywhere {
    ///     fn device_ptr<'a>(&'a self, _: &'a CudaStream) -> (u64, SyncOnDrop<'a>) { (0xdead_0000, SyncOnDrop::Sync(None)) }
    /// }
    /// # fn example(comm: &NcclCommunicator, slice: CudaSlice<f32>) -> collectives::Result<()> {
    /// unsafe { comm.register(Anywhere(slice))? };
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a buffer of another context, or an empty one; `Unsupported` with an older NCCL, `Nccl`.
    ///
    /// # Safety
    ///
    /// NCCL takes it that in every call either all ranks pass registered buffers, at the same offset from where each was registered, or none
    /// does.
    #[doc(alias = "ncclCommRegister")]
    pub unsafe fn register<T: Data, B: Registrable<Element = T>>(&self, buffer: B) -> Result<Registration<T, B>> {
        Registration::new(self.0.backend.comm(), buffer, &self.deadline())
    }
}
