//! Tests in which ranks that are threads send to each other, of random traffic, and of messages that need no request,
//! mixed with messages that do.

use std::thread;
use std::time::Duration;

use super::{BYTES, MemoryLink, Random, RingLink, SocketLink, Talk, TestNetwork, Usher, Wire, pattern, pump, ranks};
use crate::call::element::{DType, TypeTag};
use crate::host::point_to_point::frame::{CHUNK_BYTES, EAGER_BYTES};
use crate::host::point_to_point::{Attempt, MessageError, Messages, Ticket};
use crate::meeting::wait_until;

/// Sizes around every limit.
const SIZES: [usize; 14] = [
    0,
    1,
    31,
    1023,
    2047,
    2048,
    2049,
    EAGER_BYTES - 1,
    EAGER_BYTES,
    EAGER_BYTES + 1,
    CHUNK_BYTES - 1,
    CHUNK_BYTES,
    CHUNK_BYTES + 1,
    (3 << 20) + 7,
];

fn ping_pong<W: Wire>() {
    ranks::<W, _>(2, 0x5eed_0010, |rank, engine| {
        let peer = 1 - rank;
        for (round, bytes) in SIZES.into_iter().enumerate() {
            let (mine, theirs) = (pattern(round as u64 * 2 + rank as u64, bytes), pattern(round as u64 * 2 + peer as u64, bytes));
            if rank == 0 {
                engine.send(peer, 7, &mine);
            }
            let (envelope, data) = engine.recv(Some(peer), Some(7), bytes + round % 2);
            assert_eq!((envelope.source, envelope.tag, envelope.bytes), (peer, 7, bytes));
            assert!(data == theirs, "{bytes} B came in changed");
            if rank == 1 {
                engine.send(peer, 7, &mine);
            }
        }
    });
}

#[test]
fn messages_of_all_sizes_go_back_and_forth() {
    ping_pong::<MemoryLink>();
    ping_pong::<SocketLink>();
    ping_pong::<RingLink>();
}

/// Returns message number `number` from rank `from` to `to`; lengths short and long.
fn letter(from: usize, to: usize, number: usize) -> Vec<u8> {
    let bytes = [0, 100, EAGER_BYTES, EAGER_BYTES + 1, 70_000][(from + to + number) % 5];
    pattern((from * 10_000 + to * 100 + number) as u64, bytes)
}

fn everyone_to_everyone<W: Wire>(size: usize, count: usize) {
    ranks::<W, _>(size, 0x5eed_0011, |rank, engine| {
        let letters: Vec<Vec<Vec<u8>>> = (0..size).map(|to| (0..count).map(|number| letter(rank, to, number)).collect()).collect();
        let mut sends = Vec::new();
        for number in 0..count {
            sends.extend(letters.iter().enumerate().map(|(to, letters)| engine.isend(to, number as u64, &letters[number])));
        }
        let mut into = vec![vec![vec![0_u8; 70_000]; count]; size];
        let mut receives = Vec::new();
        // In a different order from the sends.
        for from in (0..size).rev() {
            for number in (0..count).rev() {
                receives.push((from, number, engine.irecv(Some(from), Some(number as u64), &mut into[from][number])));
            }
        }
        let all: Vec<Ticket> = sends.iter().copied().chain(receives.iter().map(|(_, _, ticket)| *ticket)).collect();
        engine.finish_all(&all).expect("all arrive");
        for (from, number, ticket) in receives {
            let envelope = engine.outcome(ticket).expect("received well");
            assert!(into[from][number][..envelope.bytes] == letter(from, rank, number), "{from} to {rank}, number {number}");
        }
        for ticket in sends {
            engine.outcome(ticket).expect("sent well");
        }
    });
}

#[test]
fn many_sends_are_under_way_to_everyone() {
    everyone_to_everyone::<MemoryLink>(3, 10);
    everyone_to_everyone::<SocketLink>(5, 10);
    everyone_to_everyone::<RingLink>(5, 10);
    everyone_to_everyone::<SocketLink>(1, 10);
}

