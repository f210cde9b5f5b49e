//! The result of one check.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The subject of a check, the finding, and advice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Finding {
    pub(super) state: State,
    pub(super) subject: String,
    pub(super) found: String,
    /// Empty if there is nothing to do.
    pub(super) advice: String,
}

/// A host's name, and what was found there.
pub(super) type OfHost = (String, Vec<Finding>);

/// The state of what was checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum State {
    Good,
    /// Something is missing that some jobs need, or jobs run slower than they could.
    Note,
    /// Jobs fail.
    Bad,
}

impl Finding {
    fn new(state: State, subject: &str, found: impl fmt::Display, advice: &str) -> Self {
        Self { state, subject: subject.to_owned(), found: found.to_string(), advice: advice.to_owned() }
    }

    pub(super) fn good(subject: &str, found: impl fmt::Display) -> Self {
        Self::new(State::Good, subject, found, "")
    }

    pub(super) fn note(subject: &str, found: impl fmt::Display, advice: &str) -> Self {
        Self::new(State::Note, subject, found, advice)
    }

    pub(super) fn bad(subject: &str, found: impl fmt::Display, advice: &str) -> Self {
        Self::new(State::Bad, subject, found, advice)
    }

    /// Returns a good finding if `is_enough`, else a note.
    pub(super) fn judged(subject: &str, found: impl fmt::Display, is_enough: bool, advice: &str) -> Self {
        if is_enough { Self::good(subject, found) } else { Self::note(subject, found, advice) }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.state {
            State::Good => "ok",
            State::Note => "note",
            State::Bad => "BAD",
        };
        writeln!(f, "  {word:<4}  {:<22} {}", self.subject, self.found)?;
        if self.advice.is_empty() { Ok(()) } else { writeln!(f, "{:>8}{:<22} -> {}", "", "", self.advice) }
    }
}
