use super::*;
use crate::random::Random;

/// Returns the numbers of a part's elements, found by visiting all indices of the tensor.
fn elements(piece: &Piece, shape: &[usize]) -> Vec<usize> {
    let total: usize = shape.iter().product();
    let is_in = |element: usize| match piece {
        Piece::Whole => true,
        Piece::Flat(range) => range.contains(&element),
        Piece::Along { dimension, range } => {
            let mut rest = element;
            let mut index = vec![0; shape.len()];
            for (at, side) in shape.iter().enumerate().rev() {
                index[at] = rest % side;
                rest /= side;
            }
            range.contains(&index[*dimension])
        }
    };
    (0..total).filter(|element| is_in(*element)).collect()
}

/// Cuts a tensor into parts of a random kind.
fn cut(random: &mut Random, shape: &[usize]) -> Vec<Piece> {
    let total: usize = shape.iter().product();
    let cuts = |random: &mut Random, end: usize| {
        let mut cuts: Vec<usize> = (0..random.below(4)).map(|_| random.below(end + 1)).collect();
        cuts.extend([0, end]);
        cuts.sort_unstable();
        cuts.windows(2).map(|pair| pair[0]..pair[1]).collect::<Vec<_>>()
    };
    match random.below(3) {
        0 => vec![Piece::Whole],
        1 => cuts(random, total).into_iter().map(Piece::Flat).collect(),
        _ if shape.is_empty() => vec![Piece::Whole],
        _ => {
            let dimension = random.below(shape.len());
            cuts(random, shape[dimension]).into_iter().map(|range| Piece::Along { dimension, range }).collect()
        }
    }
}

fn shape(random: &mut Random) -> Vec<usize> {
    (0..random.below(5)).map(|_| random.below(6)).collect()
}

#[test]
fn runs_find_every_element_of_a_part_where_it_lies() {
    let seed = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    println!("seed {seed}");
    let random = &mut Random(seed);
    for _ in 0..3000 {
        let shape = shape(random);
        let total = element_count(&shape).unwrap();
        let held = cut(random, &shape);
        let held: Vec<_> = held.iter().filter(|piece| piece.len(&shape).unwrap() > 0).collect();
        let extents: Vec<Extent> = held.iter().map(|piece| piece.extent(&shape).unwrap()).collect();
        let order = in_order(&extents.iter().collect::<Vec<_>>(), total).unwrap();
        let sources: Vec<Extent> = order.iter().map(|index| extents[*index].clone()).collect();
        let stored: Vec<Vec<usize>> = order.iter().map(|index| elements(held[*index], &shape)).collect();
        for wanted in cut(random, &shape) {
            let mut found = vec![usize::MAX; wanted.len(&shape).unwrap()];
            let longest = 1 + random.below(7);
            for run in runs(&wanted.extent(&shape).unwrap(), &sources, longest) {
                assert!((1..=longest).contains(&run.len));
                found[run.to..run.to + run.len].copy_from_slice(&stored[run.source][run.from..run.from + run.len]);
            }
            let (start, part) = (random.below(found.len() + 1), wanted.extent(&shape).unwrap());
            let window = start..start + random.below(found.len() - start + 1);
            let lens = lens_by_source(&part, window.clone(), &sources);
            for (source, stored) in stored.iter().enumerate() {
                let expected = found[window.clone()].iter().filter(|element| stored.contains(element)).count();
                let len = lens.get(&source).copied().unwrap_or_default();
                assert_eq!(len, expected, "{window:?} of {wanted} of {shape:?}, held as {held:?}, seed {seed}");
                let own: Vec<Run> = runs_of(&part, window.clone(), &sources, source).collect();
                let all = runs_in(&part, window.clone(), &sources, usize::MAX);
                assert_eq!(own, all.filter(|run| run.source == source).collect::<Vec<_>>(), "{wanted} of {shape:?}, held as {held:?}");
            }
            assert!(lens.values().all(|len| *len > 0));
            let pairs = |from: usize| lens_by_source(&part, from..(from + longest).min(part.len()), &sources).len() as u64;
            let pairs: u64 = (0..part.len()).step_by(longest).map(pairs).sum();
            assert!(pairs <= most_pairs(&part, longest, &sources), "{wanted} of {shape:?}, held as {held:?}, seed {seed}");
            assert_eq!(found, elements(&wanted, &shape), "{wanted} of {shape:?}, held as {held:?}, seed {seed}");
        }
    }
}

#[test]
fn what_is_no_division_of_a_tensor_is_told_in_words() {
    let shape = [4, 6];
    let along = |dimension, range| Piece::Along { dimension, range };
    let judged = |pieces: &[Piece]| {
        let extents: Vec<_> = pieces.iter().map(|piece| piece.extent(&shape).unwrap()).collect();
        in_order(&extents.iter().collect::<Vec<_>>(), 24)
    };
    assert_eq!(judged(&[along(1, 3..6), along(1, 0..3)]), Ok(vec![1, 0]));
    // Rows are flat ranges.
    assert_eq!(judged(&[along(0, 0..2), Piece::Flat(12..24)]), Ok(vec![0, 1]));
    assert_eq!(judged(&[Piece::Flat(0..13), along(0, 2..4)]), Err(Division::Overlap(0, 1)));
    assert_eq!(judged(&[along(1, 0..3), along(0, 2..4)]), Err(Division::Dimensions(0, 1)));
    assert_eq!(judged(&[along(1, 0..3), along(1, 4..6)]), Err(Division::Gap("elements 3..4 of each block of 6 are".to_owned())));
    assert_eq!(judged(&[Piece::Flat(0..23)]), Err(Division::Gap("elements 23..24 of the flattened tensor are".to_owned())));
    assert_eq!(judged(&[]), Err(Division::Gap("its 24 elements are".to_owned())));
    assert_eq!(in_order(&[], 0), Ok(vec![]));
}

#[test]
fn parts_that_a_tensor_has_not_are_refused() {
    let backwards = Range { start: 3, end: 2 };
    let pieces = [
        Piece::Flat(0..25),
        Piece::Flat(backwards.clone()),
        Piece::Along { dimension: 2, range: 0..1 },
        Piece::Along { dimension: 1, range: 5..7 },
        Piece::Along { dimension: 0, range: backwards },
        Piece::Flat(usize::MAX - 1..usize::MAX),
    ];
    for piece in pieces {
        assert!(piece.len(&[4, 6]).unwrap_err().to_string().contains("there is no part"), "{piece}");
    }
    for shape in [vec![usize::MAX, 2], vec![1 << 62, 1 << 62]] {
        assert!(Piece::Whole.len(&shape).unwrap_err().to_string().contains("address space"), "{shape:?}");
    }
    assert_eq!(Piece::Whole.len(&[usize::MAX, usize::MAX, 0]).unwrap(), 0);
}

#[test]
fn even_parts_cover_a_dimension() {
    for (side, parts) in [(0, 1), (7, 3), (2, 5), (12, 4), (1, 0)] {
        let mut reached = 0;
        for index in 0..parts.max(1) {
            let Piece::Along { dimension: 1, range } = Piece::part(1, side, index, parts) else { panic!("another kind") };
            assert_eq!(range.start, reached);
            assert!(range.len() <= side / parts.max(1) + 1);
            reached = range.end;
        }
        assert_eq!(reached, side);
    }
}
