//! The device backend: memory of a GPU, and calls that are queued on a stream.

#![expect(unsafe_code, reason = "memory of a device is known by its address")]

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use collectives::{
    __private::milliseconds_between,
    Communicator, Device, Error, Result,
    interop::RawDeviceSlice,
    nccl::{NcclBuffer, Registration, Window},
};
use cudarc::driver::sys::{CUdeviceptr, CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaEvent, CudaGraph, CudaStream, DevicePtr, DriverError, result};

use super::backend::{Backend, Memory};
use super::subjects::largest_buffer;
use crate::failure::Failure;
use crate::inputs::Sample;
use crate::layout::Run;
use crate::settings::{Register, Settings};
use crate::sizes::human;

/// How long a rank polls for the end of its calls before it waits in another way.
const IMPATIENCE: Duration = Duration::from_millis(20);
/// The largest element, in bytes.
const ELEMENT_BYTES: usize = 8;

/// The device backend of one rank.
pub(super) struct OnDevice<'a> {
    comm: &'a Communicator,
    device: &'a Device,
    stream: &'a Arc<CudaStream>,
    /// Recorded after calls to find out whether they have ended.
    end: CudaEvent,
    /// The size of each buffer, which is allocated once and suffices for the largest row.
    bytes: usize,
    storage: [Storage; 2],
    /// The expected results, up to their first repetition.
    pattern: Allocation,
}

/// Memory of a device.
enum Storage {
    Plain(Allocation),
    Registered(Registration<u8, NcclBuffer<u8>>),
    Window(Window<u8, NcclBuffer<u8>>),
}

/// Memory from the driver.
struct Allocation {
    address: CUdeviceptr,
    context: Arc<CudaContext>,
}

impl<'a> OnDevice<'a> {
    /// Allocates for the largest row. All ranks must do so together.
    pub(super) fn new(
        comm: &'a Communicator,
        device: &'a Device,
        stream: &'a Arc<CudaStream>,
        settings: &Settings,
    ) -> std::result::Result<Self, Failure> {
        let bytes = largest_buffer(settings, comm.world_size()) + (settings.unalign + 1) * ELEMENT_BYTES;
        let context = device.context();
        let end = context.new_event(None).map_err(|error| cuda("making an event", error))?;
        let storage = || Storage::new(device, stream, bytes, settings.device.register);
        let storage = [storage()?, storage()?];
        let pattern = Allocation::new(context, Self::PERIOD * ELEMENT_BYTES)?;
        // The driver does not allocate memory while calls of one rank wait for those of another on the same device.
        comm.barrier()?;
        Ok(Self { comm, device, stream, end, bytes, storage, pattern })
    }

    /// The number of elements after which inputs repeat. It has no factor above 16 in common with the length of a
    /// chunk. So data that lands in the place of other data is noticed.
    const PERIOD: usize = 16 * 4093;

    /// Describes the device, in the form that [`crate::facts::Gpu`] reads.
    pub(super) fn describe(&self) -> String {
        format!("{} {} {}", self.device.ordinal(), self.device.pci_address(), self.device.name())
    }

    /// Returns the version of NCCL as one number.
    pub(super) fn nccl_version(&self) -> u32 {
        let version = self.device.nccl_version();
        let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
        let mut part = || parts.next().unwrap_or(0);
        part() * 10_000 + part() * 100 + part()
    }

    /// Frees the memory once all ranks have finished with theirs.
    pub(super) fn close(self) -> Result<()> {
        self.finish()?;
        self.comm.barrier()
    }

    /// Polls the event after the last call, for the shortest delay.
    fn look(&self) -> std::result::Result<bool, DriverError> {
        self.end.record(self.stream)?;
        let began = Instant::now();
        while !self.end.try_is_complete()? {
            if began.elapsed() > IMPATIENCE {
                return Ok(false);
            }
            std::thread::yield_now();
        }
        Ok(true)
    }
}

