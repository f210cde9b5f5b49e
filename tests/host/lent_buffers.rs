//! Buffers of `alloc` that other ranks read in place. A rank that failed changes its own buffers while other ranks
//! still read them.

// With one mapping, a failed rank waits for the ranks that read its buffers, and here those wait for it.

use std::borrow::Borrow;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::meeting::wait_until;
use crate::common::ranks::{Meeting, Wiring, alone_in_a_process, communicators, each, patience, processes};

use collectives::{Communicator, CustomOp, ReduceOp, Result, SharedBuffer};

/// Elements of a rank's block: several times the block in which a custom op is called.
const BLOCK: usize = 50_000;
/// The elements in the reading rank's buffer (`OWN`), in the failing rank's (`LENT`), and what that rank writes after
/// it has failed (`WRITTEN`).
const OWN: u32 = 0x1111_1111;
const LENT: u32 = 0x2222_2222;
const WRITTEN: u32 = 0x4444_4444;

/// How the rank that lends its buffer fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    TimesOut,
    IsAborted,
    PanicsInItsOp,
}

/// What it does then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    WritesToItsBuffers,
    DropsItsBuffers,
    DropsItsCommunicatorToo,
}

/// The call in which it fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    ReduceScatter,
    AllReduce,
    /// Both buffers are lent, since sums are fetched from where they were written.
    AllReduceInto,
    /// In the background, so that the worker drops the buffer.
    Started,
}

/// A connection between the two ranks, which may be in different processes.
struct Line(TcpStream);

impl Line {
    fn between(comm: &Communicator) -> Self {
        let listener = (comm.rank() == 0).then(|| TcpListener::bind("127.0.0.1:0").unwrap());
        let mut port = [listener.as_ref().map_or(0, |listener| listener.local_addr().unwrap().port())];
        comm.broadcast(&mut port, 0).unwrap();
        let stream = match listener {
            Some(listener) => accept(&listener),
            None => TcpStream::connect(("127.0.0.1", port[0])).unwrap(),
        };
        stream.set_read_timeout(Some(patience(30))).unwrap();
        Self(stream)
    }

    fn tell(&self) {
        (&self.0).write_all(&[1]).unwrap();
    }

    fn hear(&self) {
        (&self.0).read_exact(&mut [0]).unwrap();
    }
}

/// Returns the first connection. Panics if none comes in time.
fn accept(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).unwrap();
    let mut stream = None;
    wait_until("the other rank connects", || {
        stream = listener.accept().ok();
        stream.is_some()
    });
    stream.unwrap().0
}

/// A rank's buffers: the one that it lends, and the one for sums.
struct Buffers {
    lent: Option<SharedBuffer<u32>>,
    sums: SharedBuffer<u32>,
}

impl Buffers {
    fn new(comm: &Communicator, element: u32, block: usize) -> Self {
        let mut lent = comm.alloc(2 * block).unwrap();
        lent.fill(element);
        Self { lent: Some(lent), sums: comm.alloc(2 * block).unwrap() }
    }

    fn call(&mut self, way: Way, comm: &Communicator, op: CustomOp<u32>) -> Result<()> {
        let lent = self.lent.as_mut().unwrap();
        let block = lent.len() / 2;
        match way {
            Way::ReduceScatter => comm.reduce_scatter_into(lent, &mut self.sums[..block], op),
            Way::AllReduce => comm.all_reduce(lent, op),
            Way::AllReduceInto => comm.all_reduce_into(lent, &mut self.sums, op),
            Way::Started => comm.start_all_reduce(self.lent.take().unwrap(), op)?.wait().map(drop),
        }
    }
}