fn opposite<W: Wire>() {
    ranks::<W, _>(2, 0x5eed_0012, |rank, engine| {
        let peer = 1 - rank;
        let (first, second) = (pattern(rank as u64, 2_000_001), pattern(10 + rank as u64, 1_000_003));
        let sends = [engine.isend(peer, 1, &first), engine.isend(peer, 2, &second)];
        let mut into = vec![0; 2_000_001];
        // In reverse order: the second is received while the first still waits.
        for (tag, which, bytes) in [(2, 10, 1_000_003), (1, 0, 2_000_001)] {
            let receive = engine.irecv(Some(peer), Some(tag), &mut into);
            engine.finish_all(&[receive]).expect("received");
            assert_eq!(engine.outcome(receive).map(|envelope| envelope.bytes), Ok(bytes));
            assert!(into[..bytes] == pattern(which + peer as u64, bytes));
        }
        engine.finish_all(&sends).expect("sent");
    });
}

#[test]
fn opposite_long_sends_pass_each_other_and_may_be_received_in_another_order() {
    opposite::<MemoryLink>();
    opposite::<SocketLink>();
    opposite::<RingLink>();
}

fn any_source<W: Wire>() {
    const SIZE: usize = 13;
    const EACH: usize = 6;
    ranks::<W, _>(SIZE, 0x5eed_0013, |rank, engine| {
        if rank != 0 {
            for number in 0..EACH {
                engine.send(0, 3, &letter(rank, 0, number));
            }
            return;
        }
        let mut next = [0; SIZE];
        for _ in 0..EACH * (SIZE - 1) {
            let (envelope, data) = engine.recv(None, Some(3), 70_000);
            // The order of each source is kept too.
            assert!(data == letter(envelope.source, 0, next[envelope.source]), "from {}", envelope.source);
            next[envelope.source] += 1;
        }
        assert_eq!(next[1..], [EACH; SIZE - 1]);
    });
}

#[test]
fn thirteen_ranks_reach_a_receive_from_anyone_exactly_once_each() {
    any_source::<MemoryLink>();
    any_source::<SocketLink>();
    any_source::<RingLink>();
}

#[test]
fn a_progress_thread_of_another_rank_need_not_know_the_tickets() {
    let (_network, [a, mut b]) = TestNetwork::<SocketLink>::of(1);
    let data = pattern(5, 600_000);
    let (mut engine, taken) = (a, std::sync::atomic::AtomicBool::new(false));
    let send = engine.isend(1, 0, &data);
    thread::scope(|scope| {
        scope.spawn(|| {
            let (_, received) = b.recv(Some(0), None, data.len());
            assert!(received == data);
            taken.store(true, std::sync::atomic::Ordering::Release);
        });
        wait_until("the message was received", || {
            engine.wait_step(Duration::from_millis(1));
            taken.load(std::sync::atomic::Ordering::Acquire)
        });
    });
    engine.finish_all(&[send]).expect("sent");
}

/// A message in a random run, with its expected content.
struct Sent {
    to: usize,
    tag: u64,
    ticket: Ticket,
    data: Vec<u8>,
}

/// A receive in a random run: source, tag, ticket, memory.
type Expected = (usize, u64, Ticket, Vec<u8>);

