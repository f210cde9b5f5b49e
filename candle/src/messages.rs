//! Tensors as messages between two ranks, with their types and shapes.
//!
//! A header contains the type and the shape. The elements follow in messages of at most [`PIECE_BYTES`]. So a receiver
//! never allocates much more memory than has arrived, even if the header is wrong. No tensor of candle has the header's
//! element type, so elements cannot be taken for a header.

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor};
use collectives::{Communicator, Element, Envelope};

use crate::error::failed;
use crate::memory::extent;

/// The types that travel; a header names a type by its place in this list.
pub(crate) const TYPES: [DType; 10] =
    [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64, DType::BF16, DType::F16, DType::F32, DType::F64, DType::F8E4M3];

/// The most bytes of elements in one message.
const PIECE_BYTES: usize = 1 << 20;

/// The most dimensions that a tensor may have.
const MAX_DIMENSIONS: usize = 16;

/// Returns the number that stands for a type in headers.
pub(crate) fn code_of(dtype: DType) -> Result<u64> {
    match TYPES.iter().position(|known| *known == dtype) {
        Some(code) => Ok(code as u64),
        None => candle_core::bail!("neither candle nor collectives computes with the element type {dtype:?}"),
    }
}

/// Sends a tensor with its type and shape to a rank, which receives it with [`recv_tensor`]. A pipeline stage can thus
/// pass its results to the next stage, which need not know their shape.
///
/// The tensor may have any type that this crate supports. It may be empty or a scalar, and need not be contiguous. A
/// tensor in GPU memory is copied to host memory first. No gradient flows through this call.
///
/// # Order
///
/// A tensor is sent as several messages. As with [`Communicator::send`], messages with the same tag arrive in the order
/// in which they were sent. If two threads send tensors with the same tag, the messages of the two tensors mix, so use
/// different tags in different threads. If the elements have more than 64 KiB, the call waits until the receiver takes
/// them. So if two ranks send each other large tensors before they receive, both wait until their timeouts pass.
///
/// # Cost
///
/// One message for the header, and one for each MiB of elements. Contiguous tensors in host memory are not copied.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use collectives_candle::{recv_tensor, run_local, send_tensor};
///
/// let shapes = run_local(2, |comm| {
///     if comm.rank() == 0 {
///         send_tensor(comm, &Tensor::ones((3, 4), DType::F16, &Device::Cpu)?, 1, 7)?;
///         return Ok(None);
///     }
///     let tensor = recv_tensor(comm, 0, 7, &Device::Cpu)?;
///     Ok(Some((tensor.dtype(), tensor.dims().to_vec())))
/// })?;
/// assert_eq!(shapes[1], Some((DType::F16, vec![3, 4])));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
///
/// Fails in these cases:
///
/// - The tensor has more than 16 dimensions, or a type with which candle cannot compute. Nothing is sent then.
/// - [`Communicator::send`] fails. Some of the tensor's messages may then have been sent: if the communicator is still
///   usable, use another tag from then on.
/// - candle fails.
pub fn send_tensor(comm: &Communicator, tensor: &Tensor, to: usize, tag: u64) -> Result<()> {
    let dimensions = tensor.dims().len();
    if dimensions > MAX_DIMENSIONS {
        candle_core::bail!("send_tensor: the tensor has {dimensions} dimensions, but at most {MAX_DIMENSIONS} can be sent");
    }
    let header: Vec<u64> = [code_of(tensor.dtype())?].into_iter().chain(tensor.dims().iter().map(|length| *length as u64)).collect();
    let tensor = tensor.to_device(&Device::Cpu)?.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { candle_core::bail!("send_tensor: the copy in host memory is missing") };
    let (from, until) = extent(layout)?;
    let to = Envelope::rank(to).tag(tag);
    comm.send(&header, to).map_err(failed)?;
    macro_rules! each {
        ($($kind:ident)*) => {
            match storage {
                $(CpuStorage::$kind(elements) => send_elements(comm, &elements[from..until], to),)*
                _ => candle_core::bail!("neither candle nor collectives computes with this element type"),
            }
        };
    }
    each!(U8 U32 I16 I32 I64 BF16 F16 F32 F64 F8E4M3)
}

fn send_elements<T: Element>(comm: &Communicator, elements: &[T], to: Envelope) -> Result<()> {
    elements.chunks(PIECE_BYTES / size_of::<T>()).try_for_each(|piece| comm.send(piece, to)).map_err(failed)
}

