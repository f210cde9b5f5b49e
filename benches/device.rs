//! What the device plane costs by itself: our kernels against a copy inside the device, and our calls against NCCL's own.
//!
//! `cargo bench --bench device`, or `-- kernels`, `-- calls`. Prints CSV. Sizes and repetitions by `--bytes N` (of one input of a kernel)
//! and `--rounds N`; ranks of `calls` by `--ranks N`, which may share one device with `NCCL_MULTI_RANK_GPU_ENABLE=1` and NCCL 2.30.3.
//! Where there is no device it says so, and that is all. For collectives themselves use `cargo perf`.

#![expect(unsafe_code, reason = "kernels and NCCL take addresses")]

use std::error::Error;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Instant;

use collectives::{Communicator, DType, Device, DeviceChoice, RawBuffer, RawCall, RawDevice, ReduceOp};
use cudarc::driver::sys::{CUdevice_attribute, CUevent_flags};
use cudarc::driver::{CudaContext, CudaFunction, CudaSlice, CudaStream, DevicePtr, LaunchConfig, PushKernelArg};
use nccl_sys::{Library, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// An image of kernels with the launch that the library gives them.
struct Family {
    image: &'static str,
    /// Name, bytes of an element where counts are elements, else 1.
    folds: &'static [(&'static str, usize)],
}

const FAMILIES: [Family; 3] = [
    Family { image: include_str!("../kernels/ptx/bits_sm80.ptx"), folds: &[("fold_xor_b8", 1)] },
    Family {
        image: include_str!("../kernels/ptx/sum_sm80.ptx"),
        folds: &[
            ("fold_sum_f32", 4),
            ("fold_sum_f64", 8),
            ("fold_sum_bf16", 2),
            ("fold_sum_i16", 2),
            ("fold_min_u16", 2),
            ("fold_sum_f8e4m3", 1),
            ("fold_max_f8e5m2", 1),
        ],
    },
    Family {
        image: include_str!("../kernels/ptx/average_sm80.ptx"),
        folds: &[("fold_avg_f32", 4), ("fold_avg_bf16", 2), ("fold_avg_f8e4m3", 1), ("fold_avg_i32", 4), ("fold_avg_i8", 1)],
    },
];
/// How many inputs are folded.
const INPUTS: [u32; 4] = [2, 3, 4, 8];
/// Threads in a block, and blocks for each multiprocessor.
const GEOMETRY: (u32, u32) = (512, 4);

/// The command line.
struct Wish {
    kernels: bool,
    calls: bool,
    bytes: usize,
    rounds: usize,
    ranks: usize,
}

impl Wish {
    fn read() -> Outcome<Self> {
        let mut wish = Self { kernels: false, calls: false, bytes: 256 << 20, rounds: 9, ranks: 2 };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut number = || -> Outcome<usize> { Ok(words.next().ok_or_else(|| format!("{word}: a number is missing"))?.parse()?) };
            match &word[..] {
                "kernels" => wish.kernels = true,
                "calls" => wish.calls = true,
                "--bytes" => wish.bytes = number()?.max(4096) / 4096 * 4096,
                "--rounds" => wish.rounds = number()?.max(1),
                "--ranks" => wish.ranks = number()?.max(1),
                // What cargo hands to every benchmark.
                "--bench" | "--test" => {}
                other => return Err(format!("{other}: not understood").into()),
            }
        }
        if !wish.kernels && !wish.calls {
            (wish.kernels, wish.calls) = (true, true);
        }
        Ok(wish)
    }
}

fn main() -> Outcome<()> {
    let wish = Wish::read()?;
    let comm = Communicator::builder().device(DeviceChoice::Local).local(1)?.remove(0);
    let Some(device) = comm.device() else {
        println!("# no device: {}", comm.why_no_device().unwrap_or_default());
        return Ok(());
    };
    println!("# {} [{}], NCCL {}", device.name(), device.pci_address(), device.nccl_version());
    if wish.kernels {
        kernels(device, &wish)?;
    }
    drop(comm);
    if wish.calls { calls(&wish) } else { Ok(()) }
}

