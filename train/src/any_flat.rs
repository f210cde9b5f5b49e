//! A flat buffer of any of the four float types. A call in progress may have taken its memory.

use std::any::Any;
use std::ops::Range;

use half::{bf16, f16};

use super::flat::{Flat, Pending, Place};
use super::host::Squares;
use super::parameter::Float;
use collectives::Buffer as _;
use collectives::Communicator;
use collectives::DType;
use collectives::ReduceOp;
use collectives::interop::Memory;
use collectives::{Error, Result};

/// A flat buffer whose element type is erased. The range that a function takes must be inside the buffer (checked by
/// the caller).
pub(super) trait AnyFlat: Send + Any {
    fn dtype(&self) -> DType;

    fn len(&self) -> usize;

    /// Returns the size of the buffer's memory in bytes, even while a call uses that memory.
    fn bytes(&self) -> usize;

    /// Starts to gather every rank's share into this buffer.
    fn start_all_gather(&mut self, comm: &Communicator) -> Result<()>;

    /// Starts to reduce the buffer over all ranks. The result replaces only this rank's share of the buffer.
    fn start_reduce_scatter(&mut self, comm: &Communicator, op: ReduceOp) -> Result<()>;

    /// Starts to reduce the buffer over all ranks. On every rank, the result replaces the whole buffer.
    fn start_all_reduce(&mut self, comm: &Communicator, op: ReduceOp) -> Result<()>;

    /// Waits until the call on this buffer has ended.
    fn wait(&mut self) -> Result<()>;

    /// Copies a range of this buffer to `into`, beginning at element `start` of `into`. Converts the elements if the
    /// two buffers have different element types.
    fn copy_part(&self, range: Range<usize>, into: &mut dyn AnyFlat, start: usize) -> Result<()>;

    /// Adds a range of this buffer to `into`, element by element. `into` must have the length of the range, and the
    /// element type of this buffer.
    fn add_part(&self, range: Range<usize>, into: &mut dyn AnyFlat) -> Result<()>;

    /// Overwrites elements with zeros.
    fn clear(&mut self, range: Range<usize>) -> Result<()>;

    /// Multiplies all elements by `factor`.
    fn scale(&mut self, factor: f64) -> Result<()>;

    /// Adds the squares of all elements to `sums`.
    fn add_squares(&self, sums: &mut Squares) -> Result<()>;

    /// Returns the buffer's `Flat`.
    fn flat(&self) -> Result<&dyn Any>;

    /// Returns the buffer's `Flat` for writing.
    fn flat_mut(&mut self) -> Result<&mut dyn Any>;
}

/// A buffer of `T`s.
struct TypedFlat<T: Float> {
    /// `None` while a call has it.
    flat: Option<Flat<T>>,
    pending: Pending<Flat<T>>,
    len: usize,
    bytes: usize,
}

/// Allocates zeros of a float type, in memory that no other rank shares.
pub(super) fn zeros(place: &Place, dtype: DType, len: usize) -> Result<Box<dyn AnyFlat>> {
    match dtype {
        DType::F64 => TypedFlat::<f64>::boxed(place, len),
        DType::F16 => TypedFlat::<f16>::boxed(place, len),
        DType::Bf16 => TypedFlat::<bf16>::boxed(place, len),
        // No other type is accepted.
        _ => TypedFlat::<f32>::boxed(place, len),
    }
}

/// Copies the given elements, from element `first` on, into `range`. If the types differ, each element is converted and
/// weighted.
pub(super) fn fill<F: Float>(into: &mut dyn AnyFlat, range: Range<usize>, given: Memory<'_, F>, first: usize, weight: f64) -> Result<()> {
    if into.dtype() == F::ELEMENT_TYPE {
        return typed_mut::<F>(into)?.put(range, given, first, false);
    }
    match into.dtype() {
        DType::F64 => typed_mut::<f64>(into)?.convert_part(range, given, first, weight),
        DType::F16 => typed_mut::<f16>(into)?.convert_part(range, given, first, weight),
        DType::Bf16 => typed_mut::<bf16>(into)?.convert_part(range, given, first, weight),
        _ => typed_mut::<f32>(into)?.convert_part(range, given, first, weight),
    }
}

