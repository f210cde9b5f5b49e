//! Objects: receives that allocate their memory when they match a message.

use super::{BYTES, MemoryLink, SocketLink, Talk, TestNetwork, Wire, pattern, pump};
use crate::call::element::TypeTag;
use crate::host::point_to_point::frame::{CHUNK_BYTES, EAGER_BYTES};
use crate::host::point_to_point::{Envelope, MessageError};

const OBJECT: TypeTag = TypeTag::Object;
const SIZES: [usize; 7] = [0, 1, 4000, EAGER_BYTES, EAGER_BYTES + 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 7];

fn every_size<W: Wire>() {
    let (_network, [mut a, mut b]) = TestNetwork::<W>::of(2);
    for (number, bytes) in SIZES.into_iter().enumerate() {
        for (receive_first, from, most) in
            [(true, Some(0), bytes), (true, None, usize::MAX), (false, Some(0), bytes + 1), (false, None, bytes)]
        {
            let (tag, data) = (number as u64, pattern(number as u64, bytes));
            let early = receive_first.then(|| b.post_object_receive(from, tag, most).expect("the peer is there"));
            pump(&mut [&mut a, &mut b]);
            let send = a.isend_typed(1, tag, OBJECT, &data).expect("the peer is there");
            pump(&mut [&mut a, &mut b]);
            let receive = early.unwrap_or_else(|| b.post_object_receive(from, tag, most).expect("the peer is there"));
            pump(&mut [&mut a, &mut b]);
            let (outcome, object) = b.poll_object(receive).expect("received");
            assert_eq!(outcome, Ok(Envelope { source: 0, tag, element: OBJECT, bytes }));
            assert!(object == data, "{bytes} B");
            assert!(a.outcome(send).is_ok() && b.poll_object(receive).is_none());
        }
    }
    assert!(a.matching_state.is_idle() && b.matching_state.is_idle());
}

#[test]
fn objects_of_every_size_arrive_whole() {
    every_size::<MemoryLink>();
    every_size::<SocketLink>();
}

#[test]
fn an_object_to_oneself_is_received_like_any_other() {
    let (_network, [mut me]) = TestNetwork::<SocketLink>::of(1);
    for bytes in SIZES {
        let data = pattern(bytes as u64, bytes);
        let send = me.isend_typed(0, 1, OBJECT, &data).expect("it is here");
        let receive = me.post_object_receive(None, 1, bytes).expect("it is here");
        assert!(me.outcome(send).is_ok() && me.poll_object(receive).expect("received").1 == data);
    }
    assert!(me.matching_state.is_idle());
}

#[test]
fn what_is_too_large_or_no_object_is_refused_and_used_up() {
    let (_network, [mut a, mut b]) = TestNetwork::<SocketLink>::of(2);
    for bytes in [4000, CHUNK_BYTES + 1] {
        for (element, expected) in [
            (OBJECT, MessageError::TooLarge { peer: 0, sent: bytes, most: bytes - 1 }),
            (BYTES, MessageError::TypeMismatch { peer: 0, sent: BYTES, expected: OBJECT }),
        ] {
            let data = pattern(5, bytes);
            let send = a.isend_typed(1, 3, element, &data).expect("the peer is there");
            pump(&mut [&mut a, &mut b]);
            let receive = b.post_object_receive(Some(0), 3, bytes - 1).expect("the peer is there");
            pump(&mut [&mut a, &mut b]);
            assert_eq!(b.poll_object(receive), Some((Err(expected), Vec::new())));
            // The send of a short message is complete by then.
            assert_eq!(a.outcome(send).is_err(), bytes > EAGER_BYTES);
        }
        // In the other direction.
        let data = pattern(6, bytes);
        let send = a.isend_typed(1, 3, OBJECT, &data).expect("the peer is there");
        let mut into = vec![0xaa; bytes];
        let receive = b.irecv(Some(0), Some(3), &mut into);
        pump(&mut [&mut a, &mut b]);
        assert_eq!(b.outcome(receive), Err(MessageError::TypeMismatch { peer: 0, sent: OBJECT, expected: BYTES }));
        assert_eq!(a.outcome(send).is_err(), bytes > EAGER_BYTES);
        assert!(into.iter().all(|byte| *byte == 0xaa));
    }
    let text = MessageError::TooLarge { peer: 3, sent: 9, most: 8 }.to_string();
    assert!(text.contains("an object of 9 B") && text.contains("the limit of the receive, 8 B") && text.contains("rank 3"), "{text}");
    assert!(a.matching_state.is_idle() && b.matching_state.is_idle());
}

#[test]
fn a_receive_that_is_cancelled_loses_no_object() {
    let (_network, [mut a, mut b]) = TestNetwork::<MemoryLink>::of(2);
    for round in 0..40 {
        let bytes = if round % 2 == 0 { 30_000 } else { CHUNK_BYTES + 5 };
        let data = pattern(round, bytes);
        let early = b.post_object_receive(Some(0), 1, bytes).expect("the peer is there");
        let send = a.isend_typed(1, 1, OBJECT, &data).expect("the peer is there");
        // As far as it arrives in some steps: not at all, in part, or completely.
        for _ in 0..round / 2 % 20 {
            a.progress();
            b.progress();
        }
        let object = match b.poll_object(early) {
            Some((_, object)) => object,
            None => {
                b.cancel(early);
                let late = b.post_object_receive(Some(0), 1, bytes).expect("the peer is there");
                pump(&mut [&mut a, &mut b]);
                b.poll_object(late).expect("received").1
            }
        };
        assert!(object == data, "round {round}");
        pump(&mut [&mut a, &mut b]);
        assert!(a.outcome(send).is_ok());
    }
    assert!(a.matching_state.is_idle() && b.matching_state.is_idle());
}