/// The middle one.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Microseconds of what `queue` queues, by events, the median of so many rounds after one that does not count.
fn timed(stream: &Arc<CudaStream>, rounds: usize, mut queue: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
    let mark = || stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
    let mut round = || -> Outcome<f64> {
        let began = mark()?;
        queue()?;
        Ok(f64::from(began.elapsed_ms(&mark()?)?) * 1e3)
    };
    round()?;
    Ok(median((0..rounds).map(|_| round()).collect::<Outcome<_>>()?))
}

/// Bytes read and written per second by each fold, and what share that is of a copy's.
fn kernels(device: Device<'_>, wish: &Wish) -> Outcome<()> {
    let context = device.context();
    let stream = context.new_stream()?;
    let most = INPUTS.into_iter().max().unwrap_or(2) as usize;
    let inputs = stream.alloc_zeros::<u8>(most * wish.bytes)?;
    let mut output = stream.alloc_zeros::<u8>(wish.bytes)?;
    let gigabytes = |passes: usize, time: f64| passes as f64 * wish.bytes as f64 / time / 1e3;
    let copying = timed(&stream, wish.rounds, || Ok(stream.memcpy_dtod(&inputs.slice(..wish.bytes), &mut output)?))?;
    let copy = gigabytes(2, copying);
    println!("kernel,inputs,bytes_each,time_us,GBps,of_copy");
    println!("copy,1,{},{copying:.2},{copy:.1},1.000", wish.bytes);
    for family in FAMILIES {
        let module = context.load_module(family.image.into())?;
        for (name, element) in family.folds {
            let function = module.load_function(name)?;
            for ranks in INPUTS {
                let fold = Fold { function: &function, ranks, bytes: wish.bytes, element: *element };
                let time = timed(&stream, wish.rounds, || fold.launch(context, &stream, &inputs, &mut output))?;
                let speed = gigabytes(ranks as usize + 1, time);
                println!("{name},{ranks},{},{time:.2},{speed:.1},{:.3}", wish.bytes, speed / copy);
            }
        }
    }
    Ok(())
}

/// One fold.
struct Fold<'a> {
    function: &'a CudaFunction,
    ranks: u32,
    bytes: usize,
    element: usize,
}

impl Fold<'_> {
    fn launch(&self, context: &CudaContext, stream: &Arc<CudaStream>, inputs: &CudaSlice<u8>, output: &mut CudaSlice<u8>) -> Outcome<()> {
        let multiprocessors = context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs();
        let (threads, each) = GEOMETRY;
        let blocks = (self.bytes as u64).div_ceil(16 * u64::from(threads)).clamp(1, u64::from(multiprocessors * each)) as u32;
        let (stride, own, nobody, count) = (self.bytes as u64, 0_u64, u32::MAX, (self.bytes / self.element) as u64);
        let mut launch = stream.launch_builder(self.function);
        launch.arg(inputs).arg(&stride).arg(&own).arg(&nobody).arg(&self.ranks).arg(output).arg(&count).arg(&self.ranks);
        let shape = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the parameters are those of a fold (kernels/fold.cuh); the inputs hold at least `ranks` times as many bytes as the output.
        unsafe { launch.launch(shape) }?;
        Ok(())
    }
}

/// Ways to call an all-reduce.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// `Communicator::all_reduce` on cudarc's slices, whose events are kept.
    Slice,
    /// The same on a `RawDevice`.
    Address,
    /// `NcclCommunicator::call`.
    Raw,
    /// `ncclAllReduce` itself.
    Nccl,
}

const WAYS: [Way; 4] = [Way::Slice, Way::Address, Way::Raw, Way::Nccl];
/// Calls in a row.
const CALLS: usize = 200;

/// Microseconds per call on the processor and in all, each the slowest rank's median.
fn calls(wish: &Wish) -> Outcome<()> {
    let made = Communicator::builder().require_device(DeviceChoice::Local).local(wish.ranks);
    let comms = match made {
        Ok(comms) => comms,
        Err(error) => {
            println!("# no calls between {} ranks: {error}", wish.ranks);
            return Ok(());
        }
    };
    println!("way,ranks,bytes,issue_us,time_us");
    let ended: Vec<Outcome<()>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || rank(&comm, wish.rounds))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| Err("a rank panicked".into()))).collect()
    });
    ended.into_iter().collect()
}

