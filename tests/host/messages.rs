//! Messages of every size and in every situation: empty, too long, of another type, to the rank itself, crossing, in
//! bursts, and from any rank.

use std::time::{Duration, Instant};

use crate::common::oracle::hash;
use crate::common::ranks::{Meeting, Wiring, communicators, each, patience, threads};

use collectives::{Communicator, Envelope, Error, Received, ReduceOp};

const SEED: u64 = 0x3e55;

/// Sizes on both sides of 64 KiB, up to which a message is sent at once, and large ones, which wait for their receive.
const SIZES: [usize; 8] = [0, 1, 1000, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 100_003, (3 << 20) + 1];

/// Returns a message's bytes, which differ for each pair and number.
fn bytes(from: usize, to: usize, number: usize, length: usize) -> Vec<u8> {
    (0..length.div_ceil(8)).flat_map(|at| hash(SEED + number as u64, from * 64 + to, at).to_le_bytes()).take(length).collect()
}

/// Checks that the communicator still works, for messages and for collectives.
fn assert_usable(comm: &Communicator) {
    let (n, me) = (comm.world_size(), comm.rank());
    let mut theirs = [0_u64];
    comm.send_recv(&[me as u64], (me + 1) % n, &mut theirs, (me + n - 1) % n).unwrap();
    assert_eq!(theirs[0] as usize, (me + n - 1) % n);
    let mut x = [1_u32];
    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
    assert_eq!(x, [n as u32]);
}

#[test]
fn every_size_into_a_buffer_that_fits_and_one_that_is_longer() {
    for wiring in Wiring::ALL {
        threads(wiring, 3, |comm| {
            for (number, size) in SIZES.into_iter().enumerate() {
                let (from, to) = (number % 3, (number + 1) % 3);
                for spare in [0, 1, 5000] {
                    let message = bytes(from, to, number, size);
                    if comm.rank() == from {
                        comm.send(&message, to).unwrap();
                    } else if comm.rank() == to {
                        let mut buffer = vec![0xee; size + spare];
                        let received = comm.recv(&mut buffer, from).unwrap();
                        assert_eq!(received, Received { source: from, tag: 0, count: size }, "{wiring:?}");
                        assert!(buffer[..size] == message, "{size} bytes, {wiring:?}");
                        assert!(buffer[size..].iter().all(|byte| *byte == 0xee), "behind {size} bytes, {wiring:?}");
                    }
                }
            }
            assert_usable(comm);
        });
    }
}

#[test]
fn counts_are_of_elements() {
    threads(Wiring::Shm, 2, |comm| {
        if comm.rank() == 0 {
            comm.send(&[[1_u16, 2, 3]; 7], 1).unwrap();
            comm.send(&[0.5_f64; 9], 1).unwrap();
            comm.send(&Vec::<f32>::new(), 1).unwrap();
        } else {
            let mut triples = [[0_u16; 3]; 10];
            assert_eq!(comm.recv(&mut triples, 0).unwrap().count, 7);
            assert_eq!((triples[6], triples[7]), ([1, 2, 3], [0; 3]));
            assert_eq!(comm.recv(&mut [0.0_f64; 9], 0).unwrap().count, 9);
            assert_eq!(comm.recv(&mut [9.0_f32], 0).unwrap().count, 0);
        }
    });
}

/// Whether the sender of `size` bytes gets an error if its message did not fit.
fn is_announced(size: usize) -> bool {
    size > 64 << 10
}

/// Checks the error of one end, which names the other end.
#[track_caller]
fn assert_unfit(error: &Error, other: usize) {
    assert!(matches!(error, Error::Message { .. }) && error.is_mismatch() && !error.is_poisoned(), "{error}");
    assert!(error.to_string().contains(&format!("rank {other}")), "{error}");
}

