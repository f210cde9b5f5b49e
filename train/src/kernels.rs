//! Our kernels on one device: addition, weighting and conversion of gradients, and sums of their squares. They are
//! loaded once for all users of the device.

#![expect(unsafe_code, reason = "kernels take addresses")]

use std::sync::{Arc, Mutex, PoisonError, Weak};

use collectives::{DType, Error, Result, device_count};
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream, DriverError, LaunchConfig, PushKernelArg as _, sys};
use cudarc::nvrtc::Ptx;

use crate::tuning::{BLOCKS_PER_MULTIPROCESSOR, CHUNKS_PER_THREAD};

/// The images for devices of compute capability 7.0 and higher, and 8.0 and higher.
const SM70: &str = include_str!(concat!(env!("COLLECTIVES_KERNELS"), "/train_sm70.ptx"));
const SM80: &str = include_str!(concat!(env!("COLLECTIVES_KERNELS"), "/train_sm80.ptx"));

/// The most partial sums of squares, one for each block. That many blocks are enough for any device. The limit is the
/// same on all devices, so that equal elements have equal sums.
pub(crate) const MOST_PARTIALS: usize = 4096;

/// Threads in a block, as every kernel expects.
const BLOCK: u32 = 512;

/// The bytes that one thread moves at a time.
const CHUNK_BYTES: u64 = 16;

/// The types of gradients.
const TYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::Bf16];

/// A kernel for each of the [`TYPES`].
type Each<F = CudaFunction> = [F; TYPES.len()];

/// The kernels of one device. The user of a launched kernel holds the kernels until that kernel has run, or leaks them
/// if the user cannot know when it has run.
#[derive(Debug)]
pub(crate) struct Kernels {
    accumulate: Each,
    weigh: Each,
    squares: Each,
    add_partials: CudaFunction,
    /// By source type, then by destination type.
    convert: Each<Each>,
    most_blocks: u32,
}

/// The kernels that are in use, for each context.
static LOADED: Mutex<Vec<(usize, Weak<Kernels>)>> = Mutex::new(Vec::new());

/// Returns the image for a device of this compute capability.
fn image(capability: (i32, i32)) -> &'static str {
    if capability >= (8, 0) { SM80 } else { SM70 }
}

/// Looks up a kernel, and forces the driver to load it by asking for an attribute. Otherwise the driver may defer the
/// loading to the first launch, which could then wait for a kernel that waits for us.
fn find(module: &Arc<CudaModule>, name: &str) -> Result<CudaFunction> {
    let failed = |error| Error::cuda(format!("looking up the kernel {name:?}"), error);
    let function = module.load_function(name).map_err(failed)?;
    function.max_threads_per_block().map_err(failed)?;
    Ok(function)
}

/// Calls `make` for each type.
fn each<F>(mut make: impl FnMut(DType) -> Result<F>) -> Result<Each<F>> {
    let [f32, f64, f16, bf16] = TYPES;
    Ok([make(f32)?, make(f64)?, make(f16)?, make(bf16)?])
}

/// Returns the function of a type.
fn of<'a, F>(functions: &'a Each<F>, dtype: DType, what: &str) -> Result<&'a F> {
    let place = TYPES.iter().position(|known| *known == dtype);
    place.and_then(|place| functions.get(place)).ok_or_else(|| Error::unsupported(what, "there is no kernel for this element type"))
}

/// Returns a grid of this many blocks.
fn grid(blocks: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (BLOCK, 1, 1), shared_mem_bytes: 0 }
}

fn refused(what: &str) -> impl Fn(DriverError) -> Error {
    move |error| Error::cuda(format!("launching the kernel for {what}"), error)
}

impl Kernels {
    /// Returns the kernels on a context's device: those already in use there, or newly loaded ones. Call it before any
    /// work is queued, because the driver may wait for a busy device.
    ///
    /// # Errors
    ///
    /// `NoDevice` for a driver that lacks a function used here, `Cuda` if it refuses the image.
    pub(crate) fn on(context: &Arc<CudaContext>) -> Result<Arc<Self>> {
        // Live contexts have distinct addresses, and kernels keep their context alive.
        let key = context.cu_ctx() as usize;
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.retain(|(_, kernels)| kernels.strong_count() != 0);
        if let Some(kernels) = loaded.iter().find(|(of, _)| *of == key).and_then(|(_, kernels)| kernels.upgrade()) {
            return Ok(kernels);
        }
        let kernels = Arc::new(Self::load(context)?);
        loaded.push((key, Arc::downgrade(&kernels)));
        Ok(kernels)
    }

