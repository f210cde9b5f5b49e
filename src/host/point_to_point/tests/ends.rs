//! Peers that leave, die or send garbage; deadlines and abort reasons.

use std::os::fd::BorrowedFd;
use std::thread;
use std::time::Duration;

use super::{MemoryLink, Random, SocketLink, Talk, TestNetwork, Wire, pattern, pump, soon};
use crate::base::deadline::Deadline;
use crate::call::element::TypeTag;
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::link::ByteLink;
use crate::host::point_to_point::frame::{CHUNK_BYTES, EAGER_BYTES, Frame};
use crate::host::point_to_point::{Connector, MessageError, Messages, Outcome};

const LONG: usize = 8 * CHUNK_BYTES;

/// The outcome of a message of rank 0.
fn lost(rank: u32) -> Outcome {
    Err(MessageError::Ended(AbortReason::Lost { rank, by: 0 }))
}

/// Rank 1 dies after this many rounds of traffic in all directions.
fn death<W: Wire>(rounds: usize) {
    let (_network, [mut a, mut b, mut c]) = TestNetwork::<W>::of(9);
    let data = pattern(1, LONG);
    let mut into = vec![vec![0; LONG]; 4];
    let [exact, any, short, from_c] = into.as_mut_slice() else { unreachable!() };
    let requests = [a.isend(1, 1, &data), a.isend(1, 2, &data), a.irecv(Some(1), Some(1), exact), a.irecv(Some(1), Some(2), short)];
    let (any, from_c) = (a.irecv(None, Some(50), any), a.irecv(Some(2), Some(1), from_c));
    let _one = b.isend(0, 1, &data);
    let _two = b.isend(0, 2, &data[..EAGER_BYTES]);
    for _ in 0..rounds {
        a.progress();
        b.progress();
    }
    drop(b);
    let stop = a.finish_all(&[requests[0], from_c]).expect_err("the send's peer died");
    assert_eq!(stop, Interrupted::from(AbortReason::Lost { rank: 1, by: 0 }));
    // Short and long messages that had arrived completely count; nothing else does.
    for (at, request) in requests.into_iter().enumerate() {
        let outcome = a.outcome(request);
        assert!(outcome == lost(1) || at >= 2 && outcome.is_ok(), "request {at}: {outcome:?}");
    }
    // The other ranks continue, and a receive from any source still has a peer to wait for.
    let sends = [c.isend(0, 1, &data), c.isend(0, 50, &data[..10])];
    pump(&mut [&mut a, &mut c]);
    assert!(a.outcome(from_c).is_ok() && a.outcome(any).is_ok_and(|envelope| envelope.source == 2));
    assert!(sends.iter().all(|send| c.outcome(*send).is_ok()));
    // A lost peer stays lost.
    assert_eq!(a.isend_typed(1, 0, TypeTag::Plain(1), &[]), Err(AbortReason::Lost { rank: 1, by: 0 }.into()));
    assert_eq!(a.irecv_typed(Some(1), None, TypeTag::Plain(1), &mut []), Err(AbortReason::Lost { rank: 1, by: 0 }.into()));
    let waiting = a.irecv(None, Some(51), &mut into[0]);
    drop(c);
    assert_eq!(a.finish_all(&[waiting]), Err(AbortReason::Lost { rank: 2, by: 0 }.into()));
    assert!(a.irecv_typed(None, None, TypeTag::Plain(1), &mut []).is_err(), "nobody is left");
}

#[test]
fn a_peer_that_left_before_its_own_link_was_taken_holds_up_nobody_who_leaves() {
    let (network, [mut a, mut b]) = TestNetwork::<MemoryLink>::of(3);
    [0, 1].into_iter().for_each(|rank| network.shut(rank, true));
    let data = [1, 2, 3];
    let _sent = (a.isend(1, 1, &data), b.isend(0, 1, &data));
    network.shut(1, false);
    pump(&mut [&mut a, &mut b]);
    b.leave(&soon()).unwrap();
    let deadline = soon();
    a.leave(&deadline).unwrap();
    assert!(!deadline.has_passed(), "it has waited for a peer that was gone");
}

#[test]
fn a_peer_that_dies_fails_what_waits_for_it_and_nothing_else() {
    for rounds in (0..40).step_by(if cfg!(miri) { 13 } else { 3 }) {
        death::<MemoryLink>(rounds);
        death::<SocketLink>(rounds);
    }
}

