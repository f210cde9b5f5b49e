//! Calls that are recorded first and queued together.

use std::sync::Arc;
use std::time::Duration;

use collectives::{Communicator, DeviceChoice, ReduceOp, store::MemoryStore};

use super::gpu::{DeviceMemory, assert_nothing_found, prepare, ranks};
use crate::common::cases::Memory;

#[test]
fn opposite_sends_and_receives_do_not_wait_for_each_other() {
    ranks(4, |comm, memory| {
        let (me, n) = (comm.rank(), comm.world_size());
        let mine: Vec<_> = (0..n).map(|to| memory.put(&vec![(10 * me + to) as i32; 100 + to])).collect();
        let mut theirs: Vec<_> = (0..n).map(|_| memory.put(&vec![-1_i32; 100 + me])).collect();
        let mut sum = memory.put(&[me as u32; 50]);
        let mut on_host = [me as u32];
        let received = comm
            .group(|group| {
                for (peer, buffer) in theirs.iter_mut().enumerate() {
                    group.send(&mine[peer], peer)?;
                    group.recv(buffer, peer)?;
                }
                group.all_reduce(&mut sum, ReduceOp::BitOr)?;
                group.all_reduce(&mut on_host, ReduceOp::Sum)
            })
            .unwrap();
        assert_eq!(received.iter().map(|received| received.source).collect::<Vec<_>>(), (0..n).collect::<Vec<_>>());
        for (peer, buffer) in theirs.iter().enumerate() {
            assert_eq!(memory.get(buffer), vec![(10 * peer + me) as i32; 100 + me]);
        }
        assert_eq!((memory.get(&sum), on_host), (vec![3; 50], [6]));
    });
}

#[test]
fn a_group_that_fails_to_record_has_done_nothing() {
    ranks(2, |comm, memory| {
        let mut buffer = memory.put(&[comm.rank() as u32; 10]);
        let refused = comm.group(|group| {
            group.all_reduce(&mut buffer, ReduceOp::Sum)?;
            Err(collectives::Error::Conflict { reason: "changed my mind".to_owned() })
        });
        assert!(refused.is_err());
        assert_eq!(memory.get(&buffer), [comm.rank() as u32; 10]);
        comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(memory.get(&buffer), [1; 10]);
    });
}

