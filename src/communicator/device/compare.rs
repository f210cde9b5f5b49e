//! Compares the ranks' device calls over the host backend before they are queued. NCCL itself compares nothing, and
//! writes all bytes that it receives.
//!
//! Ranks of a `gather_v`, `scatter_v` or `all_to_all_v` agree on the call but not on its lengths, which only the two
//! ends of each transfer know. Each rank reports to every other rank how many bytes it sends to that rank, and how many
//! bytes it expects from that rank. Then all ranks receive the first difference. So either all ranks queue the call, or
//! none of them does.

use sha2::{Digest, Sha256};

use crate::call::element::Data;
use crate::call::{Call, Collective};
use crate::communicator::Communicator;
use crate::communicator::prepare::prepared::{Prepared, Source};
use crate::device::{self, DeviceBackend, Job};
use crate::error::{Error, Peer, Result};
use crate::host::backend;

/// The size of a digest in bytes.
const DIGEST_BYTES: usize = 32;
const _: () = assert!(DIGEST_BYTES == Call::FINGERPRINT_BYTES, "a rank's words about one call and about several have the same length");

/// The words that a rank sends about its next calls: their number, whether they are captured into a graph, and the
/// fingerprint of the only call, or the SHA-256 of all fingerprints.
pub(super) type CallDigest = [u8; 8 + DIGEST_BYTES];

/// The bit in the number of calls that marks them as captured into a graph. NCCL would match a call that runs on one
/// rank with a later call of a rank that captures.
const CAPTURED: u64 = 1 << 63;

/// The op that stands for an in-place `all_to_all`. NCCL divides the data of an in-place call into pieces in a
/// different way from that of a call with two buffers.
const IN_PLACE: u64 = 253;

/// Returns a job's fingerprint, with everything that has to be equal for NCCL.
fn fingerprint(job: &Job) -> [u8; DIGEST_BYTES] {
    match (job.call.kind, job.in_place) {
        (Collective::AllToAll, true) => Call { op: IN_PLACE, ..job.call }.to_bytes(),
        _ => job.call.to_bytes(),
    }
}

/// Returns the digest of these jobs.
pub(super) fn digest_of<'a>(first: &Job, jobs: impl Iterator<Item = &'a Job> + Clone, is_captured: bool) -> CallDigest {
    let count = jobs.clone().count();
    let words: [u8; DIGEST_BYTES] = if count == 1 {
        fingerprint(first)
    } else {
        let mut digest = Sha256::new();
        jobs.for_each(|job| digest.update(fingerprint(job)));
        digest.finalize().into()
    };
    with_count(count, is_captured, words)
}

/// Puts a number of calls before a fingerprint or a digest.
fn with_count(count: usize, is_captured: bool, words: [u8; DIGEST_BYTES]) -> CallDigest {
    let mut said = [0; size_of::<CallDigest>()];
    let count = count as u64 | if is_captured { CAPTURED } else { 0 };
    said[..8].copy_from_slice(&count.to_le_bytes());
    said[8..].copy_from_slice(&words);
    said
}

/// Returns the number of calls and the fingerprint of the first.
pub(super) fn first_of<'a>(first: &Job, jobs: impl Iterator<Item = &'a Job>, is_captured: bool) -> CallDigest {
    with_count(jobs.count(), is_captured, fingerprint(first))
}

/// Describes what a rank has sent: the first call, and the number of calls.
pub(super) fn in_words(first: &CallDigest) -> String {
    let (count, fingerprint) = first.split_at(8);
    let count = count.try_into().map_or(0, u64::from_le_bytes);
    let call = fingerprint.try_into().ok().and_then(Call::from_bytes);
    let mut call = match call {
        None => "an unknown call".to_owned(),
        Some(call) if call.kind == Collective::AllToAll && call.op == IN_PLACE => format!("{}, in place", Call { op: 0, ..call }),
        Some(call) => call.to_string(),
    };
    if count & CAPTURED != 0 {
        call += ", captured into a graph";
    }
    match count & !CAPTURED {
        1 => call,
        calls => format!("a group of {calls} collectives that begins with {call}"),
    }
}

