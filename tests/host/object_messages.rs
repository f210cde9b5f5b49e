//! Any serialisable value as a message (feature `serde`): of every size, from any rank, from several threads. Also
//! values that are too large or of the wrong type, and buffers in place of objects.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::oracle::hash;
use crate::common::ranks::{Meeting, Wiring, communicators, each, free_port, is_rank_of, patience, spawn_rank, threads, threads_with};

use collectives::{Communicator, Config, Envelope, Error, Received, ReduceOp};
use serde::{Deserialize, Serialize};

const SEED: u64 = 0x0b1e;

/// A value that determines its own content.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Parcel {
    from: usize,
    number: usize,
    content: Vec<u8>,
    end: Option<String>,
}

impl Parcel {
    fn new(from: usize, number: usize) -> Self {
        // Empty, small, and on both sides of the size up to which a message is sent at once.
        let length = [0, 10, 3000, 65_000, 66_000, 300_000][hash(SEED, from, number) as usize % 6];
        let content = (0..length).map(|at| hash(SEED + from as u64, number, at) as u8).collect();
        Self { from, number, content, end: (number % 2 == 1).then(|| format!("end of {number}")) }
    }
}

/// Returns the size of a byte vector in postcard: its length in groups of 7 bits, then its bytes.
fn encoded(length: usize) -> usize {
    let mut groups = 1;
    while length >> (7 * groups) > 0 {
        groups += 1;
    }
    groups + length
}

/// Checks that a communicator still works, for messages and for collectives.
fn assert_usable(comm: &Communicator) {
    let (n, me) = (comm.world_size(), comm.rank());
    comm.send_object(&me, (me + 1) % n).unwrap();
    assert_eq!(comm.recv_object::<usize>((me + n - 1) % n).unwrap().0, (me + n - 1) % n);
    let mut x = [1_u32; 10];
    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
    assert_eq!(x, [n as u32; 10]);
}

#[test]
fn values_of_every_size_go_round() {
    for wiring in Wiring::ALL {
        for ranks in [1, 2, 3, 5] {
            threads(wiring, ranks, |comm| {
                let (next, previous) = ((comm.rank() + 1) % ranks, (comm.rank() + ranks - 1) % ranks);
                for length in [0, 1, 127, 128, 65_533, 65_534, 65_536, 3 << 20] {
                    let value = |rank: usize| vec![rank as u8; length];
                    std::thread::scope(|scope| {
                        // Large messages wait for their receive, including those to the rank itself.
                        scope.spawn(|| comm.send_object(&value(comm.rank()), Envelope::rank(next).tag(9)).unwrap());
                        let (got, received) = comm.recv_object::<Vec<u8>>(Envelope::rank(previous).tag(9)).unwrap();
                        assert!(got == value(previous), "{length} B, {wiring:?}");
                        assert_eq!(received, Received { source: previous, tag: 9, count: encoded(length) });
                    });
                }
                assert_usable(comm);
            });
        }
    }
}

#[test]
fn values_of_no_bytes_are_messages_too() {
    for wiring in Wiring::ALL {
        threads(wiring, 3, |comm| {
            if comm.rank() > 0 {
                comm.send_object(&(), 0).unwrap();
                comm.send_object::<[u64]>(&[], 0).unwrap();
                comm.send_object("", 0).unwrap();
                return;
            }
            let mut sources = BTreeSet::new();
            for _ in 0..2 {
                let ((), Received { source, tag, count }) = comm.recv_object(Envelope::any()).unwrap();
                assert_eq!((tag, count, sources.insert(source)), (0, 0, true));
                assert!(comm.recv_object::<Vec<u64>>(source).unwrap().0.is_empty());
                assert_eq!(comm.recv_object::<String>(source).unwrap().0, "");
            }
        });
    }
}

#[test]
fn tags_and_ranks_that_cannot_be_are_refused_and_the_largest_tag_is_one() {
    threads(Wiring::Shm, 2, |comm| {
        let (other, largest) = (1 - comm.rank(), (1 << 63) - 1);
        let refused = [
            comm.send_object(&1, Envelope::rank(other).tag(u64::MAX)),
            comm.send_object(&1, Envelope::rank(other).tag(1 << 63)),
            comm.send_object(&1, Envelope::any()),
            comm.send_object(&1, 2),
            comm.recv_object::<i32>(Envelope::rank(other).tag(u64::MAX)).map(drop),
            comm.recv_object::<i32>(Envelope::any().tag(1 << 63)).map(drop),
            comm.recv_object::<i32>(7).map(drop),
        ];
        for (number, result) in refused.into_iter().enumerate() {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains("_object"), "call {number}: {error}");
        }
        comm.send_object(&comm.rank(), Envelope::rank(other).tag(largest)).unwrap();
        let (value, received) = comm.recv_object::<usize>(Envelope::any().tag(largest)).unwrap();
        assert_eq!((value, received.source, received.tag), (other, other, largest));
        assert_usable(comm);
    });
}

