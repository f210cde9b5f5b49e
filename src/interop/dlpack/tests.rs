//! Tensors from handmade structures, as a C library would make them, and every way in which these can be malformed.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::call::buffer::Buffer;
use crate::call::element::{DType, Element, F8E4M3, F8E5M2, TypeTag};
use crate::call::op::ReduceOp;
use crate::error::Error;
use half::{bf16, f16};

/// A tensor as its library keeps it, with the number of deleter calls.
struct Producer {
    deleted: Arc<AtomicUsize>,
    data: Vec<u64>,
    shape: Vec<i64>,
    strides: Option<Vec<i64>>,
    /// The fields from here on are what a test changes about an otherwise correct tensor.
    dtype: DLDataType,
    device: DLDevice,
    byte_offset: u64,
    flags: u64,
    version: DLPackVersion,
}

const F32: DLDataType = DLDataType { code: 2, bits: 32, lanes: 1 };

impl Producer {
    /// Makes 24 zeros of 4 bytes, or as many bytes of another type.
    fn new(shape: &[i64]) -> Self {
        Self {
            deleted: Arc::default(),
            data: vec![0; 12],
            shape: shape.to_vec(),
            strides: None,
            dtype: F32,
            device: DLDevice { device_type: 1, device_id: 0 },
            byte_offset: 0,
            flags: 0,
            version: DLPackVersion { major: 1, minor: 0 },
        }
    }

    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    fn tensor(&mut self) -> DLTensor {
        DLTensor {
            data: self.data.as_mut_ptr().cast(),
            device: self.device,
            ndim: self.shape.len() as i32,
            dtype: self.dtype,
            shape: self.shape.as_mut_ptr(),
            strides: self.strides.as_mut().map_or(null_mut(), |strides| strides.as_mut_ptr()),
            byte_offset: self.byte_offset,
        }
    }

    /// Returns the tensor as its library would pass it, and the count of its deletions.
    fn versioned(mut self) -> (*mut DLManagedTensorVersioned, Arc<AtomicUsize>) {
        unsafe extern "C" fn delete(this: *mut DLManagedTensorVersioned) {
            // SAFETY: both were boxed below, and a deleter is called once; a second call would be found by the count,
            // or by the allocator.
            let (producer, managed) = unsafe { (Box::from_raw((*this).manager_ctx.cast::<Producer>()), Box::from_raw(this)) };
            producer.deleted.fetch_add(1, Ordering::SeqCst);
            drop(managed);
        }
        let deleted = Arc::clone(&self.deleted);
        let (version, flags, dl_tensor) = (self.version, self.flags, self.tensor());
        let manager_ctx: *mut c_void = Box::into_raw(Box::new(self)).cast();
        let managed = DLManagedTensorVersioned { version, manager_ctx, deleter: Some(delete), flags, dl_tensor };
        (Box::into_raw(Box::new(managed)), deleted)
    }

    fn legacy(mut self) -> (*mut DLManagedTensor, Arc<AtomicUsize>) {
        unsafe extern "C" fn delete(this: *mut DLManagedTensor) {
            // SAFETY: both were boxed below, and a deleter is called once; a second call would be found by the count,
            // or by the allocator.
            let (producer, managed) = unsafe { (Box::from_raw((*this).manager_ctx.cast::<Producer>()), Box::from_raw(this)) };
            producer.deleted.fetch_add(1, Ordering::SeqCst);
            drop(managed);
        }
        let deleted = Arc::clone(&self.deleted);
        let dl_tensor = self.tensor();
        let manager_ctx: *mut c_void = Box::into_raw(Box::new(self)).cast();
        (Box::into_raw(Box::new(DLManagedTensor { dl_tensor, manager_ctx, deleter: Some(delete) })), deleted)
    }
}

/// Imports a tensor of DLPack 1.x.
fn take(producer: Producer) -> (crate::error::Result<Tensor>, *mut DLManagedTensorVersioned, Arc<AtomicUsize>) {
    let (managed, deleted) = producer.versioned();
    // SAFETY: made by hand above, and used by no other code.
    (unsafe { Tensor::from_versioned(managed) }, managed, deleted)
}

fn delete(managed: *mut DLManagedTensorVersioned) {
    // SAFETY: the tensor was refused, so it is still ours.
    unsafe { (*managed).deleter.unwrap()(managed) };
}

#[track_caller]
fn refuses(producer: Producer, words: &str) {
    let (refused, managed, deleted) = take(producer);
    let error = refused.unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains(words), "{error}");
    assert_eq!(deleted.load(Ordering::SeqCst), 0, "a refused tensor stays its library's");
    delete(managed);
}

