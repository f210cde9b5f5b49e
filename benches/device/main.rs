//! The cost of the device backend: our kernels compared with a copy on the device, and our calls compared with NCCL's.
//!
//! `cargo bench --bench device`, or `-- kernels`, `-- geometry` (threads and blocks of the kernels), `-- calls`, `--
//! host` (the CPU time of a call, on the simulated GPU instead of a real one). Prints CSV. Options:
//!
//! - `--bytes N,N…`: sizes of one input of a kernel.
//! - `--rounds N`: repetitions.
//! - `--ranks N`: ranks of `calls`. They may share one device with `NCCL_MULTI_RANK_GPU_ENABLE=1` and NCCL 2.30.3.
//! - `--without-cudarc`: omits cudarc's communicator, which waits for its ranks without a limit.
//!
//! Without a device it prints why and exits successfully, unless `COLLECTIVES_TEST_GPU=real` requires one. To measure
//! collectives use `cargo perf`.

#![expect(unsafe_code, reason = "kernels and NCCL take addresses")]

#[path = "../../tests/common/allocations.rs"]
mod allocations;
mod calls;
mod host;
mod kernels;

use std::error::Error;
use std::sync::Arc;

use collectives::__private::milliseconds_between;
use collectives::{Communicator, DeviceChoice};
use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUevent_flags;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// The command line.
struct Wish {
    kernels: bool,
    geometry: bool,
    calls: bool,
    host: bool,
    cudarc: bool,
    bytes: Vec<usize>,
    rounds: usize,
    ranks: usize,
}

impl Wish {
    fn read() -> Outcome<Self> {
        let bytes = vec![1 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30];
        let mut wish = Self { kernels: false, geometry: false, calls: false, host: false, cudarc: true, bytes, rounds: 9, ranks: 2 };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word}: a number is missing"));
            match &word[..] {
                "kernels" => wish.kernels = true,
                "geometry" => wish.geometry = true,
                "calls" => wish.calls = true,
                "host" => wish.host = true,
                "--without-cudarc" => wish.cudarc = false,
                "--bytes" => wish.bytes = value()?.split(',').map(whole_pages).collect::<Outcome<_>>()?,
                "--rounds" => wish.rounds = value()?.parse::<usize>()?.max(1),
                "--ranks" => wish.ranks = value()?.parse::<usize>()?.max(1),
                // Arguments that cargo passes to every benchmark.
                "--bench" | "--test" => {}
                other => return Err(format!("{other}: not understood").into()),
            }
        }
        if !wish.kernels && !wish.geometry && !wish.calls {
            (wish.kernels, wish.calls) = (true, true);
        }
        Ok(wish)
    }
}

/// Returns a number of bytes in whole pages, at least one page.
fn whole_pages(number: &str) -> Outcome<usize> {
    Ok(number.parse::<usize>()?.max(4096) / 4096 * 4096)
}

fn main() -> Outcome<()> {
    let wish = Wish::read()?;
    if wish.host {
        return host::all(&wish);
    }
    let comm = Communicator::builder().device(DeviceChoice::Local).local(1)?.remove(0);
    let Some(device) = comm.device() else {
        return without_device(&format!("no device: {}", comm.why_no_device().unwrap_or_default()));
    };
    println!("# {} [{}], NCCL {}", device.name(), device.pci_address(), device.nccl_version());
    if wish.kernels {
        kernels::all(&device, &wish)?;
    }
    if wish.geometry {
        kernels::geometry(&device, &wish)?;
    }
    drop(comm);
    if wish.calls { calls::all(&wish) } else { Ok(()) }
}

/// Reports that there is no device; an error if one is required.
fn without_device(why: &str) -> Outcome<()> {
    if std::env::var("COLLECTIVES_TEST_GPU").as_deref() == Ok("real") {
        return Err(format!("{why}; COLLECTIVES_TEST_GPU=real asks for the real ones").into());
    }
    println!("# {why}");
    Ok(())
}

/// Returns the median.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Returns the microseconds of the work that `queue` queues, by events: the median of `rounds` rounds after a first one
/// that does not count.
fn timed(stream: &Arc<CudaStream>, rounds: usize, mut queue: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
    let mark = || stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
    let mut round = || -> Outcome<f64> {
        let began = mark()?;
        queue()?;
        Ok(f64::from(milliseconds_between(&began, &mark()?)?) * 1e3)
    };
    round()?;
    Ok(median((0..rounds).map(|_| round()).collect::<Outcome<_>>()?))
}
