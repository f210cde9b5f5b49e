//! Splits and growth of an `NcclCommunicator`. Colours, keys and ids travel over NCCL. Each new communicator starts
//! from a new id:
//! - A communicator that NCCL splits off shares the abort flags of its parent. So each part starts from an id that its
//!   first rank makes.
//! - If a communicator has been split, a communicator that NCCL grows from it (`ncclCommGrow`, up to 2.30.7) counts the
//!   shared resources wrongly. So a larger communicator also starts from a new id.

use std::ffi::c_char;
use std::sync::Arc;

use cudarc::driver::CudaContext;
use nccl_sys::ncclUniqueId;

use crate::base::deadline::Deadline;
use crate::config::Config;
use crate::device::{self, CommonDevice, NcclComm, NcclCommunicator, Setup, UniqueId, WORDS_BYTES, Words};
use crate::error::{Error, Peer, Result};

/// A member's key, and its rank in the communicator that is split.
type Member = (i32, usize);

impl NcclCommunicator {
    /// Splits the ranks by colour into new communicators. In each new communicator, the ranks are ordered by key.
    /// Collective: every rank must make this call. Ranks without a colour get `None`. Each new communicator stays
    /// usable even if this communicator fails.
    ///
    /// # Errors
    ///
    /// - `Mismatch` if another rank makes a different typed call instead.
    /// - `Unsupported` after this communicator was shrunk with [`ShrinkMode::Abort`](crate::nccl::ShrinkMode::Abort).
    /// - `Nccl`, `Timeout`, `Poisoned`.
    #[doc(alias = "ncclCommSplit")]
    pub fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Self>> {
        let deadline = self.deadline();
        let comm = self.backend().comm();
        comm.refuse_children_if_ended(CALL)?;
        let made = if comm.is_revoked() {
            comm.split_revoked(color, key, &self.config().nccl, &deadline)?
        } else {
            self.split_by_ids(color, key, &deadline)?
        };
        made.map(|comm| self.descendant(comm)).transpose()
    }

    /// Returns an id for the next [`grow`](Self::grow). One rank makes the id and passes it to all new ranks.
    ///
    /// # Errors
    ///
    /// `Nccl`.
    #[doc(alias = "ncclCommGetUniqueId")]
    pub fn grow_id(&self) -> Result<UniqueId> {
        device::unique_id(self.backend().comm().library()).map(UniqueId::from_nccl)
    }

    /// Makes a larger communicator, in which the ranks of this communicator keep their numbers. The new ranks call
    /// [`join`](Self::join). The rank that made the id passes it, and the other ranks of this communicator pass `None`.
    /// Collective: every rank of this communicator must make this call.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if `world_size` is not larger than the current world size. All ranks get this error if no
    ///   rank passes an id, or if more than one rank passes an id.
    /// - `Mismatch` if another rank makes a different typed call instead.
    /// - `Nccl`, `Timeout`, `Poisoned`.
    #[doc(alias = "ncclCommGrow")]
    pub fn grow(&self, world_size: usize, id: Option<UniqueId>) -> Result<Self> {
        if world_size <= self.world_size() {
            let reason = format!("the new world size {world_size} is not larger than the current world size {}", self.world_size());
            return Err(Error::argument(GROW, reason));
        }
        let (deadline, id) = (self.deadline(), id.map(UniqueId::to_nccl));
        self.backend().comm().refuse_children_if_ended(GROW)?;
        let said = {
            let _turn = self.turn(GROW)?;
            self.tell_ids(GROW, id.as_ref(), &deadline)?
        };
        let made: Vec<usize> = (0..said.len()).filter(|rank| said[*rank] != [0; ID_BYTES]).collect();
        let [maker] = made[..] else {
            let reason = format!("exactly one rank must pass the id that it created; ranks that passed one: {made:?}");
            return Err(Error::argument(GROW, reason));
        };
        let comm = self.start_anew(&said[maker], self.rank(), world_size, &deadline)?;
        // The new ranks do not know whether an NVLink switch can be used.
        let backend = self.backend();
        let common = CommonDevice { has_switch: false, ..backend.common().clone() };
        Self::around(backend.gpu().clone(), comm, self.config(), common)
    }

    /// Joins a larger communicator as a new rank, while the old ranks call [`grow`](Self::grow).
    ///
    /// # Errors
    ///
    /// The errors of [`NcclCommunicator::create`].
    pub fn join(context: &Arc<CudaContext>, id: UniqueId, rank: usize, world_size: usize, config: &Config) -> Result<Self> {
        Self::create(context, &[id], rank, world_size, config)
    }

    /// Makes a communicator on this rank's device, from an id that its ranks have received.
    fn start_anew(&self, id: &[u8; ID_BYTES], rank: usize, world_size: usize, deadline: &Deadline) -> Result<NcclComm> {
        let (backend, ids) = (self.backend(), [ncclUniqueId { internal: id.map(|byte| byte as c_char) }]);
        let (library, gpu, config) = (backend.comm().library(), backend.gpu(), &self.config().nccl);
        NcclComm::create(Setup { library, gpu, ids: &ids, rank, world_size, config, deadline, liveness_probe: None, end_notice: None })
    }

