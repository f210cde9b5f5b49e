//! The flat buffer of a bucket, on the host or on a device.

use std::ops::Range;
#[cfg(feature = "cuda")]
use std::sync::Arc;

#[cfg(feature = "cuda")]
use cudarc::driver::{CudaSlice, CudaStream};

#[cfg(feature = "cuda")]
use super::device::DeviceFlat;
use super::float::Float;
use super::hook::Pending;
use super::host::HostFlat;
use crate::buffer::{Buffer, BufferMut, Memory, MemoryMut, sealed::Sealed};
use crate::communicator::{Communicator, SharedBuffer};
#[cfg(feature = "cuda")]
use crate::error::Error;
use crate::error::Result;
use crate::op::ReduceOp;

/// Where buckets lie.
#[derive(Debug, Clone)]
pub(super) enum Place {
    Host,
    /// On a device, for a caller who works on this stream.
    #[cfg(feature = "cuda")]
    Device(Arc<CudaStream>),
}

/// The gradients of one bucket, one behind the other; a buffer that every collective takes.
///
/// Also made of a vector, of what [`Communicator::alloc`] gave, and of a slice of cudarc's: what [`DataParallel::give`] takes and
/// [`Averaged::take`] gives back.
///
/// [`DataParallel::give`]: super::DataParallel::give
/// [`Averaged::take`]: super::Averaged::take
#[derive(Debug)]
pub struct Flat<T: Float>(Elements<T>);

#[derive(Debug)]
enum Elements<T: Float> {
    Host(HostFlat<T>),
    #[cfg(feature = "cuda")]
    Device(DeviceFlat<T>),
}

/// What is done on the host alone.
#[cfg(feature = "cuda")]
fn host_only(what: &str) -> Error {
    Error::unsupported(format!("{what} on a device"), "do it with your tensor library's kernels, on the gradients or on `device_gradient`")
}

/// Buffers on the other side.
#[cfg(feature = "cuda")]
fn elsewhere(here: &str, there: &str) -> Error {
    Error::argument("train", format!("a buffer {there}, where the buckets are {here}"))
}

/// Refuses a stream of another context than the communicator's device has. One rank alone needs no device plane.
#[cfg(feature = "cuda")]
fn reachable(comm: &Communicator, stream: &CudaStream) -> Result<()> {
    const CALL: &str = "on_device";
    let Some(device) = comm.device() else {
        let reason = || comm.why_no_device().unwrap_or_default();
        return if comm.world_size() == 1 { Ok(()) } else { Err(Error::NoDevice { call: CALL.to_owned(), reason: reason() }) };
    };
    if stream.context().cu_ctx() == device.context().cu_ctx() {
        return Ok(());
    }
    let (own, other) = (device.ordinal(), stream.context().ordinal());
    Err(Error::argument(CALL, format!("a stream of device {other}, or of another context, where the communicator has device {own}")))
}

impl<T: Float> Flat<T> {
    /// `len` zeros in host memory. Collective.
    pub(super) fn new(comm: &Communicator, len: usize) -> Result<Self> {
        comm.alloc(len).map(Self::from)
    }

    /// `len` zeros in a place. Collective on the host; on a device this rank's own affair.
    pub(super) fn in_place(comm: &Communicator, place: &Place, len: usize) -> Result<Self> {
        match place {
            Place::Host => Self::new(comm, len),
            #[cfg(feature = "cuda")]
            Place::Device(stream) => {
                reachable(comm, stream)?;
                DeviceFlat::new(stream, len).map(|flat| Self(Elements::Device(flat)))
            }
        }
    }

    /// Its elements, in host memory.
    ///
    /// # Errors
    ///
    /// `Unsupported` where they are on a device.
    pub fn host(&self) -> Result<&[T]> {
        match &self.0 {
            Elements::Host(buffer) => Ok(buffer),
            #[cfg(feature = "cuda")]
            Elements::Device(_) => Err(host_only("this")),
        }
    }

    /// Its elements, to be written.
    ///
    /// # Errors
    ///
    /// As for [`host`](Self::host).
    pub fn host_mut(&mut self) -> Result<&mut [T]> {
        match &mut self.0 {
            Elements::Host(buffer) => Ok(buffer),
            #[cfg(feature = "cuda")]
            Elements::Device(_) => Err(host_only("this")),
        }
    }

