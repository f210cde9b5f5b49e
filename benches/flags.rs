//! The step protocol of shared memory: the time of a flag from one core to another and back, and of a step of all
//! ranks.
//!
//! `cargo bench --features __internals --bench flags`. Every flag carries data that its reader checks.

mod common;

use collectives::internals::Mailboxes;
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};

/// Measures two hops: divide by two for one.
fn volleys(criterion: &mut Criterion) {
    let mut mailboxes = Mailboxes::between(2).expect("two ranks of this process");
    criterion.bench_function("flag there and back", |bencher| {
        bencher.iter_custom(|iterations| {
            common::together(&mut mailboxes, iterations, |rank, mailboxes, _| mailboxes.volley(rank == 0).expect("the other rank answers"))
        });
    });
}

fn steps(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("step");
    for ranks in [2, 4, 8] {
        let mut mailboxes = Mailboxes::between(ranks).expect("ranks of this process");
        group.bench_function(BenchmarkId::from_parameter(ranks), |bencher| {
            bencher.iter_custom(|iterations| {
                common::together(&mut mailboxes, iterations, |_, mailboxes, _| mailboxes.step().expect("all ranks make the step"))
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = common::criterion();
    targets = volleys, steps
}
criterion_main!(benches);
