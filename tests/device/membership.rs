//! Processes that join a job with devices. Here ranks are threads; `tests/device_faults` has processes that are killed.

use std::net::SocketAddr;
use std::thread::{Scope, ScopedJoinHandle};

use collectives::{Builder, Communicator, Config, DeviceChoice, Error, Membership, ReduceOp, Result};
use cudarc::driver::CudaSlice;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::gpu::{DeviceMemory, assert_nothing_found, builder, turn};
use crate::common::cases::{Memory, movements_in, reductions_in};
use crate::common::meeting::wait_until;
use crate::common::ranks::{alone_in_a_process, communicators_with, each};

type Joined<'scope> = ScopedJoinHandle<'scope, Result<Membership>>;

fn with_device(choice: DeviceChoice) -> Builder {
    builder(Config::default()).require_device(choice)
}

fn members(devices: &[usize]) -> Vec<Communicator> {
    communicators_with(devices.len(), |rank| with_device(DeviceChoice::Ordinal(devices[rank])))
}

/// Starts a thread that joins at a rank, and waits until the rank has received its request.
fn newcomer<'scope>(scope: &'scope Scope<'scope, '_>, builder: Builder, at: &Communicator) -> Joined<'scope> {
    let (address, before): (SocketAddr, _) = (at.join_address().unwrap(), at.waiting_newcomers().unwrap());
    let joined = scope.spawn(move || builder.join(address));
    wait_until("the newcomer has asked", || at.waiting_newcomers().unwrap() == before + 1);
    joined
}

fn ordinal(comm: &Communicator) -> usize {
    comm.device().unwrap().context().ordinal()
}

/// Makes calls of all kinds on device buffers, and compares each bit.
fn check(comm: &Communicator) {
    let memory = DeviceMemory::of(comm);
    reductions_in::<f32, _>(&memory, comm, ReduceOp::Sum, 300, 1);
    reductions_in::<u16, _>(&memory, comm, ReduceOp::BitXor, 70, 2);
    movements_in::<u8, _>(&memory, comm, 100, 3);
    comm.device().unwrap().synchronize().unwrap();
}

/// Sums a buffer over all ranks in place.
fn sum(comm: &Communicator, buffer: &mut CudaSlice<u32>) -> Vec<u32> {
    comm.all_reduce(buffer, ReduceOp::Sum).unwrap();
    // Without cudarc's events, as after a capture, the copy to the host does not wait for the call.
    comm.device().unwrap().synchronize().unwrap();
    DeviceMemory::of(comm).get(buffer)
}

/// Lets one newcomer in. Its first call is the members' first call on the new communicator.
fn grow(comms: Vec<Communicator>) -> Vec<Communicator> {
    let (world_size, last) = (comms.len() + 1, comms[comms.len() - 1].clone());
    let newcomers = world_size - 1..world_size;
    let first_call = |address: SocketAddr| {
        let joined = with_device(DeviceChoice::Local).join(address).unwrap();
        assert_eq!((joined.communicator.rank(), joined.newcomers), (world_size - 1, newcomers.clone()));
        let mut one = DeviceMemory::of(&joined.communicator).put(&[1_u32; 50]);
        sum(&joined.communicator, &mut one);
        joined.communicator
    };
    std::thread::scope(|scope| {
        let address = last.join_address().unwrap();
        let first_call = &first_call;
        let joined = scope.spawn(move || first_call(address));
        wait_until("the newcomer has asked", || last.waiting_newcomers().unwrap() == 1);
        let mut grown = each(comms, |comm| {
            let mut buffer = DeviceMemory::of(&comm).put(&[10_u32.pow(comm.rank() as u32); 50]);
            let membership = comm.admit().unwrap();
            let grown = membership.communicator;
            assert_eq!((grown.rank(), membership.newcomers), (comm.rank(), newcomers.clone()));
            assert_eq!(ordinal(&grown), ordinal(&comm));
            // The buffer was made before the admission. Both communicators accept it.
            let of_members = (0..comm.world_size() as u32).map(|rank| 10_u32.pow(rank)).sum::<u32>();
            assert_eq!(sum(&comm, &mut buffer), [of_members; 50]);
            assert_eq!(sum(&grown, &mut buffer), [of_members * comm.world_size() as u32 + 1; 50]);
            grown
        });
        grown.push(joined.join().unwrap());
        grown
    })
}

#[test]
fn a_job_with_devices_grows_twice_and_old_buffers_stay_usable() {
    let _turn = turn();
    let mut comms = members(&[0, 1]);
    for world_size in [3, 4] {
        comms = grow(comms);
        assert_eq!(each(comms.clone(), |comm| check(&comm)).len(), world_size);
    }
    assert_eq!(comms.iter().map(ordinal).collect::<Vec<_>>(), [0, 1, 2, 3]);
    each(comms, |comm| comm.close().unwrap());
    assert_nothing_found();
}

#[test]
fn newcomers_take_the_devices_that_are_free() {
    let _turn = turn();
    std::thread::scope(|scope| {
        let mut comms = members(&[1, 0, 3]);
        // Its device becomes free, and the numbers of the ranks after it change.
        drop(comms.remove(1));
        let joined = [0, 1].map(|_| newcomer(scope, with_device(DeviceChoice::Local), &comms[1]));
        let mut all = each(comms, |comm| comm.admit().unwrap().communicator);
        all.extend(joined.map(|joined| joined.join().unwrap().unwrap().communicator));
        all.sort_by_key(Communicator::rank);
        assert_eq!(all.iter().map(ordinal).collect::<Vec<_>>(), [1, 3, 0, 2]);
        each(all, |comm| check(&comm));
    });
    assert_nothing_found();
}