    /// Its elements, where they are on a device.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn device(&self) -> Option<&CudaSlice<T>> {
        match &self.0 {
            Elements::Host(_) => None,
            Elements::Device(flat) => Some(&flat.slice),
        }
    }

    /// Its elements, to be written, where they are on a device.
    #[cfg(feature = "cuda")]
    pub fn device_mut(&mut self) -> Option<&mut CudaSlice<T>> {
        match &mut self.0 {
            Elements::Host(_) => None,
            Elements::Device(flat) => Some(&mut flat.slice),
        }
    }

    /// Its elements as a vector: the one that was given, or a copy.
    ///
    /// # Errors
    ///
    /// As for [`host`](Self::host).
    pub fn into_vec(self) -> Result<Vec<T>> {
        match self.0 {
            Elements::Host(buffer) => Ok(buffer.into_vec()),
            #[cfg(feature = "cuda")]
            Elements::Device(_) => Err(host_only("this")),
        }
    }

    /// Its elements, where they are on a device.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn into_device(self) -> Option<CudaSlice<T>> {
        match self.0 {
            Elements::Host(_) => None,
            Elements::Device(flat) => Some(flat.slice),
        }
    }

    /// A buffer to be used in place of this one, which is on the same side (checked by the caller).
    pub(super) fn replaced_by(&self, given: Self) -> Result<Self> {
        match (&self.0, given.0) {
            #[cfg(feature = "cuda")]
            (Elements::Device(own), Elements::Device(given)) => own.replaced_by(given).map(|flat| Self(Elements::Device(flat))),
            (_, given) => Ok(Self(given)),
        }
    }

    /// A copy of the elements in `range`.
    pub(super) fn copied(&self, range: Range<usize>) -> Result<Self> {
        match &self.0 {
            Elements::Host(buffer) => Ok(buffer[range].to_vec().into()),
            #[cfg(feature = "cuda")]
            Elements::Device(flat) => flat.copied(range).map(|flat| Self(Elements::Device(flat))),
        }
    }

    /// Refuses what [`put`](Self::put) cannot reach from here.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "the host can add"))]
    pub(super) fn check_put(&self, gradient: &Memory<'_, T>, add: bool) -> Result<()> {
        match (&self.0, gradient) {
            (Elements::Host(_), Memory::Host(_)) => {}
            #[cfg(feature = "cuda")]
            (Elements::Device(_), Memory::Device(_)) if add => return Err(host_only("accumulating gradients")),
            #[cfg(feature = "cuda")]
            (Elements::Device(_), Memory::Device(_)) => {}
            #[cfg(feature = "cuda")]
            (Elements::Host(_), Memory::Device(_)) => return Err(elsewhere("in host memory", "on a device")),
            #[cfg(feature = "cuda")]
            (Elements::Device(_), Memory::Host(_)) => return Err(elsewhere("on a device", "in host memory")),
        }
        Ok(())
    }

    /// Copies a gradient in, or adds it to what is there. `range` lies inside, and the gradient is as long (checked by the caller).
    pub(super) fn put(&mut self, range: Range<usize>, gradient: Memory<'_, T>, add: bool) -> Result<()> {
        match (&mut self.0, gradient) {
            (Elements::Host(buffer), Memory::Host(gradient)) if add => {
                buffer[range].iter_mut().zip(gradient).for_each(|(sum, new)| *sum = sum.plus(*new));
            }
            (Elements::Host(buffer), Memory::Host(gradient)) => buffer[range].copy_from_slice(gradient),
            #[cfg(feature = "cuda")]
            (Elements::Device(_), Memory::Device(_)) if add => return Err(host_only("accumulating gradients")),
            #[cfg(feature = "cuda")]
            (Elements::Device(flat), Memory::Device(gradient)) => flat.put(range, gradient)?,
            #[cfg(feature = "cuda")]
            (Elements::Host(_), Memory::Device(_)) => return Err(elsewhere("in host memory", "on a device")),
            #[cfg(feature = "cuda")]
            (Elements::Device(_), Memory::Host(_)) => return Err(elsewhere("on a device", "in host memory")),
        }
        Ok(())
    }

    /// Copies a gradient out. `range` lies inside, and the destination is as long (checked by the caller).
    pub(super) fn copy_to(&self, range: Range<usize>, destination: MemoryMut<'_, T>) -> Result<()> {
        match (&self.0, destination) {
            (Elements::Host(buffer), MemoryMut::Host(destination)) => destination.copy_from_slice(&buffer[range]),
            #[cfg(feature = "cuda")]
            (Elements::Device(flat), MemoryMut::Device(destination)) => flat.copy_to(range, destination)?,
            #[cfg(feature = "cuda")]
            (Elements::Host(_), MemoryMut::Device(_)) => return Err(elsewhere("in host memory", "on a device")),
            #[cfg(feature = "cuda")]
            (Elements::Device(_), MemoryMut::Host(_)) => return Err(elsewhere("on a device", "in host memory")),
        }
        Ok(())
    }

    /// Zeros in place of a gradient.
    pub(super) fn clear(&mut self, range: Range<usize>) -> Result<()> {
        match &mut self.0 {
            Elements::Host(buffer) => buffer[range].fill(T::default()),
            #[cfg(feature = "cuda")]
            Elements::Device(flat) => flat.clear(range)?,
        }
        Ok(())
    }

    /// Starts an all-reduce of it; on one rank there is nothing to do, but to weight it. On a device it is queued, and the elements' own events say when it has ended.
    pub(super) fn all_reduce(mut self, comm: &Communicator, op: ReduceOp) -> Result<Pending<Self>> {
        if comm.world_size() == 1 && !matches!(op, ReduceOp::PreMulSum(_)) {
            return Ok(Pending::Ended(self));
        }
        match &mut self.0 {
            Elements::Host(_) => comm.start_all_reduce(self, op).map(Pending::Going),
            #[cfg(feature = "cuda")]
            Elements::Device(flat) => comm.all_reduce(&mut flat.slice, op).map(|()| Pending::Ended(self)),
        }
    }

    /// The sum of the squares of the elements in `range`, the same on every rank that holds the same elements.
    pub(super) fn sum_of_squares(&self, range: Range<usize>) -> Result<f64> {
        const LANES: usize = 8;
        let mut sums = [0.0_f64; LANES];
        for chunk in self.host()?[range].chunks(LANES) {
            chunk.iter().zip(&mut sums).for_each(|(x, sum)| *sum += x.to_f64() * x.to_f64());
        }
        Ok(sums.iter().sum())
    }

    /// Multiplies the elements in `range`.
    pub(super) fn scale(&mut self, range: Range<usize>, factor: f64) -> Result<()> {
        self.host_mut()?[range].iter_mut().for_each(|x| *x = T::from_f64(x.to_f64() * factor));
        Ok(())
    }

    /// The elements in `range`, where they are on a device.
    #[cfg(feature = "cuda")]
    pub(super) fn device_view(&self, range: Range<usize>) -> Option<cudarc::driver::CudaView<'_, T>> {
        match &self.0 {
            Elements::Host(_) => None,
            Elements::Device(flat) => flat.view(range),
        }
    }
}

