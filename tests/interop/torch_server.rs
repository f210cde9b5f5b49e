//! This crate's client against PyTorch's TCPStore servers, the one on libuv and the legacy one.

use std::thread;
use std::time::{Duration, Instant};

use collectives::{
    Error,
    store::{PrefixStore, Store, TcpStore},
};

use crate::common::ranks;
use crate::peer::{LONG, Peer, Python};
use crate::python;
use crate::splitter::splitter;
use crate::torch_client::pattern;

/// The timeout of waits that are meant to time out.
const SHORT: Duration = Duration::from_millis(50);

/// A PyTorch server and its port.
struct Server {
    peer: Peer,
    port: u16,
}

impl Server {
    fn start(python: &Python, kind: &str) -> Self {
        let mut peer = Peer::start(&mut python.script("server.py", &[kind]));
        let port = peer.expect("port").parse().unwrap();
        Self { peer, port }
    }

    fn client(&self) -> std::sync::Arc<TcpStore> {
        TcpStore::connect("127.0.0.1", self.port, LONG).unwrap()
    }
}

/// Makes every kind of call except queue calls.
fn every_call(store: &TcpStore, other: &TcpStore) {
    store.set("k", b"v").unwrap();
    assert_eq!(other.get("k", LONG).unwrap(), b"v");
    assert_eq!((other.add("n", 41).unwrap(), store.add("n", 1).unwrap(), store.add("n", -50).unwrap()), (41, 42, -8));
    assert_eq!(store.get("n", LONG).unwrap(), b"-8");
    assert_eq!(store.compare_set("k", b"x", b"y").unwrap(), b"v");
    assert_eq!(store.compare_set("k", b"v", b"w").unwrap(), b"w");
    assert_eq!(store.compare_set("absent", b"x", b"y").unwrap(), b"x");
    assert_eq!(store.compare_set("fresh", b"", b"y").unwrap(), b"y");
    assert!(store.check(&["k", "n", "fresh"]).unwrap() && !store.check(&["k", "absent"]).unwrap() && store.check(&[]).unwrap());
    store.wait(&["k", "n", "fresh"], LONG).unwrap();
    store.wait(&[], Duration::ZERO).unwrap();
    assert!(store.delete_key("fresh").unwrap() && !store.delete_key("fresh").unwrap());
    // A request without an answer may be overtaken on another connection. One with an answer may not.
    store.append("log", b"one,").unwrap();
    assert!(store.check(&["log"]).unwrap());
    other.append("log", b"two").unwrap();
    assert!(other.check(&["log"]).unwrap());
    assert_eq!(store.multi_get(&["log", "k"], LONG).unwrap(), [b"one,two".to_vec(), b"w".to_vec()]);
    store.multi_set(&[("m1", b"1"), ("m2", b"")]).unwrap();
    assert_eq!(other.multi_get(&["m2", "m1", "m1"], LONG).unwrap(), [b"".to_vec(), b"1".to_vec(), b"1".to_vec()]);
    assert!(store.multi_get(&[], LONG).unwrap().is_empty());
    store.multi_set(&[]).unwrap();
    let mut keys = store.list_keys().unwrap();
    keys.sort();
    assert_eq!(keys, ["k", "log", "m1", "m2", "n"]);
    // Depending on its kind, PyTorch's server also counts an internal key that it does not list.
    assert!((5..=6).contains(&store.num_keys().unwrap()), "{}", store.num_keys().unwrap());
    store.barrier("alone", 1, LONG).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| store.barrier("both", 2, LONG).unwrap());
        other.barrier("both", 2, LONG).unwrap();
    });
}

