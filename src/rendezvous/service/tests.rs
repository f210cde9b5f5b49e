//! Tests of a server without sockets: bytes of several clients in, answers out.

use super::*;
use crate::rendezvous::protocol::{MAGIC, encode, encode_keys};

/// Creates a service with clients 0 to `clients`, all validated.
fn service(clients: u64) -> Service {
    let mut service = Service::default();
    for id in 0..clients {
        service.connect(id);
        service.receive(id, &[&[query::VALIDATE][..], &MAGIC.to_le_bytes()].concat());
        assert!(service.is_validated(id));
    }
    service
}

/// Takes the answers that a client has received.
fn answers(service: &mut Service, id: ClientId) -> Vec<u8> {
    let answers = service.unsent(id).to_vec();
    service.sent(id, answers.len());
    answers
}

fn wait(keys: &[&str]) -> Vec<u8> {
    encode_keys(query::WAIT, keys.len(), keys.iter().map(|key| key.as_bytes()))
}

fn set(key: &str, value: &[u8]) -> Vec<u8> {
    encode(query::SET, &[key.as_bytes(), value], None)
}

fn push(key: &str, value: &[u8]) -> Vec<u8> {
    encode(query::QUEUE_PUSH, &[key.as_bytes(), value], None)
}

fn pop(key: &str) -> Vec<u8> {
    encode(query::QUEUE_POP, &[key.as_bytes()], None)
}

