//! The device backend: collectives on GPU memory, over NCCL.
//!
//! # Design
//!
//! Feature `cuda`, on by default; nothing is linked. `driver.rs` looks for the driver and every function of it that is called before
//! cudarc does, because cudarc panics where one is missing; `nccl-sys` opens NCCL and resolves each function when it is first called.
//! cudarc gives contexts, streams, events and slices, with no CUDA version named, so that the final program chooses.
//!
//! **Making it.** The host backend comes first, and is the way in which ranks of the device backend agree: every rank says which GPU and which NCCL it
//! has, or why it has none; all come to the same verdict (one GPU for two ranks, two releases of NCCL …), and only then is NCCL started,
//! with an id that travels over the host backend. What one rank lacks, every rank hears of in words. A split makes the child's NCCL
//! communicator by `ncclCommSplit`.
//!
//! **A call** is checked as on the host; `communicator/device/` then has the stream wait for the buffers' events, and hands addresses to
//! `device/backend/`. A reduction goes one of these ways (`Device::explain` prints them for the devices at hand):
//!
//! | op | types | way |
//! | --- | --- | --- |
//! | Sum, Prod, Min, Max | 8, 32, 64 bit integers, f16, bf16, f32, f64 | NCCL's own |
//! | the same | fp8 | NCCL's own from 2.24 on compute capability 9.0, else our folds |
//! | the same | i16, u16 | our folds |
//! | the same, and BitAnd, BitOr | bool | NCCL's Max or Min of bytes |
//! | BitAnd, BitOr, BitXor | integers; BitXor of bool | our folds |
//! | Avg | 8, 32, 64 bit integers | NCCL's own, whose division is exact |
//! | Avg | floats but fp8, a power of two ranks | NCCL's own: the reciprocal is exact |
//! | Avg | f32, f64 | NCCL's Sum, then one pass that divides |
//! | Avg | f16, bf16, fp8, i16, u16 | our folds: summed in f32, divided and rounded once |
//! | PreMulSum | floats | NCCL's own; fp8 on older devices: a pass that multiplies, then our folds |
//! | custom | any | our folds, with the caller's kernel |
//! | `Config::reproducible` | f16, bf16, f32, f64, where the order matters | our folds, in rank order: the bits of the host backend |
//!
//! On one rank nothing goes to NCCL, whose mean is wrong there in 2.27.5 to 2.29.6.
//!
//! **Folds** (`device/plan/`): small vectors are gathered everywhere and folded everywhere; large ones go in slabs: each rank gets the
//! others' share of its block, folds them in one pass, and the blocks are gathered: the bytes of a ring all-reduce. Slab k+1 is
//! exchanged while slab k is folded, on a second stream. Scratch memory is of fixed size, allocated with the backend. The plan of a call is a
//! list of steps, a pure value, and a test runs the plans of all ranks over a model of their memories.
//!
//! **Never blocking for ever** (`device/comm/`): calls go to a communicator of NCCL's that blocks, on their own thread. A second one,
//! which does not block, shares its abort flags, and is aborted to end the first. The watchdog, a thread for each device and one that keeps time, puts an event of its own behind what was queued, so a call
//! pays for two atomic stores (a call with another timeout than the last one marks the streams itself, before it is queued: each event stands
//! behind calls with one timeout, and the timeout of what is oldest counts, since NCCL runs a communicator's calls in their order); where the event does not come in time, or NCCL reports an error, the communicator is aborted, the streams
//! come free, and the next call says why.
//!
//! **Who is gone.** NCCL notices a dead peer where the two talk over a network, says only that there is one, and on one host waits for ever. So
//! while something has been waiting for more than 50 ms, the watchdog, and whoever waits for NCCL to start, split or close, asks a *liveness probe*
//! (`communicator/device/liveness.rs`): processes of this host are looked for in `/proc` (number and start time), which is asked every 20 to
//! 100 ms, and then at their recovery listener (see "After a failure"), which decides; ranks of other hosts are left to NCCL, since each probe costs a place
//! among those who wait at a recovery listener. Who has been gone for 1 s is named by a `PeerLost`, as is whoever is gone when NCCL says that somebody is.
//! That second is for what is still on its way: what waits is known only as an event behind all that the stream had been given when the
//! watchdog came by, the caller's own kernels too, so a rank that ends without `close` while others have more than that queued behind the last
//! call is taken for lost. A deadline that passes names those whose processes are stopped. One that is alive and makes no call is found by the
//! deadline alone, which cannot name it. A death among those who give a shrunk communicator its devices has the rest shrink
//! once more.
//!
//! **Comparing calls.** NCCL compares nothing, and where ranks differ it writes what it is sent. So before a call is queued its fingerprint goes
//! round the host backend as an `all_gather` of 40 B; for a group the number of its calls and a SHA-256 of their fingerprints. Where something differs
//! the first calls follow, and then all of them. Nothing has been queued by then, so the communicator works on after a `Mismatch`. The price is one small
//! `all_gather` a call, and that ranks wait for each other on the host, which queued calls otherwise do not. Fewer is a promise, by an `unsafe`
//! function; the environment can only ask for all. Inside a capture calls are compared as ever, since that is host code which all ranks run
//! alike; a launch of the graph is not a call of ours.
//!
//! A message has two ends: its sender says over the host backend (a *header*, an eager message of 24 B under a tag of the crate's own, numbered
//! for each pair) what it sends, and goes on; a receive waits for that before it is queued. In a group all headers are sent before any is
//! awaited. A difference ends the communicator, since the sender may have queued its part: the receiver says so over the message links, and the
//! sender's liveness probe, which has the progress engine's thread listen while a device is waited for, frees its stream. The collectives of `group_across` are
//! compared by headers too, each rank's to every other: a thread with several ranks cannot wait in a collective of one of them, and nothing less than
//! all to all is free of deadlocks where threads hold different sets of ranks. From its first header (or a comparison that passed) on a rank
//! owes its calls: a `CommitGuard` ends the device backend where they are not queued, also by a panic, or NCCL would match later calls with others.
//!
//! A communicator without a host backend compares its typed calls over NCCL (`communicator/device/nccl/`, `device/backend/exchange.rs`): an all-gather of
//! 64 B on a stream of its own, with the settings that decide how calls are cut into pieces, waited for with the deadline. Both ends of messages swap as
//! much before either queues its part, one exchange for each pair of ranks in a group: headers that only the receiver waits for would meet the data of
//! messages that the other end groups differently, since NCCL matches by order alone.
//!
//! **Truth values.** What a call or a receive brings into `bool` memory goes through one more kernel (`truth_b8`) on the call's stream, which makes 1 of
//! every byte but 0: no peer can make a `bool` that is none.
//!
//! **Records.** The watchdog's events tell the flight recorder how far each stream is: what was on record when the event was queued, and was put on
//! that stream, is over. A slot's stage word has the stream's number beside the stage, and is exchanged atomically, so that calls pay nothing
//! and the watchdog cannot end a newer record. When the watchdog ends a communicator it fails what is not over, and has the records written
//! where a folder was named, whether or not anybody makes another call.
//!
//! **Buffers.** A `CudaSlice` remembers its last reader only. Where a call reads a borrowed buffer on another stream than the one that the
//! buffer will be freed on, that stream is made to wait for the call: otherwise a second reader would make the first one forgotten, and
//! the memory could be freed under it, from safe code. Started calls own their buffers and do without. A writer on a third stream that
//! follows a reader of somebody else's still waits for that reader alone: that is cudarc's to mend.
//!
//! **Memory of other crates** (`interop/`) has no events of cudarc's. What its owner promises instead is that all its uses follow one stream:
//! `AsDevicePtr` is unsafe to implement for that reason alone. A call on another stream waits for that stream before and has it wait
//! afterwards (`Ordered::Followed`), whether or not cudarc's tracking is on, and adds nothing where both streams are the same. A foreign stream
//! is never kept: the watchdog's trackers and the scratch memory remember the streams of a communicator for as long as it lives, so
//! `in_order_of` runs the calls on the communicator's own, between two events. A tensor that comes in through DLPack is copied field by field,
//! and checked, before anything is believed; a refused one stays its owner's, an accepted one is given back once, when it is dropped.
//!
//! **The simulated GPU** (`simgpu/`, a workspace of its own) is a PTX interpreter, a driver and an NCCL over host memory, with planted faults and a checker
//! of happens-before order over streams and events. The whole device suite runs on it. It proves that our side is right, and nothing
//! about NCCL or about speed. It is reached by its path alone: the tests open it, and its sonames make later look-ups find it.

mod arguments;
mod backend;
mod comm;
mod custom_kernels;
mod driver;
mod kernels;
mod memory;
mod nccl;
mod plan;
mod standalone;

pub(crate) use arguments::Arguments;
pub(crate) use backend::{DeviceBackend, WORDS_BYTES, Words};
pub(crate) use comm::{BackOff, EndNotice, LivenessProbe, NcclComm, Notice, Setup, StreamPosition, unique_id};
pub(crate) use driver::{Gpu, check as check_driver, count, cuda_error, has_multicast, is_capturing, of, open, share_pool};
pub(crate) use memory::suits_window;
pub use memory::{NcclBuffer, Registrable, Registration, Window};
pub(crate) use nccl::{encrypt, library};
pub(crate) use plan::{Job, Message, Reduction};
pub use standalone::{NcclAbortHandle, NcclCommunicator, RawBuffer, RawCall, ShrinkMode, UniqueId};
