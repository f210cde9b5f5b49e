//! A communicator on one device without a host backend, for engines that have their own start-up, streams and memory.

#![expect(unsafe_code, reason = "calls on addresses that the caller vouches for")]

use std::fmt;
use std::sync::{Arc, Weak};

use cudarc::driver::{CudaContext, CudaStream};
use nccl_sys::ncclUniqueId;

use super::arguments::Arguments;
use super::backend::{CommonDevice, DeviceBackend, Options};
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

/// The id by which the ranks of a new [`NcclCommunicator`] find each other. One rank creates the id and sends it to the
/// other ranks.
///
/// An id is valid for one communicator. Any process that has the id can join, so send it over a connection that you
/// trust.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; size_of::<ncclUniqueId>()]);

impl UniqueId {
    /// Creates a new id, and opens a port on which this process waits for the ranks. `library` names the file of NCCL.
    /// If `library` is `None`, the system's loader searches for NCCL.
    ///
    /// # Errors
    ///
    /// `NoDevice` if NCCL is not found, and `Nccl` if NCCL fails.
    #[doc(alias = "ncclGetUniqueId")]
    pub fn new(library: Option<&NcclLibrary>) -> Result<Self> {
        let library = nccl::library(library).map_err(|reason| Error::NoDevice { call: "UniqueId::new".to_owned(), reason })?;
        comm::unique_id(library).map(Self::from_nccl)
    }

    /// Returns the bytes of the id, so that you can send them to the other ranks.
    #[must_use]
    pub fn to_bytes(self) -> [u8; size_of::<ncclUniqueId>()] {
        self.0
    }

    /// Creates an id from bytes that another rank sent.
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

/// One rank of an NCCL communicator, with this crate's deadlines, watchdog and kernels: a
/// [`Communicator`](crate::Communicator) without the host backend.
///
/// The communicator has two kinds of calls:
///
/// - **Typed** calls are safe: [`send`](Self::send), [`recv`](Self::recv), [`group`](Self::group), and collectives such
///   as [`all_reduce`](Self::all_reduce). They take buffers, and this crate orders them relative to other uses of these
///   buffers. Before a rank queues a typed call, it compares the call with the other ranks' calls, over NCCL. Prefer
///   typed calls. If the comparison takes too much time, limit it with
///   [`CheckDeviceCalls::unchecked_after`](crate::nccl::CheckDeviceCalls::unchecked_after).
/// - **Raw** calls ([`call`](Self::call), [`message`](Self::message)) are `unsafe`. They take addresses instead of
///   buffers, so you can choose the element type at run time. This crate neither orders nor compares them. Use them in
///   an engine that manages memory and the order of calls itself, and ensures that all ranks make the same calls. With
///   raw calls, the devices of all ranks must have the same compute capability, their drivers must have loaded the same
///   kernels of this crate, and all ranks must pass the same [`Config::device_scratch_bytes`] and
///   [`Config::reproducible`].
///
/// No wait is longer than [`Config::timeout`]. If this time passes, the communicator is aborted, and its error gives
/// the reason.
///
/// ```no_run
/// # use collectives::{Config, ReduceOp, nccl::{NcclCommunicator, RawBuffer, RawCall, UniqueId}};
/// # use std::sync::Arc;
/// # use cudarc::driver::{CudaContext, CudaSlice};
/// # fn example(context: &Arc<CudaContext>, id: UniqueId, rank: usize, gradient: &mut CudaSlice<f32>, raw: RawBuffer) -> collectives::Result<()> {
/// let comm = NcclCommunicator::create(context, &[id], rank, 2, &Config::default())?;
/// let stream = context.default_stream();
/// comm.all_reduce(gradient, ReduceOp::Avg, &stream)?;
/// // SAFETY: memory of this device, for this call alone until the stream has completed it; both ranks make this call, with this length.
/// unsafe { comm.call(RawCall::AllReduce(ReduceOp::Sum), raw, raw, &stream)? };
/// comm.close()
/// # }
/// ```
///
/// A clone is another handle to the same communicator. Threads that share a communicator queue their calls one after
/// the other, in the order of arrival.
///
/// [`Device::raw`](crate::Device::raw) returns the NCCL communicator behind a [`Communicator`](crate::Communicator).
/// All ranks must make a call through the same type: if some use the `Communicator` and others the `NcclCommunicator`,
/// they wait for each other until the deadline, because a `Communicator` compares calls over its host backend.
#[derive(Debug, Clone)]
pub struct NcclCommunicator(Arc<Inner>);

/// The state that all clones share.
#[derive(Debug)]
struct Inner {
    backend: DeviceBackend,
    config: Config,
}

/// Proves that the communicator can be stored anywhere and used from any thread.
const _: () = {
    const fn shareable<T: Clone + Send + Sync + 'static>() {}
    shareable::<NcclCommunicator>();
};

/// A handle with which any thread can end an [`NcclCommunicator`].
#[derive(Debug, Clone)]
pub struct NcclAbortHandle(Weak<NcclComm>);

impl NcclAbortHandle {
    /// Ends the communicator immediately, together with device work that waits for other ranks. The results of such
    /// work are invalid. Does nothing after the first time.
    pub fn abort(&self) {
        if let Some(comm) = self.0.upgrade() {
            comm.abort();
        }
    }
}

/// Whether a communicator remains usable after it has been shrunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShrinkMode {
    /// The communicator remains usable. No call may be in flight on the communicator when it is shrunk.
    #[doc(alias = "NCCL_SHRINK_DEFAULT")]
    Keep,
    /// The shrink first stops the communicator's work in flight, and the communicator can then only be dropped. Use
    /// this mode, for example, if a rank has died during that work.
    #[doc(alias = "NCCL_SHRINK_ABORT")]
    Abort,
}

