//! The cost of a call: this crate's forms, NCCL's function, cudarc's NCCL, and graphs of them, measured alternately.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use collectives::{
    Communicator, DType, Device, DeviceChoice, ReduceOp,
    interop::RawDeviceSlice,
    nccl::{RawBuffer, RawCall},
};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaGraph, CudaSlice, CudaStream, DevicePtr};
use cudarc::nccl;
use nccl_sys::{Library, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t};

use crate::allocations::allocations;
use crate::{Outcome, Wish, median, without_device};

/// Ways to call an all-reduce.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    /// `Communicator::all_reduce` on cudarc's slices, with their events.
    Slice,
    /// The same on a `RawDeviceSlice`.
    Address,
    /// `NcclCommunicator::call`.
    Raw,
    /// `ncclAllReduce`, on the same communicator.
    Nccl,
    /// cudarc's `Comm::all_reduce_in_place`, on its own blocking communicator.
    Cudarc,
    /// Like `Address`, replayed from a graph of all calls.
    Graph,
    /// Like `Nccl`, replayed from a graph of all calls.
    NcclGraph,
}

const WAYS: [Way; 7] = [Way::Slice, Way::Address, Way::Raw, Way::Nccl, Way::Cudarc, Way::Graph, Way::NcclGraph];
/// Floats in a call: 8 B, 1 KiB, 1 MiB.
const COUNTS: [usize; 3] = [2, 256, 256 << 10];
/// Calls in a series.
const CALLS: usize = 200;

/// Prints the microseconds per call, on the CPU and in total, each the slowest rank's median, and the allocations per
/// call on rank 0.
pub(crate) fn all(wish: &Wish) -> Outcome<()> {
    let made = Communicator::builder().require_device(DeviceChoice::Local).local(wish.ranks);
    let comms = match made {
        Ok(comms) => comms,
        Err(error) => return without_device(&format!("no calls between {} ranks: {error}", wish.ranks)),
    };
    println!("way,ranks,bytes,issue_us,time_us,allocations");
    let ended: Vec<Outcome<()>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || rank(&comm, wish))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| Err("a rank panicked".into()))).collect()
    });
    ended.into_iter().collect()
}

/// The times of calls.
#[derive(Clone, Default)]
struct Times {
    issue: Vec<f64>,
    all: Vec<f64>,
    allocations: usize,
}

/// Runs one rank's part. Rank 0 prints.
fn rank(comm: &Communicator, wish: &Wish) -> Outcome<()> {
    let device = comm.device().ok_or("the device is gone")?;
    let cudarc = if wish.cudarc { cudarc_communicator(comm, &device)? } else { None };
    if cudarc.is_none() && comm.rank() == 0 {
        println!("# {}: its way is left out", if wish.cudarc { "cudarc finds no libnccl.so of its own" } else { "without cudarc" });
    }
    for count in COUNTS {
        let mut bench = Bench::new(comm, &device, cudarc.as_ref(), count)?;
        let ways: Vec<_> = WAYS.into_iter().filter(|way| *way != Way::Cudarc || cudarc.is_some()).collect();
        let graphs: Vec<_> = ways.iter().map(|way| bench.graph(*way)).collect::<Outcome<_>>()?;
        let mut times = vec![Times::default(); ways.len()];
        for round in 0..=wish.rounds {
            for ((way, graph), times) in ways.iter().zip(&graphs).zip(&mut times) {
                let (issued, ended, allocations) = bench.in_a_row(*way, graph.as_ref())?;
                // The first round warms up.
                if round > 0 {
                    times.issue.push(issued);
                    times.all.push(ended);
                    times.allocations = allocations;
                }
            }
        }
        for (way, times) in ways.iter().zip(times) {
            let mut worst = [median(times.issue), median(times.all)];
            comm.all_reduce(&mut worst, ReduceOp::Max)?;
            if comm.rank() == 0 {
                let each = times.allocations as f64 / CALLS as f64;
                println!("{way:?},{},{},{:.3},{:.3},{each:.2}", comm.world_size(), 4 * count, worst[0], worst[1]);
            }
        }
    }
    Ok(())
}

/// Creates cudarc's communicator of the same ranks, if every rank finds a `libnccl.so`: cudarc panics without one.
fn cudarc_communicator(comm: &Communicator, device: &Device) -> Outcome<Option<nccl::Comm>> {
    // SAFETY: opens and closes a library.
    let mut here = [u8::from(unsafe { nccl::sys::is_culib_present() })];
    comm.all_reduce(&mut here, ReduceOp::Min)?;
    if here == [0] {
        return Ok(None);
    }
    let mut bytes = [0_u8; 128];
    if comm.rank() == 0 {
        bytes = nccl::Id::new().map_err(failed)?.internal().map(|byte| byte as u8);
    }
    comm.broadcast(&mut bytes, 0)?;
    // NCCL uses the thread's current device, and cudarc does not set it.
    device.context().bind_to_thread()?;
    let id = nccl::Id::uninit(bytes.map(|byte| byte as std::ffi::c_char));
    Ok(Some(nccl::Comm::from_rank(device.stream().clone(), comm.rank(), comm.world_size(), id).map_err(failed)?))
}

