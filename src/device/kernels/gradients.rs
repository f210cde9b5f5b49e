//! What gradients in buckets need: elements added, weighted and converted in place or apart, and sums of their squares.

#![expect(unsafe_code, reason = "kernels take addresses")]

use std::sync::PoisonError;

use cudarc::driver::CudaStream;

use super::module::Gradients;
use super::{BLOCK, CHUNK_BYTES, Kernels, address};
use crate::device::plan::{FoldArguments, FoldOp};
use crate::tuning::device_folds::CHUNKS_PER_THREAD;
use crate::{DType, Result};

/// How many partial sums of squares there are at most: blocks enough for any device, and the same on all, so that equal elements
/// have equal sums.
pub(crate) const MOST_PARTIALS: usize = 4096;

impl Kernels {
    /// Loads what training needs beside what every plane has, once. To be called before anything is on its way: the driver may wait
    /// for a device that is busy.
    ///
    /// # Errors
    ///
    /// `Cuda` where the driver refuses the image.
    pub(crate) fn load_gradients(&self) -> Result<()> {
        self.gradients().map(drop)
    }

    fn gradients(&self) -> Result<&Gradients> {
        if let Some(loaded) = self.gradients.get() {
            return Ok(loaded);
        }
        let _one_at_a_time = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loaded) = self.gradients.get() {
            return Ok(loaded);
        }
        let loaded = Gradients::load(&self.gpu)?;
        Ok(self.gradients.get_or_init(|| loaded))
    }

    /// Adds elements to others, each sum rounded once.
    ///
    /// # Safety
    ///
    /// Both are `count` elements of this type, apart, memory of the stream's device until the stream has passed the call.
    pub(crate) unsafe fn accumulate(&self, dtype: DType, into: u64, from: u64, count: u64, stream: &CudaStream) -> Result<()> {
        let function = self.fold_of(FoldOp::Sum, dtype)?;
        // Input 0 is elsewhere, so that input 1 may begin where the inputs do.
        let arguments = FoldArguments { inputs: from, stride: 0, own: Some((into, 0)), ranks: 2, output: into, count, divisor: 1 };
        // SAFETY: a fold of elements of this type, of a module that is loaded as long as this is held; the rest is the caller's promise.
        unsafe { self.fold(function, &arguments, dtype.size_bytes(), stream) }
    }

    /// Multiplies each element in place, in `f64`, and rounds it once.
    ///
    /// # Safety
    ///
    /// `data` is `count` elements of this type, memory of the stream's device until the stream has passed the call.
    pub(crate) unsafe fn weigh(&self, dtype: DType, mut data: u64, mut count: u64, mut factor: f64, stream: &CudaStream) -> Result<()> {
        let function = self.weights[dtype as usize];
        let bytes = count * dtype.size_bytes() as u64;
        let mut parameters = [address(&mut data), address(&mut count), address(&mut factor)];
        // SAFETY: the parameters are those of the kernel; the rest is the caller's promise.
        unsafe { self.launch(function, "a multiplication", bytes, stream, &mut parameters) }
    }

    /// Each element as `f32`, times the weight, as `f32`, as the other type.
    ///
    /// # Safety
    ///
    /// Both are `count` elements of their types, apart, memory of the stream's device until the stream has passed the call.
    pub(crate) unsafe fn convert(
        &self,
        (from, mut source): (DType, u64),
        (to, mut destination): (DType, u64),
        mut count: u64,
        mut weight: f64,
        stream: &CudaStream,
    ) -> Result<()> {
        let function = self.gradients()?.convert[from as usize][to as usize];
        let bytes = count * from.size_bytes().max(to.size_bytes()) as u64;
        let mut parameters = [address(&mut source), address(&mut destination), address(&mut count), address(&mut weight)];
        // SAFETY: the parameters are those of the kernel; the rest is the caller's promise.
        unsafe { self.launch(function, "a conversion", bytes, stream, &mut parameters) }
    }

    /// Adds the squares of elements to a total. The order depends on their type and number alone.
    ///
    /// # Safety
    ///
    /// `data` is `count` elements of this type, `partials` has room for [`MOST_PARTIALS`] aligned `f64`s, `total` is another one: all
    /// apart, memory of the stream's device until the stream has passed the call.
    pub(crate) unsafe fn add_squares(
        &self,
        dtype: DType,
        (mut data, mut count): (u64, u64),
        mut partials: u64,
        mut total: u64,
        stream: &CudaStream,
    ) -> Result<()> {
        let Gradients { squares, total: adding, .. } = self.gradients()?;
        let per_block = CHUNK_BYTES * CHUNKS_PER_THREAD * u64::from(BLOCK);
        let blocks = (count * dtype.size_bytes() as u64).div_ceil(per_block).clamp(1, MOST_PARTIALS as u64);
        let mut parameters = [address(&mut data), address(&mut count), address(&mut partials)];
        // SAFETY: the parameters are those of the kernel, which reads `count` elements and writes a number for each block, of which there are no
        // more than there is room for (clamped above); that the memory is there is the caller's promise.
        unsafe { Self::launch_blocks(squares[dtype as usize], "a sum of squares", blocks as u32, stream, &mut parameters) }?;
        let mut blocks = blocks;
        let mut parameters = [address(&mut partials), address(&mut blocks), address(&mut total)];
        // SAFETY: the parameters are those of the kernel, which reads the numbers that those blocks wrote before on this stream, as many as is
        // said, and adds to the total; that the memory is there is the caller's promise.
        unsafe { Self::launch_blocks(*adding, "a sum of squares", 1, stream, &mut parameters) }
    }
}