/// Runs rank 0. Its op reports that it holds its inputs, waits until rank 1 has failed and acted, and checks its inputs
/// again.
fn read(comm: &Communicator, way: Way, block: usize) -> Buffers {
    let line = Line::between(comm);
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    // Inputs come in rank order: `into` is this rank's own, and `from` lies in rank 1's buffer.
    let op = CustomOp::new("sum", move |into: &mut [u32], from: &[u32]| {
        let before = from.to_vec();
        if counted.fetch_add(1, Ordering::Relaxed) == 0 {
            line.tell();
            line.hear();
        }
        assert!(from == before, "an input changed while the op held it");
        assert!(into.iter().all(|element| *element == OWN) && from.iter().all(|element| *element == LENT), "not what was lent");
        into.iter_mut().zip(from).for_each(|(into, from)| *into += *from);
    });
    let mut buffers = Buffers::new(comm, OWN, block);
    comm.barrier().unwrap();
    let error = buffers.call(way, comm, op).unwrap_err();
    assert!(!error.to_string().contains("panicked"), "{error}");
    assert!(calls.load(Ordering::Relaxed) > 1, "the op was called {calls:?} times");
    buffers
}

/// Runs rank 1. It fails once rank 0's op holds its inputs, and gets its buffer back. Returns what is not dropped.
fn fail<C: Borrow<Communicator>>(rank: C, way: Way, failure: Failure, then: Then, block: usize) -> Option<(C, Buffers)> {
    let comm: &Communicator = rank.borrow();
    let line = Arc::new(Line::between(comm));
    let mut buffers = Buffers::new(comm, LENT, block);
    comm.barrier().unwrap();
    if failure == Failure::TimesOut {
        comm.set_timeout(Duration::from_secs(2));
    }
    let (calls, told, abort) = (AtomicUsize::new(0), Arc::clone(&line), comm.abort_handle());
    let op = CustomOp::new("sum", move |into: &mut [u32], from: &[u32]| {
        if calls.fetch_add(1, Ordering::Relaxed) == 0 {
            told.hear();
            match failure {
                // It waits for rank 0 after it has reduced its own share.
                Failure::TimesOut => {}
                Failure::IsAborted => abort.abort(),
                Failure::PanicsInItsOp => panic!("as the test wants it"),
            }
        }
        into.iter_mut().zip(from).for_each(|(into, from)| *into += *from);
    });
    let result = catch_unwind(AssertUnwindSafe(|| buffers.call(way, comm, op)));
    assert!(!matches!(result, Ok(Ok(()))), "{way:?} {failure:?}");
    if let Some(lent) = buffers.lent.as_deref().filter(|_| way != Way::AllReduce) {
        assert!(lent.iter().all(|element| *element == LENT), "this rank finds its source as it was");
    }
    let kept = match then {
        Then::WritesToItsBuffers => {
            for buffer in buffers.lent.iter_mut().chain([&mut buffers.sums]) {
                buffer.fill(WRITTEN);
                assert!(buffer.iter().all(|element| *element == WRITTEN));
            }
            Some((rank, buffers))
        }
        Then::DropsItsBuffers => {
            drop(buffers);
            None
        }
        Then::DropsItsCommunicatorToo => {
            drop(rank);
            drop(buffers);
            None
        }
    };
    line.tell();
    kept
}

/// Runs both ranks as threads.
fn among_threads(way: Way, failure: Failure, then: Then) {
    each(communicators(Wiring::Shm, 2), |comm| match comm.rank() {
        0 => drop(read(&comm, way, BLOCK)),
        _ => drop(fail(comm, way, failure, then, BLOCK)),
    });
}

/// Runs both ranks as processes, on a duplicate of a communicator that stays usable.
fn among_processes(name: &str, way: Way, failure: Failure, then: Then) {
    processes(name, Wiring::Shm, 2, |comm| {
        let beside = comm.duplicate()?;
        match comm.rank() {
            0 => drop(read(&beside, way, BLOCK)),
            _ => drop(fail(beside, way, failure, then, BLOCK)),
        }
        comm.barrier()
    });
}

#[test]
fn what_a_custom_op_reads_does_not_change_when_a_peer_times_out() {
    among_threads(Way::ReduceScatter, Failure::TimesOut, Then::WritesToItsBuffers);
}

#[test]
fn what_a_custom_op_reads_does_not_change_when_a_peer_is_aborted() {
    for way in [Way::ReduceScatter, Way::AllReduce, Way::AllReduceInto] {
        among_threads(way, Failure::IsAborted, Then::WritesToItsBuffers);
    }
}

