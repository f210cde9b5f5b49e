//! Memory and streams of other crates on the device backend. The simulation finds any two uses of memory that nothing
//! orders.

#![expect(unsafe_code, reason = "the tests play the part of another crate, with addresses and handles of their own")]

mod contexts;

use std::ffi::c_void;
use std::sync::Arc;

use collectives::{
    Communicator, Error, ReduceOp,
    interop::{AsDevicePtr, AsDevicePtrMut, AsStream, ForeignBuffer, RawStream, dlpack},
};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};

use crate::common::cases::Memory;
use crate::gpu::{DeviceMemory, assert_nothing_found, ranks};

/// Another crate's tensor. Everything that happens to it is queued on one stream.
struct Theirs {
    slice: CudaSlice<i32>,
    stream: Arc<CudaStream>,
}

// SAFETY: `len` integers, allocated and initialised on `stream`. All other work of the tests on them is queued there
// too.
unsafe impl AsDevicePtr for Theirs {
    type Element = i32;

    fn device_ptr(&self) -> u64 {
        self.slice.device_ptr(&self.stream).0
    }

    fn elements(&self) -> usize {
        self.slice.len()
    }

    fn device(&self) -> usize {
        self.stream.device()
    }

    fn raw_stream(&self) -> *mut c_void {
        self.stream.as_raw_stream()
    }
}

// SAFETY: nothing else uses it while it is borrowed.
unsafe impl AsDevicePtrMut for Theirs {}

impl Theirs {
    /// Creates a tensor on its crate's own stream, without cudarc events that could hide a missing order.
    fn new(memory: &DeviceMemory, len: usize) -> Self {
        // SAFETY: the tests order their work only by streams, which is what they test.
        unsafe { memory.stream.context().disable_event_tracking() };
        let stream = memory.stream.context().new_stream().unwrap();
        Self { slice: stream.alloc_zeros(len).unwrap(), stream }
    }

    fn write(&mut self, elements: &[i32]) {
        self.stream.memcpy_htod(elements, &mut self.slice).unwrap();
    }

    fn read(&self) -> Vec<i32> {
        let elements = self.stream.clone_dtoh(&self.slice).unwrap();
        self.stream.synchronize().unwrap();
        elements
    }
}

fn context(comm: &Communicator) -> Arc<cudarc::driver::CudaContext> {
    Arc::clone(comm.device().unwrap().context())
}

#[test]
fn memory_of_another_crate_is_used_in_the_order_of_its_stream() {
    ranks(2, |comm, memory| {
        let mut theirs = Theirs::new(memory, 5000);
        for round in 0..5 {
            theirs.write(&vec![round + comm.rank() as i32; 5000]);
            comm.all_reduce(&mut ForeignBuffer::new(&context(comm), &mut theirs).unwrap(), ReduceOp::Sum).unwrap();
            assert_eq!(theirs.read(), vec![2 * round + 1; 5000]);
        }
        // One call reads it and the next writes it, on the communicator's stream and on the tensor's.
        let mut sums = Theirs::new(memory, 5000);
        let source = ForeignBuffer::new(&context(comm), &theirs).unwrap();
        comm.all_reduce_into(&source, &mut ForeignBuffer::new(&context(comm), &mut sums).unwrap(), ReduceOp::Max).unwrap();
        theirs.write(&vec![7; 5000]);
        let stream = Arc::clone(&theirs.stream);
        comm.with_stream(&stream).broadcast(&mut ForeignBuffer::new(&context(comm), &mut theirs).unwrap(), 1).unwrap();
        assert_eq!((sums.read(), theirs.read()), (vec![9; 5000], vec![7; 5000]));
    });
    assert_nothing_found();
}

#[test]
fn a_started_call_owns_memory_of_another_crate() {
    ranks(3, |comm, memory| {
        let mut theirs = Theirs::new(memory, 700);
        theirs.write(&vec![1 << comm.rank(); 700]);
        let work = comm.start_all_reduce(ForeignBuffer::new(&context(comm), theirs).unwrap(), ReduceOp::BitOr).unwrap();
        assert_eq!(work.wait().unwrap().into_inner().read(), vec![7; 700]);
    });
    assert_nothing_found();
}

#[test]
fn calls_are_made_in_the_order_of_a_raw_stream() {
    ranks(2, |comm, memory| {
        let mut theirs = Theirs::new(memory, 900);
        theirs.write(&vec![3; 900]);
        // SAFETY: it lives as long as `theirs`.
        let raw = unsafe { RawStream::new(theirs.stream.as_raw_stream(), theirs.stream.device()) };
        let address = theirs.device_ptr();
        comm.in_order_of(&raw, |comm| {
            // SAFETY: ordered by the stream, as long as `theirs` lives.
            let mut unordered = unsafe { collectives::interop::RawDeviceSlice::<i32>::new(&context(comm), address, 900) };
            comm.all_reduce(&mut unordered, ReduceOp::Prod)
        })
        .unwrap();
        assert_eq!(theirs.read(), vec![9; 900]);
        // SAFETY: it is refused, so it is never used.
        let elsewhere = unsafe { RawStream::new(theirs.stream.as_raw_stream(), 99) };
        let error = comm.in_order_of(&elsewhere, |_| Ok(())).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains("device 99"), "{error}");
        let failed = comm.in_order_of(&raw, |comm| comm.broadcast(&mut [0u8; 4], 9)).unwrap_err();
        assert!(failed.to_string().contains("root 9"), "{failed}");
    });
    assert_nothing_found();
}

