//! The flat buffer of a bucket, on the host or on a device, and background calls on it.

use std::ops::Range;
#[cfg(feature = "cuda")]
use std::sync::Arc;

#[cfg(feature = "cuda")]
use cudarc::driver::{CudaSlice, CudaStream};

#[cfg(feature = "cuda")]
use super::device::{DeviceFlat, Workplace};
use super::host::{HostFlat, Squares, convert};
use super::parameter::Float;
use collectives::ReduceOp;
use collectives::interop::{Memory, MemoryMut, StableMemory};
use collectives::{Buffer, BufferMut};
use collectives::{Communicator, SharedBuffer, Work};
use collectives::{Error, Result};

/// The memory that holds the buckets.
#[derive(Debug, Clone)]
pub(super) enum Place {
    Host,
    /// On a device, for a caller that queues work on a stream of this device.
    #[cfg(feature = "cuda")]
    Device(Arc<Workplace>),
}

impl Place {
    /// Returns the place on the stream's device.
    #[cfg(feature = "cuda")]
    pub(super) fn on_device(stream: &Arc<CudaStream>) -> Self {
        Self::Device(Workplace::new(stream))
    }

    /// Returns the first name in host memory, and the second name on a device.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "there is no device"))]
    pub(super) fn either(&self, host: &'static str, device: &'static str) -> &'static str {
        match self {
            Self::Host => host,
            #[cfg(feature = "cuda")]
            Self::Device(_) => device,
        }
    }

    /// Refuses a device that the communicator cannot reach.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "the host is always there"))]
    pub(super) fn check(&self, comm: &Communicator) -> Result<()> {
        match self {
            Self::Host => Ok(()),
            #[cfg(feature = "cuda")]
            Self::Device(workplace) => reachable(comm, workplace.stream()),
        }
    }

    /// Refuses memory from which buffers in this place cannot be filled.
    pub(super) fn check_reach<T: Float>(&self, given: &Memory<'_, T>) -> Result<()> {
        match (self, given) {
            (Self::Host, Memory::Host(_)) => Ok(()),
            #[cfg(feature = "cuda")]
            (Self::Device(workplace), Memory::Device(given)) => workplace.check_reach(given),
            _ => Err(elsewhere(matches!(self, Self::Host))),
        }
    }
}

/// The gradients of one bucket, in contiguous memory. Every collective accepts a `Flat` as a buffer.
///
/// A `Flat` can also be made from a vector, from memory of [`Communicator::alloc`], or from a cudarc slice.
/// [`DataParallel::give`] takes a `Flat`, and [`Averaged::take`] returns a `Flat`.
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

/// Returns the error for a host slice of elements on a device.
#[cfg(feature = "cuda")]
fn on_device() -> Error {
    let reason = "use device slices (`Flat::device`, `device_gradient`, `device_values`, `device_parameter`), or copy them with `copy_to`";
    Error::unsupported("a host slice of elements on a device", reason)
}

/// Allocates `len` zeros in memory that only this process uses.
fn zeros<T: Float>(len: usize) -> Result<Vec<T>> {
    let mut zeros = Vec::new();
    let refused = |error| Error::io(format!("allocating {len} elements"), std::io::Error::other(error));
    zeros.try_reserve_exact(len).map_err(refused)?;
    zeros.resize(len, T::default());
    Ok(zeros)
}

/// Returns the error for a buffer in host memory if the buckets are on a device, or the reverse.
fn elsewhere(are_in_host_memory: bool) -> Error {
    let (here, there) = if are_in_host_memory { ("in host memory", "on a device") } else { ("on a device", "in host memory") };
    Error::argument("train", format!("the buffer is {there}, but the buckets are {here}"))
}

/// Refuses a stream whose context is not that of the communicator's device. A single rank needs no device backend.
#[cfg(feature = "cuda")]
fn reachable(comm: &Communicator, stream: &CudaStream) -> Result<()> {
    const CALL: &str = "on_device";
    comm.refuse_forked(CALL)?;
    let Some(device) = comm.device() else {
        let reason = || comm.why_no_device().unwrap_or_default();
        return if comm.world_size() == 1 { Ok(()) } else { Err(Error::NoDevice { call: CALL.to_owned(), reason: reason() }) };
    };
    if stream.context().cu_ctx() == device.context().cu_ctx() {
        return Ok(());
    }
    let (own, other) = (device.ordinal(), stream.context().ordinal());
    Err(Error::argument(
        CALL,
        format!("the stream (device {other}) and the communicator (device {own}) are on different devices or in different contexts"),
    ))
}

impl<T: Float> Flat<T> {
    /// Allocates `len` zeros in host memory, for a hook that needs another buffer. Collective.
    ///
    /// # Errors
    ///
    /// The errors of [`Communicator::alloc`].
    pub fn new(comm: &Communicator, len: usize) -> Result<Self> {
        comm.alloc(len).map(Self::from)
    }

