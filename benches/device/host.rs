//! The CPU time of a call, compared with NCCL's on a blocking communicator. It runs on the simulated GPU, whose streams
//! start no work while the calls are queued.

use std::ffi::c_void;
use std::time::{Duration, Instant};

use collectives::{Communicator, Config, Device, DeviceChoice, ReduceOp, interop::RawDeviceSlice, nccl::CheckDeviceCalls};
use cudarc::driver::{CudaSlice, DevicePtrMut};
use nccl_sys::{Library, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use simgpu::Gate;

use crate::{Outcome, Wish, median};

/// Ways to call an all-reduce in place.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    /// `ncclAllReduce` on a blocking communicator.
    Nccl,
    /// The same again: the difference is noise.
    NcclAgain,
    /// `Communicator::all_reduce` on an address, with a stream.
    Address,
    /// `ncclAllReduce` between cudarc's own calls that order a slice.
    NcclSlice,
    /// `Communicator::all_reduce` on a slice.
    Slice,
}

const WAYS: [Way; 5] = [Way::Nccl, Way::NcclAgain, Way::Address, Way::NcclSlice, Way::Slice];
/// The way that each is compared with.
const fn baseline(way: Way) -> Way {
    if matches!(way, Way::Slice | Way::NcclSlice) { Way::NcclSlice } else { Way::Nccl }
}
/// Elements of a call, and calls in a row.
const COUNT: usize = 256;
const CALLS: usize = 100;

/// One of two ranks.
struct Rank {
    comm: Communicator,
    device: Device,
    slice: CudaSlice<i32>,
    address: u64,
    nccl: ncclComm_t,
}

// SAFETY: any thread may use NCCL's handle, one at a time.
unsafe impl Send for Rank {}

/// Prints the nanoseconds per call, the median over the rounds. Ratios and differences to the baseline are medians over
/// the rounds too. `quiet_more_ns` is the difference of the 10th percentiles: on a busy machine, other programs only
/// add time.
pub(crate) fn all(wish: &Wish) -> Outcome<()> {
    simgpu::install();
    let library = Library::open()?;
    let mut config = Config::default();
    // SAFETY: both ranks of this program make the same calls.
    config.check_device_calls = unsafe { CheckDeviceCalls::unchecked_after(0) };
    let comms = Communicator::builder().config(config).require_device(DeviceChoice::Local).local(2)?;
    let mut id = ncclUniqueId { internal: [0; 128] };
    // SAFETY: the result goes to a local variable.
    let made = unsafe { library.ncclGetUniqueId(&mut id) }?;
    expect("ncclGetUniqueId", made)?;
    let ranks: Outcome<Vec<Rank>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || Rank::new(comm, library, id))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| Err("a rank panicked".into()))).collect()
    });
    let mut ranks = ranks?;
    let mut times = [const { Vec::new() }; WAYS.len()];
    for round in 0..=wish.rounds.max(200) {
        for turn in 0..WAYS.len() {
            let way = (turn + round) % WAYS.len();
            let time = in_a_row(&mut ranks, library, WAYS[way])?;
            // The first round warms up.
            if round > 0 {
                times[way].push(time);
            }
        }
    }
    println!("way,ranks,bytes,issue_ns,baseline,ratio,more_ns,quiet_more_ns");
    for (way, own) in WAYS.into_iter().zip(&times) {
        let base = &times[WAYS.iter().position(|other| *other == baseline(way)).unwrap_or(0)];
        let pairs = || own.iter().zip(base);
        let (ratio, more) =
            (median(pairs().map(|(own, base)| own / base).collect()), median(pairs().map(|(own, base)| own - base).collect()));
        let (issue, quiet) = (median(own.clone()), quick(own.clone()) - quick(base.clone()));
        println!("{way:?},2,{},{issue:.0},{:?},{ratio:.3},{more:.0},{quiet:.0}", 4 * COUNT, baseline(way));
    }
    for Rank { nccl, .. } in ranks {
        // SAFETY: all calls on it have ended, and it is not used again.
        let ended = unsafe { library.ncclCommAbort(nccl) }?;
        expect("ncclCommAbort", ended)?;
    }
    Ok(())
}

