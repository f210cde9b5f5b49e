//! Compares typed collectives of an `NcclCommunicator` with the other ranks' calls, then queues them in the order of
//! their buffers' events.
//!
//! A rank sends the others 64 bytes in an NCCL all-gather: the digest that it would send over a host backend, the
//! settings of its backend that decide how calls are cut into pieces, and whether it lacks the kernel of a custom op
//! that is used for the first time.

#![expect(unsafe_code, reason = "addresses of buffers that are borrowed are handed to the device backend")]

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::base::ticket_lock::{NoTurn, Turn};
use crate::communicator::Communicator;
use crate::communicator::device::compare::{self, CallDigest};
use crate::communicator::device::queue::CommitGuard;
use crate::communicator::prepare::device_call::{DeviceCall, Guards, Hold, ordered};
use crate::device::{self, DeviceBackend, Job, NcclCommunicator, WORDS_BYTES, Words};
use crate::error::{Error, Peer, Result};
use crate::host::health::forked;

/// The offsets, in what a rank sends, of the terms of the backend and of the flag for a missing kernel.
const TERMS_AT: usize = size_of::<CallDigest>();
const LACKS_KERNEL_AT: usize = TERMS_AT + size_of::<Terms>();
const _: () = assert!(LACKS_KERNEL_AT < WORDS_BYTES);

type Terms = [u8; 16];

/// Splits the words of a rank into their parts.
fn parts(words: &Words) -> (CallDigest, Terms, bool) {
    let (mut said, mut terms): (CallDigest, Terms) = ([0; _], [0; _]);
    said.copy_from_slice(&words[..TERMS_AT]);
    terms.copy_from_slice(&words[TERMS_AT..LACKS_KERNEL_AT]);
    (said, terms, words[LACKS_KERNEL_AT] != 0)
}

/// Refuses calls that are captured into a graph, if the ranks have to wait for each other first.
pub(super) fn refuse_capture(stream: &CudaStream, doing: impl FnOnce() -> String) -> Result<()> {
    if !device::is_capturing(stream) {
        return Ok(());
    }
    let reason = "the ranks first compare it over NCCL, and the comparison cannot be part of a graph: capture calls that are not \
                  compared (CheckDeviceCalls::unchecked_after), or raw ones (NcclCommunicator::call)";
    Err(Error::unsupported(format!("{} while a graph is captured", doing()), reason))
}