/// One thread drives three devices, each with its own communicator.
#[test]
fn one_thread_drives_several_devices() {
    prepare();
    let store = MemoryStore::new();
    let join = |rank: usize| {
        let builder = Communicator::builder()
            .configure(|config| config.timeout = Duration::from_secs(60))
            .require_device(DeviceChoice::Ordinal(rank));
        builder.with_store(Arc::new(store.clone()), rank, 3).unwrap()
    };
    let comms: Vec<Communicator> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3).map(|rank| scope.spawn(move || join(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let memories: Vec<_> = comms.iter().map(DeviceMemory::of).collect();
    let mut buffers: Vec<_> = memories.iter().enumerate().map(|(rank, memory)| memory.put(&vec![1_u32 << rank; 2000])).collect();
    let all: Vec<&Communicator> = comms.iter().collect();
    for op in [ReduceOp::Sum, ReduceOp::BitOr] {
        Communicator::group_across(&all, |groups| {
            groups.iter_mut().zip(&mut buffers).try_for_each(|(group, buffer)| group.all_reduce(buffer, op))
        })
        .unwrap();
        for (memory, buffer) in memories.iter().zip(&buffers) {
            assert_eq!(memory.get(buffer), vec![7; 2000], "{op}");
        }
    }
    let [first, second, _] = &mut buffers[..] else { panic!("three buffers") };
    let twice = Communicator::group_across(&[all[0], all[0]], |groups| {
        groups[0].all_reduce(first, ReduceOp::BitOr)?;
        groups[1].all_reduce(second, ReduceOp::BitOr)
    });
    assert!(matches!(twice, Err(collectives::Error::InvalidArgument { .. })), "{twice:?}");
    let mut on_host = [1_u32];
    let error = Communicator::group_across(&all[..1], |groups| groups[0].all_reduce(&mut on_host, ReduceOp::Sum)).unwrap_err();
    assert!(error.is_unsupported(), "{error}");
    drop((buffers, memories));
    std::thread::scope(|scope| comms.into_iter().for_each(|comm| drop(scope.spawn(move || comm.close().unwrap()))));
    assert_nothing_found();
}

/// A thread has the communicators of several ranks, and one of them makes a different call. That is an error, before
/// anything is queued.
#[test]
fn a_group_across_communicators_is_compared() {
    for (what, root, words) in [("the root", 1, "root 1"), ("nothing", 0, "")] {
        prepare();
        let store = MemoryStore::new();
        let join = |rank: usize| {
            let builder = Communicator::builder()
                .configure(|config| config.timeout = Duration::from_secs(60))
                .require_device(DeviceChoice::Ordinal(rank));
            builder.with_store(Arc::new(store.clone()), rank, 2).unwrap()
        };
        let comms: Vec<Communicator> = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..2).map(|rank| scope.spawn(move || join(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let memories: Vec<_> = comms.iter().map(DeviceMemory::of).collect();
        let mut buffers: Vec<_> = memories.iter().enumerate().map(|(rank, memory)| memory.put(&[rank as u8; 100])).collect();
        let all: Vec<&Communicator> = comms.iter().collect();
        let made = Communicator::group_across(&all, |groups| {
            let [first, second] = &mut buffers[..] else { panic!("two buffers") };
            groups[0].broadcast(first, 0)?;
            groups[1].broadcast(second, root)
        });
        match made {
            Ok(_) => assert_eq!((what, memories[1].get(&buffers[1])), ("nothing", vec![0; 100])),
            Err(error) => {
                assert!(error.is_mismatch() && error.to_string().contains(words) && what != "nothing", "{what}: {error}");
                assert_eq!(memories[0].get(&buffers[0]), [0; 100]);
                let again = comms[0].all_reduce(&mut buffers[0], ReduceOp::Max).unwrap_err();
                assert!(again.is_poisoned(), "{again}");
            }
        }
    }
    assert_nothing_found();
}

/// The first call that needs more memory than a backend allocates at its start, from a thread that has all ranks. No
/// other thread could make the call.
#[test]
fn one_thread_makes_the_first_large_call_of_several_ranks() {
    prepare();
    let store = MemoryStore::new();
    let join = |rank: usize| {
        let builder = Communicator::builder()
            .configure(|config| config.timeout = Duration::from_secs(60))
            .require_device(DeviceChoice::Ordinal(rank));
        builder.with_store(Arc::new(store.clone()), rank, 2).unwrap()
    };
    let comms: Vec<Communicator> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2).map(|rank| scope.spawn(move || join(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let memories: Vec<_> = comms.iter().map(DeviceMemory::of).collect();
    let block = (4 << 20) + 1000;
    let sent = |from: usize, to: usize| (0..block).map(move |at| (at % 251 + 2 * from + to) as u8);
    let whole = |from: usize| sent(from, 0).chain(sent(from, 1)).collect::<Vec<_>>();
    let mut buffers: Vec<_> = memories.iter().enumerate().map(|(rank, memory)| memory.put(&whole(rank))).collect();
    let all: Vec<&Communicator> = comms.iter().collect();
    Communicator::group_across(&all, |groups| groups.iter_mut().zip(&mut buffers).try_for_each(|(group, buffer)| group.all_to_all(buffer)))
        .unwrap();
    for (rank, (memory, buffer)) in memories.iter().zip(&buffers).enumerate() {
        assert!(memory.get(buffer).into_iter().eq(sent(0, rank).chain(sent(1, rank))), "rank {rank}");
    }
    drop((buffers, memories));
    std::thread::scope(|scope| comms.into_iter().for_each(|comm| drop(scope.spawn(move || comm.close().unwrap()))));
    assert_nothing_found();
}
