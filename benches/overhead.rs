//! The cost that the flight recorder, the answers to `collperf ps`, an observer, metrics and a trace add to the smallest
//! call. Communicators with and without them, between the same two threads, run alternately in short series of calls, so that disturbances affect all of
//! them.
//!
//! The position of its memory makes a communicator up to 2 % faster or slower than an identical one, so all are created
//! again many times.
//!
//! `cargo bench --bench overhead [-- ROUNDS]` prints the ratio to the bare communicator for each kind and transport. It
//! is the median over all sets of the medians over their rounds, with its 95 % confidence interval. The time of the
//! bare call is printed too.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use collectives::observe::CallReport;
use collectives::{Communicator, Config, ReduceOp, Transport};

/// Calls in a series: it lasts about 50 µs in shared memory, less than a time slice of the scheduler.
const CALLS: u32 = 200;
/// The number of times that all communicators are created.
const SETS: usize = 40;
const BOTH: &str = "both ranks make the same calls";

/// The port of the metrics, which no program asks here. A port that is in use changes nothing: calls are counted anyway.
const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 19_400);

/// The count of the cheapest observer.
static OBSERVED: AtomicU64 = AtomicU64::new(0);

/// Returns the kinds of communicators, by name. The others are compared with the first. The second is identical to it
/// and shows the precision of the method.
fn kinds() -> [(&'static str, Config); 7] {
    let observe = |_: &CallReport<'_>| {
        OBSERVED.fetch_add(1, Ordering::Relaxed);
    };
    let with = |change: &dyn Fn(&mut Config)| {
        let mut config = Config::default();
        config.flight_recorder_calls = 0;
        config.status_socket = false;
        change(&mut config);
        config
    };
    [
        ("bare", with(&|_| {})),
        ("bare again", with(&|_| {})),
        ("flight recorder", with(&|config| config.flight_recorder_calls = 1024)),
        ("recorder, status", with(&|config| (config.flight_recorder_calls, config.status_socket) = (1024, true))),
        ("metrics", with(&|config| config.metrics_address = Some(METRICS))),
        ("observer", with(&|config| config.observer = Some(Arc::new(observe)))),
        ("trace", with(&|config| config.trace = true)),
    ]
}

/// Returns the nanoseconds per call in a series of calls, whose results are checked.
fn run(comm: &Communicator) -> f64 {
    comm.barrier().expect(BOTH);
    let begin = Instant::now();
    for call in 0..CALLS {
        let mut x = [call, comm.rank() as u32];
        comm.all_reduce(&mut x, ReduceOp::Sum).expect(BOTH);
        assert_eq!(x, [2 * call, 1]);
    }
    begin.elapsed().as_nanos() as f64 / f64::from(CALLS)
}

/// Returns rank 0's times: in each round one of each kind, in an order that changes with the round.
fn measure(transport: Transport, rounds: usize) -> Vec<Vec<f64>> {
    let kinds = kinds();
    let made = kinds.map(|(_, mut config)| {
        config.transport = transport;
        Communicator::builder().config(config).local(2).expect("two ranks")
    });
    let mut ranks: [Vec<Communicator>; 2] = Default::default();
    made.into_iter().flatten().for_each(|comm| ranks[comm.rank()].push(comm));
    let play = |comms: Vec<Communicator>| {
        let mut rows = Vec::with_capacity(rounds);
        for round in 0..rounds + rounds / 10 {
            let mut row = vec![0.0; comms.len()];
            (0..comms.len()).map(|turn| (turn + round) % comms.len()).for_each(|kind| row[kind] = run(&comms[kind]));
            rows.push(row);
        }
        // The first tenth warms up.
        rows.split_off(rounds / 10)
    };
    std::thread::scope(|scope| {
        let [first, second] = ranks;
        let other = scope.spawn(move || play(second));
        let rows = play(first);
        other.join().expect("the other rank");
        rows
    })
}

/// Returns the median and the bounds of its 95 % confidence interval, which are order statistics (normal approximation
/// of the binomial).
fn median(values: impl Iterator<Item = f64>) -> (f64, f64, f64) {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let (half, spread) = (values.len() / 2, (0.98 * (values.len() as f64).sqrt()).ceil() as usize);
    (values[half], values[half.saturating_sub(spread)], values[(half + spread).min(values.len() - 1)])
}

fn main() {
    let rounds = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(50_usize).max(10);
    for (name, transport) in [("shm", Transport::Shm), ("tcp", Transport::Tcp)] {
        let sets: Vec<_> = (0..SETS).map(|_| measure(transport, rounds)).collect();
        let bare = median(sets.iter().flatten().map(|row| row[0])).0;
        println!("{name}: {bare:.0} ns a bare call of 8 B, {SETS} sets of {rounds} rounds of {CALLS} calls");
        for (kind, (words, _)) in kinds().iter().enumerate().skip(1) {
            let of_set = |rows: &Vec<Vec<f64>>| median(rows.iter().map(|row| row[kind] / row[0])).0;
            let (ratio, low, high) = median(sets.iter().map(of_set));
            println!("  {words:16} {ratio:.4}  ({low:.4} to {high:.4})");
        }
    }
}
