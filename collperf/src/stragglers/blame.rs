//! Computes how much time each rank costs the others.

use std::fmt;

use crate::statistics::{Spread, are_most, is_evidence, standing_out};

/// The result of rounds of work.
pub(super) struct Blame {
    ranks: Vec<RankBlame>,
    rounds: usize,
    /// The time of all rounds together, in microseconds. A round takes as long as its last rank.
    total: f64,
    /// The fraction of it that a rank must cost to be named.
    threshold: f64,
    stretches: usize,
}

struct RankBlame {
    name: String,
    work: Option<Spread>,
    /// Rounds in which it was last.
    last: usize,
    /// How much shorter the rounds would have been without it, in microseconds.
    cost: f64,
    /// Stretches of the run in which it cost more than any other rank, and more than the threshold.
    led: usize,
    /// Whether its median was far above the others' in more stretches than chance explains.
    is_slower: bool,
}

/// The number of consecutive stretches into which the run is divided. A single event, however long, affects only a few
/// of them.
const STRETCHES: usize = 12;

/// The ratio of a rank's median to the others' at which the rank is reported even if it costs nothing. If several ranks
/// are slow together, none of them alone costs anything.
const SLOWER: f64 = 1.25;

impl RankBlame {
    fn median(&self) -> f64 {
        self.work.as_ref().map_or(0.0, |work| work.p50)
    }
}

impl Blame {
    /// Evaluates `times`, which has each rank's work in each round, in microseconds.
    pub(super) fn new(names: Vec<String>, times: &[Vec<f64>], threshold: f64) -> Self {
        let rounds = times.iter().map(Vec::len).min().unwrap_or(0);
        let stretches: Vec<Vec<&[f64]>> = stretches(times, rounds);
        let whole: Vec<&[f64]> = times.iter().map(|times| &times[..rounds]).collect();
        let (total, costs) = costs(&whole);
        let (slower, led) = (slower(&stretches, times.len()), led(&stretches, times.len(), threshold));
        let last = lasts(&whole);
        let rank = |(rank, name): (usize, String)| RankBlame {
            name,
            work: Spread::of(whole[rank]),
            last: last[rank],
            cost: costs[rank],
            led: led[rank],
            is_slower: slower[rank],
        };
        let ranks = names.into_iter().enumerate().map(rank).collect();
        Self { ranks, rounds, total, threshold, stretches: stretches.len() }
    }

    /// Returns the rank that costs most, if that reaches the threshold.
    fn costliest(&self) -> Option<usize> {
        let worst = (0..self.ranks.len()).max_by(|a, b| self.ranks[*a].cost.total_cmp(&self.ranks[*b].cost))?;
        (self.total > 0.0 && self.ranks[worst].cost >= self.threshold * self.total).then_some(worst)
    }

    /// Returns the costliest rank, if it leads in most stretches, and in more than chance explains. If all ranks were
    /// equal, each would be equally likely to lead in a stretch that has a leader.
    pub(super) fn straggler(&self) -> Option<usize> {
        let (count, with_leader) = (self.ranks.len(), self.ranks.iter().map(|rank| rank.led).sum());
        let leads = |rank: &usize| {
            let led = self.ranks[*rank].led;
            are_most(led, self.stretches) && is_evidence(with_leader, led, 1.0 / count as f64, count)
        };
        self.costliest().filter(leads)
    }

    /// Returns the upper median of the other ranks' medians.
    fn others(&self, rank: usize) -> f64 {
        others(&self.ranks.iter().map(RankBlame::median).collect::<Vec<_>>(), rank)
    }

    fn part(&self, rank: &RankBlame) -> f64 {
        if self.total > 0.0 { rank.cost / self.total * 100.0 } else { 0.0 }
    }
}

