//! Every collective on buffers of any kind, as a started call and in a group, compared with the blocking call.

use collectives::{Buffer, BufferMut, Communicator, Data, OwnedBuffer, ReduceOp, Reduction};

/// Returns a rank's contribution. Its numbers depend on seed, rank and place.
fn numbers(seed: u64, rank: usize, count: usize) -> Vec<u32> {
    (0..count).map(|place| super::oracle::hash(seed, rank, place) as u32).collect()
}

/// Checks every form. `put` creates a buffer of elements from such numbers, and `get` reads one.
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
    // A destination on the root only.
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
    // A source on the root only.
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
    // The counts differ between pairs.
    let pair = |from: usize, to: usize| (from * 3 + to * 2) % 5;
    let (send, receive): (Vec<usize>, Vec<usize>) = (0..n).map(|other| (pair(me, other), pair(other, me))).unzip();
    let [sent, received] = [&send, &receive].map(|counts| counts.iter().sum::<usize>());
    let (source, mut blocking, mut grouped) = (some(sent), zeros(received), zeros(received));
    comm.all_to_all_v_into(&source, &send, &mut blocking, &receive).unwrap();
    let (_, started) = comm.start_all_to_all_v_into(some(sent), &send, zeros(received), &receive).unwrap().wait().unwrap();
    comm.group(|group| group.all_to_all_v_into(&source, &send, &mut grouped, &receive)).unwrap();
    assert_eq!(get(&started), get(&blocking), "start_all_to_all_v_into on rank {me} of {n}, seed {seed}");
    assert_eq!(get(&grouped), get(&blocking), "all_to_all_v_into in a group on rank {me} of {n}, seed {seed}");
    many_forms(comm, seed, &put, &get);
    list_forms(comm, seed, &put, &get);
}

/// Checks the forms on several buffers, each against separate calls on each buffer.
fn many_forms<E, B>(comm: &Communicator, seed: u64, put: &impl Fn(&[u32]) -> B, get: &impl Fn(&B) -> Vec<u32>)
where
    E: Data,
    B: OwnedBuffer + Buffer<Element = E> + BufferMut,
    ReduceOp: Into<Reduction<E>>,
{
    /// Lengths of which one is too long to be joined with others, in every form.
    const LENGTHS: [usize; 5] = [5, 0, 40_000, 1, 700];
    // Exact for every type, however many buffers are reduced at once.
    let (n, me, op) = (comm.world_size(), comm.rank(), ReduceOp::Max);
    let root = n / 2;
    let some = |blocks: usize| LENGTHS.iter().map(|length| put(&numbers(seed, me, length * blocks))).collect::<Vec<_>>();
    let zeros = |blocks: usize| LENGTHS.iter().map(|length| put(&vec![0; length * blocks])).collect::<Vec<_>>();
    let gets = |buffers: &[B]| buffers.iter().map(get).collect::<Vec<_>>();
    macro_rules! in_place {
        ($name:ident, $start:ident, $one:ident, ($($argument:expr),*)) => {{
            let (mut each, mut blocking, mut grouped) = (some(1), some(1), some(1));
            each.iter_mut().for_each(|buffer| comm.$one(buffer $(, $argument)*).unwrap());
            comm.$name(&mut blocking $(, $argument)*).unwrap();
            let started = comm.$start(some(1) $(, $argument)*).unwrap().wait().unwrap();
            comm.group(|group| group.$name(&mut grouped $(, $argument)*)).unwrap();
            let each = gets(&each);
            assert_eq!(gets(&blocking), each, "{} on rank {me} of {n}, seed {seed}", stringify!($name));
            assert_eq!(gets(&started), each, "{} on rank {me} of {n}, seed {seed}", stringify!($start));
            assert_eq!(gets(&grouped), each, "{} in a group on rank {me} of {n}, seed {seed}", stringify!($name));
        }};
    }
    in_place!(all_reduce_many, start_all_reduce_many, all_reduce, (op));
    in_place!(broadcast_many, start_broadcast_many, broadcast, (root));
    macro_rules! into {
        ($name:ident, $start:ident, $one:ident, $source:expr, $destination:expr, ($($argument:expr),*)) => {{
            let sources = some($source);
            let (mut each, mut blocking, mut grouped) = (zeros($destination), zeros($destination), zeros($destination));
            sources.iter().zip(&mut each).for_each(|(source, destination)| comm.$one(source, destination $(, $argument)*).unwrap());
            comm.$name(&sources, &mut blocking $(, $argument)*).unwrap();
            let (_, started) = comm.$start(some($source), zeros($destination) $(, $argument)*).unwrap().wait().unwrap();
            comm.group(|group| group.$name(&sources, &mut grouped $(, $argument)*)).unwrap();
            let each = gets(&each);
            assert_eq!(gets(&blocking), each, "{} on rank {me} of {n}, seed {seed}", stringify!($name));
            assert_eq!(gets(&started), each, "{} on rank {me} of {n}, seed {seed}", stringify!($start));
            assert_eq!(gets(&grouped), each, "{} in a group on rank {me} of {n}, seed {seed}", stringify!($name));
        }};
    }
    into!(all_gather_many_into, start_all_gather_many_into, all_gather_into, 1, n, ());
    into!(reduce_scatter_many_into, start_reduce_scatter_many_into, reduce_scatter_into, n, 1, (op));
}

