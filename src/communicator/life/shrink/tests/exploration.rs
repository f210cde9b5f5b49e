//! Explorations: scenarios that are drawn from seeds, played in the simulated world, and judged.

use std::time::Duration;

use super::world::{Program, Report, Scenario, play};
use crate::base::random::Random;
use crate::error::Error;

/// The kinds of trouble that a scenario may have.
#[derive(Debug, Clone, Copy)]
pub(in crate::communicator::life) struct Trouble {
    pub(in crate::communicator::life) deaths: bool,
    pub(in crate::communicator::life) sleeps: bool,
    pub(in crate::communicator::life) partitions: bool,
}

/// A protocol in the simulated world, and what is expected of it.
pub(in crate::communicator::life) struct Exploration {
    /// The number of scenarios for each kind of trouble by default.
    pub(in crate::communicator::life) usually: u64,
    /// The environment variable that sets another number.
    pub(in crate::communicator::life) variable: &'static str,
    /// The longest that a scenario may take, by its simulated clock.
    pub(in crate::communicator::life) bound: Duration,
    pub(in crate::communicator::life) program: Program,
    /// Draws a scenario.
    pub(in crate::communicator::life) draw: fn(&mut Random, Trouble) -> Scenario,
    /// Returns a description of what is wrong with the outcome, if anything is.
    pub(in crate::communicator::life) complaint: fn(&Scenario, Trouble, &Report) -> Option<String>,
}

/// The number of processes with each outcome.
#[derive(Debug, Default)]
pub(in crate::communicator::life) struct Tally {
    pub(in crate::communicator::life) continued: usize,
    /// The newcomers among those that continued.
    pub(in crate::communicator::life) newcomers_admitted: usize,
    pub(in crate::communicator::life) left_behind: usize,
    pub(in crate::communicator::life) refused: usize,
    pub(in crate::communicator::life) late: usize,
}

impl Exploration {
    /// Runs scenarios with this trouble. `COLLECTIVES_TEST_SEED` is the seed of the first one.
    pub(in crate::communicator::life) fn explore(&self, name: &str, trouble: Trouble) -> Tally {
        let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
        let now = || std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64);
        let (count, first) = (number(self.variable).unwrap_or(self.usually), number("COLLECTIVES_TEST_SEED").unwrap_or_else(now));
        println!("{name}: {count} scenarios from COLLECTIVES_TEST_SEED={first}");
        let mut tally = Tally::default();
        for seed in (0..count).map(|step| first.wrapping_add(step)) {
            tally.count(&self.run_seed(trouble, seed));
        }
        println!("{name}: {tally:?}");
        tally
    }

    /// Runs the scenario of one seed, in the order of this seed.
    pub(in crate::communicator::life) fn run_seed(&self, trouble: Trouble, seed: u64) -> Report {
        self.run(&(self.draw)(&mut Random(seed), trouble), trouble, seed)
    }

    /// Runs one scenario in one order. Panics, with everything that happened, if something is wrong.
    pub(in crate::communicator::life) fn run(&self, scenario: &Scenario, trouble: Trouble, seed: u64) -> Report {
        let (report, complaint) = match play(scenario, seed, self.bound, self.program) {
            Ok(report) => {
                let complaint = (self.complaint)(scenario, trouble, &report);
                (report, complaint)
            }
            Err(report) => (report, Some("it did not end".to_owned())),
        };
        if let Some(complaint) = complaint {
            panic!("seed {seed}: {complaint}\n{scenario:#?}\n{}", report.log.join("\n"));
        }
        report
    }
}

impl Tally {
    fn count(&mut self, report: &Report) {
        for (process, outcome) in report.outcomes.iter().enumerate() {
            let Some((_, result)) = outcome else { continue };
            match result {
                Ok(_) => self.continued += 1,
                Err(Error::LeftBehind { .. }) => self.left_behind += 1,
                Err(Error::Conflict { .. }) => self.refused += 1,
                Err(_) => self.late += 1,
            }
            self.newcomers_admitted += usize::from(result.is_ok() && report.asked[process]);
        }
    }
}
