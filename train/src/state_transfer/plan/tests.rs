use super::*;
use crate::checkpoint::piece::{Piece, runs_in, runs_of};
use crate::random::Random;
use collectives::DType;

/// Returns the numbers of a part's elements, found by visiting all indices of the tensor.
fn elements(piece: &Piece, shape: &[usize]) -> Vec<usize> {
    let is_in = |element: &usize| match piece {
        Piece::Whole => true,
        Piece::Flat(range) => range.contains(element),
        Piece::Along { dimension, range } => {
            range.contains(&(element / shape[dimension + 1..].iter().product::<usize>() % shape[*dimension]))
        }
    };
    (0..shape.iter().product()).filter(is_in).collect()
}

/// Cuts a tensor into pieces of a random kind, or takes one of them at random.
fn cut(random: &mut Random, shape: &[usize]) -> Vec<Piece> {
    let mut cuts = |end: usize| {
        let mut cuts: Vec<usize> = (0..random.below(4)).map(|_| random.below(end + 1)).chain([0, end]).collect();
        cuts.sort_unstable();
        cuts.windows(2).map(|pair| pair[0]..pair[1]).collect::<Vec<_>>()
    };
    let (total, first) = (shape.iter().product(), shape.len().checked_sub(1));
    let (flat, along) = (cuts(total), first.map(|last| (last, cuts(shape[last]))));
    match (random.below(3), along) {
        (1, _) => flat.into_iter().map(Piece::Flat).collect(),
        (2, Some((dimension, ranges))) => ranges.into_iter().map(|range| Piece::Along { dimension, range }).collect(),
        _ => vec![Piece::Whole],
    }
}

fn part(name: &str, shape: &[usize], piece: Piece) -> Declared {
    Declared::new(name, DType::U16, shape, piece).unwrap()
}

/// Returns random declarations, in which all tensors that are wanted are offered.
fn declarations(random: &mut Random) -> Vec<Declaration> {
    let mut all: Vec<Declaration> = (0..1 + random.below(5)).map(|_| Declaration::default()).collect();
    for name in ["a", "b", "c"] {
        let shape: Vec<usize> = (0..random.below(4)).map(|_| random.below(7)).collect();
        for piece in cut(random, &shape) {
            let ranks = all.len();
            let certain = random.below(ranks);
            let offers: Vec<usize> = (0..ranks).filter(|rank| *rank == certain || random.below(2) == 0).collect();
            // Empty pieces have one form, which a rank has only once.
            let is_empty = piece.len(&shape).unwrap() == 0;
            let offered = offers.into_iter().filter(|_| !is_empty);
            offered.for_each(|rank| all[rank].offered.push(part(name, &shape, piece.clone())));
        }
        for declaration in &mut all {
            let pieces = cut(random, &shape);
            let some = pieces.into_iter().filter(|_| random.below(3) > 0);
            declaration.wanted.extend(some.map(|piece| part(name, &shape, piece)));
        }
    }
    let offers = |name: &str, all: &[Declaration]| all.iter().any(|declaration| declaration.offered.iter().any(|part| part.name == name));
    for name in ["a", "b", "c"].iter().filter(|name| !offers(name, &all)).collect::<Vec<_>>() {
        all.iter_mut().for_each(|declaration| declaration.wanted.retain(|part| part.name != **name));
    }
    all
}

#[test]
fn every_wanted_element_comes_once_from_a_rank_that_has_it() {
    let seed = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    println!("seed {seed}");
    let random = &mut Random(seed);
    let mut steps = 0;
    for _ in 0..3000 {
        let all = declarations(random);
        let mut plan = Plan::new(&all).unwrap();
        let least = 1 + random.below(40);
        plan.limits = (least, least + random.below(40));
        let wanted = |want: &Want| &all[want.rank].wanted[want.number];
        let mut filled: Vec<Vec<Option<usize>>> = plan.wants.iter().map(|want| vec![None; want.extent.len()]).collect();
        for step in plan.steps() {
            let want = &plan.wants[step.want];
            let tensor = &plan.tensors[want.tensor];
            assert!(tensor.holders[step.source].contains(&step.from), "seed {seed}");
            let receiver_has_it = tensor.holders[step.source].iter().any(|holder| holder.0 == want.rank);
            assert_eq!(receiver_has_it, step.from.0 == want.rank, "seed {seed}");
            assert!(step.len * tensor.element_bytes <= plan.limits.1.max(tensor.element_bytes), "seed {seed}");
            let Declared { shape, piece, .. } = &all[step.from.0].offered[step.from.1];
            let stored = elements(piece, shape);
            let runs = runs_in(&want.extent, step.window.clone(), &tensor.sources, usize::MAX).filter(|run| run.source == step.source);
            let mut len = 0;
            for run in runs {
                len += run.len;
                for at in 0..run.len {
                    let before = filled[step.want][run.to + at].replace(stored[run.from + at]);
                    assert_eq!(before, None, "seed {seed}");
                }
            }
            assert_eq!(len, step.len, "seed {seed}");
            steps += 1;
        }
        for (want, filled) in plan.wants.iter().zip(filled) {
            let Declared { shape, piece, .. } = wanted(want);
            let expected: Vec<Option<usize>> = elements(piece, shape).into_iter().map(Some).collect();
            assert_eq!(filled, expected, "seed {seed}");
        }
        let declared: usize = all.iter().flat_map(|all| &all.wanted).map(|part| part.piece.len(&part.shape).unwrap()).sum();
        assert_eq!(plan.wants.iter().map(|want| want.extent.len()).sum::<usize>(), declared, "seed {seed}");
    }
    assert!(steps > 3000, "{steps}");
}

