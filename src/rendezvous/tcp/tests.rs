//! Tests of servers and clients over the loopback interface.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::authentication::{Initiator, Purpose, Secret};
use crate::error::Error;
use crate::meeting::Meeting;
use crate::rendezvous::Store;
use crate::rendezvous::limits::VALUE_BYTES;
use crate::rendezvous::protocol::{MAGIC, encode, encode_keys, query};

/// A time longer than any test here takes, unless it hangs.
const LONG: Duration = Duration::from_secs(20);
/// The length of a wait that is meant to time out.
const SHORT: Duration = Duration::from_millis(30);

fn server() -> TcpStoreServer {
    TcpStoreServer::bind("127.0.0.1:0").unwrap()
}

fn client(server: &TcpStoreServer) -> Arc<TcpStore> {
    TcpStore::connect("127.0.0.1", server.local_addr().port(), LONG).unwrap()
}

/// A validated client that sends raw bytes.
fn raw(server: &TcpStoreServer) -> TcpStream {
    let mut stream = TcpStream::connect(server.local_addr()).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(&[&[query::VALIDATE][..], &MAGIC.to_le_bytes()].concat()).unwrap();
    stream
}

fn read<const N: usize>(stream: &mut TcpStream) -> [u8; N] {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

#[test]
fn every_call_over_a_socket() {
    let server = server();
    let (store, other) = (client(&server), client(&server));
    store.set("k", b"v").unwrap();
    assert_eq!(other.get("k", LONG).unwrap(), b"v");
    assert_eq!(other.add("n", 41).unwrap(), 41);
    assert_eq!(store.add("n", 1).unwrap(), 42);
    assert_eq!(store.get("n", LONG).unwrap(), b"42");
    assert_eq!(store.compare_set("k", b"x", b"y").unwrap(), b"v");
    assert_eq!(store.compare_set("k", b"v", b"w").unwrap(), b"w");
    assert_eq!(store.compare_set("absent", b"x", b"y").unwrap(), b"x");
    assert_eq!(store.compare_set("fresh", b"", b"y").unwrap(), b"y");
    assert!(store.check(&["k", "n", "fresh"]).unwrap() && !store.check(&["k", "absent"]).unwrap() && store.check(&[]).unwrap());
    store.wait(&["k", "k", "n"], LONG).unwrap();
    store.wait(&[], Duration::ZERO).unwrap();
    assert_eq!(store.num_keys().unwrap(), 3);
    assert!(store.delete_key("fresh").unwrap() && !store.delete_key("fresh").unwrap());
    store.append("log", b"one,").unwrap();
    store.append("log", b"two").unwrap();
    assert_eq!(store.multi_get(&["log", "k"], LONG).unwrap(), [b"one,two".to_vec(), b"w".to_vec()]);
    store.multi_set(&[("m1", b"1"), ("m2", b"")]).unwrap();
    assert_eq!(other.multi_get(&["m2", "m1", "m1"], LONG).unwrap(), [b"".to_vec(), b"1".to_vec(), b"1".to_vec()]);
    assert!(store.multi_get(&[], LONG).unwrap().is_empty());
    store.multi_set(&[]).unwrap();
    store.queue_push("q", b"first").unwrap();
    store.queue_push("q", b"").unwrap();
    assert_eq!(store.queue_len("q").unwrap(), 2);
    assert!(store.check(&["q"]).unwrap());
    assert_eq!(other.queue_pop("q", LONG).unwrap(), b"first");
    assert_eq!(other.queue_pop("q", LONG).unwrap(), b"");
    assert_eq!(store.queue_len("q").unwrap(), 0);
    store.join().unwrap();
    let mut keys = store.list_keys().unwrap();
    keys.sort();
    assert_eq!(keys, ["k", "log", "m1", "m2", "n"]);
    assert_eq!(store.num_keys().unwrap(), 6);
    store.barrier("alone", 1, LONG).unwrap();
    assert!(store.local_address().is_loopback());
    drop((store, other));
}

#[test]
fn the_server_against_bytes_one_at_a_time() {
    let server = server();
    let mut stream = TcpStream::connect(server.local_addr()).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let send = |stream: &mut TcpStream, bytes: &[u8]| bytes.iter().for_each(|byte| stream.write_all(&[*byte]).unwrap());
    // PyTorch's server would drop this client, because its first request arrives in pieces.
    send(&mut stream, &[0, 0xce, 0xf7, 0x85, 0x3c]);
    send(&mut stream, &[13, 0xef, 0xbe, 0xad, 0xde]);
    assert_eq!(read(&mut stream), [0xef, 0xbe, 0xad, 0xde]);
    send(&mut stream, &[1, 2, 0, 0, 0, 0, 0, 0, 0, b'/', b'k', 3, 0, 0, 0, 0, 0, 0, 0, b'o', b'n', b'e']);
    send(&mut stream, &[6, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, b'/', b'k']);
    assert_eq!(read(&mut stream), [0]);
    send(&mut stream, &[3, 2, 0, 0, 0, 0, 0, 0, 0, b'/', b'k']);
    assert_eq!(read(&mut stream), [3, 0, 0, 0, 0, 0, 0, 0, b'o', b'n', b'e']);
    send(&mut stream, &[4, 2, 0, 0, 0, 0, 0, 0, 0, b'/', b'n', 7, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(read(&mut stream), [7, 0, 0, 0, 0, 0, 0, 0]);
    send(&mut stream, &[17]);
    assert_eq!(read(&mut stream), 2_i64.to_le_bytes());
    let mut keys = [read::<10>(&mut stream)[8..].to_vec(), read::<10>(&mut stream)[8..].to_vec()];
    keys.sort();
    assert_eq!(keys, [b"/k".to_vec(), b"/n".to_vec()]);
    assert_eq!(client(&server).get("k", LONG).unwrap(), b"one");
}

#[test]
fn a_malformed_client_harms_no_other() {
    let server = server();
    let store = client(&server);
    store.set("k", b"v").unwrap();
    let mut nonsense = TcpStream::connect(server.local_addr()).unwrap();
    nonsense.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut huge = raw(&server);
    huge.write_all(&[&[query::GET][..], &u64::MAX.to_le_bytes()].concat()).unwrap();
    for mut stream in [nonsense, huge] {
        stream.set_read_timeout(Some(LONG)).unwrap();
        // The connection is closed, or reset if bytes of it were left unread.
        assert!(matches!(stream.read(&mut [0; 16]), Ok(0) | Err(_)));
    }
    assert_eq!(store.get("k", LONG).unwrap(), b"v");
    // A client that disconnects in the middle of a request.
    raw(&server).write_all(&[query::SET, 9]).unwrap();
    assert_eq!(store.num_keys().unwrap(), 1);
}

#[test]
fn a_wait_that_runs_out_names_what_is_missing_and_leaves_the_store_usable() {
    let server = server();
    let store = client(&server);
    store.set("here", b"").unwrap();
    let error = store.wait(&["here", "not here", "nor here"], SHORT).unwrap_err();
    let text = error.to_string();
    assert!(error.is_timeout(), "{text}");
    assert!(text.contains("\"not here\", \"nor here\"") && text.contains("2 are missing") && !text.contains("\"here\""), "{text}");
    assert!(store.get("not here", Duration::ZERO).unwrap_err().is_timeout());
    assert_eq!(store.get("here", Duration::ZERO).unwrap(), b"");
    assert!(store.queue_pop("q", SHORT).unwrap_err().is_timeout());
    // A value is not a queue.
    assert!(store.queue_pop("here", SHORT).unwrap_err().is_timeout());
    let error = store.barrier("b", 3, SHORT).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("1 of 3"), "{error}");
    store.set("not here", b"now").unwrap();
    assert_eq!(store.get("not here", LONG).unwrap(), b"now");
}

#[test]
fn many_clients_at_once() {
    const CLIENTS: usize = 24;
    let server = server();
    let start = Meeting::new(CLIENTS);
    std::thread::scope(|scope| {
        for rank in 0..CLIENTS {
            let (server, start) = (&server, &start);
            scope.spawn(move || {
                let store = client(server);
                start.meet();
                store.set(&format!("rank/{rank}"), rank.to_string().as_bytes()).unwrap();
                let keys: Vec<String> = (0..CLIENTS).map(|rank| format!("rank/{rank}")).collect();
                let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
                let values = store.multi_get(&keys, LONG).unwrap();
                assert!(values.iter().enumerate().all(|(rank, value)| *value == rank.to_string().as_bytes()));
                for round in 0..5 {
                    store.add("sum", rank as i64).unwrap();
                    store.barrier(&format!("round/{round}"), CLIENTS, LONG).unwrap();
                }
                assert_eq!(store.add("sum", 0).unwrap(), (5 * CLIENTS * (CLIENTS - 1) / 2) as i64);
                // Each takes one value of a queue that is filled while others wait for it.
                store.queue_push("queue", rank.to_string().as_bytes()).unwrap();
                let popped: i64 = String::from_utf8(store.queue_pop("queue", LONG).unwrap()).unwrap().parse().unwrap();
                store.add("popped", popped).unwrap();
                store.barrier("end", CLIENTS, LONG).unwrap();
                assert_eq!(store.add("popped", 0).unwrap(), (CLIENTS * (CLIENTS - 1) / 2) as i64);
            });
        }
    });
}

#[test]
fn the_longest_values_and_no_longer_ones() {
    let server = server();
    let store = client(&server);
    let big: Vec<u8> = (0..VALUE_BYTES).map(|index| ((index * 31) >> 3) as u8).collect();
    store.set("big", &big).unwrap();
    assert!(store.get("big", LONG).unwrap() == big);
    assert!(store.compare_set("big", &big, &big[1..]).unwrap() == big[1..]);
    let error = store.set("big", &[big.as_slice(), b"x"].concat()).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    assert!(matches!(store.set(&"k".repeat(8192), b""), Err(Error::InvalidArgument { .. })));
    store.set(&"k".repeat(8191), b"long").unwrap();
    assert_eq!(store.get(&"k".repeat(8191), LONG).unwrap(), b"long");
    let all = vec![("a", big.as_slice()); 9];
    assert!(matches!(store.multi_set(&all), Err(Error::InvalidArgument { .. })));
    assert!(!store.check(&["a"]).unwrap());
}

#[test]
fn a_refused_request_costs_the_connection_and_says_so() {
    let server = server();
    let store = client(&server);
    store.set("text", b"abc").unwrap();
    let error = store.add("text", 1).unwrap_err();
    assert!(matches!(error, Error::Io { .. }) && error.to_string().contains("\"text\""), "{error}");
    let error = store.num_keys().unwrap_err();
    assert!(error.to_string().contains("lost earlier"), "{error}");
    assert_eq!(client(&server).get("text", LONG).unwrap(), b"abc");
}

#[test]
fn a_dropped_server_serves_until_its_clients_have_left() {
    let server = TcpStoreServer::bind_with_linger("127.0.0.1:0", LONG).unwrap();
    let (waiting, setting) = (client(&server), client(&server));
    let began = Instant::now();
    let dropper = std::thread::spawn(move || drop(server));
    let waiter = std::thread::spawn(move || waiting.get("late", LONG));
    setting.add("n", 1).unwrap();
    assert!(!dropper.is_finished());
    // The last request has no answer. It must count although its client disconnects at once.
    setting.set("late", b"in time").unwrap();
    drop(setting);
    assert_eq!(waiter.join().unwrap().unwrap(), b"in time");
    dropper.join().unwrap();
    assert!(began.elapsed() < LONG / 2, "{:?}", began.elapsed());
}

#[test]
fn a_dropped_server_does_not_wait_longer_than_its_bound_nor_for_unproven_connections() {
    let server = TcpStoreServer::bind_with_linger("127.0.0.1:0", SHORT).unwrap();
    let store = client(&server);
    drop(server);
    assert!(matches!(store.num_keys(), Err(Error::Io { .. })));

    let server = TcpStoreServer::bind_with_linger("127.0.0.1:0", LONG).unwrap();
    let pending = TcpStream::connect(server.local_addr()).unwrap();
    let began = Instant::now();
    drop(server);
    assert!(began.elapsed() < LONG / 2, "{:?}", began.elapsed());
    drop(pending);
}

#[test]
fn a_client_that_has_closed_its_half_still_gets_its_answers() {
    let server = server();
    let mut stream = raw(&server);
    let big = vec![9; 3 << 20];
    let requests = [encode(query::SET, &[b"k", &big], None), encode(query::GET, &[b"k"], None), vec![query::NUM_KEYS]];
    stream.write_all(&requests.concat()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answers = Vec::new();
    stream.read_to_end(&mut answers).unwrap();
    assert_eq!(answers.len(), 8 + big.len() + 8);
    assert_eq!(answers[8 + big.len()..], 1_i64.to_le_bytes());
}

#[test]
fn a_client_that_goes_while_it_waits_is_forgotten() {
    let server = server();
    let mut stream = raw(&server);
    stream.write_all(&encode_keys(query::WAIT, 1, [&b"/never"[..]].into_iter())).unwrap();
    drop(stream);
    let store = client(&server);
    store.set("never", b"").unwrap();
    assert_eq!(store.num_keys().unwrap(), 1);
}

#[test]
fn hundreds_of_parked_waits_need_no_thread_and_end_together() {
    let server = server();
    let wait = encode_keys(query::WAIT, 2, [&b"/first"[..], b"/second"].into_iter());
    let mut waiting: Vec<TcpStream> = (0..300).map(|_| raw(&server)).collect();
    waiting.iter_mut().for_each(|stream| stream.write_all(&wait).unwrap());
    let store = client(&server);
    store.set("first", b"").unwrap();
    store.set("second", b"").unwrap();
    waiting.iter_mut().for_each(|stream| assert_eq!(read(stream), [0]));
}

#[test]
fn an_address_that_cannot_be_had_is_explained() {
    let first = server();
    let error = TcpStoreServer::bind(first.local_addr()).unwrap_err();
    assert!(matches!(error, Error::Config { .. }) && error.to_string().contains("MASTER_PORT"), "{error}");
    // An address reserved for documentation, which no host has.
    let error = TcpStoreServer::bind("192.0.2.1:0").unwrap_err();
    assert!(matches!(error, Error::Config { .. }) && error.to_string().contains("rank 0 must run on the host"), "{error}");
    // The port is free again at once.
    let address = first.local_addr();
    drop(client(&first));
    drop(first);
    assert_eq!(TcpStoreServer::bind(address).unwrap().local_addr(), address);
}

#[test]
fn a_client_waits_for_its_server_to_start() {
    let port = server().local_addr().port();
    let waiting = std::thread::spawn(move || TcpStore::connect("127.0.0.1", port, LONG));
    let server = TcpStoreServer::bind(("127.0.0.1", port)).unwrap();
    let store = waiting.join().unwrap().unwrap();
    store.set("k", b"").unwrap();
    drop(store);
    drop(server);
    let error = TcpStore::connect("127.0.0.1", port, SHORT).unwrap_err();
    let said = error.to_string();
    assert!(error.is_timeout() && said.contains(&port.to_string()) && said.contains("connection refused"), "{said}");
    assert!(said.contains("no process listens on this port"), "{said}");
}

#[test]
fn something_else_on_the_port_is_an_error_at_once() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"SSH-2.0-OpenSSH\r\n").unwrap();
        drop(stream.read(&mut [0; 64]));
    });
    let error = TcpStore::connect("127.0.0.1", port, LONG).unwrap_err();
    assert!(matches!(error, Error::Protocol { .. }) && error.to_string().contains("not a TCPStore"), "{error}");
    other.join().unwrap();
}