#[test]
fn a_message_that_is_too_long_concerns_its_two_ends_only() {
    for wiring in Wiring::ALL {
        threads(wiring, 3, |comm| {
            for size in [1, 1000, 64 << 10, (64 << 10) + 1, 1 << 20] {
                if comm.rank() == 0 {
                    let sent = comm.send(&vec![1_u8; size], 1);
                    match is_announced(size) {
                        true => assert_unfit(&sent.expect_err("too long"), 1),
                        false => sent.unwrap(),
                    }
                    comm.send(&vec![2_u8; size], 1).unwrap();
                } else if comm.rank() == 1 {
                    let mut short = vec![9_u8; size - 1];
                    let error = comm.recv(&mut short, 0).expect_err("too long");
                    assert_unfit(&error, 0);
                    assert!(error.to_string().contains(&format!("{size} B")), "{error}");
                    assert!(short.iter().all(|byte| *byte == 9), "the buffer was touched");
                    // The message is used up, so the next receive gets the next one.
                    let mut whole = vec![0_u8; size];
                    comm.recv(&mut whole, 0).unwrap();
                    assert!(whole.iter().all(|byte| *byte == 2), "{size}, {wiring:?}");
                }
            }
            assert_usable(comm);
        });
    }
}

#[test]
fn a_message_of_another_type_concerns_its_two_ends_only() {
    for wiring in Wiring::ALL {
        threads(wiring, 2, |comm| {
            for count in [1, 10_000] {
                if comm.rank() == 0 {
                    let sent = [comm.send(&vec![1.0_f32; count], 1), comm.send(&vec![[1_u8; 3]; count], 1)];
                    for (result, bytes) in sent.into_iter().zip([4 * count, 3 * count]) {
                        match is_announced(bytes) {
                            true => assert_unfit(&result.expect_err("another type"), 1),
                            false => result.unwrap(),
                        }
                    }
                } else {
                    // As many bytes per element, but of a different type.
                    let mut x = vec![7_i32; count];
                    let error = comm.recv(&mut x, 0).expect_err("another type");
                    assert_unfit(&error, 0);
                    assert!(error.to_string().contains("f32") && error.to_string().contains("i32"), "{error}");
                    assert!(x.iter().all(|x| *x == 7));
                    assert_unfit(&comm.recv(&mut vec![7_u8; 3 * count], 0).expect_err("another type"), 0);
                }
                assert_usable(comm);
            }
        });
    }
}

#[test]
fn opposite_large_sends_in_one_group() {
    for wiring in Wiring::ALL {
        for ranks in [2, 5] {
            threads(wiring, ranks, |comm| {
                let me = comm.rank();
                let peers: Vec<usize> = (0..ranks).filter(|peer| *peer != me).collect();
                let size = 1_000_003;
                let outgoing: Vec<Vec<u8>> = peers.iter().map(|to| bytes(me, *to, 0, size)).collect();
                let mut incoming = vec![vec![0; size]; peers.len()];
                let received = comm
                    .group(|group| {
                        // Sends come first. If they ran one after the other, they would wait for receives that come
                        // later.
                        peers.iter().zip(&outgoing).try_for_each(|(to, message)| group.send(message, *to))?;
                        peers.iter().zip(&mut incoming).try_for_each(|(from, buffer)| group.recv(buffer, *from))
                    })
                    .unwrap();
                assert_eq!(received.iter().map(|received| received.source).collect::<Vec<_>>(), peers);
                for (from, message) in peers.iter().zip(&incoming) {
                    assert!(*message == bytes(*from, me, 0, size), "from {from} to {me} of {ranks}, {wiring:?}");
                }
            });
        }
    }
}

