//! Access to a communicator's device, calls on the caller's streams, and patterns in device memory for programs that
//! check the data they move.

#![expect(unsafe_code, reason = "streams that other crates own, and kernels that take addresses of borrowed buffers")]

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};

use crate::base::deadline::Deadline;
use crate::call::buffer::device::{DeviceMemory, DeviceMemoryMut, Ordered};
use crate::call::buffer::{Buffer, BufferMut, Memory, MemoryMut};
use crate::call::element::{Data, TypeTag};
use crate::communicator::Communicator;
use crate::communicator::prepare::device_call::{self, Guards, Hold};
use crate::device::{self, DeviceBackend, NcclCommunicator};
use crate::error::{Error, Result};
use crate::interop::AsStream;

/// The device backend of a communicator; see [`Communicator::device`].
///
/// ```no_run
/// # use collectives::{Communicator, DeviceChoice};
/// # fn main() -> collectives::Result<()> {
/// let comm = Communicator::builder().require_device(DeviceChoice::Local).from_env()?;
/// let device = comm.device().expect("it was required");
/// println!("rank {} has {} ({}), NCCL {}", comm.rank(), device.name(), device.pci_address(), device.nccl_version());
/// println!("{}", device.explain());
/// # comm.close()
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Device {
    comm: Communicator,
    raw: NcclCommunicator,
}

impl Communicator {
    /// Returns the device backend, if this communicator has one. Calls on device buffers need a device backend.
    #[must_use]
    pub fn device(&self) -> Option<Device> {
        let raw = self.core.device.get()?.as_ref().ok()?.clone();
        Some(Device { comm: self.clone(), raw })
    }

    /// Returns the reason why this communicator has no device backend, or `None` if it has one.
    #[must_use]
    pub fn why_no_device(&self) -> Option<String> {
        match self.backend("device") {
            Ok(_) => None,
            Err(Error::NoDevice { reason, .. }) => Some(reason),
            Err(error) => Some(error.to_string()),
        }
    }
}

impl Device {
    /// Returns the device's number among the devices that this process sees.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.raw.backend().gpu().ordinal
    }

    /// Returns the device's name, as the driver reports it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.raw.backend().gpu().name
    }

    /// Returns the device's address on its bus, such as `0000:1b:00.0`.
    #[must_use]
    pub fn pci_address(&self) -> &str {
        &self.raw.backend().gpu().pci
    }

    /// Returns the device's context. Buffers for this communicator must be allocated in this context.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.raw.backend().gpu().context
    }

    /// Returns the stream on which calls are queued, unless [`Communicator::with_stream`] names another.
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        self.raw.backend().stream()
    }

    /// Returns the version of the loaded NCCL, such as `2.28.9`.
    #[must_use]
    pub fn nccl_version(&self) -> String {
        self.raw.backend().comm().version().to_string()
    }

    /// Returns this communicator as an `NcclCommunicator`, which can make raw calls on addresses, allocate memory
    /// through NCCL, and register buffers.
    #[must_use]
    pub fn raw(&self) -> &NcclCommunicator {
        &self.raw
    }

    /// Returns the failure that NCCL or this crate's watchdog has found, if there is one: a lost peer, or a call that
    /// did not end in time.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.raw.failure()
    }

    /// Waits until all work on [`Device::stream`] has ended, for at most the communicator's timeout. If the timeout
    /// passes, this method aborts the communicator, so that the stream becomes free.
    ///
    /// # Errors
    ///
    /// - `Timeout`, and errors of NCCL or the driver.
    /// - `Unsupported` in a forked child.
    #[doc(alias = "cudaStreamSynchronize")]
    pub fn synchronize(&self) -> Result<()> {
        self.comm.refuse_forked("synchronize")?;
        self.raw.backend().synchronize(&Deadline::after(self.comm.timeout()))
    }

    /// Waits until all work on one of the caller's streams has ended, with the same limit as
    /// [`synchronize`](Self::synchronize). Use this method if work on the stream waits for a call of this communicator.
    /// Such work also waits for the other ranks to make the call, so a wait for this work needs a limit.
    ///
    /// # Errors
    ///
    /// The errors of [`synchronize`](Self::synchronize), and `InvalidArgument` for a stream of another device.
    pub fn wait_for(&self, stream: &Arc<CudaStream>) -> Result<()> {
        self.comm.refuse_forked("waiting for a stream")?;
        Communicator::same_device(self.raw.backend(), "wait_for", "the stream", stream.context())?;
        self.raw.backend().comm().wait_for(stream, &Deadline::after(self.comm.timeout()))
    }

    /// Describes in words which algorithm the device backend uses for each op and element type. The text is for people
    /// and may change.
    #[must_use]
    pub fn explain(&self) -> String {
        self.raw.backend().explain()
    }
}