/// A server that answers the greeting and nothing else. It ends with its client.
fn mute() -> (u16, std::thread::JoinHandle<()>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mute = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let greeting: [u8; 10] = read(&mut stream);
        stream.write_all(&greeting[6..]).unwrap();
        drop(stream.read_to_end(&mut Vec::new()));
    });
    (port, mute)
}

#[test]
fn waits_at_a_server_that_hangs_end_in_time_and_do_not_lose_it() {
    let (port, mute) = mute();
    let store = TcpStore::connect("127.0.0.1", port, Duration::from_millis(600)).unwrap();
    for _ in 0..3 {
        let error = store.wait(&["k"], SHORT).unwrap_err();
        let Error::Timeout { elapsed, .. } = &error else { panic!("{error}") };
        assert!(*elapsed < Duration::from_secs(4) && error.to_string().contains("does not answer"), "{error}");
    }
    // A request with an answer waits up to the timeout of the handle.
    let error = store.set("k", b"").unwrap_err();
    assert!(error.is_timeout(), "{error}");
    assert!(store.set("k", b"").unwrap_err().to_string().contains("lost earlier"));
    drop(store);
    mute.join().unwrap();
}

#[test]
fn a_server_that_was_held_up_serves_on() {
    let (port, held_up, go_on) = held_up();
    let store = TcpStore::connect("127.0.0.1", port, LONG).unwrap();
    for key in ["a", "b", "a"] {
        assert!(store.wait(&[key], SHORT).unwrap_err().is_timeout());
    }
    go_on.send(()).unwrap();
    // The answer to the cancelled wait is read first. Then the answers follow the order of the requests.
    store.set("a", b"1").unwrap();
    assert_eq!(store.get("a", LONG).unwrap(), b"1");
    assert!(store.wait(&["b"], SHORT).unwrap_err().to_string().contains("\"b\""));
    drop(store);
    held_up.join().unwrap();
}