impl Backend for OnDevice<'_> {
    type Memory<'p, T: Sample>
        = Elements<'p, T>
    where
        Self: 'p;
    type Mark = CudaEvent;
    type Graph = CudaGraph;

    fn period(_bytes: usize) -> usize {
        Self::PERIOD
    }

    fn buffers<T: Sample>(&self, length: usize, unalign: usize) -> std::result::Result<[Elements<'_, T>; 2], Failure> {
        let elements = |storage: &Storage| Elements {
            address: storage.address(self.stream) + (unalign * size_of::<T>()) as u64,
            length,
            pattern: self.pattern.address,
            device: self.device,
            stream: self.stream,
            elements: PhantomData,
        };
        Ok([elements(&self.storage[0]), elements(&self.storage[1])])
    }

    fn finish(&self) -> Result<()> {
        if !self.look().map_err(|error| cuda("waiting for calls", error))? {
            // The device's own stream can be waited for with a deadline.
            if Arc::ptr_eq(self.stream, self.device.stream()) {
                self.device.synchronize()?;
            } else {
                self.stream.synchronize().map_err(|error| cuda("waiting for calls", error))?;
            }
        }
        self.device.failure().map_or(Ok(()), Err)
    }

    fn mark(&self) -> Result<CudaEvent> {
        self.stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(|error| cuda("recording an event", error))
    }

    fn between(&self, from: &CudaEvent, to: &CudaEvent) -> Result<f64> {
        let milliseconds = milliseconds_between(from, to).map_err(|error| cuda("reading a time between events", error))?;
        Ok(f64::from(milliseconds) * 1e3)
    }

    fn memory_use(&self) -> Result<[u64; 3]> {
        let (free, total) = self.device.context().mem_get_info().map_err(|error| cuda("reading the amount of free memory", error))?;
        Ok([2 * self.bytes as u64, total.saturating_sub(free) as u64, total as u64])
    }

    fn capture(&self, queue: &mut dyn FnMut() -> Result<()>) -> Result<CudaGraph> {
        let doing = "capturing calls in a graph";
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).map_err(|error| cuda(doing, error))?;
        let queued = queue();
        // End the capture even after an error, so that the stream is free again.
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let captured = self.stream.end_capture(flags).map_err(|error| cuda(doing, error));
        queued?;
        let nothing = || Error::Unsupported { what: doing.to_owned(), reason: "the calls added nothing to the graph".to_owned() };
        let graph = captured?.ok_or_else(nothing)?;
        graph.upload().map_err(|error| cuda(doing, error))?;
        self.finish()?;
        Ok(graph)
    }

    fn launch(&self, graph: &CudaGraph) -> Result<()> {
        graph.launch().map_err(|error| cuda("launching a graph", error))
    }
}

impl Storage {
    fn new(device: &Device, stream: &Arc<CudaStream>, bytes: usize, register: Register) -> std::result::Result<Self, Failure> {
        let raw = device.raw();
        let made = match register {
            Register::Nothing => Allocation::new(device.context(), bytes).map(Storage::Plain),
            // SAFETY: all ranks walk one list of buffers and calls: the buffers of a call are registered on all of
            // them, and used at one offset.
            Register::Local => raw.allocate(stream, bytes).and_then(|buffer| unsafe { raw.register(buffer) }).map(Storage::Registered),
            // SAFETY: all ranks walk one list of buffers and calls: they open their windows in one order, each time of
            // one length, and a call is made on windows that were opened together.
            Register::Window => raw.allocate(stream, bytes).and_then(|buffer| unsafe { raw.window(buffer) }).map(Storage::Window),
        };
        made.map_err(|error| {
            let unsupported = error.is_unsupported();
            let message = format!("a buffer of {} on device {}: {error}", human(bytes), device.ordinal());
            if unsupported { Failure::unsupported(message) } else { Failure::internal(format!("{message}; use a smaller -e")) }
        })
    }

    fn address(&self, stream: &CudaStream) -> CUdeviceptr {
        match self {
            Storage::Plain(allocation) => allocation.address,
            Storage::Registered(buffer) => buffer.device_ptr(stream).0,
            Storage::Window(buffer) => buffer.device_ptr(stream).0,
        }
    }
}

