//! Receives that give up in the middle of a long message, and the fate of the message.

use std::time::Duration;

use super::{BYTES, MemoryLink, Messages, RingLink, SocketLink, Talk, TestNetwork, Usher, Wire, pattern, pump};
use crate::call::element::{DType, TypeTag};
use crate::host::abort_reason::AbortReason;
use crate::host::point_to_point::frame::CHUNK_BYTES;
use crate::host::point_to_point::{GivenUp, MessageError, Ticket};

const LONG: usize = 2 * CHUNK_BYTES + 4000;
const AFTER: Duration = Duration::from_millis(20);

/// Lets a message arrive in part.
fn begin<W: Wire>(a: &mut Messages<Usher<W>>, b: &mut Messages<Usher<W>>, receive: Ticket) {
    let mut rounds = 0;
    while !b.matching_state.has_begun() {
        a.progress();
        b.progress();
        rounds += 1;
        assert!(rounds < 10_000, "nothing comes");
    }
    assert!(b.poll(receive).is_none(), "it has come whole");
}

fn data(which: u64) -> Vec<u8> {
    pattern(which, LONG)
}

/// Gives up a receive in the middle of its message. Nothing more is written to its memory.
fn give_up<W: Wire>(b: &mut Messages<Usher<W>>, receive: Ticket) {
    assert_eq!(b.give_up(receive, AFTER), GivenUp::Kept { source: 0, bytes: LONG });
}

fn kept_in_its_place<W: Wire>(is_whole: bool) {
    let (_network, [mut a, mut b]) = TestNetwork::<W>::of(21);
    let messages = [data(1), data(2), data(3)];
    let mut first = vec![0; LONG];
    let receive = b.irecv(Some(0), Some(1), &mut first);
    let sends = [0, 1, 2].map(|at| a.isend(1, 1, &messages[at]));
    begin(&mut a, &mut b, receive);
    give_up(&mut b, receive);
    let at_end = first.clone();
    assert!(b.has_incoming_rest(), "the rest of it is to come");
    if is_whole {
        pump(&mut [&mut a, &mut b]);
        assert!(!b.has_incoming_rest(), "it is here");
    }
    // Give up in the middle again, if it is still arriving.
    if !is_whole {
        let mut second = vec![0; LONG];
        let receive = b.irecv(None, Some(1), &mut second);
        give_up(&mut b, receive);
        assert!(second[..CHUNK_BYTES] == messages[0][..CHUNK_BYTES], "what had come was not there at once");
    }
    for (at, message) in messages.iter().enumerate() {
        let mut into = vec![0; LONG + at];
        let receive = b.irecv(Some(0), Some(1), &mut into);
        assert!(!b.has_incoming_rest(), "this receive has it");
        pump(&mut [&mut a, &mut b]);
        assert_eq!(b.outcome(receive).map(|envelope| (envelope.tag, envelope.bytes)), Ok((1, LONG)));
        assert!(into[..LONG] == *message, "message {at}");
        assert!(a.outcome(sends[at]).is_ok());
    }
    assert!(first == at_end, "memory was touched after its receive had given up");
    assert!(a.matching_state.is_idle() && b.matching_state.is_idle());
}

#[test]
fn a_long_message_is_kept_in_its_place_for_the_next_receive() {
    for is_whole in [true, false] {
        kept_in_its_place::<MemoryLink>(is_whole);
        kept_in_its_place::<SocketLink>(is_whole);
        kept_in_its_place::<RingLink>(is_whole);
    }
}

#[test]
fn a_receive_that_waits_already_gets_the_message_at_once() {
    let (_network, [mut a, mut b]) = TestNetwork::<SocketLink>::of(22);
    let messages = [data(1), data(2)];
    let mut into = [vec![0; LONG], vec![0; LONG]];
    let [first, second] = &mut into;
    let receives = [b.irecv(Some(0), Some(1), first), b.irecv(None, Some(1), second)];
    let send = a.isend(1, 1, &messages[0]);
    begin(&mut a, &mut b, receives[0]);
    give_up(&mut b, receives[0]);
    pump(&mut [&mut a, &mut b]);
    assert!(b.outcome(receives[1]).is_ok() && into[1] == messages[0] && a.outcome(send).is_ok());
    assert!(a.matching_state.is_idle() && b.matching_state.is_idle());
}

#[test]
fn a_receive_that_cannot_take_the_message_uses_it_up() {
    for is_whole in [true, false] {
        for (element, capacity) in [(BYTES, LONG - 1), (TypeTag::Scalar(DType::F32), LONG)] {
            let (_network, [mut a, mut b]) = TestNetwork::<SocketLink>::of(23);
            let message = data(1);
            let mut into = vec![0; LONG];
            let receive = b.irecv(Some(0), Some(1), &mut into);
            let send = a.isend(1, 1, &message);
            begin(&mut a, &mut b, receive);
            give_up(&mut b, receive);
            if is_whole {
                pump(&mut [&mut a, &mut b]);
            }
            let mut other = vec![0; capacity];
            let refused = b.irecv_typed(Some(0), Some(1), element, &mut other).expect("the peer is there");
            assert!(b.outcome(refused).is_err() && other.iter().all(|byte| *byte == 0));
            pump(&mut [&mut a, &mut b]);
            // If it arrived completely, its send was complete.
            let outcome = a.outcome(send).map(|envelope| envelope.bytes);
            assert_eq!(outcome, if is_whole { Ok(LONG) } else { Err(MessageError::Abandoned { peer: 1 }) });
            a.send(1, 1, &[7]);
            assert_eq!(b.recv(Some(0), Some(1), 1).1, [7]);
            assert!(a.matching_state.is_idle() && b.matching_state.is_idle());
        }
    }
}