#[test]
fn a_wait_that_ended_while_its_server_was_held_up_is_not_heard_for_another() {
    let (port, held_up, go_on) = held_up();
    let store = TcpStore::connect("127.0.0.1", port, LONG).unwrap();
    store.set("there", b"1").unwrap();
    assert!(store.wait(&["there"], SHORT).unwrap_err().is_timeout(), "the server has not read the question");
    go_on.send(()).unwrap();
    assert!(store.wait(&["not there"], SHORT).unwrap_err().is_timeout());
    assert_eq!(store.get("there", LONG).unwrap(), b"1");
    drop(store);
    held_up.join().unwrap();
}

/// A server that answers the greeting, and then forwards nothing in either direction until `go_on`.
fn held_up() -> (u16, std::thread::JoinHandle<()>, std::sync::mpsc::Sender<()>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (go_on, told) = std::sync::mpsc::channel();
    let held_up = std::thread::spawn(move || {
        let server = server();
        let (mut client, _) = listener.accept().unwrap();
        let greeting: [u8; 10] = read(&mut client);
        client.write_all(&greeting[6..]).unwrap();
        let mut behind = raw(&server);
        told.recv_timeout(LONG).unwrap();
        let (mut there, mut back) = (client.try_clone().unwrap(), behind.try_clone().unwrap());
        let answers = std::thread::spawn(move || std::io::copy(&mut back, &mut client));
        std::io::copy(&mut there, &mut behind).unwrap();
        behind.shutdown(Shutdown::Both).unwrap();
        let _ = answers.join().unwrap();
    });
    (port, held_up, go_on)
}

