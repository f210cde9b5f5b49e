//! Tensors as messages: types, shapes and bits arrive unchanged, and what is no tensor is refused.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Result, Tensor};
use collectives::{Communicator, Envelope};
use collectives_candle::{cause, recv_tensor, run_local, send_tensor};

const TYPES: [DType; 10] =
    [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64, DType::BF16, DType::F16, DType::F32, DType::F64, DType::F8E4M3];

/// Small whole numbers, which all types can represent.
fn tensor(shape: &[usize], dtype: DType) -> Tensor {
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|index| (index * 7 % 13) as f32).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

fn read(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F32).unwrap().to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Tensors without dimensions, without elements, strided, and longer than one piece of a message.
fn tensors(dtype: DType) -> Vec<Tensor> {
    vec![
        tensor(&[], dtype),
        tensor(&[0], dtype),
        tensor(&[3, 0, 2], dtype),
        tensor(&[2, 3, 5], dtype),
        tensor(&[4, 6], dtype).t().unwrap(),
        tensor(&[5, 6], dtype).narrow(1, 2, 3).unwrap(),
        tensor(&[3, 1], dtype).broadcast_as((3, 4)).unwrap(),
        tensor(&[1, (1 << 20) / dtype.size_in_bytes()], dtype),
        tensor(&[(1 << 20) / dtype.size_in_bytes() + 1], dtype),
    ]
}

