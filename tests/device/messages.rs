//! Messages between device buffers.

use collectives::{Envelope, Error};

use super::gpu::{process_ranks, ranks};
use crate::common::cases::Memory;

#[test]
fn messages_go_round_a_ring() {
    ranks(3, |comm, memory| {
        let (me, n) = (comm.rank(), comm.world_size());
        let (next, previous) = ((me + 1) % n, (me + n - 1) % n);
        let (mine, mut theirs) = (memory.put(&vec![me as u64; 777]), memory.put(&vec![99_u64; 777]));
        let received = comm.send_recv(&mine, next, &mut theirs, previous).unwrap();
        assert_eq!((received.source, received.count), (previous, 777));
        assert_eq!(memory.get(&theirs), vec![previous as u64; 777]);
    });
}

#[test]
fn one_sends_and_another_receives() {
    process_ranks("messages::one_sends_and_another_receives", 2, |comm, memory| {
        let mut buffer = memory.put(&[comm.rank() as u8 + 7; 33]);
        match comm.rank() {
            0 => comm.send(&buffer, 1).unwrap(),
            _ => assert_eq!(comm.recv(&mut buffer, 0).unwrap().count, 33),
        }
        assert_eq!(memory.get(&buffer), [7; 33]);
    });
}

#[test]
fn what_nccl_cannot_do_is_refused_in_words() {
    ranks(2, |comm, memory| {
        let mut buffer = memory.put(&[0_u8; 4]);
        let error = comm.recv(&mut buffer, Envelope::any()).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("NCCL needs to know the source"), "{error}");
        let error = comm.send(&buffer, Envelope::rank(1 - comm.rank()).tag(3)).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("tag 3"), "{error}");
        let error = comm.send(&buffer, comm.rank()).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        let error = comm.all_reduce_into(&[0_u8; 4], &mut buffer, collectives::ReduceOp::Sum).unwrap_err();
        assert!(error.to_string().contains("on the host and the other on a device"), "{error}");
    });
}