impl<T: Float> From<Vec<T>> for Flat<T> {
    fn from(vector: Vec<T>) -> Self {
        Self(Elements::Host(HostFlat::Given(vector)))
    }
}

impl<T: Float> From<SharedBuffer<T>> for Flat<T> {
    fn from(buffer: SharedBuffer<T>) -> Self {
        Self(Elements::Host(HostFlat::Shared(buffer)))
    }
}

#[cfg(feature = "cuda")]
impl<T: Float> From<CudaSlice<T>> for Flat<T> {
    fn from(slice: CudaSlice<T>) -> Self {
        Self(Elements::Device(slice.into()))
    }
}

impl<T: Float> Sealed for Flat<T> {}

impl<T: Float> Buffer for Flat<T> {
    type Element = T;

    fn memory(&self) -> Memory<'_, T> {
        match &self.0 {
            Elements::Host(buffer) => Memory::Host(buffer),
            #[cfg(feature = "cuda")]
            Elements::Device(flat) => flat.slice.memory(),
        }
    }
}

impl<T: Float> BufferMut for Flat<T> {
    fn memory_mut(&mut self) -> MemoryMut<'_, T> {
        match &mut self.0 {
            Elements::Host(buffer) => MemoryMut::Host(buffer),
            #[cfg(feature = "cuda")]
            Elements::Device(flat) => flat.slice.memory_mut(),
        }
    }
}