#[test]
fn a_tensor_is_read_written_and_given_back_once() {
    let (tensor, managed, deleted) = take(Producer::new(&[2, 3, 4]).with(|p| p.data[0] = u64::from(1.5f32.to_bits())));
    let mut tensor = tensor.unwrap();
    assert_eq!((tensor.dtype(), tensor.shape(), tensor.elements(), tensor.is_read_only()), (DType::F32, &[2, 3, 4][..], 24, false));
    assert_eq!(tensor.as_slice::<f32>().unwrap()[..2], [1.5, 0.0]);
    tensor.as_mut_slice::<f32>().unwrap()[23] = -2.0;
    // SAFETY: it is lent to us, and alive.
    let theirs = unsafe { std::slice::from_raw_parts((*managed).dl_tensor.data.cast::<f32>(), 24) };
    assert_eq!(theirs[23], -2.0);
    assert_eq!(deleted.load(Ordering::SeqCst), 0);
    drop(tensor);
    assert_eq!(deleted.load(Ordering::SeqCst), 1);

    let (managed, deleted) = Producer::new(&[24]).legacy();
    // SAFETY: made by hand, and used by no other code.
    let mut tensor = unsafe { Tensor::from_legacy(managed) }.unwrap();
    tensor.as_mut_slice::<f32>().unwrap().fill(1.0);
    std::thread::spawn(move || drop(tensor)).join().unwrap();
    assert_eq!(deleted.load(Ordering::SeqCst), 1);
}

#[test]
fn tensors_without_a_deleter_are_left_alone() {
    let (mut data, mut shape) = ([7i32], [1_i64]);
    let dtype = DLDataType { code: 0, bits: 32, lanes: 1 };
    let device = DLDevice { device_type: 3, device_id: 0 };
    let dl_tensor =
        DLTensor { data: data.as_mut_ptr().cast(), device, ndim: 1, dtype, shape: shape.as_mut_ptr(), strides: null_mut(), byte_offset: 0 };
    let mut managed = DLManagedTensor { dl_tensor, manager_ctx: null_mut(), deleter: None };
    // SAFETY: all of it lives longer than the tensor.
    let tensor = unsafe { Tensor::from_legacy(&raw mut managed) }.unwrap();
    assert_eq!(tensor.as_slice::<i32>().unwrap(), [7]);
}

#[test]
fn every_element_type_goes_out_and_comes_back() {
    fn round_trip<T: Element>(value: T, code: u8) {
        let handed_over = export(vec![value; 6], &[3, 2]).unwrap();
        // SAFETY: just exported.
        let dtype = unsafe { (*handed_over).dl_tensor.dtype };
        assert_eq!(dtype, DLDataType { code, bits: 8 * size_of::<T>() as u8, lanes: 1 });
        // SAFETY: just exported, and used by no other code.
        let tensor = unsafe { Tensor::from_versioned(handed_over) }.unwrap();
        assert_eq!((tensor.dtype(), tensor.as_slice::<T>().unwrap()), (T::ELEMENT_TYPE, &[value; 6][..]));
        let other = if T::ELEMENT_TYPE == DType::U8 { tensor.as_slice::<i8>().map(|_| ()) } else { tensor.as_slice::<u8>().map(|_| ()) };
        assert!(other.unwrap_err().to_string().contains("was requested"));
    }
    round_trip(1.5f32, 2);
    round_trip(1.5f64, 2);
    round_trip(f16::from_f32(1.5), 2);
    round_trip(bf16::from_f32(1.5), 4);
    round_trip(F8E4M3::from_f32(1.5), 10);
    round_trip(F8E5M2::from_f32(1.5), 12);
    round_trip(-3i8, 0);
    round_trip(-3i16, 0);
    round_trip(-3i32, 0);
    round_trip(-3i64, 0);
    round_trip(3u8, 1);
    round_trip(3u16, 1);
    round_trip(3u32, 1);
    round_trip(3u64, 1);
    round_trip(true, 6);
}

