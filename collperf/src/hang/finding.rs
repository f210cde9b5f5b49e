//! The possible findings.

use super::file::{Backend, State};

/// One finding in the records of a communicator.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Finding {
    /// Other ranks have lost this rank, and it left no record.
    Died { rank: usize, witnesses: Vec<usize>, call: Option<String> },
    /// These ranks left no record, and no rank reports them lost. `waiters` wait for them.
    NoRecord { ranks: Vec<usize>, waiters: Vec<usize> },
    /// The processes of these ranks did not answer, for this reason. `waiters` wait for them.
    Silent { ranks: Vec<usize>, reason: String, waiters: Vec<usize> },
    /// Ranks have made different calls with the same number. `versions` has each call, and the ranks that made it.
    Diverged { backend: Backend, number: u64, versions: Vec<(String, Vec<usize>)> },
    /// A rank has not reached a call in which other ranks wait.
    Behind {
        backend: Backend,
        rank: usize,
        call: String,
        waiting: Vec<usize>,
        seconds: f64,
        /// Its last call, and its progress.
        last: Option<(String, State)>,
        /// Whether the rank has started the call in the background, behind other calls.
        has_scheduled: bool,
        /// The call on another communicator in which its process is stuck.
        elsewhere: Option<String>,
    },
    /// All ranks are in the same call.
    AllWaiting { call: String, awaited: Vec<(usize, Vec<usize>)> },
    /// All ranks have queued this call on their devices, and it has not ended on the devices of `ranks`.
    OnDevice { call: String, ranks: Vec<usize>, seconds: f64 },
    /// A message waits. `answer` is whether the peer has started the matching call; `None` if there is no record of the
    /// peer.
    Message { rank: usize, message: String, peer: Option<usize>, answer: Option<bool> },
    /// Other ranks have lost this rank, but it wrote a record.
    EndedEarly { rank: usize, witnesses: Vec<usize>, reason: String },
    /// Nothing is wrong up to the call with the number `last`.
    Nothing { last: Option<u64> },
}

/// Lists ranks: `rank 3`, `ranks 0-2, 5`.
pub(crate) fn list(ranks: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *rank => *last = *rank,
            _ => runs.push((*rank, *rank)),
        }
    }
    let run = |(first, last): &(usize, usize)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}-{last}"),
    };
    let said = runs.iter().map(run).collect::<Vec<_>>().join(", ");
    match ranks.len() {
        0 => "no rank".to_owned(),
        1 => format!("rank {said}"),
        _ => format!("ranks {said}"),
    }
}
