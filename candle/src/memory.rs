//! The memory of candle's tensors as buffers of collectives.

use candle_core::{CpuStorage, Layout, Result};
use collectives::{Buffer, BufferMut, Element};

/// Returns the start and end of a contiguous tensor's elements in its storage.
pub(crate) fn extent(layout: &Layout) -> Result<(usize, usize)> {
    match layout.contiguous_offsets() {
        Some(extent) => Ok(extent),
        None => candle_core::bail!("the tensor must be contiguous, but it has strides {:?}", layout.stride()),
    }
}

/// An operation that computes new elements from existing ones, of any type and in any memory.
pub(crate) trait Compute {
    /// If the operation on this rank is a plain copy of `len` elements, returns the index of the first copied element.
    /// Otherwise returns `None`.
    fn copied_from(&self, len: usize) -> Option<usize>;

    /// Writes the results into `destination`, which contains zeros when this method is called.
    fn run<S, D>(&self, source: &S, destination: &mut D) -> collectives::Result<()>
    where
        S: Buffer<Element: Element> + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized;
}

/// Runs an operation on some elements of a storage, with `len` results.
pub(crate) fn compute(storage: &CpuStorage, (from, to): (usize, usize), len: usize, work: &impl Compute) -> Result<CpuStorage> {
    use CpuStorage as S;
    macro_rules! each {
        ($($kind:ident)*) => {
            match storage {
                $(S::$kind(elements) => S::$kind(filled(&elements[from..to], len, work)?),)*
                _ => candle_core::bail!("neither candle nor collectives computes with this element type"),
            }
        };
    }
    Ok(each!(U8 U32 I16 I32 I64 BF16 F16 F32 F64 F8E4M3))
}

fn filled<T: Element + Default>(source: &[T], len: usize, work: &impl Compute) -> Result<Vec<T>> {
    if let Some(from) = work.copied_from(len) {
        return Ok(source[from..][..len].to_vec());
    }
    let mut destination = vec![T::default(); len];
    work.run(source, &mut destination).map_err(crate::failed)?;
    Ok(destination)
}

/// An operation that changes elements in place, of any type and in any memory.
pub(crate) trait Change {
    /// Changes the elements.
    fn run<B: BufferMut<Element: Element> + ?Sized>(&self, elements: &mut B) -> collectives::Result<()>;
}

/// Runs an operation on some elements of a storage.
pub(crate) fn change(storage: &mut CpuStorage, (from, to): (usize, usize), work: &impl Change) -> Result<()> {
    use CpuStorage as S;
    macro_rules! each {
        ($($kind:ident)*) => {
            match storage {
                $(S::$kind(elements) => work.run(&mut elements[from..to]),)*
                _ => candle_core::bail!("neither candle nor collectives computes with this element type"),
            }
        };
    }
    each!(U8 U32 I16 I32 I64 BF16 F16 F32 F64 F8E4M3).map_err(crate::failed)
}
