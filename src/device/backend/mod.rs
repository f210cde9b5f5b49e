//! The device backend of one communicator: the algorithm that each call takes, and the resources that it needs.
//!
//! A call is first planned, as plain values, and then put on its stream: transfers by NCCL, with this crate's kernels
//! and copies between them. A call that NCCL implements goes to NCCL directly. [`DeviceAlgorithm`] says which
//! reductions are done by NCCL, and which by this crate's kernels.

mod enqueue;
mod exchange;
mod kept_plan;
mod scratch;
mod teardown;
#[cfg(test)]
#[cfg(simgpu)]
mod tests;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cudarc::driver::{CudaEvent, CudaStream, DriverError};
use nccl_sys::ncclRedOp_t;

use self::kept_plan::KeptPlan;
use super::comm::NcclComm;
use super::custom_kernels::CustomKernels;
use super::driver::{self, Gpu, cuda_error};
use super::kernels::{FamilySet, Kernels, family_of};
use super::plan::{self, Capabilities, DeviceAlgorithm, Folding, Job, Library, Message, Plan, Ranks, Reduction, Step, fold};
use crate::base::deadline::Deadline;
use crate::base::event;
use crate::base::ticket_lock::{NoTurn, TicketLock, Turn};
use crate::base::tuning::device_folds::DIVIDES_FROM;
use crate::call::BlockLayout;
use crate::call::element::DType;
use crate::call::element::TypeTag;
use crate::call::op::ReduceOp;
use crate::config::Config;
use crate::error::Error;
use crate::error::Result;

use self::scratch::ScratchMemory;

/// The size, in bytes, of the words that one rank sends to another over NCCL for a comparison.
pub(crate) const WORDS_BYTES: usize = 64;

/// The words that one rank sends to another over NCCL for a comparison.
pub(crate) type Words = [u8; WORDS_BYTES];

/// The least compute capability of devices for which the NVLink switch adds.
const SWITCH_CAPABILITY: (i32, i32) = (9, 0);

/// The properties that the devices of all ranks share.
#[derive(Debug, Clone)]
pub(crate) struct CommonDevice {
    /// The least compute capability.
    pub(crate) least_capability: (i32, i32),
    /// Whether NCCL may add in the NVLink switch, as far as all ranks know.
    pub(crate) has_switch: bool,
    /// The families of kernels that every device has loaded.
    pub(crate) families: FamilySet,
    /// Why another family is missing, if one is.
    pub(crate) refusal: Option<String>,
}

impl CommonDevice {
    /// Returns the properties of one device.
    pub(crate) fn of(gpu: &Gpu) -> Self {
        let kernels = Kernels::on(gpu);
        let refusal = kernels.refusal().map(ToString::to_string);
        Self { least_capability: gpu.capability, has_switch: false, families: kernels.families(), refusal }
    }
}

/// The settings of a backend. They are the same on every rank, so that all ranks make the same choices.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// Whether floats are always folded in rank order.
    pub(crate) reproducible: bool,
    /// How much device memory the backend may use for folds and exchanges in place, in bytes. More makes slabs larger.
    pub(crate) scratch_bytes: usize,
    pub(crate) common: CommonDevice,
}

impl Options {
    /// Returns the options that follow from a communicator's settings.
    pub(crate) fn of(config: &Config, common: CommonDevice) -> Self {
        let Config { reproducible, device_scratch_bytes: scratch_bytes, .. } = *config;
        Self { reproducible, scratch_bytes, common }
    }
}