    /// Allocates `len` zeros on the device of `stream`. This device must be the communicator's device. Local.
    ///
    /// # Errors
    ///
    /// - `NoDevice` if the communicator has no device.
    /// - `InvalidArgument` if the stream is on another device or in another context.
    /// - `Cuda` if the driver fails.
    #[cfg(feature = "cuda")]
    pub fn on_device(comm: &Communicator, stream: &Arc<CudaStream>, len: usize) -> Result<Self> {
        Self::in_place(comm, &Place::on_device(stream), len)
    }

    /// Allocates `len` zeros in a place. Collective on the host, local on a device.
    pub(super) fn in_place(comm: &Communicator, place: &Place, len: usize) -> Result<Self> {
        place.check(comm)?;
        match place {
            Place::Host => Self::new(comm, len),
            #[cfg(feature = "cuda")]
            Place::Device(_) => Self::unshared(place, len),
        }
    }

    /// Allocates `len` zeros in a place, in memory that no other rank shares.
    pub(super) fn unshared(place: &Place, len: usize) -> Result<Self> {
        match place {
            Place::Host => zeros(len).map(Self::from),
            #[cfg(feature = "cuda")]
            Place::Device(workplace) => DeviceFlat::new(workplace, len).map(|flat| Self(Elements::Device(flat))),
        }
    }

    /// Returns the elements, which must be in host memory.
    ///
    /// # Errors
    ///
    /// `Unsupported` if the elements are on a device.
    pub fn host(&self) -> Result<&[T]> {
        match &self.0 {
            Elements::Host(buffer) => Ok(buffer),
            #[cfg(feature = "cuda")]
            Elements::Device(_) => Err(on_device()),
        }
    }

    /// Returns the elements, which must be in host memory, for writing.
    ///
    /// # Errors
    ///
    /// The errors of [`host`](Self::host).
    pub fn host_mut(&mut self) -> Result<&mut [T]> {
        match &mut self.0 {
            Elements::Host(buffer) => Ok(buffer),
            #[cfg(feature = "cuda")]
            Elements::Device(_) => Err(on_device()),
        }
    }

