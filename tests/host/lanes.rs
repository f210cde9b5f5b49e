//! Threads of one rank that use the same communicator: each in a lane of its own, or without any order.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::meeting::wait_until;
use crate::common::ranks::{Meeting, Wiring, communicators_with, each, threads};

use collectives::flight::{Record, State};
use collectives::observe::{CallReport, Observer};
use collectives::{Communicator, Config, Error, ReduceOp};

/// A timeout for a rank that does not come at all.
const SHORT: Duration = Duration::from_millis(50);

/// Returns the builder of a rank, with settings of the test.
fn configured(wiring: Wiring, rank: usize, set: impl FnOnce(&mut Config)) -> collectives::Builder {
    let mut config = Config::default();
    set(&mut config);
    wiring.builder_with(rank, config)
}

fn sum(comm: &Communicator, mut x: u64) -> Result<u64, Error> {
    comm.all_reduce(&mut x, ReduceOp::Sum).map(|()| x)
}

#[test]
fn threads_in_lanes_get_the_results_of_their_own_calls() {
    const LANES: u32 = 4;
    for wiring in Wiring::ALL {
        for ranks in [1, 2, 3, 5] {
            threads(wiring, ranks, |comm| {
                let calls = |lane: u32| {
                    let own = comm.lane(lane).unwrap();
                    assert_eq!((own.rank(), own.world_size()), (comm.rank(), ranks));
                    for call in 0..100 {
                        let x = u64::from(lane) << 32 | call << 8 | comm.rank() as u64;
                        let expected = (0..ranks as u64).map(|rank| u64::from(lane) << 32 | call << 8 | rank).sum();
                        assert_eq!(sum(&own, x).unwrap(), expected, "lane {lane}, call {call}");
                    }
                };
                std::thread::scope(|scope| {
                    // Every rank begins with another lane.
                    let order = (0..LANES).map(|lane| (lane + comm.rank() as u32) % LANES);
                    order.for_each(|lane| drop(scope.spawn(move || calls(lane))));
                    assert_eq!(sum(comm, 1).unwrap(), ranks as u64);
                });
            });
        }
    }
}

#[test]
fn lanes_may_be_asked_for_in_opposite_orders_and_are_made_once() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        threads(wiring, 2, |comm| {
            let numbers = if comm.rank() == 0 { [u32::MAX, 0] } else { [0, u32::MAX] };
            let lanes = std::thread::scope(|scope| {
                let threads = numbers.map(|number| scope.spawn(move || comm.lane(number).unwrap()));
                threads.map(|thread| thread.join().unwrap())
            });
            for (number, lane) in numbers.into_iter().zip(&lanes) {
                let again = comm.lane(number).unwrap();
                // A clone of a communicator shares its timeout.
                again.set_timeout(Duration::from_secs(77));
                assert_eq!(lane.timeout(), Duration::from_secs(77));
                assert!(comm.timeout() != lane.timeout());
                #[cfg(feature = "cuda")]
                assert!(lane.why_no_device().is_some_and(|reason| reason.starts_with("a lane has none")));
            }
            assert_eq!(comm.with_timeout(Duration::from_secs(5)).lane(0).unwrap().timeout(), Duration::from_secs(5));
            comm.barrier().unwrap();
        });
    }
}

#[test]
fn a_lane_that_a_rank_does_not_ask_for_stays_away_and_harms_nothing() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        let over = Meeting::new(3);
        threads(wiring, 3, |comm| {
            if comm.rank() != 1 {
                let error = comm.with_timeout(SHORT).lane(7).unwrap_err();
                assert!(error.is_timeout(), "{error}");
                assert_eq!(comm.lane(7).unwrap_err().to_string(), error.to_string());
            }
            over.meet();
            assert_eq!(sum(comm, 1).unwrap(), 3);
            assert_eq!(sum(&comm.lane(8).unwrap(), 1).unwrap(), 3);
        });
    }
}

#[test]
fn an_ended_communicator_makes_no_lane_and_its_lanes_end_on_their_own() {
    let met = Meeting::new(2);
    threads(Wiring::Shm, 2, |comm| {
        let lane = comm.lane(1).unwrap();
        comm.close().unwrap();
        assert!(comm.lane(1).unwrap_err().is_closed());
        assert!(comm.lane(2).unwrap_err().is_closed());
        assert_eq!(sum(&lane, 1).unwrap(), 2);
        met.meet();
        lane.abort();
        assert!(sum(&lane, 1).is_err());
    });
}