/// Returns the bytes that go from each member (first index) to each newcomer.
fn traffic(members: usize, newcomers: usize, tensors: &[usize]) -> Vec<Vec<usize>> {
    let parts = || tensors.iter().enumerate().map(|(number, len)| part(&format!("t{number}"), &[*len], Piece::Whole)).collect();
    let member = || Declaration { offered: parts(), wanted: Vec::new() };
    let newcomer = || Declaration { offered: Vec::new(), wanted: parts() };
    let all: Vec<Declaration> = (0..members).map(|_| member()).chain((0..newcomers).map(|_| newcomer())).collect();
    let plan = Plan::new(&all).unwrap();
    let mut bytes = vec![vec![0; newcomers]; members];
    plan.steps().for_each(|step| bytes[step.from.0][plan.wants[step.want].rank - members] += 2 * step.len);
    bytes
}

#[test]
fn each_newcomer_gets_equal_parts_from_all_members() {
    for (members, newcomers, tensors) in
        [(1, 1, &[9_000_000][..]), (3, 1, &[1_000_000]), (3, 2, &[12_000_000, 7]), (4, 3, &[5_000; 90]), (5, 2, &[70_000; 50])]
    {
        let bytes = traffic(members, newcomers, tensors);
        let total: usize = tensors.iter().map(|len| 2 * len).sum();
        for newcomer in 0..newcomers {
            let links: Vec<usize> = bytes.iter().map(|links| links[newcomer]).collect();
            assert_eq!(links.iter().sum::<usize>(), total);
            let (least, most) = (links.iter().min().unwrap(), links.iter().max().unwrap());
            assert!(most - least <= MOST_BYTES, "{members} members, {newcomers} newcomers: {links:?}");
            assert!(*least > 0, "{links:?}");
        }
    }
}

/// Returns a plan in which rank 0 offers the pieces of a tensor, and rank 1 wants others.
fn planned(shape: &[usize], offered: impl Iterator<Item = Piece>, wanted: impl Iterator<Item = Piece>) -> Result<Plan, String> {
    let (mut holder, mut newcomer) = (Declaration::default(), Declaration::default());
    holder.offered.extend(offered.map(|piece| part("w", shape, piece)));
    newcomer.wanted.extend(wanted.map(|piece| part("w", shape, piece)));
    Plan::new(&[holder, newcomer])
}

#[test]
fn many_parts_are_planned_without_comparing_each_with_each() {
    // If each of the parts visited all others, each case would take at least 1e10 visits.
    let many = 100_000;
    let flat = |at: usize, len: usize| Piece::Flat(at * len..(at + 1) * len);
    let along = |dimension: usize, at: usize| Piece::Along { dimension, range: at..at + 1 };
    let (shape, wide) = ([2 * many], [4, many]);
    let cases = [
        // The same parts, shifted parts, and one part of all sources.
        (planned(&shape, (0..many).map(|at| flat(at, 2)), (0..many).map(|at| flat(at, 2))), many),
        (planned(&shape, (0..many).map(|at| flat(at, 2)), (0..many - 1).map(|at| Piece::Flat(2 * at + 1..2 * at + 3))), 2 * (many - 1)),
        (planned(&shape, (0..many).map(|at| flat(at, 2)), std::iter::once(Piece::Whole)), many),
        // Columns, of columns and of flat parts, and flat parts of columns.
        (planned(&wide, (0..many).map(|at| along(1, at)), (0..many).map(|at| along(1, at))), many),
        (planned(&wide, (0..many).map(|at| flat(at, 4)), (0..many).map(|at| along(1, at))), 4 * many),
        (planned(&wide, (0..many).map(|at| along(1, at)), (0..many).map(|at| flat(at, 4))), 4 * many),
    ];
    for (number, (plan, expected)) in cases.into_iter().enumerate() {
        let plan = plan.unwrap();
        let (mut count, mut elements) = (0, 0);
        for step in plan.steps() {
            let want = &plan.wants[step.want];
            let runs = runs_of(&want.extent, step.window.clone(), &plan.tensors[want.tensor].sources, step.source);
            assert_eq!(runs.map(|run| run.len).sum::<usize>(), step.len);
            (count, elements) = (count + 1, elements + step.len);
        }
        assert_eq!((count, elements), (expected, plan.wants.iter().map(|want| want.extent.len()).sum()), "case {number}");
    }
}