#[test]
fn a_group_of_messages_and_collectives() {
    for wiring in Wiring::ALL {
        threads(wiring, 3, |comm| {
            let (next, previous) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
            for size in [10, 500_000] {
                let out = bytes(comm.rank(), next, 1, size);
                let (mut first, mut second) = (vec![0; size], vec![0_u64; 3]);
                let (mut sum, mut shared, mut gathered) = (vec![comm.rank() as i32; 1000], [comm.rank() as u16], [0_u16; 3]);
                let (own, share) = ([comm.rank() as u16 * 7], [comm.rank() as u64; 3]);
                let received = comm
                    .group(|group| {
                        group.recv(&mut first, previous)?;
                        group.all_reduce(&mut sum, ReduceOp::Sum)?;
                        group.send(&out, next)?;
                        group.broadcast(&mut shared, 2)?;
                        group.send(&share, Envelope::rank(previous).tag(8))?;
                        group.all_gather_into(&own, &mut gathered)?;
                        group.recv(&mut second, Envelope::rank(next).tag(8))
                    })
                    .unwrap();
                assert_eq!(received.iter().map(|got| (got.source, got.tag)).collect::<Vec<_>>(), [(previous, 0), (next, 8)]);
                assert!(first == bytes(previous, comm.rank(), 1, size));
                assert_eq!(second, [next as u64; 3]);
                assert_eq!((sum, shared, gathered), (vec![3; 1000], [2], [0, 7, 14]));
            }
        });
    }
}

#[test]
fn nothing_of_a_group_happens_where_its_closure_fails() {
    for wiring in Wiring::ALL {
        threads(wiring, 2, |comm| {
            let mut x = [0_u8];
            let failed = comm.group(|group| {
                group.send(&[1_u8], 1 - comm.rank())?;
                group.all_reduce(&mut x, ReduceOp::Sum)?;
                group.send(&[1_u8], 2)
            });
            assert!(matches!(failed, Err(Error::InvalidArgument { .. })), "{failed:?}");
            // Otherwise a message would be left over here, and a collective would be a mismatch.
            assert_usable(comm);
        });
    }
}

#[test]
fn a_ring_of_thirteen() {
    for wiring in Wiring::ALL {
        threads(wiring, 13, |comm| {
            let (next, previous) = ((comm.rank() + 1) % 13, (comm.rank() + 12) % 13);
            // Each rank's message goes around the whole ring.
            let mut message = bytes(comm.rank(), 0, 2, 90_000);
            for step in 1..=13 {
                let mut theirs = vec![0; message.len()];
                let received = comm.send_recv(&message, next, &mut theirs, previous).unwrap();
                assert_eq!((received.source, received.count), (previous, message.len()));
                message = theirs;
                assert!(message[..100] == bytes((comm.rank() + 13 - step) % 13, 0, 2, 100));
            }
            assert!(message == bytes(comm.rank(), 0, 2, 90_000), "{wiring:?}");
        });
    }
}

#[test]
fn nobody_is_kept_waiting_by_a_flood_from_someone_else() {
    const STOP: u64 = 1;
    const SENT: u64 = 2;
    for wiring in Wiring::ALL {
        threads(wiring, 3, |comm| match comm.rank() {
            0 => {
                let mut flood = 0;
                loop {
                    let received = comm.recv(&mut [0_u64; 100], Envelope::any()).unwrap();
                    if received.source == 2 {
                        break;
                    }
                    flood += 1;
                    if flood == 100 {
                        comm.send(&[1_u8], 2).unwrap();
                    }
                    assert!(flood < 200_000, "rank 2 is not heard, {wiring:?}");
                }
                // The flood ends, and all its messages arrive.
                comm.send(&[1_u8], Envelope::rank(1).tag(STOP)).unwrap();
                let mut sent = [0_u64];
                comm.recv(&mut sent, Envelope::rank(1).tag(SENT)).unwrap();
                for _ in flood..sent[0] {
                    assert_eq!(comm.recv(&mut [0_u64; 100], Envelope::any()).unwrap().source, 1);
                }
            }
            1 => {
                let stop = comm.start_recv([0_u8], Envelope::rank(0).tag(STOP)).unwrap();
                let mut sent = 0_u64;
                while !stop.is_done() {
                    comm.send(&[sent; 100], 0).unwrap();
                    sent += 1;
                }
                comm.send(&[sent], Envelope::rank(0).tag(SENT)).unwrap();
            }
            _ => {
                comm.recv(&mut [0_u8], 0).unwrap();
                comm.send(&[2_u64; 3], 0).unwrap();
            }
        });
    }
}