/// Checks the forms with lists against the known contributions of the ranks.
fn list_forms<E, B>(comm: &Communicator, seed: u64, put: &impl Fn(&[u32]) -> B, get: &impl Fn(&B) -> Vec<u32>)
where
    E: Data,
    B: OwnedBuffer + Buffer<Element = E> + BufferMut,
{
    let (n, me) = (comm.world_size(), comm.rank());
    let root = n / 2;
    // The lengths differ between pairs. A call with one source for all ranks uses the length for its root.
    let length = |from: usize, to: usize| [3, 0, 1500, 1][(from + 2 * to + from * to) % 4];
    let made = |from: usize, to: usize| put(&numbers(seed + to as u64, from, length(from, to)));
    let of = |from: usize, to: usize| get(&made(from, to));
    let gets = |buffers: &[B]| buffers.iter().map(get).collect::<Vec<_>>();
    let check = |what: &str, got: [Vec<Vec<u32>>; 3], expected: &[Vec<u32>]| {
        for (form, got) in ["blocking", "started", "in a group"].iter().zip(got) {
            assert_eq!(got, expected, "{what}, {form}, on rank {me} of {n}, seed {seed}");
        }
    };
    let room = |lengths: &dyn Fn(usize) -> usize| (0..n).map(|rank| put(&vec![0; lengths(rank)])).collect::<Vec<_>>();
    let at_root = |list: Vec<B>| (me == root).then_some(list);
    // Each rank's source for the root.
    let source = made(me, root);
    let from = |rank: usize| length(rank, root);
    let (mut blocking, mut grouped) = (at_root(room(&from)), at_root(room(&from)));
    comm.gather_list(&source, blocking.as_deref_mut(), root).unwrap();
    let (_, started) = comm.start_gather_list(made(me, root), at_root(room(&from)), root).unwrap().wait().unwrap();
    comm.group(|group| group.gather_list(&source, grouped.as_deref_mut(), root)).unwrap();
    let expected: Vec<_> = (0..n).filter(|_| me == root).map(|rank| of(rank, root)).collect();
    check("gather_list", [blocking, started, grouped].map(|list| list.map_or(Vec::new(), |list| gets(&list))), &expected);
    // The root's sources for all ranks.
    let sources = || at_root((0..n).map(|rank| made(root, rank)).collect());
    let (given, own) = (sources(), || put(&vec![0; length(root, me)]));
    let (mut blocking, mut grouped) = (own(), own());
    comm.scatter_list(given.as_deref(), &mut blocking, root).unwrap();
    let (_, started) = comm.start_scatter_list(sources(), own(), root).unwrap().wait().unwrap();
    comm.group(|group| group.scatter_list(given.as_deref(), &mut grouped, root)).unwrap();
    check("scatter_list", [blocking, started, grouped].map(|own| vec![get(&own)]), &[of(root, me)]);
    // Each rank's source for all ranks.
    let (mut blocking, mut grouped) = (room(&from), room(&from));
    comm.all_gather_list(&source, &mut blocking).unwrap();
    let (_, started) = comm.start_all_gather_list(made(me, root), room(&from)).unwrap().wait().unwrap();
    comm.group(|group| group.all_gather_list(&source, &mut grouped)).unwrap();
    let expected: Vec<_> = (0..n).map(|rank| of(rank, root)).collect();
    check("all_gather_list", [blocking, started, grouped].map(|list| gets(&list)), &expected);
    // A source for each pair.
    let sources = || (0..n).map(|rank| made(me, rank)).collect::<Vec<_>>();
    let (given, from) = (sources(), |rank: usize| length(rank, me));
    let (mut blocking, mut grouped) = (room(&from), room(&from));
    comm.all_to_all_list(&given, &mut blocking).unwrap();
    let (_, started) = comm.start_all_to_all_list(sources(), room(&from)).unwrap().wait().unwrap();
    comm.group(|group| group.all_to_all_list(&given, &mut grouped)).unwrap();
    let expected: Vec<_> = (0..n).map(|rank| of(rank, me)).collect();
    check("all_to_all_list", [blocking, started, grouped].map(|list| gets(&list)), &expected);
}
