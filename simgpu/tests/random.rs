//! Random programs, compared with oracles that do not use clocks.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "half of cudarc is unsafe")]

#[path = "../../src/base/random.rs"]
mod generator;

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream};
use generator::Random;

fn range(random: &mut Random, length: usize) -> Range<usize> {
    let start = random.below(length);
    start..start + 1 + random.below(length - start)
}

/// Checks that programs whose streams cudarc orders automatically give the same results as on one stream, without
/// reports. Each buffer is read by one stream only, and all are on one device. If two streams read a slice, cudarc
/// makes a later write wait for the last one only, and after a copy to another device for none.
#[test]
fn programs_with_events_are_as_good_as_sequential_ones() {
    let _alone = simgpu::alone();
    for seed in 0..20 {
        println!("seed {seed}");
        let mut random = Random(seed);
        let context = CudaContext::new(0).unwrap();
        let streams: Vec<Arc<CudaStream>> = (0..4).map(|_| context.new_stream().unwrap()).collect();
        let mut expected = vec![vec![0u8; 64]; 5];
        let mut buffers: Vec<CudaSlice<u8>> = (0..5).map(|at| streams[at % 4].alloc_zeros(64).unwrap()).collect();
        for _ in 0..200 {
            let (at, range) = (random.below(5), range(&mut random, 64));
            if random.below(3) == 0 {
                let stream = &streams[random.below(4)];
                let bytes = vec![random.below(256) as u8; range.len()];
                stream.memcpy_htod(&bytes, &mut buffers[at].slice_mut(range.clone())).unwrap();
                expected[at][range].copy_from_slice(&bytes);
            } else {
                let from = (at + 1 + random.below(4)) % 5;
                let [source, target] = buffers.get_disjoint_mut([from, at]).unwrap();
                streams[from % 4].memcpy_dtod(&source.slice(range.clone()), &mut target.slice_mut(range.clone())).unwrap();
                let bytes = expected[from][range.clone()].to_vec();
                expected[at][range].copy_from_slice(&bytes);
            }
        }
        for (at, expected) in expected.into_iter().enumerate() {
            assert_eq!(streams[at % 4].clone_dtoh(&buffers[at]).unwrap(), expected);
        }
        assert_eq!(simgpu::reports(), [""; 0]);
    }
}

/// A job of the oracle: its accesses, and all jobs that are over before it.
struct Job {
    range: Range<usize>,
    write: bool,
    before: Vec<bool>,
}

/// Follows each wait step by step, and keeps the order as sets.
#[derive(Default)]
struct Oracle {
    jobs: Vec<Job>,
    streams: [Vec<bool>; 3],
    events: [Vec<bool>; 2],
    host: Vec<bool>,
}

fn unite(into: &mut Vec<bool>, from: &[bool]) {
    into.resize(into.len().max(from.len()), false);
    for (mine, theirs) in into.iter_mut().zip(from) {
        *mine |= theirs;
    }
}

impl Oracle {
    fn job(&mut self, stream: usize, range: Range<usize>, write: bool) {
        let mut before = self.streams[stream].clone();
        unite(&mut before, &self.host);
        before.resize(self.jobs.len(), false);
        self.streams[stream] = before.clone();
        self.streams[stream].push(true);
        self.jobs.push(Job { range, write, before });
    }

    fn races(&self) -> bool {
        let conflict = |a: &Job, b: &Job| (a.write || b.write) && a.range.start < b.range.end && b.range.start < a.range.end;
        let late = self.jobs.iter().enumerate();
        late.flat_map(|(at, job)| self.jobs[..at].iter().zip(&job.before).map(move |pair| (job, pair)))
            .any(|(job, (earlier, before))| !before && conflict(earlier, job))
    }
}

#[test]
fn races_are_reported_where_there_are_some_and_nowhere_else() {
    let _alone = simgpu::alone();
    let context = CudaContext::new(0).unwrap();
    // SAFETY: whether the streams are ordered is what is tested.
    unsafe { context.disable_event_tracking() };
    let mut racy = 0;
    const TRIALS: u64 = 600;
    for seed in 0..TRIALS {
        let mut random = Random(seed);
        let mut oracle = Oracle::default();
        let streams: Vec<Arc<CudaStream>> = (0..3).map(|_| context.new_stream().unwrap()).collect();
        let events: Vec<CudaEvent> = (0..2).map(|_| context.new_event(None).unwrap()).collect();
        let mut buffer = streams[0].alloc_zeros::<u8>(16).unwrap();
        let mut sinks: Vec<CudaSlice<u8>> = streams.iter().map(|stream| stream.alloc_zeros(16).unwrap()).collect();
        context.synchronize().unwrap();
        for _ in 0..14 {
            let (stream, event) = (random.below(3), random.below(2));
            match random.below(10) {
                0..=1 => {
                    let range = range(&mut random, 16);
                    streams[stream].memset_zeros(&mut buffer.slice_mut(range.clone())).unwrap();
                    oracle.job(stream, range, true);
                }
                2..=3 => {
                    let range = range(&mut random, 16);
                    streams[stream].memcpy_dtod(&buffer.slice(range.clone()), &mut sinks[stream].slice_mut(range.clone())).unwrap();
                    oracle.job(stream, range, false);
                }
                4..=5 => {
                    events[event].record(&streams[stream]).unwrap();
                    let mut known = oracle.streams[stream].clone();
                    unite(&mut known, &oracle.host);
                    oracle.events[event] = known;
                }
                6..=7 => {
                    streams[stream].wait(&events[event]).unwrap();
                    let known = oracle.events[event].clone();
                    unite(&mut oracle.streams[stream], &known);
                }
                8 => {
                    streams[stream].synchronize().unwrap();
                    let known = oracle.streams[stream].clone();
                    unite(&mut oracle.host, &known);
                }
                _ => {
                    events[event].synchronize().unwrap();
                    let known = oracle.events[event].clone();
                    unite(&mut oracle.host, &known);
                }
            }
        }
        context.synchronize().unwrap();
        let reports = simgpu::reports();
        assert_eq!(!reports.is_empty(), oracle.races(), "seed {seed}: {reports:#?}");
        racy += u64::from(oracle.races());
    }
    assert!(racy > TRIALS / 10 && racy < TRIALS * 9 / 10, "{racy} of {TRIALS} have races: the programs say little");
}
