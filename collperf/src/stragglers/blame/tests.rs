use super::*;
use crate::random::Random;

fn blame(times: &[Vec<f64>]) -> Blame {
    Blame::new((0..times.len()).map(|rank| format!("h{rank}, pid 9")).collect(), times, 0.1)
}

#[test]
fn a_slow_rank_is_named() {
    let blame = blame(&[vec![100.0; 10], vec![101.0; 10], vec![200.0; 10]]);
    assert_eq!(blame.straggler(), Some(2));
    let text = blame.to_string();
    let said =
        "# The others wait for rank 2 (h2, pid 9). It is last in 10 of 10 rounds, which costs 49.5% of the time. Its work takes 200 us";
    assert!(text.contains(said) && text.contains("in the median, and the work of the others takes 101 us\n"), "{text}");
}

#[test]
fn a_rank_that_is_slow_now_and_then_is_named() {
    let mut times = vec![vec![100.0; 100]; 4];
    (0..100).step_by(10).for_each(|round| times[1][round] = 2000.0);
    assert_eq!(blame(&times).straggler(), Some(1));
}

#[test]
fn ranks_that_are_late_in_turns_are_nobodys_straggler() {
    let times: Vec<Vec<f64>> = (0..13).map(|rank| (0..130).map(|round| if round % 13 == rank { 150.0 } else { 100.0 }).collect()).collect();
    let blame = blame(&times);
    assert_eq!(blame.straggler(), None);
    assert!(blame.to_string().contains("# No rank costs the others 10% of the time or more\n"));
    // Two that are equally late each time: neither alone costs anything.
    let both = self::blame(&[vec![100.0; 24], vec![100.0; 24], vec![100.0; 24], vec![200.0; 24], vec![200.0; 24]]);
    assert_eq!((both.straggler(), both.to_string().matches("# Slower than the others in the median: rank").count()), (None, 2));
}

#[test]
fn what_happened_once_is_nobodys_fault() {
    // A rank that is slightly slower than the other in every round, and was delayed once, for half the run.
    let mut times = vec![vec![100.0; 120], vec![101.0; 120]];
    times[1][50] = 6000.0;
    let blame = blame(&times);
    assert_eq!(blame.straggler(), None);
    let text = blame.to_string();
    assert!(
        text.contains("Rank 1 has the highest cost: 33.4% of the time. But its cost is the highest in only 1 of 12 stretches"),
        "{text}"
    );
    // The same if the delay lasted for several rounds.
    times[1][30..70].fill(300.0);
    assert_eq!(self::blame(&times).straggler(), None);
}

#[test]
fn no_rounds_are_no_straggler() {
    assert_eq!(blame(&[vec![], vec![]]).straggler(), None);
    assert_eq!(blame(&[vec![0.0], vec![0.0]]).straggler(), None);
}

/// Kinds of noise that affect all ranks equally.
#[derive(Debug, Clone, Copy)]
enum Noise {
    /// A normal distribution.
    Normal,
    /// Occasionally a hundred times the median.
    HeavyTailed,
    /// A rank is delayed for some rounds in a row, as by other processes.
    Bursts,
}

impl Noise {
    /// Returns the times of `rounds` rounds, each of which takes 100 without noise.
    fn draw(self, random: &mut Random, rounds: usize) -> Vec<f64> {
        let mut held = 0;
        let mut uniform = || (random.next() >> 11) as f64 / (1_u64 << 53) as f64 + 1e-12;
        let mut round = |_| match self {
            // Approximated by the central limit theorem.
            Noise::Normal => 100.0 + 10.0 * ((0..12).map(|_| uniform()).sum::<f64>() - 6.0),
            // A Pareto distribution, whose variance is infinite.
            Noise::HeavyTailed => 100.0 + 10.0 * uniform().powf(-1.0 / 1.5),
            Noise::Bursts => {
                held = if held == 0 && uniform() < 0.05 { (uniform() * rounds as f64 / 12.0) as usize } else { held.saturating_sub(1) };
                if held > 0 { 100.0 + 400.0 * uniform() } else { 100.0 + 5.0 * uniform() }
            }
        };
        (0..rounds).map(&mut round).collect()
    }
}

/// The fraction of runs with only noise in which a rank is named, by either rule.
#[test]
fn noise_has_no_name() {
    let (seed, runs) = (20_261_126, 300);
    let mut random = Random(seed);
    for noise in [Noise::Normal, Noise::HeavyTailed, Noise::Bursts] {
        for ranks in [2, 3, 8] {
            let mut named = 0;
            for _ in 0..runs {
                let times: Vec<Vec<f64>> = (0..ranks).map(|_| noise.draw(&mut random, 240)).collect();
                let blame = blame(&times);
                named += usize::from(blame.straggler().is_some() || blame.ranks.iter().any(|rank| rank.is_slower));
            }
            println!("seed {seed}: {noise:?}, {ranks} ranks: {named} of {runs} runs");
            assert!(named <= runs / 50, "seed {seed}: {noise:?}, {ranks} ranks: {named} of {runs} runs");
        }
    }
}

/// The fraction of runs in which a rank that takes a third longer is found in the same noise, by either rule.
#[test]
fn a_slow_rank_is_found_in_noise() {
    let (seed, runs) = (20_261_127, 100);
    let mut random = Random(seed);
    for (noise, least) in [(Noise::Normal, 100), (Noise::HeavyTailed, 90), (Noise::Bursts, 0)] {
        for ranks in [2, 3, 8] {
            let mut found = 0;
            for _ in 0..runs {
                let mut times: Vec<Vec<f64>> = (0..ranks).map(|_| noise.draw(&mut random, 240)).collect();
                times[1].iter_mut().for_each(|time| *time *= 1.35);
                let blame = blame(&times);
                let named = (0..ranks).filter(|rank| blame.straggler() == Some(*rank) || blame.ranks[*rank].is_slower).collect::<Vec<_>>();
                assert!(named.iter().all(|rank| *rank == 1), "seed {seed}: {noise:?}: {named:?}");
                found += named.len();
            }
            println!("seed {seed}: {noise:?}, {ranks} ranks: {found} of {runs} runs");
            assert!(found >= least, "seed {seed}: {noise:?}, {ranks} ranks: {found} of {runs} runs");
        }
    }
}
