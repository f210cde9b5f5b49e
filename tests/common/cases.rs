//! Every collective on one communicator, compared with the oracle, bit by bit.

use collectives::{BufferMut, Communicator, Data, F8E4M3, F8E5M2, ReduceOp, Reduction, Result, bf16, f16};

use super::oracle::{Predict, SCALAR, assert_bits, folded, inputs};

/// Returns the reduce ops, with a scalar whose effect is visible.
pub fn ops() -> Vec<ReduceOp> {
    ReduceOp::ALL.into_iter().map(|op| if matches!(op, ReduceOp::PreMulSum(_)) { ReduceOp::PreMulSum(SCALAR) } else { op }).collect()
}

/// Returns a pattern for memory that a call must leave alone.
fn poison<T: Predict>(count: usize) -> Vec<T> {
    (0..count).map(|index| T::input(ReduceOp::Max, 0xbad, 99, index, 4)).collect()
}

/// The kind of memory that holds the buffers of a test.
pub trait Memory {
    /// The element type that calls see.
    type Element<T: Predict>: Data;

    /// A buffer in this memory.
    type Buffer<T: Predict>: BufferMut<Element = Self::Element<T>>;

    /// Returns the reduction of such buffers by `op`.
    fn reduction<T: Predict>(&self, op: ReduceOp) -> Reduction<Self::Element<T>>;

    /// Creates a buffer that holds these elements.
    fn put<T: Predict>(&self, elements: &[T]) -> Self::Buffer<T>;

    /// Returns the elements of a buffer.
    fn get<T: Predict>(&self, buffer: &Self::Buffer<T>) -> Vec<T>;

    /// Makes a call on such buffers, in the way under test.
    fn make(&self, call: impl FnOnce() -> Result<()>) -> Result<()> {
        call()
    }
}

/// Ordinary memory.
pub struct HostMemory;

impl Memory for HostMemory {
    type Element<T: Predict> = T;
    type Buffer<T: Predict> = Vec<T>;

    fn reduction<T: Predict>(&self, op: ReduceOp) -> Reduction<T> {
        op.into()
    }

    fn put<T: Predict>(&self, elements: &[T]) -> Vec<T> {
        elements.to_vec()
    }

    fn get<T: Predict>(&self, buffer: &Vec<T>) -> Vec<T> {
        buffer.clone()
    }
}

/// Checks every reducing collective with one op and type, in place and not.
pub fn reductions<T: Predict>(comm: &Communicator, op: ReduceOp, count: usize, seed: u64) {
    reductions_in::<T, _>(&HostMemory, comm, op, count, seed);
}

/// Does the same as [`reductions`], on buffers in `memory`.
pub fn reductions_in<T: Predict, M: Memory>(memory: &M, comm: &Communicator, op: ReduceOp, count: usize, seed: u64) {
    let (n, me) = (comm.world_size(), comm.rank());
    let what = |call: &str| format!("{call}({op}, {}, {count}) on rank {me} of {n}, seed {seed}", T::ELEMENT_TYPE);
    let check = |call: &str, buffer: &M::Buffer<T>, expected: &[T]| assert_bits(&what(call), &memory.get(buffer), expected);
    let all = inputs::<T>(op, seed, n, count);
    let expected = folded(op, &all);
    let (source, poisoned) = (memory.put(&all[me]), poison::<T>(count));

    let mut buffer = memory.put(&all[me]);
    memory.make(|| comm.all_reduce(&mut buffer, memory.reduction::<T>(op))).unwrap();
    check("all_reduce", &buffer, &expected);

    let mut destination = memory.put(&poisoned);
    memory.make(|| comm.all_reduce_into(&source, &mut destination, memory.reduction::<T>(op))).unwrap();
    check("all_reduce_into", &destination, &expected);
    check("all_reduce_into, the source", &source, &all[me]);

    let root = seed as usize % n;
    let mut buffer = memory.put(&all[me]);
    memory.make(|| comm.reduce(&mut buffer, root, memory.reduction::<T>(op))).unwrap();
    check("reduce", &buffer, if me == root { &expected } else { &all[me] });

    let mut destination = memory.put(&poisoned);
    memory.make(|| comm.reduce_into(&source, (me == root).then_some(&mut destination), root, memory.reduction::<T>(op))).unwrap();
    check("reduce_into", &destination, if me == root { &expected } else { &poisoned });

    scattered_reductions::<T, M>(memory, comm, op, count, seed);
}