    fn load(context: &Arc<CudaContext>) -> Result<Self> {
        // cudarc panics if the driver lacks a function. This call checks for all functions that this crate uses.
        device_count().map_err(|error| match error {
            Error::NoDevice { reason, .. } => Error::NoDevice { call: "on_device".to_owned(), reason },
            other => other,
        })?;
        let failed = |error| Error::cuda(format!("loading kernels of the family \"train\" on device {}", context.ordinal()), error);
        let capability = context.compute_capability().map_err(failed)?;
        let multiprocessors = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors = context.attribute(multiprocessors).map_err(failed)?.unsigned_abs();
        let module = context.load_module(Ptx::from_src(image(capability))).map_err(failed)?;
        Ok(Self {
            accumulate: each(|dtype| find(&module, &format!("accumulate_{dtype}")))?,
            weigh: each(|dtype| find(&module, &format!("weigh_{dtype}")))?,
            squares: each(|dtype| find(&module, &format!("squares_{dtype}")))?,
            add_partials: find(&module, "add_partials")?,
            convert: each(|from| each(|to| find(&module, &format!("convert_{from}_{to}"))))?,
            most_blocks: multiprocessors.max(1) * BLOCKS_PER_MULTIPROCESSOR,
        })
    }

    /// Returns a grid with as many blocks as `bytes` keep busy.
    fn grid_for(&self, bytes: u64) -> LaunchConfig {
        grid(bytes.div_ceil(CHUNK_BYTES * u64::from(BLOCK)).clamp(1, u64::from(self.most_blocks)) as u32)
    }

    /// Adds elements to others, each sum rounded once.
    ///
    /// # Safety
    ///
    /// `into` and `from` are `count` elements of this type each, disjoint, in memory of the stream's device until the
    /// stream has passed the call. These kernels must stay loaded until then; that also applies to all other functions
    /// here.
    pub(crate) unsafe fn accumulate(&self, dtype: DType, into: u64, from: u64, count: u64, stream: &CudaStream) -> Result<()> {
        let what = "a sum of gradients";
        let mut launch = stream.launch_builder(of(&self.accumulate, dtype, what)?);
        launch.arg(&into).arg(&from).arg(&count);
        // SAFETY: the parameters are those of the kernel; the caller promises the rest.
        unsafe { launch.launch(self.grid_for(count * dtype.size_bytes() as u64)) }.map(drop).map_err(refused(what))
    }

    /// Multiplies each element in place, in `f64`, and rounds it once.
    ///
    /// # Safety
    ///
    /// `data` is `count` elements of this type, memory of the stream's device until the stream has passed the call.
    pub(crate) unsafe fn weigh(&self, dtype: DType, data: u64, count: u64, factor: f64, stream: &CudaStream) -> Result<()> {
        let what = "a multiplication";
        let mut launch = stream.launch_builder(of(&self.weigh, dtype, what)?);
        launch.arg(&data).arg(&count).arg(&factor);
        // SAFETY: the parameters are those of the kernel; the caller promises the rest.
        unsafe { launch.launch(self.grid_for(count * dtype.size_bytes() as u64)) }.map(drop).map_err(refused(what))
    }

    /// Converts each element to `f32`, multiplies it by the weight, and rounds it to `f32`, then to the other type.
    ///
    /// # Safety
    ///
    /// `source` and `destination` are `count` elements of their types, disjoint, in memory of the stream's device until
    /// the stream has passed the call.
    pub(crate) unsafe fn convert(
        &self,
        (from, source): (DType, u64),
        (to, destination): (DType, u64),
        count: u64,
        weight: f64,
        stream: &CudaStream,
    ) -> Result<()> {
        let what = "a conversion";
        let mut launch = stream.launch_builder(of(of(&self.convert, from, what)?, to, what)?);
        launch.arg(&source).arg(&destination).arg(&count).arg(&weight);
        let bytes = count * from.size_bytes().max(to.size_bytes()) as u64;
        // SAFETY: the parameters are those of the kernel; the caller promises the rest.
        unsafe { launch.launch(self.grid_for(bytes)) }.map(drop).map_err(refused(what))
    }

    /// Adds the squares of elements to a total. The order of summation depends only on the elements' type and number.
    ///
    /// # Safety
    ///
    /// `data` is `count` elements of this type, `partials` has room for [`MOST_PARTIALS`] aligned `f64`s, `total` is
    /// another one. All are disjoint, in memory of the stream's device until the stream has passed the call.
    pub(crate) unsafe fn add_squares(
        &self,
        dtype: DType,
        (data, count): (u64, u64),
        partials: u64,
        total: u64,
        stream: &CudaStream,
    ) -> Result<()> {
        let what = "a sum of squares";
        let per_block = CHUNK_BYTES * CHUNKS_PER_THREAD * u64::from(BLOCK);
        let blocks = (count * dtype.size_bytes() as u64).div_ceil(per_block).clamp(1, MOST_PARTIALS as u64);
        let mut launch = stream.launch_builder(of(&self.squares, dtype, what)?);
        launch.arg(&data).arg(&count).arg(&partials);
        // SAFETY: the parameters are those of the kernel, which reads `count` elements and writes a number for each
        // block, of which there are no more than there is room for (clamped above); the caller promises that the memory
        // exists.
        unsafe { launch.launch(grid(blocks as u32)) }.map_err(refused(what))?;
        let mut launch = stream.launch_builder(&self.add_partials);
        launch.arg(&partials).arg(&blocks).arg(&total);
        // SAFETY: the parameters are those of the kernel, which reads the given count of numbers, written before by
        // those blocks on this stream, and adds to the total; the caller promises that the memory exists.
        unsafe { launch.launch(grid(1)) }.map(drop).map_err(refused(what))
    }
}

#[cfg(test)]
mod tests;
