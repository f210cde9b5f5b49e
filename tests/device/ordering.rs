//! Streams: calls wait for what their buffers wait for, and later work waits for the calls.

use std::panic::{AssertUnwindSafe, catch_unwind};

use collectives::interop::{Memory as Place, RawDeviceSlice};
use collectives::{Buffer, ReduceOp};
use cudarc::driver::{DevicePtr, DevicePtrMut, result};

use super::gpu::{assert_nothing_found, ranks};
use crate::common::cases::Memory;

#[test]
fn calls_on_foreign_streams_are_ordered_by_their_buffers() {
    ranks(3, |comm, memory| {
        let (first, second) = (memory.stream.context().new_stream().unwrap(), memory.stream.context().new_stream().unwrap());
        let mut buffer = memory.put(&vec![comm.rank() as u32 + 1; 1000]);
        comm.with_stream(&first).all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        comm.with_stream(&second).all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        comm.all_reduce(&mut buffer, ReduceOp::BitOr).unwrap();
        assert_eq!(memory.get(&buffer), vec![18; 1000]);
    });
}

#[test]
fn views_and_raw_addresses_are_buffers() {
    ranks(2, |comm, memory| {
        let me = comm.rank() as i32;
        let mut buffer = memory.put(&(0..100).map(|index| index + me).collect::<Vec<i32>>());
        comm.all_reduce(&mut buffer.slice_mut(10..20), ReduceOp::Max).unwrap();
        comm.broadcast(&mut buffer.slice_mut(50..), 1).unwrap();
        let expected: Vec<i32> =
            (0..100).map(|index| if (10..20).contains(&index) || index >= 50 { index + 1 } else { index + me }).collect();
        assert_eq!(memory.get(&buffer), expected);

        memory.stream.synchronize().unwrap();
        let (address, guard) = buffer.device_ptr(&memory.stream);
        drop(guard);
        #[expect(unsafe_code, reason = "an address of our own buffer, used on one stream")]
        // SAFETY: a hundred elements, which nothing else uses until the synchronisation below.
        let mut raw = unsafe { RawDeviceSlice::<i32>::new(memory.stream.context(), address, buffer.len()) };
        comm.with_stream(&memory.stream).all_reduce(&mut raw, ReduceOp::Min).unwrap();
        memory.stream.synchronize().unwrap();
        let expected: Vec<i32> = (0..100).map(|index| if (10..20).contains(&index) || index >= 50 { index + 1 } else { index }).collect();
        assert_eq!(memory.get(&buffer), expected);
    });
}

#[test]
fn a_buffer_may_be_dropped_as_soon_as_the_call_returns() {
    ranks(2, |comm, memory| {
        for round in 0..20_u64 {
            let source = memory.put(&vec![round + comm.rank() as u64; 5000]);
            let mut destination = memory.put(&vec![0_u64; 5000]);
            comm.all_reduce_into(&source, &mut destination, ReduceOp::Sum).unwrap();
            drop(source);
            let mut bits = memory.put(&vec![round; 5000]);
            comm.all_reduce(&mut bits, ReduceOp::BitXor).unwrap();
            drop(bits);
            assert_eq!(memory.get(&destination), vec![2 * round + 1; 5000]);
        }
    });
    assert_nothing_found();
}

#[test]
fn a_read_that_a_program_has_queued_is_waited_for_though_it_panics_then() {
    ranks(1, |_, memory| {
        let [first, second] = [(); 2].map(|()| memory.stream.context().new_stream().unwrap());
        let (source, mut copy) = (memory.put(&[7_u64; 1000]), memory.put(&[0_u64; 1000]));
        let Place::Device(place) = source.memory() else { panic!("a buffer of the device") };
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let (to, _guard) = copy.device_ptr_mut(&first);
            place.read_on(&first, "a test", |from| -> collectives::Result<()> {
                #[expect(unsafe_code, reason = "a copy between buffers of our own")]
                // SAFETY: both buffers have that many bytes, and are used here on this stream only.
                unsafe { result::memcpy_dtod_async(to, from, 8000, first.cu_stream()) }.unwrap();
                panic!("after the copy was queued");
            })
        }));
        assert!(panicked.is_err());
        // A cudarc slice remembers only its last reader, here this one.
        let other = second.clone_dtod(&source).unwrap();
        drop(source);
        assert_eq!((memory.get(&copy), memory.get(&other)), (vec![7; 1000], vec![7; 1000]));
    });
}
