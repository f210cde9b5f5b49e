//! Ranks that die, leave, come too late or abort: the errors of the others, how soon they get them, and that nothing is
//! left behind.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::common::ranks::{Meeting, Wiring, communicators, each, free_port, is_rank_of, patience, spawn_rank, threads};
use crate::processes::Ranks;

use collectives::{Communicator, Envelope, Error, ReduceOp, Result};

/// The time for a survivor to notice: 1 s is promised, and as much again is for a loaded machine.
const NOTICED: Duration = patience(2);

/// Long enough for anything that is not stuck.
const PATIENCE: Duration = patience(20);

/// Returns the first error behind one that only reports that a communicator is ended.
fn cause(error: &Error) -> &Error {
    match error {
        Error::Poisoned { cause: first, .. } => cause(first),
        other => other,
    }
}

/// Returns the rank that an error reports as lost, and how that was noticed.
#[track_caller]
fn lost(error: &Error) -> (usize, &str) {
    match cause(error) {
        Error::PeerLost { peer, reason, .. } => (peer.rank, reason),
        other => panic!("not a lost peer: {other}"),
    }
}

/// A call that ends with an error when the given rank dies.
type EndingCall = fn(&Communicator, usize, &dyn Fn()) -> Error;

/// The calls that a rank is in when another one dies, each on its own communicator. `ready` reports that a call is
/// about to wait, or that a repeated one is running.
const CALLS: [(&str, EndingCall); 8] = [
    ("small all_reduce", |comm, _, ready| forever(ready, || comm.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum))),
    ("large all_reduce", |comm, _, ready| {
        let mut x = vec![1_u64; 200_000];
        forever(ready, || comm.all_reduce(&mut x, ReduceOp::Max))
    }),
    ("barrier", |comm, victim, ready| held_up(comm, victim, ready, || comm.barrier())),
    ("broadcast", |comm, victim, ready| held_up(comm, victim, ready, || comm.broadcast(&mut vec![1_u8; 100_000], victim))),
    ("started reduce", |comm, victim, ready| {
        held_up(comm, victim, ready, || {
            comm.start_reduce([1.0_f64; 100], (victim + 1) % comm.world_size(), ReduceOp::Sum)?.wait().map(drop)
        })
    }),
    ("recv", |comm, victim, ready| held_up(comm, victim, ready, || comm.recv(&mut [0_u8; 10], victim).map(drop))),
    ("start_recv", |comm, victim, ready| held_up(comm, victim, ready, || comm.start_recv([0_u8; 10], victim)?.wait().map(drop))),
    ("large send", |comm, victim, ready| held_up(comm, victim, ready, || comm.send(&vec![1_u8; 1 << 20], victim))),
];

/// Repeats a call until it fails.
fn forever(ready: &dyn Fn(), mut call: impl FnMut() -> Result<()>) -> Error {
    for round in 0_u64.. {
        if let Err(error) = call() {
            return error;
        }
        if round == 20 {
            ready();
        }
    }
    unreachable!()
}

/// Makes a call that waits for the victim, which never makes it.
fn held_up(comm: &Communicator, victim: usize, ready: &dyn Fn(), call: impl FnOnce() -> Result<()>) -> Error {
    ready();
    while comm.rank() == victim {
        std::thread::park();
    }
    call().expect_err("the victim never makes this call")
}