impl NcclCommunicator {
    /// Takes the turn in which a call is compared and queued.
    pub(super) fn turn(&self, call: &'static str) -> Result<Turn<'_, ()>> {
        let timeout = self.config().timeout;
        self.backend().enter_call(timeout).map_err(|why| match why {
            NoTurn::Forked => forked(call.to_owned()),
            NoTurn::Inside => Error::argument(call, "called from within a call of the same communicator"),
            NoTurn::Late => {
                let doing = format!("{call}, which has not begun: waiting for its turn behind calls that other threads made earlier");
                Error::Timeout { doing, elapsed: timeout, missing: Vec::new(), arrived: Vec::new(), meanwhile: Vec::new() }
            }
        })
    }

    /// Queues a checked call on `stream`, once the ranks have agreed on it.
    pub(super) fn queue(&self, call: &mut DeviceCall<'_>, stream: &Arc<CudaStream>) -> Result<()> {
        let (backend, name) = (self.backend(), call.job.call.kind.name());
        Communicator::same_device(backend, name, "the stream", stream.context())?;
        if let Some(source) = call.source {
            Communicator::same_device(backend, name, "the source", source.context())?;
        }
        if let Some(destination) = &call.destination {
            Communicator::same_device(backend, name, "the destination", destination.context())?;
        }
        let _turn = self.turn(name)?;
        backend.number([&mut call.job]);
        backend.refuse_if_over(&|| call.job.call.to_string())?;
        let mut guards = Guards::new(Hold::Borrowed);
        ordered(call, &backend.gpu().context, stream, &mut guards)?;
        let job = &call.job;
        // This comes after all checks: if only this rank refuses the call, the others wait here, with a deadline, and
        // nothing is queued.
        let is_captured = self.agree(job, stream)?;
        let commit = CommitGuard::new(backend, false, is_captured);
        // SAFETY: - the addresses are those of buffers that are borrowed by the call, as long as their lengths state,
        //   on the backend's device (checked above); they are the same or apart (checked by `ordered`);
        // - their events make later users, and the thread that frees them, wait for what is queued here: the guards
        //   are released after it (cudarc's protocol; a caller who disabled it did so by an `unsafe` call, and is
        //   responsible for the order);
        // - all ranks make this call as their next one, with these lengths, this type and backends that cut it alike:
        //   compared by `agree`, or promised by the caller who disabled the comparison
        //   (`CheckDeviceCalls::unchecked_after`). No other call comes in between (the turn; raw calls promise so).
        //   NCCL writes values of the type, or bytes that the plan turns into truth values.
        let queued = unsafe { backend.enqueue(job, stream, self.config().timeout) };
        commit.settle(&queued);
        queued.and(Communicator::release(guards, backend, stream, self.config().timeout))
    }

    /// Makes the ranks agree on a call, if that is enabled, and at the first use of a custom kernel or of much memory.
    /// Nothing has been queued yet, so a difference does no harm. Returns whether the others were notified of a
    /// capture, if they were notified at all.
    fn agree(&self, job: &Job, stream: &CudaStream) -> Result<Option<bool>> {
        let backend = self.backend();
        let is_compared = self.world_size() > 1 && self.config().check_device_calls.covers(job.call.sequence);
        let first_use = backend.first_use(job);
        if !(is_compared || first_use.is_any()) {
            return Ok(None);
        }
        refuse_capture(stream, || job.call.to_string())?;
        let loaded = backend.refuse_missing_kernels(job).and_then(|()| if first_use.is_any() { backend.load(job, stream) } else { Ok(()) });
        let agreed = match (self.compare(job, loaded.is_err()), loaded) {
            // This rank's own error has more detail than the fact that one rank failed.
            (Err(Error::Unsupported { .. }), Err(own)) => Err(own),
            (agreed, _) => agreed,
        };
        agreed.inspect_err(|_| backend.unload(job, first_use)).map(|()| Some(false))
    }

    /// Compares a call with those of all ranks.
    fn compare(&self, job: &Job, lacks_kernel: bool) -> Result<()> {
        let backend = self.backend();
        let mut words: Words = [0; _];
        words[..TERMS_AT].copy_from_slice(&compare::digest_of(job, std::iter::once(job), false));
        words[TERMS_AT..LACKS_KERNEL_AT].copy_from_slice(&backend.terms());
        words[LACKS_KERNEL_AT] = lacks_kernel.into();
        backend.comm().label(&job.call);
        let heard = backend.gather_words(&words, &|| job.call.to_string(), self.config().timeout);
        let heard: Vec<_> = heard.map_err(|error| compare::comparing(error, &job.call))?.iter().map(parts).collect();
        let said: Vec<CallDigest> = heard.iter().map(|(said, ..)| *said).collect();
        if let Some(error) = compare::difference(&said, Peer::unknown) {
            return Err(error);
        }
        if let Some(other) = heard.iter().position(|(_, terms, _)| *terms != heard[0].1) {
            let words = |rank: usize| format!("{} with {}", job.call, DeviceBackend::terms_in_words(&heard[rank].1));
            let (first_call, second_call) = (words(0), words(other));
            return Err(Error::Mismatch { first: Peer::unknown(0), first_call, second: Peer::unknown(other), second_call });
        }
        match heard.iter().position(|(.., lacks_kernel)| *lacks_kernel) {
            Some(rank) => Err(Error::unsupported(
                job.call.to_string(),
                format!("rank {rank} cannot load the call's kernel, or cannot allocate memory; the error on that rank gives the reason"),
            )),
            None => Ok(()),
        }
    }
}
