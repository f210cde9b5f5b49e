//! What ranks must agree on before they train together, and what only some of them could do, told to all.

use sha2::{Digest, Sha256};

use crate::communicator::Communicator;
use crate::error::{Error, Result};

/// What each rank lists, one line for each: parameters, or calls.
#[derive(Default)]
pub(super) struct Listed {
    /// What the lines are, in the plural.
    pub(super) noun: &'static str,
    /// Without line ends.
    pub(super) lines: Vec<String>,
}

impl Listed {
    /// One line for each parameter.
    pub(super) fn parameters<P: std::fmt::Display>(parameters: &[P]) -> Self {
        let lines = parameters.iter().enumerate().map(|(index, parameter)| format!("parameter {index} {parameter}")).collect();
        Self { noun: "parameters", lines }
    }
}

/// Refuses ranks that differ in `what` they make, in what they list, or in `settings`: in words, what else decides which calls are made.
/// Collective.
pub(super) fn agree(comm: &Communicator, what: &str, listed: &Listed, settings: &str) -> Result<()> {
    if comm.world_size() == 1 {
        return Ok(());
    }
    let mine = text(what, listed, settings);
    let digest: [u8; 32] = Sha256::digest(mine.as_bytes()).into();
    let mut all = vec![([0; 32], 0).into_plain(); comm.world_size()];
    comm.all_gather_into(&[(digest, mine.len() as u64).into_plain()], &mut all)?;
    let Some(other) = all.iter().position(|theirs| *theirs != all[0]) else { return Ok(()) };
    let told = |rank: usize| {
        let mut text = if comm.rank() == rank { mine.clone().into_bytes() } else { vec![0; length(&all[rank])] };
        comm.broadcast(&mut text, rank).map(|()| String::from_utf8_lossy(&text).into_owned())
    };
    let (first, second) = (told(0)?, told(other)?);
    let (first_call, second_call) = first_difference(&first, &second, listed.noun);
    Err(Error::Mismatch { first: comm.peers()[0].clone(), first_call, second: comm.peers()[other].clone(), second_call })
}

/// A digest and a length as they travel.
trait IntoPlain {
    fn into_plain(self) -> [u8; 40];
}

impl IntoPlain for ([u8; 32], u64) {
    fn into_plain(self) -> [u8; 40] {
        let mut plain = [0; 40];
        plain[..32].copy_from_slice(&self.0);
        plain[32..].copy_from_slice(&self.1.to_le_bytes());
        plain
    }
}

/// The length in it.
fn length(plain: &[u8; 40]) -> usize {
    plain[32..].iter().rev().fold(0, |length, byte| length << 8 | usize::from(*byte))
}

/// One line for what is made, one for the settings, and those that are listed; debug forms hold no line ends.
fn text(what: &str, listed: &Listed, settings: &str) -> String {
    let mut text = format!("{what}\n{settings}\n");
    listed.lines.iter().for_each(|line| text.extend([line, "\n"]));
    text
}

/// What each made, and the first of the other lines that differ, in words.
fn first_difference(first: &str, second: &str, noun: &str) -> (String, String) {
    let ((first_what, first), (second_what, second)) = (split(first), split(second));
    let (first, second) = match first == second {
        true => (split(first).0.to_owned(), split(second).0.to_owned()),
        false => first_different_line(first, second, noun),
    };
    (format!("{first_what} with {first}"), format!("{second_what} with {second}"))
}

/// The first line, and the others.
fn split(text: &str) -> (&str, &str) {
    text.split_once('\n').unwrap_or((text, ""))
}

fn first_different_line(first: &str, second: &str, noun: &str) -> (String, String) {
    let count = |text: &str| text.lines().count() - 1;
    let mut pairs = first.lines().zip(second.lines());
    match pairs.find(|(a, b)| a != b) {
        Some((a, b)) => (a.to_owned(), b.to_owned()),
        None => {
            let longer = if first.len() > second.len() { first } else { second };
            let surplus = longer.lines().nth(count(first).min(count(second)) + 1).unwrap_or_default();
            let said = |text: &str| match text == longer {
                true => format!("{} {noun}, of which the other has not {surplus}", count(text)),
                false => format!("{} {noun}", count(text)),
            };
            (said(first), said(second))
        }
    }
}

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