/// Receives a tensor that a rank sent with [`send_tensor`], and copies it to a device. The type and the shape are those
/// of the tensor that was sent.
///
/// The elements arrive in host memory. Memory is allocated as elements arrive, not for the size that the sender has
/// announced.
///
/// # Errors
///
/// Fails in these cases:
///
/// - The message that arrives is not a tensor, for example because the peer used `send`. The received messages are then
///   lost.
/// - [`Communicator::recv`] fails. Later messages of this tensor may still arrive: if the communicator is still usable,
///   use another tag from then on.
/// - candle fails, for example because there is no memory on the device.
pub fn recv_tensor(comm: &Communicator, from: usize, tag: u64, device: &Device) -> Result<Tensor> {
    let envelope = Envelope::rank(from).tag(tag);
    let mut header = [0_u64; 1 + MAX_DIMENSIONS];
    let received = comm.recv(&mut header, envelope).map_err(failed)?;
    let malformed = |reason: String| failed(collectives::Error::Protocol { with: comm.peers()[received.source].to_string(), reason });
    let (dtype, dimensions, count) = parse(&header[..received.count]).map_err(malformed)?;
    let pieces = Pieces { comm, envelope, count, malformed: &malformed };
    macro_rules! each {
        ($($kind:ident)*) => {
            match dtype {
                $(DType::$kind => CpuStorage::$kind(pieces.receive()?),)*
                other => candle_core::bail!("neither candle nor collectives computes with the element type {other:?}"),
            }
        };
    }
    let elements = Storage::Cpu(each!(U8 U32 I16 I32 I64 BF16 F16 F32 F64 F8E4M3));
    Tensor::from_storage(elements, dimensions, BackpropOp::none(), false).to_device(device)
}

/// Returns the type, the dimensions and the number of elements that a header names, or what is wrong with it.
fn parse(header: &[u64]) -> std::result::Result<(DType, Vec<usize>, usize), String> {
    let Some((code, dimensions)) = header.split_first() else { return Err("an empty message instead of a tensor".to_owned()) };
    let dtype = usize::try_from(*code).ok().and_then(|code| TYPES.get(code));
    let Some(dtype) = dtype else { return Err(format!("a tensor whose element type has the unknown number {code}")) };
    // candle computes strides, which are products of dimensions even if one of the dimensions is 0.
    let extent = dimensions.iter().try_fold(8_u64, |extent, length| extent.checked_mul((*length).max(1)));
    if extent.is_none_or(|bytes| bytes > isize::MAX as u64) {
        return Err(format!("a tensor with the dimensions {dimensions:?}, which is larger than the address space"));
    }
    let dimensions: Vec<usize> = dimensions.iter().map(|length| *length as usize).collect();
    let count = dimensions.iter().product();
    Ok((*dtype, dimensions, count))
}

/// The messages with a tensor's elements.
struct Pieces<'a> {
    comm: &'a Communicator,
    envelope: Envelope,
    /// The number of elements.
    count: usize,
    malformed: &'a dyn Fn(String) -> candle_core::Error,
}

impl Pieces<'_> {
    fn receive<T: Element + Default>(&self) -> Result<Vec<T>> {
        let mut elements: Vec<T> = Vec::new();
        while elements.len() < self.count {
            let from = elements.len();
            let expected = (self.count - from).min(PIECE_BYTES / size_of::<T>());
            elements.resize(from + expected, T::default());
            let arrived = self.comm.recv(&mut elements[from..], self.envelope).map_err(failed)?.count;
            if arrived != expected {
                return Err((self.malformed)(format!("a message with {arrived} elements of a tensor, but {expected} were expected")));
            }
        }
        Ok(elements)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn headers_that_name_no_tensor_are_refused() {
        assert_eq!(parse(&[7, 2, 3]).unwrap(), (DType::F32, vec![2, 3], 6));
        assert_eq!(parse(&[0]).unwrap(), (DType::U8, vec![], 1));
        assert_eq!(parse(&[4, 5, 0]).unwrap(), (DType::I64, vec![5, 0], 0));
        for (header, text) in [
            (&[][..], "an empty message"),
            (&[10, 1], "unknown number 10"),
            (&[u64::MAX], "unknown number 18446744073709551615"),
            (&[7, u64::MAX], "larger than the address space"),
            (&[7, 1 << 40, 1 << 40], "larger than the address space"),
            (&[7, 1 << 40, 1 << 40, 0], "larger than the address space"),
        ] {
            assert!(parse(header).unwrap_err().contains(text), "{header:?}");
        }
    }
}
