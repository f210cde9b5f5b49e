//! Whole communicators of the threads of one process, with buffers that are lent, given away, shared and dropped. They
//! are small enough for Miri, which checks every access (`tests/sanitize miri`). The integration tests check results
//! at every size and over every transport.

#![expect(unsafe_code, reason = "looks at truth values as the bytes that they are")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use super::Communicator;
use crate::call::Collective;
use crate::call::algorithm::Algorithm;
use crate::call::buffer::{Memory, MemoryMut};
use crate::call::element::{DType, TypeTag};
use crate::call::op::{CustomOp, ReduceOp, Reduction};
use crate::communicator::Envelope;
use crate::communicator::prepare::prepared::{Prepared, Source};
use crate::communicator::work::message::{MessageBuffer, MessageContext};
use crate::config::Transport;
use crate::error::Result;
use crate::host::backend;
use crate::host::reduce::Kernel;
use crate::meeting::Meeting;

/// Element counts that fit in one line, in several lines, and in a slot.
const COUNTS: [usize; 3] = [2, 40, 700];

/// Runs `program` on two ranks that share memory.
fn two<R: Send>(program: impl Fn(&Communicator) -> Result<R> + Sync) -> Vec<R> {
    let builder = Communicator::builder().configure(|config| {
        config.transport = Transport::Shm;
        config.timeout = Duration::from_secs(60);
    });
    builder.run_local(2, program).unwrap()
}

/// Returns a rank's contribution.
fn own(comm: &Communicator, count: usize) -> Vec<u64> {
    (0..count as u64).map(|index| index * 3 + comm.rank() as u64).collect()
}

/// Returns the sum of both ranks' contributions.
fn sum(count: usize) -> Vec<u64> {
    (0..count as u64).map(|index| index * 6 + 1).collect()
}

/// Returns both contributions, one after the other.
fn both(count: usize) -> Vec<u64> {
    (0..2).flat_map(|rank| (0..count as u64).map(move |index| index * 3 + rank)).collect()
}

#[test]
fn the_way_of_a_call_has_a_name() {
    two(|comm| {
        let way = |collective, bytes| comm.algorithm(collective, bytes, DType::F32);
        assert_eq!(
            (way(Collective::Barrier, 0), way(Collective::AllReduce, 4), way(Collective::AllReduce, 16 << 10)),
            (Some(Algorithm::Flags), Some(Algorithm::Mailboxes), Some(Algorithm::Slots))
        );
        assert_eq!(
            (way(Collective::AllReduce, 1 << 20), way(Collective::Reduce, 1 << 20)),
            (Some(Algorithm::Shares), Some(Algorithm::Shares))
        );
        assert_eq!(
            (way(Collective::Broadcast, 1 << 20), way(Collective::AllToAll, 8), way(Collective::AllToAllV, 4)),
            (Some(Algorithm::Slots), Some(Algorithm::Mailboxes), Some(Algorithm::Links))
        );
        Ok(())
    });
    assert_eq!(Communicator::local(1).unwrap()[0].algorithm(Collective::AllGather, 8, DType::U8), Some(Algorithm::Copy));
}

#[test]
fn lent_buffers_get_their_results() {
    two(|comm| {
        let me = comm.rank();
        for count in COUNTS {
            let mut buffer = own(comm, count);
            comm.all_reduce(&mut buffer, ReduceOp::Sum)?;
            assert_eq!(buffer, sum(count));
            let mut wide = vec![0; 2 * count];
            comm.all_gather_into(&own(comm, count), &mut wide)?;
            assert_eq!(wide, both(count));
            comm.all_to_all(&mut wide)?;
            assert!(wide[..count] == both(count)[me * count..(me + 1) * count] && wide[count..] == wide[..count]);
            let mut part = vec![0; count];
            comm.reduce_scatter_into(&[own(comm, count), own(comm, count)].concat(), &mut part, ReduceOp::Sum)?;
            assert_eq!(part, sum(count));
            comm.broadcast(&mut buffer, 1)?;
            let mut root = own(comm, count);
            comm.reduce(&mut root, 0, ReduceOp::Max)?;
            assert_eq!(root, both(count)[count..]);
            comm.gather_into(&own(comm, count), (me == 1).then_some(&mut wide), 1)?;
            comm.scatter_into((me == 1).then_some(&wide), &mut part, 1)?;
            assert_eq!(part, own(comm, count));
            let digits = CustomOp::new("xor", |into: &mut [[u8; 3]], from: &[[u8; 3]]| {
                into.iter_mut().flatten().zip(from.iter().flatten()).for_each(|(into, from)| *into ^= from);
            });
            let mut odd = vec![[me as u8 + 1; 3]; count];
            comm.all_reduce(&mut odd, &digits)?;
            assert_eq!(odd, vec![[3; 3]; count]);
        }
        Ok(())
    });
}