/// Runs one rank of [`a_rank_is_killed`]: makes all calls at once and prints how they end.
fn rank_until_killed(wiring: Wiring, victim: usize) {
    let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
    let comm = wiring.builder(rank).from_env().unwrap();
    let copies: Vec<_> = CALLS.iter().map(|(name, call)| (name, call, comm.duplicate().unwrap())).collect();
    comm.barrier().unwrap();
    std::thread::scope(|scope| {
        for (name, call, copy) in copies {
            scope.spawn(move || {
                let error = call(&copy, victim, &|| println!("@ready {name}"));
                let (who, _) = lost(&error);
                println!("@lost {who} {name}");
                assert_eq!(who, victim, "{name}: {error}");
                let Error::PeerLost { peer, .. } = cause(&error) else { unreachable!() };
                assert_eq!(*peer, copy.peers()[victim], "{name}: {error}");
            });
        }
    });
    // A communicator that was in no call when it happened.
    let error = comm.all_reduce(&mut [1], ReduceOp::Sum).expect_err("a rank is dead");
    assert_eq!(lost(&error).0, victim, "{error}");
    assert!(!error.is_poisoned(), "{error}");
    let again = comm.barrier().expect_err("the communicator is ended");
    assert!(again.is_poisoned() && lost(&again).0 == victim, "{again}");
    println!("@lost {victim} later");
}

/// Asserts that what a process has mapped and open vanishes with it: memory without a name, and no files in /dev/shm or
/// in the folder for temporary files.
fn assert_leaves_nothing(pid: u32, wiring: Wiring) {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let named: Vec<&str> = maps.lines().filter(|line| line.contains("/dev/shm") || line.contains("/SYSV")).collect();
    assert!(named.is_empty(), "{named:?}");
    // Shared memory appears here, without a name in any folder.
    assert!(maps.contains("/memfd:") || wiring != Wiring::Shm, "no shared memory is mapped");
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let Ok(target) = std::fs::read_link(entry.unwrap().path()) else { continue };
        assert!(!target.starts_with("/dev/shm") && !target.starts_with(std::env::temp_dir()), "{target:?}");
    }
}

/// Kills a rank while the others are in calls of every kind. Each call must end in time and name the rank.
fn a_rank_is_killed(name: &str, wiring: Wiring, world_size: usize, victim: usize) {
    if is_rank_of(name) {
        return rank_until_killed(wiring, victim);
    }
    let mut ranks = Ranks::spawn(name, world_size);
    for _ in 0..world_size * CALLS.len() {
        let (_, line) = ranks.next("a call has begun");
        assert!(line.starts_with("ready"), "{line}");
    }
    for child in &ranks.children {
        assert_leaves_nothing(child.id(), wiring);
    }
    let killed = Instant::now();
    ranks.children[victim].kill().unwrap();
    for _ in 0..(world_size - 1) * (CALLS.len() + 1) {
        let (rank, line) = ranks.next("a call has ended");
        let took = killed.elapsed();
        let call = line.strip_prefix(&format!("lost {victim} ")).unwrap_or_else(|| panic!("{name}: rank {rank} says {line:?}"));
        assert!(took < NOTICED, "{name}: rank {rank} noticed after {took:?} in {call}");
    }
    println!("{name}: all noticed after {:?}", killed.elapsed());
    (0..world_size).filter(|rank| *rank != victim).for_each(|rank| ranks.outcome(rank).unwrap());
}

macro_rules! kills {
    ($($test:ident $wiring:ident $world_size:literal $victim:literal;)*) => {$(
        #[test]
        fn $test() {
            a_rank_is_killed(concat!("kills::", stringify!($test)), Wiring::$wiring, $world_size, $victim);
        }
    )*};
}

kills! {
    killed_in_shm_1_of_2 Shm 2 1;
    killed_in_shm_0_of_3 Shm 3 0;
    killed_in_shm_3_of_5 Shm 5 3;
    killed_over_tcp_0_of_2 Tcp 2 0;
    killed_over_tcp_2_of_3 Tcp 3 2;
    killed_over_tcp_1_of_5 Tcp 5 1;
    killed_in_pairs_0_of_3 Pairs 3 0;
    killed_in_pairs_3_of_5 Pairs 5 3;
    killed_in_pairs_4_of_5 Pairs 5 4;
    killed_as_dealt_2_of_5 Dealt 5 2;
    killed_as_dealt_4_of_5 Dealt 5 4;
}

