//! Barriers with a tag: no rank leaves before all have come, whatever else goes on. Also late ranks, lost ranks and
//! several threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::meeting::End;
use crate::common::ranks::{Meeting, Wiring, communicators, each, free_port, is_rank_of, patience, spawn_rank, threads};

use collectives::{Communicator, Envelope, Error, ReduceOp};

/// A timeout for a rank that does not come at all.
const SHORT: Duration = Duration::from_millis(5);

#[test]
fn nobody_leaves_before_everyone_has_come() {
    for wiring in Wiring::ALL {
        for ranks in [1, 2, 3, 5, 8] {
            let entered = AtomicUsize::new(0);
            threads(wiring, ranks, |comm| {
                for round in 1..=30 {
                    entered.fetch_add(1, Ordering::SeqCst);
                    comm.tagged_barrier(if round % 3 == 0 { u32::MAX } else { 0 }).unwrap();
                    let came = entered.load(Ordering::SeqCst);
                    assert!(came >= round * ranks, "{came} had come to barrier {round} of {ranks} ranks");
                }
            });
        }
    }
}

#[test]
fn tags_are_independent_of_each_other_and_of_collectives() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        let is_over = AtomicBool::new(false);
        threads(wiring, 3, |comm| {
            std::thread::scope(|scope| {
                let reduces = scope.spawn(|| {
                    let mut over = [0_u8];
                    while over[0] == 0 {
                        over = [u8::from(is_over.load(Ordering::Relaxed))];
                        comm.all_reduce(&mut over, ReduceOp::Min).unwrap();
                    }
                });
                // Ends the reduces, however this scope ends.
                let end = End(&is_over);
                let tags = [1, 2, 3].map(|tag| scope.spawn(move || (0..100).for_each(|_| comm.tagged_barrier(tag).unwrap())));
                tags.into_iter().for_each(|thread| thread.join().unwrap());
                // Rank 0 enters the barriers in one order, the others in the opposite order.
                let order = if comm.rank() == 0 { [10, 11] } else { [11, 10] };
                let both = order.map(|tag| scope.spawn(move || comm.tagged_barrier(tag).unwrap()));
                both.into_iter().for_each(|thread| thread.join().unwrap());
                drop(end);
                reduces.join().unwrap();
            });
        });
    }
}

#[test]
fn as_many_threads_leave_a_tag_as_have_entered_on_every_rank() {
    const THREADS: usize = 4;
    const EACH: usize = 25;
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        for ranks in [2, 3, 5] {
            let entered: Vec<AtomicUsize> = (0..ranks).map(|_| AtomicUsize::new(0)).collect();
            threads(wiring, ranks, |comm| {
                let left = AtomicUsize::new(0);
                std::thread::scope(|scope| {
                    for _ in 0..THREADS {
                        scope.spawn(|| {
                            for _ in 0..EACH {
                                entered[comm.rank()].fetch_add(1, Ordering::SeqCst);
                                comm.tagged_barrier(5).unwrap();
                                let number = left.fetch_add(1, Ordering::SeqCst) + 1;
                                let came = entered.iter().map(|rank| rank.load(Ordering::SeqCst)).min().unwrap();
                                assert!(came >= number, "number {number} has left, and on one rank only {came} have come");
                            }
                        });
                    }
                });
            });
        }
    }
}

#[test]
fn messages_of_the_program_do_not_meet_it() {
    threads(Wiring::Shm, 2, |comm| {
        let other = 1 - comm.rank();
        let receive = comm.start_recv(vec![0_u8; 4], Envelope::any().tag(7)).unwrap();
        let any = comm.start_recv(vec![0_u8; 4], Envelope::any()).unwrap();
        comm.send(&[1_u8; 4], Envelope::rank(other).tag(8)).unwrap();
        comm.tagged_barrier(7).unwrap();
        comm.tagged_barrier(8).unwrap();
        comm.tagged_barrier(0).unwrap();
        comm.send(&[7_u8; 4], Envelope::rank(other).tag(7)).unwrap();
        comm.send(&[9_u8; 4], other).unwrap();
        assert_eq!(receive.wait().unwrap().0, [7; 4]);
        assert_eq!(any.wait().unwrap().0, [9; 4]);
        let mut eight = [0_u8; 4];
        comm.recv(&mut eight, Envelope::rank(other).tag(8)).unwrap();
        assert_eq!(eight, [1; 4]);
    });
}

