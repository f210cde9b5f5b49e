//! The algorithm of a call: the one that a program asks for, a communicator predicts, and an observer receives.

use std::sync::{Arc, Mutex};

use collectives::observe::CallReport;
use collectives::{
    Algorithm, AlgorithmRanges, Collective, Communicator, Config, DType, Error, ReduceOp, observe::CallKind, store::MemoryStore,
};

use crate::common::ranks::{Wiring, threads, threads_with};

fn config(algorithms: AlgorithmRanges) -> Config {
    let mut config = Config::default();
    config.algorithms = algorithms;
    config
}

/// The predicted algorithm is the one that runs, and all ranks predict the same.
#[test]
fn what_is_asked_for_is_done_where_it_exists() {
    let asked = || {
        let ranges = AlgorithmRanges::new().with(Algorithm::Direct, ..4 << 10)?.with(Algorithm::Ring, 4 << 10..)?;
        ranges.with(Algorithm::Chain, ..)
    };
    let reports = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&reports);
    let observer: Arc<dyn collectives::observe::Observer> =
        Arc::new(move |call: &CallReport<'_>| kept.lock().unwrap().push((call.rank, call.kind, call.bytes, call.algorithm)));
    let builder = |rank| {
        let mut config = config(asked().unwrap());
        config.observer = Some(Arc::clone(&observer));
        Wiring::Tcp.builder_with(rank, config)
    };
    let ways = threads_with(3, builder, |comm| {
        let way = |collective, bytes| comm.algorithm(collective, bytes, DType::F32);
        let ways = [
            way(Collective::AllReduce, 4 << 10),
            way(Collective::AllReduce, (4 << 10) - 4),
            way(Collective::ReduceScatter, 4 << 10),
            way(Collective::Broadcast, 4 << 10),
            way(Collective::Barrier, 0),
            way(Collective::GatherV, 4 << 10),
        ];
        for count in [1 << 10, (1 << 10) - 1] {
            comm.all_reduce(&mut vec![1.0_f32; count], ReduceOp::Sum).unwrap();
        }
        comm.broadcast(&mut [0_u8; 9], 1).unwrap();
        ways
    });
    use Algorithm::{Chain, Direct, Doubling, Ring};
    // A broadcast has neither ring nor direct. A barrier and the uneven forms have one algorithm.
    assert_eq!(ways, [[Some(Ring), Some(Direct), Some(Ring), Some(Chain), Some(Doubling), Some(Direct)]; 3]);
    let reports = reports.lock().unwrap();
    for rank in 0..3 {
        let told: Vec<_> = reports.iter().filter(|report| report.0 == rank).map(|(_, kind, bytes, way)| (*kind, *bytes, *way)).collect();
        let all_reduce = |bytes, way| (CallKind::Collective(Collective::AllReduce), bytes, Some(way));
        assert_eq!(
            told[told.len() - 3..],
            [all_reduce(4096, Ring), all_reduce(4092, Direct), (Collective::Broadcast.into(), 9, Some(Chain))],
            "rank {rank}"
        );
    }
}

/// Every collective has an algorithm on every wiring, and one that this wiring allows.
#[test]
fn every_collective_has_a_way_on_every_wiring() {
    let in_memory = [Algorithm::Flags, Algorithm::Mailboxes, Algorithm::Slots, Algorithm::Shares, Algorithm::Links];
    for wiring in Wiring::ALL {
        let ways = threads(wiring, 6, |comm| {
            let sizes = [0, 24, 6 << 10, 6 << 20];
            let all = Collective::ALL.into_iter().flat_map(|collective| sizes.map(|bytes| comm.algorithm(collective, bytes, DType::F32)));
            all.collect::<Option<Vec<_>>>().unwrap()
        });
        assert!(ways.iter().all(|own| *own == ways[0]), "{wiring:?}");
        for way in &ways[0] {
            let fits = match wiring {
                Wiring::Shm => in_memory.contains(way),
                Wiring::Tcp => AlgorithmRanges::new().with(*way, ..).is_ok(),
                Wiring::Pairs | Wiring::Dealt => *way == Algorithm::Hierarchical,
                #[cfg(feature = "encryption")]
                Wiring::Encrypted => AlgorithmRanges::new().with(*way, ..).is_ok(),
            };
            assert!(fits, "{wiring:?}: {way}");
        }
    }
    let alone = &Communicator::local(1).unwrap()[0];
    assert!(Collective::ALL.into_iter().all(|collective| alone.algorithm(collective, 8, DType::U8) == Some(Algorithm::Copy)));
}

#[test]
fn ranks_that_ask_for_different_algorithms_do_not_start() {
    let store = MemoryStore::new();
    let results: Vec<_> = std::thread::scope(|scope| {
        let join = |rank: usize| {
            let algorithms = AlgorithmRanges::new().with(Algorithm::Ring, (rank + 1) << 10..).unwrap();
            Wiring::Tcp.builder_with(rank, config(algorithms)).with_store(Arc::new(store.clone()), rank, 2).map(drop)
        };
        let ranks: Vec<_> = (0..2).map(|rank| scope.spawn(move || join(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for result in results {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Conflict { .. }), "{error}");
        assert!(error.to_string().contains("ring:1K-") && error.to_string().contains("ring:2K-"), "{error}");
    }
}