#[test]
fn buffers_that_were_given_away_come_back_or_are_freed() {
    two(|comm| {
        let [small, large] = [3, 600].map(|count| comm.start_all_reduce(own(comm, count), ReduceOp::Sum));
        let inline = comm.start_all_gather_into([comm.rank() as u16; 5], [0_u16; 10])?;
        // No thread waits for it, and its buffer is dropped with it.
        drop(comm.start_broadcast(own(comm, 500), 0)?);
        let refused = comm.start_reduce(own(comm, 5), 7, ReduceOp::Sum).expect_err("there is no rank 7");
        assert!(refused.to_string().contains('7'), "{refused}");
        assert_eq!(inline.wait()?.1, [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]);
        assert_eq!((small?.wait()?, large?.wait()?), (sum(3), sum(600)));
        comm.barrier()
    });
}

#[test]
fn messages_are_lent_or_given_away() {
    two(|comm| {
        let (me, peer) = (comm.rank(), 1 - comm.rank());
        for count in COUNTS {
            let mut got = vec![0; count];
            comm.send_recv(&own(comm, count), peer, &mut got, peer)?;
            assert_eq!(got, both(count)[peer * count..(peer + 1) * count]);
            let receive = comm.start_recv(vec![0; count], peer)?;
            let send = comm.start_send(own(comm, count), peer)?;
            assert_eq!(receive.wait()?.0, got);
            assert_eq!(send.wait()?, own(comm, count));
            // To the rank itself: the data goes directly from one buffer to the other.
            let receive = comm.start_recv([0_u64; 4], me)?;
            comm.send(&[7_u64, 8], me)?;
            assert_eq!(receive.wait()?.0, [7, 8, 0, 0]);
            if me == 0 { comm.send(&got, 1) } else { comm.recv(&mut got, 0).map(|_| ()) }?;
        }
        let (mut one, mut two, mine) = ([0_u64; 3], [me as u64], own(comm, 3));
        comm.group(|group| {
            group.send(&mine, peer)?;
            group.recv(&mut one, peer)?;
            group.all_reduce(&mut two, ReduceOp::Sum)
        })?;
        assert_eq!((one.as_slice(), two), (&both(3)[peer * 3..(peer + 1) * 3], [1]));
        // No rank sends to this receive: the crate owns its buffer until the communicator is dropped.
        drop(comm.start_recv(vec![0_u64; 100], Envelope::rank(peer).tag(9))?);
        comm.barrier()
    });
}

#[test]
fn shared_buffers_are_read_where_they_lie_and_dropped_at_any_time() {
    two(|comm| {
        let mut buffer = comm.alloc::<u64>(3000)?;
        let mut result = comm.alloc::<u64>(3000)?;
        for count in [40, 3000] {
            buffer[..count].copy_from_slice(&own(comm, count));
            comm.all_reduce_into(&buffer[..count], &mut result[..count], ReduceOp::Sum)?;
            assert_eq!(result[..count], sum(count));
            let mut wide = vec![0; 2 * count];
            comm.all_gather_into(&buffer[..count], &mut wide)?;
            assert_eq!(wide, both(count));
            let mut half = vec![0; count / 2];
            comm.reduce_scatter_into(&buffer[..count], &mut half, ReduceOp::Sum)?;
            assert_eq!(half, sum(count)[comm.rank() * count / 2..][..count / 2]);
        }
        if comm.rank() == 0 {
            drop(result);
            comm.barrier()?;
        } else {
            comm.barrier()?;
            assert_eq!(result[..], sum(3000));
        }
        let buffer = comm.start_all_reduce(buffer, ReduceOp::Sum)?.wait()?;
        assert_eq!(buffer[..], sum(3000));
        comm.barrier()
    });
}

