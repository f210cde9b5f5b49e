//! Where messages are posted and finished: one engine behind a lock, moved on by whoever waits, and by a thread of its own while
//! background messages are outstanding.

mod advance;
mod background;
mod blocking;
mod deferred;
mod engine;
mod outcome;
mod pending;
#[cfg(test)]
mod tests;

pub(super) use engine::ProgressEngine;