/// The memory of a raw call: its address, its number of elements, and their type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawBuffer {
    /// The device address. It may be 0 only if the call neither reads nor writes this memory.
    pub address: u64,
    /// The number of elements.
    pub count: usize,
    /// The element type.
    pub dtype: DType,
}

/// One raw collective.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum RawCall {
    /// All-reduce. Source and destination must have the same length, and may be the same buffer.
    AllReduce(ReduceOp),
    /// Reduce to a root. Source and destination must have the same length. Only the root uses the destination.
    Reduce(ReduceOp, usize),
    /// Broadcast from a root. Source and destination must have the same length. Only the root uses the source.
    Broadcast(usize),
    /// All-gather. The destination's length must be the world size times the source's length.
    AllGather,
    /// Reduce-scatter. The source's length must be the world size times the destination's length.
    ReduceScatter(ReduceOp),
    /// All-to-all. Source and destination must have the same length, which must be a multiple of the world size.
    AllToAll,
}

impl NcclCommunicator {
    /// Joins the communicator that `ids` identify, on the device of `context`, and waits for all other ranks to join.
    /// With thousands of ranks, pass several ids: the work of the start is then spread over the ranks that created them.
    /// All ranks must pass the same ids in the same order.
    ///
    /// # Errors
    ///
    /// - `Config` if `rank` is not below `world_size`.
    /// - `Config` if there are no ids, or more ids than ranks.
    /// - `Config` if one of the NCCL settings in `config` is invalid.
    /// - `Config` if an environment variable overrides the settings of this crate's NCCL communicators.
    /// - `NoDevice` if the driver or NCCL is missing.
    /// - `Nccl` if NCCL fails.
    /// - `Cuda` if the driver fails.
    /// - `Timeout` if other ranks do not join in time.
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
        let common = CommonDevice::of(&gpu);
        Self::around(gpu, comm, config, common)
    }

    /// Wraps an NCCL communicator. If the ranks pass different properties, they choose different algorithms.
    pub(crate) fn around(gpu: Gpu, comm: NcclComm, config: &Config, common: CommonDevice) -> Result<Self> {
        let options = Options::of(config, common);
        comm.inner().warn_after(config.stall_warning);
        Ok(Self(Arc::new(Inner { backend: DeviceBackend::new(gpu, comm, &options)?, config: config.clone() })))
    }

    /// Wraps a communicator made of ranks of this one.
    pub(crate) fn descendant(&self, comm: NcclComm) -> Result<Self> {
        let backend = &self.0.backend;
        Self::around(backend.gpu().clone(), comm, &self.0.config, backend.common().clone())
    }

    /// Returns a deadline that begins now, with the timeout of the settings.
    pub(crate) fn deadline(&self) -> Deadline {
        Deadline::after(self.0.config.timeout)
    }

    /// Returns this rank's number, from 0.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.0.backend.comm().rank()
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.0.backend.comm().world_size()
    }

    /// Creates a communicator of all ranks except the ranks in `excluded`. The remaining ranks must call this method,
    /// and the excluded ranks must not. Needs NCCL 2.27.3.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if `excluded` is empty, or contains this rank or a rank that does not exist.
    /// - `Unsupported` if the loaded NCCL is older than 2.27.3.
    /// - `Poisoned` if the communicator has ended.
    /// - `Aborted` if `parent` is [`ShrinkMode::Abort`] and another thread's call on this communicator does not return
    ///   in time. This communicator is then aborted.
    /// - `Nccl` if NCCL fails.
    /// - `Timeout` if the remaining ranks do not call this method in time.
    #[doc(alias = "ncclCommShrink")]
    pub fn shrink(&self, excluded: &[usize], parent: ShrinkMode) -> Result<Self> {
        let comm = self.0.backend.comm().shrink(excluded, parent == ShrinkMode::Abort, &self.0.config.nccl, &self.deadline())?;
        self.descendant(comm)
    }

    /// Stops this communicator's work in flight, and refuses later collectives. [`shrink`](Self::shrink),
    /// [`split`](Self::split) and dropping remain possible. Needs NCCL 2.28.7.
    ///
    /// # Errors
    ///
    /// - `Unsupported` if the loaded NCCL is older than 2.28.7.
    /// - `Poisoned` if the communicator has ended.
    /// - `Aborted` if another thread's call on this communicator does not return in time. This communicator is then
    ///   aborted.
    /// - `Nccl` if NCCL fails, and `Timeout` if NCCL does not return in time. After either error, the communicator has
    ///   ended.
    #[doc(alias = "ncclCommRevoke")]
    pub fn revoke(&self) -> Result<()> {
        self.0.backend.comm().revoke(&self.deadline())
    }

    /// Returns a handle with which any thread can end this communicator.
    #[must_use]
    pub fn abort_handle(&self) -> NcclAbortHandle {
        NcclAbortHandle(Arc::downgrade(self.0.backend.comm()))
    }

    /// Waits for work in flight on the streams that this communicator has used, and then closes the communicator. All
    /// ranks must call this method.
    ///
    /// # Errors
    ///
    /// - `Timeout`, and errors of NCCL or the driver. After any of these errors, the communicator has ended.
    /// - `InvalidArgument` if captured graphs contain calls of this communicator. The communicator then remains usable,
    ///   and can be closed after the graphs have been dropped.
    #[doc(alias("ncclCommFinalize", "ncclCommDestroy"))]
    pub fn close(&self) -> Result<()> {
        let deadline = self.deadline();
        self.0.backend.comm().refuse_live_graphs("close")?;
        self.0.backend.synchronize(&deadline)?;
        self.0.backend.comm().finalize(&deadline)
    }

    /// Returns the error that has ended the communicator in the background, such as a lost peer or a call that did not
    /// end in time.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.0.backend.comm().async_error()
    }

    /// Returns NCCL's own communicator, for calls that this crate does not have. NCCL's communicator is blocking. The
    /// handle is null once this communicator has ended. Use the handle from one thread at a time. Never destroy, abort
    /// or split NCCL's communicator, because it shares its abort flags with a communicator that this crate keeps.
    #[must_use]
    pub fn nccl_handle(&self) -> nccl_sys::ncclComm_t {
        self.0.backend.comm().handle()
    }

    /// Returns the device backend.
    pub(crate) fn backend(&self) -> &DeviceBackend {
        &self.0.backend
    }

    /// Returns the settings that the communicator was made with.
    pub(crate) fn config(&self) -> &Config {
        &self.0.config
    }

    /// Queues a collective on `stream`.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if the lengths of the buffers do not fit the call.
    /// - `Unsupported` if the op does not exist for the element type.
    /// - `Nccl` if NCCL fails.
    /// - `Poisoned` if the communicator has ended.
    ///
    /// # Safety
    ///
    /// - Until the stream has completed the call, both buffers must be memory of this device, of the stated length.
    /// - Until the stream has completed the call, no other code or kernel may write to either buffer, or read the
    ///   destination.
    /// - The buffers must be the same, or must not overlap. For `AllGather` and `ReduceScatter`, the shorter buffer may
    ///   also be this rank's block of the longer buffer.
    /// - The source must contain elements of its stated type.
    /// - On this communicator, every rank's next call must be the same call, with the same op, root, type and counts.
    ///   This rule also covers typed calls, and calls from other threads.
    /// - All ranks must have made the communicator with the same [`Config`], on devices of the same compute capability.
    ///
    /// Ranks do not compare their raw calls, and NCCL writes whatever it receives.
    pub unsafe fn call(&self, call: RawCall, source: RawBuffer, destination: RawBuffer, stream: &Arc<CudaStream>) -> Result<()> {
        let mut job = self.job(call, source, destination)?;
        self.0.backend.number([&mut job]);
        // SAFETY: the buffers are as long as the job says, on this device, free of other users, and apart or one as it
        // states: this function's contract. Their lengths fit the call and each other (checked by `job`).
        unsafe { self.0.backend.enqueue(&job, stream, self.0.config.timeout) }
    }

    /// Queues a send to `peer` if `sends` is true, or a receive from `peer` otherwise. NCCL matches the sends and
    /// receives of two ranks in the order in which they were queued. Both ends of a message must pass the same length.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` for a rank that is not a peer, or for too many elements.
    /// - `Nccl` if NCCL fails.
    /// - `Poisoned` if the communicator has ended.
    ///
    /// # Safety
    ///
    /// - Until the stream has completed the message, the buffer must be memory of this device, of the stated length.
    /// - Until the stream has completed the message, no other code or kernel may write to the buffer. If this is a
    ///   receive, no other code or kernel may read the buffer either.
    /// - If this is a send, the buffer must contain elements of its stated type.
    /// - The other end must pass the same type and count for the matching message.
    ///
    /// Ranks do not compare their raw calls, and NCCL writes whatever it receives.
    pub unsafe fn message(&self, peer: usize, sends: bool, buffer: RawBuffer, stream: &Arc<CudaStream>) -> Result<()> {
        self.check_peer("message", peer)?;
        let Some(bytes) = buffer.count.checked_mul(buffer.dtype.size_bytes()) else {
            return Err(Error::argument("message", format!("{} elements do not fit into the address space", buffer.count)));
        };
        let message = Message { peer, sends, address: buffer.address, bytes, element: TypeTag::Scalar(buffer.dtype) };
        // SAFETY: the buffer is memory of this device of that length until the stream has completed the message, and
        // nothing else uses it: this function's contract.
        unsafe { DeviceBackend::enqueue_group(&[(&self.0.backend, &[], &[message], stream)], self.0.config.timeout) }
    }

    /// Refuses a rank that does not exist, and this rank itself.
    pub(crate) fn check_peer(&self, call: &'static str, peer: usize) -> Result<()> {
        if peer < self.world_size() && peer != self.rank() {
            return Ok(());
        }
        Err(Error::argument(
            call,
            format!(
                "rank {peer} is not a peer: a peer is a rank other than this rank ({}), and below the world size ({})",
                self.rank(),
                self.world_size()
            ),
        ))
    }

    /// Checks a raw call and describes it as a job.
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
            let reason =
                format!("the source holds {}, but the destination holds {}: pass two buffers of one type", source.dtype, destination.dtype);
            return Err(Error::argument(kind.name(), reason));
        }
        op.map_or(Ok(()), |op| op.check(source.dtype))?;
        let is_one_buffer = source.address == destination.address && source.count == destination.count;
        // For these two collectives, the shorter buffer is named by its own address, even if it lies in the longer one.
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

    /// Allocates device memory with NCCL, and fills it with zeros on `stream`. Registrations and windows are most
    /// effective with such memory. Needs NCCL 2.19.1.
    ///
    /// # Errors
    ///
    /// - `Unsupported` if the loaded NCCL is older than 2.19.1.
    /// - `Nccl` if NCCL fails.
    /// - `Cuda` if the driver fails.
    #[doc(alias = "ncclMemAlloc")]
    pub fn allocate<T: Data>(&self, stream: &Arc<CudaStream>, count: usize) -> Result<NcclBuffer<T>> {
        NcclBuffer::zeroed(self.0.backend.comm(), stream, count)
    }

    /// Registers a buffer, so that NCCL can use it without copies. Needs NCCL 2.19.1.
    ///
    /// Only buffers whose address can be trusted are accepted. A type of your own is refused even if it implements
    /// cudarc's traits, because any type can implement those without `unsafe`, and so they do not guarantee a valid
    /// address. For example, this does not compile:
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
    /// - `InvalidArgument` for a buffer of another context, or for an empty buffer.
    /// - `Unsupported` if the loaded NCCL is older than 2.19.1.
    /// - `Nccl` if NCCL fails.
    ///
    /// # Safety
    ///
    /// NCCL relies on these rules: in every call, either all ranks must pass registered buffers, or no rank may pass
    /// one. If all pass one, the buffer's offset from the start of its registration must be the same on every rank.
    #[doc(alias = "ncclCommRegister")]
    pub unsafe fn register<T: Data, B: Registrable<Element = T>>(&self, buffer: B) -> Result<Registration<T, B>> {
        Registration::new(self.0.backend.comm(), buffer, &self.deadline())
    }
}