#[test]
fn exported_buffers_are_dropped_by_the_deleter_and_say_their_layout() {
    let handed_over = export_legacy([[1u16, 2], [3, 4]].concat(), &[2, 1, 2]).unwrap();
    // SAFETY: just exported.
    let tensor = unsafe { &(*handed_over).dl_tensor };
    // SAFETY: arrays of three.
    let (shape, strides) = unsafe { (std::slice::from_raw_parts(tensor.shape, 3), std::slice::from_raw_parts(tensor.strides, 3)) };
    assert_eq!((shape, strides, tensor.device.device_type), (&[2, 1, 2][..], &[2, 2, 1][..], 1));
    // SAFETY: just exported, and used by no other code.
    let taken = unsafe { Tensor::from_legacy(handed_over) }.unwrap();
    assert_eq!(taken.as_slice::<u16>().unwrap(), [1, 2, 3, 4]);

    // An array is stored inside the keeper; a scalar has no dimensions; an empty buffer has no address.
    // SAFETY: just exported.
    let array = unsafe { Tensor::from_versioned(export([1.0f64, 2.0], &[2]).unwrap()) }.unwrap();
    assert_eq!(array.as_slice::<f64>().unwrap(), [1.0, 2.0]);
    // SAFETY: just exported, and used by no other code.
    let scalar = unsafe { Tensor::from_versioned(export(5i64, &[]).unwrap()) }.unwrap();
    assert_eq!((scalar.shape().len(), scalar.as_slice::<i64>().unwrap()), (0, &[5][..]));
    let nothing = export(Vec::<f32>::new(), &[3, 0]).unwrap();
    // SAFETY: just exported, and not taken yet.
    assert!(unsafe { (*nothing).dl_tensor.data }.is_null());
    // SAFETY: just exported, and used by no other code.
    assert!(unsafe { Tensor::from_versioned(nothing) }.unwrap().as_slice::<f32>().unwrap().is_empty());

    let error = export(vec![0u8; 5], &[2, 3]).unwrap_err().to_string();
    assert!(error.contains("[2, 3]") && error.contains("5 elements"), "{error}");
    assert!(export(Vec::<u8>::new(), &[usize::MAX, 2]).is_err());
}

#[test]
fn strides_must_be_those_of_rows_and_are_free_where_nothing_moves() {
    let strided = |shape: &[i64], strides: &[i64]| Producer::new(shape).with(|p| p.strides = Some(strides.to_vec()));
    for (shape, strides) in
        [(&[2, 3, 4][..], &[12, 4, 1][..]), (&[2, 1, 4], &[4, 77, 1]), (&[1, 1], &[-5, 9]), (&[0, 5], &[1, 1]), (&[], &[])]
    {
        let (tensor, ..) = take(strided(shape, strides));
        assert_eq!(tensor.unwrap().elements() as i64, shape.iter().product::<i64>());
    }
    for (shape, strides) in [(&[3, 4][..], &[1, 3][..]), (&[3, 4], &[8, 1]), (&[4], &[2]), (&[4], &[-1]), (&[3, 4], &[0, 1]), (&[2], &[0])]
    {
        refuses(strided(shape, strides), "row-major order");
    }
}

#[test]
fn malformed_tensors_are_refused_in_words() {
    let base = || Producer::new(&[24]);
    // SAFETY: null is refused without being read.
    let nulls = unsafe { (Tensor::from_versioned(null_mut()).unwrap_err(), Tensor::from_legacy(null_mut()).unwrap_err()) };
    assert!(nulls.0.to_string().contains("null") && nulls.1.to_string().contains("null"));
    refuses(base().with(|p| p.version.major = 2), "DLPack 2.0");
    refuses(base().with(|p| p.version.major = 0), "DLPack 0.0");
    refuses(base().with(|p| p.dtype.lanes = 4), "4 lanes");
    refuses(base().with(|p| p.dtype.lanes = 0), "0 lanes");
    refuses(base().with(|p| p.dtype.bits = 24), "24 bits");
    refuses(base().with(|p| p.dtype = DLDataType { code: 5, bits: 64, lanes: 1 }), "code 5");
    refuses(base().with(|p| p.dtype = DLDataType { code: 17, bits: 4, lanes: 1 }), "4 bits");
    refuses(base().with(|p| p.dtype = DLDataType { code: 8, bits: 8, lanes: 1 }), "code 8");
    refuses(base().with(|p| p.device.device_type = 10), "type 10");
    refuses(base().with(|p| p.device = DLDevice { device_type: 2, device_id: -1 }), "device -1");
    refuses(base().with(|p| p.shape = vec![-1]), "negative");
    refuses(base().with(|p| p.shape = vec![3, i64::MIN]), "negative");
    refuses(base().with(|p| p.shape = vec![i64::MAX, i64::MAX]), "address space");
    refuses(base().with(|p| p.shape = vec![i64::MAX / 4 + 1]), "address space");
    refuses(base().with(|p| p.shape = vec![1; 2000]), "2000 dimensions");
    refuses(base().with(|p| p.byte_offset = u64::MAX), "outside the address space");
    refuses(base().with(|p| p.byte_offset = 2), "aligned");
    for (ndim, words) in [(-1, "-1 dimensions"), (1, "no shape")] {
        let (managed, _) = base().versioned();
        // SAFETY: made by hand.
        unsafe { ((*managed).dl_tensor.ndim, (*managed).dl_tensor.shape) = (ndim, null_mut()) };
        // SAFETY: made by hand, and used by no other code; no field that it reads is a dangling pointer.
        let error = unsafe { Tensor::from_versioned(managed) }.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        delete(managed);
    }
    let (managed, _) = base().versioned();
    // SAFETY: made by hand.
    unsafe { (*managed).dl_tensor.data = null_mut() };
    // SAFETY: made by hand, and used by no other code; a null pointer is refused without being read.
    assert!(unsafe { Tensor::from_versioned(managed) }.unwrap_err().to_string().contains("no data"));
    delete(managed);
}