/// Runs `test` on all cases at once, since most of their time is spent waiting.
fn at_once<T: Send + Copy>(cells: impl IntoIterator<Item = T>, test: impl Fn(T) + Sync) {
    std::thread::scope(|scope| {
        let test = &test;
        let cells: Vec<_> = cells.into_iter().map(|cell| scope.spawn(move || test(cell))).collect();
        cells.into_iter().for_each(|cell| cell.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
    });
}

/// Returns all pairs of a wiring and one of `others`.
fn on_every_wiring<T: Copy>(others: &[T]) -> impl Iterator<Item = (Wiring, T)> {
    Wiring::ALL.into_iter().flat_map(|wiring| others.iter().map(move |other| (wiring, *other)))
}

/// Lets every rank send each other rank a message, which opens a link between any two.
fn get_acquainted(comm: &Communicator) {
    let others = || (0..comm.world_size()).filter(|peer| *peer != comm.rank());
    comm.group(|group| others().try_for_each(|peer| group.send(&[1_u8], peer))).unwrap();
    others().for_each(|peer| assert_eq!(comm.recv(&mut [0_u8], peer).unwrap().source, peer));
}

/// What a rank has exchanged with the leaving rank before that one leaves.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Before {
    /// Nothing, so there may be no link between them.
    Nothing,
    /// Messages, so there is a link between them.
    Messages,
}

/// Lets a rank drop its communicator while the others are in a call that needs it, or before they make it.
fn a_rank_leaves(wiring: Wiring, (ranks, leaver): (usize, usize), before: Before, call: impl Fn(&Communicator) -> Result<()> + Sync) {
    for others_are_first in [true, false] {
        let meeting = Meeting::new(ranks);
        let survivors = Meeting::new(ranks - 1);
        each(communicators(wiring, ranks), |comm| {
            let me = comm.rank();
            let place = format!("rank {me} of {ranks} without {leaver}, {wiring:?}, others first: {others_are_first}, before: {before:?}");
            if before == Before::Messages {
                get_acquainted(&comm);
            }
            if me == leaver {
                if others_are_first {
                    meeting.meet();
                }
                drop(comm);
                return if !others_are_first {
                    meeting.meet()
                };
            }
            meeting.meet();
            let begin = Instant::now();
            let error = call(&comm).expect_err(&place);
            assert!(begin.elapsed() < NOTICED, "{place}: {:?}", begin.elapsed());
            let (who, how) = lost(&error);
            assert_eq!(who, leaver, "{place}: {error}");
            // Without a link, a rank cannot know how the other one ended.
            assert!(how.contains("closed") || before == Before::Nothing, "{place}: {error}");
            survivors.meet();
        });
    }
}

#[test]
fn a_rank_that_leaves_early_is_named_and_said_to_have_left() {
    at_once(on_every_wiring(&[(2, 0), (2, 1), (3, 1), (5, 2), (5, 0)]), |(wiring, (ranks, leaver))| {
        let leave = |before, call: fn(&Communicator, usize) -> Result<()>| {
            a_rank_leaves(wiring, (ranks, leaver), before, |comm| call(comm, leaver));
        };
        for before in [Before::Nothing, Before::Messages] {
            leave(before, |comm, _| comm.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum));
            leave(before, |comm, leaver| comm.recv(&mut [0_u8; 4], leaver).map(drop));
            leave(before, |comm, leaver| comm.send(&vec![0_u8; 1 << 20], leaver));
        }
        leave(Before::Messages, |comm, _| comm.all_reduce(&mut vec![1.0_f32; 50_000], ReduceOp::Sum));
        leave(Before::Messages, |comm, _| comm.barrier());
        leave(Before::Messages, |comm, leaver| comm.broadcast(&mut [1_u8; 100], leaver));
        leave(Before::Messages, |comm, leaver| comm.start_recv([0_u8; 4], leaver)?.wait().map(drop));
    });
}

/// The name of a call that a deadline ends, and the call.
type Timed = (&'static str, fn(&Communicator) -> Result<()>);

const TIMED: [Timed; 4] = [
    ("all_reduce", |comm| comm.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum)),
    ("all_reduce of much", |comm| comm.all_reduce(&mut vec![1_i32; 100_000], ReduceOp::Sum)),
    ("broadcast", |comm| comm.broadcast(&mut [1_u8; 64], comm.world_size() - 1)),
    ("barrier", Communicator::barrier),
];