/// A waiting receive cannot take the message: both receives and the sender learn that it is lost.
fn lost_to_one_that_waits<W: Wire>() {
    let (_network, [mut a, mut b]) = TestNetwork::<W>::of(27);
    let messages = [data(1), data(2)];
    let (mut into, mut short) = (vec![0; LONG], vec![0; LONG - 1]);
    let receive = b.irecv(Some(0), Some(1), &mut into);
    let waits = b.irecv(Some(0), Some(1), &mut short);
    let send = a.isend(1, 1, &messages[0]);
    begin(&mut a, &mut b, receive);
    assert_eq!(b.give_up(receive, AFTER), GivenUp::Lost { source: 0, bytes: LONG });
    assert_eq!(b.outcome(waits), Err(MessageError::Truncated { peer: 0, sent: LONG, capacity: LONG - 1 }));
    pump(&mut [&mut a, &mut b]);
    assert_eq!(a.outcome(send), Err(MessageError::Abandoned { peer: 1 }));
    let send = a.isend(1, 1, &messages[1]);
    let receive = b.irecv(Some(0), Some(1), &mut into);
    pump(&mut [&mut a, &mut b]);
    assert!(b.outcome(receive).is_ok() && into == messages[1] && a.outcome(send).is_ok());
    assert!(a.matching_state.is_idle() && b.matching_state.is_idle());
}

#[test]
fn a_message_that_a_waiting_receive_cannot_take_over_is_an_error_on_both_ends() {
    lost_to_one_that_waits::<MemoryLink>();
    lost_to_one_that_waits::<SocketLink>();
    lost_to_one_that_waits::<RingLink>();
}

#[test]
fn a_message_that_both_ends_give_up_leaves_a_note() {
    let (_network, [mut a, mut b]) = TestNetwork::<MemoryLink>::of(24);
    let message = data(1);
    let mut into = vec![0; LONG];
    let receive = b.irecv(Some(0), Some(1), &mut into);
    let send = a.isend(1, 1, &message);
    begin(&mut a, &mut b, receive);
    give_up(&mut b, receive);
    assert_eq!(a.give_up(send, AFTER), GivenUp::Withdrawn);
    pump(&mut [&mut a, &mut b]);
    let second = a.isend(1, 1, &message);
    let receive = b.irecv(Some(0), Some(1), &mut into);
    assert_eq!(b.outcome(receive), Err(MessageError::Withdrawn { peer: 0, after: AFTER }));
    let receive = b.irecv(Some(0), Some(1), &mut into);
    pump(&mut [&mut a, &mut b]);
    assert!(b.outcome(receive).is_ok() && into == message && a.outcome(second).is_ok());
    assert!(a.matching_state.is_idle() && b.matching_state.is_idle());
}

/// There is no room for the message: checks the errors on both ends. The following messages arrive.
fn lost<W: Wire>() {
    let (_network, [mut a, mut b]) = TestNetwork::<W>::of(25);
    let messages = [data(1), data(2)];
    let mut into = vec![0; LONG];
    let receive = b.irecv(Some(0), Some(1), &mut into);
    let sends = [0, 1].map(|at| a.isend(1, 1, &messages[at]));
    begin(&mut a, &mut b, receive);
    b.matching_state.keep_no_more();
    assert_eq!(b.give_up(receive, AFTER), GivenUp::Lost { source: 0, bytes: LONG });
    pump(&mut [&mut a, &mut b]);
    let outcome = a.outcome(sends[0]);
    assert!(outcome == Err(MessageError::Abandoned { peer: 1 }), "{outcome:?}");
    let receive = b.irecv(Some(0), Some(1), &mut into);
    pump(&mut [&mut a, &mut b]);
    assert!(b.outcome(receive).is_ok() && into == messages[1] && a.outcome(sends[1]).is_ok());
    assert!(a.matching_state.is_idle() && b.matching_state.is_idle());
}

#[test]
fn a_message_that_cannot_be_kept_is_an_error_on_both_ends() {
    lost::<MemoryLink>();
    lost::<SocketLink>();
    lost::<RingLink>();
}

#[test]
fn a_kept_message_that_came_whole_outlives_its_sender_and_another_does_not() {
    for is_whole in [true, false] {
        let (_network, [mut a, mut b]) = TestNetwork::<SocketLink>::of(26);
        let message = data(1);
        let mut into = vec![0; LONG];
        let receive = b.irecv(Some(0), Some(1), &mut into);
        let _send = a.isend(1, 1, &message);
        begin(&mut a, &mut b, receive);
        give_up(&mut b, receive);
        if is_whole {
            pump(&mut [&mut a, &mut b]);
        }
        drop(a);
        pump(&mut [&mut b]);
        let again = b.irecv_typed(Some(0), Some(1), BYTES, &mut into);
        if is_whole {
            assert!(b.outcome(again.expect("it is here")).is_ok() && into == message);
        } else {
            assert_eq!(again, Err(AbortReason::Lost { rank: 0, by: 1 }.into()));
        }
        assert!(b.matching_state.is_idle());
    }
}
