//! Communicators out of communicators.

use super::sim::Sim;
use super::*;

fn later() -> Deadline {
    Deadline::after(LONG)
}

/// Sums over a communicator what each rank of the world has.
fn check(comm: &NcclComm, rank: &Rank, members: &[usize]) {
    let mut vector = rank.vector(33);
    sum(comm, &rank.stream, &mut vector, LONG).unwrap();
    assert_eq!(read(&rank.stream, &vector), total(33, members), "rank {} of {members:?}", rank.comm.rank());
}

#[test]
fn splits_order_ranks_by_key_and_leave_out_those_without_colour() {
    let sim = Sim::new();
    ranks(5, |rank| {
        let own = rank.comm.rank();
        let color = (own != 4).then_some(own as u32 % 2);
        let child = rank.comm.split(color, -(own as i32), &NcclConfig::default(), &later()).unwrap();
        assert_eq!(child.is_none(), own == 4);
        let Some(child) = child else { return };
        let members = [own % 2, own % 2 + 2];
        assert_eq!((child.rank(), child.world_size()), (usize::from(own < 2), 2));
        check(&child, &rank, &members);
        check(&child, &rank, &members);
    });
    sim.finish();
}

#[test]
fn parent_and_child_work_side_by_side() {
    let sim = Sim::new();
    ranks(4, |rank| {
        let child = rank.comm.split(Some(rank.comm.rank() as u32 / 2), 0, &NcclConfig::default(), &later()).unwrap().unwrap();
        let half = rank.comm.rank() / 2 * 2;
        check(&child, &rank, &[half, half + 1]);
        let mut vector = rank.vector(9);
        rank.all_reduce(&mut vector, LONG).unwrap();
        assert_eq!(read(&rank.stream, &vector), total(9, &[0, 1, 2, 3]));
        child.finalize(&later()).unwrap();
        assert!(child.failure().is_some() && rank.comm.failure().is_none());
    });
    sim.finish();
}

#[test]
fn shrinking_leaves_the_others() {
    let sim = Sim::new();
    ranks(4, |rank| {
        if rank.comm.rank() == 1 {
            return;
        }
        let error = rank.comm.shrink(&[9], false, &NcclConfig::default(), &later()).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { call: "shrink", .. }), "{error}");
        let child = rank.comm.shrink(&[1, 1], false, &NcclConfig::default(), &later()).unwrap();
        let place = [0, 9, 1, 2][rank.comm.rank()];
        assert_eq!((child.rank(), child.world_size()), (place, 3));
        check(&child, &rank, &[0, 2, 3]);
        // Its parent lacks a rank, and could only wait for it.
        rank.comm.abort();
    });
    sim.wait_until_none("communicators");
}

#[test]
fn growing_adds_ranks() {
    let sim = Sim::new();
    let ids = [unique_id(library()).unwrap()];
    let (announce, announced) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for index in 0..2 {
            let announce = announce.clone();
            scope.spawn(move || {
                let rank = Rank::new(&ids, index, 2);
                let id = (index == 0).then(|| rank.comm.grow_id().unwrap());
                if let Some(id) = id {
                    announce.send(id).unwrap();
                }
                let grown = rank.comm.grow(3, id.as_ref(), &NcclConfig::default(), &later()).unwrap();
                assert_eq!((grown.rank(), grown.world_size()), (index, 3));
                check(&grown, &rank, &[0, 1, 2]);
                let error = rank.comm.grow(2, None, &NcclConfig::default(), &later()).unwrap_err();
                assert!(matches!(error, Error::InvalidArgument { call: "grow", .. }), "{error}");
            });
        }
        scope.spawn(move || {
            let gpu = driver::open(2).unwrap();
            let stream = gpu.context.new_stream().unwrap();
            let ids = [announced.recv().unwrap()];
            let comm = join(setup(&gpu, &ids, 2, 3, &NcclConfig::default(), &later())).unwrap();
            let rank = Rank { gpu, stream, comm };
            check(&rank.comm, &rank, &[0, 1, 2]);
        });
    });
    sim.finish();
}

#[test]
fn a_revoked_communicator_can_be_split_and_not_used() {
    let sim = Sim::new();
    ranks(2, |rank| {
        rank.comm.revoke(&later()).unwrap();
        let mut vector = rank.vector(5);
        assert!(rank.all_reduce(&mut vector, LONG).unwrap_err().is_poisoned());
        let child = rank.comm.split(Some(0), 0, &NcclConfig::default(), &later()).unwrap().unwrap();
        check(&child, &rank, &[0, 1]);
    });
    assert_eq!(sim.calls("ncclCommAbort"), 0);
    sim.finish();
}

#[test]
fn a_split_that_a_rank_does_not_take_part_in_is_a_timeout() {
    let sim = Sim::new();
    ranks(2, |rank| {
        if rank.comm.rank() == 1 {
            while rank.comm.async_error().is_none() && sim.calls("ncclCommAbort") == 0 {
                std::thread::yield_now();
            }
            return rank.comm.abort();
        }
        let error = rank.comm.split(Some(0), 0, &NcclConfig::default(), &Deadline::after(Duration::from_millis(100))).unwrap_err();
        assert!(error.is_timeout(), "{error}");
        assert!(rank.comm.failure().is_some());
    });
    sim.wait_until_none("communicators");
}

#[test]
fn an_old_library_says_what_it_lacks() {
    let sim = Sim::new();
    ranks(1, |rank| {
        sim.set_version(21900);
        let error = rank.comm.revoke(&later()).unwrap_err();
        sim.set_version(23203);
        if let Error::Unsupported { reason, .. } = &error {
            assert!(reason.contains("2.28.7"), "{reason}");
        }
    });
    sim.finish();
}