#[test]
fn a_server_that_hangs_is_not_waited_for_without_end() {
    let (port, mute) = mute();
    let store = TcpStore::connect("127.0.0.1", port, Duration::from_millis(200)).unwrap();
    let error = store.add("n", 1).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    assert!(store.set("k", b"").unwrap_err().to_string().contains("lost earlier"));
    drop(store);
    mute.join().unwrap();
}

fn secret(seed: u8) -> Secret {
    Secret::new(vec![seed; 32]).unwrap()
}

/// A server that requires a secret.
fn guarded() -> TcpStoreServer {
    TcpStoreServer::bind_with_secret("127.0.0.1:0", &secret(1)).unwrap()
}

#[test]
fn a_client_with_the_secret_is_let_in_and_no_other() {
    let server = guarded();
    let port = server.local_addr().port();
    let store = TcpStore::connect_with_secret("127.0.0.1", port, LONG, &secret(1)).unwrap();
    store.set("k", b"v").unwrap();
    let begun = Instant::now();
    for (error, words) in [
        (TcpStore::connect_with_secret("127.0.0.1", port, LONG, &secret(2)).unwrap_err(), "a different secret"),
        (TcpStore::connect("127.0.0.1", port, LONG).unwrap_err(), "this process has no secret"),
    ] {
        assert!(error.is_unauthorized() && error.to_string().contains(words), "{error}");
    }
    let open = self::server();
    let error = TcpStore::connect_with_secret("127.0.0.1", open.local_addr().port(), LONG, &secret(1)).unwrap_err();
    assert!(error.is_unauthorized() && error.to_string().contains("it has no secret"), "{error}");
    assert!(begun.elapsed() < LONG / 2, "no word takes longer than a moment");
    assert_eq!(store.get("k", LONG).unwrap(), b"v");
    assert_eq!(store.num_keys().unwrap(), 1);
}