fn queues(store: &TcpStore, other: &TcpStore) {
    store.queue_push("q", b"first").unwrap();
    store.queue_push("q", b"").unwrap();
    assert_eq!(store.queue_len("q").unwrap(), 2);
    assert!(other.check(&["q"]).unwrap());
    assert_eq!(other.queue_pop("q", LONG).unwrap(), b"first");
    assert_eq!(other.queue_pop("q", LONG).unwrap(), b"");
    assert_eq!(store.queue_len("q").unwrap(), 0);
    assert!(store.queue_pop("q", SHORT).unwrap_err().is_timeout());
    thread::scope(|scope| {
        let popped = scope.spawn(|| store.queue_pop("q", LONG).unwrap());
        other.queue_push("q", b"late").unwrap();
        assert_eq!(popped.join().unwrap(), b"late");
    });
}

/// Checks waits that time out, and that the connection is usable afterwards.
fn timeouts(store: &TcpStore, other: &TcpStore) {
    store.set("here", b"").unwrap();
    let error = store.wait(&["here", "not here", "nor here"], SHORT).unwrap_err();
    let text = error.to_string();
    assert!(error.is_timeout() && text.contains("\"not here\", \"nor here\"") && text.contains("2 are missing"), "{text}");
    assert!(store.get("not here", Duration::ZERO).unwrap_err().is_timeout());
    assert!(store.multi_get(&["here", "not here"], SHORT).unwrap_err().is_timeout());
    let error = store.barrier("of three", 3, SHORT).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("1 of 3"), "{error}");
    other.set("not here", b"now").unwrap();
    assert_eq!(store.get("not here", LONG).unwrap(), b"now");
}

/// Cancels waits at about the moment they end. Answers must match their requests whichever comes first.
fn races(store: &TcpStore, other: &TcpStore) {
    let mut won = 0;
    for round in 0..300_u64 {
        let key = format!("race/{round}");
        let patience = Duration::from_micros(round * 7 % 400);
        thread::scope(|scope| {
            scope.spawn(|| other.set(&key, b"x").unwrap());
            match store.wait(&[&key], patience) {
                Ok(()) => won += 1,
                Err(error) => assert!(error.is_timeout(), "{error}"),
            }
        });
        assert_eq!(store.add("in step", 1).unwrap(), round.cast_signed() + 1);
        assert_eq!(store.get(&key, LONG).unwrap(), b"x");
    }
    println!("{won} of 300 waits ended before they were cancelled");
}

fn many_at_once(port: u16) {
    const CLIENTS: usize = 32;
    thread::scope(|scope| {
        for rank in 0..CLIENTS {
            scope.spawn(move || {
                let store = TcpStore::connect("127.0.0.1", port, LONG).unwrap();
                store.set(&format!("rank/{rank}"), rank.to_string().as_bytes()).unwrap();
                let keys: Vec<String> = (0..CLIENTS).map(|rank| format!("rank/{rank}")).collect();
                let values = store.multi_get(&keys.iter().map(String::as_str).collect::<Vec<_>>(), LONG).unwrap();
                assert!(values.iter().enumerate().all(|(rank, value)| *value == rank.to_string().as_bytes()));
                for round in 0..5 {
                    store.add("sum", rank as i64).unwrap();
                    store.barrier(&format!("round/{round}"), CLIENTS, LONG).unwrap();
                }
                assert_eq!(store.add("sum", 0).unwrap(), (5 * CLIENTS * (CLIENTS - 1) / 2) as i64);
            });
        }
    });
}

/// Checks values written by either side, up to the longest.
fn values(server: &mut Server, longest: usize) {
    let store = server.client();
    for length in [0, 1, 1439, 1440, 1441, 100_000, 8 << 20] {
        store.set("ours", &pattern(length)).unwrap();
        assert!(store.check(&["ours"]).unwrap());
        server.peer.ask(&format!("compare ours {length}"), "did compare");
    }
    for length in [0, 1441, longest] {
        server.peer.ask(&format!("fill theirs {length}"), "did fill");
        assert!(store.get("theirs", LONG).unwrap() == pattern(length), "{length} bytes");
    }
    // The client refuses it, since PyTorch's default server would close the connection.
    assert!(matches!(store.set("ours", &vec![0; 64 << 20]), Err(Error::InvalidArgument { .. })));
    assert_eq!(store.get("ours", LONG).unwrap().len(), 8 << 20);
}

