//! Truth values of a rank that sends whatever bytes it likes: no byte but 0 and 1 may be in a destination, or reach a custom op.
//!
//! Buffers are bytes here, which the calls are told are truth values: the tests never make a `bool` of what is none.

#![expect(unsafe_code, reason = "looks at truth values as the bytes that they are")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Barrier};

use super::super::Communicator;
use super::super::message::{MessageBuffer, MessageContext};
use super::super::prepare::{Prepared, Source};
use crate::buffer::{Memory, MemoryMut};
use crate::element::{DType, TypeTag};
use crate::error::Result;
use crate::host::plane;
use crate::host::reduce::Kernel;
use crate::{CustomOp, ReduceOp, Reduction, Transport};

/// Elements: in a line, in several, in a slot, in shares and in several pieces.
const COUNTS: [usize; 4] = [2, 40, 700, if cfg!(miri) { 1000 } else { 3 << 20 }];

const TRANSPORTS: &[Transport] = if cfg!(miri) { &[Transport::Shm] } else { &[Transport::Shm, Transport::Tcp] };

/// What rank 1 sends, and what the honest rank 0 does.
fn said(rank: usize, count: usize) -> Vec<u8> {
    (0..count).map(|at| if rank == 1 { (at % 251) as u8 + 5 } else { (at % 2) as u8 }).collect()
}

/// Runs a call that was prepared on bytes as one on truth values.
fn run(comm: &Communicator, prepared: Result<Prepared<'_>>, reduction: Option<&Reduction<bool>>) -> Result<()> {
    let mut job = match prepared? {
        Prepared::Host(job, _) => job,
        #[cfg(feature = "cuda")]
        Prepared::Device(_) => unreachable!("buffers of the host"),
    };
    job.call.element = TypeTag::Scalar(DType::Bool);
    if let Some(reduction) = reduction {
        job.reduction = Some(plane::Reduction::new(Kernel::of(reduction, comm.world_size())?, None));
    }
    comm.run(&job)
}

/// Two ranks over each transport.
fn everywhere(program: impl Fn(&Communicator, usize) -> Result<()> + Sync) {
    for transport in TRANSPORTS {
        for count in COUNTS {
            Communicator::builder().transport(*transport).run_local(2, |comm| program(comm, count)).unwrap();
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
        let (source, mut all, mut one) = (Memory::Host(&mine[..]), vec![0; 2 * count], vec![0; count]);
        run(comm, comm.prepare_all_gather(Some(source), MemoryMut::Host(&mut all)), None)?;
        all_are_truths("all_gather", &all);
        assert!(all[..count] == said(0, count) && all[count..].iter().all(|byte| *byte == 1));
        all.fill(0);
        run(comm, comm.prepare_all_gather_v(Some(source), MemoryMut::Host(&mut all), &[count, count]), None)?;
        all_are_truths("all_gather_v", &all);
        all.fill(0);
        run(comm, comm.prepare_gather(Source::Separate(source), (me == 0).then_some(MemoryMut::Host(&mut all)), count, 0), None)?;
        all_are_truths("gather", &all);
        all.fill(0);
        let counts = [count, count];
        let destination = (me == 0).then_some((MemoryMut::Host(&mut all[..]), &counts[..]));
        run(comm, comm.prepare_gather_v(source, destination, 0), None)?;
        all_are_truths("gather_v", &all);
        let wide = [&mine[..], &mine].concat();
        run(comm, comm.prepare_all_to_all(Source::Separate(Memory::Host(&wide)), MemoryMut::Host(&mut all)), None)?;
        all_are_truths("all_to_all", &all);
        all.fill(0);
        run(comm, comm.prepare_all_to_all_v(Memory::Host(&wide), &counts, MemoryMut::Host(&mut all), &counts), None)?;
        all_are_truths("all_to_all_v", &all);
        let from = if me == 1 { Source::Separate(Memory::Host(&wide[..])) } else { Source::Nothing };
        run(comm, comm.prepare_scatter(from, MemoryMut::Host(&mut one), count, 1), None)?;
        all_are_truths("scatter", &one);
        one.fill(0);
        let from = (me == 1).then_some((Memory::Host(&wide[..]), &counts[..]));
        run(comm, comm.prepare_scatter_v(from, MemoryMut::Host(&mut one), 1), None)?;
        all_are_truths("scatter_v", &one);
        one.copy_from_slice(&mine);
        run(comm, comm.prepare_broadcast(Source::InPlace, MemoryMut::Host(&mut one), 1), None)?;
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
            let prepared = comm.prepare_all_reduce(Source::Separate(Memory::Host(&mine)), MemoryMut::Host(&mut one), &of_bytes);
            run(comm, prepared, Some(&reduction))?;
            all_are_truths("all_reduce", &one);
            let part = &mut one[..count / 2];
            let prepared = comm.prepare_reduce_scatter(Some(Memory::Host(&mine)), MemoryMut::Host(part), &of_bytes);
            run(comm, prepared, Some(&reduction))?;
            all_are_truths("reduce_scatter", &one);
            let into = Some(MemoryMut::Host(&mut one[..]));
            run(comm, comm.prepare_reduce(Source::Separate(Memory::Host(&mine)), into, count, 0, &of_bytes), Some(&reduction))?;
            all_are_truths("reduce", &one);
            Ok(())
        });
    }
}