fn text(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

#[test]
fn nothing_is_done_for_a_client_that_does_not_validate() {
    let mut service = service(1);
    for (id, bytes) in [(10, vec![query::NUM_KEYS]), (11, set("k", b"v")), (12, vec![0, 1, 2, 3, 4]), (13, vec![200])] {
        service.connect(id);
        service.receive(id, &bytes);
        assert!(service.refusal(id).is_some() && service.unsent(id).is_empty() && !service.wants_input(id), "{id}");
        // Later requests are not served either.
        service.receive(id, &[&[query::VALIDATE][..], &MAGIC.to_le_bytes(), &[query::NUM_KEYS]].concat());
        assert!(service.unsent(id).is_empty());
    }
    service.receive(0, &[query::NUM_KEYS]);
    assert_eq!(answers(&mut service, 0), 0_i64.to_le_bytes());
}

#[test]
fn a_wait_ends_with_its_last_key_and_not_before() {
    let mut service = service(2);
    service.receive(0, &wait(&["a", "b", "b", "c"]));
    service.receive(1, &set("b", b""));
    service.receive(1, &encode(query::ADD, &[b"a"], Some(1)));
    assert!(service.unsent(0).is_empty());
    service.receive(1, &encode(query::APPEND, &[b"c", b"x"], None));
    assert_eq!(answers(&mut service, 0), [STOP_WAITING]);
    assert!(service.waiting.is_empty());
    service.receive(0, &wait(&["a", "c"]));
    assert_eq!(answers(&mut service, 0), [STOP_WAITING]);
}

#[test]
fn requests_behind_a_wait_are_answered_after_it() {
    let mut service = service(2);
    service.receive(0, &[wait(&["k"]), encode(query::GET, &[b"k"], None), vec![query::NUM_KEYS]].concat());
    assert!(service.unsent(0).is_empty());
    service.receive(1, &set("k", b"value"));
    assert_eq!(answers(&mut service, 0), [vec![STOP_WAITING], text(b"value"), 1_i64.to_le_bytes().to_vec()].concat());
}

#[test]
fn a_cancelled_wait_is_forgotten() {
    let mut service = service(2);
    service.receive(0, &wait(&["k"]));
    service.receive(0, &[query::CANCEL_WAIT]);
    assert_eq!(answers(&mut service, 0), [WAIT_CANCELED]);
    service.receive(1, &set("k", b"v"));
    assert!(service.unsent(0).is_empty() && service.waiting.is_empty());
    // Too late: the wait has ended, and both requests are answered, in this order.
    service.receive(0, &[wait(&["k"]), vec![query::CANCEL_WAIT]].concat());
    assert_eq!(answers(&mut service, 0), [STOP_WAITING, WAIT_CANCELED]);
}

#[test]
fn a_barrier_lets_all_go_at_once() {
    let mut service = service(3);
    let barrier = encode(query::BARRIER, &[b"here"], Some(3));
    service.receive(0, &barrier);
    service.receive(1, &barrier);
    assert!(service.unsent(0).is_empty() && service.unsent(1).is_empty());
    service.receive(2, &barrier);
    assert!((0..3).all(|id| answers(&mut service, id) == [STOP_WAITING]));
    assert_eq!(service.table.value(b"here"), Some(&b"3"[..]));
    // The counter is never reset.
    service.receive(0, &barrier);
    assert_eq!(answers(&mut service, 0), [STOP_WAITING]);
    assert!(service.barriers.is_empty());
}

#[test]
fn a_cancelled_barrier_leaves_its_count() {
    let mut service = service(2);
    service.receive(0, &encode(query::BARRIER, &[b"here"], Some(2)));
    service.receive(0, &[query::CANCEL_WAIT]);
    assert_eq!(answers(&mut service, 0), [WAIT_CANCELED]);
    service.receive(1, &encode(query::BARRIER, &[b"here"], Some(2)));
    assert_eq!(answers(&mut service, 1), [STOP_WAITING]);
    assert!(service.unsent(0).is_empty());
}

#[test]
fn one_value_of_a_queue_wakes_one_client() {
    let mut service = service(4);
    (0..3).for_each(|id| service.receive(id, &wait(&["q"])));
    service.receive(3, &push("q", b"x"));
    assert_eq!(answers(&mut service, 0), [STOP_WAITING]);
    assert!(service.unsent(1).is_empty() && service.unsent(2).is_empty());
    service.receive(0, &pop("q"));
    assert_eq!(answers(&mut service, 0), [1_i64.to_le_bytes().to_vec(), text(b"x")].concat());
    service.receive(3, &push("q", b"y"));
    assert_eq!(answers(&mut service, 1), [STOP_WAITING]);
    assert!(service.unsent(2).is_empty());
}

#[test]
fn a_value_that_the_woken_client_does_not_take_goes_to_the_next() {
    let mut service = service(4);
    (0..3).for_each(|id| service.receive(id, &wait(&["q"])));
    service.receive(3, &push("q", b"x"));
    service.disconnect(0);
    assert_eq!(answers(&mut service, 1), [STOP_WAITING]);
    service.receive(1, &[query::CANCEL_WAIT]);
    assert_eq!(answers(&mut service, 2), [STOP_WAITING]);
    service.receive(2, &pop("q"));
    assert_eq!(answers(&mut service, 2), [1_i64.to_le_bytes().to_vec(), text(b"x")].concat());
    service.receive(2, &pop("q"));
    assert_eq!(answers(&mut service, 2), 0_i64.to_le_bytes());
}

#[test]
fn a_client_that_is_gone_leaves_nothing_behind() {
    let mut service = service(3);
    service.receive(0, &wait(&["a", "b"]));
    service.receive(1, &encode(query::BARRIER, &[b"c"], Some(2)));
    service.disconnect(0);
    service.disconnect(1);
    assert!(service.waiting.is_empty() && service.barriers.is_empty() && service.sessions.len() == 1);
    service.receive(2, &set("a", b""));
    service.receive(0, &set("z", b""));
    assert!(!service.table.has(b"z"));
}

#[test]
fn a_client_that_does_not_read_is_not_answered_without_end() {
    let mut service = service(1);
    service.receive(0, &set("big", &vec![7; 600 << 10]));
    let get = encode(query::GET, &[b"big"], None);
    (0..50).for_each(|_| service.receive(0, &get));
    let unsent = service.unsent(0).len();
    assert!(unsent > UNSENT_BYTES && unsent < UNSENT_BYTES + (601 << 10), "{unsent}");
    assert!(!service.wants_input(0));
    // Reading continues as answers are sent, and none is lost.
    let mut total = 0;
    while !service.unsent(0).is_empty() {
        total += answers(&mut service, 0).len();
    }
    assert_eq!(total, 50 * (8 + (600 << 10)));
    assert!(service.wants_input(0));
}

#[test]
fn an_answer_beyond_the_limit_is_refused() {
    let mut service = service(2);
    service.receive(0, &set("k", &vec![1; 1 << 20]));
    let keys = vec![&b"k"[..]; 70];
    service.receive(1, &encode_keys(query::MULTI_GET, keys.len(), keys.into_iter()));
    assert!(service.refusal(1).unwrap().contains("answer"));
    assert!(service.unsent(1).is_empty());
    assert!(service.refusal(0).is_none());
}

#[test]
fn adding_to_text_costs_the_client_its_connection_and_nobody_else() {
    let mut service = service(2);
    service.receive(0, &set("t", b"text"));
    service.receive(1, &encode(query::ADD, &[b"t"], Some(1)));
    assert!(service.refusal(1).unwrap().contains("text"));
    service.receive(0, &encode(query::GET, &[b"t"], None));
    assert_eq!(answers(&mut service, 0), text(b"text"));
}
