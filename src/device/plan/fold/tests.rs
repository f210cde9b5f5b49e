//! Plans of folds, run by the model of all ranks.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;
use crate::base::random::Random;
use crate::config::Config;
use crate::device::plan::cases::Case;
use crate::device::plan::combine;
use crate::device::plan::model::everyone;

const REDUCING: [Collective; 4] = [Collective::AllReduce, Collective::Reduce, Collective::ReduceScatter, Collective::ReduceScatterV];

fn bytes_of(random: &mut Random) -> [u8; 4] {
    [0; 4].map(|_| random.below(256) as u8)
}

fn numbers(random: &mut Random) -> [u8; 4] {
    (random.below(1 << 20) as f32 / 7.0).to_ne_bytes()
}

/// Returns the result of a fold in rank order.
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

/// Returns one of the folds of the model: bitwise, a mean, a sum that depends on the order, a sum after a
/// multiplication, or a custom one.
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
        case.run(&mut random, numbers_or(folding, bytes_of), plan, |inputs| folded(folding, inputs));
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
        let share = if matches!(kind, Collective::AllReduce | Collective::Reduce) { all } else { all / case.n };
        let block = |random: &mut Random| (share + random.below(7)) / folding.element_bytes * folding.element_bytes;
        let first = block(&mut random);
        case.blocks.iter_mut().for_each(|bytes| *bytes = if kind == Collective::ReduceScatterV { block(&mut random) } else { first });
        let most = 2 * (2 * case.n + 1) * unit(folding.element_bytes) * (1 + random.below(20));
        let rooms: Vec<_> = everyone(case.n).map(|ranks| room(&case.job(ranks.me, DType::U8, None), folding, ranks, most)).collect();
        assert!(rooms.iter().all(|room| *room == rooms[0] && *room <= most), "{rooms:?} of {most}");
        // The memory has exactly the size that the plan reports.
        case.scratch = rooms[0];
        println!("round {round} of seed {seed}: {folding:?} {case:?}");
        let plan = |ranks: Ranks, scratch| {
            let scratch = Scratch { bytes: most, ..scratch };
            let plan = super::plan(&case.job(ranks.me, DType::U8, None), folding, ranks, scratch).unwrap();
            let on_side = |step: &Step| matches!(step, Step::Fold { role: StreamRole::Side, .. });
            assert!(matches!(&plan, Plan::Steps(steps) if steps.iter().any(on_side)), "it all fits into one slab");
            plan
        };
        let wire = case.run(&mut random, numbers_or(folding, bytes_of), plan, |inputs| folded(folding, inputs));
        let vector = if matches!(kind, Collective::AllReduce | Collective::Reduce) { first } else { case.blocks.iter().sum() };
        let ring = if kind == Collective::AllReduce { 2 } else { 1 } * (case.n - 1) * vector;
        let most = if kind == Collective::Reduce { 2 * ring } else { ring };
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
    let mut case = Case::some(Collective::AllReduce, true, 4, 100, &mut random);
    case.blocks = vec![1 << 20; case.n];
    let folding = Folding { folder: Folder::Ours(FoldOp::Xor, DType::U32), multiply: None, element_bytes: 1 };
    let ranks = Ranks { me: 0, n: case.n };
    let error = super::plan(&case.job(0, DType::U32, None), folding, ranks, Scratch { address: 0x1000, bytes: 40 }).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains(&format!("{} B", 32 * case.n)), "{error}");
}

/// Returns the steps of a rank of `n` for a vector of 1 GiB in all, with the default scratch memory.
fn steps_of_a_gibibyte(kind: Collective, folding: Folding, ranks: Ranks) -> Vec<Step> {
    let mut case = Case::some(kind, true, folding.element_bytes, 1, &mut Random(44));
    let bytes = if matches!(kind, Collective::AllReduce | Collective::Reduce) { 1 << 30 } else { (1 << 30) / ranks.n };
    (case.n, case.root, case.blocks) = (ranks.n, 1, vec![bytes; ranks.n]);
    let most = Config::default().device_scratch_bytes;
    let job = case.job(ranks.me, DType::U8, None);
    assert!(room(&job, folding, ranks, most) <= most);
    match plan(&job, folding, ranks, Scratch { address: 0x1000, bytes: most }).unwrap() {
        Plan::Steps(steps) => steps,
        plan => panic!("{plan:?}"),
    }
}

fn foldings() -> [Folding; 3] {
    let ours = |op, dtype, multiply| Folding::by(op, dtype, multiply);
    [ours(FoldOp::Xor, DType::U64, None), ours(FoldOp::Avg, DType::Bf16, None), ours(FoldOp::Sum, DType::F32, Some(0.5))]
}