/// Returns the ranks that an error reports as missing, and those that had come.
#[track_caller]
fn missing(error: &Error) -> (Vec<usize>, Vec<usize>) {
    match cause(error) {
        Error::Timeout { missing, arrived, .. } => {
            let ranks = |peers: &[collectives::Peer]| peers.iter().map(|peer| peer.rank).collect();
            (ranks(missing), ranks(arrived))
        }
        other => panic!("no deadline: {other}"),
    }
}

#[test]
fn a_deadline_that_passes_names_who_is_missing() {
    at_once(on_every_wiring(&[2, 3, 5]), |(wiring, ranks)| {
        for (name, call) in TIMED {
            let late = ranks - 1;
            let (meeting, named) = (Meeting::new(ranks), Mutex::new(Vec::new()));
            threads(wiring, ranks, |comm| {
                let place = format!("{name} on rank {} of {ranks}, {wiring:?}", comm.rank());
                comm.set_timeout(Duration::from_millis(200));
                if comm.rank() != late {
                    let begin = Instant::now();
                    let error = call(comm).expect_err(&place);
                    let elapsed = begin.elapsed();
                    assert!(error.is_timeout() && !error.is_poisoned(), "{place}: {error}");
                    assert!(elapsed < NOTICED && error.to_string().contains("timed out"), "{place}: {elapsed:?}: {error}");
                    assert!(!missing(&error).1.contains(&late), "{place}: {error}");
                    named.lock().unwrap().extend(missing(&error).0);
                }
                meeting.meet();
            });
            // Between hosts, a rank knows only of the ranks that it waits for itself. Within a host, it knows of all.
            let named = named.into_inner().unwrap();
            assert!(named.contains(&late), "{name}, {ranks} ranks, {wiring:?}: {named:?}");
            assert!(wiring != Wiring::Shm || named.iter().all(|rank| *rank == late), "{name}, {ranks} ranks: {named:?}");
        }
    });
}

#[test]
fn a_deadline_inside_one_host_names_all_who_are_missing_and_nobody_else() {
    for (_, call) in TIMED {
        let meeting = Meeting::new(5);
        threads(Wiring::Shm, 5, |comm| {
            if [0, 2, 3].contains(&comm.rank()) {
                comm.set_timeout(Duration::from_millis(100));
                let error = call(comm).expect_err("ranks 1 and 4 do not come");
                // The first rank whose deadline passes tells the others what it knows.
                assert!([vec![1, 4], vec![1]].contains(&missing(&error).0), "{error}");
                assert!(!missing(&error).1.contains(&1), "{error}");
            }
            meeting.meet();
        });
    }
}

#[test]
fn a_barrier_inside_one_host_can_be_tried_again_after_its_deadline() {
    for ranks in [2, 3, 5] {
        let meeting = Meeting::new(ranks);
        threads(Wiring::Shm, ranks, |comm| {
            for round in 0..3 {
                if comm.rank() != 1 {
                    comm.set_timeout(Duration::from_millis(30));
                    for _ in 0..2 {
                        let error = comm.barrier().expect_err("rank 1 is late");
                        assert_eq!(missing(&error).0, [1], "round {round}: {error}");
                        assert!(!error.is_poisoned(), "{error}");
                    }
                }
                meeting.meet();
                comm.set_timeout(PATIENCE);
                comm.barrier().unwrap();
                let mut x = [comm.rank() as u32 + 1];
                comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                assert_eq!(x[0] as usize, ranks * (ranks + 1) / 2, "round {round}");
                meeting.meet();
            }
        });
    }
}

