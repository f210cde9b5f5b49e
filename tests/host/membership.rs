//! Processes that join a running job. Here ranks are threads; `tests/failures` has processes that are killed.

use std::net::SocketAddr;
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use collectives::{Communicator, Config, Error, Membership, ReduceOp, Result, Secret, Transport};

use crate::common::meeting::wait_until;
use crate::common::ranks::{Wiring, communicators, communicators_with, each, free_port};

/// The wirings in which newcomers join.
const WIRINGS: &[Wiring] = &[
    Wiring::Shm,
    Wiring::Tcp,
    #[cfg(feature = "encryption")]
    Wiring::Encrypted,
];

/// Checks that a communicator works: the sum of one power of ten for each rank.
fn check(comm: &Communicator, world_size: usize) {
    assert_eq!(comm.world_size(), world_size);
    let mut x = [10_u64.pow(comm.rank() as u32)];
    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
    assert_eq!(x[0], (0..world_size as u32).map(|rank| 10_u64.pow(rank)).sum::<u64>());
}

/// Waits until a number of processes wait at this rank.
fn wait_for(comm: &Communicator, newcomers: usize) {
    wait_until("the newcomers have asked", || comm.waiting_newcomers().unwrap() == newcomers);
}

/// Starts a thread that joins at `address`.
fn newcomer<'scope>(
    scope: &'scope std::thread::Scope<'scope, '_>,
    wiring: Wiring,
    address: SocketAddr,
) -> ScopedJoinHandle<'scope, Result<Membership>> {
    scope.spawn(move || wiring.builder(0).join(address))
}

#[test]
fn newcomers_follow_the_members_in_the_order_of_the_ranks_that_they_asked() {
    for wiring in WIRINGS {
        std::thread::scope(|scope| {
            let comms = communicators(*wiring, 3);
            let [first, last] = [0, 2].map(|rank: usize| comms[rank].join_address().unwrap());
            let later = newcomer(scope, *wiring, last);
            wait_for(&comms[2], 1);
            let earlier = newcomer(scope, *wiring, first);
            wait_for(&comms[0], 1);
            let mut all = each(comms, |comm| {
                let membership = comm.admit().unwrap();
                assert_eq!((membership.communicator.rank(), membership.newcomers), (comm.rank(), 3..5));
                // The old communicator still works, but its ranks have continued elsewhere.
                check(&comm, 3);
                membership.communicator
            });
            for (rank, newcomer) in [(3, earlier), (4, later)] {
                let membership = newcomer.join().unwrap().unwrap();
                assert_eq!((membership.communicator.rank(), membership.newcomers), (rank, 3..5), "{wiring:?}");
                all.push(membership.communicator);
            }
            each(all, |comm| check(&comm, 5));
        });
    }
}

#[test]
fn without_newcomers_the_communicator_stays_the_same() {
    each(communicators(Wiring::Shm, 3), |comm| {
        for _ in 0..3 {
            let membership = comm.admit().unwrap();
            assert_eq!(membership.newcomers, 3..3);
            check(&membership.communicator, 3);
        }
        assert_eq!(comm.waiting_newcomers().unwrap(), 0);
        check(&comm.shrink().unwrap(), 3);
    });
}

#[test]
fn a_job_grows_again_and_again_and_newcomers_may_ask_at_former_newcomers() {
    std::thread::scope(|scope| {
        let mut comms = communicators(Wiring::Tcp, 1);
        for world_size in 2..6 {
            let last = comms.last().unwrap();
            let joined = newcomer(scope, Wiring::Tcp, last.join_address().unwrap());
            wait_for(last, 1);
            comms = each(comms, |comm| comm.admit().unwrap().communicator);
            comms.push(joined.join().unwrap().unwrap().communicator);
            each(comms.clone(), |comm| check(&comm, world_size));
        }
    });
}