/// Checks the reducing collectives that leave each rank with its block.
fn scattered_reductions<T: Predict, M: Memory>(memory: &M, comm: &Communicator, op: ReduceOp, count: usize, seed: u64) {
    let (n, me) = (comm.world_size(), comm.rank());
    let what = |call: &str| format!("{call}({op}, {}, {count}) on rank {me} of {n}, seed {seed}", T::ELEMENT_TYPE);
    let wide = inputs::<T>(op, seed ^ 1, n, count * n);
    let expected = folded(op, &wide);
    let block = me * count..(me + 1) * count;
    let mut buffer = memory.put(&wide[me]);
    memory.make(|| comm.reduce_scatter(&mut buffer, memory.reduction::<T>(op))).unwrap();
    let got = memory.get(&buffer);
    assert_bits(&what("reduce_scatter"), &got[block.clone()], &expected[block.clone()]);
    assert_bits(&what("reduce_scatter, before the block"), &got[..block.start], &wide[me][..block.start]);
    assert_bits(&what("reduce_scatter, behind the block"), &got[block.end..], &wide[me][block.end..]);

    let mut destination = memory.put(&poison::<T>(count));
    let wide_source = memory.put(&wide[me]);
    memory.make(|| comm.reduce_scatter_into(&wide_source, &mut destination, memory.reduction::<T>(op))).unwrap();
    assert_bits(&what("reduce_scatter_into"), &memory.get(&destination), &expected[block]);

    let counts: Vec<usize> = (0..n).map(|rank| (rank + count) % 3 * count).collect();
    let wide = inputs::<T>(op, seed ^ 2, n, counts.iter().sum());
    let expected = folded(op, &wide);
    let start: usize = counts[..me].iter().sum();
    let own = start..start + counts[me];
    let mut destination = memory.put(&poison::<T>(counts[me]));
    let wide_source = memory.put(&wide[me]);
    memory.make(|| comm.reduce_scatter_v_into(&wide_source, &mut destination, &counts, memory.reduction::<T>(op))).unwrap();
    assert_bits(&what("reduce_scatter_v_into"), &memory.get(&destination), &expected[own.clone()]);
    let mut buffer = memory.put(&wide[me]);
    memory.make(|| comm.reduce_scatter_v(&mut buffer, &counts, memory.reduction::<T>(op))).unwrap();
    assert_bits(&what("reduce_scatter_v"), &memory.get(&buffer)[own.clone()], &expected[own]);
}

/// Checks every moving collective with one type, in place and not.
pub fn movements<T: Predict>(comm: &Communicator, count: usize, seed: u64) {
    movements_in::<T, _>(&HostMemory, comm, count, seed);
}

/// Does the same as [`movements`], on buffers in `memory`.
pub fn movements_in<T: Predict, M: Memory>(memory: &M, comm: &Communicator, count: usize, seed: u64) {
    let (n, me) = (comm.world_size(), comm.rank());
    let what = |call: &str| format!("{call}({}, {count}) on rank {me} of {n}, seed {seed}", T::ELEMENT_TYPE);
    let check = |call: &str, buffer: &M::Buffer<T>, expected: &[T]| assert_bits(&what(call), &memory.get(buffer), expected);
    let root = seed as usize % n;
    let all = inputs::<T>(ReduceOp::Max, seed, n, count);
    let joined: Vec<T> = all.concat();
    let own = me * count..(me + 1) * count;
    let source = memory.put(&all[me]);

    let mut buffer = memory.put(&all[me]);
    memory.make(|| comm.broadcast(&mut buffer, root)).unwrap();
    check("broadcast", &buffer, &all[root]);
    let mut destination = memory.put(&poison::<T>(count));
    memory.make(|| comm.broadcast_into((me == root).then_some(&source), &mut destination, root)).unwrap();
    check("broadcast_into", &destination, &all[root]);

    let mut destination = memory.put(&poison::<T>(count * n));
    memory.make(|| comm.all_gather_into(&source, &mut destination)).unwrap();
    check("all_gather_into", &destination, &joined);
    let mut mine = poison::<T>(count * n);
    mine[own.clone()].copy_from_slice(&all[me]);
    let mut buffer = memory.put(&mine);
    memory.make(|| comm.all_gather(&mut buffer)).unwrap();
    check("all_gather", &buffer, &joined);

    let mut destination = memory.put(&poison::<T>(count * n));
    memory.make(|| comm.gather_into(&source, (me == root).then_some(&mut destination), root)).unwrap();
    check("gather", &destination, &if me == root { joined.clone() } else { poison(count * n) });
    let mut buffer = memory.put(if me == root { &mine } else { &all[me] });
    memory.make(|| comm.gather(&mut buffer, root)).unwrap();
    check("gather", &buffer, if me == root { &joined } else { &all[me] });

    let (whole, mut destination) = (memory.put(&joined), memory.put(&poison::<T>(count)));
    memory.make(|| comm.scatter_into((me == root).then_some(&whole), &mut destination, root)).unwrap();
    check("scatter", &destination, &all[me]);
    let mut buffer = memory.put(&if me == root { joined.clone() } else { poison::<T>(count) });
    memory.make(|| comm.scatter(&mut buffer, root)).unwrap();
    check("scatter", &buffer, if me == root { &joined } else { &all[me] });

    let matrix = inputs::<T>(ReduceOp::Max, seed ^ 3, n, count * n);
    let expected: Vec<T> = matrix.iter().flat_map(|row| row[own.clone()].to_vec()).collect();
    let mut destination = memory.put(&poison::<T>(count * n));
    let wide_source = memory.put(&matrix[me]);
    memory.make(|| comm.all_to_all_into(&wide_source, &mut destination)).unwrap();
    check("all_to_all_into", &destination, &expected);
    let mut buffer = memory.put(&matrix[me]);
    memory.make(|| comm.all_to_all(&mut buffer)).unwrap();
    check("all_to_all", &buffer, &expected);

    unequal_movements::<T, M>(memory, comm, count, seed);
}

