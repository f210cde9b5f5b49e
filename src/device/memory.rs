//! Memory that NCCL allocates, and memory that is registered with NCCL: by one rank or, as a window, by all ranks
//! together.

#![expect(unsafe_code, reason = "NCCL is C")]

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr};
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};
use nccl_sys::{Library, ncclWindow_t};

use crate::base::deadline::Deadline;
use crate::base::tuning::device::BUFFER_DROP_WAIT;
use crate::call::buffer::device_buffers::{RawDeviceSlice, readable, writable};
use crate::call::buffer::{Buffer, Memory};
use crate::call::element::Data;
use crate::device::comm::{BackOff, Inner, NcclComm};
use crate::device::driver;
use crate::device::nccl::{self, Refusal};
use crate::error::{Error, Result};

/// Device memory that NCCL allocates. Registrations, windows, and reductions in the NVLink switch are most effective
/// with such memory.
///
/// You can use the buffer like a cudarc `CudaSlice`, with cudarc's own copies and kernels and with this crate's
/// collectives. Like a `CudaSlice`, the buffer tracks the streams that use it. NCCL frees memory immediately, not in
/// the order of a stream, so a drop of the buffer waits up to a minute for these streams. If they do not finish in that
/// time, the memory is leaked, because a kernel may still use it. If event tracking is disabled in the context, the
/// drop waits for all work in the context.
#[derive(Debug)]
pub struct NcclBuffer<T: Data> {
    library: &'static Library,
    address: CUdeviceptr,
    len: usize,
    read: Option<CudaEvent>,
    write: Option<CudaEvent>,
    stream: Arc<CudaStream>,
    elements: PhantomData<T>,
}

impl<T: Data> NcclBuffer<T> {
    /// Allocates `len` elements, which the stream fills with zero bytes. Needs NCCL 2.19.1.
    pub(crate) fn zeroed(comm: &NcclComm, stream: &Arc<CudaStream>, len: usize) -> Result<Self> {
        let doing = || format!("allocating {len} elements of {} bytes with NCCL", size_of::<T>());
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok());
        let bytes = bytes.ok_or_else(|| Error::argument("alloc", format!("{len} elements of {} bytes are too many", size_of::<T>())))?;
        if stream.context().cu_ctx() != comm.context().cu_ctx() {
            return Err(Error::argument("alloc", "the stream and the communicator belong to different contexts"));
        }
        let event = || stream.context().new_event(None).map_err(|error| driver::cuda_error(doing(), error));
        let (read, write) = (Some(event()?), Some(event()?));
        let address = allocate(comm, bytes.max(1)).map_err(|refusal| refusal.into_error(doing()))?;
        let mut buffer = Self { library: comm.library(), address, len, read, write, stream: Arc::clone(stream), elements: PhantomData };
        if bytes > 0 {
            let (address, _guard) = buffer.device_ptr_mut(stream);
            // SAFETY: the memory is ours and has this length, and is freed only after the stream has passed this.
            let cleared = unsafe { cudarc::driver::result::memset_d8_async(address, 0, bytes, stream.cu_stream()) };
            cleared.map_err(|error| driver::cuda_error(doing(), error))?;
        }
        Ok(buffer)
    }

    /// Waits for the streams that use the buffer; returns `false` if they did not finish in time.
    fn wait_for_uses(&self) -> bool {
        let context = self.stream.context();
        if driver::bind(context).is_err() {
            return false;
        }
        if !context.is_managing_stream_synchronization() {
            return context.synchronize().is_ok();
        }
        // The buffer's own stream waits for readers on other streams; the read event knows only the last of them.
        let Ok(own) = self.stream.record_event(None) else { return false };
        let own = Some(own);
        let (deadline, mut back_off) = (Deadline::after(BUFFER_DROP_WAIT), BackOff::default());
        let done = || [&self.read, &self.write, &own].into_iter().flatten().all(|event| matches!(driver::is_complete(event), Ok(true)));
        while !done() {
            if deadline.has_passed() {
                return false;
            }
            back_off.rest();
        }
        true
    }
}

