//! Connections between ranks, which are made inside the call that needs them first, and wait there for the other ranks.
//!
//! Messages are always connected so, from one rank to another and apart for each direction, whatever the communicator was told: its first send
//! to a rank waits until that calls the receive. A group's connections are made by the distance between the ranks, all of one distance at a
//! time, so that a group in which all send and receive is no circle. What NCCL makes of sends and receives itself (gather, scatter,
//! all-to-all) connects as these do. Who waits is told nothing of a rank that aborts; its own abort frees it.
//!
//! Collectives are connected when the communicator is made, or, where a test says so, in the first one.

use crate::comm::{Comm, Member};
use crate::control;
use crate::fault::Outcome;
use crate::group::{Entry, Task};
use crate::operation::{Signature, Verb};
use crate::report::lock;
use std::sync::Arc;

/// Who sends, and who receives.
pub(crate) type Direction = (usize, usize);

/// What has to be connected before the calls of one communicator can be launched. It waits for other ranks.
pub(crate) fn connection(comm: &Arc<Comm>, entries: &[Entry]) -> Option<Task> {
    let joins_all =
        control::connects_lazily() && !lock(&comm.resources).connected && entries.iter().any(|entry| !is_messages(entry.verb()));
    let directions: Vec<Direction> = entries.iter().flat_map(|entry| new_directions(comm, entry.signature())).collect();
    if !joins_all && directions.is_empty() {
        return None;
    }
    let connecting = comm.clone();
    let work = move || {
        let member = connecting.member()?;
        if joins_all {
            let everyone: Vec<usize> = (0..member.size).collect();
            member.link.confer(&everyone, "connection", Vec::new())?;
            lock(&connecting.resources).connected = true;
        }
        connect(&connecting, member, &directions)
    };
    Some(Task { comm: comm.clone(), name: entries[0].name, ends: false, work: Box::new(work) })
}

/// Whether a call needs a connection that is not there.
pub(crate) fn needs_connection(comm: &Comm, signature: &Signature) -> bool {
    !new_directions(comm, signature).is_empty()
}

/// Whether NCCL does it by sends and receives.
fn is_messages(verb: Verb) -> bool {
    matches!(verb, Verb::Send | Verb::Recv | Verb::AlltoAll | Verb::Gather | Verb::Scatter)
}

/// The directions of this rank's that a call uses and no call has used before.
fn new_directions(comm: &Comm, signature: &Signature) -> Vec<Direction> {
    let Ok(Member { rank, size, .. }) = comm.member() else { return Vec::new() };
    let (me, root) = (*rank, signature.root);
    let others = || (0..*size).filter(move |other| *other != me);
    let all: Vec<Direction> = match signature.verb {
        Verb::Send => vec![(me, root)],
        Verb::Recv => vec![(root, me)],
        Verb::AlltoAll => others().flat_map(|other| [(me, other), (other, me)]).collect(),
        Verb::Gather if me == root => others().map(|other| (other, me)).collect(),
        Verb::Gather => vec![(me, root)],
        Verb::Scatter if me == root => others().map(|other| (me, other)).collect(),
        Verb::Scatter => vec![(root, me)],
        _ => Vec::new(),
    };
    let known = lock(&comm.resources);
    all.into_iter().filter(|(from, to)| from != to && !known.directions.contains(&(*from, *to))).collect()
}

/// Connects for messages, distance by distance, as all ranks do.
fn connect(comm: &Comm, member: &Member, directions: &[Direction]) -> Outcome<()> {
    for distance in 1..member.size {
        let is_so_far = |(from, to): &&Direction| (to + member.size - from) % member.size == distance;
        let mut step: Vec<Direction> = directions.iter().filter(is_so_far).copied().collect();
        step.sort_unstable();
        step.dedup();
        if !step.is_empty() {
            member.link.connect(&step)?;
            lock(&comm.resources).directions.extend(step);
        }
    }
    Ok(())
}
