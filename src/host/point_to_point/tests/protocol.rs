//! Refusals, cancellations, limits and messages to the same rank, step by step in one thread.

use std::time::Duration;

use super::{BYTES, MemoryLink, RingLink, SocketLink, Talk, TestNetwork, Wire, pattern, pump};
use crate::call::element::{DType, TypeTag};
use crate::host::point_to_point::frame::{CHUNK_BYTES, EAGER_BYTES};
use crate::host::point_to_point::{Envelope, GivenUp, MessageError};

const SHORT: usize = 4000;
const LONG: usize = CHUNK_BYTES + 4000;
/// The time after which tests give up a request.
const AFTER: Duration = Duration::from_millis(1234);
const FLOATS: TypeTag = TypeTag::Scalar(DType::F32);

/// Sends a message of `data` from 0 to 1 that the receive refuses. Returns the errors of both ends.
fn refused<W: Wire>(bytes: usize, capacity: usize, element: TypeTag, receive_first: bool) -> (Option<MessageError>, MessageError) {
    let (_network, [mut a, mut b]) = TestNetwork::<W>::of(2);
    let data = pattern(1, bytes);
    let mut into = vec![0xaa; capacity];
    let mut receive = receive_first.then(|| b.irecv_typed(Some(0), Some(1), element, &mut into).expect("the peer is there"));
    pump(&mut [&mut a, &mut b]);
    let send = a.isend(1, 1, &data);
    pump(&mut [&mut a, &mut b]);
    let receive = *receive.get_or_insert_with(|| b.irecv_typed(Some(0), Some(1), element, &mut into).expect("the peer is there"));
    pump(&mut [&mut a, &mut b]);
    let outcomes = (a.outcome(send).err(), b.outcome(receive).expect_err("refused"));
    assert!(into.iter().all(|byte| *byte == 0xaa), "a refused message was written");
    // The message is consumed, and the engines continue.
    let send = a.isend(1, 1, &data);
    let mut into = vec![0; bytes];
    let receive = b.irecv(Some(0), Some(1), &mut into);
    pump(&mut [&mut a, &mut b]);
    assert!(a.outcome(send).is_ok() && b.outcome(receive).is_ok() && into == data);
    assert!(a.matching_state.is_idle() && b.matching_state.is_idle());
    outcomes
}

fn refusals<W: Wire>() {
    for receive_first in [true, false] {
        for (bytes, is_short) in [(SHORT, true), (LONG, false)] {
            let mismatch = |peer| MessageError::TypeMismatch { peer, sent: BYTES, expected: FLOATS };
            let told = refused::<W>(bytes, bytes, FLOATS, receive_first);
            assert_eq!(told, ((!is_short).then(|| mismatch(1)), mismatch(0)));
            for capacity in [0, bytes - 1] {
                let truncated = |peer| MessageError::Truncated { peer, sent: bytes, capacity };
                let told = refused::<W>(bytes, capacity, BYTES, receive_first);
                assert_eq!(told, ((!is_short).then(|| truncated(1)), truncated(0)));
            }
        }
    }
    let (a, b) = (FLOATS, TypeTag::Plain(12));
    let text = MessageError::TypeMismatch { peer: 3, sent: a, expected: b }.to_string();
    assert_eq!(text, "a message of f32 does not match a receive of plain data of 12 B (the other side is rank 3)");
}

#[test]
fn a_receive_that_cannot_take_its_message_makes_it_fail_and_nothing_else() {
    refusals::<MemoryLink>();
    refusals::<SocketLink>();
    refusals::<RingLink>();
}