#[test]
fn nothing_is_acted_upon_before_the_proof() {
    let server = guarded();
    // A client that speaks the protocol at once, and one that does so after an opening.
    let opening = Initiator::new(&secret(1), Purpose::Store, &[]).unwrap().opening();
    let set = [&[query::VALIDATE][..], &MAGIC.to_le_bytes(), &encode(query::SET, &[b"/k", b"v"], None)].concat();
    for words in [set.clone(), [opening, set].concat()] {
        let mut stream = TcpStream::connect(server.local_addr()).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(&words).unwrap();
        let mut answer = Vec::new();
        // The reply with the refusal, and then the end of the stream, in order or by a reset.
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty() || answer.starts_with(b"colproof\x01\x03"), "{}", answer.escape_ascii());
    }
    let store = TcpStore::connect_with_secret("127.0.0.1", server.local_addr().port(), LONG, &secret(1)).unwrap();
    assert_eq!(store.num_keys().unwrap(), 0);
}

#[test]
fn a_server_that_closes_instead_of_a_proof_is_told_apart_from_one_that_is_not_there() {
    // PyTorch's server does this at a first byte that it does not know.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let closing = std::thread::spawn(move || while listener.accept().unwrap().0.read(&mut [0; 64]).unwrap() > 1 {});
    let error = TcpStore::connect_with_secret("127.0.0.1", port, Duration::from_secs(1), &secret(1)).unwrap_err();
    assert!(error.is_unauthorized() && error.to_string().contains("torchrun"), "{error}");
    TcpStream::connect(("127.0.0.1", port)).unwrap().write_all(b"x").unwrap();
    closing.join().unwrap();
    let error = TcpStore::connect_with_secret("127.0.0.1", port, SHORT, &secret(1)).unwrap_err();
    assert!(error.is_timeout(), "{error}");
}