#[test]
fn every_type_and_shape_passes_along_a_pipeline() {
    const RANKS: usize = 3;
    for dtype in TYPES {
        run_local(RANKS, |comm| {
            let rank = comm.rank();
            for (tag, sent) in tensors(dtype).into_iter().enumerate() {
                let held = if rank == 0 { sent.clone() } else { recv_tensor(comm, rank - 1, tag as u64, &Device::Cpu)? };
                if rank + 1 < RANKS {
                    send_tensor(comm, &held, rank + 1, tag as u64)?;
                }
                if rank > 0 {
                    assert_eq!((held.dtype(), held.dims()), (dtype, sent.dims()), "rank {rank}");
                    assert_eq!(read(&held), read(&sent), "{dtype:?} {:?}, rank {rank}", sent.dims());
                }
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn the_bits_of_special_numbers_arrive() {
    let bits = [0x7fc0_1234_u32, 0xffc0_0001, 0x8000_0000, 0x7f80_0000, 1];
    let found = run_local(1, |comm| {
        let sent = Tensor::new(&bits.map(f32::from_bits), &Device::Cpu)?;
        send_tensor(comm, &sent, 0, 3)?;
        recv_tensor(comm, 0, 3, &Device::Cpu)?.to_vec1::<f32>()
    });
    assert_eq!(found.unwrap()[0].iter().map(|value| value.to_bits()).collect::<Vec<_>>(), bits);
}

#[test]
fn tags_and_order_keep_tensors_apart() {
    run_local(2, |comm| {
        if comm.rank() == 0 {
            for (tag, value) in [(1, 10_u32), (2, 20), (1, 11), (2, 21)] {
                send_tensor(comm, &Tensor::new(value, &Device::Cpu)?, 1, tag)?;
            }
        } else {
            for (tag, value) in [(2, 20_u32), (2, 21), (1, 10), (1, 11)] {
                assert_eq!(recv_tensor(comm, 0, tag, &Device::Cpu)?.to_scalar::<u32>()?, value);
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_received_tensor_has_no_history() {
    run_local(1, |comm| {
        let x = candle_core::Var::new(&[1.0_f32, 2.0], &Device::Cpu)?;
        send_tensor(comm, &(x.as_tensor() * 2.0)?, 0, 0)?;
        assert!(!recv_tensor(comm, 0, 0, &Device::Cpu)?.track_op());
        Ok(())
    })
    .unwrap();
}

/// Receives what rank 0 sends with `send`, and returns the error.
fn refused(send: impl Fn(&Communicator) -> collectives::Result<()> + Sync) -> candle_core::Error {
    let errors = run_local(2, |comm| {
        if comm.rank() == 0 {
            send(comm).map_err(std::io::Error::other)?;
            comm.recv(&mut 0_u8, Envelope::rank(1).tag(9)).map_err(std::io::Error::other)?;
            return Ok(None);
        }
        let error = recv_tensor(comm, 0, 0, &Device::Cpu).unwrap_err();
        // The communicator stays usable.
        comm.send(&1_u8, Envelope::rank(0).tag(9)).map_err(std::io::Error::other)?;
        Ok(Some(error))
    });
    errors.unwrap().pop().unwrap().unwrap()
}

#[test]
fn what_is_no_tensor_is_refused() {
    const F32: u64 = 7;
    let error = refused(|comm| comm.send(&[99_u64, 2], 1));
    assert!(error.to_string().contains("unknown number 99"), "{error}");
    let error = refused(|comm| comm.send(&[F32, 1 << 40, 1 << 40], 1));
    assert!(error.to_string().contains("larger than the address space"), "{error}");
    let empty: [u64; 0] = [];
    let error = refused(|comm| comm.send(&empty, 1));
    assert!(error.to_string().contains("an empty message"), "{error}");
    let error = refused(|comm| comm.send(&[1.0_f32, 2.0], 1));
    assert!(cause(&error).unwrap().is_mismatch(), "{error}");
    let error = refused(|comm| comm.send(&[F32; 40], 1));
    assert!(cause(&error).unwrap().is_mismatch(), "{error}");
    // Elements of another type, and too few of them.
    let error = refused(|comm| comm.send(&[F32, 4], 1).and_then(|()| comm.send(&[1.0_f64; 4], 1)));
    assert!(cause(&error).unwrap().is_mismatch(), "{error}");
    let error = refused(|comm| comm.send(&[F32, 4], 1).and_then(|()| comm.send(&[1.0_f32; 3], 1)));
    assert!(error.to_string().contains("3 elements of a tensor, but 4 were expected"), "{error}");
    assert!(matches!(cause(&error), Some(collectives::Error::Protocol { with, .. }) if with.contains("rank 0")));
}

#[test]
fn a_sender_that_announces_much_and_leaves_costs_no_memory() {
    let errors = run_local(2, |comm| {
        if comm.rank() == 0 {
            // 2^55 elements, which no machine could hold.
            comm.send(&[0_u64, 1 << 55], 1).and_then(|()| comm.send(&vec![1_u8; 1 << 20], 1)).map_err(std::io::Error::other)?;
            return Ok(None);
        }
        Ok(recv_tensor(comm, 0, 0, &Device::Cpu).err())
    });
    let error = errors.unwrap().pop().unwrap().unwrap();
    assert!(cause(&error).unwrap().is_peer_lost(), "{error}");
}

#[test]
fn a_receive_that_gives_up_leaves_the_tensor_to_the_next_receive() {
    run_local(2, |comm| {
        let sent = tensor(&[3, 100_000], DType::F32);
        if comm.rank() == 0 {
            comm.recv(&mut 0_u8, Envelope::rank(1).tag(9)).map_err(std::io::Error::other)?;
            return send_tensor(comm, &sent, 1, 4);
        }
        let error = recv_tensor(&comm.with_timeout(std::time::Duration::from_millis(1)), 0, 4, &Device::Cpu).unwrap_err();
        assert!(cause(&error).unwrap().is_timeout(), "{error}");
        comm.send(&1_u8, Envelope::rank(0).tag(9)).map_err(std::io::Error::other)?;
        assert_eq!(read(&recv_tensor(comm, 0, 4, &Device::Cpu)?), read(&sent));
        Ok(())
    })
    .unwrap();
}

#[test]
fn wrong_arguments_are_refused_before_anything_is_sent() {
    let errors = run_local(1, |comm| {
        let many = Tensor::ones(vec![1; 17], DType::F32, &Device::Cpu)?;
        let one = Tensor::new(1.0_f32, &Device::Cpu)?;
        let errors = [
            send_tensor(comm, &many, 0, 0).unwrap_err(),
            send_tensor(comm, &one, 5, 0).unwrap_err(),
            send_tensor(comm, &one, 0, 1 << 63).unwrap_err(),
            recv_tensor(comm, 5, 0, &Device::Cpu).unwrap_err(),
        ];
        send_tensor(comm, &Tensor::ones(vec![1; 16], DType::F32, &Device::Cpu)?, 0, 0)?;
        assert_eq!(recv_tensor(comm, 0, 0, &Device::Cpu)?.dims(), [1; 16]);
        Ok(errors.map(|error| error.to_string()))
    });
    for (error, text) in errors.unwrap()[0].iter().zip(["17 dimensions", "rank 5", "tag", "rank 5"]) {
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn threads_with_their_own_tags_pass_tensors_at_the_same_time() {
    run_local(2, |comm| {
        std::thread::scope(|scope| {
            let thread = |tag: u64| -> Result<()> {
                for round in 0..8_usize {
                    let expected = tensor(&[round, 40_000], DType::F32).affine(1.0, tag as f64)?;
                    if comm.rank() == 0 {
                        send_tensor(comm, &expected, 1, tag)?;
                    } else {
                        assert_eq!(read(&recv_tensor(comm, 0, tag, &Device::Cpu)?), read(&expected));
                    }
                }
                Ok(())
            };
            let threads = [1, 2, 3].map(|tag| scope.spawn(move || thread(tag)));
            threads.into_iter().try_for_each(|thread| thread.join().unwrap())
        })
    })
    .unwrap();
}
