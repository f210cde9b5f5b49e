//! Device buffers whose element type is known at run time.

#![expect(unsafe_code, reason = "addresses where no element can lie")]

use collectives::{
    CustomOp, DType, ReduceOp, Reduction, TypedBytes,
    interop::{AnyElement, RawDeviceSlice},
};
use cudarc::driver::CudaSlice;

use super::gpu::{DeviceMemory, ranks};
use crate::common::cases::{Memory, everything_in};
use crate::common::forms::every_form;
use crate::common::oracle::Predict;
use crate::common::typed::{bytes_of, elements_of, from_numbers, to_numbers};

const SEED: u64 = 0x9e7e;

/// Device memory as bytes.
struct Bytes<'a>(&'a DeviceMemory);

impl Bytes<'_> {
    fn bytes(&self, dtype: DType, bytes: &[u8]) -> TypedBytes<CudaSlice<u8>> {
        TypedBytes::new(dtype, self.0.put(bytes)).unwrap()
    }

    fn read(&self, buffer: &TypedBytes<CudaSlice<u8>>) -> Vec<u8> {
        self.0.get(buffer.bytes())
    }
}

impl Memory for Bytes<'_> {
    type Element<T: Predict> = AnyElement;
    type Buffer<T: Predict> = TypedBytes<CudaSlice<u8>>;

    fn reduction<T: Predict>(&self, op: ReduceOp) -> Reduction<AnyElement> {
        op.into()
    }

    fn put<T: Predict>(&self, elements: &[T]) -> Self::Buffer<T> {
        self.bytes(T::ELEMENT_TYPE, &bytes_of(elements))
    }

    fn get<T: Predict>(&self, buffer: &Self::Buffer<T>) -> Vec<T> {
        elements_of(&self.read(buffer))
    }
}

#[test]
fn every_call_on_every_type_gives_what_the_oracle_says() {
    for world_size in [1, 3] {
        ranks(world_size, |comm, memory| everything_in(&Bytes(memory), comm, &[0, 13], SEED));
    }
}

#[test]
fn ranks_agree_wherever_the_type_is_known() {
    ranks(2, |comm, memory| match comm.rank() {
        0 => everything_in(&Bytes(memory), comm, &[5], SEED + 1),
        _ => everything_in(memory, comm, &[5], SEED + 1),
    });
}

#[test]
fn every_form_of_every_type() {
    ranks(2, |comm, memory| {
        for (at, dtype) in DType::ALL.into_iter().enumerate() {
            let put = |numbers: &[u32]| Bytes(memory).bytes(dtype, &from_numbers(dtype, numbers));
            every_form(comm, SEED + at as u64, put, |buffer| to_numbers(dtype, &Bytes(memory).read(buffer)));
        }
    });
}

#[test]
fn messages_know_their_type() {
    ranks(2, |comm, memory| {
        let (bytes, me) = (Bytes(memory), comm.rank());
        let mut room = bytes.put(&[0.0_f64; 4]);
        match me {
            0 => comm.send(&bytes.put(&[1.5_f64; 4]), 1).unwrap(),
            _ => assert_eq!(comm.recv(&mut room, 0).unwrap().count, 4),
        }
        assert_eq!(bytes.get::<f64>(&room), [1.5 * me as f64; 4]);
        // To a rank whose program knows the type.
        match me {
            0 => comm.send(&bytes.put(&[7_i16; 4]), 1).unwrap(),
            _ => {
                let mut typed = memory.put(&[0_i16; 4]);
                comm.recv(&mut typed, 0).unwrap();
                assert_eq!(memory.get(&typed), [7; 4]);
            }
        }
    });
}

