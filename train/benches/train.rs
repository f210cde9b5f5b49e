//! Steps of training: a backward pass that gives gradients one after another, averaged in buckets beside it, one call for each
//! parameter, or one call at the end. Two threads are the ranks.

use std::time::{Duration, Instant};

use collectives::{Communicator, ReduceOp, Transport};
use collectives_train::{DataParallel, Flat, Options, Parameter};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};

#[path = "../../benches/common/mod.rs"]
mod common;

const BOTH: &str = "both ranks make the same calls";

/// The shapes of a ResNet-50: 161 parameters, 25.6 million elements.
fn resnet() -> Vec<usize> {
    let mut lens = vec![64 * 3 * 49, 64, 64];
    let mut from = 64;
    for (width, blocks) in [(64, 3), (128, 4), (256, 6), (512, 3)] {
        for block in 0..blocks {
            let convolutions = [(width * from, width), (width * width * 9, width), (width * width * 4, width * 4)];
            lens.extend(convolutions.iter().flat_map(|(weights, channels)| [*weights, *channels, *channels]));
            if block == 0 {
                lens.extend([from * width * 4, width * 4, width * 4]);
            }
            from = width * 4;
        }
    }
    lens.extend([2048 * 1000, 1000]);
    lens
}

/// The shapes of the smallest GPT-2: 12 layers, 148 parameters, 124.4 million elements.
fn gpt2() -> Vec<usize> {
    const WIDTH: usize = 768;
    let normalisation = [WIDTH, WIDTH];
    let matrices = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)];
    let mut lens = vec![50_257 * WIDTH, 1024 * WIDTH];
    for _ in 0..12 {
        lens.extend(matrices.iter().flat_map(|(inputs, outputs)| [inputs * outputs, *outputs]));
        lens.extend([normalisation, normalisation].as_flattened());
    }
    lens.extend(normalisation);
    lens
}

/// Where the backward pass is computed: on this thread, or elsewhere (on an accelerator), while this thread sleeps.
#[derive(Clone, Copy)]
enum Compute {
    Here,
    Elsewhere,
}

/// A backward pass of this length in all, in shares by size.
struct Backward {
    compute: Compute,
    nanoseconds_per_element: f64,
    /// What has been computed and not yet slept for.
    due: Duration,
}

impl Backward {
    fn of(compute: Compute, length: Duration, lens: &[usize]) -> Self {
        let elements: usize = lens.iter().sum();
        Self { compute, nanoseconds_per_element: length.as_nanos() as f64 / elements as f64, due: Duration::ZERO }
    }

    /// Computes one gradient.
    fn step(&mut self, len: usize) {
        let time = Duration::from_nanos((len as f64 * self.nanoseconds_per_element) as u64);
        match self.compute {
            Compute::Here => work(time),
            Compute::Elsewhere => {
                self.due += time;
                // Shorter sleeps take longer than they say.
                if self.due > Duration::from_micros(500) {
                    std::thread::sleep(std::mem::take(&mut self.due));
                }
            }
        }
    }
}

/// As much work as takes this long on an idle processor: a number of rounds, so that it takes longer where it is disturbed.
fn work(time: Duration) {
    static NANOSECONDS_PER_ROUND: std::sync::OnceLock<f64> = std::sync::OnceLock::new();
    let round = |rounds: u64| (0..rounds).fold(1.0_f64, |x, _| std::hint::black_box(x * 1.000_000_1 + 1e-9));
    let per_round = NANOSECONDS_PER_ROUND.get_or_init(|| {
        let time = || {
            let begin = Instant::now();
            std::hint::black_box(round(100_000));
            begin.elapsed().as_nanos() as f64 / 1e5
        };
        (0..20).map(|_| time()).fold(f64::MAX, f64::min)
    });
    std::hint::black_box(round((time.as_nanos() as f64 / per_round) as u64));
}

/// One rank's way to average; called once for each step.
type Step<'a> = Box<dyn FnMut(&mut Backward) + 'a>;

/// A way, by what it makes for a rank.
type Way = for<'a> fn(&'a Communicator, &'a [usize]) -> Step<'a>;

const WAYS: [(&str, Way); 7] = [
    ("backward alone", |_, lens| Box::new(|backward| lens.iter().rev().for_each(|len| backward.step(*len)))),
    ("buckets, copied", copied),
    ("buckets, given", given),
    ("call for each", call_for_each),
    ("started call for each", started_call_for_each),
    ("one call at the end", one_call_at_the_end),
    ("one call alone", one_call_alone),
];

fn gradients(lens: &[usize]) -> Vec<Vec<f32>> {
    lens.iter().map(|len| vec![1.0; *len]).collect()
}