#[test]
fn a_custom_op_sees_no_byte_but_0_and_1() {
    let largest = Arc::new(AtomicU8::new(0));
    let seen = Arc::clone(&largest);
    let either = Reduction::from(CustomOp::new("either", move |into: &mut [bool], from: &[bool]| {
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
        let prepared = comm.prepare_all_reduce(Source::Separate(Memory::Host(&mine)), MemoryMut::Host(&mut one), &of_bytes);
        run(comm, prepared, Some(&either))?;
        assert!(one.iter().all(|byte| *byte == 1));
        Ok(())
    });
    assert_eq!(largest.load(Ordering::Relaxed), 1);
}

#[test]
fn what_a_panicking_op_leaves_behind_is_0_or_1() {
    // Some pieces go well, so that the other rank's part of them has been fetched. (Under Miri that would take too long.)
    let (count, well) = if cfg!(miri) { (40_000, 1) } else { (8 << 20, 250) };
    let (meet, turns) = (Barrier::new(2), Arc::new(AtomicU8::new(0)));
    Communicator::builder()
        .transport(Transport::Shm)
        .run_local(2, |comm| {
            let (mine, of_bytes) = (said(comm.rank(), count), Reduction::from(ReduceOp::BitOr));
            let mut one = vec![0; count];
            let prepared = comm.prepare_all_reduce(Source::Separate(Memory::Host(&mine)), MemoryMut::Host(&mut one), &of_bytes);
            let Prepared::Host(mut job, _) = prepared? else { unreachable!("buffers of the host") };
            job.call.element = TypeTag::Scalar(DType::Bool);
            let turns = Arc::clone(&turns);
            let kernel = if comm.rank() == 1 {
                // What it folds is no truth value.
                Kernel::of(&Reduction::from(CustomOp::new("x", |into: &mut [u8], _: &[u8]| into.fill(0xff))), 2)?
            } else {
                let fold = move |_: &mut [bool], _: &[bool]| assert!(turns.fetch_add(1, Ordering::Relaxed) < well, "enough");
                Kernel::of(&Reduction::from(CustomOp::new("x", fold)), 2)?
            };
            job.reduction = Some(plane::Reduction::new(kernel, None));
            let ended = catch_unwind(AssertUnwindSafe(|| comm.run(&job)));
            assert!(!matches!(ended, Ok(Ok(()))), "the op panicked");
            drop(job);
            meet.wait();
            all_are_truths(&format!("rank {}", comm.rank()), &one);
            // This rank's own values alternate.
            let has_fetched = one.windows(2).any(|two| two == [1, 1]);
            assert!(comm.rank() == 1 || has_fetched || cfg!(miri), "nothing of the other rank's was there yet");
            Ok(())
        })
        .unwrap();
    assert!(turns.load(Ordering::Relaxed) > 0);
}

/// One message of rank 1 as truth values, received by rank 0.
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
        // Once it meets its receive, and once it has come before, where it is so short that it can.
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
