//! The job's store, kept for the program's own keys: which ranks share them, which rank serves them, and what happens
//! when that rank leaves.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::ranks::{Meeting, Wiring, each, free_port, is_rank_of, patience, spawn_rank, threads, threads_with};

use collectives::{
    Communicator, Config, Error, Secret,
    store::{MemoryStore, Store, TcpStore, TcpStoreServer},
};

/// Long enough for anything that is not stuck.
const PATIENCE: Duration = patience(20);

/// A lock for starting processes and for checking that a port is free. A child process has its parent's listeners until
/// it runs its program.
static STARTING: Mutex<()> = Mutex::new(());

fn keeping() -> Config {
    let mut config = Config::default();
    config.keep_store = true;
    config.timeout = patience(60);
    config
}

/// Starts the ranks of a job. Rank 0 serves the store at this port.
fn job(config: &Config, port: u16, ranks: usize) -> Vec<Communicator> {
    let url = |rank: usize| format!("tcp://127.0.0.1:{port}?rank={rank}&world_size={ranks}&timeout={}", patience(60).as_secs());
    let join = |rank: usize| Communicator::builder().config(config.clone()).from_url(&url(rank)).unwrap();
    std::thread::scope(|scope| {
        let join = &join;
        let ranks: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || join(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Checks that all ranks see one set of keys, and nothing else.
fn assert_shared(comm: &Communicator) {
    let store = comm.store().unwrap();
    assert_eq!(store.add("entered", 1).map(|came| came > 0).ok(), Some(true));
    store.barrier("all", comm.world_size(), PATIENCE).unwrap();
    assert_eq!(store.add("entered", 0).unwrap() as usize, comm.world_size());
    store.set(&format!("rank {}", comm.rank()), &[comm.rank() as u8]).unwrap();
    for rank in 0..comm.world_size() {
        assert_eq!(store.get(&format!("rank {rank}"), PATIENCE).unwrap(), [rank as u8]);
    }
    let mut keys = store.list_keys().unwrap();
    keys.retain(|key| !key.starts_with("all"));
    keys.sort();
    let own: Vec<String> = ["entered".to_owned()].into_iter().chain((0..comm.world_size()).map(|rank| format!("rank {rank}"))).collect();
    assert_eq!(keys, own, "of the crate's keys or another communicator's none is seen");
    comm.barrier().unwrap();
}

#[test]
fn ranks_share_keys_and_communicators_do_not() {
    for ranks in [1, 2, 3, 5] {
        let program = |comm: &Communicator| {
            assert_shared(comm);
            let half = comm.split(Some(comm.rank() as u32 % 2), 0).unwrap().unwrap();
            assert_shared(&half);
            assert_shared(&comm.duplicate().unwrap());
            assert_shared(&half.subgroup_of_size(1).unwrap());
            comm.barrier().unwrap();
        };
        threads_with(ranks, |rank| Wiring::Shm.builder_with(rank, keeping()), program);
        each(job(&keeping(), free_port(), ranks), |comm| program(&comm));
    }
}

#[test]
fn it_is_kept_only_where_that_is_asked_for() {
    threads(Wiring::Shm, 2, |comm| {
        let error = comm.store().unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("keep_store"), "{error}");
    });
    let _none_starts = STARTING.lock();
    let port = free_port();
    let comms = job(&Config::default(), port, 2);
    // The port is free again although the communicators are open.
    drop(TcpStoreServer::bind(("127.0.0.1", port)).unwrap());
    assert!(comms[0].store().unwrap_err().is_unsupported());
    drop(comms);
    let comms = job(&keeping(), port, 2);
    assert!(matches!(TcpStoreServer::bind(("127.0.0.1", port)), Err(Error::Config { .. })));
    // Rank 0's communicators keep it open: the job's, and one derived from it.
    let child = std::thread::scope(|scope| {
        let children = [0, 1].map(|rank| {
            let comm = &comms[rank];
            scope.spawn(move || comm.duplicate().unwrap())
        });
        children.map(|child| child.join().unwrap())
    });
    let handle = child[1].store().unwrap();
    drop(comms);
    handle.set("key", b"value").unwrap();
    assert_eq!(child[0].store().unwrap().get("key", PATIENCE).unwrap(), b"value");
    drop(child);
    assert!(handle.set("key", b"value").and_then(|()| handle.get("key", PATIENCE)).is_err());
    drop(TcpStoreServer::bind(("127.0.0.1", port)).unwrap());
}

#[test]
fn a_thread_may_wait_for_what_another_one_sets() {
    each(job(&keeping(), free_port(), 2), |comm| {
        let waiting = comm.store().unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| waiting.get(&format!("for rank {}", comm.rank()), PATIENCE).unwrap());
            let setting = comm.store().unwrap();
            setting.set(&format!("for rank {}", comm.rank()), b"here").unwrap();
            assert_eq!(waits.join().unwrap(), b"here");
        });
        comm.close().unwrap();
    });
}