#[test]
fn who_is_late_is_named_and_the_barrier_is_taken_up_again() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        for ranks in [2, 3, 5] {
            let meeting = Meeting::new(ranks);
            threads(wiring, ranks, |comm| {
                let late = ranks - 1;
                for round in 0..3 {
                    if comm.rank() != late {
                        // Another rank may take longer than the timeout. Errors name it as missing until it has come.
                        let names_the_late_one = (0..2000).any(|_| {
                            let error = comm.with_timeout(SHORT).tagged_barrier(1).unwrap_err();
                            let Error::Timeout { missing, arrived, doing, .. } = &error else { panic!("{error}") };
                            assert_eq!(doing, "tagged_barrier(1)");
                            let [missing, arrived] = [missing, arrived].map(|peers| peers.iter().map(|peer| peer.rank).collect::<Vec<_>>());
                            assert!(arrived.contains(&comm.rank()) && !arrived.contains(&late), "round {round}: {error}");
                            assert!(!missing.is_empty() && missing.iter().all(|rank| !arrived.contains(rank)), "round {round}: {error}");
                            missing.contains(&late)
                        });
                        assert!(names_the_late_one, "round {round}, rank {}", comm.rank());
                    }
                    meeting.meet();
                    // The late rank makes one call. The others continue theirs.
                    comm.tagged_barrier(1).unwrap();
                    // A late arrival at the last barrier does not release a rank from the next one.
                    meeting.meet();
                }
                comm.barrier().unwrap();
            });
        }
    }
}

#[test]
fn a_rank_that_is_gone_is_named_on_every_rank() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        for ranks in [2, 3, 5, 8] {
            let meeting = Meeting::new(ranks);
            each(communicators(wiring, ranks), |comm| {
                comm.tagged_barrier(3).unwrap();
                meeting.meet();
                let gone = ranks / 2;
                if comm.rank() == gone {
                    drop(comm);
                    meeting.meet();
                    return;
                }
                let error = comm.tagged_barrier(3).unwrap_err();
                assert!(matches!(error, Error::PeerLost { .. }), "{error}");
                assert_eq!(error.peer().unwrap().rank, gone, "rank {}: {error}", comm.rank());
                assert!(error.to_string().contains("tagged_barrier(3)"), "{error}");
                // Messages between the other ranks go on.
                if ranks > 2 {
                    let others: Vec<usize> = (0..ranks).filter(|rank| *rank != gone).collect();
                    let at = others.iter().position(|rank| *rank == comm.rank()).unwrap();
                    let (next, previous) = (others[(at + 1) % others.len()], others[(at + others.len() - 1) % others.len()]);
                    let mut theirs = [0_u64];
                    comm.send_recv(&[comm.rank() as u64], next, &mut theirs, previous).unwrap();
                    assert_eq!(theirs[0] as usize, previous);
                }
                meeting.meet();
            });
        }
    }
}

#[test]
fn a_process_that_is_killed_is_named() {
    const NAME: &str = "tagged_barrier::a_process_that_is_killed_is_named";
    if is_rank_of(NAME) {
        let comm = Communicator::builder().configure(|config| config.timeout = patience(60)).from_env().unwrap();
        comm.tagged_barrier(0).unwrap();
        if comm.rank() == 1 {
            std::process::abort();
        }
        let error = comm.tagged_barrier(0).unwrap_err();
        assert!(error.is_peer_lost() && error.peer().unwrap().rank == 1, "{error}");
        println!("survived");
        return;
    }
    let port = free_port();
    let ranks: Vec<_> = (0..3).map(|rank| spawn_rank(NAME, rank, 3, port, &[])).collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let told = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.success() && told.contains("survived"), rank != 1, "{told}{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn one_that_is_closed_or_aborted_refuses() {
    for ranks in [1, 2] {
        threads(Wiring::Shm, ranks, |comm| {
            let (aborted, kept) = (comm.duplicate().unwrap(), comm.clone());
            comm.close().unwrap();
            assert!(kept.tagged_barrier(1).unwrap_err().is_closed());
            if ranks == 1 {
                aborted.abort();
                assert!(aborted.tagged_barrier(1).unwrap_err().is_poisoned());
            } else if aborted.rank() == 0 {
                aborted.abort();
            } else {
                assert!(aborted.tagged_barrier(1).is_err());
            }
        });
    }
}
