//! Memory for the calls of a replay, all zeros, so that no sum grows without bound.

use super::script::Script;
use super::shape::Shape;
use crate::failure::Failure;
use crate::machine::available_memory;
use crate::sizes::human;

/// The smallest allocation. The system's allocators align blocks of this size for every element type.
const LEAST: usize = 64;

/// The buffers of a call.
pub(super) struct Buffers<B> {
    pub(super) source: B,
    pub(super) destination: B,
}

/// The buffers of blocking calls, which use them one after the other.
pub(super) struct Arena {
    source: Vec<u8>,
    destination: Vec<u8>,
}

/// Returns zeros whose pages exist, so that no call waits for the system to make them.
pub(super) fn touched(length: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length.max(LEAST));
    bytes.resize(length, 0);
    bytes
}

impl Arena {
    /// Makes buffers for the largest call of a script. `ranks_here` share this host's memory.
    pub(super) fn new(script: &Script, rank: usize, ranks_here: usize) -> Result<Self, Failure> {
        let (mut source, mut destination) = (0, 0);
        for shape in &script.shapes {
            let (send, receive) = bytes(script, shape, rank)?;
            (source, destination) = (send.max(source), receive.max(destination));
        }
        let need = source.saturating_add(destination).saturating_mul(ranks_here);
        if let Some(free) = available_memory().filter(|free| need > *free) {
            let reason = format!("this host's {ranks_here} ranks need {}, but it has only {} free", human(need), human(free));
            return Err(Failure::unsupported(format!("the largest call of the record: {reason}; use more hosts")));
        }
        Ok(Self { source: touched(source), destination: touched(destination) })
    }

    /// Returns the buffers of a call.
    pub(super) fn of(&mut self, (source, destination): (usize, usize)) -> Buffers<&mut [u8]> {
        Buffers { source: &mut self.source[..source], destination: &mut self.destination[..destination] }
    }
}

/// Returns the bytes of a call's buffers on a rank.
pub(super) fn bytes(script: &Script, shape: &Shape, rank: usize) -> Result<(usize, usize), Failure> {
    let members = &script.groups[shape.group];
    let me = members.iter().position(|member| *member == rank);
    let bytes = me.and_then(|me| shape.bytes(me, members.len()));
    bytes.ok_or_else(|| {
        Failure::unsupported(format!("{} with {:?} elements: the call is too large for this machine", shape.kind, shape.amount))
    })
}