/// The device backend of one communicator. Threads that share it queue their calls one after the other.
///
/// The resources of calls are created together with the backend: streams, events, kernels, and memory for all but large
/// folds. Memory for large folds, and custom kernels, are created with the first call that uses them.
///
/// Calls may be captured into a graph. If a captured call folds, or exchanges in place, it uses the backend's memory:
/// such a graph must not run at the same time as other calls of the communicator on other streams. The memory and the
/// kernels remain until the last such graph is gone.
#[derive(Debug)]
pub(crate) struct DeviceBackend {
    gpu: Gpu,
    /// NCCL's communicator. It ends before the resources that its streams may still use.
    comm: Arc<NcclComm>,
    stream: Arc<CudaStream>,
    side: Arc<CudaStream>,
    kernels: Arc<Kernels>,
    custom_kernels: Mutex<CustomKernels>,
    capabilities: Capabilities,
    common: CommonDevice,
    library: Library,
    ranks: Ranks,
    scratch: ScratchMemory,
    /// Part of the scratch memory: room for words from every rank, and to each.
    words: u64,
    /// The stream for words that ranks send over NCCL: a wait for it does not wait for work that a program has queued
    /// elsewhere.
    exchange: Arc<CudaStream>,
    /// Recorded when the inputs of a slab have arrived.
    arrived: CudaEvent,
    /// One for each half of the memory, recorded when the slab there is folded.
    folded: [CudaEvent; 2],
    /// Recorded when the backend's memory is free again and its kernels have ended.
    free: CudaEvent,
    /// The stream on which the memory was used last.
    last: Mutex<Arc<CudaStream>>,
    /// Whether the driver refused to mark the end of the last use of the memory, so that this end is unknown.
    is_room_lost: AtomicBool,
    /// How many collectives were queued: the number of the next one, on every rank.
    calls: AtomicU64,
    /// How many messages were sent to each rank, and received from it.
    mail: Mutex<Vec<[u64; 2]>>,
    /// Room for the ranks' fingerprints in a comparison.
    comparison: Mutex<Vec<[u8; 40]>>,
    /// NCCL's op for the last `PreMulSum`.
    product: Mutex<Option<Product>>,
    /// The turn of the call, or group of calls, that is compared and queued: calls reach NCCL in the order of
    /// comparison.
    turns: TicketLock<()>,
    /// Held while calls are put on streams: they use the backend's memory and streams. Holds the plan of the last call
    /// that took several steps.
    queueing: Mutex<Option<KeptPlan>>,
}

/// Resources of a call on which the ranks have not agreed yet: either all ranks have them, or no rank makes the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FirstUse {
    /// A custom kernel.
    kernel: bool,
    /// Memory for large calls.
    memory: bool,
}

impl FirstUse {
    /// Whether there is anything to agree on.
    pub(crate) fn is_any(self) -> bool {
        self.kernel || self.memory
    }
}

/// An NCCL op that contains a scalar.
#[derive(Debug, Clone, Copy)]
struct Product {
    scalar: u64,
    dtype: DType,
    op: ncclRedOp_t,
}

/// One communicator's part of a group.
pub(crate) type GroupPart<'a> = (&'a DeviceBackend, &'a [Job], &'a [Message], &'a Arc<CudaStream>);

