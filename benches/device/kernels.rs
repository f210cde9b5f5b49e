//! The kernels that fold, compared with a copy of as many bytes on the device.

use std::sync::Arc;

use collectives::Device;
use cudarc::driver::sys::CUdevice_attribute;
use cudarc::driver::{CudaContext, CudaFunction, CudaSlice, CudaStream, LaunchConfig, PushKernelArg};

use crate::{Outcome, Wish, timed};

/// An image of kernels.
struct Family {
    image: &'static str,
    /// Names, each with the bytes of an element if counts are in elements, else 1.
    folds: &'static [(&'static str, usize)],
}

const FAMILIES: [Family; 3] = [
    Family { image: include_str!("../../kernels/ptx/bits_sm80.ptx"), folds: &[("fold_xor_b8", 1)] },
    Family {
        image: include_str!("../../kernels/ptx/sum_sm80.ptx"),
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
        image: include_str!("../../kernels/ptx/average_sm80.ptx"),
        folds: &[("fold_avg_f32", 4), ("fold_avg_bf16", 2), ("fold_avg_f8e4m3", 1), ("fold_avg_i32", 4), ("fold_avg_i8", 1)],
    },
];
/// The kernels that are measured with other threads and blocks: one for each kind of work.
const SWEPT: [&str; 4] = ["fold_xor_b8", "fold_sum_i16", "fold_avg_f32", "fold_avg_bf16"];
/// Numbers of inputs to fold.
const INPUTS: [u32; 6] = [1, 2, 3, 4, 6, 8];
/// The library's threads per block and blocks per multiprocessor.
const GEOMETRY: (u32, u32) = (512, 4);

/// Memory for the inputs of a size, and the speed of a copy of one of them.
struct Arena {
    stream: Arc<CudaStream>,
    inputs: CudaSlice<u8>,
    output: CudaSlice<u8>,
    bytes: usize,
    rounds: usize,
    /// The speed of a copy, read and written, in GB/s.
    copy: f64,
}

impl Arena {
    /// Allocates the memory. Returns `None`, and prints a comment, if the device does not have enough.
    fn new(device: &Device, bytes: usize, rounds: usize) -> Outcome<Option<Self>> {
        let stream = device.context().new_stream()?;
        let most = INPUTS.into_iter().max().unwrap_or(2) as usize;
        let (Ok(inputs), Ok(output)) = (stream.alloc_zeros::<u8>(most * bytes), stream.alloc_zeros::<u8>(bytes)) else {
            println!("# not enough memory for {most} inputs of {bytes} bytes");
            return Ok(None);
        };
        let mut arena = Self { stream, inputs, output, bytes, rounds, copy: 1.0 };
        let (from, into, stream) = (arena.inputs.slice(..bytes), &mut arena.output, arena.stream.clone());
        let time = timed(&stream, rounds, || Ok(stream.memcpy_dtod(&from, into)?))?;
        arena.copy = arena.speed(2, time);
        println!("copy,1,{bytes},,,{time:.2},{:.1},1.000", arena.copy);
        Ok(Some(arena))
    }

    /// Returns the GB/s of this many passes over an input in `time` microseconds.
    fn speed(&self, passes: usize, time: f64) -> f64 {
        passes as f64 * self.bytes as f64 / time / 1e3
    }

    /// Times a fold, and prints its row.
    fn row(&mut self, context: &CudaContext, name: &str, fold: &Fold<'_>) -> Outcome<()> {
        let stream = self.stream.clone();
        let (inputs, output, bytes) = (&self.inputs, &mut self.output, self.bytes);
        let time = timed(&stream, self.rounds, || fold.launch(context, &stream, inputs, output, bytes))?;
        let speed = self.speed(fold.ranks as usize + 1, time);
        let (threads, blocks) = fold.geometry;
        println!("{name},{},{},{threads},{blocks},{time:.2},{speed:.1},{:.3}", fold.ranks, self.bytes, speed / self.copy);
        Ok(())
    }
}

const HEADER: &str = "kernel,inputs,bytes_each,threads,blocks_per_multiprocessor,time_us,GBps,of_copy";

/// Prints the bytes per second that each fold reads and writes, and the ratio to a copy.
pub(crate) fn all(device: &Device, wish: &Wish) -> Outcome<()> {
    println!("{HEADER}");
    for bytes in &wish.bytes {
        let Some(mut arena) = Arena::new(device, *bytes, wish.rounds)? else { continue };
        for family in FAMILIES {
            let module = device.context().load_module(family.image.into())?;
            for (name, element) in family.folds {
                let function = module.load_function(name)?;
                for ranks in INPUTS {
                    arena.row(device.context(), name, &Fold { function: &function, ranks, element: *element, geometry: GEOMETRY })?;
                }
            }
        }
    }
    Ok(())
}

/// Prints the same for some folds of two and eight inputs, with other threads and blocks than the library's.
pub(crate) fn geometry(device: &Device, wish: &Wish) -> Outcome<()> {
    println!("{HEADER}");
    for bytes in &wish.bytes {
        let Some(mut arena) = Arena::new(device, *bytes, wish.rounds)? else { continue };
        for family in FAMILIES {
            let module = device.context().load_module(family.image.into())?;
            for (name, element) in family.folds.iter().filter(|(name, _)| SWEPT.contains(name)) {
                let function = module.load_function(name)?;
                let shapes = [128, 256, 512].into_iter().flat_map(|threads| [1, 2, 4, 8, 16].map(|blocks| (threads, blocks)));
                for (geometry, ranks) in shapes.flat_map(|shape| [(shape, 2), (shape, 8)]) {
                    arena.row(device.context(), name, &Fold { function: &function, ranks, element: *element, geometry })?;
                }
            }
        }
    }
    Ok(())
}

/// One fold.
struct Fold<'a> {
    function: &'a CudaFunction,
    ranks: u32,
    element: usize,
    geometry: (u32, u32),
}

impl Fold<'_> {
    fn launch(
        &self,
        context: &CudaContext,
        stream: &Arc<CudaStream>,
        inputs: &CudaSlice<u8>,
        output: &mut CudaSlice<u8>,
        bytes: usize,
    ) -> Outcome<()> {
        let multiprocessors = context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs();
        let (threads, each) = self.geometry;
        let blocks = (bytes as u64).div_ceil(16 * u64::from(threads)).clamp(1, u64::from(multiprocessors * each)) as u32;
        let (stride, own, nobody, count) = (bytes as u64, 0_u64, u32::MAX, (bytes / self.element) as u64);
        let mut launch = stream.launch_builder(self.function);
        launch.arg(inputs).arg(&stride).arg(&own).arg(&nobody).arg(&self.ranks).arg(output).arg(&count).arg(&self.ranks);
        let shape = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the parameters are those of a fold (kernels/fold.cuh); the inputs hold at least `ranks` times as many bytes as the output.
        unsafe { launch.launch(shape) }?;
        Ok(())
    }
}
