//! Admissions in a simulated world: newcomers ask while members work, and processes die, sleep and are cut off.

use std::net::SocketAddr;
use std::time::Duration;

use super::world::{Asking, Group, address_of};
use crate::base::deadline::Deadline;
use crate::base::random::Random;
use crate::communicator::life::membership::admission::Admission;
use crate::communicator::life::membership::newcomer::join;
use crate::communicator::life::membership::protocol::Members;
use crate::communicator::life::shrink::protocol::World;
use crate::communicator::life::shrink::tests::exploration::{Exploration, Trouble};
use crate::communicator::life::shrink::tests::world::{Connected, Fate, Partition, Place, Plan, Report, Scenario};
use crate::error::{Error, Result};

/// The number of steps after which a process ends.
const STEPS: u64 = 6;
/// The longest work between two steps.
const WORK: Duration = Duration::from_millis(400);

/// One process: joins if it is a newcomer, then exchanges a number of steps, and admits after each.
fn live(place: &Place, _: usize, plan: &Plan, limit: Duration) -> Result<Connected> {
    let mut comm = if plan.asks.is_empty() {
        place.host()?;
        let first = Connected { members: (0..plan.members).collect(), setup: "first".to_owned() };
        Group::new(place, first, (0..plan.members).collect(), limit)
    } else {
        let addresses: Vec<SocketAddr> = plan.asks.iter().copied().map(address_of).collect();
        let settings = if plan.differs { "other settings" } else { "the settings" };
        join(&Asking { place, timeout: limit, settings }, &addresses, &Deadline::after(4 * limit))?.comm
    };
    let mut step = 0;
    loop {
        place.remember(&comm.connected);
        match comm.exchange(step, limit) {
            Ok(steps) => {
                step = steps.into_iter().max().unwrap_or_default();
                if step == STEPS {
                    return Ok(comm.connected.clone());
                }
                step += 1;
                place.work(WORK);
            }
            Err(error) if comm.has_ended() => drop(error),
            Err(error) => return Err(error),
        }
        comm = Admission::new(comm).run()?.comm;
    }
}

fn draw(random: &mut Random, trouble: Trouble) -> Scenario {
    let (members, newcomers) = (1 + random.below(3), 1 + random.below(3));
    let count = members + newcomers;
    let limit = Duration::from_millis(4000 + random.below(16_000) as u64);
    let mut ranks = vec![Plan { members, ..Plan::default() }; count];
    for (me, plan) in ranks.iter_mut().enumerate() {
        plan.begins = random.time(Duration::from_millis(5));
        if me >= members {
            plan.asks = (0..count).filter(|other| *other != me && random.once_in(if *other < members { 2 } else { 4 })).collect();
            plan.asks.push(random.below(members));
            plan.begins = if random.once_in(2) { plan.begins } else { random.time(Duration::from_secs(3)) };
            plan.differs = random.once_in(10);
        }
        let early = random.once_in(2);
        let at = 1 + random.below(if early { 100 } else { 600 });
        match random.below(8) {
            0 | 1 if trouble.deaths => plan.fates.push((at, Fate::Dies)),
            2 | 3 if trouble.sleeps => {
                let time = random.time(limit * 2);
                plan.fates.push((at, Fate::SleepsFor(time)));
            }
            _ => {}
        }
    }
    let from = random.time(limit);
    let until = if random.once_in(2) { Duration::MAX } else { from + random.time(limit) };
    let cut = trouble.partitions.then(|| Partition { from, until, side: 1 + random.below((1 << count) - 2) as u32 });
    Scenario { ranks, cut, limit }
}