#[test]
fn messages_of_any_source_under_a_tag_and_from_oneself_too() {
    for wiring in Wiring::ALL {
        threads(wiring, 4, |comm| {
            if comm.rank() != 0 {
                comm.send(&[0_u32], Envelope::rank(0).tag(4)).unwrap();
                return comm.send(&vec![comm.rank() as u32; 50_000], Envelope::rank(0).tag(3)).unwrap();
            }
            let own = comm.start_send(vec![0_u32; 50_000], Envelope::rank(0).tag(3)).unwrap();
            let mut sources: Vec<usize> = (0..4)
                .map(|_| {
                    let mut x = vec![9_u32; 50_000];
                    let received = comm.recv(&mut x, Envelope::any().tag(3)).unwrap();
                    assert!(received.tag == 3 && x.iter().all(|x| *x as usize == received.source), "{received:?}");
                    received.source
                })
                .collect();
            sources.sort_unstable();
            assert_eq!(sources, [0, 1, 2, 3]);
            own.wait().unwrap();
            (1..4).for_each(|from| assert_eq!(comm.recv(&mut [9_u32], Envelope::rank(from).tag(4)).unwrap().count, 1));
        });
    }
}

#[test]
fn messages_to_oneself() {
    for wiring in Wiring::ALL {
        for ranks in [1, 3] {
            threads(wiring, ranks, |comm| {
                let me = comm.rank();
                for (number, size) in SIZES.into_iter().enumerate() {
                    let message = bytes(me, me, number, size);
                    let sending = comm.start_send(message.clone(), me).unwrap();
                    let mut buffer = vec![0; size];
                    assert_eq!(comm.recv(&mut buffer, me).unwrap(), Received { source: me, tag: 0, count: size });
                    assert!(buffer == message && sending.wait().unwrap() == message, "{size}");

                    let receiving = comm.start_recv(vec![0; size], me).unwrap();
                    comm.send(&message, me).unwrap();
                    assert!(receiving.wait().unwrap().0 == message, "{size}");

                    let mut buffer = vec![0; size];
                    comm.send_recv(&message, me, &mut buffer, me).unwrap();
                    assert!(buffer == message, "{size}");

                    let mut buffer = vec![0; size];
                    comm.group(|group| {
                        group.send(&message, me)?;
                        group.recv(&mut buffer, me)
                    })
                    .unwrap();
                    assert!(buffer == message, "{size}");
                }
                // A message to the rank itself that does not fit is an error at both its ends.
                let sending = comm.start_send([1_u8; 10], me).unwrap();
                assert_unfit(&comm.recv(&mut [0_u8; 9], me).expect_err("too long"), me);
                drop(sending);
                // No other rank could receive it, and its receive learns that the send was given up.
                comm.set_timeout(Duration::from_millis(20));
                assert!(comm.send(&vec![0_u8; 1 << 20], me).expect_err("there is no receive").is_timeout());
                let told = comm.recv(&mut [0_u8], me).expect_err("it was given up");
                assert!(matches!(told, Error::Message { .. }), "{told}");
                assert!(comm.recv(&mut [0_u8], me).expect_err("there is no send").is_timeout());
                comm.set_timeout(Duration::from_secs(20));
                assert_usable(comm);
            });
        }
    }
}

#[test]
fn tags_keep_messages_apart_and_in_order() {
    for wiring in Wiring::ALL {
        threads(wiring, 2, |comm| {
            let other = 1 - comm.rank();
            let length = |number: u64| if number.is_multiple_of(7) { 20_000 } else { 30 };
            let works: Vec<_> = (0..60)
                .map(|number: u64| comm.start_send(vec![number; length(number)], Envelope::rank(other).tag(number % 3)).unwrap())
                .collect();
            for tag in [2, 0, (1 << 63) - 1, 1] {
                if tag > 2 {
                    // The largest tag.
                    comm.send(&[tag], Envelope::rank(other).tag(tag)).unwrap();
                    let mut x = [0_u64];
                    assert_eq!(comm.recv(&mut x, Envelope::rank(other).tag(tag)).unwrap().tag, tag);
                    assert_eq!(x, [tag]);
                    continue;
                }
                for number in (tag..60).step_by(3) {
                    let mut x = vec![u64::MAX; 20_000];
                    let received = comm.recv(&mut x, Envelope::rank(other).tag(tag)).unwrap();
                    assert_eq!((received.count, x[0], x[received.count - 1]), (length(number), number, number), "tag {tag}, {wiring:?}");
                }
            }
            works.into_iter().for_each(|work| drop(work.wait().unwrap()));
        });
    }
}