#[test]
fn a_call_after_the_end_carries_the_first_error() {
    for wiring in Wiring::ALL {
        let meeting = Meeting::new(3);
        threads(wiring, 3, |comm| {
            if comm.rank() == 0 {
                // A first call, so that the numbers of calls differ.
                comm.set_timeout(Duration::from_millis(50));
                let first = comm.all_reduce(&mut [1_i64], ReduceOp::Sum).expect_err("nobody else comes");
                assert!(first.is_timeout() && !first.is_poisoned(), "{first}");
                comm.set_timeout(PATIENCE);
                let refused = [
                    comm.all_reduce(&mut [1_i64], ReduceOp::Sum),
                    comm.barrier(),
                    comm.start_barrier().unwrap().wait(),
                    comm.send(&[1_u8], 1),
                    comm.recv(&mut [1_u8], 1).map(drop),
                    comm.start_send([1_u8], 1).map(drop),
                    comm.start_recv([1_u8], 1).map(drop),
                    comm.group(|group| group.send(&[1_u8], 2)).map(drop),
                    comm.monitored_barrier(PATIENCE),
                    comm.split(Some(1), 0).map(drop),
                    comm.duplicate().map(drop),
                ];
                for (number, result) in refused.into_iter().enumerate() {
                    let error = result.expect_err("the communicator is ended");
                    assert!(error.is_poisoned() && error.is_timeout(), "{wiring:?}, call {number}: {error}");
                    assert_eq!(missing(&error).0.first(), missing(&first).0.first(), "{wiring:?}, call {number}: {error}");
                }
                comm.abort();
                let error = comm.barrier().expect_err("the communicator is ended");
                assert!(error.is_timeout(), "the first error stays: {error}");
            }
            meeting.meet();
        });
    }
}

/// The names of calls that an abort ends, and the calls. The ranks in them wait for rank 0.
const ENDLESS: [Timed; 8] = [
    ("all_reduce", |comm| comm.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum)),
    ("all_reduce of much", |comm| comm.all_reduce(&mut vec![1_i32; 100_000], ReduceOp::Sum)),
    ("barrier", Communicator::barrier),
    ("started broadcast", |comm| comm.start_broadcast([1_u8; 100], 0)?.wait().map(drop)),
    ("recv", |comm| comm.recv(&mut [0_u8], 0).map(drop)),
    ("recv from any", |comm| comm.recv(&mut [0_u8], Envelope::any()).map(drop)),
    ("large start_send", |comm| comm.start_send(vec![0_u8; 1 << 20], 0)?.wait().map(drop)),
    ("group", |comm| {
        let (mut x, mut y) = ([1_u8; 4], [1_u8; 4]);
        comm.group(|group| {
            group.recv(&mut x, 0)?;
            group.all_reduce(&mut y, ReduceOp::Sum)
        })
        .map(drop)
    }),
];

/// Whether an error of this call results from an abort by rank 0.
fn is_told_of_abort(error: &Error, name: &str) -> bool {
    match cause(error) {
        Error::Aborted { by, .. } => by.rank == 0,
        // A rank that ends in the middle of a message cannot send a reason.
        other => other.is_peer_lost() && name == "all_reduce of much",
    }
}

#[test]
fn an_abort_ends_a_call_on_every_rank() {
    for wiring in Wiring::ALL {
        for ranks in [2, 3, 5] {
            for (name, call) in ENDLESS {
                let (begun, ended) = (Meeting::new(ranks), Meeting::new(ranks));
                threads(wiring, ranks, |comm| {
                    let place = format!("{name} on rank {} of {ranks}, {wiring:?}", comm.rank());
                    comm.set_timeout(PATIENCE);
                    // A receive from any rank opens no link by itself.
                    if name == "recv from any" {
                        get_acquainted(comm);
                    }
                    begun.meet();
                    if comm.rank() == 0 {
                        comm.abort();
                        comm.abort();
                    } else {
                        let begin = Instant::now();
                        let error = call(comm).expect_err(&place);
                        assert!(begin.elapsed() < NOTICED, "{place}: {:?}", begin.elapsed());
                        assert!(is_told_of_abort(&error, name), "{place}: {error}");
                    }
                    // Rank 0 and its communicator still exist, so the calls ended because of the abort.
                    ended.meet();
                    let later = comm.barrier().expect_err(&place);
                    assert!(later.is_poisoned() && is_told_of_abort(&later, name), "{place}: {later}");
                });
            }
        }
    }
}

