//! Every collective on one communicator, compared with the oracle, bit by bit.

use collectives::{Communicator, F8E4M3, F8E5M2, ReduceOp, bf16, f16};

use super::oracle::{Predict, SCALAR, assert_bits, folded, inputs};

/// The reduce ops, with a scalar that shows.
pub fn ops() -> Vec<ReduceOp> {
    ReduceOp::ALL.into_iter().map(|op| if matches!(op, ReduceOp::PreMulSum(_)) { ReduceOp::PreMulSum(SCALAR) } else { op }).collect()
}

/// What must be left alone is filled with this pattern.
fn poison<T: Predict>(count: usize) -> Vec<T> {
    (0..count).map(|index| T::input(ReduceOp::Max, 0xbad, 99, index, 4)).collect()
}

/// Every reducing collective of one op and type, in place and not.
pub fn reductions<T: Predict>(comm: &Communicator, op: ReduceOp, count: usize, seed: u64) {
    let (n, me) = (comm.world_size(), comm.rank());
    let what = |call: &str| format!("{call}({op}, {}, {count}) on rank {me} of {n}, seed {seed}", T::ELEMENT_TYPE);
    let all = inputs::<T>(op, seed, n, count);
    let expected = folded(op, &all);

    let mut buffer = all[me].clone();
    comm.all_reduce(&mut buffer, op).unwrap();
    assert_bits(&what("all_reduce"), &buffer, &expected);

    let mut destination = poison::<T>(count);
    comm.all_reduce_into(&all[me], &mut destination, op).unwrap();
    assert_bits(&what("all_reduce_into"), &destination, &expected);

    let root = seed as usize % n;
    let mut buffer = all[me].clone();
    comm.reduce(&mut buffer, root, op).unwrap();
    assert_bits(&what("reduce"), &buffer, if me == root { &expected } else { &all[me] });

    let mut destination = poison::<T>(count);
    comm.reduce_into(&all[me], (me == root).then_some(&mut destination), root, op).unwrap();
    assert_bits(&what("reduce_into"), &destination, &if me == root { expected } else { poison(count) });

    let wide = inputs::<T>(op, seed ^ 1, n, count * n);
    let expected = folded(op, &wide);
    let block = me * count..(me + 1) * count;
    let mut buffer = wide[me].clone();
    comm.reduce_scatter(&mut buffer, op).unwrap();
    assert_bits(&what("reduce_scatter"), &buffer[block.clone()], &expected[block.clone()]);
    assert_bits(&what("reduce_scatter, before the block"), &buffer[..block.start], &wide[me][..block.start]);
    assert_bits(&what("reduce_scatter, behind the block"), &buffer[block.end..], &wide[me][block.end..]);

    let mut destination = poison::<T>(count);
    comm.reduce_scatter_into(&wide[me], &mut destination, op).unwrap();
    assert_bits(&what("reduce_scatter_into"), &destination, &expected[block]);

    let counts: Vec<usize> = (0..n).map(|rank| (rank + count) % 3 * count).collect();
    let wide = inputs::<T>(op, seed ^ 2, n, counts.iter().sum());
    let expected = folded(op, &wide);
    let start: usize = counts[..me].iter().sum();
    let mut destination = poison::<T>(counts[me]);
    comm.reduce_scatter_v_into(&wide[me], &mut destination, &counts, op).unwrap();
    assert_bits(&what("reduce_scatter_v_into"), &destination, &expected[start..start + counts[me]]);
    let mut buffer = wide[me].clone();
    comm.reduce_scatter_v(&mut buffer, &counts, op).unwrap();
    assert_bits(&what("reduce_scatter_v"), &buffer[start..start + counts[me]], &expected[start..start + counts[me]]);
}