impl Allocation {
    /// Allocates memory outside a pool, since other devices may access it.
    fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self> {
        context.bind_to_thread().map_err(|error| cuda("choosing a device", error))?;
        // SAFETY: the memory is written before it is read; the context is current.
        let address = unsafe { result::malloc_sync(bytes) }.map_err(|error| cuda(format!("allocating {bytes} B"), error))?;
        Ok(Self { address, context: Arc::clone(context) })
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: the address came from `malloc_sync`, and the driver waits for what uses the memory.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Elements in the memory of a device, which outlives them.
pub(super) struct Elements<'p, T> {
    address: CUdeviceptr,
    length: usize,
    /// Memory for as many elements as inputs have before they repeat.
    pattern: CUdeviceptr,
    device: &'p Device,
    stream: &'p Arc<CudaStream>,
    elements: PhantomData<T>,
}

impl<T: Sample> Elements<'_, T> {
    fn view(&self, length: usize) -> RawDeviceSlice<'_, T> {
        assert!(length <= self.length, "a call needs {length} elements, and the buffer has {}", self.length);
        // SAFETY:
        // - the memory was allocated for at least `self.length` elements, and is freed after the stream has been waited
        //   for;
        // - everything that uses it is queued on one stream, so nothing writes it at the same time;
        // - it holds elements wherever a call reads: every buffer is cleared or written first, and zeros are elements
        //   of every type.
        unsafe { RawDeviceSlice::new(self.stream.context(), self.address, length) }
    }

    /// Returns the address of an element.
    fn at(&self, index: usize) -> CUdeviceptr {
        self.address + (index * size_of::<T>()) as u64
    }

    /// Runs `act` on the stream and waits until it has ended.
    fn on_stream(&self, doing: &str, act: impl FnOnce() -> std::result::Result<(), DriverError>) -> Result<()> {
        let done = self.stream.context().bind_to_thread().and_then(|()| act()).and_then(|()| self.stream.synchronize());
        done.map_err(|error| cuda(doing, error))
    }

    /// Writes the block repeatedly, until `bytes` bytes are written.
    fn repeat(&mut self, to: CUdeviceptr, block: &[u8], bytes: usize) -> Result<()> {
        self.on_stream("copying inputs to the device", || {
            // SAFETY: the caller's range lies in this memory, and the stream is waited for before the block is dropped.
            unsafe { result::memcpy_htod_async(to, block, self.stream.cu_stream()) }?;
            let mut done = block.len();
            while done < bytes {
                let more = done.min(bytes - done);
                // SAFETY: both ranges lie in this memory, and do not overlap: the second begins where the first one
                // ends.
                unsafe { result::memcpy_dtod_async(to + done as u64, to, more, self.stream.cu_stream()) }?;
                done += more;
            }
            Ok(())
        })
    }

    /// Counts on the device how many elements of a run differ from a block that repeats.
    fn count_wrong(&self, run: &Run, block: &[u8]) -> Result<u64> {
        // SAFETY: there is room for a period, and the stream is waited for before the block is dropped.
        self.on_stream("copying the expected elements to the device", || unsafe {
            result::memcpy_htod_async(self.pattern, block, self.stream.cu_stream())
        })?;
        let context = self.stream.context();
        // SAFETY: both ranges are allocated and full of elements, and the call waits for its end.
        let (found, right) = unsafe {
            let found = RawDeviceSlice::<T>::new(context, self.at(run.start), run.length);
            (found, RawDeviceSlice::<T>::new(context, self.pattern, block.len() / size_of::<T>()))
        };
        self.device.count_differing(&found, &right, 0)
    }
}

/// Returns elements in the device's representation.
fn bytes_of<T: Sample>(elements: &[T]) -> Vec<u8> {
    elements.iter().flat_map(|element| element.bits().to_le_bytes().into_iter().take(size_of::<T>())).collect()
}

