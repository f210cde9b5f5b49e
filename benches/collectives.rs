//! Whole calls between two threads of one process, over shared memory and TCP: the time per call. Every result is
//! checked.
//!
//! `cargo bench --bench collectives`, or with a filter: `-- all_reduce`. For processes, other transports and more ranks use
//! `cargo perf`, which measures as nccl-tests does.

mod common;

use collectives::{Communicator, Envelope, ReduceOp, Transport, bf16};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

const TRANSPORTS: [(&str, Transport); 2] = [("shm", Transport::Shm), ("tcp", Transport::Tcp)];
/// Total numbers of elements, of four bytes each.
const COUNTS: [usize; 3] = [2, 16 << 10, 256 << 10];
const BOTH: &str = "both ranks call it";

/// One rank and its buffers.
struct Rank<T> {
    comm: Communicator,
    from: Vec<T>,
    into: Vec<T>,
}

/// Measures a call on two ranks. `from` and `into` are the numbers of elements of its input and output. `value` returns
/// a rank's input at an index, and `check` checks the result of each call.
fn measure<T: Copy + Default + Send>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    (name, transport): (&str, Transport),
    (from, into): (usize, usize),
    value: fn(usize, usize) -> T,
    call: impl Fn(&Communicator, &[T], &mut [T]) + Sync,
    check: impl Fn(usize, &[T]) -> bool + Sync,
) {
    let comms = Communicator::builder().configure(|config| config.transport = transport).local(2).expect("two ranks of this process");
    let rank = |(rank, comm)| Rank { comm, from: (0..from).map(|index| value(rank, index)).collect(), into: vec![T::default(); into] };
    let mut ranks: Vec<_> = comms.into_iter().enumerate().map(rank).collect();
    let bytes = size_of::<T>() * from.max(into);
    group.throughput(Throughput::Bytes(bytes as u64));
    group.bench_function(BenchmarkId::new(name, bytes), |bencher| {
        bencher.iter_custom(|iterations| {
            common::together(&mut ranks, iterations, |index, rank, _| {
                call(&rank.comm, &rank.from, &mut rank.into);
                assert!(check(index, &rank.into), "{name}: a wrong answer");
            })
        });
    });
}

fn number(rank: usize, index: usize) -> f32 {
    (rank * 1000 + index % 900) as f32
}

/// Returns whether `got` equals `expected` at both ends and in the middle.
fn is(got: &[f32], expected: impl Fn(usize) -> f32) -> bool {
    [0, got.len() / 2, got.len() - 1].into_iter().all(|index| got[index] == expected(index))
}

fn all_reduce(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("all_reduce");
    for transport in TRANSPORTS {
        for count in COUNTS {
            let call = |comm: &Communicator, from: &[f32], into: &mut [f32]| comm.all_reduce_into(from, into, ReduceOp::Sum).expect(BOTH);
            measure(&mut group, transport, (count, count), number, call, |_, got| is(got, |index| number(0, index) + number(1, index)));
        }
        let call = |comm: &Communicator, from: &[bf16], into: &mut [bf16]| comm.all_reduce_into(from, into, ReduceOp::Avg).expect(BOTH);
        let half = |rank, _| bf16::from_f32(rank as f32);
        let name = (&*format!("{} bf16 avg", transport.0), transport.1);
        measure(&mut group, name, (32 << 10, 32 << 10), half, call, |_, got| got.iter().step_by(9999).all(|x| x.to_f32() == 0.5));
    }
    group.finish();
}

fn broadcast(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("broadcast");
    for transport in TRANSPORTS {
        for count in COUNTS {
            let call = |comm: &Communicator, from: &[f32], into: &mut [f32]| {
                comm.broadcast_into((comm.rank() == 0).then_some(from), into, 0).expect(BOTH);
            };
            measure(&mut group, transport, (count, count), number, call, |_, got| is(got, |index| number(0, index)));
        }
    }
    group.finish();
}

fn all_gather(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("all_gather");
    for transport in TRANSPORTS {
        for count in COUNTS {
            let half = count / 2;
            let call = |comm: &Communicator, from: &[f32], into: &mut [f32]| comm.all_gather_into(from, into).expect(BOTH);
            measure(&mut group, transport, (half, count), number, call, |_, got| is(got, |index| number(index / half, index % half)));
        }
    }
    group.finish();
}

fn reduce_scatter(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("reduce_scatter");
    for transport in TRANSPORTS {
        for count in COUNTS {
            let half = count / 2;
            let call =
                |comm: &Communicator, from: &[f32], into: &mut [f32]| comm.reduce_scatter_into(from, into, ReduceOp::Sum).expect(BOTH);
            let sum = |index| number(0, index) + number(1, index);
            measure(&mut group, transport, (count, half), number, call, |rank, got| is(got, |index| sum(rank * half + index)));
        }
    }
    group.finish();
}

fn all_to_all(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("all_to_all");
    for transport in TRANSPORTS {
        for count in COUNTS {
            let half = count / 2;
            let call = |comm: &Communicator, from: &[f32], into: &mut [f32]| comm.all_to_all_into(from, into).expect(BOTH);
            let check = |rank, got: &[f32]| is(got, |index| number(index / half, rank * half + index % half));
            measure(&mut group, transport, (count, count), number, call, check);
        }
    }
    group.finish();
}

fn barrier(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("barrier");
    for transport in TRANSPORTS {
        measure(&mut group, transport, (0, 0), number, |comm, _, _| comm.barrier().expect(BOTH), |_, _| true);
    }
    group.finish();
}

/// Measures a message in each direction.
fn messages(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("ping-pong");
    for transport in TRANSPORTS {
        for count in COUNTS {
            let call = |comm: &Communicator, from: &[f32], into: &mut [f32]| {
                if comm.rank() == 0 {
                    comm.send(from, 1).expect("rank 1 receives");
                    comm.recv(into, 1).expect("rank 1 answers");
                } else {
                    comm.recv(into, 0).expect("rank 0 sends");
                    comm.send(from, 0).expect("rank 0 receives");
                }
            };
            measure(&mut group, transport, (count, count), number, call, |rank, got| is(got, |index| number(1 - rank, index)));
        }
    }
    group.finish();
}

/// Measures eight messages in each direction, fused into one group.
fn groups(criterion: &mut Criterion) {
    const PARTS: usize = 8;
    let mut group = criterion.benchmark_group("group of 8");
    for transport in TRANSPORTS {
        for count in [PARTS, 16 << 10, 256 << 10] {
            let part = count / PARTS;
            let call = |comm: &Communicator, from: &[f32], into: &mut [f32]| {
                let peer = 1 - comm.rank();
                let fused = comm.group(|group| {
                    let mut pairs = from.chunks(part).zip(into.chunks_mut(part)).enumerate();
                    pairs.try_for_each(|(tag, (from, into))| {
                        group.send(from, Envelope::rank(peer).tag(tag as u64))?;
                        group.recv(into, Envelope::rank(peer).tag(tag as u64))
                    })
                });
                assert_eq!(fused.expect(BOTH).len(), PARTS);
            };
            measure(&mut group, transport, (count, count), number, call, |rank, got| is(got, |index| number(1 - rank, index)));
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = common::criterion();
    targets = all_reduce, broadcast, all_gather, reduce_scatter, all_to_all, barrier, messages, groups
}
criterion_main!(benches);