#[test]
fn a_tensor_is_a_buffer_whatever_its_type() {
    let comm = crate::communicator::Communicator::local(1).unwrap().remove(0);
    for dtype in DType::ALL {
        let make =
            || take(Producer::new(&[2, 2]).with(|p| (p.dtype, p.data[0], p.byte_offset) = (dtype.into(), 1 << 56 | 1, 0))).0.unwrap();
        let (mut tensor, source) = (make(), make());
        assert_eq!(
            (tensor.as_buffer().unwrap().memory().len(), tensor.as_buffer().unwrap().memory().element()),
            (4, TypeTag::Scalar(dtype))
        );
        comm.all_reduce(&mut tensor.as_buffer_mut().unwrap(), ReduceOp::Max).unwrap();
        comm.broadcast_into(Some(&source.as_buffer().unwrap()), &mut tensor.as_buffer_mut().unwrap(), 0).unwrap();
        let owned = comm.start_all_reduce(tensor.into_buffer().unwrap(), ReduceOp::Min).unwrap().wait().unwrap().into_inner();
        assert_eq!((owned.dtype(), owned.shape()), (dtype, &[2, 2][..]));
    }
    // Each is returned to its library once, even those that calls owned or shared.
    let (tensor, _, deleted) = take(Producer::new(&[24]));
    let source = tensor.unwrap().into_source().unwrap();
    let works = [1, 2].map(|tag| comm.start_send(source.clone(), crate::communicator::Envelope::rank(0).tag(tag)).unwrap());
    let mut received = [1.0_f32; 24];
    for tag in [1, 2] {
        assert_eq!(comm.recv(&mut received, crate::communicator::Envelope::rank(0).tag(tag)).unwrap().count, 24);
    }
    drop(source);
    assert_eq!((received, deleted.load(Ordering::SeqCst)), ([0.0; 24], 0));
    works.into_iter().for_each(|work| drop(work.wait().unwrap()));
    assert_eq!(deleted.load(Ordering::SeqCst), 1);
}

#[test]
fn what_cannot_be_lent_as_a_buffer_says_why() {
    let read_only = || take(Producer::new(&[24]).with(|p| p.flags = DLPACK_FLAG_READ_ONLY)).0.unwrap();
    assert!(read_only().as_buffer().is_ok() && read_only().into_source().is_ok());
    for error in [read_only().as_buffer_mut().map(|_| ()).unwrap_err(), read_only().into_buffer().map(|_| ()).unwrap_err()] {
        assert!(error.to_string().contains("forbids writing"), "{error}");
    }
    let elsewhere = || take(Producer::new(&[24]).with(|p| p.device = DLDevice { device_type: 2, device_id: 0 })).0.unwrap();
    for error in [elsewhere().as_buffer().map(|_| ()).unwrap_err(), elsewhere().into_buffer().map(|_| ()).unwrap_err()] {
        assert!(error.to_string().contains("order_by"), "{error}");
    }
    let nothing = take(Producer::new(&[3, 0])).0.unwrap();
    assert_eq!(nothing.as_buffer().unwrap().memory().len(), 0);
}

#[test]
fn what_may_not_be_written_or_reached_is_said() {
    let (tensor, ..) = take(Producer::new(&[24]).with(|p| p.flags = DLPACK_FLAG_READ_ONLY | DLPACK_FLAG_IS_COPIED));
    let mut tensor = tensor.unwrap();
    assert!(tensor.is_read_only() && tensor.as_slice::<f32>().is_ok());
    assert!(tensor.as_mut_slice::<f32>().unwrap_err().to_string().contains("forbids writing"));
    let (tensor, ..) = take(Producer::new(&[24]).with(|p| p.device = DLDevice { device_type: 2, device_id: 1 }));
    assert!(tensor.unwrap().as_slice::<f32>().unwrap_err().to_string().contains("device 1"));
    let (tensor, ..) = take(Producer::new(&[5]).with(|p| {
        p.dtype = DLDataType { code: 6, bits: 8, lanes: 1 };
        p.data[0] = u64::from_le_bytes([0, 1, 1, 2, 0, 0, 0, 0]);
    }));
    assert!(tensor.unwrap().as_slice::<bool>().unwrap_err().to_string().contains("truth value at index 3"));
    let (tensor, ..) = take(Producer::new(&[3]).with(|p| {
        p.data[0] = u64::from(7u32) << 32;
        p.byte_offset = 4;
    }));
    assert_eq!(tensor.unwrap().as_slice::<f32>().unwrap()[0].to_bits(), 7);
}