#[test]
fn any_byte_but_0_is_true_and_what_arrives_is_0_or_1() {
    ranks(2, |comm, memory| {
        let bytes = Bytes(memory);
        let mine = || bytes.bytes(DType::Bool, &[[0, 2, 0, 255, 1], [0, 255, 2, 0, 1]][comm.rank()]);
        for (op, expected) in [
            (ReduceOp::Max, [false, true, true, true, true]),
            (ReduceOp::BitAnd, [false, true, false, false, true]),
            // The bytes are combined bit by bit and then converted to a `bool`.
            (ReduceOp::BitXor, [false, true, true, true, false]),
        ] {
            let mut folded = mine();
            comm.all_reduce(&mut folded, op).unwrap();
            assert_eq!(bytes.get::<bool>(&folded), expected, "{op}");
        }
        let mut all = bytes.bytes(DType::Bool, &[9; 10]);
        comm.all_gather_into(&mine(), &mut all).unwrap();
        assert_eq!(bytes.get::<bool>(&all), [false, true, false, true, true, false, true, true, false, true]);
        let mut arrived = memory.put(&[false; 5]);
        match comm.rank() {
            0 => comm.send(&mine(), 1).unwrap(),
            _ => {
                comm.recv(&mut arrived, 0).unwrap();
                assert_eq!(memory.get(&memory.as_bytes(&arrived)), [0, 1, 0, 1, 1]);
            }
        }
    });
}

#[test]
fn what_lies_where_its_type_cannot_is_refused_before_others_hear_of_it() {
    ranks(2, |comm, memory| {
        let buffer = memory.put(&[0_u8; 64]);
        let context = std::sync::Arc::clone(comm.device().unwrap().context());
        let (address, _ordered) = cudarc::driver::DevicePtr::device_ptr(&buffer, &memory.stream);
        // SAFETY: it lies inside the buffer, which stays alive. It is refused, so it is never used.
        let crooked = |length| unsafe { RawDeviceSlice::<u8>::new(&context, address + 2, length) };
        let mut typed = TypedBytes::new(DType::F32, crooked(16)).unwrap();
        let peer = 1 - comm.rank();
        for error in [
            comm.all_reduce(&mut typed, ReduceOp::Sum).unwrap_err(),
            comm.group(|group| group.broadcast(&mut typed, 0)).map(|_| ()).unwrap_err(),
            comm.send(&typed, peer).unwrap_err(),
            comm.recv(&mut typed, peer).map(|_| ()).unwrap_err(),
            comm.device().unwrap().fill(&mut typed, &TypedBytes::new(DType::F32, memory.put(&[0_u8; 16])).unwrap(), 0).unwrap_err(),
        ] {
            let refused = matches!(error, collectives::Error::InvalidArgument { .. });
            assert!(refused && error.to_string().contains("multiples of 4 B"), "{error}");
        }
        let other = TypedBytes::new(DType::I32, memory.put(&[0_u8; 16])).unwrap();
        let mut floats = TypedBytes::new(DType::F32, memory.put(&[0_u8; 16])).unwrap();
        let error = comm.all_reduce_into(&other, &mut floats, ReduceOp::Sum).unwrap_err().to_string();
        assert!(error.contains("i32") && error.contains("f32"), "{error}");
        let op = CustomOp::<f64>::on_device("twice", "a + b");
        assert!(comm.all_reduce(&mut floats, &op).unwrap_err().is_unsupported());
        // No other rank was involved in any of these calls.
        comm.all_reduce(&mut floats, ReduceOp::Sum).unwrap();
    });
}

#[test]
fn no_byte_but_0_and_1_comes_from_oneself_into_truth_values() {
    ranks(2, |comm, memory| {
        let me = comm.rank();
        let sevens = Bytes(memory).bytes(DType::Bool, &[7, 0, 255, 1]);
        let mut flags = memory.put(&[false; 4]);
        comm.send_recv(&sevens, me, &mut flags, me).unwrap();
        // SAFETY: the same memory as bytes. Any byte is a valid `u8`.
        let bytes = unsafe { flags.transmute::<u8>(4) }.unwrap();
        let mut seen = [0_u8; 4];
        comm.device().unwrap().stream().memcpy_dtoh(&bytes, &mut seen).unwrap();
        comm.device().unwrap().synchronize().unwrap();
        assert_eq!(seen, [1, 0, 1, 1]);
    });
}