fn buckets(comm: &Communicator, lens: &[usize]) -> DataParallel {
    let parameters = lens.iter().map(|len| Parameter::new::<f32>("p", &[*len])).collect();
    DataParallel::new(comm, parameters, Options::default()).expect(BOTH)
}

fn copied<'a>(comm: &'a Communicator, lens: &'a [usize]) -> Step<'a> {
    let mut model = buckets(comm, lens);
    let gradients = gradients(lens);
    Box::new(move |backward| {
        for (index, gradient) in gradients.iter().enumerate().rev() {
            backward.step(gradient.len());
            model.ready(index, gradient).expect(BOTH);
        }
        let averaged = model.finish().expect(BOTH);
        assert_eq!(averaged.gradient::<f32>(0).expect("an f32")[0], 1.0);
    })
}

fn given<'a>(comm: &'a Communicator, lens: &'a [usize]) -> Step<'a> {
    let mut model = buckets(comm, lens);
    let mut gradients = gradients(lens);
    Box::new(move |backward| {
        for (index, gradient) in gradients.iter_mut().enumerate().rev() {
            backward.step(gradient.len());
            model.give(index, std::mem::take(gradient)).expect(BOTH);
        }
        let mut averaged = model.finish().expect(BOTH);
        let take = |(index, gradient): (usize, &mut Vec<f32>)| *gradient = averaged.take(index).and_then(Flat::into_vec).expect(BOTH);
        gradients.iter_mut().enumerate().for_each(take);
        assert_eq!(gradients[0][0], 1.0);
    })
}

fn call_for_each<'a>(comm: &'a Communicator, lens: &'a [usize]) -> Step<'a> {
    let mut gradients = gradients(lens);
    Box::new(move |backward| {
        for gradient in gradients.iter_mut().rev() {
            backward.step(gradient.len());
            comm.all_reduce(gradient, ReduceOp::Avg).expect(BOTH);
        }
        assert_eq!(gradients[0][0], 1.0);
    })
}

fn started_call_for_each<'a>(comm: &'a Communicator, lens: &'a [usize]) -> Step<'a> {
    let mut gradients = gradients(lens);
    Box::new(move |backward| {
        let start = |gradient: Vec<f32>| {
            backward.step(gradient.len());
            comm.start_all_reduce(gradient, ReduceOp::Avg).expect(BOTH)
        };
        let started: Vec<_> = std::mem::take(&mut gradients).into_iter().rev().map(start).collect();
        gradients = started.into_iter().rev().map(|work| work.wait().expect(BOTH)).collect();
        assert_eq!(gradients[0][0], 1.0);
    })
}

fn one_call_at_the_end<'a>(comm: &'a Communicator, lens: &'a [usize]) -> Step<'a> {
    let gradients = gradients(lens);
    let mut flat = comm.alloc::<f32>(lens.iter().sum()).expect(BOTH);
    Box::new(move |backward| {
        let mut at = 0;
        for gradient in gradients.iter().rev() {
            backward.step(gradient.len());
            flat[at..at + gradient.len()].copy_from_slice(gradient);
            at += gradient.len();
        }
        comm.all_reduce(&mut flat, ReduceOp::Avg).expect(BOTH);
        assert_eq!(flat[0], 1.0);
    })
}

fn one_call_alone<'a>(comm: &'a Communicator, lens: &'a [usize]) -> Step<'a> {
    let mut flat = comm.alloc::<f32>(lens.iter().sum()).expect(BOTH);
    flat.fill(1.0);
    Box::new(move |_| {
        comm.all_reduce(&mut flat, ReduceOp::Avg).expect(BOTH);
        assert_eq!(flat[0], 1.0);
    })
}

fn steps(criterion: &mut Criterion) {
    let models = [("ResNet-50", resnet(), Duration::from_millis(60)), ("GPT-2", gpt2(), Duration::from_millis(250))];
    for (name, lens, length) in &models {
        for (transport, kind) in [("shm", Transport::Shm), ("tcp", Transport::Tcp)] {
            for (place, compute) in [("here", Compute::Here), ("elsewhere", Compute::Elsewhere)] {
                let mut group = criterion.benchmark_group(format!("{name}, {transport}, computed {place}"));
                group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(1500));
                for (way, make) in WAYS {
                    group.bench_function(BenchmarkId::from_parameter(way), |bencher| {
                        bencher.iter_custom(|iterations| {
                            let mut ranks = Communicator::builder()
                                .configure(|config| config.transport = kind)
                                .local(2)
                                .expect("two ranks of this host");
                            common::together_with(&mut ranks, iterations, |comm| {
                                let mut step = make(comm, lens);
                                let mut backward = Backward::of(compute, *length, lens);
                                move |_| step(&mut backward)
                            })
                        });
                    });
                }
                group.finish();
            }
        }
    }
}

criterion_group! {
    name = benches;
    config = common::criterion();
    targets = steps
}
criterion_main!(benches);
