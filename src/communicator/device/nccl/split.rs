//! Splits of an `NcclCommunicator`. What NCCL splits off shares the abort flags of what it is split from; so each part starts anew, from an id
//! that its first rank makes. Colours, keys and ids travel over NCCL.

use std::ffi::c_char;

use nccl_sys::ncclUniqueId;

use crate::deadline::Deadline;
use crate::device::{self, NcclComm, NcclCommunicator, Setup, WORDS_BYTES, Words};
use crate::error::{Error, Result};

/// A rank's number in the communicator that is split, by key.
type Member = (i32, usize);

impl NcclCommunicator {
    /// Splits the ranks by colour, ordered by key; those without a colour take part and get `None`. Collective. Each part is a communicator of its own,
    /// which lives on whatever becomes of this one.
    ///
    /// # Errors
    ///
    /// `Nccl`, `Timeout`, `Poisoned`.
    #[doc(alias = "ncclCommSplit")]
    pub fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Self>> {
        let deadline = self.deadline();
        let comm = self.plane().comm();
        let made = if comm.is_revoked() {
            comm.split_revoked(color, key, &self.config().nccl, &deadline)?
        } else {
            self.split_by_ids(color, key, &deadline)?
        };
        made.map(|comm| self.descendant(comm)).transpose()
    }

    fn split_by_ids(&self, color: Option<u32>, key: i32, deadline: &Deadline) -> Result<Option<NcclComm>> {
        let (members, said) = {
            let _turn = self.turn("split")?;
            let members = self.members(color, key, deadline)?;
            let leads = color.is_some() && members.first().is_some_and(|(_, rank)| *rank == self.rank());
            let made = leads.then(|| device::unique_id(self.plane().comm().library()));
            // All take part in this, whatever this rank met.
            let said = self.tell_ids(made.as_ref().and_then(|made| made.as_ref().ok()), deadline)?;
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
            return Err(Error::unsupported("split", format!("rank {leader} could not make an id for its part; its own error says why")));
        };
        let (plane, ids) = (self.plane(), [ncclUniqueId { internal: id.map(|byte| byte as c_char) }]);
        let (library, gpu, config) = (plane.comm().library(), plane.gpu(), &self.config().nccl);
        let setup = Setup { library, gpu, ids: &ids, rank: place, world_size: members.len(), config, deadline, liveness_probe: None };
        NcclComm::create(setup).map(Some)
    }

    /// Who has this rank's colour, in the order of keys.
    fn members(&self, color: Option<u32>, key: i32, deadline: &Deadline) -> Result<Vec<Member>> {
        let mut words: Words = [0; _];
        words[0] = color.is_some().into();
        words[1..5].copy_from_slice(&color.unwrap_or_default().to_le_bytes());
        words[5..9].copy_from_slice(&key.to_le_bytes());
        let all = self.plane().gather_words(&words, &|| "split".to_owned(), deadline.remaining())?;
        let alike = all.iter().enumerate().filter(|(_, other)| other[..5] == words[..5]);
        let mut members: Vec<Member> =
            alike.map(|(rank, other)| (i32::from_le_bytes([other[5], other[6], other[7], other[8]]), rank)).collect();
        members.sort_unstable();
        Ok(members)
    }

    /// What each rank made: an id, or zeros.
    fn tell_ids(&self, id: Option<&ncclUniqueId>, deadline: &Deadline) -> Result<Vec<[u8; ID_BYTES]>> {
        let mine = id.map_or([0; ID_BYTES], |id| id.internal.map(|byte| byte as u8));
        let mut said = vec![[0; ID_BYTES]; self.world_size()];
        for (part, piece) in mine.chunks(WORDS_BYTES).enumerate() {
            let mut words: Words = [0; _];
            words[..piece.len()].copy_from_slice(piece);
            let heard = self.plane().gather_words(&words, &|| "split".to_owned(), deadline.remaining())?;
            for (whole, words) in said.iter_mut().zip(heard) {
                whole[part * WORDS_BYTES..][..piece.len()].copy_from_slice(&words[..piece.len()]);
            }
        }
        Ok(said)
    }
}

const ID_BYTES: usize = size_of::<ncclUniqueId>();
