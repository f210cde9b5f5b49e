//! What only some ranks could do, told to all.

use crate::communicator::Communicator;
use crate::error::{Error, Result};

/// Fails on every rank where `mine` failed on one: there with its own error, elsewhere with one that names the first such rank and its
/// reason. Collective.
pub(super) fn everywhere<R>(comm: &Communicator, what: &str, mine: Result<R>) -> Result<R> {
    if comm.world_size() == 1 {
        return mine;
    }
    let told = first_failure(comm, mine.as_ref().err());
    // Its own error says more than that the others cannot be told of it.
    let done = mine?;
    match told? {
        None => Ok(done),
        Some((rank, reason)) => Err(Error::io(format!("{what} on {}", comm.peers()[rank]), std::io::Error::other(reason))),
    }
}

/// The first rank that failed, and its error in words.
fn first_failure(comm: &Communicator, mine: Option<&Error>) -> Result<Option<(usize, String)>> {
    let mine = mine.map(Error::to_string).unwrap_or_default();
    let mut lengths = vec![0_u64; comm.world_size()];
    comm.all_gather_into(&[mine.len() as u64], &mut lengths)?;
    let Some(rank) = lengths.iter().position(|length| *length > 0) else { return Ok(None) };
    let mut text = if comm.rank() == rank { mine.into_bytes() } else { vec![0; lengths[rank] as usize] };
    comm.broadcast(&mut text, rank)?;
    Ok(Some((rank, String::from_utf8_lossy(&text).into_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_on_some_ranks_fails_on_all_and_names_the_first() {
        let results = Communicator::run_local(3, |comm| {
            let refused = |reason: &str| Error::argument("train", reason);
            let mine = [Ok(7), Err(refused("no room")), Err(refused("no device"))][comm.rank()].clone();
            let error = everywhere(comm, "making buckets", mine).unwrap_err().to_string();
            assert_eq!(everywhere(comm, "making buckets", Ok(comm.rank()))?, comm.rank());
            Ok(error)
        });
        let results = results.unwrap();
        assert!(results[0].contains("making buckets on rank 1") && results[0].contains("train: no room"), "{}", results[0]);
        assert_eq!(results[1..], ["train: no room", "train: no device"]);
    }
}