/// Every moving collective of one type, in place and not.
pub fn movements<T: Predict>(comm: &Communicator, count: usize, seed: u64) {
    let (n, me) = (comm.world_size(), comm.rank());
    let what = |call: &str| format!("{call}({}, {count}) on rank {me} of {n}, seed {seed}", T::ELEMENT_TYPE);
    let root = seed as usize % n;
    let all = inputs::<T>(ReduceOp::Max, seed, n, count);
    let joined: Vec<T> = all.concat();
    let own = me * count..(me + 1) * count;

    let mut buffer = all[me].clone();
    comm.broadcast(&mut buffer, root).unwrap();
    assert_bits(&what("broadcast"), &buffer, &all[root]);
    let mut destination = poison::<T>(count);
    comm.broadcast_into((me == root).then_some(&all[me]), &mut destination, root).unwrap();
    assert_bits(&what("broadcast_into"), &destination, &all[root]);

    let mut destination = poison::<T>(count * n);
    comm.all_gather_into(&all[me], &mut destination).unwrap();
    assert_bits(&what("all_gather_into"), &destination, &joined);
    let mut buffer = poison::<T>(count * n);
    buffer[own.clone()].copy_from_slice(&all[me]);
    comm.all_gather(&mut buffer).unwrap();
    assert_bits(&what("all_gather"), &buffer, &joined);

    let mut destination = poison::<T>(count * n);
    comm.gather(&all[me], (me == root).then_some(&mut destination), root).unwrap();
    assert_bits(&what("gather"), &destination, &if me == root { joined.clone() } else { poison(count * n) });
    let mut buffer = if me == root { poison::<T>(count * n) } else { all[me].clone() };
    if me == root {
        buffer[own.clone()].copy_from_slice(&all[me]);
    }
    comm.gather_in_place(&mut buffer, root).unwrap();
    assert_bits(&what("gather_in_place"), &buffer, if me == root { &joined } else { &all[me] });

    let mut destination = poison::<T>(count);
    comm.scatter((me == root).then_some(&joined), &mut destination, root).unwrap();
    assert_bits(&what("scatter"), &destination, &all[me]);
    let mut buffer = if me == root { joined.clone() } else { poison::<T>(count) };
    comm.scatter_in_place(&mut buffer, root).unwrap();
    assert_bits(&what("scatter_in_place"), &buffer, if me == root { &joined } else { &all[me] });

    let matrix = inputs::<T>(ReduceOp::Max, seed ^ 3, n, count * n);
    let expected: Vec<T> = matrix.iter().flat_map(|row| row[own.clone()].to_vec()).collect();
    let mut destination = poison::<T>(count * n);
    comm.all_to_all_into(&matrix[me], &mut destination).unwrap();
    assert_bits(&what("all_to_all_into"), &destination, &expected);
    let mut buffer = matrix[me].clone();
    comm.all_to_all(&mut buffer).unwrap();
    assert_bits(&what("all_to_all"), &buffer, &expected);

    unequal_movements::<T>(comm, count, seed);
}

/// The moving collectives with a count for each rank.
fn unequal_movements<T: Predict>(comm: &Communicator, count: usize, seed: u64) {
    let (n, me) = (comm.world_size(), comm.rank());
    let what = |call: &str| format!("{call}({}, {count}) on rank {me} of {n}, seed {seed}", T::ELEMENT_TYPE);
    let root = seed as usize % n;
    let counts: Vec<usize> = (0..n).map(|rank| (rank + 1) % 3 * count).collect();
    let starts: Vec<usize> = (0..n).map(|rank| counts[..rank].iter().sum()).collect();
    let joined = inputs::<T>(ReduceOp::Max, seed ^ 4, 1, counts.iter().sum()).remove(0);
    let mine = &joined[starts[me]..][..counts[me]];

    let mut destination = poison::<T>(joined.len());
    comm.all_gather_v_into(mine, &mut destination, &counts).unwrap();
    assert_bits(&what("all_gather_v_into"), &destination, &joined);
    let mut buffer = poison::<T>(joined.len());
    buffer[starts[me]..][..counts[me]].copy_from_slice(mine);
    comm.all_gather_v(&mut buffer, &counts).unwrap();
    assert_bits(&what("all_gather_v"), &buffer, &joined);

    let mut destination = poison::<T>(joined.len());
    comm.gather_v(mine, (me == root).then_some((&mut destination, &counts[..])), root).unwrap();
    assert_bits(&what("gather_v"), &destination, &if me == root { joined.clone() } else { poison(joined.len()) });

    let mut destination = poison::<T>(counts[me]);
    comm.scatter_v((me == root).then_some((&joined, &counts[..])), &mut destination, root).unwrap();
    assert_bits(&what("scatter_v"), &destination, mine);

    // Rank a sends (a + 2 b) % 4 × count elements to rank b.
    let pair = |from: usize, to: usize| (from + 2 * to) % 4 * count;
    let value = |from: usize, to: usize| inputs::<T>(ReduceOp::Max, seed ^ (from * 64 + to) as u64, 1, pair(from, to)).remove(0);
    let send_counts: Vec<usize> = (0..n).map(|to| pair(me, to)).collect();
    let receive_counts: Vec<usize> = (0..n).map(|from| pair(from, me)).collect();
    let source: Vec<T> = (0..n).flat_map(|to| value(me, to)).collect();
    let expected: Vec<T> = (0..n).flat_map(|from| value(from, me)).collect();
    let mut destination = poison::<T>(expected.len());
    comm.all_to_all_v_into(&source, &send_counts, &mut destination, &receive_counts).unwrap();
    assert_bits(&what("all_to_all_v_into"), &destination, &expected);
}

/// Runs `$body` for every element type as `$T`.
#[macro_export]
macro_rules! for_every_type {
    ($T:ident, $body:expr) => {{
        $crate::for_every_type!(@each $T, $body, f32 f64 f16 bf16 F8E4M3 F8E5M2 i8 i16 i32 i64 u8 u16 u32 u64 bool);
    }};
    (@each $T:ident, $body:expr, $($type:ty)*) => {$({ type $T = $type; $body; })*};
}

/// Every collective × op × type at the given counts.
pub fn everything(comm: &Communicator, counts: &[usize], seed: u64) {
    for (number, count) in counts.iter().enumerate() {
        let seed = seed.wrapping_add(number as u64);
        for_every_type!(T, {
            for op in ops() {
                if op.check(<T as collectives::Element>::ELEMENT_TYPE).is_ok() {
                    reductions::<T>(comm, op, *count, seed);
                }
            }
            movements::<T>(comm, *count, seed);
        });
        comm.barrier().unwrap();
    }
}
