//! A start whose store is held up, because its process is stopped or its machine is migrated.

use std::time::Duration;

use collectives::Communicator;
use collectives::store::{Store, TcpStore, TcpStoreServer};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::ranks::{free_port, is_rank_of, patience, spawn_rank};
use crate::processes::Ranks;

/// The variable that makes a process serve the store instead of being a rank.
const SERVES: &str = "COLLECTIVES_TEST_SERVES";

/// Longer than the former limit of a single answer.
const HELD_UP: Duration = Duration::from_secs(6);

fn rank_or_store() {
    if std::env::var_os(SERVES).is_some() {
        let port: u16 = std::env::var("MASTER_PORT").unwrap().parse().unwrap();
        let _server = TcpStoreServer::bind(("127.0.0.1", port)).unwrap();
        println!("@serving");
        // The parent kills this process.
        return std::thread::park_timeout(patience(60));
    }
    let comm = Communicator::builder().configure(|config| config.timeout = patience(60)).from_env().unwrap();
    comm.barrier().unwrap();
    println!("@started");
    comm.close().unwrap();
}

#[test]
fn a_start_goes_on_when_its_store_does() {
    const NAME: &str = "held_up_store::a_start_goes_on_when_its_store_does";
    if is_rank_of(NAME) {
        return rank_or_store();
    }
    let port = free_port();
    let agent = ("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned());
    let mut server = Ranks::of(vec![spawn_rank(NAME, 0, 2, port, &[(SERVES, "1".to_owned())])]);
    assert_eq!(server.next("it serves").1, "serving");
    let mut first = Ranks::of(vec![spawn_rank(NAME, 0, 2, port, std::slice::from_ref(&agent))]);
    let store = TcpStore::connect("127.0.0.1", port, patience(20)).unwrap();
    // The first rank has published its key and waits for the other rank.
    store.wait(&["collectives/1/collectives/0/0"], patience(20)).unwrap();
    let process = Pid::from_child(&server.children[0]);
    kill_process(process, Signal::STOP).unwrap();
    // This sleep waits for nothing: it is how long the store is held up.
    std::thread::sleep(HELD_UP);
    kill_process(process, Signal::CONT).unwrap();
    let mut second = Ranks::of(vec![spawn_rank(NAME, 1, 2, port, &[agent])]);
    for rank in [&mut first, &mut second] {
        assert_eq!(rank.next("it has started").1, "started");
        rank.outcome(0).unwrap();
    }
}
