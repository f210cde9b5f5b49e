//! Collectives between two threads of one process: time per call, with every answer checked.
//!
//! `cargo bench`, or `cargo bench -- all_reduce`. For processes, other transports and more ranks use `cargo perf`, which measures
//! as nccl-tests does.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use collectives::{Communicator, ReduceOp, Transport, bf16};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// Runs `call` `iterations` times on two ranks at once; the slower rank's time.
fn on_two_ranks(transport: Transport, iterations: u64, call: impl Fn(&Communicator, u64) + Sync) -> Duration {
    let ready = Barrier::new(2);
    let times = Communicator::builder().transport(transport).run_local(2, |comm| {
        call(comm, 0);
        ready.wait();
        let begin = Instant::now();
        for iteration in 0..iterations {
            call(comm, iteration);
        }
        Ok(begin.elapsed())
    });
    times.expect("two ranks of this process").into_iter().max().unwrap_or_default()
}

fn all_reduce(criterion: &mut Criterion) {
    for (name, transport) in [("shm", Transport::Shm), ("tcp", Transport::Tcp)] {
        let mut group = criterion.benchmark_group(format!("all_reduce/{name}"));
        for count in [1_usize, 256, 16 << 10, 256 << 10] {
            group.throughput(Throughput::Bytes(4 * count as u64));
            group.bench_with_input(BenchmarkId::new("f32 sum", 4 * count), &count, |bencher, count| {
                bencher.iter_custom(|iterations| {
                    on_two_ranks(transport, iterations, |comm, _| {
                        let mut x = vec![1.0_f32; *count];
                        comm.all_reduce(&mut x, ReduceOp::Sum).expect("both ranks call it");
                        assert!(x[0] == 2.0 && x[*count - 1] == 2.0);
                    })
                });
            });
        }
        let count = 16 << 10;
        group.throughput(Throughput::Bytes(2 * count as u64));
        group.bench_function(BenchmarkId::new("bf16 avg", 2 * count), |bencher| {
            bencher.iter_custom(|iterations| {
                on_two_ranks(transport, iterations, |comm, _| {
                    let mut x = vec![bf16::from_f32(comm.rank() as f32); count];
                    comm.all_reduce(&mut x, ReduceOp::Avg).expect("both ranks call it");
                    assert!(x[0] == bf16::from_f32(0.5));
                })
            });
        });
        group.finish();
    }
}

fn messages(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("ping-pong");
    for bytes in [8_usize, 4 << 10, 1 << 20] {
        group.throughput(Throughput::Bytes(2 * bytes as u64));
        group.bench_with_input(BenchmarkId::new("shm", bytes), &bytes, |bencher, bytes| {
            bencher.iter_custom(|iterations| {
                on_two_ranks(Transport::Shm, iterations, |comm, iteration| {
                    let mut x = vec![iteration as u8; *bytes];
                    if comm.rank() == 0 {
                        comm.send(&x, 1).expect("rank 1 receives");
                        comm.recv(&mut x, 1).expect("rank 1 answers");
                    } else {
                        comm.recv(&mut x, 0).expect("rank 0 sends");
                        comm.send(&x, 0).expect("rank 0 receives");
                    }
                    assert_eq!(x[*bytes - 1], iteration as u8);
                })
            });
        });
    }
    group.finish();
}

criterion_group!(benches, all_reduce, messages);
criterion_main!(benches);
