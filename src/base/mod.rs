//! Deadlines, events, threads, locks and numbers that every other module builds on.

pub(crate) mod deadline;
pub(crate) mod event;
pub(crate) mod fork;
pub(crate) mod own_thread;
pub(crate) mod random;
pub(crate) mod regular_file;
pub(crate) mod socket_user;
pub(crate) mod sync;
pub(crate) mod ticket_lock;
pub(crate) mod tuning;
