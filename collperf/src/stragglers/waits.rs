//! Measures the time that ranks spent waiting for a core that another process used. This time counts against the host,
//! not against a rank.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;

use super::blame::Blame;

/// A rank's work in one round, in microseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Round {
    pub(super) took: f64,
    /// The part of it in which the rank waited for a core.
    pub(super) waited: f64,
}

impl Round {
    /// Returns the time that the rank itself took.
    pub(super) fn own(&self) -> f64 {
        self.took - self.waited
    }
}

/// The time for which the calling thread has waited for a core, as the kernel counts it.
pub(super) struct Waited(Option<File>);

impl Waited {
    pub(super) fn new() -> Self {
        Self(File::open("/proc/thread-self/schedstat").ok())
    }

    /// Returns this time in microseconds; 0 if the kernel does not report it.
    pub(super) fn so_far(&self) -> f64 {
        let mut text = [0; 96];
        let length = self.0.as_ref().and_then(|file| file.read_at(&mut text, 0).ok()).unwrap_or(0);
        let words = std::str::from_utf8(&text[..length]).unwrap_or_default();
        words.split_whitespace().nth(1).and_then(|nanoseconds| nanoseconds.parse::<f64>().ok()).unwrap_or(0.0) / 1e3
    }
}

/// How much ranks waited, and whether the ranks of one host cost the others time in this way.
pub(super) struct Waits {
    /// Each host's name, and the fraction of its ranks' time that they waited.
    hosts: Vec<(String, f64)>,
    blame: Blame,
}

/// The least fraction that is reported.
const TOLD: f64 = 0.02;

impl Waits {
    /// Evaluates the rounds of all ranks; `hosts` has the name of each rank's host.
    pub(super) fn new(hosts: &[String], rounds: &[Vec<Round>], threshold: f64) -> Self {
        let mut names: Vec<&String> = Vec::new();
        for host in hosts {
            if !names.contains(&host) {
                names.push(host);
            }
        }
        let of = |name: &String| hosts.iter().zip(rounds).filter(|(host, _)| *host == name).map(|(_, rounds)| rounds).collect::<Vec<_>>();
        let waited = |name: &String| {
            let all = of(name).into_iter().flatten().fold((0.0, 0.0), |(took, waited), round| (took + round.took, waited + round.waited));
            if all.0 > 0.0 { all.1 / all.0 } else { 0.0 }
        };
        // A host has finished when the last of its ranks has.
        let last = |name: &String| {
            let ranks = of(name);
            let count = ranks.iter().map(|rounds| rounds.len()).min().unwrap_or(0);
            (0..count).map(|round| ranks.iter().map(|rounds| rounds[round].took).fold(0.0, f64::max)).collect::<Vec<f64>>()
        };
        let times: Vec<Vec<f64>> = names.iter().map(|name| last(name)).collect();
        let blame = Blame::new(names.iter().map(|name| (*name).clone()).collect(), &times, threshold);
        Self { hosts: names.into_iter().map(|name| (name.clone(), waited(name))).collect(), blame }
    }

    /// Returns the host whose ranks the others wait for because it has too few cores. The rule is the same as for a
    /// rank.
    pub(super) fn straggler(&self) -> Option<usize> {
        self.blame.straggler().filter(|host| self.hosts.len() > 1 && self.hosts[*host].1 >= TOLD)
    }
}

impl fmt::Display for Waits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, part) in self.hosts.iter().filter(|(_, part)| *part >= TOLD) {
            let percent = part * 100.0;
            writeln!(
                f,
                "# note: on {name}, ranks waited {percent:.0}% of the time for a core that another program used; this time is not \
                 counted above"
            )?;
        }
        match self.straggler() {
            Some(host) => {
                writeln!(
                    f,
                    "# The other hosts wait for {}: this host has too few cores for its ranks and for the other programs on it",
                    self.hosts[host].0
                )
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(took: f64, waited: f64) -> Vec<Round> {
        vec![Round { took, waited }; 40]
    }

    #[test]
    fn a_host_that_has_too_few_cores_is_named_and_its_ranks_are_not() {
        let hosts = ["a", "a", "b", "b"].map(str::to_owned);
        let all = [rounds(100.0, 0.0), rounds(101.0, 0.0), rounds(300.0, 200.0), rounds(250.0, 150.0)];
        let waits = Waits::new(&hosts, &all, 0.1);
        assert_eq!(waits.straggler(), Some(1));
        let own: Vec<Vec<f64>> = all.iter().map(|rank| rank.iter().map(Round::own).collect()).collect();
        assert_eq!(Blame::new(hosts.to_vec(), &own, 0.1).straggler(), None);
        let text = waits.to_string();
        assert!(text.contains("# note: on b, ranks waited 64% of the time") && text.contains("# The other hosts wait for b: "), "{text}");
        assert!(!text.contains("on a,"), "{text}");
        // With one host there are no others.
        let waits = Waits::new(&["b", "b"].map(str::to_owned), &all[2..], 0.1);
        assert!(waits.straggler().is_none() && waits.to_string().contains("# note: on b,"));
    }

    #[test]
    fn the_kernel_counts_what_a_thread_waits() {
        let waited = Waited::new();
        let before = waited.so_far();
        assert!(before >= 0.0 && waited.so_far() >= before);
        assert_eq!(Waited(None).so_far(), 0.0);
    }
}
