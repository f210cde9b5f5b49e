//! Connections between ranks. They are made inside the first call that needs them, which waits there for the other
//! ranks.
//!
//! Messages always connect in this way, from one rank to another and separately for each direction, whatever the
//! configuration. The first send to a rank waits until that rank calls the receive. A group's connections are made in
//! the order of the distance between the ranks, so that a group in which all ranks send and receive causes no circular
//! wait. Calls that NCCL implements with sends and receives (gather, scatter, all-to-all) connect in the same way. A
//! waiting rank is not notified of a rank that aborts; its own abort frees it.
//!
//! Collectives are connected when the communicator is made, or, if a test requests it, in the first collective.

use crate::comm::{Comm, Member};
use crate::control;
use crate::fault::Outcome;
use crate::group::{Entry, Task};
use crate::operation::{Signature, Verb};
use crate::report::lock;
use std::sync::Arc;

/// The sending rank and the receiving rank.
pub(crate) type Direction = (usize, usize);

/// Returns the task that connects what the calls of one communicator need before their launch. It waits for other
/// ranks.
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

/// Whether a call needs a connection that does not exist yet.
pub(crate) fn needs_connection(comm: &Comm, signature: &Signature) -> bool {
    !new_directions(comm, signature).is_empty()
}

/// Whether NCCL implements the verb with sends and receives.
fn is_messages(verb: Verb) -> bool {
    matches!(verb, Verb::Send | Verb::Recv | Verb::AlltoAll | Verb::Gather | Verb::Scatter)
}

/// Returns the directions of this rank that a call uses and no earlier call has used.
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

/// Connects for messages, one distance after another, as all ranks do.
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