/// Checks the moving collectives with a count for each rank.
fn unequal_movements<T: Predict, M: Memory>(memory: &M, comm: &Communicator, count: usize, seed: u64) {
    let (n, me) = (comm.world_size(), comm.rank());
    let what = |call: &str| format!("{call}({}, {count}) on rank {me} of {n}, seed {seed}", T::ELEMENT_TYPE);
    let check = |call: &str, buffer: &M::Buffer<T>, expected: &[T]| assert_bits(&what(call), &memory.get(buffer), expected);
    let root = seed as usize % n;
    let counts: Vec<usize> = (0..n).map(|rank| (rank + 1) % 3 * count).collect();
    let starts: Vec<usize> = (0..n).map(|rank| counts[..rank].iter().sum()).collect();
    let joined = inputs::<T>(ReduceOp::Max, seed ^ 4, 1, counts.iter().sum()).remove(0);
    let mine = &joined[starts[me]..][..counts[me]];
    let source = memory.put(mine);

    let mut destination = memory.put(&poison::<T>(joined.len()));
    memory.make(|| comm.all_gather_v_into(&source, &mut destination, &counts)).unwrap();
    check("all_gather_v_into", &destination, &joined);
    let mut own = poison::<T>(joined.len());
    own[starts[me]..][..counts[me]].copy_from_slice(mine);
    let mut buffer = memory.put(&own);
    memory.make(|| comm.all_gather_v(&mut buffer, &counts)).unwrap();
    check("all_gather_v", &buffer, &joined);

    let mut destination = memory.put(&poison::<T>(joined.len()));
    memory.make(|| comm.gather_v_into(&source, (me == root).then_some((&mut destination, &counts[..])), root)).unwrap();
    check("gather_v", &destination, &if me == root { joined.clone() } else { poison(joined.len()) });

    let (whole, mut destination) = (memory.put(&joined), memory.put(&poison::<T>(counts[me])));
    memory.make(|| comm.scatter_v_into((me == root).then_some((&whole, &counts[..])), &mut destination, root)).unwrap();
    check("scatter_v", &destination, mine);

    // Rank a sends (a + 2 b) % 4 × count elements to rank b.
    let pair = |from: usize, to: usize| (from + 2 * to) % 4 * count;
    let value = |from: usize, to: usize| inputs::<T>(ReduceOp::Max, seed ^ (from * 64 + to) as u64, 1, pair(from, to)).remove(0);
    let send_counts: Vec<usize> = (0..n).map(|to| pair(me, to)).collect();
    let receive_counts: Vec<usize> = (0..n).map(|from| pair(from, me)).collect();
    let source: Vec<T> = (0..n).flat_map(|to| value(me, to)).collect();
    let expected: Vec<T> = (0..n).flat_map(|from| value(from, me)).collect();
    let mut destination = memory.put(&poison::<T>(expected.len()));
    let wide_source = memory.put(&source);
    memory.make(|| comm.all_to_all_v_into(&wide_source, &send_counts, &mut destination, &receive_counts)).unwrap();
    check("all_to_all_v_into", &destination, &expected);
}

/// Runs `$body` for every element type as `$T`.
#[macro_export]
macro_rules! for_every_type {
    ($T:ident, $body:expr) => {{
        $crate::for_every_type!(@each $T, $body, f32 f64 f16 bf16 F8E4M3 F8E5M2 i8 i16 i32 i64 u8 u16 u32 u64 bool);
    }};
    (@each $T:ident, $body:expr, $($type:ty)*) => {$({ type $T = $type; $body; })*};
}

/// Checks every collective × op × type at the given counts.
pub fn everything(comm: &Communicator, counts: &[usize], seed: u64) {
    everything_in(&HostMemory, comm, counts, seed);
}

/// Does the same as [`everything`], on buffers in `memory`.
pub fn everything_in<M: Memory>(memory: &M, comm: &Communicator, counts: &[usize], seed: u64) {
    for (number, count) in counts.iter().enumerate() {
        let seed = seed.wrapping_add(number as u64);
        for_every_type!(T, {
            for op in ops() {
                if op.check(<T as collectives::Element>::ELEMENT_TYPE).is_ok() {
                    reductions_in::<T, M>(memory, comm, op, *count, seed);
                }
            }
            movements_in::<T, M>(memory, comm, *count, seed);
        });
        comm.barrier().unwrap();
    }
}