#[test]
fn what_a_custom_op_reads_does_not_change_when_a_peers_op_panics() {
    for way in [Way::ReduceScatter, Way::AllReduce] {
        among_threads(way, Failure::PanicsInItsOp, Then::WritesToItsBuffers);
    }
}

#[test]
fn what_a_custom_op_reads_does_not_change_when_a_peer_drops_its_buffer() {
    for then in [Then::DropsItsBuffers, Then::DropsItsCommunicatorToo] {
        for way in [Way::ReduceScatter, Way::AllReduceInto] {
            among_threads(way, Failure::IsAborted, then);
        }
    }
}

#[test]
fn what_a_custom_op_reads_does_not_change_when_a_peers_started_call_fails() {
    for failure in [Failure::IsAborted, Failure::PanicsInItsOp] {
        among_threads(Way::Started, failure, Then::DropsItsBuffers);
    }
}

#[test]
fn what_a_custom_op_reads_does_not_change_when_a_process_writes_to_its_buffer() {
    let name = "lent_buffers::what_a_custom_op_reads_does_not_change_when_a_process_writes_to_its_buffer";
    among_processes(name, Way::AllReduceInto, Failure::IsAborted, Then::WritesToItsBuffers);
}

#[test]
fn what_a_custom_op_reads_does_not_change_when_a_process_drops_its_buffer() {
    let name = "lent_buffers::what_a_custom_op_reads_does_not_change_when_a_process_drops_its_buffer";
    among_processes(name, Way::ReduceScatter, Failure::PanicsInItsOp, Then::DropsItsBuffers);
}

#[test]
fn buffers_of_a_failed_call_are_as_good_as_any_in_the_communicator_of_those_left() {
    each(communicators(Wiring::Shm, 2), |comm| {
        let way = Way::AllReduceInto;
        let (comm, mut buffers) = if comm.rank() == 0 {
            let buffers = read(&comm, way, BLOCK);
            (comm, buffers)
        } else {
            fail(comm, way, Failure::IsAborted, Then::WritesToItsBuffers, BLOCK).unwrap()
        };
        let comm = comm.shrink().unwrap();
        let lent = buffers.lent.as_mut().unwrap();
        lent.fill(comm.rank() as u32 + 1);
        comm.all_reduce_into(lent, &mut buffers.sums, ReduceOp::Sum).unwrap();
        assert!(buffers.sums.iter().all(|sum| *sum == 3));
    });
}

#[test]
fn buffers_of_a_failed_call_leave_nothing_behind() {
    const LARGE: usize = (8 << 20) / 4;
    alone_in_a_process("lent_buffers::buffers_of_a_failed_call_leave_nothing_behind", || {
        let read_file = |path: &str| std::fs::read_to_string(path).unwrap();
        let mapped = || read_file("/proc/self/maps").matches("collectives-buffer").count();
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        // The memory in files, and the process's private memory.
        let resident = || {
            ["RssShmem:", "RssAnon:"].map(|name| {
                let status = read_file("/proc/self/status");
                let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
                line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10
            })
        };
        // The first communicator opens a socket for the process.
        drop(communicators(Wiring::Shm, 1));
        let (before, open) = (resident(), descriptors());
        let meeting = Meeting::new(2);
        each(communicators(Wiring::Shm, 2), |comm| {
            let way = Way::ReduceScatter;
            if comm.rank() == 0 {
                drop((read(&comm, way, LARGE), comm));
                meeting.meet();
                return meeting.meet();
            }
            let (comm, buffers) = fail(comm, way, Failure::IsAborted, Then::WritesToItsBuffers, LARGE).unwrap();
            meeting.meet();
            // One of two buffers of 16 MiB was lent to the call and has been written to since.
            let [_, own] = resident();
            assert!(own >= before[1] + (16 << 20), "{own} B after {before:?}");
            drop(buffers);
            let [_, own] = resident();
            assert!(own < before[1] + (8 << 20), "{own} B after {before:?}: what it wrote is given back at once");
            drop(comm);
            let [files, _] = resident();
            assert!(files < before[0] + (8 << 20), "{files} B after {before:?}");
            assert_eq!(mapped(), 0);
            meeting.meet();
        });
        assert_eq!(descriptors(), open);
    });
}
