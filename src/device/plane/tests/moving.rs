//! Collectives that move bytes.

use super::*;
use crate::call::Kind;

const KINDS: [Kind; 9] = [
    Kind::Broadcast,
    Kind::AllGather,
    Kind::AllGatherV,
    Kind::Gather,
    Kind::GatherV,
    Kind::Scatter,
    Kind::ScatterV,
    Kind::AllToAll,
    Kind::AllToAllV,
];

#[test]
fn every_collective_that_moves_leaves_the_right_bytes() {
    let sim = Sim::new();
    for (n, old) in [(1, false), (2, false), (3, false), (3, true), (4, false), (4, true), (8, false)] {
        let mut planes = several(n, &Options { scratch_bytes: 4096, ..options() });
        if old {
            let none = Library { all_to_all: false, gather: false, scatter: false };
            planes.iter_mut().for_each(|plane| plane.library = none);
        }
        on_threads(planes, |plane| {
            let seed = 90 + n as u64;
            let mut random = Random(seed);
            for round in 0..6 {
                for kind in KINDS {
                    let in_place = round % 2 == 0 && !matches!(kind, Kind::GatherV | Kind::ScatterV | Kind::AllToAllV);
                    let mut case = Case::some(kind, in_place, 1 + random.below(8), 2000, &mut random);
                    case.root %= n;
                    let length = |random: &mut Random| random.below(3) * random.below(700);
                    (case.n, case.blocks) = (n, case.blocks.iter().copied().cycle().take(n).collect());
                    case.pairs = (0..n).map(|_| (0..n).map(|_| length(&mut random)).collect()).collect();
                    let memories = memories(&case, &mut random, |random, _| vec![random.below(256) as u8]);
                    println!("round {round} of seed {seed}: {case:?}");
                    run(&plane, &case, &memories, DType::U8, None, &|_| unreachable!("nothing is folded"));
                }
            }
        });
    }
    sim.finish();
}
