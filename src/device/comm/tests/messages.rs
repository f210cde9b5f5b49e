//! Messages. The first message from one rank to another connects the two ranks inside the call, which waits there for
//! the other rank. Whatever happens there, the call ends in time, with a typed error, and its stream is released.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use simgpu::nccl;

use super::*;

const SHORT: Duration = Duration::from_millis(100);

/// One end of a message.
#[derive(Debug, Clone, Copy)]
enum End {
    SendTo(usize),
    RecvFrom(usize),
}

/// Makes one end of a message, alone.
fn message(rank: &Rank, end: End, vector: &mut CudaSlice<f32>, timeout: Duration) -> Result<()> {
    group_of(rank, &mut [(end, vector)], timeout)
}

/// Makes ends of messages in one group.
fn group_of(rank: &Rank, ends: &mut [(End, &mut CudaSlice<f32>)], timeout: Duration) -> Result<()> {
    let (stream, kind) = (&rank.stream, ncclDataType_t::ncclFloat32);
    let places: Vec<_> = ends.iter_mut().map(|(end, vector)| (*end, vector.len(), vector.device_ptr_mut(stream))).collect();
    let mut calls = |raw: &Raw<'_>| {
        places.iter().try_for_each(|(end, len, (address, _))| match *end {
            // SAFETY: the vectors are alive until the test has waited for the stream.
            End::SendTo(peer) => unsafe { raw.send(*address, *len, kind, peer, stream.cu_stream()) },
            // SAFETY: the vectors are alive until the test has waited for the stream.
            End::RecvFrom(peer) => unsafe { raw.recv(*address, *len, kind, peer, stream.cu_stream()) },
        })
    };
    let mut parts: [Part<'_>; 1] = [(&rank.comm, stream, &mut calls)];
    // SAFETY: the calls use this stream alone, and are valid as one group.
    unsafe { grouped(&mut parts, &|| "messages".to_owned(), timeout) }
}

/// Waits for the stream, which returns only because nothing is stuck on it.
fn assert_stream_is_free(rank: &Rank) {
    let _ = rank.stream.synchronize();
}

#[test]
fn the_first_message_waits_in_the_call_for_its_other_end_and_later_ones_do_not() {
    let sim = Sim::new();
    let (has_returned, sent) = (AtomicBool::new(false), Meeting::new(2));
    ranks(2, |rank| {
        let mut vector = rank.vector(10);
        if rank.comm.rank() == 0 {
            message(&rank, End::SendTo(1), &mut vector, LONG).unwrap();
            has_returned.store(true, Ordering::SeqCst);
            (0..3).for_each(|_| message(&rank, End::SendTo(1), &mut vector, LONG).unwrap());
            sent.meet();
        } else {
            until_called("ncclSend", 1);
            assert!(!has_returned.load(Ordering::SeqCst));
            message(&rank, End::RecvFrom(0), &mut vector, LONG).unwrap();
            // In its calls for the later messages, the sender waits for no rank.
            sent.meet();
            (0..3).for_each(|_| message(&rank, End::RecvFrom(0), &mut vector, LONG).unwrap());
        }
        assert_eq!(read(&rank.stream, &vector), total(10, &[0]));
    });
    sim.finish();
}

#[test]
fn a_message_whose_other_end_never_comes_is_a_timeout() {
    for end in [End::SendTo(1), End::RecvFrom(1)] {
        let sim = Sim::new();
        ranks(2, |rank| {
            if rank.comm.rank() == 1 {
                return leave_late(&rank.comm);
            }
            let mut vector = rank.vector(10);
            let error = message(&rank, end, &mut vector, SHORT).unwrap_err();
            assert!(error.is_timeout() && !error.is_poisoned() && error.to_string().starts_with("messages: timed out"), "{error}");
            assert_stream_is_free(&rank);
            assert!(message(&rank, end, &mut vector, SHORT).unwrap_err().is_poisoned());
        });
        sim.finish();
    }
}