/// Rank 0 sends and leaves at once; rank 1 polls later.
fn leaving<W: Wire>() {
    let (_network, [mut a, mut b]) = TestNetwork::<W>::of(10);
    let (data, long) = (pattern(1, EAGER_BYTES), pattern(2, LONG));
    let mut into = vec![0; LONG];
    let never = b.irecv(Some(0), Some(99), &mut into);
    // This is short enough for the link to take it at once.
    let early = b.isend(0, 1, &data[..EAGER_BYTES / 4]);
    let sends = [a.isend(1, 1, &data), a.isend(1, 2, &[]), a.isend(1, 3, &long)];
    thread::scope(|scope| {
        scope.spawn(|| a.leave(&soon()).expect("left in order"));
        assert_eq!(b.finish_all(&[never]), Err(AbortReason::Left { rank: 0 }.into()));
    });
    // Messages that arrived completely are still there.
    assert!(b.recv(Some(0), Some(2), 10).1.is_empty());
    assert!(b.recv(None, Some(1), EAGER_BYTES).1 == data);
    assert_eq!(b.outcome(never), Err(MessageError::Ended(AbortReason::Left { rank: 0 })));
    assert!(b.outcome(early).is_ok());
    assert_eq!(b.isend_typed(0, 0, TypeTag::Plain(1), &[]), Err(AbortReason::Left { rank: 0 }.into()));
    // The announced message was never matched.
    assert!(b.irecv_typed(Some(0), Some(3), TypeTag::Plain(1), &mut []).is_err());
    assert!(a.outcome(sends[0]).is_ok() && a.outcome(sends[1]).is_ok());
    assert_eq!(a.outcome(sends[2]), Err(MessageError::Ended(AbortReason::Left { rank: 0 })));
    assert!(b.matching_state.is_idle());
}

#[test]
fn a_peer_that_leaves_has_said_what_it_sent() {
    leaving::<MemoryLink>();
    leaving::<SocketLink>();
}

/// Both ranks open a link at the same moment. The peer's last message arrives on the link that is seen last.
fn two_links<W: Wire>() {
    let (network, [mut a, mut b]) = TestNetwork::<W>::of(11);
    network.shut(0, true);
    network.shut(1, true);
    let data = pattern(1, 100);
    let mut into = vec![0; 100];
    let receive = a.irecv(Some(1), Some(1), &mut into);
    let send = b.isend(0, 1, &data);
    network.shut(1, false);
    pump(&mut [&mut b]);
    b.leave(&soon()).expect("left in order");
    assert!(b.outcome(send).is_ok());
    // The leave frame on the first link announces another link.
    pump(&mut [&mut a]);
    assert!(a.poll(receive).is_none(), "the message was given up before its link was looked at");
    network.shut(0, false);
    a.finish_all(&[receive]).expect("received");
    assert!(a.outcome(receive).is_ok() && into == data);
    pump(&mut [&mut a]);
    assert_eq!(a.isend_typed(1, 0, TypeTag::Plain(1), &[]), Err(AbortReason::Left { rank: 1 }.into()));
}

#[test]
fn a_peer_with_two_links_is_gone_when_both_have_ended() {
    two_links::<MemoryLink>();
    two_links::<SocketLink>();
}

#[test]
fn links_from_nowhere_are_closed() {
    let (network, [mut a, mut b]) = TestNetwork::<SocketLink>::of(12);
    let pending = [network.open(7, 0), network.open(0, 0), network.open(1, 0), network.open(1, 0)];
    pump(&mut [&mut a]);
    let closed = pending.map(|mut link| link.try_read(&mut [0; 1]).is_err_and(|error| error.kind() != std::io::ErrorKind::WouldBlock));
    assert_eq!(closed, [true, true, false, true]);
    // The accepted link has been dropped by now, and so rank 1 is lost.
    pump(&mut [&mut a, &mut b]);
    assert_eq!(a.isend_typed(1, 0, TypeTag::Plain(1), &[]), Err(AbortReason::Lost { rank: 1, by: 0 }.into()));
}

#[test]
fn a_peer_s_word_ends_a_wait() {
    let (_network, [mut a, mut b]) = TestNetwork::<SocketLink>::of(14);
    let mut into = [0; 4];
    let receive = a.irecv(Some(1), Some(1), &mut into);
    // The other side of a busy link learns of it too.
    let long = pattern(1, LONG);
    let send = b.isend(0, 5, &long);
    pump(&mut [&mut a, &mut b]);
    let abort_reason = AbortReason::TimedOut { waiting: 1, missing: 0 };
    b.propagate(abort_reason);
    assert_eq!(a.finish_all(&[receive]), Err(abort_reason.into()));
    assert_eq!((a.heard(), b.heard()), (Some(abort_reason), None));
    b.cancel(send);
    a.cancel(receive);
}

