//! What a call is made under, what a look at the other ranks shows, and whether a group's next call may start.

use crate::call::Call;
use crate::deadline::Deadline;
use crate::flight::Flight;
use crate::host::abort_reason::AbortReason;
use crate::host::health::Health;

/// A call's fingerprint in words.
pub(super) type Fingerprint = [u64; 4];

/// What a call of this host is made under: what it is, how long it may take, and what else may end it.
#[derive(Clone, Copy)]
pub(crate) struct CallContext<'a> {
    pub(crate) call: &'a Call,
    pub(crate) deadline: &'a Deadline,
    pub(crate) health: &'a Health,
    pub(crate) recorder: &'a Flight,
}

/// Whether a group's next call may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GroupState {
    /// All steps are done.
    Ready,
    /// The deadline of a barrier passed while others were missing. They will still come to this step, so it is waited for again:
    /// by the same barrier tried once more, or before the next call.
    Unfinished(Fingerprint),
    /// The steps of the ranks have come apart; every call ends at once.
    Ended(AbortReason),
}

/// What a look at all ranks shows.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PollResult {
    /// All have published the step, and agree.
    Complete,
    /// Some have not.
    Behind,
    /// This rank published another call.
    Differs(usize),
}
