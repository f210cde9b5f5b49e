#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;
use crate::device::plan::cases::Case;
use crate::device::plan::combine;
use crate::random::Random;

const REDUCING: [Kind; 4] = [Kind::AllReduce, Kind::Reduce, Kind::ReduceScatter, Kind::ReduceScatterV];

fn bytes(random: &mut Random) -> [u8; 4] {
    [0; 4].map(|_| random.below(256) as u8)
}

fn numbers(random: &mut Random) -> [u8; 4] {
    (random.below(1 << 20) as f32 / 7.0).to_ne_bytes()
}

/// What a fold in rank order leaves.
fn folded(folding: Folding, inputs: &[Vec<u8>]) -> Vec<u8> {
    let size = folding.element_bytes;
    let multiplied = |input: &Vec<u8>| match folding.multiply {
        Some((scalar, _)) => {
            let product = |value: &[u8]| (f32::from_ne_bytes(value.try_into().unwrap()) * scalar as f32).to_ne_bytes();
            input.chunks_exact(4).flat_map(product).collect()
        }
        None => input.clone(),
    };
    let mut result: Vec<u8> = multiplied(&inputs[0]);
    for input in &inputs[1..] {
        for (a, b) in result.chunks_exact_mut(size).zip(multiplied(input).chunks_exact(size)) {
            combine(folding.folder, a, b);
        }
    }
    if folding.folder == Folder::Ours(FoldOp::Avg, DType::U16) {
        for a in result.chunks_exact_mut(2) {
            let quotient = u16::from_ne_bytes([a[0], a[1]]) / inputs.len() as u16;
            a.copy_from_slice(&quotient.to_ne_bytes());
        }
    }
    result
}

/// The folds that the model knows: bitwise, a mean, a sum whose order shows, one after a multiplication, and the caller's.
fn some_folding(random: &mut Random) -> Folding {
    let ours = |op, dtype: DType, element_bytes| Folding { folder: Folder::Ours(op, dtype), multiply: None, element_bytes };
    match random.below(5) {
        0 => ours(FoldOp::Xor, DType::U64, 1),
        1 => ours(FoldOp::Avg, DType::U16, 2),
        2 => ours(FoldOp::Sum, DType::F32, 4),
        3 => Folding { multiply: Some((0.375, DType::F32)), ..ours(FoldOp::Sum, DType::F32, 4) },
        _ => Folding { folder: Folder::User(0), multiply: None, element_bytes: [1, 3, 8, 12, 20][random.below(5)] },
    }
}

#[test]
fn folds_of_every_size_leave_the_right_bytes_and_no_others() {
    let seed = 40;
    let mut random = Random(seed);
    for round in 0..800 {
        let (kind, folding) = (REDUCING[round % REDUCING.len()], some_folding(&mut random));
        let in_place = random.below(2) == 0;
        let case = Case::some(kind, in_place, folding.element_bytes, 2000, &mut random);
        println!("round {round} of seed {seed}: {folding:?} {case:?}");
        let plan = |ranks: Ranks, scratch| super::plan(&case.job(ranks.me, DType::U8, None), folding, ranks, scratch).unwrap();
        case.run(&mut random, numbers_or(folding, bytes), plan, |inputs| folded(folding, inputs));
    }
}

fn numbers_or(folding: Folding, bytes: fn(&mut Random) -> [u8; 4]) -> fn(&mut Random) -> [u8; 4] {
    if matches!(folding.folder, Folder::Ours(FoldOp::Sum, DType::F32)) { numbers } else { bytes }
}

#[test]
fn large_folds_go_in_slabs_through_little_memory() {
    let seed = 41;
    let mut random = Random(seed);
    for round in 0..160 {
        let (kind, folding) = (REDUCING[round % REDUCING.len()], some_folding(&mut random));
        let in_place = random.below(2) == 0;
        let mut case = Case::some(kind, in_place, folding.element_bytes, 2000, &mut random);
        let all = SMALL_BYTES / case.n + random.below(100_000);
        let share = if matches!(kind, Kind::AllReduce | Kind::Reduce) { all } else { all / case.n };
        let block = |random: &mut Random| (share + random.below(7)) / folding.element_bytes * folding.element_bytes;
        let first = block(&mut random);
        case.blocks.iter_mut().for_each(|bytes| *bytes = if kind == Kind::ReduceScatterV { block(&mut random) } else { first });
        case.scratch = 2 * (2 * case.n + 1) * unit(folding.element_bytes) * (1 + random.below(20));
        println!("round {round} of seed {seed}: {folding:?} {case:?}");
        let plan = |ranks: Ranks, scratch| {
            let plan = super::plan(&case.job(ranks.me, DType::U8, None), folding, ranks, scratch).unwrap();
            let on_side = |step: &Step| matches!(step, Step::Fold { role: StreamRole::Side, .. });
            assert!(matches!(&plan, Plan::Steps(steps) if steps.iter().any(on_side)), "it all fits into one slab");
            plan
        };
        let wire = case.run(&mut random, numbers_or(folding, bytes), plan, |inputs| folded(folding, inputs));
        let vector = if matches!(kind, Kind::AllReduce | Kind::Reduce) { first } else { case.blocks.iter().sum() };
        let ring = if kind == Kind::AllReduce { 2 } else { 1 } * (case.n - 1) * vector;
        let most = if kind == Kind::Reduce { 2 * ring } else { ring };
        assert!(wire <= most, "{wire} B sent, and a ring would send {most} B");
    }
}

#[test]
fn small_vectors_take_one_exchange() {
    let mut random = Random(42);
    for kind in REDUCING {
        let mut case = Case::some(kind, false, 1, 100, &mut random);
        case.blocks = vec![1000; case.n];
        case.scratch = 64 << 10;
        let folding = Folding { folder: Folder::Ours(FoldOp::Xor, DType::U8), multiply: None, element_bytes: 1 };
        let scratch = Scratch { address: 0x10_0000, bytes: case.scratch };
        let plan = super::plan(&case.job(0, DType::U8, None), folding, Ranks { me: 0, n: case.n }, scratch).unwrap();
        let Plan::Steps(steps) = plan else { panic!("a fold is more than one call") };
        assert_eq!(steps.iter().filter(|step| matches!(step, Step::Transfer(_))).count(), 1, "{kind:?}: {steps:?}");
    }
}

#[test]
fn too_little_memory_says_how_much_is_needed() {
    let mut random = Random(43);
    let mut case = Case::some(Kind::AllReduce, true, 4, 100, &mut random);
    case.blocks = vec![1 << 20; case.n];
    let folding = Folding { folder: Folder::Ours(FoldOp::Xor, DType::U32), multiply: None, element_bytes: 1 };
    let ranks = Ranks { me: 0, n: case.n };
    let error = super::plan(&case.job(0, DType::U32, None), folding, ranks, Scratch { address: 0x1000, bytes: 40 }).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains(&format!("{} B", 32 * case.n)), "{error}");
}