/// Returns its elements, which must be `T`s.
pub(super) fn typed<T: Float>(flat: &dyn AnyFlat) -> Result<&Flat<T>> {
    let dtype = flat.dtype();
    flat.flat()?.downcast_ref().ok_or_else(|| other_type(dtype, T::ELEMENT_TYPE))
}

fn typed_mut<T: Float>(flat: &mut dyn AnyFlat) -> Result<&mut Flat<T>> {
    let dtype = flat.dtype();
    flat.flat_mut()?.downcast_mut().ok_or_else(|| other_type(dtype, T::ELEMENT_TYPE))
}

fn other_type(dtype: DType, asked: DType) -> Error {
    Error::argument("train", format!("elements of {asked} were requested from a buffer of {dtype}"))
}

/// Returns the error for a buffer that a call still uses, or that a failed call has lost.
fn away() -> Error {
    Error::argument("train", "this buffer is in use by a call, or was lost when an earlier step failed")
}

impl<T: Float> TypedFlat<T> {
    fn boxed(place: &Place, len: usize) -> Result<Box<dyn AnyFlat>> {
        let flat = Flat::<T>::unshared(place, len)?;
        let bytes = flat.bytes();
        Ok(Box::new(Self { flat: Some(flat), pending: Pending::Idle, len, bytes }))
    }

    fn here(&self) -> Result<&Flat<T>> {
        self.flat.as_ref().ok_or_else(away)
    }

    fn here_mut(&mut self) -> Result<&mut Flat<T>> {
        self.flat.as_mut().ok_or_else(away)
    }
}

impl<T: Float> AnyFlat for TypedFlat<T> {
    fn dtype(&self) -> DType {
        T::ELEMENT_TYPE
    }

    fn len(&self) -> usize {
        self.len
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn start_all_gather(&mut self, comm: &Communicator) -> Result<()> {
        self.pending = self.flat.take().ok_or_else(away)?.all_gather(comm)?;
        Ok(())
    }

    fn start_reduce_scatter(&mut self, comm: &Communicator, op: ReduceOp) -> Result<()> {
        self.pending = self.flat.take().ok_or_else(away)?.reduce_scatter(comm, op)?;
        Ok(())
    }

    fn start_all_reduce(&mut self, comm: &Communicator, op: ReduceOp) -> Result<()> {
        self.pending = self.flat.take().ok_or_else(away)?.all_reduce(comm, op)?;
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        if self.flat.is_none() {
            self.flat = Some(self.pending.wait()?);
        }
        Ok(())
    }

    fn copy_part(&self, range: Range<usize>, into: &mut dyn AnyFlat, start: usize) -> Result<()> {
        fill(into, start..start + range.len(), self.here()?.memory(), range.start, 1.0)
    }

    fn add_part(&self, range: Range<usize>, into: &mut dyn AnyFlat) -> Result<()> {
        typed_mut::<T>(into)?.put(0..range.len(), self.here()?.memory(), range.start, true)
    }

    fn clear(&mut self, range: Range<usize>) -> Result<()> {
        self.here_mut()?.clear(range)
    }

    fn scale(&mut self, factor: f64) -> Result<()> {
        let len = self.len;
        self.here_mut()?.scale(0..len, factor)
    }

    fn add_squares(&self, sums: &mut Squares) -> Result<()> {
        self.here()?.add_squares(0..self.len, sums)
    }

    fn flat(&self) -> Result<&dyn Any> {
        Ok(self.here()?)
    }

    fn flat_mut(&mut self) -> Result<&mut dyn Any> {
        Ok(self.here_mut()?)
    }
}