#[test]
fn a_thousand_small_messages_each_way_at_once() {
    for wiring in Wiring::ALL {
        threads(wiring, 2, |comm| {
            let other = 1 - comm.rank();
            let receive_all = || {
                for number in 0..1000_u32 {
                    let mut x = [0_u32; 20];
                    comm.recv(&mut x, other).unwrap();
                    assert_eq!(x, [number * 2 + other as u32; 20], "{wiring:?}");
                }
            };
            // In the background first, then with calls that return once the message is on its way.
            let message = |number: u32| [number * 2 + comm.rank() as u32; 20];
            let works: Vec<_> = (0..1000).map(|number| comm.start_send(message(number), other).unwrap()).collect();
            receive_all();
            works.into_iter().for_each(|work| assert_eq!(work.wait().unwrap().len(), 20));
            (0..1000).for_each(|number| comm.send(&message(number), other).unwrap());
            receive_all();
        });
    }
}

#[test]
fn what_nobody_receives_yet_is_buffered_within_bounds_and_holds_nobody_else_up() {
    for wiring in Wiring::ALL {
        threads(wiring, 3, |comm| match comm.rank() {
            0 => {
                // 48 MiB in short messages. At most a third of 64 MiB is buffered.
                let mut works: Vec<_> = (0..3072).map(|number| comm.start_send(vec![number as u8; 16 << 10], 1).unwrap()).collect();
                let last = works.split_off(500);
                works.into_iter().for_each(|work| assert_eq!(work.wait().unwrap().len(), 16 << 10));
                assert!(!last[2571].is_done(), "everything is buffered, {wiring:?}");
                comm.send(&[1_u8], 2).unwrap();
                last.into_iter().for_each(|work| assert_eq!(work.wait().unwrap().len(), 16 << 10));
            }
            1 => {
                let mut x = vec![0_u8; 16 << 10];
                assert_eq!(comm.recv(&mut x, 2).unwrap().count, 1);
                for number in 0..3072 {
                    comm.recv(&mut x, 0).unwrap();
                    assert!(x.iter().all(|byte| *byte == number as u8), "message {number}, {wiring:?}");
                }
            }
            _ => {
                comm.recv(&mut [0_u8], 0).unwrap();
                comm.send(&[1_u8], 1).unwrap();
            }
        });
    }
}

#[test]
fn what_a_rank_sent_before_it_left_arrives_even_if_its_peer_still_writes() {
    // Less than the credit, more than the systems of both ends keep for a link.
    const MESSAGES: u32 = 1000;
    for wiring in Wiring::ALL {
        for _ in 0..5 {
            each(communicators(wiring, 2), |comm| {
                if comm.rank() == 0 {
                    return (0..MESSAGES).for_each(|number| comm.send(&vec![number; 4096], 1).unwrap());
                }
                let mut x = vec![0; 4096];
                for number in 0..MESSAGES {
                    comm.recv(&mut x, 0).unwrap();
                    assert!(x.iter().all(|value| *value == number), "message {number}, {wiring:?}");
                    // Rank 0 may have left.
                    let _ = comm.send(&[1_u8], 0);
                }
            });
        }
    }
}

#[test]
fn ranks_exchange_messages_while_others_are_in_a_collective() {
    for wiring in Wiring::ALL {
        threads(wiring, 4, |comm| {
            // Two of the ranks exchange messages while the other two wait in the barrier.
            for (a, b) in [(0, 1), (2, 3), (0, 2), (1, 3), (0, 3), (1, 2)] {
                if [a, b].contains(&comm.rank()) {
                    let other = a + b - comm.rank();
                    for size in [100, 200_000] {
                        let mut theirs = vec![0; size];
                        comm.send_recv(&bytes(comm.rank(), other, 3, size), other, &mut theirs, other).unwrap();
                        assert!(theirs == bytes(other, comm.rank(), 3, size), "{wiring:?}");
                    }
                }
                comm.barrier().unwrap();
                let mut x = [comm.rank() as u64; 3];
                comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                assert_eq!(x, [6; 3]);
            }
        });
    }
}

