//! Shared code of all benchmarks: the measuring times, and the timing of ranks that run together.

#![allow(dead_code, reason = "each benchmark takes what it needs")]

use std::sync::Barrier;
use std::time::{Duration, Instant};

use criterion::Criterion;

/// Returns settings for meaningful figures; all benchmarks together then take minutes.
pub(crate) fn criterion() -> Criterion {
    Criterion::default().sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1))
}

/// Returns settings for many small loops on one core, which vary less.
pub(crate) fn brief_criterion() -> Criterion {
    Criterion::default().sample_size(20).warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_millis(200))
}

/// Runs `call` `iterations` times on all `ranks` at once, each on its own thread, and returns the slowest one's time.
/// One extra call precedes the timed ones.
pub(crate) fn together<R: Send>(ranks: &mut [R], iterations: u64, call: impl Fn(usize, &mut R, u64) + Sync) -> Duration {
    let ready = Barrier::new(ranks.len());
    let (ready, call) = (&ready, &call);
    std::thread::scope(|scope| {
        let time = |(index, rank): (usize, &mut R)| {
            call(index, rank, 0);
            ready.wait();
            let begin = Instant::now();
            (0..iterations).for_each(|iteration| call(index, rank, iteration));
            begin.elapsed()
        };
        let threads: Vec<_> = ranks.iter_mut().enumerate().map(|rank| scope.spawn(move || time(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).max().unwrap_or_default()
    })
}

/// Does the same as [`together`], for calls that need more than their rank: `make` prepares the call on the rank's
/// thread.
pub(crate) fn together_with<'a, R, C: FnMut(u64)>(ranks: &'a mut [R], iterations: u64, make: impl Fn(&'a R) -> C + Sync) -> Duration
where
    R: Send + 'a,
{
    let ready = Barrier::new(ranks.len());
    let (ready, make) = (&ready, &make);
    std::thread::scope(|scope| {
        let time = |rank: &'a mut R| {
            let mut call = make(rank);
            call(0);
            ready.wait();
            let begin = Instant::now();
            (0..iterations).for_each(&mut call);
            begin.elapsed()
        };
        let threads: Vec<_> = ranks.iter_mut().map(|rank| scope.spawn(move || time(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).max().unwrap_or_default()
    })
}