#[test]
fn one_call_leaves_out_who_is_gone_and_lets_in_who_waits() {
    for wiring in WIRINGS {
        std::thread::scope(|scope| {
            let mut comms = communicators(*wiring, 4);
            let joined = newcomer(scope, *wiring, comms[3].join_address().unwrap());
            wait_for(&comms[3], 1);
            drop(comms.remove(1));
            let mut comms = each(comms, |comm| {
                let membership = comm.admit().unwrap();
                assert_eq!(membership.newcomers, 3..4);
                membership.communicator
            });
            comms.push(joined.join().unwrap().unwrap().communicator);
            assert_eq!(comms.iter().map(Communicator::rank).collect::<Vec<_>>(), [0, 1, 2, 3]);
            each(comms, |comm| check(&comm, 4));
        });
    }
}

#[test]
fn after_an_admission_a_shrink_of_the_old_communicator_is_left_behind() {
    std::thread::scope(|scope| {
        let comms = communicators(Wiring::Shm, 2);
        let joined = newcomer(scope, Wiring::Shm, comms[0].join_address().unwrap());
        wait_for(&comms[0], 1);
        let grown = each(comms, |comm| {
            let grown = comm.admit().unwrap().communicator;
            let error = comm.shrink().unwrap_err();
            assert!(matches!(error, Error::LeftBehind { .. }), "{error}");
            grown
        });
        let joined = joined.join().unwrap().unwrap().communicator;
        each(grown.into_iter().chain([joined]).collect(), |comm| check(&comm, 3));
    });
}

#[test]
fn a_newcomer_with_other_settings_is_refused_in_words() {
    std::thread::scope(|scope| {
        let comms = communicators(Wiring::Tcp, 2);
        let address = comms[1].join_address().unwrap();
        let refused = scope.spawn(move || {
            let mut config = Config::default();
            config.reproducible = true;
            Wiring::Tcp.builder_with(0, config).join(address)
        });
        wait_for(&comms[1], 1);
        each(comms, |comm| {
            let membership = comm.admit().unwrap();
            assert!(membership.newcomers.is_empty());
            check(&membership.communicator, 2);
        });
        let error = refused.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Conflict { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("reproducible true") && text.contains("reproducible false") && text.contains("refuses this process"),
            "{text}"
        );
    });
}

#[test]
fn only_processes_that_know_the_secret_are_heard() {
    let with = |secret: &str| {
        let mut config = Config::default();
        config.secret = Some(Secret::new(secret).unwrap());
        config
    };
    let comms = communicators_with(2, |rank| Wiring::Tcp.builder_with(rank, with("the secret of the job")));
    let address = comms[0].join_address().unwrap();
    for config in [Config::default(), with("another secret, of another job")] {
        let error = Wiring::Tcp.builder_with(0, config).join(address).unwrap_err();
        assert!(error.is_unauthorized(), "{error}");
        assert_eq!(comms[0].waiting_newcomers().unwrap(), 0);
    }
    std::thread::scope(|scope| {
        let joined = scope.spawn(move || Wiring::Tcp.builder_with(0, with("the secret of the job")).join(address));
        wait_for(&comms[0], 1);
        let mut all = each(comms, |comm| comm.admit().unwrap().communicator);
        all.push(joined.join().unwrap().unwrap().communicator);
        each(all, |comm| check(&comm, 3));
    });
}

#[test]
fn a_newcomer_that_gives_up_is_not_called() {
    let comms = communicators(Wiring::Shm, 2);
    let (address, gone) = (comms[0].join_address().unwrap(), SocketAddr::from(([127, 0, 0, 1], free_port())));
    let mut config = Config::default();
    config.timeout = Duration::from_millis(300);
    let builder = Communicator::builder().config({
        config.transport = Transport::Shm;
        config
    });
    // Asks at every address in turn.
    let error = builder.join(&[gone, address][..]).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains(&address.to_string()), "{error}");
    assert_eq!(comms[0].waiting_newcomers().unwrap(), 0);
    each(comms, |comm| assert!(comm.admit().unwrap().newcomers.is_empty()));
    let none: &[SocketAddr] = &[];
    let error = Communicator::join(none).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
}
