//! The time from the loss of a rank, and from the start of a newcomer, to the first call of the next communicator. And the
//! cost of the door: of `admit` while no process waits, and of other calls of a rank at which processes can ask.
//!
//! Ranks are processes on this host. Each works for 1 ms, makes an all-reduce, and calls `admit`. In turn, one is killed and
//! a new one joins. A change is over when the slowest rank has completed its first all-reduce, whose result is checked.
//!
//! `cargo bench --bench membership [-- ranks=2,4,8,16 repeats=50 transport=shm,tcp]` prints the median and the longest time
//! of each.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use collectives::{Communicator, ReduceOp, Transport};

/// The argument that makes this program one rank.
const RANK: &str = "one-rank";
const WORK: Duration = Duration::from_millis(1);
/// Long enough for each change.
const PATIENCE: Duration = Duration::from_secs(60);
const BOTH: &str = "both ranks make the same calls";

/// Runs one rank until it is killed. Prints the world size whenever an all-reduce has succeeded in another communicator.
fn work() {
    let mut comm = Communicator::from_env().expect("a job to begin or to join");
    println!("address {}", comm.join_address().expect("an address"));
    let mut is_new = true;
    loop {
        std::thread::sleep(WORK);
        let mut x = [1_u64, 2];
        match comm.all_reduce(&mut x, ReduceOp::Sum) {
            Ok(()) => {
                let size = comm.world_size() as u64;
                assert_eq!(x, [size, 2 * size]);
                if is_new {
                    println!("works {size}");
                }
                is_new = false;
            }
            Err(_) => is_new = true,
        }
        let size = comm.world_size();
        let membership = comm.admit().expect("the others");
        is_new |= !membership.newcomers.is_empty() || membership.communicator.world_size() != size;
        comm = membership.communicator;
    }
}

/// A job whose ranks come and go.
struct Job {
    transport: &'static str,
    ranks: BTreeMap<usize, Child>,
    addresses: BTreeMap<usize, String>,
    lines: Receiver<(usize, String, Instant)>,
    sender: Sender<(usize, String, Instant)>,
    started: usize,
}

impl Job {
    fn new(transport: &'static str) -> Self {
        let (sender, lines) = channel();
        Self { transport, ranks: BTreeMap::new(), addresses: BTreeMap::new(), lines, sender, started: 0 }
    }