fn allocate(comm: &NcclComm, bytes: usize) -> std::result::Result<CUdeviceptr, Refusal> {
    driver::bind(comm.context()).map_err(|error| Refusal::driver("cuCtxSetCurrent", error))?;
    let mut address: *mut c_void = std::ptr::null_mut();
    // SAFETY: the address is our variable, and the context of the device is current.
    let answer = unsafe { comm.library().ncclMemAlloc(&mut address, bytes) };
    nccl::check(comm.library(), nccl_sys::NCCL_COMM_NULL, "ncclMemAlloc", answer)?;
    Ok(address.expose_provenance() as CUdeviceptr)
}

impl<T: Data> Drop for NcclBuffer<T> {
    fn drop(&mut self) {
        if !self.wait_for_uses() {
            crate::base::event::warn!(bytes = self.num_bytes(), "NCCL memory is still in use and is not freed");
            return;
        }
        // SAFETY: the memory is ours, and no stream uses it any longer; the context is current.
        let answer = unsafe { self.library.ncclMemFree(self.address as usize as *mut c_void) };
        if let Err(refusal) = nccl::check(self.library, nccl_sys::NCCL_COMM_NULL, "ncclMemFree", answer) {
            crate::base::event::warn!(?refusal, "NCCL memory was not freed");
        }
    }
}

impl<T: Data> DeviceSlice<T> for NcclBuffer<T> {
    fn len(&self) -> usize {
        self.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

/// Makes the stream wait for recorded events. Errors are stored in the context, as cudarc does.
fn wait_for(stream: &CudaStream, events: &[&Option<CudaEvent>]) {
    if stream.context().is_managing_stream_synchronization() {
        for event in events.iter().copied().flatten() {
            stream.context().record_err(stream.wait(event));
        }
    }
}

impl<T: Data> DevicePtr<T> for NcclBuffer<T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        wait_for(stream, &[&self.write]);
        (self.address, SyncOnDrop::record_event(&self.read, stream))
    }
}

impl<T: Data> DevicePtrMut<T> for NcclBuffer<T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        wait_for(stream, &[&self.read, &self.write]);
        (self.address, SyncOnDrop::record_event(&self.write, stream))
    }
}

/// The registration of memory with NCCL. The memory must be deregistered before it is freed.
#[derive(Debug)]
struct Tie {
    inner: Arc<Inner>,
    handle: Handle,
}

#[derive(Debug, Clone, Copy)]
enum Handle {
    Registration(*mut c_void),
    Window(ncclWindow_t),
}

// SAFETY: NCCL's handles may be used by any thread; these are given to NCCL only, under the lock of the device.
unsafe impl Send for Tie {}
// SAFETY: a shared reference exposes only the handle's number, which only the owner of the tie gives back to NCCL.
unsafe impl Sync for Tie {}

mod sealed {
    /// Memory in an allocation that does not move and that remains allocated until the value is dropped.
    pub trait Lasting {
        /// Whether NCCL allocated the memory. NCCL chooses the kind of allocation that it can use best on this machine.
        fn is_of_nccl(&self) -> bool {
            false
        }
    }
}

/// Device memory that may be registered with NCCL:
///
/// - cudarc's slices, and views that are borrowed for `'static`
/// - [`NcclBuffer`]
/// - [`RawDeviceSlice`], because its creator vouches for the address
/// - memory that is already registered
///
/// The trait is sealed because NCCL writes to the address that a buffer returns, and cudarc's safe traits let any type
/// return any address. Memory of other crates (see [`AsDevicePtr`](crate::interop::AsDevicePtr)) does not implement it,
/// because the memory's owner vouches for the address only while the memory is borrowed.
pub trait Registrable: Buffer + sealed::Lasting + 'static {}

impl<B: Buffer + sealed::Lasting + 'static> Registrable for B {}
impl<T: Data> sealed::Lasting for CudaSlice<T> {}
impl<T: Data> sealed::Lasting for CudaView<'static, T> {}
impl<T: Data> sealed::Lasting for CudaViewMut<'static, T> {}
impl<T: Data> sealed::Lasting for NcclBuffer<T> {
    fn is_of_nccl(&self) -> bool {
        true
    }
}
impl<T: Data> sealed::Lasting for RawDeviceSlice<'static, T> {}
impl<T: Data, B: Registrable> sealed::Lasting for Registration<T, B> {
    fn is_of_nccl(&self) -> bool {
        self.held.buffer.is_of_nccl()
    }
}
impl<T: Data, B: Registrable> sealed::Lasting for Window<T, B> {
    fn is_of_nccl(&self) -> bool {
        self.held.buffer.is_of_nccl()
    }
}