#[test]
fn memory_that_cannot_be_there_is_refused() {
    struct At(u64, usize, usize);
    // SAFETY: it is refused, so it is never used.
    unsafe impl AsDevicePtr for At {
        type Element = f64;

        fn device_ptr(&self) -> u64 {
            self.0
        }

        fn elements(&self) -> usize {
            self.1
        }

        fn device(&self) -> usize {
            self.2
        }

        fn raw_stream(&self) -> *mut c_void {
            std::ptr::null_mut()
        }
    }
    ranks(1, |comm, _| {
        let device = comm.device().unwrap().ordinal();
        for (memory, words) in [
            (At(4096, 8, device + 5), "device"),
            (At(0, 8, device), "0x0"),
            (At(4100, 8, device), "0x1004"),
            (At(8, usize::MAX, device), "0x8"),
        ] {
            let error = ForeignBuffer::new(&context(comm), memory).map(|_| ()).unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
        assert!(ForeignBuffer::new(&context(comm), At(0, 0, device)).is_ok());
    });
}

#[test]
fn device_tensors_are_buffers_whatever_their_type() {
    ranks(2, |comm, memory| {
        let consumer = memory.stream.context().new_stream().unwrap();
        let device = comm.device().unwrap();
        let tensor = |values: &[i16]| {
            let handed_over = dlpack::export_on(memory.put(values), &[values.len()], &consumer).unwrap();
            // SAFETY: it was just exported and has no other owner.
            unsafe { dlpack::Tensor::from_versioned(handed_over) }.unwrap()
        };
        let mut sum = tensor(&[comm.rank() as i16 + 1; 700]);
        let error = sum.as_buffer_mut().map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains("order_by"), "{error}");
        // SAFETY: exported for that stream, which outlives it, and freed in its order.
        unsafe { sum.order_by(device.context(), &consumer) }.unwrap();
        comm.all_reduce(&mut sum.as_buffer_mut().unwrap(), ReduceOp::Sum).unwrap();
        // Into memory that the program knows only as bytes, with a typed view beside it.
        let mut copy = collectives::TypedBytes::new(collectives::DType::I16, memory.put(&[0_u8; 1400])).unwrap();
        comm.all_reduce_into(&sum.as_buffer().unwrap(), &mut copy, ReduceOp::Max).unwrap();
        let bytes = memory.get(copy.bytes());
        assert!(bytes.chunks(2).all(|element| element == 3_i16.to_ne_bytes()));
        // Started calls: as an owned buffer, and as a source that several calls share.
        let work = comm.start_all_reduce(sum.into_buffer().unwrap(), ReduceOp::Prod).unwrap();
        let nine = work.wait().unwrap().into_inner().into_source().unwrap();
        let peer = 1 - comm.rank();
        let received = memory.put(&[0_i16; 700]);
        if comm.rank() == 0 {
            comm.start_send(nine.clone(), peer).unwrap().wait().unwrap();
        } else {
            let (received, _) = comm.start_recv(received, peer).unwrap().wait().unwrap();
            assert_eq!(memory.get(&received), [9; 700]);
        }
        drop(nine);
    });
    assert_nothing_found();
}

#[test]
fn device_tensors_go_out_and_come_back_through_dlpack() {
    ranks(2, |comm, memory| {
        let consumer = memory.stream.context().new_stream().unwrap();
        let buffer = memory.put(&vec![comm.rank() as f32 + 1.0; 600]);
        let handed_over = dlpack::export_on(buffer, &[20, 30], &consumer).unwrap();
        // SAFETY: it was just exported and has no other owner.
        let mut tensor = unsafe { dlpack::Tensor::from_versioned(handed_over) }.unwrap();
        assert_eq!((tensor.shape(), tensor.device().device_type), (&[20, 30][..], dlpack::K_DL_CUDA));
        assert!(tensor.as_slice::<f32>().unwrap_err().to_string().contains("host memory"));
        // SAFETY: exported for that stream, and freed in its order.
        let error = unsafe { tensor.on_device_mut::<i32, _>(&consumer) }.unwrap_err();
        assert!(error.to_string().contains("i32 was requested"), "{error}");
        // SAFETY: as above.
        let sum = unsafe { tensor.on_device_mut::<f32, _>(&consumer) }.unwrap();
        comm.all_reduce(&mut ForeignBuffer::new(&context(comm), sum).unwrap(), ReduceOp::Sum).unwrap();
        let mut copy = memory.put(&vec![0.0f32; 600]);
        // SAFETY: as above.
        let source = unsafe { tensor.on_device::<f32, _>(&consumer) }.unwrap();
        comm.all_reduce_into(&ForeignBuffer::new(&context(comm), source).unwrap(), &mut copy, ReduceOp::Max).unwrap();
        drop(tensor);
        assert_eq!(memory.get(&copy), vec![3.0; 600]);

        let legacy = dlpack::export_legacy_on(copy, &[600], &consumer).unwrap();
        // SAFETY: it was just exported and has no other owner.
        drop(unsafe { dlpack::Tensor::from_legacy(legacy) }.unwrap());
        let error = dlpack::export_on(vec![1u8], &[1], &consumer).unwrap_err();
        assert!(error.to_string().contains("host memory"), "{error}");
        let error = dlpack::export(memory.put(&[1u8]), &[1]).unwrap_err();
        assert!(error.to_string().contains("export_on"), "{error}");
        // If the deleter ran on another stream, nothing would order the end of the memory.
        let own = memory.stream.context().per_thread_stream();
        let error = dlpack::export_on(memory.put(&[1u8]), &[1], &own).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains("per-thread"), "{error}");
    });
    assert_nothing_found();
}
