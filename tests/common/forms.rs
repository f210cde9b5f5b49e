//! Every collective in each of its forms, on buffers of any kind: started, and in a group, against the blocking one.

use collectives::{Buffer, BufferMut, Communicator, Data, OwnedBuffer, ReduceOp, Reduction};

/// What a rank contributes: other numbers for each rank, seed and place.
fn numbers(seed: u64, rank: usize, count: usize) -> Vec<u32> {
    (0..count).map(|place| super::oracle::hash(seed, rank, place) as u32).collect()
}

/// Runs every form. `put` makes a buffer of elements that come of these numbers, `get` reads one.
pub fn every_form<E, B>(comm: &Communicator, seed: u64, put: impl Fn(&[u32]) -> B, get: impl Fn(&B) -> Vec<u32>)
where
    E: Data,
    B: OwnedBuffer + Buffer<Element = E> + BufferMut,
    ReduceOp: Into<Reduction<E>>,
{
    const COUNT: usize = 13;
    let (n, me, op) = (comm.world_size(), comm.rank(), ReduceOp::Max);
    let root = n - 1;
    let is_root = me == root;
    let counts: Vec<usize> = (0..n).map(|rank| (rank * 5 + 3) % 7).collect();
    let total: usize = counts.iter().sum();
    let some = |count: usize| put(&numbers(seed, me, count));
    let zeros = |count: usize| put(&vec![0; count]);
    // One buffer in place: blocking, started, in a group.
    macro_rules! in_place {
        ($name:ident, $start:ident, $count:expr, ($($argument:expr),*)) => {{
            let (mut blocking, mut grouped) = (some($count), some($count));
            comm.$name(&mut blocking $(, $argument)*).unwrap();
            let started = comm.$start(some($count) $(, $argument)*).unwrap().wait().unwrap();
            comm.group(|group| group.$name(&mut grouped $(, $argument)*)).unwrap();
            let blocking = get(&blocking);
            assert_eq!(get(&started), blocking, "{} on rank {me} of {n}, seed {seed}", stringify!($start));
            assert_eq!(get(&grouped), blocking, "{} in a group on rank {me} of {n}, seed {seed}", stringify!($name));
        }};
    }
    in_place!(all_reduce, start_all_reduce, COUNT, (op));
    in_place!(reduce, start_reduce, COUNT, (root, op));
    in_place!(broadcast, start_broadcast, COUNT, (root));
    in_place!(all_gather, start_all_gather, COUNT * n, ());
    in_place!(reduce_scatter, start_reduce_scatter, COUNT * n, (op));
    in_place!(gather, start_gather, if is_root { COUNT * n } else { COUNT }, (root));
    in_place!(scatter, start_scatter, if is_root { COUNT * n } else { COUNT }, (root));
    in_place!(all_to_all, start_all_to_all, COUNT * n, ());
    in_place!(all_gather_v, start_all_gather_v, total, (&counts));
    in_place!(reduce_scatter_v, start_reduce_scatter_v, total, (&counts, op));
    // From one buffer into another.
    macro_rules! into {
        ($name:ident, $start:ident, $source:expr, $destination:expr, ($($argument:expr),*)) => {{
            let source = some($source);
            let (mut blocking, mut grouped) = (zeros($destination), zeros($destination));
            comm.$name(&source, &mut blocking $(, $argument)*).unwrap();
            let (_, started) = comm.$start(some($source), zeros($destination) $(, $argument)*).unwrap().wait().unwrap();
            comm.group(|group| group.$name(&source, &mut grouped $(, $argument)*)).unwrap();
            let blocking = get(&blocking);
            assert_eq!(get(&started), blocking, "{} on rank {me} of {n}, seed {seed}", stringify!($start));
            assert_eq!(get(&grouped), blocking, "{} in a group on rank {me} of {n}, seed {seed}", stringify!($name));
        }};
    }
    into!(all_reduce_into, start_all_reduce_into, COUNT, COUNT, (op));
    into!(all_gather_into, start_all_gather_into, COUNT, COUNT * n, ());
    into!(reduce_scatter_into, start_reduce_scatter_into, COUNT * n, COUNT, (op));
    into!(all_to_all_into, start_all_to_all_into, COUNT * n, COUNT * n, ());
    into!(all_gather_v_into, start_all_gather_v_into, counts[me], total, (&counts));
    into!(reduce_scatter_v_into, start_reduce_scatter_v_into, total, counts[me], (&counts, op));
    // A destination on the root alone.
    macro_rules! to_root {
        ($name:ident, $start:ident, $source:expr, $destination:expr, $with:expr, ($($argument:expr),*)) => {{
            let source = some($source);
            let (mut blocking, mut grouped) = (zeros($destination), zeros($destination));
            comm.$name(&source, is_root.then_some(&mut blocking).map($with), root $(, $argument)*).unwrap();
            let work = comm.$start(some($source), is_root.then(|| zeros($destination)).map($with), root $(, $argument)*);
            let (_, started) = work.unwrap().wait().unwrap();
            comm.group(|group| group.$name(&source, is_root.then_some(&mut grouped).map($with), root $(, $argument)*)).unwrap();
            let blocking = get(&blocking);
            assert_eq!(started.map(|started| get(&started)), is_root.then(|| blocking.clone()), "{}, seed {seed}", stringify!($start));
            assert_eq!(get(&grouped), blocking, "{} in a group on rank {me} of {n}, seed {seed}", stringify!($name));
        }};
    }
    to_root!(reduce_into, start_reduce_into, COUNT, COUNT, |it| it, (op));
    to_root!(gather_into, start_gather_into, COUNT, COUNT * n, |it| it, ());
    to_root!(gather_v_into, start_gather_v_into, counts[me], total, |it| (it, &counts[..]), ());
    // A source on the root alone.
    macro_rules! from_root {
        ($name:ident, $start:ident, $source:expr, $destination:expr, $with:expr) => {{
            let source = some($source);
            let (mut blocking, mut grouped) = (zeros($destination), zeros($destination));
            comm.$name(is_root.then_some(&source).map($with), &mut blocking, root).unwrap();
            let work = comm.$start(is_root.then(|| some($source)).map($with), zeros($destination), root);
            let (_, started) = work.unwrap().wait().unwrap();
            comm.group(|group| group.$name(is_root.then_some(&source).map($with), &mut grouped, root)).unwrap();
            let blocking = get(&blocking);
            assert_eq!(get(&started), blocking, "{} on rank {me} of {n}, seed {seed}", stringify!($start));
            assert_eq!(get(&grouped), blocking, "{} in a group on rank {me} of {n}, seed {seed}", stringify!($name));
        }};
    }
    from_root!(broadcast_into, start_broadcast_into, COUNT, COUNT, |it| it);
    from_root!(scatter_into, start_scatter_into, COUNT * n, COUNT, |it| it);
    from_root!(scatter_v_into, start_scatter_v_into, total, counts[me], |it| (it, &counts[..]));
    // Other counts for each pair.
    let pair = |from: usize, to: usize| (from * 3 + to * 2) % 5;
    let (send, receive): (Vec<usize>, Vec<usize>) = (0..n).map(|other| (pair(me, other), pair(other, me))).unzip();
    let [sent, received] = [&send, &receive].map(|counts| counts.iter().sum::<usize>());
    let (source, mut blocking, mut grouped) = (some(sent), zeros(received), zeros(received));
    comm.all_to_all_v_into(&source, &send, &mut blocking, &receive).unwrap();
    let (_, started) = comm.start_all_to_all_v_into(some(sent), &send, zeros(received), &receive).unwrap().wait().unwrap();
    comm.group(|group| group.all_to_all_v_into(&source, &send, &mut grouped, &receive)).unwrap();
    assert_eq!(get(&started), get(&blocking), "start_all_to_all_v_into on rank {me} of {n}, seed {seed}");
    assert_eq!(get(&grouped), get(&blocking), "all_to_all_v_into in a group on rank {me} of {n}, seed {seed}");
}