    /// Starts a process with these variables.
    fn start(&mut self, variables: &[(&str, String)]) {
        let number = self.started;
        self.started += 1;
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.arg(RANK).envs(variables.iter().cloned()).env("COLLECTIVES_TRANSPORT", self.transport);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("a process");
        let out = BufReader::new(child.stdout.take().expect("a pipe"));
        let sender = self.sender.clone();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                // The job may have ended.
                let _ = sender.send((number, line, Instant::now()));
            }
        });
        self.ranks.insert(number, child);
    }

    /// Starts a job of this many ranks.
    fn begin(&mut self, size: usize) {
        let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").port();
        for rank in 0..size {
            let variables = [("RANK", rank), ("WORLD_SIZE", size), ("MASTER_PORT", usize::from(port))];
            let mut variables: Vec<_> = variables.map(|(name, value)| (name, value.to_string())).to_vec();
            variables.push(("MASTER_ADDR", "127.0.0.1".to_owned()));
            self.start(&variables);
        }
        self.wait(Instant::now());
    }

    /// Waits until all ranks work in one communicator. Returns the time from `begin` to the last one's first call.
    fn wait(&mut self, begin: Instant) -> Duration {
        let mut sizes = BTreeMap::new();
        loop {
            let (rank, line, when) = self.lines.recv_timeout(PATIENCE).expect("the ranks continue");
            match line.split_once(' ') {
                Some(("address", address)) => drop(self.addresses.insert(rank, address.to_owned())),
                Some(("works", size)) => drop(sizes.insert(rank, (size.parse::<usize>().expect("a size"), when))),
                _ => println!("rank {rank}: {line}"),
            }
            let size = self.ranks.len();
            if self.ranks.keys().all(|rank| sizes.get(rank).is_some_and(|(theirs, _)| *theirs == size)) {
                let last = sizes.iter().filter(|(rank, _)| self.ranks.contains_key(rank)).map(|(_, (_, when))| *when).max();
                return last.map_or(Duration::ZERO, |last| last.duration_since(begin));
            }
        }
    }

    /// Kills a rank, and waits until the others work.
    fn kill(&mut self, rank: usize) -> Duration {
        let mut child = self.ranks.remove(&rank).expect("a rank");
        self.addresses.remove(&rank);
        let begin = Instant::now();
        child.kill().expect("a process");
        let time = self.wait(begin);
        child.wait().expect("a process");
        time
    }

    /// Starts a newcomer, and waits until all work.
    fn add(&mut self) -> Duration {
        let addresses: Vec<&str> = self.addresses.values().map(String::as_str).collect();
        let variables = [("COLLECTIVES_JOIN", addresses.join(","))];
        let begin = Instant::now();
        self.start(&variables);
        self.wait(begin)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in self.ranks.values_mut() {
            // It may have ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Returns the median and the largest of some times, in milliseconds.
fn summary(mut times: Vec<Duration>) -> String {
    times.sort();
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    format!("{:8.1} {:8.1}", ms(times[times.len() / 2]), ms(times[times.len() - 1]))
}

/// Measures changes in a job of `size` ranks.
fn changes(transport: &'static str, size: usize, repeats: usize) {
    let mut job = Job::new(transport);
    job.begin(size);
    let (mut killed, mut added) = (Vec::new(), Vec::new());
    for repeat in 0..repeats {
        // Each place in turn, and so rank 0 too.
        let rank = *job.ranks.keys().nth(repeat % size).expect("a rank");
        killed.push(job.kill(rank));
        added.push(job.add());
    }
    println!("{transport:4} {size:6}   {}   {}", summary(killed), summary(added));
}

/// Returns the median time of a call on rank 0, in nanoseconds, for each of some calls that alternate.
fn alternate(comms: Vec<[Communicator; 2]>, call: fn(usize, &Communicator)) -> Vec<f64> {
    const ROUNDS: usize = 2000;
    const CALLS: usize = 50;
    let play = |comms: Vec<&Communicator>| {
        let mut times = vec![Vec::with_capacity(ROUNDS); comms.len()];
        for round in 0..ROUNDS {
            for turn in 0..comms.len() {
                let kind = (turn + round) % comms.len();
                comms[kind].barrier().expect(BOTH);
                let begin = Instant::now();
                (0..CALLS).for_each(|_| call(kind, comms[kind]));
                times[kind].push(begin.elapsed().as_nanos() as f64 / CALLS as f64);
            }
        }
        times
    };
    let times = std::thread::scope(|scope| {
        let other: Vec<_> = comms.iter().map(|pair| &pair[1]).collect();
        let other = scope.spawn(move || play(other));
        let times = play(comms.iter().map(|pair| &pair[0]).collect());
        other.join().expect("the other rank");
        times
    });
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    times.into_iter().map(median).collect()
}

/// Makes a communicator of two threads.
fn pair() -> [Communicator; 2] {
    let builder = Communicator::builder().configure(|config| config.transport = Transport::Shm);
    builder.local(2).expect("two ranks").try_into().expect("two")
}

/// Measures what the door costs while no process waits.
fn door() {
    let all_reduce = |_: usize, comm: &Communicator| {
        let mut x = [1_u64];
        comm.all_reduce(&mut x, ReduceOp::Sum).expect(BOTH);
        assert_eq!(x, [2]);
    };
    let comms = vec![pair(), pair(), pair()];
    for comm in &comms[2] {
        comm.join_address().expect("an address");
    }
    let times = alternate(comms, all_reduce);
    println!(
        "all_reduce of 8 B: {:.0} ns; with an open door {:.3} of it (an equal one: {:.3})",
        times[0],
        times[2] / times[0],
        times[1] / times[0]
    );
    let either = |kind: usize, comm: &Communicator| {
        if kind == 0 {
            let mut all = [0_u64; 2];
            comm.all_gather_into(&1_u64, &mut all).expect(BOTH);
            assert_eq!(all, [1, 1]);
        } else {
            assert!(comm.admit().expect(BOTH).newcomers.is_empty());
        }
    };
    let comms = vec![pair(), pair(), pair()];
    for comm in &comms[2] {
        comm.join_address().expect("an address");
    }
    let times = alternate(comms, either);
    println!("all_gather of 8 B: {:.0} ns; admit without newcomers: {:.0} ns, after join_address: {:.0} ns", times[0], times[1], times[2]);
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == RANK) {
        return work();
    }
    let given = |name: &str| arguments.iter().find_map(|argument| argument.strip_prefix(name)?.strip_prefix('='));
    let repeats = given("repeats").map_or(50, |text| text.parse().expect("repeats=NUMBER"));
    let sizes: Vec<usize> = given("ranks").unwrap_or("2,4,8,16").split(',').map(|text| text.parse().expect("ranks=NUMBERS")).collect();
    println!("{repeats} changes each, times in ms");
    println!("                kill to first call   start to first call");
    println!("           ranks   median  longest    median  longest");
    for transport in given("transport").unwrap_or("shm,tcp").split(',') {
        let transport = if transport == "tcp" { "tcp" } else { "shm" };
        sizes.iter().for_each(|size| changes(transport, *size, repeats));
    }
    door();
}