impl<T: Sample> Memory<T> for Elements<'_, T> {
    type Part<'a>
        = RawDeviceSlice<'a, T>
    where
        Self: 'a;
    type PartMut<'a>
        = RawDeviceSlice<'a, T>
    where
        Self: 'a;

    fn part(&self, length: usize) -> RawDeviceSlice<'_, T> {
        self.view(length)
    }

    fn part_mut(&mut self, length: usize) -> RawDeviceSlice<'_, T> {
        self.view(length)
    }

    fn apart(&mut self, read: Range<usize>, written: Range<usize>) -> (RawDeviceSlice<'_, T>, RawDeviceSlice<'_, T>) {
        assert!(
            read.end <= self.length && written.end <= self.length,
            "{read:?} and {written:?} must lie in a buffer of {} elements",
            self.length
        );
        // SAFETY: as in `view`; both ranges lie in the memory.
        let slice = |range: Range<usize>| unsafe { RawDeviceSlice::new(self.stream.context(), self.at(range.start), range.len()) };
        (slice(read), slice(written))
    }

    const HAS_GROUPS: bool = true;

    fn parts_mut(&mut self, length: usize, times: usize) -> Vec<RawDeviceSlice<'_, T>> {
        (0..times).map(|_| self.view(length)).collect()
    }

    fn copy_from(&mut self, from: &Self, length: usize, to: usize) -> Result<()> {
        assert!(length <= from.length && to + length <= self.length, "{length} elements to {to} of {}", self.length);
        let bytes = length * size_of::<T>();
        if bytes == 0 {
            return Ok(());
        }
        let bound = self.stream.context().bind_to_thread();
        // SAFETY: both ranges lie in memory of this device, and do not overlap, since they are two buffers; the stream
        // keeps the order.
        let copied = bound.and_then(|()| unsafe { result::memcpy_dtod_async(self.at(to), from.address, bytes, self.stream.cu_stream()) });
        copied.map_err(|error| cuda("copying a rank's own block", error))
    }

    fn clear(&mut self, length: usize) -> Result<()> {
        assert!(length <= self.length, "cannot clear {length} elements of a buffer of {}", self.length);
        let bytes = length * size_of::<T>();
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the memory has that many bytes.
        self.on_stream("clearing a buffer", || unsafe { result::memset_d8_async(self.address, 0, bytes, self.stream.cu_stream()) })
    }

    fn write(&mut self, run: Run, values: &[T]) -> Result<()> {
        if run.length == 0 {
            return Ok(());
        }
        assert!(run.start + run.length <= self.length, "{run:?} must lie in a buffer of {} elements", self.length);
        self.repeat(self.at(run.start), &bytes_of(values), run.length * size_of::<T>())
    }

    fn compare(&self, run: Run, values: &[T], mut wrong: impl FnMut(usize, String, T)) -> Result<()> {
        if run.length == 0 {
            return Ok(());
        }
        assert!(run.start + run.length <= self.length, "{run:?} must lie in a buffer of {} elements", self.length);
        let right = bytes_of(values);
        // Most results are correct; only wrong ones are copied and compared here.
        if self.count_wrong(&run, &right)? == 0 {
            return Ok(());
        }
        let mut found = vec![0_u8; right.len()];
        for start in (0..run.length).step_by(values.len()) {
            let count = values.len().min(run.length - start);
            let found = &mut found[..count * size_of::<T>()];
            // SAFETY: the range lies in this memory (checked), and the stream is waited for before the bytes are read.
            self.on_stream("copying results from the device", || unsafe {
                result::memcpy_dtoh_async(found, self.at(run.start + start), self.stream.cu_stream())
            })?;
            if *found != right[..found.len()] {
                let pairs = found.chunks_exact(size_of::<T>()).zip(right.chunks_exact(size_of::<T>())).enumerate();
                for (offset, (found, _)) in pairs.filter(|(_, (found, right))| found != right) {
                    let digits: String = found.iter().rev().map(|byte| format!("{byte:02x}")).collect();
                    wrong(run.start + start + offset, format!("0x{digits}"), values[offset]);
                }
            }
        }
        Ok(())
    }
}

/// Converts an error of the driver; `doing` is the failed operation.
fn cuda(doing: impl Into<String>, error: DriverError) -> Error {
    Error::Cuda { doing: doing.into(), code: error.0 as u32, text: error.to_string() }
}

#[cfg(all(test, simgpu))]
mod tests {
    use clap::Parser;
    use collectives::DeviceChoice;

    use super::*;
    use crate::arguments::Arguments;
    use crate::layout::Origin;

    #[test]
    fn what_differs_is_told() {
        if std::env::var("COLLECTIVES_TEST_GPU").as_deref() != Ok("real") {
            simgpu::install();
        }
        let comm = Communicator::builder().require_device(DeviceChoice::Local).local(1).unwrap().remove(0);
        let settings =
            Settings::new(&Arguments::parse_from(["collperf", "all_reduce", "-e", "1M"]), &crate::environment::Environment::default())
                .unwrap();
        let device = comm.device().unwrap();
        let backend = OnDevice::new(&comm, &device, device.stream(), &settings).unwrap();
        let [mut buffer, _] = backend.buffers::<u16>(200_000, 3).unwrap();
        let origin = Origin::Folded { start: 0 };
        let runs = [Run { start: 1, length: 150_000, origin }, Run { start: 150_010, length: 9, origin }];
        // Fewer values than elements, and as many.
        let values: [Vec<u16>; 2] = [(0..OnDevice::PERIOD).map(|offset| offset as u16).collect(), (100..109).collect()];
        let told = |buffer: &Elements<'_, u16>| {
            let mut told = vec![];
            for (run, values) in runs.iter().zip(&values) {
                buffer.compare(*run, values, |index, found, right| told.push((index, found, right))).unwrap();
            }
            told
        };
        buffer.clear(200_000).unwrap();
        assert_eq!(told(&buffer).len(), 150_000 - 3 + 9, "zeros are right where the pattern begins");
        for (run, values) in runs.iter().zip(&values) {
            buffer.write(*run, values).unwrap();
        }
        assert_eq!(told(&buffer), []);
        for index in [2, 140_000, 150_005, 150_012] {
            buffer.repeat(buffer.at(index), &[0xee, 0xff], 2).unwrap();
        }
        let right = |index: usize| ((index - 1) % OnDevice::PERIOD) as u16;
        let expected = [(2, right(2)), (140_000, right(140_000)), (150_012, 102)];
        assert_eq!(told(&buffer), expected.map(|(index, right)| (index, "0xffee".to_owned(), right)));
        backend.close().unwrap();
    }
}
