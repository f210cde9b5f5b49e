#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;
use crate::device::plan::cases::Case;
use crate::device::plan::{FoldOp, Folder, combine};
use crate::element::TypeTag;
use crate::random::Random;

const MOVING: [Kind; 9] = [
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

const REDUCING: [Kind; 4] = [Kind::AllReduce, Kind::Reduce, Kind::ReduceScatter, Kind::ReduceScatterV];

fn bytes(random: &mut Random) -> [u8; 4] {
    [0; 4].map(|_| random.below(256) as u8)
}

/// Small whole numbers, whose sums are the same in any order.
fn numbers(random: &mut Random) -> [u8; 4] {
    (random.below(1000) as f32).to_ne_bytes()
}

fn can_be_in_place(kind: Kind) -> bool {
    !matches!(kind, Kind::GatherV | Kind::ScatterV | Kind::AllToAllV)
}

#[test]
fn every_collective_that_moves_leaves_the_right_bytes_and_no_others() {
    let seed = 30;
    let mut random = Random(seed);
    for round in 0..600 {
        let kind = MOVING[round % MOVING.len()];
        let in_place = can_be_in_place(kind) && random.below(2) == 0;
        let mut case = Case::some(kind, in_place, 1 + random.below(8), 2000, &mut random);
        // Own blocks of an all-to-all are as long at both ends.
        case.scratch = 50 + random.below(5000);
        let library = Library { all_to_all: random.below(2) == 0, gather: random.below(2) == 0, scatter: random.below(2) == 0 };
        let plan = |ranks: Ranks, scratch| moving(&case.job(ranks.me, DType::U8, None), ranks, library, scratch).unwrap();
        println!("round {round} of seed {seed}: {case:?}");
        case.run(&mut random, bytes, plan, |_| unreachable!("nothing is folded"));
    }
}

#[test]
fn every_reduction_of_ncclss_leaves_the_right_bytes_and_no_others() {
    let seed = 31;
    let mut random = Random(seed);
    for round in 0..200 {
        let kind = REDUCING[round % REDUCING.len()];
        let in_place = random.below(2) == 0;
        let case = Case::some(kind, in_place, 4, 2000, &mut random);
        let plan = |ranks: Ranks, _| reducing(&case.job(ranks.me, DType::F32, None), NcclOp::Sum, DType::F32, ranks).unwrap();
        println!("round {round} of seed {seed}: {case:?}");
        case.run(&mut random, numbers, plan, sum);
    }
}

#[test]
fn a_mean_divides_the_sum_once_and_nothing_else() {
    let seed = 32;
    let mut random = Random(seed);
    for round in 0..200 {
        let kind = REDUCING[round % REDUCING.len()];
        let in_place = random.below(2) == 0;
        let case = Case::some(kind, in_place, 4, 2000, &mut random);
        let plan = |ranks: Ranks, _| dividing(&case.job(ranks.me, DType::F32, None), DType::F32, ranks).unwrap();
        println!("round {round} of seed {seed}: {case:?}");
        let mean = |inputs: &[Vec<u8>]| {
            let quotient = |sum: &[u8]| (f32::from_ne_bytes(sum.try_into().unwrap()) / inputs.len() as f32).to_ne_bytes();
            sum(inputs).chunks_exact(4).flat_map(quotient).collect()
        };
        case.run(&mut random, numbers, plan, mean);
    }
}

fn sum(inputs: &[Vec<u8>]) -> Vec<u8> {
    let mut result = inputs[0].clone();
    for input in &inputs[1..] {
        for (a, b) in result.chunks_exact_mut(4).zip(input.chunks_exact(4)) {
            combine(Folder::Ours(FoldOp::Sum, DType::F32), a, b);
        }
    }
    result
}

#[test]
fn an_only_rank_copies_or_multiplies() {
    let mut random = Random(33);
    for kind in MOVING.into_iter().chain(REDUCING) {
        for in_place in [false, can_be_in_place(kind)] {
            let mut case = Case::some(kind, in_place, 4, 100, &mut random);
            (case.n, case.root) = (1, 0);
            case.blocks = vec![40];
            case.pairs = vec![vec![40]];
            let plan = |_: Ranks, _| alone(&case.job(0, DType::F32, None), None);
            case.run(&mut random, numbers, plan, |inputs| inputs[0].clone());
            if REDUCING.contains(&kind) {
                let plan = |_: Ranks, _| alone(&case.job(0, DType::F32, None), Some((0.5, DType::F32)));
                let half = |value: &[u8]| (f32::from_ne_bytes(value.try_into().unwrap()) * 0.5).to_ne_bytes();
                case.run(&mut random, numbers, plan, |inputs| inputs[0].chunks_exact(4).flat_map(half).collect());
            }
        }
    }
}

#[test]
fn one_call_of_nccls_needs_no_list() {
    let mut random = Random(34);
    let mut case = Case::some(Kind::AllReduce, true, 4, 100, &mut random);
    case.blocks = vec![64; case.n];
    let ranks = Ranks { me: 1, n: case.n };
    let plan = reducing(&case.job(1, DType::F32, None), NcclOp::Max, DType::F32, ranks).unwrap();
    assert!(matches!(plan, Plan::One(Transfer::AllReduce { count: 16, op: NcclOp::Max, .. })), "{plan:?}");
}

#[test]
fn an_exchange_in_place_without_memory_says_how_much_it_needs() {
    let mut random = Random(35);
    let mut case = Case::some(Kind::AllToAll, true, 1, 100, &mut random);
    (case.n, case.blocks) = (4, vec![100; 4]);
    let library = Library { all_to_all: true, gather: true, scatter: true };
    let scratch = Scratch { address: 0x1000, bytes: 3 };
    let error = moving(&case.job(0, DType::U8, None), Ranks { me: 0, n: 4 }, library, scratch).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("4 B"), "{error}");
}

#[test]
fn messages_to_oneself_are_copied_or_refused() {
    let message = |peer, sends, address, bytes| Message { peer, sends, address, bytes, element: TypeTag::Scalar(DType::U8) };
    let list =
        [message(1, true, 10, 4), message(0, true, 20, 8), message(2, false, 30, 0), message(0, false, 40, 8), message(1, false, 50, 4)];
    let (transfers, copies) = messages(&list, 0).unwrap();
    assert_eq!(transfers, [Transfer::Send { address: 10, bytes: 4, peer: 1 }, Transfer::Receive { address: 50, bytes: 4, peer: 1 }]);
    assert_eq!(copies, [Step::Copy { source: 20, destination: 40, bytes: 8 }]);
    assert!(messages(&list[..2], 0).is_err());
    assert!(messages(&[message(0, true, 20, 8), message(0, false, 40, 4)], 0).is_err());
}
