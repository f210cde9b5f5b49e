//! Comparing device calls among the ranks before they are queued, over the host plane: NCCL compares nothing, and writes what it is sent.

use sha2::{Digest, Sha256};

use crate::call::Call;
use crate::communicator::Communicator;
use crate::device::DevicePlane;
use crate::error::{Error, Result};

/// The bytes of a digest.
const DIGEST_BYTES: usize = 32;
const _: () = assert!(DIGEST_BYTES == Call::FINGERPRINT_BYTES, "what a rank says of a call and of several has one length");

/// What a rank says of its next calls: how many they are, and the only one's fingerprint, or a digest of all fingerprints that nobody finds a
/// second text for.
pub(super) type Said = [u8; 8 + DIGEST_BYTES];

/// What a rank says of these calls.
pub(super) fn said<'a>(first: &Call, calls: impl Iterator<Item = &'a Call> + Clone) -> Said {
    let count = calls.clone().count();
    let words: [u8; DIGEST_BYTES] = if count == 1 {
        first.to_bytes()
    } else {
        let mut digest = Sha256::new();
        calls.for_each(|call| digest.update(call.to_bytes()));
        digest.finalize().into()
    };
    with_count(count, words)
}

/// A fingerprint, or a digest, behind a number of calls.
fn with_count(count: usize, words: [u8; DIGEST_BYTES]) -> Said {
    let mut said = [0; size_of::<Said>()];
    said[..8].copy_from_slice(&(count as u64).to_le_bytes());
    said[8..].copy_from_slice(&words);
    said
}

/// How many calls a rank says it makes, of which the first is this.
pub(super) fn first_of<'a>(first: &Call, calls: impl Iterator<Item = &'a Call>) -> Said {
    with_count(calls.count(), first.to_bytes())
}

/// A call in words, and of how many it is the first.
pub(super) fn in_words(first: &Said) -> String {
    let (count, fingerprint) = first.split_at(8);
    let calls = count.try_into().map_or(0, u64::from_le_bytes);
    let call = fingerprint.try_into().ok().and_then(Call::from_bytes);
    let call = call.map_or_else(|| "something unknown".to_owned(), |call| call.to_string());
    if calls == 1 { call } else { format!("a group of {calls} collectives that begins with {call}") }
}

/// An error of the comparison, for a caller who made no call on the host.
#[cold]
fn comparing(mut error: Error, first: &Call) -> Error {
    if let Error::Timeout { doing, .. } | Error::PeerLost { doing, .. } = &mut error {
        *doing = format!("comparing {first} with the other ranks' device calls (Config::check_device_calls)");
    }
    error
}

impl Communicator {
    /// Compares the calls that this rank is about to queue together with everyone's, where that was asked for. Nothing has been queued
    /// yet, so a difference harms nothing.
    #[inline]
    pub(super) fn compare<'a>(&self, plane: &DevicePlane, calls: impl Iterator<Item = &'a Call> + Clone) -> Result<()> {
        match self.compared(calls.clone()) {
            Some(first) => self.compare_as(plane, first, calls),
            None => Ok(()),
        }
    }

    /// The first of calls that are to be compared.
    #[inline]
    pub(super) fn compared<'a>(&self, mut calls: impl Iterator<Item = &'a Call>) -> Option<&'a Call> {
        calls.next().filter(|first| self.world_size() > 1 && self.config().check_device_calls.covers(first.sequence))
    }

    /// The comparison of calls that begin with `first`.
    fn compare_as<'a>(&self, plane: &DevicePlane, first: &Call, calls: impl Iterator<Item = &'a Call> + Clone) -> Result<()> {
        // The others may not come to a comparison any more.
        plane.refuse_if_over(&|| first.to_string())?;
        // Kept from call to call. Who makes one from within this one has to do without.
        let mut all = plane.lend_comparison();
        all.resize(self.world_size(), [0; size_of::<Said>()]);
        let heard = self.all_gather_into(&[said(first, calls.clone())], &mut all[..]).map_err(|error| comparing(error, first));
        let agree = all.iter().all(|said| *said == all[0]);
        plane.return_comparison(all);
        heard?;
        if agree { Ok(()) } else { self.find_difference(first, calls) }
    }

    /// Tells the ranks' calls in full: some differ.
    #[cold]
    fn find_difference<'a>(&self, first: &Call, calls: impl Iterator<Item = &'a Call> + Clone) -> Result<()> {
        let mut firsts = vec![[0; size_of::<Said>()]; self.world_size()];
        self.all_gather_into(&[first_of(first, calls.clone())], &mut firsts[..]).map_err(|error| comparing(error, first))?;
        self.difference(&firsts).map_or_else(|| self.compare_each(&calls.map(|call| call.to_bytes()).collect::<Vec<_>>()), Err)
    }

    /// As many calls as everybody else's, of which some after the first differ: finds out which.
    fn compare_each(&self, mine: &[[u8; Call::FINGERPRINT_BYTES]]) -> Result<()> {
        let calls = mine.len();
        let mut all = vec![[0; Call::FINGERPRINT_BYTES]; self.world_size() * calls];
        self.all_gather_into(mine, &mut all[..])?;
        let of_all = |call: usize| (0..self.world_size()).map(|rank| with_count(1, all[rank * calls + call])).collect::<Vec<_>>();
        let difference = (0..calls).find_map(|call| self.difference(&of_all(call)));
        // The digests differ, so somebody has said one thing and then another.
        let unsteady = || Error::Protocol {
            with: "the other ranks".to_owned(),
            reason: "their device calls changed while they were compared".to_owned(),
        };
        Err(difference.unwrap_or_else(unsteady))
    }

    /// The error of the first rank that says something else than rank 0.
    pub(super) fn difference(&self, firsts: &[Said]) -> Option<Error> {
        let other = firsts.iter().position(|first| *first != firsts[0])?;
        let [first_call, second_call] = [0, other].map(|rank| in_words(&firsts[rank]));
        let (first, second) = (self.peers()[0].clone(), self.peers()[other].clone());
        Some(Error::Mismatch { first, first_call, second, second_call })
    }
}
