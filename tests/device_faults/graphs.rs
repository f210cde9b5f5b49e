//! Launches of captured graphs that wait for ranks which do not come. The streams are freed, and the ranks are named.

use std::sync::Arc;
use std::time::{Duration, Instant};

use collectives::{Communicator, Error, ReduceOp};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaGraph, CudaSlice, CudaStream};

use super::common::cases::Memory;
use super::common::ranks::is_rank_of;
use super::gpu::{DeviceMemory, builder, can_steer_nccl, unchecked};
use super::processes::Ranks;

/// The time for survivors to notice a death, on a loaded machine.
const NOTICED: Duration = Duration::from_secs(8);
/// The timeout of a captured call that is meant to time out.
const SHORT: Duration = Duration::from_secs(2);
/// The rank that launches its graph once less often.
const MISSING: usize = 1;

/// Returns a graph of two all-reduces, which all ranks have launched once, and its buffer.
fn captured(comm: &Communicator, stream: &Arc<CudaStream>, limit: Duration) -> (CudaGraph, CudaSlice<u32>) {
    let memory = DeviceMemory::of(comm);
    let mut sums = memory.put(&[1_u32; 1000]);
    let on = comm.with_stream(stream);
    // Connections are made outside of graphs.
    on.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
    stream.synchronize().unwrap();
    #[expect(unsafe_code, reason = "cudarc's events may not become part of the graph")]
    // SAFETY: the buffer is used on this one stream, which is waited for before the buffer is read or dropped.
    unsafe {
        stream.context().disable_event_tracking();
    }
    on.set_timeout(limit);
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    on.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
    on.all_reduce(&mut sums, ReduceOp::Max).unwrap();
    let graph = stream.end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH).unwrap().unwrap();
    graph.launch().unwrap();
    stream.synchronize().unwrap();
    let n = comm.world_size() as u32;
    assert_eq!(memory.get(&sums), [n * n; 1000]);
    (graph, sums)
}

/// Runs one rank. After `prepare`, from which one rank does not return, the others launch the graph once more. Returns
/// the communicator and the error that ended it.
fn launched_in_vain(limit: Duration, prepare: impl FnOnce(&Communicator)) -> (Communicator, Error) {
    let comm = builder(unchecked()).configure(|config| config.timeout = Duration::from_secs(30)).from_env().unwrap();
    if can_steer_nccl() {
        simgpu::nccl::silence_deaths();
    }
    let stream = comm.device().unwrap().context().new_stream().unwrap();
    let (graph, sums) = captured(&comm, &stream, limit);
    comm.set_timeout(Duration::from_secs(30));
    comm.barrier().unwrap();
    prepare(&comm);
    graph.launch().unwrap();
    // Returns because the communicator ends.
    stream.synchronize().unwrap();
    let failure = comm.device().unwrap().failure().unwrap();
    drop((graph, sums));
    (comm, failure)
}

/// Continues on the remaining ranks and their devices once the parent allows it. Otherwise the first rank to continue
/// could be what the others notice first.
fn go_on(comm: &Communicator) {
    let _ = std::io::stdin().read_line(&mut String::new());
    assert!(comm.all_reduce(&mut DeviceMemory::of(comm).put(&[1_u32]), ReduceOp::Sum).is_err());
    let left = comm.shrink().unwrap();
    let memory = DeviceMemory::of(&left);
    let mut sum = memory.put(&[1_u32]);
    left.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    left.device().unwrap().synchronize().unwrap();
    assert_eq!(memory.get(&sum), [left.world_size() as u32]);
    left.close().unwrap();
    println!("@shrunk");
}

#[test]
fn a_rank_that_dies_during_a_launch_is_named() {
    let (name, world_size) = ("graphs::a_rank_that_dies_during_a_launch_is_named", 3);
    if is_rank_of(name) {
        let (comm, error) = launched_in_vain(Duration::from_secs(30), |comm| {
            println!("@ready");
            while comm.rank() == MISSING {
                std::thread::park();
            }
        });
        let Error::PeerLost { peer, doing, .. } = &error else { panic!("{error}") };
        assert_eq!(*peer, comm.peers()[MISSING], "{error}");
        println!("@lost {doing}");
        return go_on(&comm);
    }
    let mut ranks = Ranks::spawn_with(name, world_size, &[]);
    for _ in 0..world_size {
        assert_eq!(ranks.next("ready").1, "ready");
    }
    let killed = Instant::now();
    ranks.children[MISSING].kill().unwrap();
    let lost: Vec<String> = (0..world_size - 1).map(|_| ranks.next("a launch has ended").1).collect();
    assert!(killed.elapsed() < NOTICED, "after {:?}", killed.elapsed());
    assert!(lost.iter().all(|line| line.starts_with("lost ")), "{lost:?}");
    // The second rank may notice the end of the first one. The first may notice it through NCCL, which knows only of
    // calls, unless that is silenced.
    assert!(lost[0].contains("a launch of a captured graph") || !can_steer_nccl(), "{lost:?}");
    ranks.children.iter_mut().for_each(|child| drop(child.stdin.take()));
    for rank in [0, 2] {
        assert_eq!(ranks.last_words(rank, NOTICED).unwrap().last().map(String::as_str), Some("shrunk"), "rank {rank}");
    }
}

#[test]
fn a_launch_that_a_rank_never_makes_is_a_timeout() {
    let (name, world_size) = ("graphs::a_launch_that_a_rank_never_makes_is_a_timeout", 2);
    if is_rank_of(name) {
        let (_, error) = launched_in_vain(SHORT, |comm| {
            if comm.rank() == MISSING {
                // Waits until the other rank has reported the end of its communicator.
                let _ = std::io::stdin().read_line(&mut String::new());
                println!("@gone");
                std::process::exit(0);
            }
        });
        assert!(matches!(&error, Error::Timeout { elapsed, .. } if *elapsed >= SHORT), "{error}");
        let text = error.to_string();
        assert!(text.contains("a launch of a captured graph, in rank 0 of 2: all_reduce(sum, u32, count 1000)"), "{text}");
        return println!("@timeout");
    }
    let mut ranks = Ranks::spawn_with(name, world_size, &[]);
    assert_eq!(ranks.next("the launch has ended"), (0, "timeout".to_owned()));
    ranks.children.iter_mut().for_each(|child| drop(child.stdin.take()));
    assert_eq!(ranks.next("the other one has seen that"), (MISSING, "gone".to_owned()));
    (0..world_size).for_each(|rank| ranks.outcome(rank).unwrap());
}