impl DeviceBackend {
    /// Creates the backend of a communicator on a device.
    ///
    /// # Errors
    ///
    /// `Cuda` if the driver refuses a stream or memory.
    pub(crate) fn new(gpu: Gpu, comm: NcclComm, options: &Options) -> Result<Self> {
        let doing = |what: &str| format!("making {what} on device {}", gpu.ordinal);
        let failed = |what: &'static str| move |error: DriverError| cuda_error(doing(what), error);
        driver::bind(&gpu.context).map_err(failed("a device backend"))?;
        // Other ranks wait for the work on these two streams. A fold on the side stream gets the part of the device
        // that they leave free.
        let urgent = || driver::urgent_stream(&gpu.context).map_err(failed("a stream"));
        let (stream, exchange) = (urgent()?, urgent()?);
        let side = gpu.context.new_stream().map_err(failed("a stream"))?;
        let event = || gpu.context.new_event(None).map_err(failed("an event"));
        let (arrived, folded, free) = (event()?, [event()?, event()?], event()?);
        let kernels = Kernels::on(&gpu);
        let ranks = Ranks { me: comm.rank(), n: comm.world_size() };
        let Options { reproducible, scratch_bytes, common } = options.clone();
        let CommonDevice { least_capability, has_switch, .. } = common;
        let divides_from = (has_switch && least_capability >= SWITCH_CAPABILITY).then_some(DIVIDES_FROM);
        let capabilities = Capabilities { ranks: ranks.n, nccl: comm.version(), capability: least_capability, reproducible, divides_from };
        let has = |function: &str| comm.library().has(function);
        let library = Library { all_to_all: has("ncclAlltoAll"), gather: has("ncclGather"), scatter: has("ncclScatter") };
        let scratch = ScratchMemory::new(&gpu, ranks.n, scratch_bytes, 2 * ranks.n * WORDS_BYTES)?;
        let words = scratch.words();
        let comparison = Mutex::default();
        let (custom_kernels, last) = (Mutex::new(CustomKernels::new(&gpu)), Mutex::new(Arc::clone(&stream)));
        let (calls, mail, product, comm) = (AtomicU64::new(0), Mutex::new(vec![[0; 2]; ranks.n]), Mutex::new(None), Arc::new(comm));
        Ok(Self {
            gpu,
            comm,
            stream,
            side,
            kernels,
            custom_kernels,
            capabilities,
            common,
            library,
            ranks,
            scratch,
            words,
            exchange,
            arrived,
            folded,
            free,
            last,
            is_room_lost: AtomicBool::new(false),
            calls,
            mail,
            comparison,
            product,
            turns: TicketLock::new(()),
            queueing: Mutex::default(),
        })
    }

    /// Returns the device.
    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Returns the properties that the devices of all ranks share.
    pub(crate) fn common(&self) -> &CommonDevice {
        &self.common
    }

    /// Returns NCCL's communicator.
    pub(crate) fn comm(&self) -> &Arc<NcclComm> {
        &self.comm
    }

    /// Returns the backend's own stream, which lives as long as the backend.
    pub(crate) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Returns this crate's kernels on the device.
    pub(crate) fn kernels(&self) -> &Arc<Kernels> {
        &self.kernels
    }

    /// Waits until all work queued on the backend's own stream has ended. A deadline that passes ends the communicator.
    ///
    /// # Errors
    ///
    /// `Timeout`, `Poisoned`, `Cuda`.
    pub(crate) fn synchronize(&self, deadline: &Deadline) -> Result<()> {
        self.comm.wait_for(&self.stream, deadline)
    }

    /// Describes which algorithm each call takes.
    pub(crate) fn explain(&self) -> String {
        let Gpu { name, ordinal, capability: (major, minor), .. } = &self.gpu;
        let own = |has: bool| if has { "NCCL's own" } else { "grouped sends and receives" };
        let Library { all_to_all, gather, scatter } = self.library;
        format!(
            "device {ordinal}, {name}, compute capability {major}.{minor}; NCCL {}; {} ranks; {} B of scratch memory\n\
             all_to_all: {}; gather: {}; scatter: {}; broadcast, all_gather: NCCL's own\n{}",
            self.comm.version(),
            self.ranks.n,
            self.scratch.most(),
            own(all_to_all),
            own(gather),
            own(scatter),
            plan::explain(&self.capabilities),
        ) + &self.explain_missing()
    }

    /// Describes which families of kernels are missing, and why.
    fn explain_missing(&self) -> String {
        let missing: Vec<_> = FamilySet::ALL.without(self.common.families).names().collect();
        match &self.common.refusal {
            Some(refusal) => format!("\nwithout the kernels {}: {refusal}", missing.join(", ")),
            None => String::new(),
        }
    }