#[test]
fn leaving_does_not_wait_for_ever() {
    let (_network, [mut a, _b]) = TestNetwork::<MemoryLink>::of(15);
    let data = pattern(1, EAGER_BYTES);
    let sends: Vec<_> = (0..10).map(|_| a.isend(1, 0, &data)).collect();
    let stop = a.leave(&Deadline::after(Duration::from_millis(5))).expect_err("the peer reads nothing");
    assert_eq!(stop.abort_reason, AbortReason::TimedOut { waiting: 0, missing: 1 });
    assert_eq!(a.outcome(sends[9]), Err(MessageError::Ended(AbortReason::Left { rank: 0 })));
    assert!(a.isend_typed(1, 0, TypeTag::Plain(1), &[]).is_err());
}

/// Writes bytes to rank 0 as if they came from rank 1, and then a message from rank 2. Returns whether rank 1 is lost.
fn told<W: Wire>(bytes: &[u8]) -> bool {
    let (network, [mut a, _b, mut c]) = TestNetwork::<W>::of(16);
    let mut raw = network.open(1, 0);
    let mut into = vec![0; EAGER_BYTES];
    let mut receive = Some(a.irecv(Some(1), Some(0), &mut into));
    let long = pattern(1, LONG);
    let send = a.isend(1, 0, &long);
    let mut at = 0;
    let mut idle = 0;
    while at < bytes.len() && idle < 50 {
        let written = raw.try_write(&[std::io::IoSlice::new(&bytes[at..])]).unwrap_or(0);
        at += written;
        idle = if a.progress() || written > 0 { 0 } else { idle + 1 };
    }
    pump(&mut [&mut a]);
    c.send(0, 4, &[4; 4]);
    assert_eq!(a.recv(Some(2), Some(4), 4).1, [4; 4], "rank 2 is not concerned");
    let is_lost = a.poll(send) == Some(lost(1));
    if is_lost {
        let outcome = receive.take().map(|receive| a.outcome(receive));
        assert!(outcome.is_some());
    }
    a.cancel(send);
    receive.into_iter().for_each(|receive| a.cancel(receive));
    is_lost
}

#[test]
fn nonsense_from_a_peer_is_its_own_loss() {
    let element = TypeTag::Plain(1);
    let frame = |frame: Frame| {
        let (bytes, length) = frame.encode();
        bytes[..length].to_vec()
    };
    // The posted receive has number 0, and the send has number 1.
    let well = [
        frame(Frame::Withdraw { message: 9, after: 0 }),
        frame(Frame::Abandon { message: 1, reply: 5 }),
        frame(Frame::GaveUp { tag: 3, after: 7 }),
        frame(Frame::Refuse { message: 1, element, capacity: 0 }),
        frame(Frame::ClearToSend { message: 1, reply: 77 }),
        frame(Frame::AbortReason(AbortReason::Failed { rank: 1 }))[..20].to_vec(),
        frame(Frame::Eager { tag: 1, element, bytes: 100 }),
        frame(Frame::Credit { cost: 128 }),
    ];
    let ill = [
        vec![0; 32],
        vec![0xff; 40],
        frame(Frame::ClearToSend { message: 0, reply: 0 }),
        frame(Frame::ClearToSend { message: u32::MAX, reply: 0 }),
        [frame(Frame::ClearToSend { message: 1, reply: 0 }), frame(Frame::ClearToSend { message: 1, reply: 0 })].concat(),
        frame(Frame::Refuse { message: 2, element, capacity: 0 }),
        frame(Frame::Data { reply: 0, bytes: 5 }),
        frame(Frame::Data { reply: 1, bytes: 5 }),
        frame(Frame::Data { reply: 1000, bytes: 5 }),
        // The announcement of the send costs 128.
        frame(Frame::Credit { cost: 129 }),
        frame(Frame::Credit { cost: u64::MAX }),
        // This is more than a rank may have waiting: 64 MiB among three.
        frame(Frame::Eager { tag: 5, element, bytes: 0 }).repeat((64 << 20) / 3 / 128 + 1),
    ];
    for bytes in &well {
        assert!(!told::<SocketLink>(bytes), "{bytes:02x?} made rank 1 lost");
    }
    for bytes in &ill {
        assert!(told::<SocketLink>(bytes), "{bytes:02x?} did not make rank 1 lost");
        assert!(told::<MemoryLink>(bytes), "{bytes:02x?} did not make rank 1 lost");
    }
}