#[test]
fn whoever_does_not_send_in_time_is_named() {
    threads(Wiring::Shm, 3, |comm| {
        if comm.rank() == 0 {
            let error = comm.recv_object::<u8>(Envelope::rank(2).tag(4).timeout(Duration::from_millis(5))).unwrap_err();
            assert!(error.is_timeout() && error.to_string().contains("recv_object from rank 2, tag 4"), "{error}");
            assert_eq!(error.peer().unwrap().rank, 2);
        }
        comm.barrier().unwrap();
        assert_usable(comm);
    });
}

#[test]
fn a_value_that_cannot_be_serialised_is_not_sent() {
    /// A type that cannot be encoded.
    struct Stubborn;
    impl Serialize for Stubborn {
        fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            Err(serde::ser::Error::custom("not today"))
        }
    }
    threads(Wiring::Shm, 2, |comm| {
        if comm.rank() == 0 {
            let error = comm.send_object(&Stubborn, 1).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains("send_object"), "{error}");
        }
        // The first message that arrives is the next one sent.
        assert_usable(comm);
    });
}

#[test]
fn objects_and_buffers_are_not_taken_for_each_other() {
    for wiring in Wiring::ALL {
        for length in [10, 500_000] {
            threads(wiring, 2, |comm| {
                let told = length > 64 << 10;
                let bytes = vec![7_u8; length];
                if comm.rank() == 0 {
                    let sent = [comm.send_object(&bytes, 1), comm.send(&bytes, 1)];
                    for result in sent {
                        // The sender of a short message has finished by then.
                        assert_eq!(result.as_ref().is_err_and(Error::is_mismatch), told, "{result:?}");
                    }
                } else {
                    let mut buffer = vec![0xee_u8; length + 10];
                    let error = comm.recv(&mut buffer, 0).unwrap_err();
                    assert!(error.is_mismatch() && error.to_string().contains("an object does not match a receive of u8"), "{error}");
                    assert!(buffer.iter().all(|byte| *byte == 0xee));
                    let error = comm.recv_object::<Vec<u8>>(0).unwrap_err();
                    assert!(error.is_mismatch() && error.to_string().contains("u8 does not match a receive of an object"), "{error}");
                    assert!(error.to_string().contains("rank 0"), "{error}");
                }
                assert_usable(comm);
            });
        }
    }
}

#[test]
fn another_type_is_an_error_that_names_the_sender() {
    for wiring in Wiring::ALL {
        threads(wiring, 3, |comm| {
            if comm.rank() == 1 {
                comm.send_object("some words", 2).unwrap();
                comm.send_object(&(7_u32, "and more".to_owned()), 2).unwrap();
                comm.send_object(&vec![0xff_u8; 100_000], 2).unwrap();
            } else if comm.rank() == 2 {
                let errors = [
                    comm.recv_object::<(bool, bool)>(Envelope::any()).unwrap_err(),
                    // The encoding of a pair begins with its first half.
                    comm.recv_object::<u32>(1).unwrap_err(),
                    comm.recv_object::<Vec<String>>(1).unwrap_err(),
                ];
                for error in errors {
                    assert!(matches!(error, Error::Protocol { .. }) && error.to_string().starts_with("rank 1 "), "{error}");
                }
            }
            assert_usable(comm);
        });
    }
}

#[test]
fn what_is_too_large_is_refused_by_its_receiver() {
    let mut config = Config::default();
    config.object_limit_bytes = 1000;
    for wiring in Wiring::ALL {
        let builder = |rank: usize| wiring.builder_with(rank, config.clone());
        threads_with(2, builder, |comm| {
            for (length, told) in [(999, false), (100_000, true)] {
                if comm.rank() == 0 {
                    let sent = comm.send_object(&vec![1_u8; length], 1);
                    assert_eq!(sent.as_ref().is_err_and(Error::is_mismatch), told, "{sent:?}");
                } else {
                    let error = comm.recv_object::<Vec<u8>>(0).unwrap_err();
                    let text = error.to_string();
                    assert!(matches!(error, Error::Message { .. }), "{text}");
                    for part in ["recv_object from rank 0", &encoded(length).to_string(), "1000 B", "object_limit_bytes"] {
                        assert!(text.contains(part), "{part}: {text}");
                    }
                }
            }
            // Exactly the limit.
            if comm.rank() == 0 {
                comm.send_object(&vec![1_u8; 998], 1).unwrap();
            } else {
                assert_eq!(comm.recv_object::<Vec<u8>>(0).unwrap().1.count, 1000);
            }
            assert_usable(comm);
        });
    }
}

