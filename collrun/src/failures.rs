//! How this program says that something failed.

use collectives_launch::{Failure, Refused, say};

/// What was asked for cannot be done.
pub(crate) fn usage(message: String) -> Refused {
    Refused { message, code: 2 }
}

/// Says which rank failed first, last of all, and writes it where a launcher or scheduler that started this one looks, as torchrun does.
pub(crate) fn tell_user(failure: &Failure) {
    say("collrun", &format!("first failure: {failure}"));
    let _ = collectives::record_failure(|| Err::<(), _>(failure));
}