#[test]
fn more_data_than_announced_is_nonsense() {
    let (network, [mut a, _b]) = TestNetwork::<SocketLink>::of(17);
    let mut raw = network.open(1, 0);
    let mut into = vec![0xaa; EAGER_BYTES + 20];
    let receive = a.irecv(Some(1), Some(0), &mut into[..EAGER_BYTES + 10]);
    let frames =
        [Frame::RequestToSend { message: 3, tag: 0, element: super::BYTES, bytes: EAGER_BYTES + 10 }, Frame::Data { reply: 0, bytes: 20 }];
    for frame in frames {
        raw.try_write(&[std::io::IoSlice::new(&frame.encode().0[..32])]).expect("a socket takes a little");
    }
    raw.try_write(&[std::io::IoSlice::new(&[1; 20])]).expect("a socket takes a little");
    let too_much = Frame::Data { reply: 0, bytes: EAGER_BYTES }.encode().0;
    raw.try_write(&[std::io::IoSlice::new(&too_much[..32])]).expect("a socket takes a little");
    pump(&mut [&mut a]);
    assert_eq!(a.outcome(receive), lost(1));
    assert!(into[..20] == [1; 20] && into[20..].iter().all(|byte| *byte == 0xaa));
}

#[test]
fn random_streams_do_no_harm() {
    let seed = 0x5eed_0018;
    let mut random = Random(seed);
    let mut given_up = 0;
    for round in 0..if cfg!(miri) { 10 } else { 150 } {
        let mut stream = Vec::new();
        for _ in 0..random.below(12) {
            let element = TypeTag::Plain(1);
            let number = random.below(3) as u32;
            let bytes = random.below(300);
            let frame = match random.below(11) {
                0 | 1 => Frame::Eager { tag: random.below(2) as u64, element, bytes },
                2 => Frame::RequestToSend { message: number, tag: random.below(2) as u64, element, bytes: EAGER_BYTES + 1 + bytes },
                3 => Frame::ClearToSend { message: number, reply: number },
                4 => Frame::Refuse { message: number, element, capacity: random.next() },
                5 => Frame::Data { reply: number, bytes: 1 + bytes },
                6 => Frame::Withdraw { message: number, after: random.next() },
                7 => Frame::GaveUp { tag: random.below(2) as u64, after: 1 },
                8 => Frame::Abandon { message: number, reply: number },
                9 => Frame::Leave { opened: number },
                _ => Frame::AbortReason(AbortReason::Failed { rank: 1 }),
            };
            // An abort reason would end the waits of the test itself.
            let (bytes_of_head, length) = if matches!(frame, Frame::AbortReason(_)) { ([0; 112], 7) } else { frame.encode() };
            stream.extend_from_slice(&bytes_of_head[..length]);
            if matches!(frame, Frame::Eager { .. } | Frame::Data { .. }) && random.below(4) > 0 {
                stream.extend(std::iter::repeat_with(|| random.next() as u8).take(bytes));
            }
        }
        if random.below(2) == 0 && !stream.is_empty() {
            let at = random.below(stream.len());
            stream[at] ^= 1 << random.below(8);
        }
        given_up += usize::from(if round % 2 == 0 { told::<SocketLink>(&stream) } else { told::<MemoryLink>(&stream) });
    }
    assert!((20..150).contains(&given_up), "seed {seed:#x}: {given_up} of 150 streams were given up: the test tests little");
}

#[test]
fn a_peer_that_left_before_it_saw_our_link_has_left_and_not_died() {
    let (network, [mut a, mut b]) = TestNetwork::<SocketLink>::of(19);
    network.shut(1, true);
    network.shut(0, true);
    let data = pattern(1, 100);
    let mut into = [vec![0; 100], vec![0; 100]];
    let [first, second] = &mut into;
    let receives = [a.irecv(Some(1), Some(1), first), a.irecv(Some(1), Some(2), second)];
    b.send(0, 1, &data);
    b.leave(&soon()).expect("left in order");
    drop(b);
    network.shut(0, false);
    assert_eq!(a.finish_all(&receives), Err(AbortReason::Left { rank: 1 }.into()));
    assert!(a.outcome(receives[0]).is_ok() && into[0] == data);
}

/// A connector that opens no links, and finds none.
struct NoLinks;

impl Connector for NoLinks {
    type Link = MemoryLink;

    fn connect(&mut self, peer: usize) -> Result<MemoryLink, Interrupted> {
        Err(AbortReason::Lost { rank: peer as u32, by: 0 }.into())
    }

    fn accept(&mut self) -> Vec<(usize, MemoryLink)> {
        Vec::new()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[test]
fn a_rank_that_shares_its_core_does_not_look_for_long() {
    let nobody = |is_crowded| Messages::new(0, 4, is_crowded, NoLinks);
    assert!(nobody(false).looks() > 0);
    assert_eq!(nobody(true).looks(), 0);
}