impl fmt::Display for Blame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, rounds, total, threshold, stretches } = self;
        writeln!(f, "# {rounds} rounds of work in {:.2} s; a round ends when its last rank has ended its work", total / 1e6)?;
        writeln!(f, "# {:>4}  {:>10}  {:>10}  {:>10}  {:>6}  {:>8}", "rank", "p50 (us)", "p99 (us)", "max (us)", "last", "cost (%)")?;
        for (number, rank) in ranks.iter().enumerate() {
            let [p50, p99, most] = rank.work.as_ref().map_or([0.0; 3], |work| [work.p50, work.p99, work.max]);
            let RankBlame { name, last, .. } = rank;
            writeln!(f, "  {number:>4}  {p50:>10.1}  {p99:>10.1}  {most:>10.1}  {last:>6}  {:>8.1}  {name}", self.part(rank))?;
        }
        for (number, rank) in ranks.iter().enumerate() {
            let (mine, others) = (rank.median(), self.others(number));
            if rank.is_slower && mine > others {
                writeln!(
                    f,
                    "# Slower than the others in the median: rank {number} ({}) takes {mine:.0} us, and the others take {others:.0} us",
                    rank.name
                )?;
            }
        }
        let percent = threshold * 100.0;
        let Some(worst) = self.straggler() else {
            return match self.costliest() {
                None => writeln!(f, "# No rank costs the others {percent:.0}% of the time or more"),
                Some(most) => writeln!(
                    f,
                    "# No rank is named. Rank {most} has the highest cost: {:.1}% of the time. But its cost is the highest in only {} of \
                     {stretches} stretches of the run, which can be chance; use a longer run (--seconds)",
                    self.part(&ranks[most]),
                    ranks[most].led
                ),
            };
        };
        let rank = &ranks[worst];
        let (mine, others) = (rank.median(), self.others(worst));
        writeln!(
            f,
            "# The others wait for rank {worst} ({}). It is last in {} of {rounds} rounds, which costs {:.1}% of the time. Its work takes \
             {mine:.0} us in the median, and the work of the others takes {others:.0} us",
            rank.name,
            rank.last,
            self.part(rank),
        )
    }
}

/// Divides the rounds into stretches of equal length, each with the work of every rank.
fn stretches(times: &[Vec<f64>], rounds: usize) -> Vec<Vec<&[f64]>> {
    let count = STRETCHES.min(rounds);
    let stretch = |number: usize| number * rounds / count..(number + 1) * rounds / count;
    (0..count).map(|number| times.iter().map(|times| &times[stretch(number)]).collect()).collect()
}

/// Returns the last rank in each round, and the time until it and until the one before it.
fn rounds<'a>(times: &'a [&[f64]]) -> impl Iterator<Item = (usize, f64, f64)> + 'a {
    (0..times.first().map_or(0, |times| times.len())).map(|round| {
        let mut order: Vec<usize> = (0..times.len()).collect();
        order.sort_by(|a, b| times[*b][round].total_cmp(&times[*a][round]));
        let last = times[order[0]][round];
        (order[0], last, order.get(1).map_or(last, |rank| times[*rank][round]))
    })
}

/// Returns the time of all rounds, and how much shorter they would have been without each rank.
fn costs(times: &[&[f64]]) -> (f64, Vec<f64>) {
    let (mut total, mut costs) = (0.0, vec![0.0; times.len()]);
    for (rank, last, second) in rounds(times) {
        total += last;
        costs[rank] += last - second;
    }
    (total, costs)
}

/// Returns in how many rounds each rank was last.
fn lasts(times: &[&[f64]]) -> Vec<usize> {
    let mut lasts = vec![0; times.len()];
    rounds(times).for_each(|(rank, ..)| lasts[rank] += 1);
    lasts
}

/// Returns in how many stretches each rank cost more than any other, and more than the threshold.
fn led(stretches: &[Vec<&[f64]>], ranks: usize, threshold: f64) -> Vec<usize> {
    let mut led = vec![0; ranks];
    for stretch in stretches {
        let (total, costs) = costs(stretch);
        let most = (0..ranks).max_by(|a, b| costs[*a].total_cmp(&costs[*b]));
        if let Some(most) = most.filter(|most| total > 0.0 && costs[*most] >= threshold * total) {
            led[most] += 1;
        }
    }
    led
}

/// Returns which ranks' medians were far above the others' in more stretches than chance explains.
fn slower(stretches: &[Vec<&[f64]>], ranks: usize) -> Vec<bool> {
    let mut marks = vec![vec![]; ranks];
    for stretch in stretches {
        let medians: Vec<f64> = stretch.iter().map(|times| median(times.iter().copied())).collect();
        for (rank, marks) in marks.iter_mut().enumerate() {
            marks.push(medians[rank] > SLOWER * others(&medians, rank));
        }
    }
    standing_out(&marks)
}

/// Returns the upper median of the other ranks' medians.
fn others(medians: &[f64], rank: usize) -> f64 {
    median(medians.iter().enumerate().filter(|(other, _)| *other != rank).map(|(_, median)| *median))
}

fn median(times: impl Iterator<Item = f64>) -> f64 {
    Spread::of(&times.collect::<Vec<_>>()).map_or(0.0, |spread| spread.p50)
}

#[cfg(test)]
mod tests;
