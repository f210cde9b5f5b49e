//! The device backend: collectives on GPU memory, over NCCL.
//!
//! # Design
//!
//! The feature `cuda` is on by default. CUDA and NCCL are opened at run time, not linked. cudarc panics if a driver
//! function is missing, so `driver.rs` first looks up the driver and every function that is called. `nccl-sys` opens
//! NCCL and resolves each function at its first call. cudarc provides contexts, streams, events and slices. No CUDA
//! version is named, so that the final program chooses it.
//!
//! **Setup.** The host backend is created first; over it the ranks agree on the device backend. Every rank reports its
//! GPU and its NCCL, or why it has none. All ranks reach the same verdict, for example "one GPU for two ranks" or "two
//! releases of NCCL". Only then is NCCL started, with an id that travels over the host backend. If one rank lacks
//! something, every rank's error describes it. A split creates the child's NCCL communicator with `ncclCommSplit`.
//!
//! **A call** is checked as on the host. Then `communicator/device/` makes the stream wait for the buffers' events and
//! passes addresses to `device/backend/`. A reduction takes one of these ways (`Device::explain` prints them for the
//! devices in use):
//!
//! | op | types | way |
//! | --- | --- | --- |
//! | Sum, Prod, Min, Max | 8, 32, 64 bit integers, f16, bf16, f32, f64 | NCCL's own |
//! | the same | fp8 | NCCL's own from 2.24 on compute capability 9.0, else our folds |
//! | the same | i16, u16 | our folds |
//! | the same, and BitAnd, BitOr | bool | NCCL's Max or Min of bytes |
//! | BitAnd, BitOr, BitXor | integers; BitXor of bool | our folds |
//! | Avg | 8, 32, 64 bit integers | NCCL's own, whose division is exact |
//! | Avg | floats except fp8, if the number of ranks is a power of two | NCCL's own: the reciprocal is exact |
//! | Avg | f32, f64 | NCCL's Sum, then one pass that divides |
//! | Avg | f16, bf16, fp8, i16, u16 | our folds: summed in f32, divided and rounded once |
//! | PreMulSum | floats | NCCL's own; fp8 on older devices: a pass that multiplies, then our folds |
//! | custom | any | our folds, with the caller's kernel |
//! | `Config::reproducible` | f16, bf16, f32, f64, if the order matters | our folds, in rank order: the bits of the host backend |
//!
//! With one rank no call goes to NCCL, whose mean of one rank is wrong in 2.27.5 to 2.29.6.
//!
//! **Folds** (`device/plan/`). Small vectors are gathered and folded on every rank. Large vectors go in slabs: each
//! rank receives the others' share of its block and folds it in one pass, then the blocks are gathered. That moves as
//! many bytes as a ring all-reduce. Slab k+1 is exchanged while slab k is folded on a second stream. Scratch memory has
//! a fixed size and is allocated with the backend. The plan of a call is a list of steps, a pure value. A test runs the
//! plans of all ranks over a model of their memories.
//!
//! **No endless waits** (`device/comm/`). Calls go, on the caller's thread, to an NCCL communicator that blocks. A
//! second one does not block and shares its abort flags; aborting it ends the first. The watchdog has one thread per
//! device and one that keeps time. It records an event of its own behind the queued work, so a call costs only two
//! atomic stores. A call whose timeout differs from the last one marks the streams itself, before it is queued. So each
//! event stands behind calls with one timeout, and the timeout of the oldest call counts, since NCCL runs a
//! communicator's calls in order. If the event does not complete in time, or NCCL reports an error, the communicator is
//! aborted. The streams are then released, and the next call reports why.
//!
//! **Lost ranks.** If two ranks communicate over a network, NCCL notices a dead peer, but does not report which one it
//! is. On one host it waits forever. So while something has been waiting for more than 50 ms, a *liveness probe*
//! (`communicator/device/liveness.rs`) is asked. The watchdog asks it, and so does each thread that waits for NCCL to
//! start, split or close. The probe looks up processes of this host in `/proc` (number and start time), every 20 to 100
//! ms. It then connects to their recovery listener (see "After a failure"), which decides. Ranks of other hosts are
//! left to NCCL, since each probe takes a place in the queue of a recovery listener.
//!
//! A rank that has been gone for 1 s is named by a `PeerLost`; so is a rank that is gone when NCCL reports a remote
//! error. The second allows for work that is still under way. The watchdog knows a wait only as an event behind all
//! work that the stream held when it looked, the caller's own kernels included. So a rank counts as lost if it ends
//! without `close` while others have more than 1 s of work queued behind the last call. The error of a passed deadline
//! names the ranks whose processes are stopped. A rank that is alive but makes no call is found only by the deadline,
//! which cannot name it. If a rank dies while a shrunk communicator gets its devices, the others shrink once more.
//!
//! **Comparing calls.** NCCL compares nothing, and if ranks differ it writes what it is sent. So before a call is
//! queued its fingerprint goes round the host backend, in an `all_gather` of 40 B. For a group these are the number of
//! its calls and a SHA-256 of their fingerprints. If something differs, the first calls follow, and then all of them.
//! Nothing has been queued by then, so the communicator works on after a `Mismatch`. The cost is one small `all_gather`
//! per call, and ranks wait for each other on the host, which queued calls otherwise do not. Comparing fewer calls
//! takes a promise, by an `unsafe` function; the environment can only request that all are compared. Inside a capture
//! calls are compared as usual, since that is host code which all ranks run alike. A launch of the graph is not a call
//! of this crate.
//!
//! The sender of a message sends a *header* over the host backend and continues. The header describes the message. It
//! is an eager message of 24 B under a reserved tag, numbered for each pair of ranks. A receive waits for it before it
//! is queued. In a group all headers are sent before any is awaited. A difference ends the communicator, since the
//! sender may have queued its part. The receiver reports it over the message links. The sender's liveness probe makes
//! the progress engine's thread read them while a device is waited for, and frees the sender's stream.
//!
//! The collectives of `group_across` are compared by headers too, from each rank to every other. A thread with several
//! ranks cannot wait in a collective of one of them. When threads hold different sets of ranks, only all-to-all is free
//! of deadlocks. From its first header (or a comparison that passed) on, a rank must queue its calls. If it does not,
//! for example because of a panic, a `CommitGuard` ends the device backend. Otherwise NCCL would match later calls
//! wrongly.
//!
//! A communicator without a host backend compares its typed calls over NCCL (`communicator/device/nccl/`,
//! `device/backend/exchange.rs`), by an all-gather of 64 B on a separate stream. It includes the settings that decide
//! how calls are cut into pieces, and ends at the deadline. Both ends of a message swap as much before either queues
//! its part: one exchange for each pair of ranks in a group. NCCL matches by order alone, so headers that only the
//! receiver waits for would meet the data of messages that the other end groups differently.
//!
//! **Truth values.** After a call or a receive has written `bool` memory, one more kernel (`truth_b8`) on the call's
//! stream turns every byte except 0 into 1. So no peer can create an invalid `bool`.
//!
//! **Records.** The watchdog's events show the flight recorder how far each stream is. A call is over if it was on
//! record, and on that stream, when the event was queued. A slot's stage word holds the stream's number beside the
//! stage and is exchanged atomically. So calls pay nothing, and the watchdog cannot end a newer record. When the
//! watchdog ends a communicator, it marks unfinished calls as failed. If a folder was named, the records are written
//! there, whether or not another call is made.
//!
//! **Buffers.** A `CudaSlice` remembers only its last reader. So if a call reads a borrowed buffer on another stream
//! than the one that will free it, that stream is made to wait for the call. Otherwise a second reader would hide the
//! first, and the memory could be freed under it, from safe code. Started calls own their buffers and need no such
//! wait. A writer on a third stream that follows a reader outside this crate still waits for that reader alone; only
//! cudarc can fix that.
//!
//! **Memory of other crates** (`interop/`) has no cudarc events. Its owner promises instead that all its uses follow
//! one stream; `AsDevicePtr` is unsafe to implement for that reason alone. A call on another stream waits for that
//! stream before and makes it wait afterwards (`Ordered::Followed`), whether or not cudarc's tracking is on. If both
//! streams are the same, nothing is added. A foreign stream is never kept. The watchdog's trackers and the scratch
//! memory remember a communicator's streams as long as it lives, so `in_order_of` runs the calls on the communicator's
//! own stream, between two events. A tensor that arrives through DLPack is copied field by field, and checked before
//! anything is trusted. A refused tensor remains its owner's; an accepted one is given back once, when it is dropped.
//!
//! **The simulated GPU** (`simgpu/`, a separate workspace) is a PTX interpreter, a driver and an NCCL over host memory.
//! It has planted faults, and a checker of happens-before order over streams and events. The whole device suite runs on
//! it. It proves that our side is correct, and nothing about NCCL or about speed. It is reached only by its path: the
//! tests open it, and its sonames make later look-ups find it.

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
