//! Messages that go the short way, mixed with such that cannot.

use super::test_network::{MemoryLink, SocketLink, TestNetwork, Usher, Wire, pump, ranks};
use super::{BYTES, Random, Talk, pattern};
use crate::element::{DType, TypeTag};
use crate::host::point_to_point::frame::EAGER_BYTES;
use crate::host::point_to_point::{Attempt, MessageError, Messages};

/// Sends in the shortest way that is open, and waits.
fn send<W: Wire>(engine: &mut Messages<Usher<W>>, to: usize, tag: u64, data: &[u8]) {
    // SAFETY: the data outlives the call, which waits for the request.
    let ticket = match unsafe { engine.try_send(to, tag, BYTES, data.as_ptr(), data.len()) } {
        Attempt::Done(envelope) => return assert_eq!((envelope.tag, envelope.bytes), (tag, data.len())),
        Attempt::Begun(ticket) => ticket,
        Attempt::Wait => engine.isend(to, tag, data),
    };
    engine.finish_all(&[ticket]).expect("sent");
    assert_eq!(engine.outcome(ticket).map(|envelope| envelope.bytes), Ok(data.len()));
}

/// Receives in the shortest way that is open, and waits; what came.
fn receive<W: Wire>(engine: &mut Messages<Usher<W>>, from: usize, tag: u64, capacity: usize) -> Vec<u8> {
    let mut into = vec![0xaa; capacity];
    // SAFETY: the memory outlives the call, which waits for the request.
    let ticket = match unsafe { engine.try_receive(from, tag, BYTES, into.as_mut_ptr(), capacity) } {
        Attempt::Done(envelope) => {
            assert_eq!((envelope.source, envelope.tag), (from, tag));
            into.truncate(envelope.bytes);
            return into;
        }
        Attempt::Begun(ticket) => ticket,
        Attempt::Wait => engine.irecv(Some(from), Some(tag), &mut into),
    };
    engine.finish_all(&[ticket]).expect("received");
    let envelope = engine.outcome(ticket).expect("received well");
    into.truncate(envelope.bytes);
    into
}

fn conversation<W: Wire>(seed: u64) {
    let lengths = [0, 1, 40, 2000, 3000, EAGER_BYTES - 1, EAGER_BYTES, EAGER_BYTES + 1];
    ranks::<W, ()>(2, seed, |rank, engine| {
        // Both ranks draw the same numbers.
        let mut random = Random(seed | 1);
        for turn in 0..if cfg!(miri) { 30 } else { 400 } {
            let length = lengths[random.below(lengths.len())];
            let tags = [random.below(2) as u64, random.below(2) as u64];
            // Sometimes the second one is received first, where the tags tell them apart and the first need not be waited for.
            let swapped = random.below(2) == 0 && tags[0] != tags[1] && length <= EAGER_BYTES;
            let messages = [pattern(2 * turn, length), pattern(2 * turn + 1, length / 2)];
            if turn as usize % 2 == rank {
                tags.iter().zip(&messages).for_each(|(tag, message)| send(engine, 1 - rank, *tag, message));
                continue;
            }
            let order = if swapped { [1, 0] } else { [0, 1] };
            for at in order {
                assert!(receive(engine, 1 - rank, tags[at], length) == messages[at], "seed {seed:#x} turn {turn}");
            }
        }
    });
}

#[test]
fn two_ranks_take_turns_and_nothing_changes_places() {
    for seed in [0x5eed_0018, 0x5eed_0019, 0x5eed_001a] {
        conversation::<MemoryLink>(seed);
        conversation::<SocketLink>(seed);
    }
}

/// Two engines that have exchanged a message, so that their link is there.
fn acquainted() -> [Messages<Usher<SocketLink>>; 2] {
    let (_network, [mut a, mut b]) = TestNetwork::<SocketLink>::of(12);
    send(&mut a, 1, 0, &[1]);
    assert_eq!(receive(&mut b, 0, 0, 1), [1]);
    [a, b]
}

#[test]
fn a_short_message_needs_no_request() {
    let [mut a, mut b] = acquainted();
    for length in [0, 1, 5000] {
        let data = pattern(3, length);
        let mut into = vec![0xaa; length + 1];
        // SAFETY: both outlive the calls, and no request is made.
        let (sent, received) = unsafe {
            let sent = a.try_send(1, 7, BYTES, data.as_ptr(), length);
            (sent, b.try_receive(0, 7, BYTES, into.as_mut_ptr(), length + 1))
        };
        let bytes = |attempt| if let Attempt::Done(envelope) = attempt { Some(envelope.bytes) } else { None };
        assert_eq!((bytes(sent), bytes(received)), (Some(length), Some(length)));
        assert!(into[..length] == data && into[length] == 0xaa);
    }
    assert!(a.matching_state.is_idle() && b.matching_state.is_idle());
}

#[test]
fn what_does_not_fit_or_is_not_meant_is_left_to_requests() {
    let [mut a, mut b] = acquainted();
    let mut into = [0xaa; 8];
    for (tag, element, capacity) in [(1, BYTES, 7), (1, TypeTag::Scalar(DType::F32), 8), (2, BYTES, 8)] {
        send(&mut a, 1, 1, &[5; 8]);
        // SAFETY: the memory outlives the call, and no request is made.
        let attempt = unsafe { b.try_receive(0, tag, element, into.as_mut_ptr(), capacity) };
        assert!(matches!(attempt, Attempt::Wait) && into == [0xaa; 8]);
        let ticket = b.irecv_typed(Some(0), Some(1), element, &mut into[..capacity]).expect("the peer is there");
        pump(&mut [&mut b]);
        match b.outcome(ticket) {
            Ok(_) => assert!(tag == 2 && into == [5; 8]),
            Err(error) => assert!(tag == 1 && !matches!(error, MessageError::Ended(_)) && into == [0xaa; 8]),
        }
    }
    // Behind a receive that was posted before.
    let mut first = [0; 1];
    let posted = b.irecv(None, None, &mut first);
    send(&mut a, 1, 4, &[1]);
    send(&mut a, 1, 4, &[2]);
    assert_eq!((receive(&mut b, 0, 4, 1), b.outcome(posted).is_ok(), first), (vec![2], true, [1]));
    assert!(a.matching_state.is_idle() && b.matching_state.is_idle());
}