#[test]
fn messages_to_oneself_are_matched_like_any_other() {
    let (_network, mut engines) = TestNetwork::<SocketLink>::new(1, 3);
    let me = &mut engines[0];
    let (short, long) = (pattern(1, SHORT), pattern(2, LONG));
    // A short message is buffered, a long one waits.
    me.send(0, 1, &short);
    me.send(0, 1, &[]);
    let send = me.isend(0, 1, &long);
    assert!(me.poll(send).is_none());
    for data in [&short, &vec![], &long] {
        let (envelope, got) = me.recv(None, None, LONG);
        assert_eq!(envelope, Envelope { source: 0, tag: 1, element: BYTES, bytes: data.len() });
        assert!(got == *data);
    }
    assert!(me.outcome(send).is_ok());
    // The receive is posted first.
    let mut into = vec![0; LONG];
    let receive = me.irecv(Some(0), Some(9), &mut into);
    me.send(0, 9, &long);
    assert!(me.outcome(receive).is_ok() && into == long);
    // A refusal: both ends fail, because both are on this rank.
    let send = me.isend(0, 2, &long);
    let receive = me.irecv_typed(Some(0), Some(2), FLOATS, &mut into).expect("this rank is there");
    let mismatch = MessageError::TypeMismatch { peer: 0, sent: BYTES, expected: FLOATS };
    assert_eq!((me.outcome(send), me.outcome(receive)), (Err(mismatch), Err(mismatch)));
    // Requests that are given up.
    let (send, receive) = (me.isend(0, 3, &long), me.irecv(Some(0), Some(4), &mut into));
    assert_eq!((me.give_up(send, AFTER), me.give_up(receive, AFTER)), (GivenUp::Withdrawn, GivenUp::Nothing));
    let receive = me.irecv(Some(0), Some(3), &mut into);
    assert_eq!(me.outcome(receive), Err(MessageError::Withdrawn { peer: 0, after: AFTER }));
    assert!(me.matching_state.is_idle());
}

#[test]
fn short_messages_to_oneself_wait_when_the_limit_is_reached() {
    let (_network, mut engines) = TestNetwork::<SocketLink>::new(64, 3);
    let me = &mut engines[5];
    let data = pattern(1, EAGER_BYTES);
    // 64 ranks: 1 MiB each.
    let sends: Vec<_> = (0..80).map(|_| me.isend(5, 1, &data)).collect();
    let waiting = sends.iter().filter(|ticket| me.poll(**ticket).is_none()).count();
    let taken = (1 << 20) / EAGER_BYTES;
    assert!((80 - taken..=81 - taken).contains(&waiting), "{waiting} of 80 wait");
    for _ in 0..80 {
        assert!(me.recv(Some(5), None, EAGER_BYTES).1 == data);
    }
    sends.iter().filter_map(|ticket| me.poll(*ticket)).for_each(|outcome| assert!(outcome.is_ok()));
    assert!(me.matching_state.is_idle());
}

/// Cancels a send of this length after this many rounds, then sends another.
fn cancelled_send<W: Wire>(bytes: usize, rounds: usize, receive_first: bool) {
    let (_network, [mut a, mut b]) = TestNetwork::<W>::of(4);
    let mut data = pattern(1, bytes);
    let expected = data.clone();
    let mut into = vec![0; bytes];
    let receive = receive_first.then(|| b.irecv(Some(0), Some(1), &mut into));
    pump(&mut [&mut b]);
    let send = a.isend(1, 1, &data);
    for _ in 0..rounds {
        a.progress();
        b.progress();
    }
    let left = a.give_up(send, AFTER);
    assert!(a.poll(send).is_none(), "a ticket that was given up means nothing");
    data.fill(0xee);
    pump(&mut [&mut a, &mut b]);
    let after = pattern(2, 100);
    a.send(1, 2, &after);
    assert!(b.recv(Some(0), Some(2), 100).1 == after);
    // The message never arrives changed, its receive does not hang, and both ends report the same result.
    let receive = receive.unwrap_or_else(|| b.irecv(Some(0), Some(1), &mut into));
    pump(&mut [&mut a, &mut b]);
    match (left, b.outcome(receive)) {
        (GivenUp::Sent(_) | GivenUp::Nothing, Ok(_)) => assert!(into == expected),
        (GivenUp::Withdrawn, Err(error)) => assert_eq!(error, MessageError::Withdrawn { peer: 0, after: AFTER }),
        other => panic!("{bytes} B given up after {rounds} rounds: {other:?}"),
    }
    pump(&mut [&mut a, &mut b]);
    assert!(a.matching_state.is_idle() && b.matching_state.is_idle(), "{bytes} B cancelled after {rounds} rounds");
}