/// Posts random requests on every rank in one thread. Each destination is known in advance from a plain model of the
/// rules: messages of one source and tag arrive in order.
fn random_traffic<W: Wire>(seed: u64, size: usize) {
    let mut random = Random(seed);
    let (_network, mut engines) = TestNetwork::<W>::new(size, seed);
    let mut sent: Vec<Vec<Sent>> = (0..size).map(|_| Vec::new()).collect();
    let mut received: Vec<Vec<Expected>> = (0..size).map(|_| Vec::new()).collect();
    // Every message has one receive with its exact source and tag, posted before or after it.
    let mut plan: Vec<(usize, usize, u64)> = (0..120).map(|_| (random.below(size), random.below(size), random.below(3) as u64)).collect();
    let mut owed = plan.clone();
    while !plan.is_empty() || !owed.is_empty() {
        if !plan.is_empty() && random.below(2) == 0 {
            let (from, to, tag) = plan.swap_remove(random.below(plan.len()));
            let bytes = [0, 1, 500, 5000, EAGER_BYTES, EAGER_BYTES + 1, 90_000, CHUNK_BYTES + 5][random.below(8)];
            let data = pattern(random.next(), bytes);
            let ticket = engines[from].isend(to, tag, &data);
            sent[from].push(Sent { to, tag, ticket, data });
        } else if !owed.is_empty() {
            let (from, to, tag) = owed.swap_remove(random.below(owed.len()));
            let mut into = vec![0; CHUNK_BYTES + 5];
            let ticket = engines[to].irecv(Some(from), Some(tag), &mut into);
            received[to].push((from, tag, ticket, into));
        }
        let rank = random.below(size);
        for _ in 0..random.below(4) {
            engines[rank].progress();
        }
    }
    pump(&mut engines.iter_mut().collect::<Vec<_>>());
    for to in 0..size {
        let mut taken = vec![0; size];
        for from in 0..size {
            for tag in 0..3 {
                let expected = sent[from].iter().filter(|message| (message.to, message.tag) == (to, tag));
                let mut got = received[to].iter().filter(|(source, t, _, _)| (*source, *t) == (from, tag));
                for message in expected {
                    let (_, _, ticket, into) = got.next().expect("as many receives as messages");
                    let envelope = engines[to].poll(*ticket).unwrap_or_else(|| panic!("seed {seed:#x}: {from} to {to} tag {tag} hangs"));
                    let envelope = envelope.expect("received well");
                    assert!(into[..envelope.bytes] == message.data, "seed {seed:#x}: {from} to {to} tag {tag}");
                    taken[from] += 1;
                }
            }
        }
        assert_eq!(taken.iter().sum::<usize>(), received[to].len());
    }
    for (rank, messages) in sent.iter().enumerate() {
        messages.iter().for_each(|message| assert!(engines[rank].outcome(message.ticket).is_ok()));
        assert!(engines[rank].matching_state.is_idle(), "seed {seed:#x}: rank {rank} still keeps something");
    }
}

#[test]
fn random_traffic_arrives_in_order() {
    for seed in 1..=if cfg!(miri) { 1 } else { 12 } {
        random_traffic::<MemoryLink>(u64::wrapping_mul(seed, 0x1234_5678_9abc_def1), 1 + (seed as usize) % 4);
        random_traffic::<SocketLink>(u64::wrapping_mul(seed, 0x0f1e_2d3c_4b5a_6978), 3);
        random_traffic::<RingLink>(u64::wrapping_mul(seed, 0x0f1e_2d3c_4b5a_6978), 3);
    }
}

/// Makes random sends, receives from any source, and cancellations of both. Returned memory does not change, nothing
/// hangs, and every complete received message is one that was sent.
fn random_cancels<W: Wire>(seed: u64) {
    const CAPACITY: usize = 2 * CHUNK_BYTES;
    let mut random = Random(seed);
    let (_network, mut engines) = TestNetwork::<W>::new(3, seed);
    // Messages contain their own number, so that received ones can be checked. The memory of a cancelled send is
    // overwritten.
    let mut sends: Vec<(usize, Ticket, Vec<u8>)> = Vec::new();
    let mut receives: Vec<(usize, Ticket, Vec<u8>)> = Vec::new();
    let mut given_back: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
    let mut contents: Vec<Vec<u8>> = Vec::new();
    let mut whole = 0;
    for _ in 0..400 {
        let rank = random.below(3);
        match random.below(8) {
            0 | 1 => {
                let bytes = [8, 5000, EAGER_BYTES + 9, CHUNK_BYTES + 5][random.below(4)];
                let mut data = pattern(random.next(), bytes);
                data[..8].copy_from_slice(&(contents.len() as u64).to_le_bytes());
                contents.push(data.clone());
                let ticket = engines[rank].isend((rank + 1 + random.below(2)) % 3, random.below(2) as u64, &data);
                sends.push((rank, ticket, data));
            }
            2 | 3 => {
                let mut into = vec![0; CAPACITY];
                let ticket = engines[rank].irecv(None, Some(random.below(2) as u64), &mut into);
                receives.push((rank, ticket, into));
            }
            4 if !sends.is_empty() => {
                let (rank, ticket, mut data) = sends.swap_remove(random.below(sends.len()));
                engines[rank].cancel(ticket);
                assert!(engines[rank].poll(ticket).is_none());
                data.fill(0xee);
            }
            5 if !receives.is_empty() => {
                let (rank, ticket, into) = receives.swap_remove(random.below(receives.len()));
                if let Some(outcome) = engines[rank].poll(ticket) {
                    whole += usize::from(check_content(outcome, &into, &contents, seed));
                } else {
                    engines[rank].cancel(ticket);
                    given_back.push((into.clone(), into));
                }
            }
            _ => {
                for _ in 0..random.below(6) {
                    engines[rank].progress();
                }
            }
        }
    }
    pump(&mut engines.iter_mut().collect::<Vec<_>>());
    for (rank, ticket, into) in receives {
        match engines[rank].poll(ticket) {
            Some(outcome) => whole += usize::from(check_content(outcome, &into, &contents, seed)),
            None => engines[rank].cancel(ticket),
        }
    }
    sends.iter().for_each(|(rank, ticket, _)| engines[*rank].cancel(*ticket));
    pump(&mut engines.iter_mut().collect::<Vec<_>>());
    assert!(given_back.iter().all(|(before, after)| before == after), "seed {seed:#x}: memory was touched after its cancel");
    for engine in &mut engines {
        drain_all(engine);
        assert!(engine.matching_state.is_idle(), "seed {seed:#x}: rank {} still keeps something", engine.rank);
    }
    assert!(whole > 5, "seed {seed:#x}: only {whole} messages were received whole");
}