#[test]
fn messages_and_collectives_do_not_disturb_each_other() {
    for wiring in Wiring::ALL {
        threads(wiring, 3, |comm| {
            let (next, previous) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
            for round in 0..20 {
                let size = [10, 90_000, 300_000][round % 3];
                let sending = comm.start_send(bytes(comm.rank(), next, round, size), next).unwrap();
                let receiving = comm.start_recv(vec![0; size], previous).unwrap();
                let started = comm.start_all_reduce(vec![1_u32; size / 10], ReduceOp::Sum).unwrap();
                let mut x = vec![comm.rank() as i64; 1000];
                comm.all_reduce(&mut x, ReduceOp::Max).unwrap();
                assert_eq!(x, [2; 1000]);
                assert!(receiving.wait().unwrap().0 == bytes(previous, comm.rank(), round, size), "round {round}, {wiring:?}");
                assert_eq!(started.wait().unwrap(), vec![3; size / 10]);
                drop(sending.wait().unwrap());
            }
        });
    }
}

/// A message whose sender waits for its receive.
const LONG: usize = 1 << 20;

#[test]
fn a_receive_is_told_at_once_that_its_sender_gave_up() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        // Also on a link that the other rank has not yet seen.
        for (started, is_open) in [(false, true), (true, true), (false, false), (true, false)] {
            let met = Meeting::new(2);
            threads(wiring, 2, |comm| {
                if is_open {
                    assert_usable(comm);
                }
                if comm.rank() == 0 {
                    let to = Envelope::rank(1).timeout(Duration::from_millis(50));
                    let error = if started {
                        comm.start_send(vec![1_u8; LONG], to).unwrap().wait().unwrap_err()
                    } else {
                        comm.send(&vec![1_u8; LONG], to).unwrap_err()
                    };
                    assert!(error.is_timeout() && error.to_string().contains("the message was not sent"), "{error}");
                    drop(comm.start_send(vec![2_u8; LONG], 1).unwrap());
                    drop(comm.start_send([3_u8], 1).unwrap());
                    met.meet();
                    return met.meet();
                }
                met.meet();
                // The receive's own deadline is a minute away.
                let (began, mut x) = (Instant::now(), vec![0_u8; LONG]);
                let error = comm.recv(&mut x, 0).unwrap_err();
                assert!(began.elapsed() < patience(20), "{:?}", began.elapsed());
                let words = error.to_string();
                assert!(matches!(error, Error::Message { .. }) && words.contains("rank 0 gave up sending this message after"), "{words}");
                assert!(x.iter().all(|byte| *byte == 0));
                // The messages behind it are not affected.
                for (expected, count) in [(2, LONG), (3, 1)] {
                    assert_eq!((comm.recv(&mut x, Envelope::any()).unwrap().count, x[0]), (count, expected));
                }
                met.meet();
            });
        }
    }
}

#[test]
fn a_message_whose_receive_gives_up_in_the_middle_is_kept_for_the_next() {
    const BYTES: usize = 8 << 20;
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        for started in [false, true] {
            let met = Meeting::new(2);
            let given_up = threads(wiring, 2, |comm| {
                let (mut kept, mut x) = (0, vec![0_u8; BYTES]);
                for round in 1..=6_u8 {
                    met.meet();
                    if comm.rank() == 1 {
                        x.fill(round);
                        comm.send(&x, 0).unwrap();
                        continue;
                    }
                    let from = Envelope::rank(1).timeout(Duration::from_micros(700));
                    let receive = |x: &mut Vec<u8>| match started {
                        false => comm.recv(x, from),
                        true => comm.start_recv(std::mem::take(x), from).unwrap().wait().map(|(got, received)| {
                            *x = got;
                            received
                        }),
                    };
                    while let Err(error) = receive(&mut x) {
                        assert!(error.is_timeout(), "{error}");
                        kept += usize::from(error.to_string().contains("it is kept for the next receive"));
                        x.resize(BYTES, 0);
                    }
                    assert!(x.iter().all(|byte| *byte == round), "{wiring:?}, started: {started}, message {round}");
                }
                kept
            });
            assert!(given_up[0] > 0, "no receive gave up in the middle of a message: the test tests nothing");
        }
    }
}

