//! Tests of the whole module. The ranks are threads, or processes: this test binary, started again for a single test.

mod agreement;
mod correctness;
mod waiting;
mod windows;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{Blocks, CallContext, Channel, Group, Memory};
use crate::base::deadline::Deadline;
use crate::base::random::Random;
use crate::call::element::{DType, TypeTag};
use crate::call::{Call, Collective};
use crate::host::abort_reason::AbortReason;
use crate::host::exchange::Exchange;
use crate::host::exchange::local::exchanges;
use crate::host::health::Health;
use crate::host::link::ByteLink;

/// The longest time that a test may take if it is not stuck; longer under the thread sanitizer.
const PATIENCE: Duration = Duration::from_secs(if cfg!(one_mapping) { 600 } else { 60 });

/// Returns a call of some kind; what it moves is up to the test.
fn call(kind: Collective, sequence: u64) -> Call {
    Call { kind, op: 0, element: TypeTag::Scalar(DType::U8), count: 0, root: None, counts_hash: 0, sequence }
}

/// What one rank of a test needs besides its group.
struct Rank {
    index: usize,
    size: usize,
    group: Group,
    health: Health,
    deadline: Deadline,
    sequence: u64,
}

impl Rank {
    /// Makes the next call, of this kind, on the group.
    fn make<T>(&mut self, kind: Collective, run: impl FnOnce(&mut Group, &CallContext<'_>) -> T) -> T {
        self.sequence += 1;
        let call = call(kind, self.sequence);
        run(
            &mut self.group,
            &CallContext { call: &call, deadline: &self.deadline, health: &self.health, recorder: &crate::flight::Flight::default() },
        )
    }
}

/// Runs `body` on `size` ranks, each a thread, and returns the results.
fn on_threads<T: Send>(size: usize, body: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let members: Vec<usize> = (0..size).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = exchanges(size)
            .into_iter()
            .enumerate()
            .map(|(index, mut exchange)| {
                let (members, body) = (&members, &body);
                scope.spawn(move || {
                    let deadline = Deadline::after(PATIENCE);
                    let group = Group::connect(&mut exchange, members, index, size, None, &deadline).unwrap();
                    body(Rank { index, size, group, health: Health::default(), deadline, sequence: 0 })
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// An exchange over files in a directory.
struct Files {
    directory: PathBuf,
    rank: usize,
    size: usize,
    round: usize,
}

impl Exchange for Files {
    fn all_gather(&mut self, mine: &[u8], deadline: &Deadline) -> crate::error::Result<Vec<Vec<u8>>> {
        let path = |rank: usize, ending: &str| self.directory.join(format!("{}-{rank}{ending}", self.round));
        std::fs::write(path(self.rank, ".part"), mine).unwrap();
        std::fs::rename(path(self.rank, ".part"), path(self.rank, "")).unwrap();
        let read = |rank| loop {
            if let Ok(blob) = std::fs::read(path(rank, "")) {
                return blob;
            }
            assert!(!deadline.has_passed(), "rank {rank} did not come");
            std::thread::yield_now();
        };
        let all = (0..self.size).map(read).collect();
        self.round += 1;
        Ok(all)
    }
}

/// Joins the group of `size` ranks that meet in a directory.
fn join(directory: &Path, index: usize, size: usize) -> Rank {
    let mut exchange = Files { directory: directory.to_owned(), rank: index, size, round: 0 };
    let members: Vec<usize> = (0..size).collect();
    let deadline = Deadline::after(PATIENCE);
    let group = Group::connect(&mut exchange, &members, index, size, None, &deadline).unwrap();
    Rank { index, size, group, health: Health::default(), deadline, sequence: 0 }
}

const ROLE: &str = "COLLECTIVES_TEST_ROLE";

/// Starts the named test of this file again, in a role.
fn start(test: &str, role: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("host::shm::tests::{test}"), "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Returns the role of this process: a rank, and where the ranks meet.
fn role() -> Option<(usize, PathBuf)> {
    let role = std::env::var(ROLE).ok()?;
    let (rank, directory) = role.split_once(':').unwrap();
    Some((rank.parse().unwrap(), directory.into()))
}

/// Reports that this process has come as far as it should, and waits to be ended.
fn ready() -> ! {
    println!("\nready");
    std::io::stdout().flush().unwrap();
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    std::process::exit(0);
}

/// Waits until a child is ready.
fn await_ready(child: &mut Child) {
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line == "ready"), "the child ended early");
}

/// Gathers a number of each rank.
#[expect(unsafe_code, reason = "collectives take raw memory")]
fn gather_numbers(rank: &mut Rank, number: u64) -> Vec<u64> {
    let mut all = vec![0_u64; rank.size];
    let memory = Memory { source: (&raw const number).cast(), destination: all.as_mut_ptr().cast() };
    // SAFETY: eight bytes of each rank.
    rank.make(Collective::AllGather, |group, context| unsafe { group.all_gather(memory, Blocks::Equal(8), context) }).unwrap();
    all
}

/// Returns how many bytes went over a link, on which none may have gone yet.
fn some_or_none(bytes: std::io::Result<usize>) -> usize {
    bytes.or_else(|error| if error.kind() == std::io::ErrorKind::WouldBlock { Ok(0) } else { Err(error) }).unwrap()
}

/// Makes many calls, then sends bytes around a ring of links.
fn work_together(mut rank: Rank) {
    for round in 0..300 {
        let expected: Vec<u64> = (0..rank.size as u64).map(|index| round * 1000 + index).collect();
        let mine = expected[rank.index];
        assert_eq!(gather_numbers(&mut rank, mine), expected);
    }
    let (next, before) = ((rank.index + 1) % rank.size, (rank.index + rank.size - 1) % rank.size);
    let mut to = rank.group.link(next, Channel::Collective).unwrap();
    let mut from = rank.group.link(before, Channel::Collective).unwrap();
    let sent = vec![rank.index as u8; 200_000];
    let (mut written, mut read) = (0, 0);
    let mut buffer = [0; 5000];
    while written < sent.len() || read < sent.len() {
        written += some_or_none(to.try_write(&[std::io::IoSlice::new(&sent[written..])]));
        let len = some_or_none(from.try_read(&mut buffer));
        assert!(buffer[..len].iter().all(|byte| *byte == before as u8));
        read += len;
    }
    assert_eq!(read, sent.len());
    rank.make(Collective::Barrier, |group, context| group.barrier(context)).unwrap();
}

#[test]
fn ranks_may_be_processes() {
    if let Some((rank, directory)) = role() {
        return work_together(join(&directory, rank, 3));
    }
    let directory = tempfile::tempdir().unwrap();
    let role = |rank| format!("{rank}:{}", directory.path().display());
    let children = [1, 2].map(|rank| start("ranks_may_be_processes", &role(rank)));
    work_together(join(directory.path(), 0, 3));
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn a_rank_that_is_killed_is_lost_within_a_second() {
    if let Some((rank, directory)) = role() {
        let mut rank = join(&directory, rank, 3);
        rank.make(Collective::Barrier, |group, context| group.barrier(context)).unwrap();
        ready();
    }
    let directory = tempfile::tempdir().unwrap();
    let mut child = start("a_rank_that_is_killed_is_lost_within_a_second", &format!("1:{}", directory.path().display()));
    std::thread::scope(|scope| {
        let path = directory.path();
        let survivors = [0, 2].map(|index| {
            scope.spawn(move || {
                let mut rank = join(path, index, 3);
                rank.make(Collective::Barrier, |group, context| group.barrier(context)).unwrap();
                let stop = rank.make(Collective::Barrier, |group, context| group.barrier(context)).unwrap_err();
                (Instant::now(), stop)
            })
        });
        await_ready(&mut child);
        let killed = Instant::now();
        child.kill().unwrap();
        child.wait().unwrap();
        for survivor in survivors {
            let (noticed, stop) = survivor.join().unwrap();
            assert!(matches!(stop.abort_reason, AbortReason::Lost { rank: 1, by: 0 | 2 }), "{stop:?}");
            assert!(noticed.duration_since(killed) < Duration::from_secs(1));
        }
    });
}

#[test]
fn nothing_is_left_behind() {
    if role().is_none() {
        // In a process of its own, whose descriptors no other test touches.
        let output = start("nothing_is_left_behind", "0:").wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let list = |path: &str| {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        let mut list: Vec<_> = entries.map(|entry| std::fs::read_link(entry.path()).unwrap_or(entry.path())).collect();
        list.retain(|path| !path.starts_with("/proc"));
        list.sort();
        list
    };
    let named = || list("/dev/shm").into_iter().filter(|path| path.to_string_lossy().contains("collectives")).count();
    let mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().matches("memfd:collectives").count();
    let descriptors = list("/proc/self/fd");
    on_threads(3, |mut rank| {
        let link = rank.group.link((rank.index + 1) % 3, Channel::PointToPoint).unwrap();
        rank.make(Collective::Barrier, |group, context| group.barrier(context)).unwrap();
        assert!(mapped() > 0 && named() == 0);
        drop(rank);
        drop(link);
    });
    assert_eq!(list("/proc/self/fd"), descriptors);
    assert_eq!((mapped(), named()), (0, 0));
}