impl Tie {
    /// Registers `bytes` bytes at `address` with NCCL. Returns `None` if NCCL has no use for a registration. `asked`
    /// becomes true just before the call to NCCL. From then on, NCCL may use the memory, even if the registration
    /// fails.
    fn new(
        comm: &NcclComm,
        (address, bytes): (CUdeviceptr, usize),
        window: Option<c_int>,
        deadline: &Deadline,
        asked: &mut bool,
    ) -> Result<Option<Self>> {
        let doing = || format!("registering {bytes} bytes with the communicator of rank {} of {}", comm.rank(), comm.world_size());
        let pointer = address as usize as *mut c_void;
        // NCCL may write to this place later, from one of its threads. If nothing waits for that, the place is leaked.
        let place = Box::into_raw(Box::new(std::ptr::null_mut::<c_void>()));
        comm.manage(&doing, deadline, |raw| {
            *asked = true;
            // SAFETY: - the handle is alive (lent by `manage`); the memory is allocated, and has this length, until its
            // owner is dropped (`Lasting`), which is after NCCL has forgotten it (`EngineGuard`);
            // - the place for NCCL's answer is in a box that is freed only after the call has ended.
            let (name, answer) = unsafe {
                match window {
                    None => ("ncclCommRegister", raw.library.ncclCommRegister(raw.handle, pointer, bytes, place)),
                    Some(flags) => {
                        let place = place.cast::<ncclWindow_t>();
                        ("ncclCommWindowRegister", raw.library.ncclCommWindowRegister(raw.handle, pointer, bytes, place, flags))
                    }
                }
            };
            nccl::check(raw.library, raw.handle, name, answer).map(|_| ())
        })?;
        // SAFETY: the pointer came out of a box above, and NCCL, whose call has ended, no longer writes there.
        let handle = *unsafe { Box::from_raw(place) };
        let handle = if window.is_some() { Handle::Window(handle.cast()) } else { Handle::Registration(handle) };
        Ok((!handle.is_null()).then(|| Self { inner: Arc::clone(comm.inner()), handle }))
    }
}

impl Handle {
    fn is_null(self) -> bool {
        match self {
            Handle::Registration(handle) => handle.is_null(),
            Handle::Window(handle) => handle.is_null(),
        }
    }
}

impl Tie {
    /// Deregisters the memory. Returns `false` if NCCL may still use the memory.
    fn undo(self) -> bool {
        let handle = self.handle;
        self.inner.manage_at_rest(&|| "deregistering a buffer".to_owned(), |raw| {
            // SAFETY: the communicator is alive (lent by `manage_at_rest`), the handle came from it, and this call,
            // which consumes the tie, gives it back once.
            let (name, answer) = unsafe {
                match handle {
                    Handle::Registration(handle) => ("ncclCommDeregister", raw.library.ncclCommDeregister(raw.handle, handle)),
                    Handle::Window(window) => ("ncclCommWindowDeregister", raw.library.ncclCommWindowDeregister(raw.handle, window)),
                }
            };
            nccl::check(raw.library, raw.handle, name, answer).map(|_| ())
        })
    }
}

/// A buffer and its registration with NCCL. The registration ends first. Memory that NCCL may still use is never freed.
#[derive(Debug)]
struct EngineGuard<B> {
    tie: Option<Tie>,
    buffer: ManuallyDrop<B>,
}

impl<B> EngineGuard<B> {
    /// Registers the buffer with NCCL. If the registration fails after NCCL was called, the buffer is dropped once NCCL
    /// has given all resources back. If NCCL keeps resources, the buffer is leaked.
    fn new(comm: &NcclComm, buffer: B, extent: (CUdeviceptr, usize), window: Option<c_int>, deadline: &Deadline) -> Result<Self> {
        let mut asked = false;
        // Leaked if anything panics.
        let buffer = ManuallyDrop::new(buffer);
        match Tie::new(comm, extent, window, deadline, &mut asked) {
            Ok(tie) => Ok(Self { tie, buffer }),
            Err(error) => {
                if asked && !comm.inner().has_let_go() {
                    crate::base::event::error!(
                        "the registration of a buffer failed, and NCCL did not release the buffer in time: NCCL may still use it, so its memory is leaked"
                    );
                } else {
                    drop(ManuallyDrop::into_inner(buffer));
                }
                Err(error)
            }
        }
    }