#[test]
fn the_rest_of_a_message_whose_receive_gave_up_comes_in_while_its_rank_is_busy_elsewhere() {
    const BYTES: usize = 16 << 20;
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        let is_sent = Meeting::new(2);
        threads(wiring, 2, |comm| {
            if comm.rank() == 1 {
                let to = |tag| Envelope::rank(0).tag(tag).timeout(patience(20));
                let long = comm.start_send(bytes(1, 0, 0, BYTES), to(1)).unwrap();
                comm.send(&[1_u8], to(2)).unwrap();
                long.wait().unwrap();
                // It does not hold up later messages either.
                (0..8).for_each(|number| comm.send(&bytes(1, 0, number, 1000), to(3)).unwrap());
                return is_sent.meet();
            }
            comm.recv(&mut [0_u8], Envelope::rank(1).tag(2)).unwrap();
            // It was announced before the short message came, so it has begun.
            let mut x = vec![0_u8; BYTES];
            let error = comm.recv(&mut x, Envelope::rank(1).tag(1).timeout(Duration::from_nanos(1))).unwrap_err();
            assert!(error.to_string().contains("it is kept for the next receive"), "{error}");
            // No call moves messages meanwhile.
            is_sent.meet();
            comm.recv(&mut x, Envelope::rank(1).tag(1)).unwrap();
            assert!(x == bytes(1, 0, 0, BYTES), "{wiring:?}");
            for number in 0..8 {
                let mut x = [0_u8; 1000];
                comm.recv(&mut x, Envelope::rank(1).tag(3)).unwrap();
                assert!(x[..] == bytes(1, 0, number, 1000), "message {number}, {wiring:?}");
            }
        });
    }
}

#[test]
fn a_message_that_went_out_before_a_late_receive_is_named_and_arrives() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        threads(wiring, 2, |comm| {
            let other = 1 - comm.rank();
            let mut came = [0_u8];
            // The first exchange opens the links. From the second on, a send leaves without waiting.
            for number in 0..3_u8 {
                let sent = comm.send_recv(&[number], other, &mut came, other).unwrap();
                assert_eq!((sent.source, came), (other, [number]));
                let nothing = Envelope::rank(other).tag(2).timeout(Duration::from_millis(20));
                let error = comm.send_recv(&[number + 10], Envelope::rank(other).tag(1), &mut [0_u8], nothing).unwrap_err();
                let words = error.to_string();
                assert!(error.is_timeout() && words.contains("tag 2; 1 of the 2 messages of this call had ended"), "{words}");
                comm.recv(&mut came, Envelope::rank(other).tag(1)).unwrap();
                assert_eq!(came, [number + 10]);
                // Neither rank leaves or sends more while the other still waits.
                comm.barrier().unwrap();
            }
        });
    }
}

#[test]
fn the_error_of_a_group_says_how_many_of_its_messages_have_ended() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        threads(wiring, 2, |comm| {
            let other = 1 - comm.rank();
            let (mut came, mut never) = ([0_u8], [0_u8]);
            let exchanged = comm.with_timeout(Duration::from_millis(100)).group(|group| {
                group.recv(&mut never, Envelope::rank(other).tag(2))?;
                group.send(&[7_u8], Envelope::rank(other).tag(1))?;
                group.recv(&mut came, Envelope::rank(other).tag(1))
            });
            let error = exchanged.unwrap_err();
            let words = error.to_string();
            assert!(error.is_timeout() && words.contains("tag 2; "), "{words}");
            assert!(words.contains("of the 3 messages of this call had ended"), "{words}");
            assert_usable(comm);
        });
    }
}