    /// Returns the elements if they are on a device.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn device(&self) -> Option<&CudaSlice<T>> {
        match &self.0 {
            Elements::Host(_) => None,
            Elements::Device(flat) => Some(&flat.slice),
        }
    }

    /// Returns the elements for writing, if they are on a device. You may replace the slice. Later calls use the new
    /// slice on the same stream. If the new slice belongs to another context, later calls return `InvalidArgument`.
    #[cfg(feature = "cuda")]
    pub fn device_mut(&mut self) -> Option<&mut CudaSlice<T>> {
        match &mut self.0 {
            Elements::Host(_) => None,
            Elements::Device(flat) => Some(&mut flat.slice),
        }
    }

    /// Returns the elements as a vector. If this value was made from a vector, returns that vector. Otherwise returns a
    /// copy.
    ///
    /// # Errors
    ///
    /// The errors of [`host`](Self::host).
    pub fn into_vec(self) -> Result<Vec<T>> {
        match self.0 {
            Elements::Host(buffer) => Ok(buffer.into_vec()),
            #[cfg(feature = "cuda")]
            Elements::Device(_) => Err(on_device()),
        }
    }

    /// Returns the elements if they are on a device.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn into_device(self) -> Option<CudaSlice<T>> {
        match self.0 {
            Elements::Host(_) => None,
            Elements::Device(flat) => Some(flat.slice),
        }
    }

    /// Returns whether a buffer can replace this one.
    pub(super) fn can_be(&self, given: &Self) -> bool {
        match (&self.0, &given.0) {
            (Elements::Host(_), Elements::Host(_)) => true,
            #[cfg(feature = "cuda")]
            (Elements::Device(own), Elements::Device(given)) => own.can_be(given),
            #[cfg(feature = "cuda")]
            _ => false,
        }
    }

    /// Returns a buffer that replaces this one, if it [can](Self::can_be).
    pub(super) fn replaced_by(&self, given: Self) -> Self {
        match (&self.0, given.0) {
            #[cfg(feature = "cuda")]
            (Elements::Device(own), Elements::Device(given)) => Self(Elements::Device(own.replaced_by(given))),
            (_, given) => Self(given),
        }
    }

    /// Returns a copy of the elements in `range`.
    pub(super) fn copied(&self, range: Range<usize>) -> Result<Self> {
        match &self.0 {
            Elements::Host(buffer) => Ok(buffer[range].to_vec().into()),
            #[cfg(feature = "cuda")]
            Elements::Device(flat) => flat.copied(range).map(|flat| Self(Elements::Device(flat))),
        }
    }

    /// Returns the place of its memory.
    fn place(&self) -> Place {
        match &self.0 {
            Elements::Host(_) => Place::Host,
            #[cfg(feature = "cuda")]
            Elements::Device(flat) => Place::Device(Arc::clone(flat.place())),
        }
    }

    /// Returns the bytes of memory it holds.
    pub(super) fn bytes(&self) -> usize {
        match &self.0 {
            Elements::Host(buffer) => buffer.bytes(),
            #[cfg(feature = "cuda")]
            Elements::Device(flat) => flat.slice.len() * size_of::<T>(),
        }
    }

    /// Refuses memory that [`put`](Self::put) cannot reach from here.
    pub(super) fn check_put(&self, gradient: &Memory<'_, T>) -> Result<()> {
        self.place().check_reach(gradient)
    }

    /// Copies the given elements, from element `first` on, into `range`, or adds them to the elements there. The range
    /// is inside the buffer, and enough elements are given (checked by the caller).
    pub(super) fn put(&mut self, range: Range<usize>, given: Memory<'_, T>, first: usize, add: bool) -> Result<()> {
        match (&mut self.0, given) {
            (Elements::Host(buffer), Memory::Host(given)) => {
                let given = &given.as_slice()[first..first + range.len()];
                match add {
                    true => buffer[range].iter_mut().zip(given).for_each(|(sum, new)| *sum = sum.plus(*new)),
                    false => buffer[range].copy_from_slice(given),
                }
            }
            #[cfg(feature = "cuda")]
            (Elements::Device(flat), Memory::Device(given)) => flat.put(range, given, first, add)?,
            (own, _) => return Err(elsewhere(matches!(own, Elements::Host(_)))),
        }
        Ok(())
    }

    /// Copies a gradient out. `range` is inside the buffer, and the destination has the same length (checked by the
    /// caller).
    pub(super) fn copy_to(&self, range: Range<usize>, destination: MemoryMut<'_, T>) -> Result<()> {
        match (&self.0, destination) {
            (Elements::Host(buffer), MemoryMut::Host(destination)) => destination.into_slice().copy_from_slice(&buffer[range]),
            #[cfg(feature = "cuda")]
            (Elements::Device(flat), MemoryMut::Device(destination)) => flat.copy_to(range, destination)?,
            (own, _) => return Err(elsewhere(matches!(own, Elements::Host(_)))),
        }
        Ok(())
    }

    /// Overwrites a gradient with zeros.
    pub(super) fn clear(&mut self, range: Range<usize>) -> Result<()> {
        match &mut self.0 {
            Elements::Host(buffer) => buffer[range].fill(T::default()),
            #[cfg(feature = "cuda")]
            Elements::Device(flat) => flat.clear(range)?,
        }
        Ok(())
    }

    /// Starts an all-reduce of the buffer. On a single rank, this only multiplies the elements by the weight, if there
    /// is one. On a device the call is queued, and the slice's own events record its end.
    pub(super) fn all_reduce(mut self, comm: &Communicator, op: ReduceOp) -> Result<Pending<Self>> {
        if self.memory().is_empty() || comm.world_size() == 1 && !matches!(op, ReduceOp::PreMulSum(_)) {
            return Ok(Pending::Ended(self));
        }
        match &mut self.0 {
            Elements::Host(_) => comm.start_all_reduce(self, op).map(Pending::Going),
            #[cfg(feature = "cuda")]
            Elements::Device(flat) => comm.all_reduce(&mut flat.slice, op).map(|()| Pending::Ended(self)),
        }
    }

    /// Starts a reduce-scatter of the buffer, in the same way as [`all_reduce`](Self::all_reduce). The result replaces
    /// only this rank's share of the buffer.
    pub(super) fn reduce_scatter(mut self, comm: &Communicator, op: ReduceOp) -> Result<Pending<Self>> {
        if self.memory().is_empty() || comm.world_size() == 1 && !matches!(op, ReduceOp::PreMulSum(_)) {
            return Ok(Pending::Ended(self));
        }
        match &mut self.0 {
            Elements::Host(_) => comm.start_reduce_scatter(self, op).map(Pending::Going),
            #[cfg(feature = "cuda")]
            Elements::Device(flat) => comm.reduce_scatter(&mut flat.slice, op).map(|()| Pending::Ended(self)),
        }
    }

    /// Starts to gather every rank's share into the buffer, in the same way as [`all_reduce`](Self::all_reduce).
    pub(super) fn all_gather(mut self, comm: &Communicator) -> Result<Pending<Self>> {
        if comm.world_size() == 1 || self.memory().is_empty() {
            return Ok(Pending::Ended(self));
        }
        match &mut self.0 {
            Elements::Host(_) => comm.start_all_gather(self).map(Pending::Going),
            #[cfg(feature = "cuda")]
            Elements::Device(flat) => comm.all_gather(&mut flat.slice).map(|()| Pending::Ended(self)),
        }
    }

    /// Converts the elements of another buffer, and writes them to this buffer. Both buffers must have the same length.
    /// Both buffers must be in host memory, or both must be on the same device. Each element is converted to `f32`,
    /// multiplied by `weight`, rounded to `f32` and then to `T`. On a device, this conversion is queued on this
    /// buffer's stream, and gives the same bits as on the host, except for NaNs.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the lengths differ. `InvalidArgument` unless both buffers are in host memory, or both in
    /// memory of the same `CudaContext`. On a device, also `Cuda` if the driver fails.
    pub fn convert_from<F: Float>(&mut self, from: &Flat<F>, weight: f64) -> Result<()> {
        let (len, given) = (self.memory().len(), from.memory().len());
        if len != given {
            return Err(Error::argument("convert_from", format!("{given} elements were passed for a buffer of {len} elements")));
        }
        self.convert_part(0..len, from.memory(), 0, weight)
    }

    /// Does the same as [`convert_from`](Self::convert_from), but into `range`, and from element `first` of the given
    /// elements on. The range is inside the buffer, and enough elements are given (checked by the caller).
    pub(super) fn convert_part<F: Float>(&mut self, range: Range<usize>, given: Memory<'_, F>, first: usize, weight: f64) -> Result<()> {
        match (&mut self.0, given) {
            (Elements::Host(into), Memory::Host(from)) => {
                convert(&from.as_slice()[first..first + range.len()], &mut into[range], weight);
            }
            #[cfg(feature = "cuda")]
            (Elements::Device(into), Memory::Device(from)) => into.convert_part(range, from, first, weight)?,
            (own, _) => return Err(elsewhere(matches!(own, Elements::Host(_)))),
        }
        Ok(())
    }

    /// Adds the squares of the elements in `range` to `sums`. The sum is the same on every rank that has the same
    /// elements.
    pub(super) fn add_squares(&self, range: Range<usize>, sums: &mut Squares) -> Result<()> {
        match &self.0 {
            Elements::Host(buffer) => sums.add(&buffer[range]),
            #[cfg(feature = "cuda")]
            Elements::Device(flat) => flat.add_squares(range, &mut sums.device)?,
        }
        Ok(())
    }

    /// Multiplies the elements in `range`, in `f64`, each product rounded once.
    pub(super) fn scale(&mut self, range: Range<usize>, factor: f64) -> Result<()> {
        match &mut self.0 {
            Elements::Host(buffer) => buffer[range].iter_mut().for_each(|x| *x = T::from_f64(x.to_f64() * factor)),
            #[cfg(feature = "cuda")]
            Elements::Device(flat) => flat.scale(range, factor)?,
        }
        Ok(())
    }

    /// Returns the elements in `range` if they are on a device.
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