#[test]
fn an_op_that_panics_takes_no_buffer_with_it() {
    two(|comm| {
        let rank = comm.rank();
        let op = CustomOp::new("brittle", move |into: &mut [u64], from: &[u64]| {
            assert_ne!(rank, 0, "a panic that the test wants");
            into.iter_mut().zip(from).for_each(|(into, from)| *into += from);
        });
        let mut buffer = own(comm, 700);
        let first = catch_unwind(AssertUnwindSafe(|| comm.all_reduce(&mut buffer, &op)));
        assert!(rank != 0 || first.is_err());
        let later = comm.start_all_reduce(own(comm, 700), &op).and_then(|work| work.wait()).expect_err("the communicator is ended");
        assert!(later.is_poisoned() || later.is_peer_lost(), "{later}");
        Ok(())
    });
}

#[test]
fn an_abort_gives_back_what_was_on_its_way() {
    two(|comm| {
        let started = comm.start_all_reduce(own(comm, 700), ReduceOp::Sum)?;
        started.wait()?;
        if comm.rank() == 1 {
            comm.recv(&mut [0_u64; 2], 0).expect_err("rank 0 sends nothing");
            return Ok(());
        }
        let (handle, (tell, hear)) = (comm.abort_handle(), channel());
        std::thread::scope(|scope| {
            // Dropped if this thread fails, which ends the other thread's wait.
            let tell = tell;
            scope.spawn(move || {
                let _ = hear.recv();
                handle.abort();
            });
            let (reduction, receive) = (comm.start_all_reduce(own(comm, 700), ReduceOp::Sum)?, comm.start_recv(vec![0_u64; 9], 1)?);
            let _ = tell.send(());
            assert!(receive.wait().is_err() && reduction.wait().is_err());
            Ok(())
        })
    });
}

#[test]
fn handles_and_groups_outlive_what_they_came_from() {
    let works = two(|comm| {
        let split = comm.split(Some(0), -(comm.rank() as i64))?.expect("everyone is in it");
        let work = split.start_all_reduce(own(comm, 100), ReduceOp::Sum)?;
        assert_eq!(split.rank(), 1 - comm.rank());
        Ok(work)
    });
    for work in works {
        assert_eq!(work.wait().unwrap(), sum(100));
    }
}

// Truth values from a rank that sends arbitrary bytes: no byte except 0 and 1 may be in a destination, or reach a
// custom op. Buffers are bytes here, which the calls treat as truth values: the tests never make a `bool` of an
// invalid byte.

/// Element counts that fit in one line, in several lines, in a slot, in shares and in several pieces.
const TRUTH_COUNTS: [usize; 4] = [2, 40, 700, if cfg!(miri) { 1000 } else { 3 << 20 }];

const TRANSPORTS: &[Transport] = if cfg!(miri) { &[Transport::Shm] } else { &[Transport::Shm, Transport::Tcp] };

/// Returns the bytes of a rank: rank 1 sends invalid ones, rank 0 truth values.
fn said(rank: usize, count: usize) -> Vec<u8> {
    (0..count).map(|at| if rank == 1 { (at % 251) as u8 + 5 } else { (at % 2) as u8 }).collect()
}

/// Runs a call that was prepared on bytes as a call on truth values.
fn run(comm: &Communicator, prepared: Result<Prepared<'_>>, reduction: Option<&Reduction<bool>>) -> Result<()> {
    let Prepared::Host(mut job, _) = prepared? else { unreachable!("one buffer of the host") };
    job.call.element = TypeTag::Scalar(DType::Bool);
    if let Some(reduction) = reduction {
        job.reduction = Some(backend::Reduction::new(Kernel::of(reduction, TypeTag::of::<bool>(), comm.world_size())?, None));
    }
    comm.run(&job)
}

/// Runs `program` on two ranks, over each transport and with each count.
fn everywhere(program: impl Fn(&Communicator, usize) -> Result<()> + Sync) {
    for transport in TRANSPORTS {
        for count in TRUTH_COUNTS {
            Communicator::builder().configure(|config| config.transport = *transport).run_local(2, |comm| program(comm, count)).unwrap();
        }
    }
}

#[track_caller]
fn all_are_truths(what: &str, bytes: &[u8]) {
    assert_eq!(bytes.iter().position(|byte| *byte > 1), None, "{what}");
}