/// Formats an error with its code, which cudarc's own message omits.
fn failed(error: nccl::result::NcclError) -> String {
    format!("cudarc's NCCL: {:?}", error.0)
}

struct Bench<'a> {
    comm: &'a Communicator,
    device: &'a Device,
    library: &'static Library,
    cudarc: Option<&'a nccl::Comm>,
    slice: CudaSlice<f32>,
    /// The slice's address. Asking for it again would queue events. Only cudarc's way and `Slice` use these, and no
    /// capture may wait for them.
    address: u64,
}

/// A graph of all calls, and the stream that replays it.
type Replay = (CudaGraph, Arc<CudaStream>);

impl<'a> Bench<'a> {
    fn new(comm: &'a Communicator, device: &'a Device, cudarc: Option<&'a nccl::Comm>, count: usize) -> Outcome<Self> {
        let slice = device.stream().alloc_zeros(count)?;
        let address = slice.device_ptr(device.stream()).0;
        Ok(Self { comm, device, library: Library::open()?, cudarc, slice, address })
    }

    /// Returns a graph of all calls, for the ways that replay one.
    fn graph(&mut self, way: Way) -> Outcome<Option<Replay>> {
        let way = match way {
            Way::Graph => Way::Address,
            Way::NcclGraph => Way::Nccl,
            _ => return Ok(None),
        };
        let stream = self.device.context().new_stream()?;
        self.device.synchronize()?;
        self.comm.barrier()?;
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        let queued = (0..CALLS).try_for_each(|_| self.call(way, &stream));
        let graph = stream.end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)?;
        queued?;
        let graph = graph.ok_or("the calls added nothing to the graph")?;
        graph.upload()?;
        stream.synchronize()?;
        Ok(Some((graph, stream)))
    }

    /// Returns the microseconds per call until the last is queued and until it has ended, and the allocations of all
    /// calls.
    fn in_a_row(&mut self, way: Way, graph: Option<&Replay>) -> Outcome<(f64, f64, usize)> {
        let stream = self.device.stream().clone();
        self.comm.barrier()?;
        let mut queued = Ok(());
        let began = Instant::now();
        let allocated = allocations(|| {
            queued = match graph {
                Some((graph, _)) => graph.launch().map_err(Into::into),
                None => (0..CALLS).try_for_each(|_| self.call(way, &stream)),
            }
        });
        let issued = began.elapsed();
        queued?;
        match graph {
            // Other ranks may use the same context.
            Some((_, replays)) => replays.synchronize()?,
            None => self.device.synchronize()?,
        }
        let per_call = |time: Duration| time.as_secs_f64() * 1e6 / CALLS as f64;
        Ok((per_call(issued), per_call(began.elapsed()), allocated))
    }

    fn call(&mut self, way: Way, stream: &Arc<CudaStream>) -> Outcome<()> {
        let (address, count) = (self.address, self.slice.len());
        match way {
            Way::Slice => self.comm.all_reduce(&mut self.slice, ReduceOp::Sum)?,
            Way::Address | Way::Graph => {
                // SAFETY: the slice lives until the stream has been synchronized.
                let mut buffer = unsafe { RawDeviceSlice::<f32>::new(self.device.context(), address, count) };
                self.comm.with_stream(stream).all_reduce(&mut buffer, ReduceOp::Sum)?;
            }
            Way::Raw => {
                let buffer = RawBuffer { address, count, dtype: DType::F32 };
                // SAFETY: as above.
                unsafe { self.device.raw().call(RawCall::AllReduce(ReduceOp::Sum), buffer, buffer, stream) }?;
            }
            Way::Nccl | Way::NcclGraph => {
                // SAFETY: as above, and only this thread uses the communicator.
                unsafe { nccl_all_reduce(self.library, self.device.raw().nccl_handle(), address, count, stream) }?;
            }
            Way::Cudarc => {
                let cudarc = self.cudarc.ok_or("cudarc has no communicator")?;
                cudarc.all_reduce_in_place(&mut self.slice, &nccl::ReduceOp::Sum).map_err(failed)?;
            }
        }
        Ok(())
    }
}

/// Calls NCCL as a program without this crate would.
///
/// # Safety
///
/// The address must be memory of the communicator's device, of `count` floats, until the stream has run the call.
unsafe fn nccl_all_reduce(library: &Library, comm: ncclComm_t, address: u64, count: usize, stream: &CudaStream) -> Outcome<()> {
    let (pointer, queue) = (address as usize as *mut c_void, stream.cu_stream().cast());
    // SAFETY: guaranteed by the caller.
    let mut answer =
        unsafe { library.ncclAllReduce(pointer, pointer, count, ncclDataType_t::ncclFloat32, ncclRedOp_t::ncclSum, comm, queue) }?;
    while answer == ncclResult_t::ncclInProgress {
        // SAFETY: the communicator is alive, and the result goes to a local variable.
        let asked = unsafe { library.ncclCommGetAsyncError(comm, &mut answer) }?;
        if asked != ncclResult_t::ncclSuccess {
            answer = asked;
        }
    }
    if answer == ncclResult_t::ncclSuccess { Ok(()) } else { Err(format!("ncclAllReduce: {answer:?}").into()) }
}