#[test]
fn parts_that_need_too_many_messages_are_refused() {
    // Each of the wanted rows has elements of all columns.
    let (columns, rows) = (100_000, 10_000);
    let along = |dimension: usize, at: usize| Piece::Along { dimension, range: at..at + 1 };
    let error = planned(&[rows, columns], (0..columns).map(|at| along(1, at)), (0..rows).map(|at| along(0, at))).unwrap_err();
    assert!(error.contains("the transfer needs up to 1000000000 messages in total; the limit is 268435456"), "{error}");
}

#[test]
fn many_holders_send_equally_much() {
    let tensors = [60_000; 400];
    let bytes = traffic(200, 3, &tensors);
    for newcomer in 0..3 {
        let links: Vec<usize> = bytes.iter().map(|links| links[newcomer]).collect();
        assert_eq!(links.iter().sum::<usize>(), 2 * tensors.iter().sum::<usize>());
        let (least, most) = (links.iter().min().unwrap(), links.iter().max().unwrap());
        assert!(*least > 0 && most - least <= 2 * LEAST_BYTES, "{links:?}");
    }
}

#[test]
fn the_messages_of_several_newcomers_alternate() {
    let whole = || vec![part("w", &[1 << 21], Piece::Whole)];
    let newcomer = || Declaration { offered: Vec::new(), wanted: whole() };
    let plan = Plan::new(&[Declaration { offered: whole(), wanted: Vec::new() }, newcomer(), newcomer()]).unwrap();
    let receivers: Vec<usize> = plan.steps().map(|step| plan.wants[step.want].rank).collect();
    assert_eq!(receivers, [1, 2, 1, 2, 1, 2, 1, 2]);
}

#[test]
fn what_cannot_be_transferred_is_refused_with_the_tensor_and_the_ranks() {
    let flat = |range: Range<usize>| part("w", &[10], Piece::Flat(range));
    let whole = || part("w", &[10], Piece::Whole);
    let cases = [
        (vec![(vec![], vec![]), (vec![], vec![whole()])], "rank 1 wants it, but no rank offers it"),
        (vec![(vec![flat(0..5)], vec![]), (vec![], vec![flat(0..5)])], "elements 5..10 of the flattened tensor are held by no rank"),
        (vec![(vec![flat(0..6)], vec![whole()]), (vec![flat(5..10)], vec![])], "the parts overlap: rank 0 has"),
        (
            vec![(vec![whole()], vec![]), (vec![], vec![part("w", &[2, 5], Piece::Whole)])],
            "rank 0 offers U16[10], but rank 1 wants U16[2, 5]",
        ),
        (
            vec![(vec![whole()], vec![whole()]), (vec![part("w", &[2, 5], Piece::Whole)], vec![])],
            "rank 0 has U16[10], but rank 1 has U16[2, 5]",
        ),
    ];
    for (ranks, words) in cases {
        let all: Vec<Declaration> = ranks.into_iter().map(|(offered, wanted)| Declaration { offered, wanted }).collect();
        let error = Plan::new(&all).unwrap_err();
        assert!(error.starts_with("tensor \"w\": ") && error.contains(words), "{error}");
    }
    let huge = || vec![part("w", &[1 << 50], Piece::Whole)];
    let error = Plan::new(&[Declaration { offered: huge(), wanted: Vec::new() }, Declaration { offered: Vec::new(), wanted: huge() }]);
    assert!(error.unwrap_err().contains("the transfer needs up to 2147483648 messages in total; the limit is 268435456"));
    // Parts that no rank wants need not be the whole tensor.
    let part = Declaration { offered: vec![flat(0..5)], wanted: Vec::new() };
    assert_eq!(Plan::new(&[part]).unwrap().steps().count(), 0);
}