#[test]
fn a_gibibyte_between_8_ranks_takes_at_most_16_groups_with_the_default_memory() {
    for (kind, folding) in REDUCING.into_iter().flat_map(|kind| foldings().map(|folding| (kind, folding))) {
        let counts: Vec<_> = everyone(8)
            .map(|ranks| steps_of_a_gibibyte(kind, folding, ranks).iter().filter(|step| matches!(step, Step::Transfer(_))).count())
            .collect();
        println!("{kind:?} {folding:?}: {counts:?}");
        assert!(counts.iter().all(|count| *count == counts[0] && *count <= 16), "{kind:?} {folding:?}: {counts:?}");
    }
}

#[test]
fn every_fold_but_the_last_is_hidden_behind_transfers_and_of_an_all_reduce_that_one_too() {
    for (kind, folding) in REDUCING.into_iter().flat_map(|kind| foldings().map(|folding| (kind, folding))) {
        for n in [2, 3, 8] {
            let steps = steps_of_a_gibibyte(kind, folding, Ranks { me: 1, n });
            let done = |step: &Step| if let Step::Record(StepEvent::Folded(half)) = step { Some(*half) } else { None };
            let ends: Vec<_> = steps.iter().enumerate().filter_map(|(at, step)| Some((at, done(step)?))).collect();
            for (place, (at, half)) in ends.iter().enumerate() {
                let waits = |step: &Step| *step == Step::Wait(StepEvent::Folded(*half));
                let until = at + steps[*at..].iter().position(waits).expect("nobody waits for a fold");
                let hidden = steps[*at..until].iter().any(|step| matches!(step, Step::Transfer(transfers) if !transfers.is_empty()));
                let may_show = place + 1 == ends.len() && kind != Collective::AllReduce;
                assert!(hidden || may_show, "{kind:?} {n} ranks, fold {place} of {}", ends.len());
            }
            assert!(ends.len() >= 4, "{kind:?} {n} ranks: {} slabs", ends.len());
        }
    }
}

#[test]
fn our_kernels_move_16_bytes_at_once_wherever_source_and_destination_begin() {
    let seed = 45;
    let mut random = Random(seed);
    let ours = |op, dtype, multiply: Option<f64>, size| (Folding::by(op, dtype, multiply), size);
    let some = [
        ours(FoldOp::Xor, DType::U8, None, 1),
        ours(FoldOp::Avg, DType::U16, None, 2),
        ours(FoldOp::Sum, DType::F32, None, 4),
        ours(FoldOp::Sum, DType::F32, Some(0.375), 4),
        ours(FoldOp::Xor, DType::U64, None, 8),
    ];
    for (folding, size) in some {
        for (from, to) in (0..16).step_by(size).flat_map(|from| (0..16).step_by(size).map(move |to| (from, to))) {
            let kind = REDUCING[random.below(REDUCING.len())];
            let mut case = Case::some(kind, from == to && random.below(2) == 0, size, 1, &mut random);
            (case.n, case.root, case.shifts) = ([2, 3][random.below(2)], 0, (from, to));
            // One slab or several, with enough for each rank to fold.
            let share = STAGED_BYTES + size * (1 + random.below(1000));
            let bytes = if matches!(kind, Collective::AllReduce | Collective::Reduce) { case.n * share } else { share };
            case.blocks = vec![bytes; case.n];
            case.scratch = (2 * case.n + 2 + case.n) * [STAGED_BYTES + 16 * 1024, STAGED_BYTES / 2, STAGED_BYTES][random.below(3)];
            println!("seed {seed}: {folding:?} {case:?}");
            let plan = |ranks: Ranks, scratch| {
                let plan = super::plan(&case.job(ranks.me, DType::U8, None), folding, ranks, scratch).unwrap();
                let Plan::Steps(steps) = &plan else { panic!("a fold is more than one call") };
                for step in steps {
                    match step {
                        Step::Fold { arguments, element_bytes, .. } if arguments.count as usize * element_bytes >= STAGED_BYTES => {
                            assert!(arguments.is_wide(), "{arguments:?}");
                        }
                        Step::Multiply { source, destination, count, .. } if 4 * count >= STAGED_BYTES => {
                            assert!((source ^ destination).is_multiple_of(16), "{step:?}");
                        }
                        _ => {}
                    }
                }
                plan
            };
            case.run(&mut random, numbers_or(folding, bytes_of), plan, |inputs| folded(folding, inputs));
        }
    }
}

#[test]
fn what_is_aligned_already_is_not_copied() {
    for kind in REDUCING {
        for in_place in [false, true] {
            let mut case = Case::some(kind, in_place, 4, 1, &mut Random(46));
            (case.n, case.root, case.blocks, case.scratch) = (2, 0, vec![1 << 20; 2], 4 << 20);
            for ranks in everyone(2) {
                let scratch = Scratch { address: 0x1000, bytes: case.scratch };
                let folding = Folding::by(FoldOp::Sum, DType::F32, None);
                let plan = super::plan(&case.job(ranks.me, DType::F32, None), folding, ranks, scratch).unwrap();
                let copies = |step: &Step| matches!(step, Step::Copy { .. });
                assert!(matches!(&plan, Plan::Steps(steps) if !steps.iter().any(copies)), "{kind:?}: {plan:?}");
            }
        }
    }
}