/// Returns the 10th percentile.
fn quick(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 10]
}

fn expect(call: &str, answer: ncclResult_t) -> Outcome<()> {
    if answer == ncclResult_t::ncclSuccess { Ok(()) } else { Err(format!("{call}: {answer:?}").into()) }
}

/// Returns the nanoseconds per call of rank 0. No call starts before all are queued. The result is checked.
fn in_a_row(ranks: &mut [Rank], library: &'static Library, way: Way) -> Outcome<f64> {
    let value = |rank: usize| 7 + 3 * rank as i32;
    for (at, rank) in ranks.iter_mut().enumerate() {
        rank.device.stream().memcpy_htod(&[value(at); COUNT], &mut rank.slice)?;
        rank.device.synchronize()?;
    }
    let gates: Vec<Gate> = ranks.iter().map(|rank| Gate::close(rank.device.stream().cu_stream().cast())).collect();
    let mut took = Duration::ZERO;
    for (at, rank) in ranks.iter_mut().enumerate() {
        rank.device.context().bind_to_thread()?;
        let began = Instant::now();
        (0..CALLS).try_for_each(|_| rank.call(library, way))?;
        if at == 0 {
            took = began.elapsed();
        }
    }
    gates.into_iter().for_each(Gate::open);
    for rank in ranks.iter() {
        rank.device.synchronize()?;
        let result = rank.device.stream().clone_dtoh(&rank.slice)?;
        if result != [value(1); COUNT] {
            return Err(format!("{way:?}: wrong: {:?}", &result[..4]).into());
        }
    }
    Ok(took.as_secs_f64() * 1e9 / CALLS as f64)
}

impl Rank {
    fn new(comm: Communicator, library: &'static Library, id: ncclUniqueId) -> Outcome<Self> {
        let device = comm.device().ok_or("there is no device")?;
        device.context().bind_to_thread()?;
        let mut nccl = nccl_sys::NCCL_COMM_NULL;
        // SAFETY: the handle goes to a local variable, and both ranks make this call.
        let made = unsafe { library.ncclCommInitRank(&mut nccl, comm.world_size() as i32, id, comm.rank() as i32) }?;
        expect("ncclCommInitRank", made)?;
        let mut slice = device.stream().alloc_zeros(COUNT)?;
        let address = slice.device_ptr_mut(device.stream()).0;
        Ok(Self { comm, device, slice, address, nccl })
    }

    fn call(&mut self, library: &Library, way: Way) -> Outcome<()> {
        let Self { comm, device, slice, address, nccl } = self;
        let stream = device.stream();
        let raw = |address: u64| {
            let (pointer, queue) = (address as usize as *mut c_void, stream.cu_stream().cast());
            let (dtype, op) = (ncclDataType_t::ncclInt32, ncclRedOp_t::ncclMax);
            // SAFETY: the address is `COUNT` elements of the slice, which lives until the stream has run the call; only
            // this thread uses the communicator.
            unsafe { library.ncclAllReduce(pointer, pointer, COUNT, dtype, op, *nccl, queue) }
        };
        match way {
            Way::Nccl | Way::NcclAgain => expect("ncclAllReduce", raw(*address)?),
            Way::NcclSlice => {
                let (address, _guard) = slice.device_ptr_mut(stream);
                expect("ncclAllReduce", raw(address)?)
            }
            Way::Address => {
                // SAFETY: the slice lives until the stream has been synchronized, and is used on that stream alone.
                let mut buffer = unsafe { RawDeviceSlice::<i32>::new(device.context(), *address, COUNT) };
                Ok(comm.all_reduce(&mut buffer, ReduceOp::Max)?)
            }
            Way::Slice => Ok(comm.all_reduce(slice, ReduceOp::Max)?),
        }
    }
}
