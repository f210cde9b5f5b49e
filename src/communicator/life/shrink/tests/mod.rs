//! Shrinks of two to five ranks in a simulated world: thousands of orders of events, with ranks that die, sleep and
//! are cut off from others.

pub(in crate::communicator::life) mod exploration;
pub(in crate::communicator::life) mod world;

use std::collections::BTreeSet;
use std::time::Duration;

use super::protocol::{Given, Shrinking, Shrunk};
use crate::base::random::Random;
use crate::base::tuning::recovery::PROBE;
use crate::error::{Error, Result};
use exploration::{Exploration, Trouble};
use world::{Connected, Fate, Partition, Place, Plan, Report, Scenario};

fn shrink(place: &Place, me: usize, plan: &Plan, limit: Duration) -> Result<Connected> {
    let given = Given { doubts: plan.doubts.clone(), left: plan.left.clone(), unmet: None };
    match Shrinking::new(place, me, "shrink".to_owned(), limit, given).run()? {
        Shrunk::Into(connected) => Ok(connected),
        Shrunk::Grown(error) => Err(error),
    }
}

fn some_ranks(random: &mut Random, count: usize, but: usize, once_in: usize) -> BTreeSet<usize> {
    (0..count).filter(|rank| *rank != but && random.once_in(once_in)).collect()
}

fn draw(random: &mut Random, trouble: Trouble) -> Scenario {
    let count = 2 + random.below(4);
    let only_cut = trouble.partitions && !trouble.deaths && !trouble.sleeps;
    // With little time, probes of the ranks that do not answer take all of it.
    let least = if only_cut { 20_000 } else { 4000 };
    let limit = Duration::from_millis(least + random.below(16_000) as u64);
    let wrongly = if trouble.sleeps || trouble.partitions { 4 } else { usize::MAX };
    let mut ranks: Vec<Plan> = (0..count).map(|me| Plan { doubts: some_ranks(random, count, me, wrongly), ..Plan::default() }).collect();
    for plan in &mut ranks {
        plan.begins = random.time(Duration::from_millis(if trouble.sleeps { 400 } else { 5 }));
        let early = random.once_in(2);
        let at = 1 + random.below(if early { 40 } else { 300 });
        match random.below(8) {
            0 if trouble.deaths => plan.is_dead = true,
            1 | 2 if trouble.deaths => plan.fates.push((at, Fate::Dies)),
            3 | 4 if trouble.sleeps => {
                let time = random.time(limit * 2);
                plan.fates.push((at, Fate::SleepsFor(time)));
            }
            5 if trouble.sleeps => plan.begins = random.time(limit * 2),
            6 if trouble.sleeps && random.once_in(2) => plan.is_absent = true,
            _ => {}
        }
    }
    for rank in 0..count {
        if ranks[rank].is_absent && random.once_in(2) {
            ranks.iter_mut().enumerate().filter(|(other, _)| *other != rank).for_each(|(_, plan)| plan.left.extend([rank]));
        }
    }
    let from = if random.once_in(2) { Duration::ZERO } else { random.time(limit) };
    let until = if random.once_in(2) { Duration::MAX } else { from + random.time(limit) };
    let cut = trouble.partitions.then(|| Partition { from, until, side: 1 + random.below((1 << count) - 2) as u32 });
    Scenario { ranks, cut, limit }
}

/// Returns the time that a rank may take from its beginning: its limit, the time it slept, one unanswered request at
/// the end, and its last looks at the recovery listeners of ranks that do not answer.
fn latest(scenario: &Scenario, rank: usize) -> Duration {
    let plan = &scenario.ranks[rank];
    let slept: Duration = plan.fates.iter().map(|(_, fate)| if let Fate::SleepsFor(time) = fate { *time } else { Duration::ZERO }).sum();
    plan.begins + slept + scenario.limit + scenario.limit / 4 + Duration::from_secs(4)
}

