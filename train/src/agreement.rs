//! Checks that ranks agree on what they are about to do, and reports one rank's failure to all.

use sha2::{Digest, Sha256};

use collectives::Communicator;
use collectives::{Error, Result};

/// If the ranks' lists differ, at most this many bytes of each list are sent, even if a rank reports a longer list.
const LONGEST_LIST: usize = 16 << 20;
/// At most this many bytes of an error are sent.
const LONGEST_REASON: usize = 64 << 10;

/// The items that each rank lists, one line for each: parameters, or calls.
#[derive(Default)]
pub(super) struct Listed {
    /// A plural noun for the things that the lines describe.
    pub(super) noun: &'static str,
    /// The lines, without line ends.
    pub(super) lines: Vec<String>,
}

impl Listed {
    /// Lists one line for each parameter.
    pub(super) fn parameters<P: std::fmt::Display>(parameters: &[P]) -> Self {
        let lines = parameters.iter().enumerate().map(|(index, parameter)| format!("parameter {index} {parameter}")).collect();
        Self { noun: "parameters", lines }
    }
}

/// Refuses ranks that differ in `what` they make, in their lists, or in their settings. `settings` describes in words
/// everything else that affects which calls are made. Collective.
pub(super) fn agree(comm: &Communicator, what: &str, listed: &Listed, settings: &str) -> Result<()> {
    if comm.world_size() == 1 {
        return Ok(());
    }
    let mine = text(what, listed, settings);
    let digest: [u8; 32] = Sha256::digest(mine.as_bytes()).into();
    let mut all = vec![([0; 32], 0).into_plain(); comm.world_size()];
    comm.all_gather_into(&[(digest, mine.len() as u64).into_plain()], &mut all)?;
    let Some(other) = all.iter().position(|theirs| *theirs != all[0]) else { return Ok(()) };
    let told = |rank: usize| tell(comm, rank, mine.as_bytes(), length(&all[rank]), LONGEST_LIST);
    let (first, second) = (told(0)?, told(other)?);
    let (first_call, second_call) = first_difference(&first, &second, listed.noun);
    Err(Error::Mismatch { first: comm.peers()[0].clone(), first_call, second: comm.peers()[other].clone(), second_call })
}

