//! Records whether training steps can continue. The first error or panic in the middle of a step ends them.

use std::sync::Arc;

use collectives::{Error, Result};

/// The cause that has ended the steps, if any.
#[derive(Debug, Default)]
pub(super) struct StepHealth {
    failed: Option<Arc<Error>>,
    /// Set while hooks or a closure of the caller run. Stays set if they panic.
    at_work: bool,
}

impl StepHealth {
    /// Refuses to continue after a step that failed.
    pub(super) fn check(&self, call: &'static str) -> Result<()> {
        let panicked = || Arc::new(Error::argument("train", "a hook or the caller's closure panicked in the middle of a step"));
        match &self.failed {
            Some(cause) => Err(Error::Poisoned { call: call.to_owned(), cause: Arc::clone(cause) }),
            None if self.at_work => Err(Error::Poisoned { call: call.to_owned(), cause: panicked() }),
            None => Ok(()),
        }
    }

    /// Begins a part of a step. If that part fails or panics, no step can follow.
    pub(super) fn enter(&mut self) {
        self.at_work = true;
    }

    /// Ends the part that [`enter`](Self::enter) began.
    pub(super) fn leave<R>(&mut self, result: Result<R>) -> Result<R> {
        self.at_work = false;
        self.keep(result)
    }

    /// Keeps the first error after which no step can follow.
    pub(super) fn keep<R>(&mut self, result: Result<R>) -> Result<R> {
        result.inspect_err(|error| {
            self.failed.get_or_insert_with(|| Arc::new(error.clone()));
        })
    }
}