#[expect(unsafe_code, reason = "an implementor of a buffer trait promises that its memory stays in place")]
// SAFETY: it always returns its one buffer.
unsafe impl<T: Float> StableMemory for Flat<T> {}

impl<T: Float> Buffer for Flat<T> {
    type Element = T;

    fn memory(&self) -> Memory<'_, T> {
        match &self.0 {
            Elements::Host(buffer) => Memory::from(&buffer[..]),
            #[cfg(feature = "cuda")]
            Elements::Device(flat) => flat.slice.memory(),
        }
    }
}

impl<T: Float> BufferMut for Flat<T> {
    fn memory_mut(&mut self) -> MemoryMut<'_, T> {
        match &mut self.0 {
            Elements::Host(buffer) => MemoryMut::from(&mut buffer[..]),
            #[cfg(feature = "cuda")]
            Elements::Device(flat) => flat.slice.memory_mut(),
        }
    }
}

/// A background call, or the result of a call that completed at once.
#[derive(Debug, Default)]
pub(super) enum Pending<B> {
    /// Nothing was started.
    #[default]
    Idle,
    /// It is in progress.
    Going(Work<B>),
    /// It has already completed.
    Ended(B),
}

impl<B: Send + 'static> Pending<B> {
    /// Waits for the call to end.
    pub(super) fn wait(&mut self) -> Result<B> {
        match std::mem::take(self) {
            Self::Going(work) => work.wait(),
            Self::Ended(buffer) => Ok(buffer),
            Self::Idle => Err(not_started()),
        }
    }
}

/// Returns the error for a hook that was advanced before it was started.
pub(super) fn not_started() -> Error {
    Error::argument("advance", "nothing was started: call start before advance")
}
