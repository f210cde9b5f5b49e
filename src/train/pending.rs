//! A call that a hook has started.

use crate::communicator::Work;
use crate::error::{Error, Result};

/// A call in the background, or what came of it at once.
#[derive(Debug, Default)]
pub(super) enum Pending<B> {
    /// Nothing was started.
    #[default]
    Idle,
    /// It goes on.
    Going(Work<B>),
    /// It has ended already.
    Ended(B),
}

impl<B: Send + 'static> Pending<B> {
    /// Waits for its end.
    pub(super) fn wait(&mut self) -> Result<B> {
        match std::mem::take(self) {
            Self::Going(work) => work.wait(),
            Self::Ended(buffer) => Ok(buffer),
            Self::Idle => Err(not_started()),
        }
    }
}

/// A hook that was asked to go on with nothing.
pub(super) fn not_started() -> Error {
    Error::argument("advance", "nothing was started: a hook's start comes before its advance")
}