#[test]
fn no_byte_but_0_and_1_is_gathered_scattered_or_exchanged() {
    everywhere(|comm, count| {
        let (mine, me) = (said(comm.rank(), count), comm.rank());
        let (source, mut all, mut one) = (Memory::from(&mine[..]), vec![0; 2 * count], vec![0; count]);
        run(comm, comm.prepare_all_gather(Some(source), MemoryMut::from(&mut all[..])), None)?;
        all_are_truths("all_gather", &all);
        assert!(all[..count] == said(0, count) && all[count..].iter().all(|byte| *byte == 1));
        all.fill(0);
        run(comm, comm.prepare_all_gather_v(Some(source), MemoryMut::from(&mut all[..]), &[count, count]), None)?;
        all_are_truths("all_gather_v", &all);
        all.fill(0);
        run(comm, comm.prepare_gather(Source::Separate(source), (me == 0).then_some(MemoryMut::from(&mut all[..])), count, 0), None)?;
        all_are_truths("gather", &all);
        all.fill(0);
        let counts = [count, count];
        let destination = (me == 0).then_some((MemoryMut::from(&mut all[..]), &counts[..]));
        run(comm, comm.prepare_gather_v(source, destination, 0), None)?;
        all_are_truths("gather_v", &all);
        let wide = [&mine[..], &mine].concat();
        run(comm, comm.prepare_all_to_all(Source::Separate(Memory::from(&wide[..])), MemoryMut::from(&mut all[..])), None)?;
        all_are_truths("all_to_all", &all);
        all.fill(0);
        run(comm, comm.prepare_all_to_all_v(Memory::from(&wide[..]), &counts, MemoryMut::from(&mut all[..]), &counts), None)?;
        all_are_truths("all_to_all_v", &all);
        let mut list = [vec![0; count], vec![0; count]];
        run(comm, comm.prepare_all_gather_list(&mine, &mut list), None)?;
        list.iter().for_each(|block| all_are_truths("all_gather_list", block));
        assert!(list[1].iter().all(|byte| *byte == 1));
        let from = if me == 1 { Source::Separate(Memory::from(&wide[..])) } else { Source::Nothing };
        run(comm, comm.prepare_scatter(from, MemoryMut::from(&mut one[..]), count, 1), None)?;
        all_are_truths("scatter", &one);
        one.fill(0);
        let from = (me == 1).then_some((Memory::from(&wide[..]), &counts[..]));
        run(comm, comm.prepare_scatter_v(from, MemoryMut::from(&mut one[..]), 1), None)?;
        all_are_truths("scatter_v", &one);
        one.copy_from_slice(&mine);
        run(comm, comm.prepare_broadcast(Source::InPlace, MemoryMut::from(&mut one[..]), 1), None)?;
        all_are_truths("broadcast", &one);
        Ok(())
    });
}

#[test]
fn no_byte_but_0_and_1_is_reduced() {
    for op in [ReduceOp::BitOr, ReduceOp::BitXor, ReduceOp::Sum, ReduceOp::Min] {
        everywhere(|comm, count| {
            let (mine, reduction) = (said(comm.rank(), count), Reduction::from(op));
            let (mut one, of_bytes) = (vec![0; count], Reduction::from(ReduceOp::BitOr));
            let prepared = comm.prepare_all_reduce(Source::Separate(Memory::from(&mine[..])), MemoryMut::from(&mut one[..]), &of_bytes);
            run(comm, prepared, Some(&reduction))?;
            all_are_truths("all_reduce", &one);
            let part = &mut one[..count / 2];
            let prepared = comm.prepare_reduce_scatter(Some(Memory::from(&mine[..])), MemoryMut::from(part), &of_bytes);
            run(comm, prepared, Some(&reduction))?;
            all_are_truths("reduce_scatter", &one);
            let into = Some(MemoryMut::from(&mut one[..]));
            run(comm, comm.prepare_reduce(Source::Separate(Memory::from(&mine[..])), into, count, 0, &of_bytes), Some(&reduction))?;
            all_are_truths("reduce", &one);
            Ok(())
        });
    }
}