impl Communicator {
    /// Returns a handle to this communicator. Calls on device buffers through this handle are queued on `stream`,
    /// instead of on the communicator's own stream. Calls on host buffers are not affected.
    ///
    /// NCCL requires a single order for all calls of a communicator. So if you use several streams, use events to order
    /// the calls on different streams.
    ///
    /// ```no_run
    /// # use collectives::{Communicator, ReduceOp};
    /// # fn example(comm: &Communicator, grad: &mut cudarc::driver::CudaSlice<f32>) -> collectives::Result<()> {
    /// let stream = comm.device().expect("a device was asked for").context().new_stream().expect("a stream");
    /// comm.with_stream(&stream).all_reduce(grad, ReduceOp::Avg)
    /// # }
    /// ```
    ///
    /// If there is no device backend, or the stream belongs to another device, calls on device buffers return an
    /// error.
    #[must_use]
    pub fn with_stream(&self, stream: &Arc<CudaStream>) -> Self {
        Self { stream: Some(Arc::clone(stream)), ..self.clone() }
    }

    /// Orders calls relative to the work on a stream of another crate: the calls that the closure makes run after all
    /// work that is already on `stream`, and before all work that is queued on `stream` later. `stream` can also be a
    /// raw `CUstream` or `cudaStream_t` (see [`RawStream`](crate::interop::RawStream)).
    ///
    /// ```no_run
    /// # use collectives::{Communicator, ReduceOp, interop::RawStream};
    /// # fn example(comm: &Communicator, grad: &mut cudarc::driver::CudaSlice<f32>, handle: *mut std::ffi::c_void) -> collectives::Result<()> {
    /// // SAFETY: a stream of device 0, which its engine does not destroy before the call returns.
    /// let stream = unsafe { RawStream::new(handle, 0) };
    /// comm.in_order_of(&stream, |comm| comm.all_reduce(grad, ReduceOp::Avg))
    /// # }
    /// ```
    ///
    /// The calls themselves run on the communicator's stream, with one event before and one after them. They do not run
    /// on `stream`, because a communicator keeps the streams that it has used, but a borrowed stream may end before the
    /// communicator. For cudarc streams, use [`Communicator::with_stream`], which needs no events.
    ///
    /// # Errors
    ///
    /// - `NoDevice` if there is no device backend.
    /// - `InvalidArgument` for a stream of another device.
    /// - `Unsupported` for a stream that is being captured.
    /// - The errors of the driver, and of the closure `calls`.
    pub fn in_order_of<R>(&self, stream: &(impl AsStream + ?Sized), calls: impl FnOnce(&Self) -> Result<R>) -> Result<R> {
        const CALL: &str = "in_order_of";
        let backend = self.backend(CALL)?;
        self.refuse_forked(CALL)?;
        let context = &backend.gpu().context;
        self.check_stream(backend, CALL)?;
        if stream.device() != context.ordinal() {
            let reason = format!("the stream belongs to device {}, and this communicator to device {}", stream.device(), context.ordinal());
            return Err(Error::argument(CALL, reason));
        }
        // SAFETY: a stream of that device's primary context, alive as long as it is borrowed (the trait's contract),
        // and so until the handle made here is dropped: it does not leave this function.
        let foreign = unsafe { context.wrap_borrowed_stream(stream.as_raw_stream().cast()) };
        if device::is_capturing(&foreign) {
            return Err(Error::unsupported(
                CALL,
                "the stream is being captured into a graph; to capture calls, make them with Communicator::with_stream",
            ));
        }
        let own = self.device_stream(backend);
        let refusal = |error| device::cuda_error(format!("{CALL}: ordering the streams"), error);
        let ordered = Ordered::after(&foreign, own);
        device_call::check_ordering(context, own).map_err(refusal)?;
        let result = calls(self);
        drop(ordered);
        let parked = device_call::check_ordering(context, own).map_err(refusal);
        result.and_then(|result| parked.map(|()| result))
    }
}

/// The bytes that the fill kernel moves at a time.
const VECTOR_BYTES: usize = 16;

impl Device {
    /// Fills a buffer with copies of a pattern. The work is queued on [`Device::stream`]. The first copy begins with
    /// the pattern's element at index `phase`. The pattern's length must be a multiple of 16 bytes. Cost: one pass over
    /// the buffer.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if the buffer or the pattern is not on this device.
    /// - `InvalidArgument` if the buffer and the pattern have different element types.
    /// - `InvalidArgument` if the pattern is empty, or if the pattern's length is not a multiple of 16 bytes.
    /// - `Cuda` if the driver fails.
    pub fn fill<B, P>(&self, buffer: &mut B, pattern: &P, phase: usize) -> Result<()>
    where
        B: BufferMut + ?Sized,
        P: Buffer<Element = B::Element> + ?Sized,
    {
        let call = "fill";
        let (Memory::Device(pattern), MemoryMut::Device(buffer)) = (pattern.memory(), buffer.memory_mut()) else {
            return Err(Error::argument(call, "the buffer and the pattern must be in device memory"));
        };
        Self::alike(call, buffer.element(), pattern.element())?;
        let element = buffer.element_bytes();
        let pattern_bytes = pattern.len() * element;
        if pattern_bytes == 0 || !pattern_bytes.is_multiple_of(VECTOR_BYTES) {
            return Err(Error::argument(
                call,
                format!("the pattern's length must be a positive multiple of {VECTOR_BYTES} B, but it is {pattern_bytes} B"),
            ));
        }
        let backend = self.raw().backend();
        Communicator::same_device(backend, call, "the pattern", pattern.inner.context())?;
        Communicator::same_device(backend, call, "the buffer", buffer.inner.context())?;
        let bytes = buffer.bytes();
        self.run_fill(backend, buffer, bytes, pattern, pattern_bytes, phase % pattern.len() * element)
    }