/// Checks what holds for both servers.
fn everything(python: &Python, kind: &str, longest: usize) -> Server {
    let mut server = Server::start(python, kind);
    let (store, other) = (server.client(), server.client());
    every_call(&store, &other);
    assert_eq!(server.peer.ask("keys", "is"), "alone both k log m1 m2 n");
    timeouts(&store, &other);
    races(&store, &other);
    let nested = PrefixStore::new("job", server.client());
    nested.set("k", b"v").unwrap();
    assert_eq!(server.peer.ask("get job/k", "is"), "v");
    values(&mut server, longest);
    many_at_once(server.port);
    server
}

#[test]
fn our_client_has_every_answer_of_pythons_usual_server() {
    let python = python!();
    let mut server = everything(&python, "libuv", 8 << 20);
    let (store, other) = (server.client(), server.client());
    queues(&store, &other);
    server.peer.ask("push q theirs", "did push");
    assert_eq!(store.queue_pop("q", LONG).unwrap(), b"theirs");
    drop((store, other));
    server.peer.finish();
}

#[test]
fn our_client_has_every_answer_of_pythons_legacy_server() {
    let python = python!();
    // The legacy server has no limit. The client limits the whole answer.
    let server = everything(&python, "legacy", (64 << 20) - 8);
    // The legacy server has no queues either, and closes the connection. That is an error at once.
    let (store, began) = (server.client(), Instant::now());
    let outcome = store.queue_push("q", b"x").and_then(|()| store.queue_len("q"));
    assert!(matches!(outcome, Err(Error::Io { .. })), "{outcome:?}");
    assert!(began.elapsed() < LONG / 2);
    assert_eq!(server.client().get("k", LONG).unwrap(), b"w");
    server.peer.finish();
}

#[test]
fn a_python_rank_that_serves_and_waits_for_its_workers_counts_ours() {
    let python = python!();
    for kind in ["libuv", "legacy"] {
        let port = ranks::free_port();
        let mut server = Peer::start(&mut python.script("server.py", &[kind, &port.to_string(), "3"]));
        let clients = [(); 2].map(|()| TcpStore::connect("127.0.0.1", port, LONG).unwrap());
        clients.iter().for_each(|client| client.join().unwrap());
        server.expect("port");
        drop(clients);
        server.finish();
    }
}

#[test]
fn our_client_is_served_by_python_although_every_byte_comes_alone() {
    let python = python!();
    for kind in ["libuv", "legacy"] {
        let server = Server::start(&python, kind);
        // PyTorch's default server needs its first five bytes in one piece.
        let port = splitter(server.port, 5);
        let clients = [(); 2].map(|()| TcpStore::connect("127.0.0.1", port, LONG).unwrap());
        every_call(&clients[0], &clients[1]);
        timeouts(&clients[0], &clients[1]);
        drop(clients);
        server.peer.finish();
    }
}

#[test]
fn a_client_of_ours_that_is_killed_while_it_waits_harms_no_other_at_pythons_servers() {
    const NAME: &str = "torch_server::a_client_of_ours_that_is_killed_while_it_waits_harms_no_other_at_pythons_servers";
    if ranks::is_rank_of(NAME) {
        let port = std::env::var("MASTER_PORT").unwrap().parse().unwrap();
        let store = TcpStore::connect("127.0.0.1", port, LONG).unwrap();
        store.set("waiting", b"").unwrap();
        store.wait(&["never"], LONG).unwrap();
        return;
    }
    let python = python!();
    for kind in ["libuv", "legacy"] {
        let server = Server::start(&python, kind);
        let store = server.client();
        let mut killed = ranks::spawn_rank(NAME, 0, 1, server.port, &[]);
        store.get("waiting", LONG).unwrap();
        killed.kill().unwrap();
        killed.wait().unwrap();
        store.set("never", b"").unwrap();
        assert_eq!(server.client().get("never", LONG).unwrap(), b"");
        server.peer.finish();
    }
}