#[test]
fn a_custom_op_sees_no_byte_but_0_and_1() {
    let largest = Arc::new(AtomicU8::new(0));
    let seen = Arc::clone(&largest);
    let either = Reduction::<bool>::from(CustomOp::new("either", move |into: &mut [bool], from: &[bool]| {
        let bytes = |values: &[bool]| values.as_ptr_range();
        for range in [bytes(into), bytes(from)] {
            // SAFETY: a slice of one-byte elements, all initialised, read as the bytes that they are.
            let bytes = unsafe { std::slice::from_raw_parts(range.start.cast::<u8>(), range.end.addr() - range.start.addr()) };
            seen.fetch_max(bytes.iter().copied().max().unwrap_or(0), Ordering::Relaxed);
        }
        into.iter_mut().zip(from).for_each(|(into, from)| *into |= *from);
    }));
    everywhere(|comm, count| {
        let (mine, of_bytes) = (said(comm.rank(), count), Reduction::from(ReduceOp::BitOr));
        let mut one = vec![0; count];
        let prepared = comm.prepare_all_reduce(Source::Separate(Memory::from(&mine[..])), MemoryMut::from(&mut one[..]), &of_bytes);
        run(comm, prepared, Some(&either))?;
        assert!(one.iter().all(|byte| *byte == 1));
        Ok(())
    });
    assert_eq!(largest.load(Ordering::Relaxed), 1);
}

#[test]
fn what_a_panicking_op_leaves_behind_is_0_or_1() {
    // Some pieces succeed, so that the other rank's part of them has been fetched. (Under Miri that would take too
    // long.)
    let (count, well) = if cfg!(miri) { (40_000, 1) } else { (8 << 20, 250) };
    let (meet, turns) = (Meeting::new(2), Arc::new(AtomicU8::new(0)));
    Communicator::builder()
        .configure(|config| config.transport = Transport::Shm)
        .run_local(2, |comm| {
            let (mine, of_bytes) = (said(comm.rank(), count), Reduction::from(ReduceOp::BitOr));
            let mut one = vec![0; count];
            let prepared = comm.prepare_all_reduce(Source::Separate(Memory::from(&mine[..])), MemoryMut::from(&mut one[..]), &of_bytes);
            let Prepared::Host(mut job, _) = prepared? else { unreachable!("buffers of the host") };
            job.call.element = TypeTag::Scalar(DType::Bool);
            let turns = Arc::clone(&turns);
            let kernel = if comm.rank() == 1 {
                // The result of this op is not a truth value.
                Kernel::of(&Reduction::<u8>::from(CustomOp::new("x", |into: &mut [u8], _: &[u8]| into.fill(0xff))), TypeTag::of::<u8>(), 2)?
            } else {
                let fold = move |_: &mut [bool], _: &[bool]| assert!(turns.fetch_add(1, Ordering::Relaxed) < well, "enough");
                Kernel::of(&Reduction::<bool>::from(CustomOp::new("x", fold)), TypeTag::of::<bool>(), 2)?
            };
            job.reduction = Some(backend::Reduction::new(kernel, None));
            let ended = catch_unwind(AssertUnwindSafe(|| comm.run(&job)));
            assert!(!matches!(ended, Ok(Ok(()))), "the op panicked");
            drop(job);
            meet.meet();
            all_are_truths(&format!("rank {}", comm.rank()), &one);
            // This rank's own values alternate.
            let has_fetched = one.windows(2).any(|two| two == [1, 1]);
            assert!(comm.rank() == 1 || has_fetched || cfg!(miri), "nothing of the other rank's was there yet");
            Ok(())
        })
        .unwrap();
    assert!(turns.load(Ordering::Relaxed) > 0);
}

/// Transfers one message of truth values from rank 1 to rank 0.
fn message(comm: &Communicator, bytes: &mut [u8]) -> Result<()> {
    let terms = MessageContext { peer: Some(1 - comm.rank()), tag: 3, element: TypeTag::Scalar(DType::Bool), element_bytes: 1 };
    let place = match comm.rank() {
        0 => MessageBuffer::Receive { into: bytes.as_mut_ptr(), bytes: bytes.len() },
        _ => MessageBuffer::Send { data: bytes.as_ptr(), bytes: bytes.len() },
    };
    // SAFETY: the bytes are borrowed for the whole call.
    unsafe { comm.core.shared.progress.transfer_one(&terms, place, comm.timeout()) }.map(drop)
}

#[test]
fn no_byte_but_0_and_1_is_received() {
    everywhere(|comm, count| {
        // Once the receive comes before the message, and once the message comes before the receive, if it is short
        // enough for that.
        for early in [false, count < 1 << 10] {
            let mut bytes = said(comm.rank(), count);
            if early && comm.rank() == 0 {
                comm.barrier()?;
            }
            message(comm, &mut bytes)?;
            if early && comm.rank() == 1 {
                comm.barrier()?;
            }
            assert!(comm.rank() == 1 || bytes.iter().all(|byte| *byte == 1), "{count}, early: {early}");
        }
        Ok(())
    });
}