#[test]
fn a_newcomer_without_a_device_is_refused_and_the_reverse() {
    let _turn = turn();
    let without = || Communicator::builder().configure(|config| config.timeout = std::time::Duration::from_secs(60));
    let cases: [(Vec<Communicator>, Builder, [&str; 2]); 2] = [
        (members(&[0, 1]), without(), [", a device backend;", ", no device backend"]),
        (communicators_with(2, |_| without()), with_device(DeviceChoice::Ordinal(5)), [", no device backend;", ", a device backend"]),
    ];
    for (comms, builder, texts) in cases {
        std::thread::scope(|scope| {
            let refused = newcomer(scope, builder, &comms[0]);
            each(comms, |comm| {
                assert!(comm.admit().unwrap().newcomers.is_empty());
                if comm.device().is_some() {
                    check(&comm);
                }
            });
            let error = refused.join().unwrap().unwrap_err();
            assert!(matches!(error, Error::Conflict { .. }), "{error}");
            assert!(texts.iter().all(|text| error.to_string().contains(text)), "{error}");
        });
    }
    assert_nothing_found();
}

#[test]
fn a_newcomer_whose_device_does_not_exist_is_told_before_it_asks() {
    let _turn = turn();
    let comms = members(&[0, 1]);
    let address = comms[0].join_address().unwrap();
    let error = with_device(DeviceChoice::Ordinal(99)).join(address).unwrap_err();
    assert!(matches!(&error, Error::NoDevice { call, .. } if call == "join"), "{error}");
    assert!(error.to_string().contains("there is no device 99"), "{error}");
    assert_eq!(comms[0].waiting_newcomers().unwrap(), 0);
    std::thread::scope(|scope| {
        // The device is not required. So the newcomer asks as one without a device, and says why it has none.
        let optional = Communicator::builder().device(DeviceChoice::Ordinal(99));
        let refused = newcomer(scope, optional.clone(), &comms[0]);
        each(comms, |comm| {
            assert!(comm.admit().unwrap().newcomers.is_empty());
            check(&comm);
        });
        let error = refused.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("no device backend") && error.contains("there is no device 99"), "{error}");
        let comms = communicators_with(2, |_| optional.clone());
        let joined = newcomer(scope, optional, &comms[0]);
        let grown = each(comms, |comm| comm.admit().unwrap().communicator);
        let joined = joined.join().unwrap().unwrap().communicator;
        let sums = each(grown.into_iter().chain([joined]).collect(), |comm| {
            let mut one = [1_u32];
            comm.all_reduce(&mut one, ReduceOp::Sum).map(|()| one[0]).unwrap()
        });
        assert_eq!(sums, [3; 3]);
    });
    assert_nothing_found();
}

#[test]
fn a_newcomer_on_the_device_of_a_member_is_refused_with_the_reason() {
    let _turn = turn();
    std::thread::scope(|scope| {
        let comms = members(&[0, 1]);
        let refused = newcomer(scope, with_device(DeviceChoice::Ordinal(0)), &comms[1]);
        // Three attempts. The next call refuses the newcomer.
        for _ in 0..4 {
            each(comms.clone(), |comm| {
                assert!(comm.admit().unwrap().newcomers.is_empty());
                check(&comm);
            });
        }
        let error = refused.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Conflict { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("3 attempts") && text.contains("are both on GPU") && text.contains("rank 0"), "{text}");
    });
    assert_nothing_found();
}

/// A graph calls the communicator on which it was captured.
#[test]
fn a_graph_from_before_an_admission_still_runs_among_the_old_ranks() {
    alone_in_a_process("membership::a_graph_from_before_an_admission_still_runs_among_the_old_ranks", || {
        std::thread::scope(|scope| {
            let comms = members(&[0, 1]);
            let joined = newcomer(scope, with_device(DeviceChoice::Local), &comms[0]);
            let grown = each(comms, |comm| {
                let memory = DeviceMemory::of(&comm);
                let (stream, mut sums) = (memory.stream.context().new_stream().unwrap(), memory.put(&[1_u32; 100]));
                let on = comm.with_stream(&stream);
                on.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
                stream.synchronize().unwrap();
                comm.barrier().unwrap();
                #[expect(unsafe_code, reason = "cudarc's tracking events may not become part of the graph")]
                // SAFETY: the buffer is used on this one stream, which is synchronised before the buffer is read or dropped.
                unsafe {
                    stream.context().disable_event_tracking();
                }
                stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
                on.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
                let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
                let graph = stream.end_capture(flags).unwrap().unwrap();
                let grown = comm.admit().unwrap().communicator;
                assert_eq!(grown.world_size(), 3);
                for power in 2..4 {
                    graph.launch().unwrap();
                    stream.synchronize().unwrap();
                    assert_eq!(memory.get(&sums), [2_u32.pow(power); 100]);
                }
                let error = comm.close().unwrap_err();
                assert!(error.to_string().contains("graph"), "{error}");
                drop(graph);
                grown
            });
            let joined = joined.join().unwrap().unwrap().communicator;
            each(grown.into_iter().chain([joined]).collect(), |comm| {
                let mut powers = DeviceMemory::of(&comm).put(&[10_u32.pow(comm.rank() as u32); 300]);
                assert_eq!(sum(&comm, &mut powers), [111; 300]);
            });
        });
        assert_nothing_found();
    });
}