    /// Deregisters the buffer, and returns the buffer. If NCCL may still use the buffer, leaks the buffer and returns
    /// `None`. Call this method once, at the end.
    fn take(&mut self) -> Option<B> {
        if self.tie.take().is_none_or(Tie::undo) {
            // SAFETY: called once, by `drop` or by `into_buffer`, which forgets the rest. Nothing uses the buffer here
            // afterwards.
            return Some(unsafe { ManuallyDrop::take(&mut self.buffer) });
        }
        crate::base::event::error!("NCCL did not deregister a buffer in time, and may still use it: its memory is leaked");
        None
    }

    /// Returns the buffer.
    fn into_buffer(self) -> Result<B> {
        let lost = || {
            let reason = "NCCL did not deregister the buffer in time, and may still use it: its memory is leaked";
            Error::unsupported("taking back a registered buffer", reason)
        };
        ManuallyDrop::new(self).take().ok_or_else(lost)
    }
}

impl<B> Drop for EngineGuard<B> {
    fn drop(&mut self) {
        drop(self.take());
    }
}

/// A buffer that is registered with one communicator. The communicator's collectives can use the buffer in place,
/// without copies through NCCL's buffers.
///
/// The registration owns the buffer (for example, a [`NcclBuffer`] or a `CudaSlice`), and can be used in its place. A
/// drop of the registration waits for the communicator's work on the device. If NCCL does not deregister the buffer
/// within ten minutes, its memory is leaked, and a `tracing` event reports this.
#[derive(Debug)]
pub struct Registration<T, B> {
    held: EngineGuard<B>,
    elements: PhantomData<fn() -> T>,
}

impl<T: Data, B: Registrable<Element = T>> Registration<T, B> {
    /// Registers a buffer on this rank. Needs NCCL 2.19.1.
    pub(crate) fn new(comm: &NcclComm, buffer: B, deadline: &Deadline) -> Result<Self> {
        let extent = extent(comm, &buffer)?;
        Ok(Self { held: EngineGuard::new(comm, buffer, extent, None, deadline)?, elements: PhantomData })
    }

    /// Ends the registration and returns the buffer.
    ///
    /// # Errors
    ///
    /// `Unsupported` if NCCL does not deregister the buffer in time. The buffer's memory is then leaked.
    pub fn into_buffer(self) -> Result<B> {
        self.held.into_buffer()
    }
}

/// A buffer that all ranks of one communicator register together. NCCL's fastest kernels need such buffers, and so do
/// NCCL's collectives without kernels.
///
/// The window owns the buffer, and can be used in its place. A drop of the window waits for the communicator's work on
/// the device. If NCCL does not deregister the buffer within ten minutes, its memory is leaked, and a `tracing` event
/// reports this.
#[derive(Debug)]
pub struct Window<T, B> {
    held: EngineGuard<B>,
    elements: PhantomData<fn() -> T>,
}

impl<T: Data, B: Registrable<Element = T>> Window<T, B> {
    /// Opens a window on each rank's buffer. All ranks do so together, with buffers of one size. Needs NCCL 2.27.3.
    pub(crate) fn new(comm: &NcclComm, buffer: B, deadline: &Deadline) -> Result<Self> {
        let extent = extent(comm, &buffer)?;
        let window = Some(nccl_sys::NCCL_WIN_COLL_SYMMETRIC);
        Ok(Self { held: EngineGuard::new(comm, buffer, extent, window, deadline)?, elements: PhantomData })
    }

    /// Returns whether NCCL has opened an NCCL window on the buffer. If a window has no advantage on the communicator's
    /// devices, NCCL opens none, and this value is an ordinary buffer.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.held.tie.is_some()
    }

    /// Closes the window and returns the buffer.
    ///
    /// # Errors
    ///
    /// `Unsupported` if NCCL does not deregister the buffer in time. The buffer's memory is then leaked.
    pub fn into_buffer(self) -> Result<B> {
        self.held.into_buffer()
    }
}

