//! The GPU memory of candle's tensors as buffers of collectives. cudarc's events order the work on candle's stream
//! relative to the work on the communicator's stream.

use candle_core::cuda_backend::{CudaStorageSlice as S, WrapErr};
use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, Result};
use collectives_train::{Averaged, DataParallel};

use crate::failed;
use crate::memory::{Change, Compute, extent};

/// Does on a GPU what [`compute`](crate::memory::compute) does on the host.
pub(crate) fn compute(storage: &CudaStorage, (from, to): (usize, usize), len: usize, work: &impl Compute) -> Result<CudaStorage> {
    let device = &storage.device;
    macro_rules! each {
        ($($kind:ident)*) => {
            match &storage.slice {
                $(S::$kind(elements) => {
                    let mut destination = device.alloc_zeros(len)?;
                    let source = elements.slice(from..to);
                    match work.copied_from(len) {
                        Some(from) => device.cuda_stream().memcpy_dtod(&source.slice(from..from + len), &mut destination).w()?,
                        None => work.run(&source, &mut destination).map_err(failed)?,
                    }
                    S::$kind(destination)
                })*
                _ => candle_core::bail!("neither candle nor collectives computes with this element type"),
            }
        };
    }
    Ok(CudaStorage { slice: each!(U8 U32 I16 I32 I64 BF16 F16 F32 F64 F8E4M3), device: device.clone() })
}

/// Does on a GPU what [`change`](crate::memory::change) does on the host.
pub(crate) fn change(storage: &mut CudaStorage, (from, to): (usize, usize), work: &impl Change) -> Result<()> {
    macro_rules! each {
        ($($kind:ident)*) => {
            match &mut storage.slice {
                $(S::$kind(elements) => work.run(&mut elements.slice_mut(from..to)),)*
                _ => candle_core::bail!("neither candle nor collectives computes with this element type"),
            }
        };
    }
    each!(U8 U32 I16 I32 I64 BF16 F16 F32 F64 F8E4M3).map_err(failed)
}

/// Copies a gradient into its bucket, or adds a part of it (if `last` is false).
pub(crate) fn ready(
    buckets: &mut DataParallel,
    number: usize,
    gradient: &CudaStorage,
    (from, to): (usize, usize),
    last: bool,
) -> Result<()> {
    macro_rules! pass {
        ($elements:ident) => {
            match last {
                true => buckets.ready(number, &$elements.slice(from..to)),
                false => buckets.accumulate(number, &$elements.slice(from..to)),
            }
        };
    }
    let done = match &gradient.slice {
        S::F32(elements) => pass!(elements),
        S::F64(elements) => pass!(elements),
        S::F16(elements) => pass!(elements),
        S::BF16(elements) => pass!(elements),
        _ => candle_core::bail!("gradients must be f32, f64, f16 or bf16"),
    };
    done.map_err(failed)
}

/// Fills a tensor with the mean gradient of the parameter with this number.
pub(crate) struct Mean<'a, 'b>(pub(crate) &'a Averaged<'b>, pub(crate) usize);

impl InplaceOp1 for Mean<'_, '_> {
    fn name(&self) -> &'static str {
        "mean gradient"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        candle_core::bail!("the mean gradient is on a GPU, but this tensor is in host memory")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let (from, to) = extent(layout)?;
        let Self(means, number) = *self;
        let done = match &mut storage.slice {
            S::F32(elements) => means.copy_to(number, &mut elements.slice_mut(from..to)),
            S::F64(elements) => means.copy_to(number, &mut elements.slice_mut(from..to)),
            S::F16(elements) => means.copy_to(number, &mut elements.slice_mut(from..to)),
            S::BF16(elements) => means.copy_to(number, &mut elements.slice_mut(from..to)),
            _ => candle_core::bail!("gradients must be f32, f64, f16 or bf16"),
        };
        done.map_err(failed)
    }
}
