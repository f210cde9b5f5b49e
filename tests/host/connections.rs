//! Collectives over several TCP connections to each peer.

use std::sync::Arc;

use crate::common::ranks::{Wiring, communicators_with, each, patience, processes_with, threads_with};

use collectives::store::MemoryStore;
use collectives::{Builder, Communicator, Config, Error, ReduceOp, Transport};

/// Returns the builder of a rank with this number of connections.
fn builder(wiring: Wiring, rank: usize, connections: usize) -> Builder {
    let mut config = Config::default();
    config.connections = connections;
    wiring.builder_with(rank, config)
}

/// Makes calls on vectors of this length, and returns all results.
fn results(comm: &Communicator, len: usize) -> Vec<Vec<f32>> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let own = |seed: usize, len: usize| (0..len).map(|at| ((rank * 31 + seed + at) % 977) as f32 / 7.0).collect::<Vec<f32>>();
    let mut sum = own(1, len);
    comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    let mut all = vec![0.0; len * ranks];
    comm.all_gather_into(&own(2, len)[..], &mut all).unwrap();
    let mut exchanged = vec![0.0; len * ranks];
    comm.all_to_all_into(&own(3, len * ranks)[..], &mut exchanged).unwrap();
    let mut shared = own(4, len);
    comm.broadcast(&mut shared, ranks - 1).unwrap();
    let mut share = vec![0.0; len];
    comm.reduce_scatter_into(&own(5, len * ranks)[..], &mut share, ReduceOp::Max).unwrap();
    vec![sum, all, exchanged, shared, share]
}

#[test]
fn results_are_the_same_over_any_number_of_connections() {
    // Less than a stripe, about one, and many.
    for (wiring, ranks) in [(Wiring::Tcp, 2), (Wiring::Tcp, 3), (Wiring::Pairs, 4)] {
        let with = |connections| {
            threads_with(
                ranks,
                |rank| builder(wiring, rank, connections),
                |comm| [0, 1, 999, 32_768, 32_769, 300_007].map(|len| results(comm, len)),
            )
        };
        let expected = with(1);
        for connections in [2, 3, 16] {
            assert!(with(connections) == expected, "{wiring:?}, {ranks} ranks, {connections} connections");
        }
    }
}

#[test]
fn processes_use_several_connections_too() {
    let program = |comm: &Communicator| {
        assert!(comm.explain().contains("over TCP, 4 connections to each peer"), "{}", comm.explain());
        let mut x = vec![1_u64; 1 << 18];
        (0..20).try_for_each(|_| comm.all_reduce(&mut x, ReduceOp::Max))?;
        comm.all_reduce(&mut x, ReduceOp::Sum)?;
        assert!(x.iter().all(|x| *x == 2));
        Ok(())
    };
    processes_with("connections::processes_use_several_connections_too", 2, |rank| builder(Wiring::Tcp, rank, 4), program);
}

#[test]
fn ranks_with_different_numbers_are_told() {
    let store = MemoryStore::new();
    let join = |rank: usize| builder(Wiring::Tcp, rank, 1 + rank).with_store(Arc::new(store.clone()), rank, 2).unwrap_err();
    let errors = std::thread::scope(|scope| {
        let join = &join;
        [0, 1].map(|rank| scope.spawn(move || join(rank))).map(|rank| rank.join().unwrap())
    });
    for error in errors {
        assert!(matches!(error, Error::Conflict { .. }) && error.to_string().contains("2 connections"), "{error}");
    }
    for wrong in [0, 17] {
        let error = Communicator::builder().configure(|config| config.connections = wrong).local(2).unwrap_err();
        assert!(matches!(error, Error::Config { .. }) && error.to_string().contains("1 to 16"), "{error}");
    }
}

#[test]
fn a_peer_that_leaves_is_lost_and_an_abort_reaches_all() {
    let comms = || communicators_with(3, |rank| builder(Wiring::Tcp, rank, 3));
    each(comms(), |comm| {
        results(&comm, 100_000);
        if comm.rank() == 2 {
            return;
        }
        let error = comm.all_reduce(&mut vec![1.0_f32; 500_000], ReduceOp::Sum).unwrap_err();
        assert!(error.is_peer_lost(), "{error}");
    });
    each(comms(), |comm| {
        if comm.rank() == 0 {
            comm.barrier().unwrap();
            comm.abort();
        } else {
            comm.barrier().unwrap();
            let error = comm.all_reduce(&mut vec![1.0_f32; 500_000], ReduceOp::Sum).unwrap_err();
            assert!(!error.is_timeout(), "{error}");
        }
    });
}

#[cfg(feature = "encryption")]
#[test]
fn encrypted_links_use_one_connection() {
    let config = |config: &mut Config| {
        config.transport = Transport::Tcp;
        config.connections = 4;
        config.secret = Some(collectives::Secret::new("a secret of the connections' test").unwrap());
        config.encrypt = true;
        config.timeout = patience(60);
    };
    let explained = Communicator::builder().configure(config).run_local(2, |comm| {
        results(comm, 50_000);
        Ok(comm.explain())
    });
    assert!(explained.unwrap().iter().all(|explained| !explained.contains("connections to each peer")));
}