#[test]
fn a_cancelled_send_arrives_whole_or_not_at_all() {
    for bytes in [0, SHORT, EAGER_BYTES, LONG, 6 * CHUNK_BYTES] {
        for &rounds in if cfg!(miri) { &[2, 8][..] } else { &[0, 1, 2, 3, 5, 8, 13] } {
            for receive_first in [true, false] {
                cancelled_send::<MemoryLink>(bytes, rounds, receive_first);
                cancelled_send::<SocketLink>(bytes, rounds, receive_first);
            }
        }
    }
}

/// Cancels a receive after this many rounds. Its memory must not change any more.
fn cancelled_receive<W: Wire>(bytes: usize, rounds: usize) {
    let (_network, [mut a, mut b]) = TestNetwork::<W>::of(5 + rounds as u64);
    let data = pattern(1, bytes);
    let mut into = vec![0; bytes];
    let receive = b.irecv(Some(0), None, &mut into);
    let send = a.isend(1, 1, &data);
    for _ in 0..rounds {
        a.progress();
        b.progress();
    }
    let was_done = b.poll(receive).is_some();
    let left = b.give_up(receive, AFTER);
    let at_cancel = into.clone();
    pump(&mut [&mut a, &mut b]);
    assert!(into == at_cancel, "memory was touched after the cancel");
    // No message is lost, and the sender does not notice any of this.
    let mut again = vec![0; bytes];
    let next = b.irecv(Some(0), None, &mut again);
    pump(&mut [&mut a, &mut b]);
    assert!(a.outcome(send).is_ok());
    match b.poll(next) {
        Some(outcome) => assert!(!was_done && outcome.is_ok() && again == data),
        None => {
            assert!(was_done, "a message was lost");
            b.cancel(next);
        }
    }
    assert!(matches!(left, GivenUp::Nothing) || left == GivenUp::Kept { source: 0, bytes });
    assert!(a.matching_state.is_idle() && b.matching_state.is_idle());
}

#[test]
fn a_cancelled_receive_is_not_written_and_its_message_is_not_lost() {
    for bytes in [0, SHORT, EAGER_BYTES, LONG, 6 * CHUNK_BYTES] {
        for rounds in (0..25).step_by(if cfg!(miri) { 7 } else { 1 }) {
            cancelled_receive::<MemoryLink>(bytes, rounds);
        }
        cancelled_receive::<SocketLink>(bytes, 0);
        cancelled_receive::<SocketLink>(bytes, 1);
    }
}

#[test]
fn messages_beyond_the_limit_wait_until_some_are_taken() {
    let (_network, mut engines) = TestNetwork::<SocketLink>::new(64, 6);
    let [a, b, other, ..] = engines.as_mut_slice() else { unreachable!() };
    // 64 ranks: 1 MiB each. Empty messages count too.
    let data = pattern(1, EAGER_BYTES);
    let sends: Vec<_> = (0..200).map(|number| a.isend(1, number, &data[..(number as usize % 2) * EAGER_BYTES])).collect();
    pump(&mut [a, b]);
    let limit = 1 << 20;
    assert!((limit - 2 * EAGER_BYTES..=limit).contains(&b.matching_state.waiting(0)), "{} B wait", b.matching_state.waiting(0));
    let waiting = sends.iter().filter(|ticket| a.poll(**ticket).is_none()).count();
    let taken = 2 * limit / EAGER_BYTES;
    assert!((200 - taken..=202 - taken).contains(&waiting), "{waiting} of 200 sends wait");
    // Another peer is not affected.
    let send = other.isend(1, 0, &data);
    pump(&mut [b, other]);
    assert!(other.outcome(send).is_ok());
    assert!(b.recv(Some(2), None, EAGER_BYTES).1 == data);
    for number in 0..200 {
        let mut into = vec![0; EAGER_BYTES];
        let receive = b.irecv(Some(0), Some(number), &mut into);
        pump(&mut [a, b]);
        let envelope = b.outcome(receive).expect("received");
        assert!(into[..envelope.bytes] == data[..(number as usize % 2) * EAGER_BYTES]);
    }
    assert!(b.matching_state.is_idle());
}