/// One rank's part. Rank 0 prints.
fn rank(comm: &Communicator, rounds: usize) -> Outcome<()> {
    let device = comm.device().ok_or("the device is gone")?;
    for count in [4_usize, 256 << 10] {
        let mut slice = device.stream().alloc_zeros::<f32>(count)?;
        let mut times = vec![(Vec::new(), Vec::new()); WAYS.len()];
        for round in 0..=rounds {
            for (way, (issue, all)) in WAYS.into_iter().zip(&mut times) {
                let (issued, ended) = in_a_row(comm, device, way, &mut slice)?;
                // The first round warms up.
                if round > 0 {
                    issue.push(issued);
                    all.push(ended);
                }
            }
        }
        for (way, (issue, all)) in WAYS.into_iter().zip(times) {
            let mut worst = [median(issue), median(all)];
            comm.all_reduce(&mut worst, ReduceOp::Max)?;
            if comm.rank() == 0 {
                println!("{way:?},{},{},{:.3},{:.3}", comm.world_size(), 4 * count, worst[0], worst[1]);
            }
        }
    }
    Ok(())
}

/// Microseconds per call until the last is queued, and until it has ended.
fn in_a_row(comm: &Communicator, device: Device<'_>, way: Way, slice: &mut CudaSlice<f32>) -> Outcome<(f64, f64)> {
    let (stream, count) = (device.stream(), slice.len());
    let address = slice.device_ptr(stream).0;
    let library = Library::open(None)?;
    comm.barrier()?;
    let began = Instant::now();
    for _ in 0..CALLS {
        match way {
            Way::Slice => comm.all_reduce(slice, ReduceOp::Sum)?,
            Way::Address => {
                // SAFETY: the slice is borrowed until the stream has been waited for.
                let mut buffer = unsafe { RawDevice::<f32>::new(device.context(), address, count) };
                comm.all_reduce(&mut buffer, ReduceOp::Sum)?;
            }
            Way::Raw => {
                let buffer = RawBuffer { address, count, dtype: DType::F32 };
                // SAFETY: as above.
                unsafe { device.raw().call(RawCall::AllReduce(ReduceOp::Sum), buffer, buffer, stream) }?;
            }
            // SAFETY: as above, and this thread alone uses the communicator.
            Way::Nccl => unsafe { nccl_all_reduce(library, device.raw().nccl_handle(), address, count, stream) }?,
        }
    }
    let issued = began.elapsed();
    device.synchronize()?;
    let per_call = |time: std::time::Duration| time.as_secs_f64() * 1e6 / CALLS as f64;
    Ok((per_call(issued), per_call(began.elapsed())))
}

/// NCCL's own call, as a program without this crate would make it.
///
/// # Safety
///
/// The address is memory of the communicator's device, of so many floats, until the stream has done the call.
unsafe fn nccl_all_reduce(library: &Library, comm: ncclComm_t, address: u64, count: usize, stream: &CudaStream) -> Outcome<()> {
    let (pointer, queue) = (address as usize as *mut c_void, stream.cu_stream().cast());
    // SAFETY: passed on.
    let mut answer =
        unsafe { library.ncclAllReduce(pointer, pointer, count, ncclDataType_t::ncclFloat32, ncclRedOp_t::ncclSum, comm, queue) }?;
    while answer == ncclResult_t::ncclInProgress {
        // SAFETY: the communicator is alive, and the answer is a variable of ours.
        let asked = unsafe { library.ncclCommGetAsyncError(comm, &mut answer) }?;
        if asked != ncclResult_t::ncclSuccess {
            answer = asked;
        }
    }
    if answer == ncclResult_t::ncclSuccess { Ok(()) } else { Err(format!("ncclAllReduce: {answer:?}").into()) }
}