#[test]
fn when_rank_0_closes_the_others_are_told_and_nobody_waits() {
    let meeting = Meeting::new(3);
    each(job(&keeping(), free_port(), 3), |comm| {
        let store = comm.store().unwrap();
        meeting.meet();
        if comm.rank() == 0 {
            // The other ranks' handles are open, and a thread waits at one of them.
            drop(comm);
            assert!(store.set("key", b"value").and_then(|()| store.check(&["key"])).is_err(), "its own handle ends too");
            meeting.meet();
            return;
        }
        let began = std::time::Instant::now();
        let error = store.get("never", Duration::from_secs(3600)).unwrap_err();
        assert!(matches!(error, Error::Io { .. }) && began.elapsed() < Duration::from_secs(3000), "{error}");
        assert!(error.to_string().contains("which rank 0 of the job serves until it has closed"), "{error}");
        meeting.meet();
        for _ in 0..2 {
            let error = store.add("key", 1).unwrap_err();
            assert!(error.to_string().contains("rank 0 of the job"), "{error}");
            // Creating a new handle does not wait either.
            let error = comm.store().map(drop).unwrap_err();
            assert!(matches!(error, Error::Io { .. }) && error.to_string().contains("rank 0 of the job"), "{error}");
        }
    });
}

#[test]
fn a_closed_communicator_gives_no_handle_and_a_failed_one_does() {
    each(job(&keeping(), free_port(), 2), |comm| {
        let child = comm.duplicate().unwrap();
        comm.barrier().unwrap();
        child.abort();
        assert!(child.barrier().is_err());
        let key = format!("after the end, rank {}", child.rank());
        child.store().unwrap().set(&key, b"said").unwrap();
        assert_eq!(child.store().unwrap().get(&key, PATIENCE).unwrap(), b"said");
        let shrunk = child.shrink().unwrap();
        assert_shared(&shrunk);
        let kept = comm.clone();
        shrunk.close().unwrap();
        comm.close().unwrap();
        assert!(kept.store().unwrap_err().is_closed());
    });
}

#[test]
fn a_protected_store_stays_protected() {
    let mut config = keeping();
    config.secret = Some(Secret::new(*b"known to every rank of the job").unwrap());
    let port = free_port();
    let meeting = Meeting::new(2);
    each(job(&config, port, 2), |comm| {
        assert_shared(&comm);
        if comm.rank() == 1 {
            let limit = Duration::from_secs(2);
            let bare = TcpStore::connect("127.0.0.1", port, limit).map(drop).unwrap_err();
            assert!(bare.is_unauthorized(), "{bare}");
            let other = Secret::new(*b"another one altogether").unwrap();
            let other = TcpStore::connect_with_secret("127.0.0.1", port, limit, &other).map(drop).unwrap_err();
            assert!(other.is_unauthorized(), "{other}");
        }
        meeting.meet();
    });
}

#[test]
fn a_store_in_a_file_lives_as_long_as_its_communicators() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let url = |rank: usize| format!("file://{}?rank={rank}&world_size=2&timeout=60", path.display());
    let comms: Vec<Communicator> = std::thread::scope(|scope| {
        let url = &url;
        let ranks = [0, 1].map(|rank| scope.spawn(move || Communicator::builder().config(keeping()).from_url(&url(rank)).unwrap()));
        ranks.map(|rank| rank.join().unwrap()).into()
    });
    each(comms, |comm| {
        let store = comm.store().unwrap();
        store.set(&comm.rank().to_string(), b"here").unwrap();
        assert_eq!(store.get(&(1 - comm.rank()).to_string(), PATIENCE).unwrap(), b"here");
        assert!(path.exists());
        comm.barrier().unwrap();
    });
    assert!(!path.exists(), "the last one removes the file");
}

#[test]
fn a_store_of_ones_own_is_shared_as_it_is() {
    let own = MemoryStore::new();
    threads_with(2, |rank| Wiring::Shm.builder_with(rank, keeping()), |_| {});
    let comms: Vec<Communicator> = std::thread::scope(|scope| {
        let join = |rank| {
            let store: Arc<dyn Store> = Arc::new(own.clone());
            scope.spawn(move || Communicator::builder().config(keeping()).with_store(store, rank, 2).unwrap())
        };
        [0, 1].map(join).map(|rank| rank.join().unwrap()).into()
    });
    let before = own.num_keys().unwrap();
    comms[1].store().unwrap().set("mine", b"value").unwrap();
    assert_eq!(own.num_keys().unwrap(), before + 1);
    assert_eq!(comms[0].store().unwrap().get("mine", Duration::ZERO).unwrap(), b"value");
    assert!(!own.check(&["mine"]).unwrap(), "its key has a prefix");
    drop(comms);
    assert_eq!(own.num_keys().unwrap(), before + 1);
}

#[test]
fn processes_share_keys_until_rank_0_is_killed() {
    const NAME: &str = "store_handle::processes_share_keys_until_rank_0_is_killed";
    if is_rank_of(NAME) {
        let comm = Communicator::builder().config(keeping()).from_env().unwrap();
        assert_shared(&comm);
        let store = comm.store().unwrap();
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            std::process::abort();
        }
        let error = store.get("never", patience(60)).unwrap_err();
        assert!(matches!(error, Error::Io { .. }) && error.to_string().contains("rank 0 of the job"), "{error}");
        println!("survived");
        return;
    }
    let port = free_port();
    let starting = STARTING.lock();
    let ranks: Vec<_> = (0..3).map(|rank| spawn_rank(NAME, rank, 3, port, &[])).collect();
    drop(starting);
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let told = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.success() && told.contains("survived"), rank != 0, "{told}{}", String::from_utf8_lossy(&output.stderr));
    }
}
