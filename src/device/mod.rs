//! The device backend: collectives on GPU memory, over NCCL.
//!
//! # Design
//!
//! The feature `cuda` is on by default. CUDA and NCCL are opened at run time, not linked. cudarc panics if a driver
//! function is missing, so `driver.rs` first looks up the driver and every function that is called. `nccl-sys` opens
//! NCCL and resolves each function at its first call. cudarc provides contexts, streams, events and slices. This crate
//! selects no CUDA version; the final program does.
//!
//! **Setup.** The host backend is created first. The ranks then use it to agree on the device backend. Every rank
//! reports its GPU and its NCCL, or the reason why it lacks one. All ranks reach the same verdict, for example "one GPU
//! for two ranks" or "two releases of NCCL". Only then is NCCL started, with an id that travels over the host backend.
//! If one rank lacks something, every rank's error says so. A split creates the child's NCCL communicator with
//! `ncclCommSplit`.
//!
//! **A call** is checked as on the host. Then `communicator/device/` makes the stream wait for the buffers' events and
//! passes addresses to `device/backend/`. Each reduction is done in one of these ways (`Device::explain` prints them
//! for the devices in use):
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
//! Calls of a communicator with one rank do not go to NCCL, because NCCL 2.27.5 to 2.29.6 return a wrong mean for one
//! rank.
//!
//! **Folds** (`device/plan/`). Small vectors are gathered and folded on every rank. Large vectors are processed in
//! slabs: each rank receives the others' contributions to its block and folds them in one pass; then the blocks are
//! gathered. That moves as many bytes as a ring all-reduce. Slab k+1 is exchanged while slab k is folded on a second
//! stream. Scratch memory has a fixed size: a small part is allocated with the backend, and the rest at the first call
//! that needs it. The plan of a call is a list of steps, a pure value. A test runs the plans of all ranks over a model
//! of their memories.
//!
//! **No endless waits** (`device/comm/`). Calls go, on the caller's thread, to an NCCL communicator that blocks. A
//! second communicator does not block and shares the first one's abort flags, so aborting the second ends the first.
//! The watchdog has one thread per device and one that keeps time. It records an event after the queued work, so a call
//! costs only two atomic stores. If a call's timeout differs from the previous call's, the call itself marks the
//! streams before it is queued. So all calls that an event covers have the same timeout. The timeout of the oldest
//! unfinished call counts, because NCCL runs a communicator's calls in order. If the event does not complete in time,
//! or NCCL reports an error, the communicator is aborted. The streams are then released, and the next call reports the
//! reason.
//!
//! **Lost ranks.** If two ranks communicate over a network, NCCL notices that a peer is dead, but does not report which
//! peer. On one host, NCCL waits forever. So if a call waits for more than 50 ms, the watchdog asks a *liveness probe*
//! (`communicator/device/liveness.rs`). A thread that waits for NCCL to start, split or close does the same. The probe
//! looks up processes of this host in `/proc` (number and start time), every 20 to 100 ms. If a process is missing, the
//! probe connects to the recovery listener of that rank (`communicator/recovery.rs`), to find out whether the rank is
//! alive. Ranks of other hosts are not probed, because each probe takes a place in the queue of a recovery listener.
//! NCCL watches these ranks.
//!
//! If a rank has been gone for 1 s, a `PeerLost` names it. A `PeerLost` also names a rank that is gone when NCCL
//! reports a remote error. The delay of 1 s allows for work that is still under way. The watchdog measures a wait by an
//! event, behind all work that was on the stream when the event was recorded, including the caller's own kernels. So a
//! rank counts as lost if it ends without `close` while others have more than 1 s of work queued behind the last call.
//! The error of a passed deadline names the ranks whose processes are stopped. If a rank is alive but makes no call,
//! only the deadline ends the wait, and the error cannot name that rank. If a rank dies while a shrunk communicator
//! sets up its device backend, the others shrink once more.
//!
//! **Comparing calls.** NCCL compares nothing. If the ranks' calls differ, NCCL writes whatever it receives. So before
//! a call is queued, the ranks exchange its fingerprint over the host backend, in an `all_gather` of 40 B. For a group
//! they exchange the number of its calls and a SHA-256 of their fingerprints. If something differs, they exchange the
//! first calls, and then all of them. No call has been queued by then, so the communicator stays usable after a
//! `Mismatch`. The cost is one small `all_gather` per call. In addition, ranks wait for each other on the host. Calls
//! that are only queued would not make the host wait. To compare fewer calls, a program must make a promise through
//! an `unsafe` function; the environment can only request that all calls are compared. Calls that are captured into a
//! graph are compared during the capture, by host code that all ranks run. A launch of the graph is not a call of this
//! crate.
//!
//! The sender of a message sends a *header*, which describes the message, over the host backend and continues. The
//! header is an eager message of 24 B with a reserved tag; headers are numbered for each pair of ranks. A receive waits
//! for the header before it is queued. In a group all headers are sent before any is awaited. A difference ends the
//! communicator, since the sender may have queued its part. The receiver reports the difference over the message links.
//! While the sender waits for its device, its liveness probe makes the progress engine's thread read these links. The
//! report then frees the sender's stream.
//!
//! The collectives of `group_across` are also compared by headers, from each rank to every other. A thread that runs
//! several ranks cannot wait in a collective for one of its ranks. If threads run different sets of ranks, only an
//! exchange between all pairs of ranks is free of deadlocks. Once a rank has sent its first header, or a comparison has
//! passed, the rank must queue its calls. If it does not, for example because of a panic, a `CommitGuard` ends the
//! device backend. Without this, NCCL would match later calls wrongly.
//!
//! A communicator without a host backend compares its typed calls over NCCL (`communicator/device/nccl/`,
//! `device/backend/exchange.rs`), by an all-gather of 64 B on a separate stream. The 64 B include the settings that
//! decide how calls are cut into pieces. The wait ends at the deadline. Before either end of a message queues its part,
//! both ends exchange 64 B; in a group of calls, each pair of ranks makes one exchange. Here both ends must wait. NCCL
//! matches by order alone, so if only the receiver waited for a header, the header could be matched with the data of
//! messages that the other end groups differently.
//!
//! **Truth values.** After a call or a receive has written `bool` memory, one more kernel (`truth_b8`) on the call's
//! stream turns every byte except 0 into 1. So no peer can create an invalid `bool`.
//!
//! **Records.** The watchdog's events show the flight recorder the progress of each stream. Once an event has
//! completed, every call on that stream that was on record when the event was queued has ended. A slot's stage word
//! contains the stream's number next to the stage, and is exchanged atomically. So recording the end costs calls
//! nothing, and the watchdog cannot end a newer record by mistake. When the watchdog ends a communicator, it marks
//! unfinished calls as failed. If a folder was set, the records are written there, whether or not another call is made.
//!
//! **Buffers.** A `CudaSlice` remembers only its last reader. So if a call reads a borrowed buffer on a stream other
//! than the one that will free the buffer, the freeing stream is made to wait for the call. Without this wait, a second
//! reader would hide the first, and safe code could free the memory while the first still reads it. Background calls
//! own their buffers and need no such wait. If code outside this crate reads the buffer after the call, a writer on a
//! third stream waits only for that code, not for the call; only cudarc can fix that.
//!
//! **Memory of other crates** (`interop/`) has no cudarc events. Instead, the owner promises that all uses of the
//! memory follow one stream; `AsDevicePtr` is unsafe to implement for that reason alone. A call on a different stream
//! first waits for the owner's stream, and afterwards makes the owner's stream wait for the call (`Ordered::Followed`),
//! whether or not cudarc's tracking is on. If both streams are the same, no wait is added. No reference to the owner's
//! stream is kept after the call. The watchdog's trackers and the scratch memory, however, remember the streams that a
//! communicator uses as long as the communicator lives. So `in_order_of` runs the calls on the communicator's own
//! stream, between two events. A tensor that arrives through DLPack is copied field by field, and checked before
//! anything is trusted. A refused tensor still belongs to its owner; an accepted one is given back once, when it is
//! dropped.
//!
//! **The simulated GPU** (`simgpu/`, a separate workspace) is a PTX interpreter, a driver and an NCCL over host memory.
//! It can inject faults, and checks the happens-before order over streams and events. All tests of devices run on it.
//! It shows that this crate's side is correct, but says nothing about NCCL or about speed. The tests open its libraries
//! by path; later look-ups by name then find these libraries, because of their sonames.

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
pub(crate) use backend::{CommonDevice, DeviceBackend, WORDS_BYTES, Words};
pub(crate) use comm::{BackOff, EndNotice, LivenessProbe, NcclComm, Notice, Setup, StreamPosition, unique_id};
pub use driver::milliseconds_between;
pub(crate) use driver::{
    Gpu, check as check_driver, check_ordinal, count, cuda_error, has_multicast, is_capturing, of, open, share_pool, uuid,
};
pub(crate) use kernels::FamilySet;
pub(crate) use memory::suits_window;
pub use memory::{NcclBuffer, Registrable, Registration, Window};
pub(crate) use nccl::{encrypt, library};
pub(crate) use plan::{Job, Message, Reduction};
pub use standalone::{NcclAbortHandle, NcclCommunicator, RawBuffer, RawCall, ShrinkMode, UniqueId};