    fn split_by_ids(&self, color: Option<u32>, key: i32, deadline: &Deadline) -> Result<Option<NcclComm>> {
        let (members, said) = {
            let _turn = self.turn(CALL)?;
            let members = self.members(color, key, deadline)?;
            let leads = color.is_some() && members.first().is_some_and(|(_, rank)| *rank == self.rank());
            let made = leads.then(|| device::unique_id(self.backend().comm().library()));
            // All ranks take part in this, even if this one failed.
            let said = self.tell_ids(CALL, made.as_ref().and_then(|made| made.as_ref().ok()), deadline)?;
            made.transpose()?;
            (members, said)
        };
        if color.is_none() {
            return Ok(None);
        }
        let place = members.iter().position(|(_, rank)| *rank == self.rank()).unwrap_or_default();
        let leader = members.first().map_or_else(|| self.rank(), |(_, rank)| *rank);
        let id = said.get(leader).copied().filter(|id| *id != [0; ID_BYTES]);
        let Some(id) = id else {
            return Err(Error::unsupported(
                CALL,
                format!("rank {leader} could not create an id for its new communicator; the error on that rank gives the reason"),
            ));
        };
        self.start_anew(&id, place, members.len(), deadline).map(Some)
    }

    /// Returns the ranks of this rank's colour, ordered by key.
    fn members(&self, color: Option<u32>, key: i32, deadline: &Deadline) -> Result<Vec<Member>> {
        let mut words: Words = [0; _];
        words[..TAG_BYTES].copy_from_slice(&TAG);
        words[8] = color.is_some().into();
        words[9..13].copy_from_slice(&color.unwrap_or_default().to_le_bytes());
        words[13..17].copy_from_slice(&key.to_le_bytes());
        let all = self.hear(CALL, &words, deadline)?;
        let alike = all.iter().enumerate().filter(|(_, other)| other[8..13] == words[8..13]);
        let mut members: Vec<Member> =
            alike.map(|(rank, other)| (i32::from_le_bytes([other[13], other[14], other[15], other[16]]), rank)).collect();
        members.sort_unstable();
        Ok(members)
    }

    /// Returns what each rank made: an id, or zeros.
    fn tell_ids(&self, call: &'static str, id: Option<&ncclUniqueId>, deadline: &Deadline) -> Result<Vec<[u8; ID_BYTES]>> {
        let mine = id.map_or([0; ID_BYTES], |id| id.internal.map(|byte| byte as u8));
        let mut said = vec![[0; ID_BYTES]; self.world_size()];
        for (part, piece) in mine.chunks(PIECE_BYTES).enumerate() {
            let mut words: Words = [0; _];
            words[..TAG_BYTES].copy_from_slice(if call == GROW { &GROW_TAG } else { &ID_TAG });
            words[TAG_BYTES..][..piece.len()].copy_from_slice(piece);
            for (whole, words) in said.iter_mut().zip(self.hear(call, &words, deadline)?) {
                whole[part * PIECE_BYTES..][..piece.len()].copy_from_slice(&words[TAG_BYTES..][..piece.len()]);
            }
        }
        Ok(said)
    }

    /// Sends words to the other ranks, and returns the words of all ranks.
    fn hear(&self, call: &'static str, words: &Words, deadline: &Deadline) -> Result<Vec<Words>> {
        let heard = self.backend().gather_words(words, &|| call.to_owned(), deadline.remaining())?;
        same_call(call, self.rank(), &heard)?;
        Ok(heard)
    }
}

const CALL: &str = "split";
const GROW: &str = "grow";

const ID_BYTES: usize = size_of::<ncclUniqueId>();

/// The tags that distinguish a rank's words from those of other calls: one for its colour and key, one for its id in
/// pieces.
const TAG: [u8; TAG_BYTES] = *b"split  1";
const ID_TAG: [u8; TAG_BYTES] = *b"split id";
const GROW_TAG: [u8; TAG_BYTES] = *b"grow  id";
const TAG_BYTES: usize = 8;

/// The bytes of an id that fit behind a tag.
const PIECE_BYTES: usize = WORDS_BYTES - TAG_BYTES;

/// Returns an error unless all ranks have sent words of the same kind.
fn same_call(call: &str, rank: usize, heard: &[Words]) -> Result<()> {
    let tag = |rank: usize| &heard[rank][..TAG_BYTES];
    let in_words = |other: usize| if tag(other) == tag(rank) { call } else { "another call" }.to_owned();
    (1..heard.len()).find(|other| tag(*other) != tag(0)).map_or(Ok(()), |other| {
        let (first, second) = (Peer::unknown(0), Peer::unknown(other));
        Err(Error::Mismatch { first, first_call: in_words(0), second, second_call: in_words(other) })
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn a_rank_that_makes_another_call_is_named() {
        let words = |tag: [u8; TAG_BYTES], filler: u8| {
            let mut words: Words = [filler; _];
            words[..TAG_BYTES].copy_from_slice(&tag);
            words
        };
        assert!(same_call(CALL, 1, &[words(TAG, 0), words(TAG, 7)]).is_ok());
        let heard = [words(TAG, 0), words(TAG, 7), words(*b"window 1", 0)];
        for (rank, expected) in [(0, ["split", "another call"]), (2, ["another call", "split"])] {
            let error = same_call(CALL, rank, &heard).unwrap_err();
            let Error::Mismatch { first, first_call, second, second_call } = &error else { panic!("{error}") };
            assert_eq!((first.rank, second.rank, [first_call.as_str(), second_call]), (0, 2, expected));
        }
        assert!(same_call(CALL, 1, &[words(TAG, 0), words(ID_TAG, 0)]).is_err());
    }
}