/// Rewords an error of the comparison for a caller who made no call on the host.
#[cold]
pub(super) fn comparing(mut error: Error, first: &Call) -> Error {
    if let Error::Timeout { doing, .. } | Error::PeerLost { doing, .. } = &mut error {
        *doing = format!("comparing {first} with the other ranks' device calls (Config::check_device_calls)");
    }
    error
}

/// Marks a call of the host backend as one of the crate's own.
fn as_comparison(prepared: Prepared<'_>) -> Prepared<'_> {
    match prepared {
        Prepared::Host(job, lent) => Prepared::Host(backend::Job { call: Call { op: Call::COMPARISON, ..job.call }, ..job }, lent),
        device => device,
    }
}

impl Communicator {
    /// Compares the calls that this rank is about to queue together with those of the other ranks, if that is enabled.
    /// Nothing has been queued yet, so a difference does no harm. Returns whether the calls are captured, as this rank
    /// reported to the others.
    #[inline]
    pub(super) fn compare<'a>(&self, backend: &DeviceBackend, jobs: impl Iterator<Item = &'a Job> + Clone) -> Result<Option<bool>> {
        self.compared(jobs.clone()).map(|first| self.compare_as(backend, first, jobs)).transpose()
    }

    /// Returns the first of `jobs` if they are to be compared.
    #[inline]
    pub(super) fn compared<'a>(&self, mut jobs: impl Iterator<Item = &'a Job>) -> Option<&'a Job> {
        jobs.next().filter(|first| self.world_size() > 1 && self.config().check_device_calls.covers(first.call.sequence))
    }

    /// Compares the jobs, which begin with `first`.
    fn compare_as<'a>(&self, backend: &DeviceBackend, first: &Job, jobs: impl Iterator<Item = &'a Job> + Clone) -> Result<bool> {
        // The others may no longer compare anything.
        backend.refuse_if_over(&|| first.call.to_string())?;
        let is_captured = device::is_capturing(self.device_stream(backend));
        // Reused from call to call. A comparison within this one allocates its own.
        let mut all = backend.lend_comparison();
        all.resize(self.world_size(), [0; size_of::<CallDigest>()]);
        let mine = digest_of(first, jobs.clone(), is_captured);
        let heard = self.gather_said(&[mine], &mut all[..]).map_err(|error| comparing(error, &first.call));
        let agree = all.iter().all(|said| *said == all[0]);
        backend.return_comparison(all);
        heard?;
        if !agree {
            return self.find_difference(first, jobs, is_captured).map(|()| is_captured);
        }
        self.compare_pairs(jobs).map_err(|error| comparing(error, &first.call))?;
        Ok(is_captured)
    }

    /// Gathers what the ranks send about their device calls. No call of the program matches this gathering.
    pub(super) fn gather_said<T: Data>(&self, mine: &[T], all: &mut [T]) -> Result<()> {
        let prepared = self.prepare_all_gather(Some(mine.into()), all.into());
        self.execute(prepared.map(as_comparison))
    }

    /// Exchanges what each rank sends to each other, marked as in [`Communicator::gather_said`].
    pub(super) fn exchange_said<T: Data>(&self, mine: &[T], theirs: &mut [T]) -> Result<()> {
        let prepared = self.prepare_all_to_all(Source::Separate(mine.into()), theirs.into());
        self.execute(prepared.map(as_comparison))
    }

    /// Exchanges the ranks' calls in full, because some differ.
    #[cold]
    fn find_difference<'a>(&self, first: &Job, jobs: impl Iterator<Item = &'a Job> + Clone, is_captured: bool) -> Result<()> {
        let mut firsts = vec![[0; size_of::<CallDigest>()]; self.world_size()];
        let mine = first_of(first, jobs.clone(), is_captured);
        self.gather_said(&[mine], &mut firsts[..]).map_err(|error| comparing(error, &first.call))?;
        self.difference(&firsts).map_or_else(|| self.compare_each(&jobs.map(fingerprint).collect::<Vec<_>>()), Err)
    }

    /// Finds the call that differs, if all ranks make the same number of calls and the first one is the same.
    fn compare_each(&self, mine: &[[u8; Call::FINGERPRINT_BYTES]]) -> Result<()> {
        let calls = mine.len();
        let mut all = vec![[0; Call::FINGERPRINT_BYTES]; self.world_size() * calls];
        self.gather_said(mine, &mut all[..])?;
        let of_all = |call: usize| (0..self.world_size()).map(|rank| with_count(1, false, all[rank * calls + call])).collect::<Vec<_>>();
        let difference = (0..calls).find_map(|call| self.difference(&of_all(call)));
        // The digests differ but no call does: some rank has sent inconsistent data.
        let unsteady = || Error::Protocol {
            with: "the other ranks".to_owned(),
            reason: "the description of a device call changed while the ranks compared their calls".to_owned(),
        };
        Err(difference.unwrap_or_else(unsteady))
    }

    /// Returns the error for the first rank that differs from rank 0.
    pub(super) fn difference(&self, firsts: &[CallDigest]) -> Option<Error> {
        difference(firsts, |rank| self.peers()[rank].clone())
    }
}