/// Returns the address of a buffer and its length in bytes.
fn extent<B: Registrable>(comm: &NcclComm, buffer: &B) -> Result<(CUdeviceptr, usize)> {
    let Memory::Device(memory) = buffer.memory() else {
        return Err(Error::argument("register", "the buffer is in host memory"));
    };
    if memory.inner.context().cu_ctx() != comm.context().cu_ctx() {
        return Err(Error::argument("register", "the buffer and the communicator belong to different contexts"));
    }
    let bytes = memory.bytes();
    if bytes == 0 {
        return Err(Error::argument("register", "the buffer is empty"));
    }
    // Only the address is needed. Memory without its own stream returns the address for any stream.
    let any = comm.context().default_stream();
    let (address, _guard) = memory.inner.read(memory.inner.owner().unwrap_or(&any));
    Ok((address, bytes))
}

/// Returns the number of bytes of a window on this buffer.
///
/// # Errors
///
/// `InvalidArgument` for a buffer of another context, and for an empty buffer. `Unsupported` if NCCL could not share
/// its memory with other ranks, which would end the communicator.
pub(crate) fn suits_window<B: Registrable>(comm: &NcclComm, buffer: &B) -> Result<usize> {
    let (address, bytes) = extent(comm, buffer)?;
    let refusal = if buffer.is_of_nccl() { None } else { cannot_be_handed_out(comm, address) };
    match refusal {
        None => Ok(bytes),
        Some(reason) => {
            let reason = format!(
                "{reason}: allocate the buffer with NcclCommunicator::allocate (ncclMemAlloc), or with cuMemCreate; a CudaSlice comes from \
                 the driver's pool"
            );
            Err(Error::unsupported(format!("a window on {bytes} B"), reason))
        }
    }
}

/// Returns the reason why NCCL could not share memory with other ranks. Finds it with the driver calls that NCCL itself
/// makes.
fn cannot_be_handed_out(comm: &NcclComm, address: CUdeviceptr) -> Option<String> {
    let functions = ["cuMemGetAddressRange_v2", "cuMemRetainAllocationHandle", "cuMemRelease"];
    if !functions.into_iter().all(driver::has) {
        // In this case NCCL does not have these functions either, and works without them.
        return None;
    }
    let words = |what: &'static str| move |error| format!("the driver {what} the buffer's memory ({})", driver::words(error));
    let asked = || {
        driver::bind(comm.context()).map_err(words("has no context for"))?;
        let (mut base, mut size, mut handle) = (0, 0, 0);
        // SAFETY: the function exists (checked) and writes to our variables; the address is allocated memory
        // (`Lasting`).
        unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut size, address) }.result().map_err(words("does not know"))?;
        // SAFETY: the function exists (checked), writes to our variable, and only looks up the address.
        unsafe { sys::cuMemRetainAllocationHandle(&mut handle, base as usize as *mut c_void) }
            .result()
            .map_err(words("has no handle for"))?;
        // SAFETY: the function exists (checked); the handle was retained in the line above, and is given back once.
        unsafe { sys::cuMemRelease(handle) }.result().map_err(words("does not release the handle of"))?;
        match (address - base) as usize % nccl_sys::NCCL_WIN_REQUIRED_ALIGNMENT {
            0 => Ok(()),
            past => {
                Err(format!("the buffer begins {past} B after a multiple of {} B in its allocation", nccl_sys::NCCL_WIN_REQUIRED_ALIGNMENT))
            }
        }
    };
    asked().err()
}

macro_rules! used_like_its_buffer {
    ($name:ident) => {
        impl<T, B: DeviceSlice<T>> DeviceSlice<T> for $name<T, B> {
            fn len(&self) -> usize {
                self.held.buffer.len()
            }

            fn stream(&self) -> &Arc<CudaStream> {
                self.held.buffer.stream()
            }
        }

        impl<T, B: DevicePtr<T>> DevicePtr<T> for $name<T, B> {
            fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
                self.held.buffer.device_ptr(stream)
            }
        }

        impl<T, B: DevicePtrMut<T>> DevicePtrMut<T> for $name<T, B> {
            fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
                self.held.buffer.device_ptr_mut(stream)
            }
        }
    };
}

used_like_its_buffer!(Registration);
used_like_its_buffer!(Window);

readable!([T: Data] NcclBuffer<T>, [T: Data, B: DevicePtr<T>] Registration<T, B>, [T: Data, B: DevicePtr<T>] Window<T, B>);
writable!([T: Data] NcclBuffer<T>, [T: Data, B: DevicePtr<T> + DevicePtrMut<T>] Registration<T, B>, [T: Data, B: DevicePtr<T> + DevicePtrMut<T>] Window<T, B>);