    /// Numbers jobs that are about to be queued together. They are counted once they have been queued.
    pub(crate) fn number<'a>(&self, jobs: impl IntoIterator<Item = &'a mut Job>) {
        let next = self.calls.load(Ordering::Relaxed);
        jobs.into_iter().zip(next..).for_each(|(job, number)| job.call.sequence = number);
    }

    /// Counts jobs, except jobs with wrong arguments, because the other ranks may not count these either.
    fn count<R>(&self, jobs: usize, queued: &Result<R>) {
        if !matches!(queued, Err(Error::InvalidArgument { .. })) {
            self.calls.fetch_add(jobs as u64, Ordering::Relaxed);
        }
    }

    /// Begins a call, or a group of calls, behind those of other threads; dropping the value ends it. Refused within
    /// another call of this backend, made from a listener: compared calls would not reach NCCL in the order of
    /// comparison.
    pub(crate) fn enter_call(&self, limit: Duration) -> std::result::Result<Turn<'_, ()>, NoTurn> {
        self.turns.enter(limit)
    }

    /// Lends the room for fingerprints, kept from one comparison to the next; empty while another comparison has it.
    pub(crate) fn lend_comparison(&self) -> Vec<[u8; 40]> {
        std::mem::take(&mut *event::lock(&self.comparison))
    }

    /// Takes back the room for fingerprints.
    pub(crate) fn return_comparison(&self, scratch: Vec<[u8; 40]>) {
        *event::lock(&self.comparison) = scratch;
    }

    /// Returns how many messages were sent to the message's peer, or received from it.
    pub(crate) fn messages_before(&self, message: &Message) -> u64 {
        event::lock(&self.mail).get(message.peer).map_or(0, |counts| counts[usize::from(!message.sends)])
    }

    /// Returns the number of this message among those to its peer, or from it, and counts it.
    pub(crate) fn number_message(&self, message: &Message) -> u64 {
        let mut mail = event::lock(&self.mail);
        let Some(count) = mail.get_mut(message.peer).map(|counts| &mut counts[usize::from(!message.sends)]) else { return 0 };
        *count += 1;
        *count - 1
    }

    /// Whether a job needs a custom kernel that is not loaded yet.
    pub(crate) fn lacks_kernel(&self, job: &Job) -> bool {
        match &job.reduction {
            Some(Reduction::User(code)) if self.ranks.n > 1 => !event::lock(&self.custom_kernels).knows(code, job.call.element),
            _ => false,
        }
    }

    /// Whether a job needs memory that some rank does not have yet. Every rank gets the same answer.
    fn lacks_memory(&self, job: &Job) -> bool {
        // Most calls are small, and need no plan here.
        let lacks = || self.scratch.is_large(self.most_room(job)) && self.scratch.is_large(self.room(job));
        self.ranks.n > 1 && !self.scratch.is_whole() && lacks()
    }

    /// Returns which resources a job uses for the first time. Every rank gets the same answer.
    pub(crate) fn first_use(&self, job: &Job) -> FirstUse {
        FirstUse { kernel: self.lacks_kernel(job), memory: self.lacks_memory(job) }
    }

    /// Loads the custom kernel that a job needs, and allocates memory for it.
    ///
    /// # Errors
    ///
    /// The errors of the job itself.
    pub(crate) fn load(&self, job: &Job, stream: &CudaStream) -> Result<()> {
        if let Some(Reduction::User(code)) = &job.reduction {
            event::lock(&self.custom_kernels).place(code, job.call.element, stream)?;
        }
        self.scratch.take(self.room(job), stream).map(drop)
    }

    /// Undoes [`DeviceBackend::load`], but keeps what earlier calls use.
    pub(crate) fn unload(&self, job: &Job, first_use: FirstUse) {
        if let (Some(Reduction::User(code)), true) = (&job.reduction, first_use.kernel) {
            event::lock(&self.custom_kernels).forget(code, job.call.element);
        }
        if first_use.memory {
            self.scratch.retract();
        }
    }

    /// Returns an upper bound of a job's [`DeviceBackend::room`], from the longest block alone.
    fn most_room(&self, job: &Job) -> usize {
        let longest = match &job.layout {
            BlockLayout::Equal(bytes) => *bytes,
            BlockLayout::Blocks(blocks) => blocks.iter().copied().max().unwrap_or(0),
            // Calls with these layouts use no scratch memory.
            BlockLayout::Own(_) | BlockLayout::Pairs { .. } => 0,
        };
        // Two halves of a chunk for each rank and one more, and a chunk for each other rank, each at the start of an
        // element and of a word.
        (3 * self.ranks.n + 1).saturating_mul(longest.saturating_add(16 * job.element_bytes.max(16)))
    }

    /// Returns how much of the permitted scratch memory a job uses.
    fn room(&self, job: &Job) -> usize {
        let most = self.scratch.most();
        let folding = match (&job.reduction, job.call.element) {
            (None, _) => return plan::nccl::room(job, self.ranks, most),
            (Some(Reduction::User(_)), _) => Some(Folding::by_user(0, job.element_bytes)),
            (Some(Reduction::Builtin(op)), TypeTag::Scalar(dtype)) => match self.algorithm(job, *op, dtype) {
                Ok(DeviceAlgorithm::Fold(op, dtype, multiply)) => Some(Folding::by(op, dtype, multiply)),
                _ => None,
            },
            _ => None,
        };
        folding.map_or(0, |folding| fold::room(job, folding, self.ranks, most))
    }

    /// Returns the families of kernels that a job uses on some rank. Every rank gets the same result.
    fn families_of(&self, job: &Job) -> Result<FamilySet> {
        let alone = self.ranks.n == 1;
        let reducing = match (&job.reduction, job.call.element) {
            (Some(Reduction::Builtin(ReduceOp::PreMulSum(_))), _) if alone => FamilySet::PREMUL,
            (Some(Reduction::Builtin(op)), TypeTag::Scalar(dtype)) if !alone => match self.algorithm(job, *op, dtype)? {
                DeviceAlgorithm::Nccl(..) => FamilySet::NONE,
                DeviceAlgorithm::SumThenDivide(_) => FamilySet::AVERAGE,
                DeviceAlgorithm::Fold(op, _, None) => family_of(op),
                DeviceAlgorithm::Fold(op, _, Some(_)) => family_of(op).or(FamilySet::PREMUL),
            },
            _ => FamilySet::NONE,
        };
        let makes_truths = !alone && job.call.element.is_bool();
        Ok(if makes_truths { reducing.or(FamilySet::BITS) } else { reducing })
    }

    /// Refuses a job if some rank's device lacks a kernel for it. If the ranks share these properties, all refuse it.
    pub(crate) fn refuse_missing_kernels(&self, job: &Job) -> Result<()> {
        if self.common.families == FamilySet::ALL {
            return Ok(());
        }
        self.require(self.families_of(job)?, || job.call.to_string())
    }

    /// Refuses a message like a job. Both ends refuse it, although only a receive needs a kernel.
    pub(crate) fn refuse_message_without_kernels(&self, message: &Message) -> Result<()> {
        let needed = if message.element.is_bool() { FamilySet::BITS } else { FamilySet::NONE };
        self.require(needed, || format!("a message of {}", message.element))
    }

    fn require(&self, needed: FamilySet, what: impl FnOnce() -> String) -> Result<()> {
        let missing = needed.without(self.common.families);
        let (Some(family), Some(refusal)) = (missing.names().next(), &self.common.refusal) else { return Ok(()) };
        let reason = format!(
            "it needs this crate's kernels {family:?}, which are not loaded on every rank's device: {refusal}. The driver compiles them \
             from PTX: install its compiler, libnvidia-ptxjitcompiler.so.1, and unset CUDA_DISABLE_PTX_JIT"
        );
        Err(Error::unsupported(what(), reason))
    }

    /// Plans a job on this rank. If it writes `bool`s, its last step turns every byte into 0 or 1: other ranks may have
    /// sent any byte, and this crate's folds of `bool` do not change the bytes that arrive.
    fn plan(&self, job: &Job, stream: &CudaStream) -> Result<Plan> {
        self.refuse_missing_kernels(job)?;
        let plan = self.plan_as_it_comes(job, stream).inspect_err(|error| self.end_unless_all_refuse(error))?;
        if self.ranks.n == 1 || !job.call.element.is_bool() {
            return Ok(plan);
        }
        let pieces = plan::nccl::result(job, self.ranks.me).into_iter();
        Ok(pieces.fold(plan, |plan, (data, bytes)| plan.then(Step::Truths { data, bytes })))
    }

    fn plan_as_it_comes(&self, job: &Job, stream: &CudaStream) -> Result<Plan> {
        let alone = self.ranks.n == 1;
        match &job.reduction {
            None if alone => Ok(plan::nccl::alone(job, None)),
            None => {
                let room = plan::nccl::room(job, self.ranks, self.scratch.most());
                plan::nccl::moving(job, self.ranks, self.library, self.scratch.take(room, stream)?)
            }
            Some(Reduction::Builtin(op)) => {
                let TypeTag::Scalar(dtype) = job.call.element else {
                    let reason = "a built-in op works only on single elements; use a custom op";
                    return Err(Error::unsupported(format!("{op} of {}", job.call.element), reason));
                };
                op.check(dtype)?;
                match *op {
                    ReduceOp::PreMulSum(scalar) if alone => Ok(plan::nccl::alone(job, Some((scalar, dtype)))),
                    _ if alone => Ok(plan::nccl::alone(job, None)),
                    op => self.plan_reduction(job, self.algorithm(job, op, dtype)?, stream),
                }
            }
            Some(Reduction::User(_)) if alone => Ok(plan::nccl::alone(job, None)),
            Some(Reduction::User(code)) => {
                let place = event::lock(&self.custom_kernels).place(code, job.call.element, stream)?;
                self.plan_fold(job, Folding::by_user(place, job.element_bytes), stream)
            }
        }
    }

    fn algorithm(&self, job: &Job, op: ReduceOp, dtype: DType) -> Result<DeviceAlgorithm> {
        DeviceAlgorithm::of(op, dtype, plan::nccl::in_switch(job, self.ranks.n), &self.capabilities)
    }

    fn plan_reduction(&self, job: &Job, algorithm: DeviceAlgorithm, stream: &CudaStream) -> Result<Plan> {
        match algorithm {
            DeviceAlgorithm::Nccl(op, dtype) => plan::nccl::reducing(job, op, dtype, self.ranks),
            DeviceAlgorithm::SumThenDivide(dtype) => plan::nccl::dividing(job, dtype, self.ranks),
            DeviceAlgorithm::Fold(op, dtype, multiply) => self.plan_fold(job, Folding::by(op, dtype, multiply), stream),
        }
    }

    fn plan_fold(&self, job: &Job, folding: Folding, stream: &CudaStream) -> Result<Plan> {
        let room = fold::room(job, folding, self.ranks, self.scratch.most());
        fold::plan(job, folding, self.ranks, self.scratch.take(room, stream)?)
    }

    /// Ends the communicator, unless every rank gets this error for the same call. If only this rank gets it, the other
    /// ranks would queue their part, and wait for this rank's.
    fn end_unless_all_refuse(&self, error: &Error) {
        if !matches!(error, Error::InvalidArgument { .. } | Error::Unsupported { .. }) && self.comm.failure().is_none() {
            self.comm.fail(error);
        }
    }

    /// Checks that a stream is of this device.
    fn check_stream(&self, stream: &CudaStream) -> Result<()> {
        if stream.context().cu_ctx() == self.gpu.context.cu_ctx() {
            return Ok(());
        }
        let reason = format!("it is on device {}, but the communicator is on device {}", stream.context().ordinal(), self.gpu.ordinal);
        Err(Error::argument("a call on a stream", reason))
    }

    /// Refuses a call if the communicator has ended, even if the call would put nothing on the device.
    pub(crate) fn refuse_if_over(&self, doing: &dyn Fn() -> String) -> Result<()> {
        match self.comm.failure() {
            Some(cause) => Err(Error::Poisoned { call: doing(), cause: Arc::new(cause) }),
            None => Ok(()),
        }
    }
}