/// Returns a description of what is wrong with the outcome, if anything is.
fn complaint(scenario: &Scenario, trouble: Trouble, report: &Report) -> Option<String> {
    let through =
        || report.outcomes.iter().enumerate().filter_map(|(rank, outcome)| outcome.as_ref().map(|(at, result)| (rank, *at, result)));
    let formed: Vec<(usize, &Connected)> = through().filter_map(|(rank, _, result)| Some((rank, result.as_ref().ok()?))).collect();
    if let Some((rank, at, _)) = through().find(|(rank, at, _)| *at > latest(scenario, *rank)) {
        return Some(format!("rank {rank} was through at {at:?} only"));
    }
    // A communicator that lacks a member ends at its first call; ranks beyond a network cut cannot know that.
    let went_on = |rank: usize, with: &Connected| formed.iter().any(|(other, outcome)| *other == rank && *outcome == with);
    let is_whole = |with: &Connected| with.members.iter().all(|rank| !report.lives[*rank] || went_on(*rank, with));
    let formed: Vec<_> = formed.iter().copied().filter(|(_, outcome)| !trouble.partitions || is_whole(outcome)).collect();
    for (rank, outcome) in &formed {
        if *outcome != formed[0].1 {
            return Some(format!("ranks {} and {rank} went on in different communicators", formed[0].0));
        }
        if !outcome.members.contains(rank) || !outcome.members.is_sorted() {
            return Some(format!("rank {rank} went on as one of {:?}", outcome.members));
        }
    }
    let strange = |error: &Error| !matches!(error, Error::LeftBehind { .. } | Error::Timeout { .. });
    if let Some((rank, _, Err(error))) = through().find(|(_, _, result)| result.as_ref().is_err_and(strange)) {
        return Some(format!("rank {rank} failed: {error}"));
    }
    // A rank of the larger part that others doubted may be left behind.
    if let Some(larger) = larger_part(scenario, trouble)
        && !formed.iter().any(|(rank, _)| larger.contains(rank))
    {
        return Some(format!("none of ranks {larger:?} went on"));
    }
    // Each living rank goes on with the others.
    let is_calm = !trouble.sleeps && !trouble.partitions;
    let missed = through().find(|(_, _, result)| is_calm && result.is_err());
    missed.map(|(rank, _, _)| format!("rank {rank} lives, and did not go on"))
}

/// Returns the ranks of which some must go on if a cut is the only trouble, and lasts from the beginning to the end.
fn larger_part(scenario: &Scenario, trouble: Trouble) -> Option<Vec<usize>> {
    let Partition { from, until, side } = scenario.cut?;
    let all = 0..scenario.ranks.len();
    if trouble.deaths || trouble.sleeps || from > Duration::ZERO || until < Duration::MAX {
        return None;
    }
    let (here, there): (Vec<usize>, Vec<usize>) = all.partition(|rank| side >> rank & 1 == side & 1);
    // The first part has rank 0.
    Some(if here.len() >= there.len() { here } else { there })
}

const SHRINKING: Exploration =
    Exploration { usually: 3000, variable: "COLLECTIVES_SHRINKS", bound: Duration::from_secs(600), program: shrink, draw, complaint };

#[test]
fn ranks_without_trouble_all_go_on() {
    SHRINKING.explore("no trouble", Trouble { deaths: false, sleeps: false, partitions: false });
}

#[test]
fn whoever_outlives_the_others_goes_on() {
    SHRINKING.explore("deaths", Trouble { deaths: true, sleeps: false, partitions: false });
}

#[test]
fn sleepers_and_late_comers_do_not_split() {
    SHRINKING.explore("sleeps", Trouble { deaths: true, sleeps: true, partitions: false });
}

#[test]
fn the_cut_off_do_not_split() {
    SHRINKING.explore("cuts", Trouble { deaths: true, sleeps: false, partitions: true });
}

#[test]
fn the_larger_part_goes_on_whatever_its_ranks_doubted() {
    SHRINKING.explore("lasting cuts", Trouble { deaths: false, sleeps: false, partitions: true });
}

/// The leader had decided that all continue, and was stopped before it published that it does. The other one continued alone.
#[test]
fn a_leader_that_is_stopped_after_its_decision_sees_that_others_went_on() {
    for at in 20..120 {
        let scenario = sleepers(Duration::from_secs(16), &[Some((at, Duration::from_secs(13))), None]);
        (0..4).for_each(|seed| drop(SHRINKING.run(&scenario, SLEEPS, seed)));
    }
    SHRINKING.run_seed(Trouble { deaths: true, ..SLEEPS }, 3_000_210);
}

