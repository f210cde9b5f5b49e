//! Small jobs that cause most of the events listeners can receive.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use collectives::{Communicator, Config, Envelope, Error, ReduceOp, Result, store::MemoryStore};

use super::common::ranks::{Meeting, Wiring, communicators_with, each, listening, patience};

/// The name of a job of two ranks, and the job, which panics if its results are wrong.
pub(crate) type Scenario = (&'static str, fn(Wiring, &Given));

/// A function that each rank runs on its communicator before the job begins.
pub(crate) type Given = dyn Fn(&Communicator) + Sync;

pub(crate) const ALL: [Scenario; 7] = [
    ("collectives", collectives),
    ("messages", messages),
    ("background", background),
    ("timeouts", timeouts),
    ("a mismatch in the background", mismatch),
    ("an abort", abort),
    ("strangers", strangers),
];

fn job(wiring: Wiring, given: &Given, config: Config, program: impl Fn(&Communicator) + Sync) {
    each(
        communicators_with(2, |rank| wiring.builder_with(rank, config.clone()).configure(|config| config.timeout = patience(20))),
        |comm| {
            given(&comm);
            program(&comm);
        },
    );
}

/// Returns settings that warn of waits at once.
pub(crate) fn impatient() -> Config {
    let mut config = Config::default();
    config.stall_warning = Duration::from_millis(1);
    config
}

fn collectives(wiring: Wiring, given: &Given) {
    let store = MemoryStore::new();
    let rank = |rank: usize| {
        let comm = wiring.builder(rank).with_store(Arc::new(store.clone()), rank, 2).unwrap();
        given(&comm);
        let mut x = vec![comm.rank() as u64 + 1; 3000];
        comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert_eq!(x, vec![3; 3000]);
        let child = comm.duplicate().unwrap();
        child.broadcast(&mut x[..1], 0).unwrap();
        assert_eq!(x[0], 3);
        child.close().unwrap();
        comm.close().unwrap();
    };
    std::thread::scope(|scope| {
        let rank = &rank;
        let ranks = [scope.spawn(move || rank(0)), scope.spawn(move || rank(1))];
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    });
}

fn messages(wiring: Wiring, given: &Given) {
    job(wiring, given, Config::default(), |comm| {
        let other = 1 - comm.rank();
        for count in [3, 100_000] {
            let (mine, mut theirs) = (vec![comm.rank() as u32; count], vec![9; count]);
            if comm.rank() == 0 {
                comm.send(&mine, other).unwrap();
                comm.recv(&mut theirs, other).unwrap();
            } else {
                comm.recv(&mut theirs, other).unwrap();
                comm.send(&mine, other).unwrap();
            }
            assert_eq!(theirs, vec![other as u32; count]);
            theirs.fill(9);
            comm.group(|group| {
                group.send(&mine, other)?;
                group.recv(&mut theirs, other)
            })
            .unwrap();
            assert_eq!(theirs, vec![other as u32; count]);
        }
    });
}

fn background(wiring: Wiring, given: &Given) {
    job(wiring, given, Config::default(), |comm| {
        let other = 1 - comm.rank();
        let sum = comm.start_all_reduce(vec![comm.rank() as u32 + 1; 100], ReduceOp::Sum).unwrap();
        let receive = comm.start_recv(vec![0_u32; 20_000], other).unwrap();
        let send = comm.start_send(vec![comm.rank() as u32; 20_000], other).unwrap();
        assert_eq!(receive.wait().unwrap().0, vec![other as u32; 20_000]);
        assert_eq!(send.wait().unwrap().len(), 20_000);
        assert_eq!(sum.wait().unwrap(), vec![3; 100]);
        comm.barrier().unwrap();
    });
}

/// Lets a deadline pass, which leaves messages usable and warns of its wait.
fn timeouts(wiring: Wiring, given: &Given) {
    let meeting = Meeting::new(2);
    job(wiring, given, impatient(), |comm| {
        let other = 1 - comm.rank();
        if comm.rank() == 0 {
            let limit = comm.timeout();
            comm.set_timeout(Duration::from_millis(30));
            let mut late = [7_u8; 4];
            let error = comm.recv(&mut late, other).unwrap_err();
            assert!(error.is_timeout() && late == [7; 4], "{error}");
            let error = comm.start_recv(vec![7_u8; 4], other).unwrap().wait().unwrap_err();
            assert!(error.is_timeout(), "{error}");
            comm.set_timeout(limit);
        }
        meeting.meet();
        let mut theirs = [0_u8; 2];
        if comm.rank() == 1 {
            comm.send(&[1_u8, 2], other).unwrap();
        } else {
            comm.recv(&mut theirs, other).unwrap();
            assert_eq!(theirs, [1, 2]);
        }
        // Rank 1 is late to the barrier, so rank 0 warns of it.
        if comm.rank() == 1 {
            let mut byte = [0_u8];
            comm.recv(&mut byte, other).unwrap();
            comm.barrier().unwrap();
        } else {
            let work = comm.start_barrier().unwrap();
            let mut seen = None;
            while seen.is_none() {
                let records = comm.flight_recorder().records();
                seen = records.iter().find(|record| !record.waiting_for.is_empty()).map(|record| record.waiting_for.clone());
                std::thread::yield_now();
            }
            assert_eq!(seen, Some(vec![1]));
            comm.send(&[1_u8], other).unwrap();
            work.wait().unwrap();
        }
    });
}

/// Lets the worker find a mismatch. The waiting thread gets that error, and later calls find the communicator poisoned.
fn mismatch(wiring: Wiring, given: &Given) {
    job(wiring, given, Config::default(), |comm| {
        let works = if comm.rank() == 0 {
            let first = comm.start_all_reduce(vec![1_u32; 8], ReduceOp::Sum).unwrap().wait().map(drop);
            [first, comm.start_all_reduce(vec![1_u32; 8], ReduceOp::Sum).unwrap().wait().map(drop)]
        } else {
            [comm.start_barrier().unwrap().wait().map(drop), comm.start_barrier().unwrap().wait().map(drop)]
        };
        assert!(matches!(works[0], Err(Error::Mismatch { .. })), "{works:?}");
        assert!(works[1].as_ref().is_err_and(Error::is_poisoned), "{works:?}");
        assert!(comm.barrier().is_err_and(|error| error.is_poisoned()));
        assert!(comm.recv(&mut [0_u8], 1 - comm.rank()).is_err_and(|error| error.is_poisoned()));
    });
}

fn abort(wiring: Wiring, given: &Given) {
    let heard = Meeting::new(2);
    job(wiring, given, Config::default(), |comm| {
        let ended: Result<()> = if comm.rank() == 0 {
            let receive = comm.start_recv(vec![0_u8; 10], 1).unwrap();
            comm.abort();
            receive.wait().map(drop)
        } else {
            comm.recv(&mut [0_u8; 10], 0).map(drop)
        };
        heard.meet();
        let words = ended.unwrap_err().to_string();
        assert!(words.contains("aborted"), "{words}");
    });
}

/// Connects to every port from outside the job while a receive is under way.
fn strangers(wiring: Wiring, given: &Given) {
    let meeting = Meeting::new(2);
    job(wiring, given, Config::default(), |comm| {
        let other = 1 - comm.rank();
        if comm.rank() == 0 {
            let mut theirs = [0_u32; 1000];
            let receive = comm.start_recv(vec![0_u32; 1000], other).unwrap();
            meeting.meet();
            comm.recv(&mut theirs, Envelope::rank(other).tag(5)).unwrap();
            assert_eq!(theirs, [5; 1000]);
            assert_eq!(receive.wait().unwrap().0, vec![6; 1000]);
        } else {
            meeting.meet();
            probe();
            comm.send(&[5_u32; 1000], Envelope::rank(other).tag(5)).unwrap();
            comm.send(&[6_u32; 1000], other).unwrap();
        }
    });
}

/// Sends an invalid header to each port of this process. Ranks that are busy with messages close the connection.
pub(crate) fn probe() {
    for address in listening() {
        // A port may have been closed meanwhile.
        let Ok(mut stream) = TcpStream::connect(address) else { continue };
        stream.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        let _ = stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
        // Ports that only show that a rank is alive never answer.
        let _ = stream.read(&mut [0; 256]);
    }
}