/// Sends the text of `rank` to all ranks, at most its first `longest` bytes, and returns what was sent. `mine` is the
/// calling rank's own text; `length` is the number of bytes of the text of `rank`. Collective.
fn tell(comm: &Communicator, rank: usize, mine: &[u8], length: u64, longest: usize) -> Result<String> {
    // Every rank has the same lengths.
    let length = usize::try_from(length).unwrap_or(usize::MAX).min(longest);
    let mut text = vec![0; length];
    if comm.rank() == rank {
        text.copy_from_slice(&mine[..length]);
    }
    comm.broadcast(&mut text, rank)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// A digest and a length, in the form in which they are sent.
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

/// Returns the length from the bytes that encode a digest and a length.
fn length(plain: &[u8; 40]) -> u64 {
    plain[32..].iter().rev().fold(0, |length, byte| length << 8 | u64::from(*byte))
}

/// Returns a text with one line for the call, one line for the settings, and then the listed lines. Names and options
/// are in their debug form, which contains no line ends.
fn text(what: &str, listed: &Listed, settings: &str) -> String {
    let mut text = format!("{what}\n{settings}\n");
    listed.lines.iter().for_each(|line| text.extend([line, "\n"]));
    text
}

/// Compares the texts of two ranks, and returns one description of each text. A description names the rank's call, and
/// quotes the first later line that differs between the two texts.
fn first_difference(first: &str, second: &str, noun: &str) -> (String, String) {
    let ((first_what, first), (second_what, second)) = (split(first), split(second));
    let (first, second) = match first == second {
        true if first_what == second_what => {
            let behind = format!("{noun} that differ after the first {} MiB of their list", LONGEST_LIST >> 20);
            (behind.clone(), behind)
        }
        true => (split(first).0.to_owned(), split(second).0.to_owned()),
        false => first_different_line(first, second, noun),
    };
    (format!("{first_what} with {first}"), format!("{second_what} with {second}"))
}

/// Splits a text into its first line and the rest.
fn split(text: &str) -> (&str, &str) {
    text.split_once('\n').unwrap_or((text, ""))
}

fn first_different_line(first: &str, second: &str, noun: &str) -> (String, String) {
    // The line of the settings is not counted. A rank need not have sent it.
    let count = |text: &str| text.lines().count().saturating_sub(1);
    let mut pairs = first.lines().zip(second.lines());
    match pairs.find(|(a, b)| a != b) {
        Some((a, b)) => (a.to_owned(), b.to_owned()),
        None => {
            let longer = if first.len() > second.len() { first } else { second };
            let surplus = longer.lines().nth(count(first).min(count(second)) + 1).unwrap_or_default();
            let said = |text: &str| match text == longer {
                true => format!("{} {noun}, including {surplus}, which the other rank does not have", count(text)),
                false => format!("{} {noun}", count(text)),
            };
            (said(first), said(second))
        }
    }
}

/// Fails on every rank if `mine` is an error on any rank. A failing rank gets its own error; the others get one that
/// names the first failing rank and its reason. Collective.
pub(super) fn everywhere<R>(comm: &Communicator, what: &str, mine: Result<R>) -> Result<R> {
    if comm.world_size() == 1 {
        return mine;
    }
    let told = first_failure(comm, mine.as_ref().err());
    // This rank's own error is more useful than a failure to report it to the others.
    let done = mine?;
    match told? {
        None => Ok(done),
        Some((rank, reason)) => Err(Error::io(format!("{what} on {}", comm.peers()[rank]), std::io::Error::other(reason))),
    }
}

/// Returns the lowest rank that failed, and its error message. Returns `None` if no rank failed.
fn first_failure(comm: &Communicator, mine: Option<&Error>) -> Result<Option<(usize, String)>> {
    let mine = mine.map(Error::to_string).unwrap_or_default();
    let mut lengths = vec![0_u64; comm.world_size()];
    comm.all_gather_into(&[mine.len() as u64], &mut lengths)?;
    let Some(rank) = lengths.iter().position(|length| *length > 0) else { return Ok(None) };
    Ok(Some((rank, tell(comm, rank, mine.as_bytes(), lengths[rank], LONGEST_REASON)?)))
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

    #[test]
    fn a_rank_that_says_that_its_text_has_any_length_is_told_from_in_bounds() {
        for length in [u64::MAX, 1 << 40, LONGEST_REASON as u64 + 1] {
            let results = Communicator::run_local(3, |comm| {
                // Rank 1 sends an arbitrary length. The text that others read is no longer than allowed.
                let lie = vec![b'x'; LONGEST_REASON];
                let mine = if comm.rank() == 1 { &lie[..] } else { &[] };
                tell(comm, 1, mine, length, LONGEST_REASON)
            });
            results.unwrap().iter().for_each(|text| assert!(text.len() == LONGEST_REASON && text.bytes().all(|byte| byte == b'x')));
        }
    }

    #[test]
    fn a_rank_that_tells_no_lines_is_told_of_as_one_that_lists_nothing() {
        for lie in ["", "a", "abcde", "\n", "a\n", "a\nb", "Mesh::new\n"] {
            let results = Communicator::run_local(2, |comm| {
                let listed = Listed { noun: "parameters", lines: vec!["first".to_owned()] };
                if comm.rank() == 0 {
                    return agree(comm, "Mesh::new", &listed, "")
                        .map_err(|error| error.to_string())
                        .map_or_else(Ok, |()| Ok(String::new()));
                }
                let mut all = [([0; 32], 0).into_plain(); 2];
                comm.all_gather_into(&[([7; 32], lie.len() as u64).into_plain()], &mut all)?;
                for (rank, said) in all.iter().enumerate() {
                    tell(comm, rank, lie.as_bytes(), length(said), LONGEST_LIST)?;
                }
                Ok(String::new())
            });
            let said = results.unwrap().swap_remove(0);
            assert!(said.contains("rank 0 called Mesh::new with") && said.contains("but rank 1 called"), "{lie:?}: {said}");
        }
    }

    #[test]
    fn errors_and_lists_that_are_too_long_are_told_from_their_beginning() {
        let results = Communicator::run_local(2, |comm| {
            let long = Error::argument("train", "a".repeat(3 * LONGEST_REASON));
            let error = everywhere(comm, "making buckets", if comm.rank() == 1 { Err(long) } else { Ok(()) }).unwrap_err();
            // Lines of 1 MiB. Only the last ones differ, in a part that is not sent.
            let mut lines = vec!["b".repeat((1 << 20) - 1); LONGEST_LIST / (1 << 20)];
            lines.push(format!("rank {}", comm.rank()));
            let differ = agree(comm, "test", &Listed { noun: "parameters", lines }, "plain").unwrap_err();
            Ok((error.to_string().len(), differ.is_mismatch(), differ.to_string()))
        });
        let results = results.unwrap();
        assert!(results[1].0 > 3 * LONGEST_REASON && (LONGEST_REASON..LONGEST_REASON + 1000).contains(&results[0].0));
        for (_, is_mismatch, text) in results {
            assert!(
                is_mismatch && text.contains("with parameters that differ after the first 16 MiB") && text.len() < 1000,
                "{}",
                text.len()
            );
        }
    }
}