#[test]
fn a_callback_that_asks_for_the_lane_that_its_thread_makes_is_refused() {
    /// Asks for lane 1 at the end of each call.
    #[derive(Default)]
    struct Asks(Mutex<Option<Communicator>>, Mutex<Vec<String>>);

    impl Observer for Asks {
        fn call_ended(&self, _: &CallReport<'_>) {
            let comm = self.0.lock().unwrap().clone();
            if let Some(error) = comm.and_then(|comm| comm.lane(1).err()) {
                self.1.lock().unwrap().push(error.to_string());
            }
        }
    }

    let asks = [Arc::<Asks>::default(), Arc::default()];
    let builder = |rank: usize| configured(Wiring::Shm, rank, |config| config.observer = Some(asks[rank].clone()));
    let comms = communicators_with(2, builder);
    for (asks, comm) in asks.iter().zip(&comms) {
        *asks.0.lock().unwrap() = Some(comm.clone());
    }
    each(comms, |comm| assert_eq!(sum(&comm.lane(1).unwrap(), 1).unwrap(), 2));
    for asks in &asks {
        // The communicator owns its observer.
        *asks.0.lock().unwrap() = None;
        let errors = asks.1.lock().unwrap();
        assert!(!errors.is_empty() && errors.iter().all(|error| error.starts_with("lane: ")), "{errors:?}");
    }
}

/// Waits until the flight recorder shows that another rank may wait for an all-reduce of this rank.
fn wait_for_call(comm: &Communicator) {
    let is_waiting = |record: &Record| record.kind.name() == "all_reduce" && record.state == State::Started;
    wait_until("an all-reduce", || comm.flight_recorder().records().iter().any(is_waiting));
}

#[test]
fn calls_of_two_threads_at_the_same_time_are_an_error_on_every_rank() {
    for wiring in Wiring::ALL {
        let refused = Meeting::new(2);
        let checked = |rank| configured(wiring, rank, |config| config.check_threads = true);
        each(communicators_with(2, checked), |comm| {
            if comm.rank() == 1 {
                refused.meet();
                // Rank 0 may have given its part in its first call.
                let error = sum(&comm, 1).and_then(|_| sum(&comm, 1)).unwrap_err();
                assert!(matches!(error, Error::PeerLost { .. }) && error.peer().is_some_and(|peer| peer.rank == 0), "{error}");
                return;
            }
            std::thread::scope(|scope| {
                let first = scope.spawn(|| sum(&comm, 1));
                wait_for_call(&comm);
                let error = comm.split(Some(0), 0).unwrap_err();
                assert!(matches!(error, Error::Unordered { call: "split" }) && error.to_string().contains("lane"), "{error}");
                let first = first.join().unwrap().unwrap_err();
                assert!(matches!(first, Error::Unordered { .. }), "{first}");
                refused.meet();
                assert!(matches!(sum(&comm, 1).unwrap_err(), Error::Poisoned { .. }));
            });
        });
    }
}

#[test]
fn calls_of_two_threads_that_have_an_order_are_no_error() {
    let checked = |rank| configured(Wiring::Shm, rank, |config| config.check_threads = true);
    each(communicators_with(2, checked), |comm| {
        for _ in 0..100 {
            std::thread::scope(|scope| drop(scope.spawn(|| assert_eq!(sum(&comm, 1).unwrap(), 2))));
            let work = comm.start_all_reduce(1_u64, ReduceOp::Sum).unwrap();
            // A blocking call has its place behind a background call.
            assert_eq!(sum(&comm, 2).unwrap(), 4);
            assert_eq!(work.wait().unwrap(), 2);
        }
    });
}

#[test]
fn unchecked_calls_wait_for_their_turn() {
    let waits = Meeting::new(2);
    // The program's own default counts as unset, so a variable could switch the check on.
    if std::env::var_os("COLLECTIVES_CHECK_THREADS").is_some() {
        return println!("skipped: COLLECTIVES_CHECK_THREADS is set");
    }
    each(communicators_with(2, |rank| Wiring::Shm.builder_for_threads(rank)), |comm| {
        if comm.rank() == 1 {
            waits.meet();
            assert_eq!([sum(&comm, 1).unwrap(), sum(&comm, 1).unwrap()], [2, 2]);
            return;
        }
        std::thread::scope(|scope| {
            let first = scope.spawn(|| sum(&comm, 1));
            wait_for_call(&comm);
            let error = sum(&comm.with_timeout(SHORT), 1).unwrap_err();
            assert!(error.is_timeout(), "{error}");
            waits.meet();
            assert_eq!([first.join().unwrap().unwrap(), sum(&comm, 1).unwrap()], [2, 2]);
        });
    });
}
