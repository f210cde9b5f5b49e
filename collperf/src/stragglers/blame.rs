//! Who costs the others how much time.

use std::fmt;

use crate::statistics::Spread;

/// What rounds of work have shown.
pub(super) struct Blame {
    ranks: Vec<RankBlame>,
    rounds: usize,
    /// What all rounds took together, in microseconds: each as long as its last rank.
    total: f64,
    /// The part of it that a rank has to cost to be named.
    threshold: f64,
}

struct RankBlame {
    name: String,
    work: Option<Spread>,
    /// Rounds in which it was last.
    last: usize,
    /// What the rounds would have been shorter without it, in microseconds.
    cost: f64,
}

/// Several ranks may be slow together, so that none of them costs anything by itself: so many times the others' median is told too.
const SLOWER: f64 = 1.25;

impl RankBlame {
    fn median(&self) -> f64 {
        self.work.as_ref().map_or(0.0, |work| work.p50)
    }
}

impl Blame {
    /// `times` has each rank's work in each round, in microseconds.
    pub(super) fn new(names: Vec<String>, times: &[Vec<f64>], threshold: f64) -> Self {
        let rank = |(name, times): (String, &Vec<f64>)| RankBlame { name, work: Spread::of(times), last: 0, cost: 0.0 };
        let mut blame = Self { ranks: names.into_iter().zip(times).map(rank).collect(), rounds: 0, total: 0.0, threshold };
        for round in 0..times.iter().map(Vec::len).min().unwrap_or(0) {
            let mut order: Vec<usize> = (0..times.len()).collect();
            order.sort_by(|a, b| times[*b][round].total_cmp(&times[*a][round]));
            let last = times[order[0]][round];
            let second = order.get(1).map_or(last, |rank| times[*rank][round]);
            blame.rounds += 1;
            blame.total += last;
            blame.ranks[order[0]].last += 1;
            blame.ranks[order[0]].cost += last - second;
        }
        blame
    }

    /// The rank that costs most, if it costs enough.
    pub(super) fn straggler(&self) -> Option<usize> {
        let worst = (0..self.ranks.len()).max_by(|a, b| self.ranks[*a].cost.total_cmp(&self.ranks[*b].cost))?;
        (self.total > 0.0 && self.ranks[worst].cost >= self.threshold * self.total).then_some(worst)
    }

    fn part(&self, rank: &RankBlame) -> f64 {
        if self.total > 0.0 { rank.cost / self.total * 100.0 } else { 0.0 }
    }

    /// The upper median of the other ranks' medians.
    fn others(&self, rank: usize) -> f64 {
        let median = |(_, other): (usize, &RankBlame)| other.work.as_ref().map(|work| work.p50);
        let others: Vec<f64> = self.ranks.iter().enumerate().filter(|(other, _)| *other != rank).filter_map(median).collect();
        Spread::of(&others).map_or(0.0, |spread| spread.p50)
    }
}

impl fmt::Display for Blame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, rounds, total, threshold } = self;
        writeln!(f, "# {rounds} rounds of work in {:.2} s, each as long as its last rank", total / 1e6)?;
        writeln!(f, "# {:>4}  {:>10}  {:>10}  {:>10}  {:>6}  {:>8}", "rank", "p50 (us)", "p99 (us)", "max (us)", "last", "cost (%)")?;
        for (number, rank) in ranks.iter().enumerate() {
            let [p50, p99, most] = rank.work.as_ref().map_or([0.0; 3], |work| [work.p50, work.p99, work.max]);
            let RankBlame { name, last, .. } = rank;
            writeln!(f, "  {number:>4}  {p50:>10.1}  {p99:>10.1}  {most:>10.1}  {last:>6}  {:>8.1}  {name}", self.part(rank))?;
        }
        for (number, rank) in ranks.iter().enumerate() {
            let (mine, others) = (rank.median(), self.others(number));
            if mine > SLOWER * others {
                writeln!(f, "# Slower than the others in the median: rank {number} ({}), {mine:.0} us to {others:.0} us", rank.name)?;
            }
        }
        let percent = threshold * 100.0;
        let Some(worst) = self.straggler() else {
            return writeln!(f, "# No rank costs the others {percent:.0}% of the time");
        };
        let rank = &ranks[worst];
        let (mine, others) = (rank.median(), self.others(worst));
        writeln!(
            f,
            "# The others wait for rank {worst} ({}): it is last in {} of {rounds} rounds, which costs {:.1}% of the time; its work takes \
             {mine:.0} us in the median, theirs {others:.0} us",
            rank.name,
            rank.last,
            self.part(rank),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blame(times: &[Vec<f64>]) -> Blame {
        Blame::new((0..times.len()).map(|rank| format!("h{rank}, pid 9")).collect(), times, 0.1)
    }

    #[test]
    fn a_slow_rank_is_named() {
        let blame = blame(&[vec![100.0; 10], vec![101.0; 10], vec![200.0; 10]]);
        assert_eq!(blame.straggler(), Some(2));
        let text = blame.to_string();
        let said =
            "# The others wait for rank 2 (h2, pid 9): it is last in 10 of 10 rounds, which costs 49.5% of the time; its work takes 200 us";
        assert!(text.contains(said) && text.contains("in the median, theirs 101 us\n"), "{text}");
    }

    #[test]
    fn a_rank_that_is_slow_now_and_then_is_named() {
        let mut times = vec![vec![100.0; 100]; 4];
        (0..100).step_by(10).for_each(|round| times[1][round] = 2000.0);
        assert_eq!(blame(&times).straggler(), Some(1));
    }

    #[test]
    fn ranks_that_are_late_in_turns_are_nobodys_straggler() {
        let times: Vec<Vec<f64>> =
            (0..13).map(|rank| (0..130).map(|round| if round % 13 == rank { 150.0 } else { 100.0 }).collect()).collect();
        let blame = blame(&times);
        assert_eq!(blame.straggler(), None);
        assert!(blame.to_string().contains("# No rank costs the others 10% of the time\n"));
        // Two that are always as late as each other: neither alone costs anything.
        let both = self::blame(&[vec![100.0; 5], vec![100.0; 5], vec![100.0; 5], vec![200.0; 5], vec![200.0; 5]]);
        assert_eq!((both.straggler(), both.to_string().matches("# Slower than the others in the median: rank").count()), (None, 2));
    }

    #[test]
    fn no_rounds_are_no_straggler() {
        assert_eq!(blame(&[vec![], vec![]]).straggler(), None);
        assert_eq!(blame(&[vec![0.0], vec![0.0]]).straggler(), None);
    }
}
