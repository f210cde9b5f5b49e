//! The memory of candle's tensors as buffers of collectives.

use candle_core::{CpuStorage, Layout, Result};
use collectives::{Buffer, BufferMut, Element};

/// Where a contiguous tensor's elements lie in its storage.
pub(crate) fn extent(layout: &Layout) -> Result<(usize, usize)> {
    match layout.contiguous_offsets() {
        Some(extent) => Ok(extent),
        None => candle_core::bail!("collectives need a contiguous tensor, not strides {:?}", layout.stride()),
    }
}

/// What makes new elements of some, whatever their type and wherever they lie.
pub(crate) trait Compute {
    /// From where on so many of the elements are copied, where that is all, and no rank is asked.
    fn copied_from(&self, len: usize) -> Option<usize>;

    /// Fills a destination, which is zero.
    fn run<S, D>(&self, source: &S, destination: &mut D) -> collectives::Result<()>
    where
        S: Buffer<Element: Element> + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized;
}

/// Runs it on some elements of a storage, for as many.
pub(crate) fn compute(storage: &CpuStorage, (from, to): (usize, usize), len: usize, work: &impl Compute) -> Result<CpuStorage> {
    use CpuStorage as S;
    macro_rules! each {
        ($($kind:ident)*) => {
            match storage {
                $(S::$kind(elements) => S::$kind(filled(&elements[from..to], len, work)?),)*
                _ => candle_core::bail!("candle does not compute with this type, nor do collectives"),
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

/// What changes elements in place, whatever their type and wherever they lie.
pub(crate) trait Change {
    /// Does it.
    fn run<B: BufferMut<Element: Element> + ?Sized>(&self, elements: &mut B) -> collectives::Result<()>;
}

/// Runs it on some elements of a storage.
pub(crate) fn change(storage: &mut CpuStorage, (from, to): (usize, usize), work: &impl Change) -> Result<()> {
    use CpuStorage as S;
    macro_rules! each {
        ($($kind:ident)*) => {
            match storage {
                $(S::$kind(elements) => work.run(&mut elements[from..to]),)*
                _ => candle_core::bail!("candle does not compute with this type, nor do collectives"),
            }
        };
    }
    each!(U8 U32 I16 I32 I64 BF16 F16 F32 F64 F8E4M3).map_err(crate::failed)
}
