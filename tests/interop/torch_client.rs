//! PyTorch's TCPStore clients against this crate's server.

use std::time::Duration;

use collectives::store::{Store, TcpStore, TcpStoreServer};

use crate::peer::{LONG, Peer, Python};
use crate::python;
use crate::splitter::splitter;

/// Starts a server and connects a client of this crate.
fn serve() -> (TcpStoreServer, std::sync::Arc<TcpStore>) {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let store = TcpStore::connect("127.0.0.1", server.local_addr().port(), LONG).unwrap();
    (server, store)
}

/// Runs one part of client.py against a port.
fn part(python: &Python, name: &str, port: u16) -> Peer {
    Peer::start(&mut python.script("client.py", &[name, &port.to_string()]))
}

#[test]
fn python_asks_every_query_of_our_server() {
    let python = python!();
    let (server, store) = serve();
    part(&python, "every_query", server.local_addr().port()).finish();
    assert_eq!(store.get("n", Duration::ZERO).unwrap(), b"-8");
    assert_eq!(store.get("schlüssel/鍵", Duration::ZERO).unwrap(), (0..=255).collect::<Vec<u8>>());
    let mut keys = store.list_keys().unwrap();
    keys.sort();
    assert_eq!(keys, ["alone", "empty", "k", "log", "m1", "m2", "n", "schlüssel/鍵"]);
}

#[test]
fn python_puts_prefixes_and_queues_into_our_server() {
    let python = python!();
    let (server, store) = serve();
    let port = server.local_addr().port();
    let (prefixes, queues) = (part(&python, "prefixes", port), part(&python, "queues", port));
    prefixes.finish();
    queues.finish();
    assert_eq!(store.get("job/group/0/n", Duration::ZERO).unwrap(), b"5");
    assert_eq!(store.queue_len("q").unwrap(), 0);
}

#[test]
fn pythons_waits_run_out_at_our_server_and_its_connection_is_as_good_as_before() {
    let python = python!();
    let (server, _store) = serve();
    part(&python, "timeouts", server.local_addr().port()).finish();
}

#[test]
fn python_moves_values_of_every_allowed_size_through_our_server_and_no_longer_ones() {
    let python = python!();
    let (server, store) = serve();
    part(&python, "big_values", server.local_addr().port()).finish();
    assert_eq!(store.get("big", Duration::ZERO).unwrap(), pattern(8 << 20));
}

#[test]
fn many_python_clients_meet_at_our_server_at_once() {
    let python = python!();
    let (server, _store) = serve();
    part(&python, "many_at_once", server.local_addr().port()).finish();
}

#[test]
fn python_is_served_although_every_byte_comes_alone() {
    let python = python!();
    let (server, store) = serve();
    let port = splitter(server.local_addr().port(), 0);
    part(&python, "every_query", port).finish();
    part(&python, "prefixes", port).finish();
    assert_eq!(store.get("log", Duration::ZERO).unwrap(), b"one,two");
}

#[test]
fn a_python_client_that_is_killed_while_it_waits_is_forgotten() {
    let python = python!();
    let (server, store) = serve();
    let mut client = part(&python, "wait_for_ever", server.local_addr().port());
    client.expect("waits");
    // The client may be waiting or about to. Both must end with the client.
    client.kill();
    store.set("never", b"").unwrap();
    assert_eq!(store.num_keys().unwrap(), 2);
    drop(store);
    // If the server kept the dead client, its drop would wait for it.
    let began = std::time::Instant::now();
    drop(server);
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
}

/// The bytes that both sides generate.
pub(crate) fn pattern(length: usize) -> Vec<u8> {
    (0..=250).cycle().take(length).collect()
}