/// Returns a description of what is wrong with the outcome, if anything is.
fn complaint(scenario: &Scenario, trouble: Trouble, report: &Report) -> Option<String> {
    let ended = || report.outcomes.iter().enumerate().filter_map(|(process, outcome)| Some((process, &outcome.as_ref()?.1)));
    let strange = |process: usize, error: &Error| match error {
        // After three attempts that failed, a process is refused.
        Error::Conflict { .. } => !scenario.ranks[process].differs && !trouble.deaths && !trouble.sleeps && !trouble.partitions,
        Error::LeftBehind { .. } | Error::Timeout { .. } => false,
        Error::Aborted { .. } | Error::PeerLost { .. } => !trouble.sleeps && !trouble.partitions,
        _ => true,
    };
    if let Some((process, Err(error))) = ended().find(|(process, result)| result.as_ref().is_err_and(|error| strange(*process, error))) {
        return Some(format!("process {process} failed: {error}"));
    }
    let continued: Vec<(usize, &Connected)> = ended().filter_map(|(process, result)| Some((process, result.as_ref().ok()?))).collect();
    for (index, (one, theirs)) in continued.iter().enumerate() {
        let members: Vec<usize> = theirs.members.iter().copied().filter(|process| *process < scenario.ranks[0].members).collect();
        if !theirs.members.contains(one) || !members.is_sorted() || !theirs.members.starts_with(&members) {
            return Some(format!("process {one} continued as one of {:?}", theirs.members));
        }
        for (other, others) in &continued[..index] {
            // If a process has completed its last exchange, the others were in the same communicator. Some may have seen an
            // error, and continued in another one.
            if !leads_to(report, theirs, others) && !leads_to(report, others, theirs) {
                return Some(format!("processes {one} and {other} continued in different communicators"));
            }
        }
    }
    let is_calm = !trouble.sleeps && !trouble.partitions;
    let is_member = |process: usize| process < scenario.ranks[0].members;
    if is_calm && !trouble.deaths {
        let is_early = |process: usize| scenario.ranks[process].begins < Duration::from_millis(10) && !scenario.ranks[process].differs;
        let fails = ended().find(|(process, result)| (is_member(*process) || is_early(*process)) && result.is_err());
        return fails.map(|(process, result)| format!("process {process} did not continue: {result:?}"));
    }
    if is_calm && let Some((process, Err(error))) = ended().find(|(_, result)| matches!(result, Err(Error::LeftBehind { .. }))) {
        return Some(format!("process {process} lives, and was left behind: {error}"));
    }
    if is_calm && continued.is_empty() && (0..report.lives.len()).any(|process| is_member(process) && report.lives[process]) {
        return Some("a member lives, and nobody has continued".to_owned());
    }
    None
}

/// Whether processes went from one communicator to the other, directly or over further ones.
fn leads_to(report: &Report, from: &Connected, to: &Connected) -> bool {
    let mut reached = vec![from];
    let mut next = 0;
    while let Some(one) = reached.get(next).copied() {
        for pair in report.histories.iter().flat_map(|history| history.windows(2)) {
            if pair[0] == *one && !reached.contains(&&pair[1]) {
                reached.push(&pair[1]);
            }
        }
        next += 1;
    }
    reached.contains(&to)
}

const ADMITTING: Exploration =
    Exploration { usually: 500, variable: "COLLECTIVES_ADMISSIONS", bound: Duration::from_secs(3600), program: live, draw, complaint };

fn explore(name: &str, trouble: Trouble) {
    let tally = ADMITTING.explore(name, trouble);
    assert!(tally.newcomers_admitted > 0, "no newcomer was admitted: {tally:?}");
}

const DEATHS: Trouble = Trouble { deaths: true, sleeps: false, partitions: false };

/// A newcomer died while the ranks connected after a shrink. Another rank had continued, and died too.
#[test]
fn a_member_is_not_left_behind_by_ranks_that_are_gone() {
    ADMITTING.run_seed(DEATHS, 1_012_598);
}

#[test]
fn newcomers_without_trouble_are_all_admitted() {
    explore("no trouble", Trouble { deaths: false, sleeps: false, partitions: false });
}

#[test]
fn those_who_outlive_the_others_continue_together() {
    explore("deaths", DEATHS);
}

#[test]
fn sleepers_do_not_split_a_job_that_grows() {
    explore("sleeps", Trouble { deaths: true, sleeps: true, partitions: false });
}

#[test]
fn those_cut_off_do_not_split_a_job_that_grows() {
    explore("cuts", Trouble { deaths: true, sleeps: false, partitions: true });
}