#[test]
fn a_flood_does_not_hold_up_what_came_before_it_nor_what_goes_the_other_way() {
    let (_network, mut engines) = TestNetwork::<SocketLink>::new(64, 6);
    let [a, b, ..] = engines.as_mut_slice() else { unreachable!() };
    let (short, long) = (pattern(1, EAGER_BYTES), pattern(2, LONG));
    let first = a.isend(1, 1, &long);
    let flood: Vec<_> = (0..300).map(|_| a.isend(1, 2, &short)).collect();
    let opposite = b.isend(0, 3, &long);
    pump(&mut [a, b]);
    let (mut there, mut back) = (vec![0; LONG], vec![0; LONG]);
    let receives = (b.irecv(Some(0), Some(1), &mut there), a.irecv(Some(1), Some(3), &mut back));
    pump(&mut [a, b]);
    assert!(a.outcome(first).is_ok() && b.outcome(receives.0).is_ok() && there == long);
    assert!(b.outcome(opposite).is_ok() && a.outcome(receives.1).is_ok() && back == long);
    let given_up = flood.iter().filter(|ticket| a.give_up(**ticket, AFTER) == GivenUp::Withdrawn).count();
    assert!(given_up > 250, "{given_up}");
    pump(&mut [a, b]);
    let last = a.isend(1, 5, &short);
    for _ in 0..(1 << 20) / EAGER_BYTES - 1 {
        assert!(b.recv(Some(0), Some(2), EAGER_BYTES).1 == short);
    }
    pump(&mut [a, b]);
    assert!(a.outcome(last).is_ok());
    // Each message that was given up before its turn has left a note, and the receive that matches it fails.
    let mut told = 0;
    let mut into = vec![0; EAGER_BYTES];
    loop {
        let receive = b.irecv(Some(0), Some(2), &mut into);
        pump(&mut [a, b]);
        match b.poll(receive) {
            Some(outcome) => assert_eq!(outcome, Err(MessageError::Withdrawn { peer: 0, after: AFTER })),
            None => break b.cancel(receive),
        }
        told += 1;
    }
    assert_eq!(told, given_up);
    assert!(b.recv(Some(0), Some(5), EAGER_BYTES).1 == short);
    assert!(a.matching_state.is_idle() && b.matching_state.is_idle());
}

#[test]
fn a_flood_of_announcements_is_bounded_too() {
    let (_network, mut engines) = TestNetwork::<SocketLink>::new(64, 7);
    let [a, b, ..] = engines.as_mut_slice() else { unreachable!() };
    let data = pattern(1, EAGER_BYTES + 1);
    let sends: Vec<_> = (0..20_000).map(|_| a.isend(1, 0, &data)).collect();
    pump(&mut [a, b]);
    assert!(b.matching_state.waiting(0) <= 1 << 20, "{} B wait", b.matching_state.waiting(0));
    let mut into = vec![0; EAGER_BYTES + 1];
    for ticket in &sends {
        let receive = b.irecv(Some(0), Some(0), &mut into);
        while b.poll(receive).is_none() {
            a.progress();
            b.progress();
        }
        assert!(a.poll(*ticket).is_some_and(|outcome| outcome.is_ok()));
    }
    assert!(into == data && a.matching_state.is_idle() && b.matching_state.is_idle());
}

#[test]
fn the_earliest_receive_wins_whoever_it_names() {
    let (_network, [mut a, mut b]) = TestNetwork::<SocketLink>::of(8);
    let mut into = [[0; 4]; 4];
    let [first, second, third, fourth] = &mut into;
    let receives =
        [b.irecv(None, Some(1), first), b.irecv(Some(0), None, second), b.irecv(None, None, third), b.irecv(Some(0), Some(1), fourth)];
    for (number, tag) in [(1, 2), (2, 1), (3, 1), (4, 1)] {
        a.send(1, tag, &[number; 4]);
    }
    pump(&mut [&mut a, &mut b]);
    let tags = receives.map(|receive| b.outcome(receive).map(|envelope| (envelope.source, envelope.tag)));
    assert_eq!(tags, [Ok((0, 1)), Ok((0, 2)), Ok((0, 1)), Ok((0, 1))]);
    assert_eq!(into, [[2; 4], [1; 4], [3; 4], [4; 4]]);
}