/// Some ranks continue after a rank has died while they connected, and die too. The others cannot know who has continued.
#[test]
fn ranks_that_continue_and_die_leave_no_other_rank_behind() {
    const DEATHS: Trouble = Trouble { deaths: true, sleeps: false, partitions: false };
    for seed in 0..2000 {
        let mut random = Random(seed);
        let first = 20 + random.below(80);
        let mut ranks = vec![Plan::default(); 4];
        // The leader, or another member.
        let dies = random.below(2) * 3;
        ranks[dies].fates.push((first, Fate::Dies));
        ranks[1 + random.below(2)].fates.push((first + random.below(60), Fate::Dies));
        SHRINKING.run(&Scenario { ranks, cut: None, limit: Duration::from_secs(20) }, DEATHS, seed);
    }
}

/// Returns how long six ranks take to continue without `silent` others that they have given up and that do not answer.
fn time_without(silent: usize, silent_first: bool, seed: u64) -> Duration {
    let (count, place) = (6 + silent, |rank: usize| if silent_first { rank } else { 5 + silent - rank });
    let gone: BTreeSet<usize> = (0..silent).map(place).collect();
    let plan = |rank: usize| match gone.contains(&rank) {
        true => Plan { is_absent: true, ..Plan::default() },
        false => Plan { doubts: gone.clone(), ..Plan::default() },
    };
    let side = gone.iter().map(|rank| 1 << rank).sum();
    let cut = Some(Partition { from: Duration::ZERO, until: Duration::MAX, side });
    let scenario = Scenario { ranks: (0..count).map(plan).collect(), cut, limit: Duration::from_secs(60) };
    let report = SHRINKING.run(&scenario, Trouble { deaths: false, sleeps: false, partitions: true }, seed);
    let through = report.outcomes.iter().flatten().map(|(at, result)| result.as_ref().map(|_| *at).expect("it continues"));
    through.max().expect("six ranks")
}

#[test]
fn many_silent_ranks_take_no_longer_than_one() {
    for silent_first in [true, false] {
        // The jitter of one run is up to 0.3 s for each request.
        let [one, five] = [1, 5].map(|silent| (0..100).map(|seed| time_without(silent, silent_first, seed)).sum::<Duration>() / 100);
        println!("without one silent rank: {one:?}; without five: {five:?}");
        assert!(five < one + PROBE, "one silent rank: {one:?}; five: {five:?}");
    }
}

/// Makes ranks that begin together. Each falls asleep after a given number of requests to the world.
fn sleepers(limit: Duration, sleeps: &[Option<(usize, Duration)>]) -> Scenario {
    let plan = |sleep: &Option<(usize, Duration)>| Plan {
        fates: sleep.iter().map(|(at, time)| (*at, Fate::SleepsFor(*time))).collect(),
        ..Plan::default()
    };
    Scenario { ranks: sleeps.iter().map(plan).collect(), cut: None, limit }
}

const SLEEPS: Trouble = Trouble { deaths: false, sleeps: true, partitions: false };

/// The leader had closed its round, and looked for others without success. They woke up, found it asleep, and went on.
#[test]
fn a_leader_stopped_while_it_founds_sees_that_others_went_on() {
    for at in 1..400 {
        let mut scenario = sleepers(Duration::from_secs(13), &[Some((7, Duration::from_secs(5))), Some((at, Duration::from_secs(20)))]);
        scenario.ranks[1].doubts.insert(0);
        SHRINKING.run(&scenario, SLEEPS, at as u64);
    }
}

/// Between the claim and the report that the rank goes on, a lower rank wakes up and passes the claim, as it may.
#[test]
fn a_rank_that_wakes_into_a_claim_does_not_split() {
    for seed in 0..400 {
        let time = Duration::from_millis(5000 + 5 * seed);
        SHRINKING.run(&sleepers(Duration::from_secs(7), &[Some((8, time)), None]), SLEEPS, seed);
    }
}

/// A rank waits in a setup whose leader was stopped in the middle.
#[test]
fn a_member_that_waits_for_a_stopped_leader_does_not_go_on_beside_others() {
    for at in 1..300 {
        let leader = Some((at, Duration::from_secs(9)));
        let mut scenario = sleepers(Duration::from_secs(20), &[Some((2, Duration::from_secs(4))), leader, None]);
        scenario.ranks[1].doubts.insert(0);
        scenario.ranks[2].doubts.insert(0);
        SHRINKING.run(&scenario, SLEEPS, at as u64);
    }
}
