//! Frames over the links between two ranks: rings in shared memory, and TCP over the loopback interface, plain and
//! encrypted (with the feature `encryption`).
//!
//! `cargo bench --features __internals --bench links`. A frame is a header of 52 bytes and a payload. "there and back"
//! is a frame in each direction; "one way" is a series of frames. The reader checks the first and last bytes of each
//! frame, and all bytes of the first one.

mod common;

use collectives::internals::Link;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

const HEADER: usize = 52;
const PAYLOADS: [usize; 4] = [0, 1 << 10, 64 << 10, 1 << 20];

/// One end, with a buffer for an outgoing frame and one for an incoming frame.
struct End {
    link: Link,
    sent: Vec<u8>,
    got: Vec<u8>,
}

impl End {
    fn new(link: Link, payload: usize) -> Self {
        let sent: Vec<u8> = (0..HEADER + payload).map(|index| (index % 251) as u8).collect();
        Self { link, got: vec![0; sent.len()], sent }
    }

    fn write(&mut self, mark: u64) {
        self.sent[0] = mark as u8;
        *self.sent.last_mut().expect("a header at least") = !mark as u8;
        self.link.write(&self.sent[..HEADER], &self.sent[HEADER..]).expect("the other end reads");
    }

    fn read(&mut self, mark: u64) {
        self.link.read(&mut self.got).expect("the other end writes");
        let last = self.got.len() - 1;
        assert!(self.got[0] == mark as u8 && self.got[last] == !mark as u8, "another frame");
        if mark == 0 {
            assert!(self.got[1..last] == self.sent[1..last], "other bytes");
        }
    }
}

fn frames(criterion: &mut Criterion, name: &str, open: fn() -> collectives::Result<Vec<Link>>) {
    let mut group = criterion.benchmark_group(name);
    for payload in PAYLOADS {
        let mut ends: Vec<End> = open().expect("a link").into_iter().map(|link| End::new(link, payload)).collect();
        group.throughput(Throughput::Bytes(2 * (HEADER + payload) as u64));
        group.bench_function(BenchmarkId::new("there and back", payload), |bencher| {
            bencher.iter_custom(|iterations| {
                common::together(&mut ends, iterations, |rank, end, mark| {
                    if rank == 0 {
                        end.write(mark);
                        end.read(mark);
                    } else {
                        end.read(mark);
                        end.write(mark);
                    }
                })
            });
        });
        group.throughput(Throughput::Bytes((HEADER + payload) as u64));
        group.bench_function(BenchmarkId::new("one way", payload), |bencher| {
            bencher.iter_custom(|iterations| {
                common::together(&mut ends, iterations, |rank, end, mark| if rank == 0 { end.write(mark) } else { end.read(mark) })
            });
        });
    }
    group.finish();
}

fn rings(criterion: &mut Criterion) {
    frames(criterion, "ring", Link::rings);
}

fn tcp(criterion: &mut Criterion) {
    frames(criterion, "tcp", Link::tcp);
}

/// Measures TCP with encryption, if this build has it.
fn encrypted(criterion: &mut Criterion) {
    if cfg!(feature = "encryption") {
        frames(criterion, "encrypted", Link::encrypted);
    }
}

criterion_group! {
    name = benches;
    config = common::criterion();
    targets = rings, tcp, encrypted
}
criterion_main!(benches);
