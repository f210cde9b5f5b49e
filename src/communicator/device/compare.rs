//! Comparing device calls among the ranks before they are queued, over the host plane: NCCL compares nothing.

use super::Communicator;
use crate::call::Call;
use crate::device::DevicePlane;
use crate::error::{Error, Result};

/// What a rank says of its next call, or group of calls: the first one's fingerprint, how many they are, and a hash of them all.
type Said = [u64; 6];

/// FNV-1a over words.
fn hash(words: impl Iterator<Item = u64>) -> u64 {
    words.flat_map(u64::to_le_bytes).fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// A call in words, and of how many it is the first.
fn in_words(fingerprint: [u64; 4], calls: u64) -> String {
    let call = Call::from_fingerprint(fingerprint).map_or_else(|| "something unknown".to_owned(), |call| call.to_string());
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
    pub(super) fn compare<'a>(&self, plane: &DevicePlane, mut calls: impl Iterator<Item = &'a Call> + Clone) -> Result<()> {
        let all = calls.clone();
        let Some(first) = calls.next().filter(|_| self.world_size() > 1) else { return Ok(()) };
        plane.comparison(self.config().check_device_calls).map_or(Ok(()), |number| self.compare_as(plane, number, first, all))
    }

    /// The comparison of this number, of calls that begin with `first`.
    fn compare_as<'a>(&self, plane: &DevicePlane, number: u32, first: &Call, calls: impl Iterator<Item = &'a Call>) -> Result<()> {
        // The others may not come to a comparison any more.
        plane.refuse_if_over(&|| first.to_string())?;
        // Device calls are not numbered until they are queued.
        let numbered = |[_, rest @ ..]: [u64; 4]| [u64::from(number), rest[0], rest[1], rest[2]];
        let fingerprints: Vec<[u64; 4]> = calls.map(|call| numbered(call.fingerprint())).collect();
        let [sequence, count, op, root] = numbered(first.fingerprint());
        let mine: Said = [sequence, count, op, root, fingerprints.len() as u64, hash(fingerprints.iter().flatten().copied())];
        let mut all = vec![Said::default(); self.world_size()];
        self.all_gather_into(&[mine], &mut all).map_err(|error| comparing(error, first))?;
        if all.iter().all(|said| *said == all[0]) {
            return Ok(());
        }
        let firsts = all.iter().map(|[sequence, count, op, root, calls, _]| ([*sequence, *count, *op, *root], *calls));
        self.difference(&firsts.collect::<Vec<_>>()).map_or_else(|| self.compare_each(&fingerprints), Err)
    }

    /// As many calls as everybody else's, of which some after the first differ: finds out which.
    fn compare_each(&self, mine: &[[u64; 4]]) -> Result<()> {
        let calls = mine.len();
        let mut all = vec![[0_u64; 4]; self.world_size() * calls];
        self.all_gather_into(mine, &mut all[..])?;
        let of_all = |call: usize| (0..self.world_size()).map(|rank| (all[rank * calls + call], 1)).collect::<Vec<_>>();
        (0..calls).find_map(|call| self.difference(&of_all(call))).map_or(Ok(()), Err)
    }

    /// The error of the first rank that says something else than rank 0.
    fn difference(&self, said: &[([u64; 4], u64)]) -> Option<Error> {
        let other = said.iter().position(|words| *words != said[0])?;
        let [first_call, second_call] = [0, other].map(|rank| in_words(said[rank].0, said[rank].1));
        let (first, second) = (self.peers()[0].clone(), self.peers()[other].clone());
        Some(Error::Mismatch { first, first_call, second, second_call })
    }
}