    /// Refuses a buffer and a pattern with different element types.
    fn alike(call: &'static str, buffer: TypeTag, pattern: TypeTag) -> Result<()> {
        if buffer == pattern {
            Ok(())
        } else {
            Err(Error::argument(call, format!("the buffer holds {buffer}, but the pattern holds {pattern}: pass two buffers of one type")))
        }
    }

    fn run_fill<T: Data>(
        &self,
        backend: &DeviceBackend,
        buffer: DeviceMemoryMut<'_, T>,
        bytes: usize,
        pattern: DeviceMemory<'_, T>,
        pattern_bytes: usize,
        phase: usize,
    ) -> Result<()> {
        let stream = backend.stream();
        let mut guards = Guards::new(Hold::Borrowed);
        let element = buffer.element();
        let from = guards.read(pattern.inner, stream);
        let to = guards.write(buffer.inner, stream);
        device_call::check_place("fill", "the buffer", element, to, bytes)?;
        device_call::check_place("fill", "the pattern", element, from, pattern_bytes)?;
        // SAFETY: both are borrowed, on this device (checked by the caller), as long as stated; their events order
        // what follows.
        let queued = unsafe { backend.kernels().fill_pattern((to, bytes as u64), (from, pattern_bytes as u64), phase as u64, stream) };
        // The backend's end waits for its own stream, so the kernels are not unloaded while this one runs.
        queued.and(Communicator::release(guards, backend, stream, self.comm.timeout()))
    }

    /// Returns how many elements of a buffer differ from repeated copies of a pattern. The first copy begins with the
    /// pattern's element at index `phase`. Compares the elements byte by byte, and waits for the result. Cost: one pass
    /// over the buffer.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if the buffer or the pattern is not on this device, or if the pattern is empty.
    /// - `InvalidArgument` if the buffer and the pattern have different element types.
    /// - `Timeout`, `Cuda`.
    pub fn count_differing<B, P>(&self, buffer: &B, pattern: &P, phase: usize) -> Result<u64>
    where
        B: Buffer + ?Sized,
        P: Buffer<Element = B::Element> + ?Sized,
    {
        let call = "count_differing";
        let (Memory::Device(pattern), Memory::Device(buffer)) = (pattern.memory(), buffer.memory()) else {
            return Err(Error::argument(call, "the buffer and the pattern must be in device memory"));
        };
        Self::alike(call, buffer.element(), pattern.element())?;
        if pattern.bytes() == 0 {
            return Err(Error::argument(call, "the pattern is empty; pass at least one element"));
        }
        let backend = self.raw().backend();
        Communicator::same_device(backend, call, "the pattern", pattern.inner.context())?;
        Communicator::same_device(backend, call, "the buffer", buffer.inner.context())?;
        let failed = |error| device::cuda_error(call, error);
        let stream = backend.stream();
        let mut counter = stream.alloc_zeros::<u64>(1).map_err(failed)?;
        let (count, pattern_elements) = (buffer.len() as u64, pattern.len() as u64);
        let (phase, element_bytes) = (phase as u64 % pattern_elements, buffer.element_bytes() as u32);
        let mut guards = Guards::new(Hold::Borrowed);
        let (of, like) = (guards.read(buffer.inner, stream), guards.read(pattern.inner, stream));
        let wrong = guards.write(&mut counter, stream);
        device_call::check_place(call, "the buffer", buffer.element(), of, buffer.bytes())?;
        device_call::check_place(call, "the pattern", pattern.element(), like, pattern.bytes())?;
        // SAFETY: buffer and pattern are borrowed until the count has been waited for, on this device (checked), and
        // as long as stated; the counter is our allocation, aligned for its type; the events of all three order
        // what follows.
        let queued = unsafe { backend.kernels().check_pattern((of, count), element_bytes, (like, pattern_elements), phase, wrong, stream) };
        queued.and(Communicator::release(guards, backend, stream, self.comm.timeout()))?;
        self.synchronize()?;
        let counted = stream.clone_dtoh(&counter).map_err(failed)?;
        Ok(counted.first().copied().unwrap_or_default())
    }
}
