//! Elastic jobs: hosts may come and go, and the others start again without those that are lost, and with those that
//! have come.
//!
//! Every host has a [`Member`], a thread that asks for a place in the job, reports that the host lives, and receives
//! messages. The host that serves the store also has a [`Coordinator`], a thread that hears all hosts and decides for
//! them. `membership` makes the decisions. The two exchange records through the job's store (`messages`), so no other
//! port and no other program is needed.

mod coordinator;
mod member;
mod membership;
mod messages;
#[cfg(test)]
mod tests;

pub(super) use coordinator::Coordinator;
pub(super) use member::Member;
pub(super) use messages::{Message, Start};
