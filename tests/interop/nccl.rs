//! NCCL's unique id, exchanged with PyTorch's own ProcessGroupNCCL: its key in the store, and its bytes.

use std::time::Duration;

use collectives::store::{Store, TcpStore, TcpStoreServer};

use crate::peer::{LONG, Peer, Python};
use crate::{python, skip};

/// Each backend, how its group is created (from a launcher's variables or from the caller's store), and the key of the
/// id of its first communicator.
const BACKENDS: [(&str, &str, &str); 3] = [
    ("nccl", "env", "default_pg/0//cuda//0/nccl_storekey_0"),
    ("nccl", "store", "0//cuda//0/nccl_storekey_0"),
    ("nccl-legacy", "env", "default_pg/0//cuda//0"),
];

/// Starts one of two Python ranks, with a pretended device.
fn rank(python: &Python, backend: &str, way: &str, server: &TcpStoreServer, rank: &str) -> Peer {
    let port = server.local_addr().port().to_string();
    let mut command = python.script("nccl.py", &[backend, way, &port, rank, "2"]);
    command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port), ("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")]);
    // The store is already served, as it is by a torchrun agent.
    command.env("TORCHELASTIC_USE_AGENT_STORE", "True").env("COLLECTIVES_INTEROP_PRETEND_DEVICE", "1");
    Peer::start(&mut command)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_rank_of_rust_reads_the_id_that_process_group_nccl_publishes() {
    let python = python!();
    if !python.has_stand_ins() {
        skip!("PyTorch's CUDA libraries here are no stand-ins that show the id");
    }
    for (backend, way, key) in BACKENDS {
        let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let store = TcpStore::connect("127.0.0.1", server.local_addr().port(), LONG).unwrap();
        let mut first = rank(&python, backend, way, &server, "0");
        let made = first.expect("made 0 0");
        let id = store.get(key, LONG).unwrap();
        assert_eq!((hex(&id), id.len()), (made.clone(), 128), "{backend} {way}");
        assert_eq!(first.expect("joined 0 2"), made);
        drop(store);
    }
}

#[test]
fn process_group_nccl_joins_with_the_id_that_a_rank_of_rust_publishes() {
    let python = python!();
    if !python.has_stand_ins() {
        skip!("PyTorch's CUDA libraries here are no stand-ins that show the id");
    }
    for (backend, way, key) in BACKENDS {
        let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let store = TcpStore::connect("127.0.0.1", server.local_addr().port(), LONG).unwrap();
        let mut second = rank(&python, backend, way, &server, "1");
        let id: Vec<u8> = (0..128_u32).map(|index| (index * 37 + 11) as u8).collect();
        assert!(store.get(key, Duration::ZERO).unwrap_err().is_timeout());
        store.set(key, &id).unwrap();
        assert_eq!(second.expect("joined 1 2"), hex(&id), "{backend} {way}");
        drop(store);
    }
}
