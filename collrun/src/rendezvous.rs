//! torchrun's words for hosts that meet: how many, and how long they wait for each other.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The largest accepted number of hosts.
const MOST: u16 = 4096;
/// torchrun's defaults.
const LAST_CALL: Duration = Duration::from_secs(30);
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEP_ALIVE_ATTEMPTS: u32 = 3;
/// How long the other hosts may take to start: as long as torchrun allows.
const JOIN: Duration = Duration::from_secs(1800);

/// The number of hosts of a job, or the least and the largest number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Nodes {
    pub(crate) least: u16,
    pub(crate) most: u16,
}

impl Nodes {
    /// Whether the number of hosts may change while the job runs.
    pub(crate) fn is_range(self) -> bool {
        self.least != self.most
    }
}

impl FromStr for Nodes {
    type Err = String;

    /// Reads `2` or `1:4`.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected a number of hosts from 1 to {MOST}, or a range, as in 1:4");
        let count = |text: &str| text.parse().ok().filter(|count| (1..=MOST).contains(count)).ok_or_else(wrong);
        let (least, most) = text.split_once(':').unwrap_or((text, text));
        let nodes = Self { least: count(least)?, most: count(most)? };
        if nodes.least > nodes.most { Err(format!("{} is more than {}: give the smaller number first", least, most)) } else { Ok(nodes) }
    }
}

/// Formats the number as on the command line.
impl fmt::Display for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_range() { write!(f, "{}:{}", self.least, self.most) } else { write!(f, "{}", self.most) }
    }
}

/// The settings of `--rdzv-conf`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Conf {
    /// How long the other hosts may take to start.
    pub(crate) join: Duration,
    /// How long an elastic job waits for more hosts, once the smallest number is there.
    pub(crate) last_call: Duration,
    keep_alive_interval: Duration,
    keep_alive_attempts: u32,
}

impl Default for Conf {
    fn default() -> Self {
        Self { join: JOIN, last_call: LAST_CALL, keep_alive_interval: KEEP_ALIVE_INTERVAL, keep_alive_attempts: KEEP_ALIVE_ATTEMPTS }
    }
}

impl Conf {
    /// Returns how long a host of an elastic job may be silent before it counts as lost.
    pub(crate) fn lost_after(&self) -> Duration {
        self.keep_alive_interval.saturating_mul(self.keep_alive_attempts)
    }
}

impl FromStr for Conf {
    type Err = String;

    /// Reads `join_timeout=600,last_call_timeout=30`.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut conf = Self::default();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let wrong = || {
                format!(
                    "{pair:?}: expected join_timeout=SECONDS, timeout=SECONDS, last_call_timeout=SECONDS, keep_alive_interval=SECONDS or \
                     keep_alive_max_attempt=N; no other setting is supported"
                )
            };
            let (key, value) = pair.split_once('=').ok_or_else(wrong)?;
            match key.trim() {
                "join_timeout" | "timeout" => conf.join = seconds(value)?,
                "last_call_timeout" => conf.last_call = seconds(value)?,
                "keep_alive_interval" => conf.keep_alive_interval = seconds(value)?,
                "keep_alive_max_attempt" => {
                    let attempts = value.trim().parse().ok().filter(|attempts| *attempts > 0);
                    conf.keep_alive_attempts = attempts.ok_or_else(|| format!("{pair:?}: expected a number from 1"))?;
                }
                _ => return Err(wrong()),
            }
        }
        let lost_after = conf.lost_after();
        if lost_after < Duration::from_secs(1) {
            return Err(format!(
                "a host would count as lost after {lost_after:?}; keep_alive_interval times keep_alive_max_attempt must be at least 1 s"
            ));
        }
        Ok(conf)
    }
}

/// The longest time that can be set: about 30 years. Sums of times do not overflow.
const LONGEST: Duration = Duration::from_secs(1_000_000_000);

/// Reads a time in seconds, fractions allowed.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.trim().parse().map_err(|_| format!("{text:?}: expected a number of seconds"))?;
    let time = Duration::try_from_secs_f64(seconds).map_err(|error| format!("{text:?}: {error}"))?;
    if time > LONGEST { Err(format!("{text:?}: expected at most {} seconds", LONGEST.as_secs())) } else { Ok(time) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_hosts_are_numbers_or_ranges() {
        assert_eq!("3".parse(), Ok(Nodes { least: 3, most: 3 }));
        assert_eq!("1:4".parse(), Ok(Nodes { least: 1, most: 4 }));
        assert_eq!(["2:2", "1:4"].map(|text| text.parse::<Nodes>().unwrap().to_string()), ["2", "1:4"]);
        for wrong in ["", "0", "0:2", "2:1", "2:", ":2", "1:2:3", "1:5000", "-1:2"] {
            assert!(wrong.parse::<Nodes>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn settings_of_the_rendezvous_are_torchrun_s() {
        let conf: Conf = "join_timeout=600,last_call_timeout=0.5, keep_alive_interval=2,keep_alive_max_attempt=4".parse().unwrap();
        assert_eq!((conf.join.as_secs(), conf.last_call.as_millis(), conf.lost_after().as_secs()), (600, 500, 8));
        let usual: Conf = "timeout=20".parse().unwrap();
        assert_eq!((usual.join.as_secs(), usual.last_call.as_secs(), usual.lost_after().as_secs()), (20, 30, 15));
        for wrong in ["is_host=1", "join_timeout", "join_timeout=x", "keep_alive_max_attempt=0", "keep_alive_interval=0"] {
            assert!(wrong.parse::<Conf>().is_err(), "{wrong}");
        }
    }
}
