//! Reports failures to the user.

use collectives_launch::{Failure, Refused, say};

/// Refuses a command line that cannot be executed.
pub(crate) fn usage(message: String) -> Refused {
    Refused { message, code: 2 }
}

/// Prints which rank failed first, and writes it to the error file of the launcher that started this one, as torchrun
/// does.
pub(crate) fn tell_user(failure: &Failure) {
    say("collrun", &format!("first failure: {failure}"));
    let _ = collectives::record_failure(|| Err::<(), _>(failure));
}