/// Returns the error for the first rank that differs from rank 0.
pub(super) fn difference(firsts: &[CallDigest], peer: impl Fn(usize) -> Peer) -> Option<Error> {
    let other = firsts.iter().position(|first| *first != firsts[0])?;
    let [first_call, second_call] = [0, other].map(|rank| in_words(&firsts[rank]));
    Some(Error::Mismatch { first: peer(0), first_call, second: peer(other), second_call })
}

/// The number of bytes that this rank sends to another, and the number that it expects from there.
type Pair = [u64; 2];

/// A rank's finding: whether anything differs and in which direction, the peer, the job, and the two lengths.
type Finding = [u64; 5];

impl Communicator {
    /// Compares the lengths of jobs on which the ranks have agreed. Nothing has been queued yet, so a difference
    /// does no harm.
    pub(super) fn compare_pairs<'a>(&self, jobs: impl Iterator<Item = &'a Job> + Clone) -> Result<()> {
        let jobs = jobs.filter(|job| job.call.kind.is_pairwise());
        let (me, size) = (self.rank(), self.world_size());
        let mine: Vec<Pair> = (0..size).flat_map(|peer| jobs.clone().map(move |job| job.pair(me, peer))).collect();
        if mine.is_empty() {
            return Ok(());
        }
        let mut theirs = vec![Pair::default(); mine.len()];
        self.exchange_said(&mine[..], &mut theirs[..])?;
        let each = mine.len() / size;
        let differs = |at: &usize| mine[*at][0] != theirs[*at][1] || mine[*at][1] != theirs[*at][0];
        let found = (0..mine.len()).find(differs).map_or(Finding::default(), |at| {
            // The direction that differs, as two lengths: the one sent, and the one expected.
            let is_mine = mine[at][0] != theirs[at][1];
            let [sent, expected] = if is_mine { [mine[at][0], theirs[at][1]] } else { [theirs[at][0], mine[at][1]] };
            [if is_mine { 1 } else { 2 }, (at / each) as u64, (at % each) as u64, sent, expected]
        });
        let mut findings = vec![Finding::default(); size];
        self.gather_said(&[found], &mut findings[..])?;
        match findings.iter().position(|found| found[0] != 0) {
            None => Ok(()),
            Some(rank) => Err(self.pair_mismatch(rank, findings[rank], jobs)),
        }
    }

    /// Returns the error for a finding of `rank`.
    fn pair_mismatch<'a>(
        &self,
        rank: usize,
        [direction, peer, job, sent, expected]: Finding,
        mut jobs: impl Iterator<Item = &'a Job>,
    ) -> Error {
        let peer = usize::try_from(peer).unwrap_or(usize::MAX).min(self.world_size() - 1);
        let (from, to) = if direction == 1 { (rank, peer) } else { (peer, rank) };
        let name = usize::try_from(job).ok().and_then(|at| jobs.nth(at)).map_or("a call", |job| job.call.name());
        Error::Mismatch {
            first: self.peers()[from].clone(),
            first_call: format!("{name} that sends {sent} B to rank {to}"),
            second: self.peers()[to].clone(),
            second_call: format!("{name} that expects {expected} B from rank {from}"),
        }
    }
}