#[test]
fn an_abort_reaches_a_thread_that_connects_for_a_message() {
    let sim = Sim::new();
    ranks(2, |rank| {
        if rank.comm.rank() == 1 {
            return leave_late(&rank.comm);
        }
        let mut vector = rank.vector(10);
        let error = thread::scope(|scope| {
            let inside = scope.spawn(|| message(&rank, End::RecvFrom(1), &mut vector, LONG).unwrap_err());
            until_called("ncclRecv", 1);
            rank.comm.abort();
            inside.join().unwrap()
        });
        assert!(matches!(&error, Error::Poisoned { cause, .. } if matches!(**cause, Error::Aborted { .. })), "{error}");
        assert_stream_is_free(&rank);
    });
    sim.finish();
}

#[test]
fn a_ring_and_an_exchange_among_all_connect_in_one_group() {
    let sim = Sim::new();
    ranks(4, |rank| {
        let (own, size) = (rank.comm.rank(), rank.comm.world_size());
        let (mut mine, mut theirs) = (rank.vector(10), rank.vector(10));
        let (next, previous) = ((own + 1) % size, (own + size - 1) % size);
        let ring = &mut [(End::SendTo(next), &mut mine), (End::RecvFrom(previous), &mut theirs)];
        group_of(&rank, ring, LONG).unwrap();
        assert_eq!(read(&rank.stream, &theirs), total(10, &[previous]));
        // In descending order: NCCL decides what is connected first.
        let mut others: Vec<(usize, CudaSlice<f32>, CudaSlice<f32>)> =
            (0..size).rev().filter(|other| *other != own).map(|other| (other, rank.vector(10), rank.vector(10))).collect();
        let each = others.iter_mut().flat_map(|(other, mine, theirs)| [(End::RecvFrom(*other), theirs), (End::SendTo(*other), mine)]);
        group_of(&rank, &mut each.collect::<Vec<_>>(), LONG).unwrap();
        for (other, _, theirs) in &others {
            assert_eq!(read(&rank.stream, theirs), total(10, &[*other]));
        }
    });
    sim.finish();
}

#[test]
fn ranks_that_both_send_first_are_timeouts_and_go_well_in_one_group() {
    let sim = Sim::new();
    ranks(2, |rank| {
        let other = 1 - rank.comm.rank();
        let mut vector = rank.vector(10);
        let error = message(&rank, End::SendTo(other), &mut vector, SHORT).unwrap_err();
        assert!(error.is_timeout(), "{error}");
        assert_stream_is_free(&rank);
    });
    ranks(2, |rank| {
        let other = 1 - rank.comm.rank();
        let (mut mine, mut theirs) = (rank.vector(10), rank.vector(10));
        let both = &mut [(End::SendTo(other), &mut mine), (End::RecvFrom(other), &mut theirs)];
        group_of(&rank, both, LONG).unwrap();
        assert_eq!(read(&rank.stream, &theirs), total(10, &[other]));
    });
    sim.finish();
}

#[test]
fn a_peer_that_is_killed_while_a_message_connects_is_an_error_or_a_timeout() {
    for is_told in [true, false] {
        let sim = Sim::new();
        if !is_told {
            nccl::silence_deaths();
        }
        ranks(2, |rank| {
            if rank.comm.rank() == 1 {
                until_called("ncclSend", 1);
                assert_eq!(nccl::lose(1), 2, "the control communicator, and the data communicator");
                return leave_late(&rank.comm);
            }
            let mut vector = rank.vector(10);
            let error = message(&rank, End::SendTo(1), &mut vector, if is_told { LONG } else { 5 * SHORT }).unwrap_err();
            // The watchdog may have ended the communicator first.
            let is_remote = matches!(error.root(), Error::Nccl { code: 6, .. });
            assert!(if is_told { is_remote } else { error.is_timeout() }, "{error}");
            assert_stream_is_free(&rank);
            assert!(message(&rank, End::SendTo(1), &mut vector, SHORT).unwrap_err().is_poisoned());
        });
        sim.finish();
    }
}
