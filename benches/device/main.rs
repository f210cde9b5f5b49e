//! What the device backend costs by itself: our kernels against a copy inside the device, and our calls against NCCL's own.
//!
//! `cargo bench --bench device`, or `-- kernels`, `-- geometry` (threads and blocks of the kernels), `-- calls`. Prints CSV. Sizes and
//! repetitions by `--bytes N,N…` (of one input of a kernel) and `--rounds N`; ranks of `calls` by `--ranks N`, which may share one device
//! with `NCCL_MULTI_RANK_GPU_ENABLE=1` and NCCL 2.30.3; `--without-cudarc` leaves cudarc's communicator out, which waits for its ranks
//! without a limit. `-- host` has the time of a call on the processor, on the simulated GPU in place of a real one. Where there is no device it says so, and that is all, unless `COLLECTIVES_TEST_GPU=real` promises one. For
//! collectives themselves use `cargo perf`.

#![expect(unsafe_code, reason = "kernels and NCCL take addresses")]

#[path = "../../tests/common/allocations.rs"]
mod allocations;
mod calls;
mod host;
mod kernels;

use std::error::Error;
use std::sync::Arc;

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
                // What cargo hands to every benchmark.
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

/// So many bytes in whole pages, one at least.
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

/// Says that there is nothing to measure on; a failure where there should be.
fn without_device(why: &str) -> Outcome<()> {
    if std::env::var("COLLECTIVES_TEST_GPU").as_deref() == Ok("real") {
        return Err(format!("{why}; COLLECTIVES_TEST_GPU=real asks for the real ones").into());
    }
    println!("# {why}");
    Ok(())
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
