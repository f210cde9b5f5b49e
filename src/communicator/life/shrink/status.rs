//! The status of a shrink that a rank publishes at its recovery listener.

use std::fmt;

/// A new communicator: its members, and the round that made it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Completed {
    pub(super) members: Vec<usize>,
    pub(super) leader: usize,
    /// The round's number, by which the leader tells its rounds apart.
    pub(super) round: u64,
}

/// The progress that a rank publishes at its recovery listener.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// The rank leads this round and accepts ranks.
    Open(u64),
    /// The rank is about to close the round.
    Claim(u64),
    /// The round is complete. Its members are these ranks, which now connect.
    Members(u64, Vec<usize>),
    /// The rank leads no round at the moment: a lower rank leads, or the last round failed.
    SteppedBack,
    /// The rank has found that other ranks may have continued.
    Refused,
    /// The rank continues in this communicator.
    Over(Completed),
    /// The rank continues in the communicator that an admission made.
    Grown,
}

/// Returns the key of a rank's status, for a shrink whose keys have this prefix.
pub(super) fn status_key(prefix: &str) -> String {
    format!("{prefix}/status")
}

impl Status {
    pub(super) fn parse(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok()?;
        let mut words = text.split(' ');
        let (kind, mut number) = (words.next()?, || words.next());
        Some(match kind {
            "open" => Self::Open(number()?.parse().ok()?),
            "claim" => Self::Claim(number()?.parse().ok()?),
            "members" => Self::Members(number()?.parse().ok()?, parse(number()?)?),
            "stepped-back" => Self::SteppedBack,
            "refused" => Self::Refused,
            "over" => Self::Over(Completed { members: parse(number()?)?, leader: number()?.parse().ok()?, round: number()?.parse().ok()? }),
            "grown" => Self::Grown,
            _ => return None,
        })
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(round) => write!(f, "open {round}"),
            Self::Claim(round) => write!(f, "claim {round}"),
            Self::Members(round, members) => write!(f, "members {round} {}", list(members.iter())),
            Self::SteppedBack => f.write_str("stepped-back"),
            Self::Refused => f.write_str("refused"),
            Self::Over(Completed { members, leader, round }) => write!(f, "over {} {leader} {round}", list(members.iter())),
            Self::Grown => f.write_str("grown"),
        }
    }
}

/// Writes ranks for a store: in decimal, separated by commas.
pub(super) fn list<'a>(ranks: impl Iterator<Item = &'a usize>) -> String {
    ranks.map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// Parses the output of [`list`].
pub(super) fn parse(text: &str) -> Option<Vec<usize>> {
    text.split(',').filter(|rank| !rank.is_empty()).map(|rank| rank.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_at_a_recovery_listener_is_understood() {
        let said = [
            Status::Open(3),
            Status::Claim(4),
            Status::Members(1, vec![0, 2, 11]),
            Status::SteppedBack,
            Status::Refused,
            Status::Over(Completed { members: vec![7, 9], leader: 9, round: 2 }),
            Status::Grown,
        ];
        for status in said {
            assert_eq!(Status::parse(status.to_string().as_bytes()), Some(status));
        }
        for nonsense in
            ["", "open", "open x", "members 1", "members 1 2,x", "over -1", "over 1,2", "over 1,2 1", "over 1,2 1 x", "\u{fffd}"]
        {
            assert_eq!(Status::parse(nonsense.as_bytes()), None, "{nonsense}");
        }
    }
}