/// Receives all remaining messages.
fn drain_all<W: Wire>(engine: &mut Messages<Usher<W>>) {
    let mut into = vec![0; 1 << 20];
    loop {
        let ticket = engine.irecv(None, None, &mut into);
        if engine.poll(ticket).is_none() {
            return engine.cancel(ticket);
        }
    }
}

fn check_content(outcome: crate::host::point_to_point::Outcome, into: &[u8], contents: &[Vec<u8>], seed: u64) -> bool {
    let Ok(envelope) = outcome else { return false };
    let number = u64::from_le_bytes(*into.first_chunk().expect("long enough")) as usize;
    assert!(into[..envelope.bytes] == contents[number], "seed {seed:#x}: message {number} came in changed");
    true
}

#[test]
fn cancelled_requests_let_go_of_their_memory() {
    for seed in 1..=if cfg!(miri) { 1 } else { 10 } {
        random_cancels::<MemoryLink>(u64::wrapping_mul(seed, 0x7654_3210_0f0f_0f0f));
        random_cancels::<SocketLink>(u64::wrapping_mul(seed, 0x0102_0304_0506_0709));
        random_cancels::<RingLink>(u64::wrapping_mul(seed, 0x0102_0304_0506_0709));
    }
}

/// Sends without a request if possible, and waits.
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

/// Receives without a request if possible, waits, and returns the message.
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
            // Sometimes the second one is received first, if the tags differ and the first need not be waited for.
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
        conversation::<RingLink>(seed);
    }
}

/// Returns two engines that have exchanged a message, so that their link exists.
fn acquainted<W: Wire>() -> [Messages<Usher<W>>; 2] {
    let (_network, [mut a, mut b]) = TestNetwork::<W>::of(12);
    send(&mut a, 1, 0, &[1]);
    assert_eq!(receive(&mut b, 0, 0, 1), [1]);
    [a, b]
}

fn no_request<W: Wire>() {
    let [mut a, mut b] = acquainted::<W>();
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
fn a_short_message_needs_no_request() {
    no_request::<SocketLink>();
    no_request::<RingLink>();
}

fn left_to_requests<W: Wire>() {
    let [mut a, mut b] = acquainted::<W>();
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
    // After a receive that was posted before.
    let mut first = [0; 1];
    let posted = b.irecv(None, None, &mut first);
    send(&mut a, 1, 4, &[1]);
    send(&mut a, 1, 4, &[2]);
    assert_eq!((receive(&mut b, 0, 4, 1), b.outcome(posted).is_ok(), first), (vec![2], true, [1]));
    assert!(a.matching_state.is_idle() && b.matching_state.is_idle());
}

#[test]
fn what_does_not_fit_or_is_not_meant_is_left_to_requests() {
    left_to_requests::<SocketLink>();
    left_to_requests::<RingLink>();
}