#[test]
fn an_abort_from_another_thread_unblocks_a_call_at_once() {
    for wiring in Wiring::ALL {
        for (name, call) in ENDLESS {
            let (begun, ended) = (Meeting::new(3), Meeting::new(2));
            threads(wiring, 2, |comm| {
                if comm.rank() == 0 {
                    begun.meet();
                    return ended.meet();
                }
                let handle = comm.abort_handle();
                let unblocked = std::thread::scope(|scope| {
                    let aborter = scope.spawn(|| {
                        begun.meet();
                        // Usually aborts in the middle of the wait.
                        std::thread::yield_now();
                        handle.abort();
                        Instant::now()
                    });
                    begun.meet();
                    let error = call(comm).expect_err(name);
                    let returned = Instant::now();
                    assert!(matches!(cause(&error), Error::Aborted { by, .. } if by.rank == 1), "{name}, {wiring:?}: {error}");
                    returned.saturating_duration_since(aborter.join().unwrap())
                });
                assert!(unblocked < patience(1) / 5, "{name}, {wiring:?}: {unblocked:?}");
                ended.meet();
            });
        }
    }
}

#[test]
fn an_abort_from_another_thread_reaches_the_peers_of_a_call() {
    for wiring in Wiring::ALL {
        for ranks in [2, 3, 5] {
            for (name, call) in [TIMED[0], TIMED[1], TIMED[3]] {
                let (begun, ended) = (Meeting::new(ranks), Meeting::new(ranks));
                threads(wiring, ranks, |comm| {
                    begun.meet();
                    let begin = Instant::now();
                    let outcome = match comm.rank() {
                        // Makes no call, so that the others must wait.
                        rank if rank == ranks - 1 => Ok(()),
                        0 => {
                            let handle = comm.abort_handle();
                            std::thread::scope(|scope| {
                                scope.spawn(|| handle.abort());
                                call(comm)
                            })
                        }
                        _ => call(comm),
                    };
                    assert!(begin.elapsed() < NOTICED, "{name} on rank {}, {wiring:?}: {:?}", comm.rank(), begin.elapsed());
                    ended.meet();
                    // For the rank that made no call, the others' part of the first call may be complete.
                    let error = outcome.and_then(|()| call(comm)).and_then(|()| call(comm)).expect_err("the communicator is ended");
                    assert!(is_told_of_abort(&error, name), "{name} on rank {} of {ranks}, {wiring:?}: {error}", comm.rank());
                });
            }
        }
    }
}

#[test]
fn no_descriptor_is_left_over() {
    const NAME: &str = "kills::no_descriptor_is_left_over";
    if !is_rank_of(NAME) {
        let output = spawn_rank(NAME, 0, 1, free_port(), &[]).wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    // A separate process, since all tests of one process share its descriptors.
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let cycle = |wiring| {
        threads(wiring, 3, |comm| {
            let (next, previous) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
            comm.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap();
            comm.start_barrier().unwrap().wait().unwrap();
            comm.send_recv(&[1_u8], next, &mut [0_u8], previous).unwrap();
            drop(comm.start_recv([0_u8], Envelope::rank(previous).tag(5)).unwrap());
            drop(comm.split(Some(u32::from(comm.rank() == 0)), 0).unwrap());
        });
    };
    at_once(Wiring::ALL, cycle);
    let before = open();
    at_once(Wiring::ALL, |wiring| (0..50).for_each(|_| cycle(wiring)));
    // A message thread may hold the last one for a moment while it checks for work.
    let begin = Instant::now();
    while open() > before {
        assert!(begin.elapsed() < PATIENCE, "{before} descriptors before and {} after", open());
        std::thread::yield_now();
    }
}