#[test]
fn threads_that_receive_under_one_tag_get_whole_objects() {
    const THREADS: usize = 3;
    const EACH: usize = 60;
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        threads(wiring, 3, |comm| {
            let is_over = AtomicBool::new(false);
            let seen = Mutex::new(BTreeSet::new());
            std::thread::scope(|scope| {
                // Collectives run at the same time.
                let busy = scope.spawn(|| {
                    let mut all_over = [0_u8];
                    while all_over[0] == 0 {
                        all_over = [u8::from(is_over.load(Ordering::Relaxed))];
                        comm.all_reduce(&mut all_over, ReduceOp::Min).unwrap();
                    }
                });
                let (next, previous) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
                let work: Vec<_> = (0..THREADS)
                    .flat_map(|thread| {
                        let numbers = thread * EACH..(thread + 1) * EACH;
                        let sender = scope.spawn(move || {
                            numbers.for_each(|number| {
                                comm.send_object(&Parcel::new(comm.rank(), number), Envelope::rank(next).tag(1)).unwrap()
                            });
                        });
                        let seen = &seen;
                        let receiver = scope.spawn(move || {
                            for _ in 0..EACH {
                                let source = if thread == 0 { Envelope::any() } else { Envelope::rank(previous) };
                                let parcel = comm.recv_object::<Parcel>(source.tag(1)).unwrap().0;
                                assert!(parcel == Parcel::new(previous, parcel.number), "number {}", parcel.number);
                                assert!(seen.lock().unwrap().insert(parcel.number), "number {} came twice", parcel.number);
                            }
                        });
                        [sender, receiver]
                    })
                    .collect();
                work.into_iter().for_each(|thread| thread.join().unwrap());
                is_over.store(true, Ordering::Relaxed);
                busy.join().unwrap();
            });
            assert_eq!(seen.lock().unwrap().len(), THREADS * EACH);
        });
    }
}

#[test]
fn a_rank_that_leaves_ends_who_waits_for_its_object() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        let meeting = Meeting::new(3);
        each(communicators(wiring, 3), |comm| {
            if comm.rank() == 1 {
                comm.send_object("the last words", 0).unwrap();
                drop(comm);
                meeting.meet();
                return;
            }
            if comm.rank() == 0 {
                // A message that had already arrived can still be received.
                assert_eq!(comm.recv_object::<String>(1).unwrap().0, "the last words");
                let error = comm.recv_object::<String>(1).unwrap_err();
                assert!(error.is_peer_lost() && error.peer().unwrap().rank == 1, "{error}");
                comm.send_object(&"we go on", 2).unwrap();
            } else {
                assert_eq!(comm.recv_object::<String>(Envelope::any()).unwrap().0, "we go on");
            }
            meeting.meet();
        });
    }
}

#[test]
fn a_process_that_is_killed_ends_who_waits_for_its_object() {
    const NAME: &str = "object_messages::a_process_that_is_killed_ends_who_waits_for_its_object";
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        let variable = format!("{wiring:?}");
        if is_rank_of(NAME) {
            if std::env::var("TEST_WIRING").unwrap() != variable {
                continue;
            }
            let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
            let comm = wiring.builder(rank).from_env().unwrap();
            if comm.rank() == 0 {
                assert_eq!(comm.recv_object::<Parcel>(1).unwrap().0, Parcel::new(1, 4));
                let error = comm.recv_object::<Parcel>(1).unwrap_err();
                assert!(error.is_peer_lost() && error.peer().unwrap().rank == 1, "{error}");
                println!("survived");
                return;
            }
            comm.send_object(&Parcel::new(1, 4), 0).unwrap();
            std::process::abort();
        }
        let port = free_port();
        let ranks: Vec<_> = (0..2).map(|rank| spawn_rank(NAME, rank, 2, port, &[("TEST_WIRING", variable.clone())])).collect();
        let outputs: Vec<_> = ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect();
        let told = String::from_utf8_lossy(&outputs[0].stdout);
        assert!(outputs[0].status.success() && told.contains("survived"), "{told}{}", String::from_utf8_lossy(&outputs[0].stderr));
        assert!(!outputs[1].status.success());
    }
}

#[test]
fn a_closed_communicator_moves_no_objects() {
    threads(Wiring::Shm, 2, |comm| {
        let kept = comm.clone();
        comm.with_timeout(patience(20)).close().unwrap();
        assert!(kept.send_object(&1, 1 - kept.rank()).unwrap_err().is_closed());
        assert!(kept.recv_object::<i32>(Envelope::any()).unwrap_err().is_closed());
    });
}
