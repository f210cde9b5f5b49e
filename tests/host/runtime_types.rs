//! Buffers whose element type is known at run time: in every call, against the oracle, and with ranks whose type is
//! known at compile time.

#![expect(unsafe_code, reason = "a test plays the part of a binding")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use collectives::{BufferMut, Communicator, CustomOp, DType, Envelope, Error, ReduceOp, Result, TypedBytes, interop::AnyElement};

use crate::common::cases::{HostMemory, Memory, everything_in, movements_in, reductions_in};
use crate::common::forms::every_form;
use crate::common::ranks::{Wiring, threads};
use crate::common::typed::{Engine, from_numbers, to_numbers};

/// The fixed seed of the inputs. Every failure prints the seed it used.
const SEED: u64 = 0x7e9e;

#[test]
fn every_call_on_every_type_gives_what_the_oracle_says() {
    for (wiring, sizes) in [(Wiring::Shm, &[1, 2, 3][..]), (Wiring::Tcp, &[3]), (Wiring::Pairs, &[3])] {
        for ranks in sizes {
            threads(wiring, *ranks, |comm| everything_in(&Engine::default(), comm, &[0, 13], SEED));
        }
    }
}

#[test]
fn ranks_agree_wherever_the_type_is_known() {
    for wiring in [Wiring::Shm, Wiring::Tcp, Wiring::Pairs] {
        threads(wiring, 3, |comm| match comm.rank() {
            1 => everything_in(&Engine::default(), comm, &[5], SEED + 1),
            _ => everything_in(&HostMemory, comm, &[5], SEED + 1),
        });
    }
}

#[test]
fn large_buffers_too() {
    threads(Wiring::Shm, 3, |comm| {
        let engine = Engine::default();
        reductions_in::<f64, _>(&engine, comm, ReduceOp::PreMulSum(crate::common::oracle::SCALAR), 150_001, SEED + 2);
        reductions_in::<bool, _>(&engine, comm, ReduceOp::BitXor, 150_001, SEED + 3);
        movements_in::<u16, _>(&engine, comm, 150_001, SEED + 4);
    });
}

#[test]
fn every_form_of_every_type() {
    for (wiring, ranks) in [(Wiring::Shm, 3), (Wiring::Tcp, 2)] {
        threads(wiring, ranks, |comm| {
            for (at, dtype) in DType::ALL.into_iter().enumerate() {
                let engine = Engine::default();
                let put = |numbers: &[u32]| engine.bytes(dtype, &from_numbers(dtype, numbers));
                every_form(comm, SEED + at as u64, put, |buffer| to_numbers(dtype, &engine.read(buffer)));
            }
        });
    }
}

/// Averages bytes of any type, in any kind of buffer, as a language binding would.
fn mean(comm: &Communicator, dtype: DType, bytes: impl BufferMut<Element = u8>) -> Result<()> {
    comm.all_reduce(&mut TypedBytes::new(dtype, bytes)?, ReduceOp::Avg)
}

#[test]
fn bytes_in_any_buffer_will_do() {
    threads(Wiring::Shm, 2, |comm| {
        let me = comm.rank() as u8;
        let (mut slice, mut array, mut vector, mut boxed) = ([me * 2; 5], [me * 4; 3], vec![me * 6; 9], vec![me * 8; 2].into_boxed_slice());
        let mut shared = comm.alloc::<u8>(64).unwrap();
        shared.fill(me * 10);
        mean(comm, DType::U8, &mut slice[1..]).unwrap();
        mean(comm, DType::U8, &mut array).unwrap();
        mean(comm, DType::U8, &mut vector).unwrap();
        mean(comm, DType::U8, &mut boxed).unwrap();
        mean(comm, DType::U64, &mut shared).unwrap();
        assert_eq!((slice, array, vector), ([me * 2, 1, 1, 1, 1], [2; 3], vec![3; 9]));
        // The bytes of value 10 form one number, which is divided by 2 once.
        assert!(boxed[..] == [4; 2] && shared[..] == [5; 64]);
        // A buffer that is only read may be shared and sent several times at once.
        let source: Arc<[u8]> = vec![me; 1 << 16].into();
        let typed = TypedBytes::new(DType::I8, Arc::clone(&source)).unwrap();
        let sent = [comm.start_send(typed.clone(), 1 - comm.rank()).unwrap(), comm.start_send(typed, 1 - comm.rank()).unwrap()];
        for _ in 0..2 {
            let room = TypedBytes::new(DType::I8, vec![9_u8; 1 << 16]).unwrap();
            let (room, received) = comm.start_recv(room, 1 - comm.rank()).unwrap().wait().unwrap();
            assert_eq!((received.count, room.into_inner()), (1 << 16, vec![1 - me; 1 << 16]));
        }
        sent.into_iter().for_each(|work| drop(work.wait().unwrap()));
    });
}

#[test]
fn messages_are_counted_in_elements_and_their_types_compared() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        threads(wiring, 2, |comm| {
            let (engine, me, peer) = (Engine::default(), comm.rank(), 1 - comm.rank());
            let mine = engine.put(&[me as f32 + 0.5; 3]);
            let mut room = engine.put(&[0.0_f32; 5]);
            let received = comm.send_recv(&mine, peer, &mut room, peer).unwrap();
            assert_eq!((received.count, engine.get::<f32>(&room)), (3, [&[peer as f32 + 0.5; 3][..], &[0.0; 2]].concat()));
            // To a rank whose program knows the type, and from one.
            if me == 0 {
                comm.send(&mine, Envelope::rank(1).tag(3)).unwrap();
                let mut group = engine.put(&[0_i64; 2]);
                comm.group(|group_of| group_of.recv(&mut group, 1)).unwrap();
                assert_eq!(engine.get::<i64>(&group), [7, 8]);
                // It leaves before the other end is known.
                comm.send(&engine.put(&[1_u32]), 1).unwrap();
            } else {
                let mut typed = [0.0_f32; 3];
                assert_eq!(comm.recv(&mut typed, Envelope::rank(0).tag(3)).unwrap().count, 3);
                assert_eq!(typed, [0.5; 3]);
                comm.send(&[7_i64, 8], 0).unwrap();
                let refused = comm.recv(&mut room, 0).unwrap_err().to_string();
                assert!(refused.contains("u32") && refused.contains("f32"), "{refused}");
            }
        });
    }
}

#[test]
fn another_type_on_another_rank_is_a_mismatch() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        threads(wiring, 2, |comm| {
            let engine = Engine::default();
            let mut bytes = engine.put(&[1.0_f32; 4]);
            let ended = match comm.rank() {
                0 => comm.all_reduce(&mut bytes, ReduceOp::Sum),
                _ => comm.all_reduce(&mut [1_i32; 4], ReduceOp::Sum),
            };
            let error = ended.unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains("f32") && error.to_string().contains("i32"), "{error}");
            assert_eq!(engine.get::<f32>(&bytes), [1.0; 4]);
        });
    }
}

#[track_caller]
fn refuses(result: Result<()>, words: &[&str]) {
    let error = result.unwrap_err();
    let is_refused = matches!(error, Error::InvalidArgument { .. }) || error.is_unsupported();
    assert!(is_refused && words.iter().all(|word| error.to_string().contains(word)), "{error}");
}

#[test]
fn what_cannot_be_is_refused_and_nothing_has_happened() {
    threads(Wiring::Shm, 2, |comm| {
        let engine = Engine::default();
        refuses(TypedBytes::new(DType::F16, &[0_u8; 3][..]).map(|_| ()), &["3 bytes", "f16"]);
        // An address at which such elements cannot lie.
        let mut words = [0_u64; 3];
        // SAFETY: the bytes of the array.
        let bytes = unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<u8>(), 24) };
        let mut crooked = TypedBytes::new(DType::I32, &mut bytes[2..6]).unwrap();
        refuses(comm.all_reduce(&mut crooked, ReduceOp::Sum), &["i32", "multiples of 4 B"]);
        refuses(comm.broadcast(&mut crooked, 0), &["multiples of 4 B"]);
        refuses(comm.send(&crooked, 1), &["multiples of 4 B"]);
        refuses(comm.recv(&mut crooked, 1).map(|_| ()), &["multiples of 4 B"]);
        refuses(comm.group(|group| group.send(&crooked, 1)).map(|_| ()), &["multiples of 4 B"]);
        refuses(comm.all_gather_into(&crooked, &mut engine.put(&[0_i32; 2])), &["the source", "multiples of 4 B"]);
        // Two types in one call.
        let (source, mut other) = (engine.put(&[1.0_f32; 2]), engine.put(&[0_u32; 2]));
        refuses(comm.all_reduce_into(&source, &mut other, ReduceOp::Sum), &["f32", "u32"]);
        refuses(comm.all_to_all_into(&source, &mut other), &["f32", "u32"]);
        refuses(comm.scatter_v_into(Some((&source, &[1, 1])), &mut engine.put(&[0_i8]), comm.rank()), &["f32", "i8"]);
        // Ops that the type does not support.
        refuses(comm.all_reduce(&mut engine.put(&[true]), ReduceOp::Avg), &["avg of bool"]);
        refuses(comm.all_reduce(&mut engine.put(&[1.0_f64]), ReduceOp::BitAnd), &["band of f64"]);
        refuses(comm.all_reduce(&mut other, ReduceOp::PreMulSum(2.0)), &["mulsum of u32"]);
        let mut untyped = comm.alloc::<AnyElement>(4).unwrap();
        refuses(comm.all_reduce(&mut untyped, ReduceOp::Sum), &["plain data", "sum"]);
        let doubles = CustomOp::new("doubles", |_: &mut [f64], _: &[f64]| panic!("nobody calls it"));
        refuses(comm.all_reduce(&mut other, &doubles), &["doubles", "u32", "f64"]);
        assert!(comm.start_all_reduce(engine.put(&[1.0_f32]), doubles).is_err());
        // No other rank was involved, so the next call is the first.
        comm.all_reduce(&mut other, ReduceOp::Sum).unwrap();
        assert_eq!((engine.get::<u32>(&other), words), (vec![0; 2], [0; 3]));
    });
}

#[test]
fn custom_ops_of_the_buffers_type_fold_it() {
    let farthest = CustomOp::ordered("farthest", |into: &mut [f64], from: &[f64]| {
        into.iter_mut().zip(from).for_each(|(into, from)| *into = if from.abs() > into.abs() { *from } else { *into });
    });
    for wiring in [Wiring::Shm, Wiring::Tcp, Wiring::Pairs] {
        threads(wiring, 3, |comm| {
            let (engine, me) = (Engine::default(), comm.rank());
            let mine: Vec<f64> = (0..3000).map(|at| [1.0, -3.0, 2.0][(me + at) % 3]).collect();
            let mut bytes = engine.put(&mine);
            comm.all_reduce(&mut bytes, &farthest).unwrap();
            assert_eq!(engine.get::<f64>(&bytes), vec![-3.0; 3000]);
            // With a rank that knows its type.
            let mut typed = mine.clone();
            let mut bytes = engine.put(&mine);
            if me == 1 { comm.all_reduce(&mut typed, &farthest) } else { comm.all_reduce(&mut bytes, &farthest) }.unwrap();
            assert_eq!(if me == 1 { typed } else { engine.get::<f64>(&bytes) }, vec![-3.0; 3000]);
        });
    }
}

#[test]
fn any_byte_but_0_is_true_and_what_arrives_is_0_or_1() {
    let bytes = |rank: usize| [[0, 2, 0, 255, 1, 0], [0, 255, 2, 1, 1, 0], [0, 1, 128, 0, 2, 255]][rank];
    let truth = |rank: usize, at: usize| bytes(rank)[at] != 0;
    for wiring in [Wiring::Shm, Wiring::Tcp, Wiring::Pairs] {
        threads(wiring, 3, |comm| {
            let (engine, me) = (Engine::default(), comm.rank());
            let mine = || engine.bytes(DType::Bool, &bytes(me));
            for op in ReduceOp::ALL.into_iter().filter(|op| op.check(DType::Bool).is_ok()) {
                let fold = |a: bool, b: bool| match op {
                    ReduceOp::Prod | ReduceOp::Min | ReduceOp::BitAnd => a & b,
                    ReduceOp::BitXor => a ^ b,
                    _ => a | b,
                };
                let expected: Vec<bool> = (0..6).map(|at| (1..3).fold(truth(0, at), |all, rank| fold(all, truth(rank, at)))).collect();
                let (mut in_place, mut into) = (mine(), engine.bytes(DType::Bool, &[7; 6]));
                comm.all_reduce(&mut in_place, op).unwrap();
                comm.all_reduce_into(&mine(), &mut into, op).unwrap();
                assert_eq!(
                    (engine.get::<bool>(&in_place), engine.get::<bool>(&into)),
                    (expected.clone(), expected),
                    "{op} over {wiring:?}"
                );
            }
            // A custom op sees only the bytes 0 and 1.
            let largest = Arc::new(AtomicU8::new(0));
            let seen = Arc::clone(&largest);
            let either = CustomOp::new("either", move |into: &mut [bool], from: &[bool]| {
                into.iter().chain(from).for_each(|truth| _ = seen.fetch_max(u8::from(*truth), Ordering::Relaxed));
                into.iter_mut().zip(from).for_each(|(into, from)| *into |= *from);
            });
            let mut folded = mine();
            comm.all_reduce(&mut folded, &either).unwrap();
            assert!(engine.get::<bool>(&folded) == [false, true, true, true, true, true] && largest.load(Ordering::Relaxed) < 2);
            // Moving collectives and messages, to bytes and to a rank that has `bool` values.
            let mut all = engine.bytes(DType::Bool, &[9; 18]);
            comm.all_gather_into(&mine(), &mut all).unwrap();
            let expected: Vec<bool> = (0..18).map(|at| truth(at / 6, at % 6)).collect();
            assert_eq!(engine.get::<bool>(&all), expected);
            let mut truths = [false; 6];
            if me == 1 { comm.broadcast(&mut truths, 0) } else { comm.broadcast(&mut mine(), 0) }.unwrap();
            assert!(me != 1 || truths[..] == expected[..6]);
            match me {
                0 => comm.send(&mine(), 1).unwrap(),
                1 => assert!(comm.recv(&mut truths, 0).is_ok() && truths[..] == expected[..6]),
                _ => {}
            }
        });
    }
}

#[test]
fn one_call_on_many_buffers_has_one_type() {
    threads(Wiring::Shm, 2, |comm| {
        let typed = |dtype, bytes| TypedBytes::new(dtype, vec![1_u8; bytes]).unwrap();
        let mut several = [typed(DType::I32, 8), typed(DType::U8, 5)];
        let error = comm.all_reduce_many(&mut several, ReduceOp::Sum).unwrap_err().to_string();
        assert!(error.contains("buffer 1 (from 0) holds u8") && error.contains("i32"), "{error}");
        let mut lists = [typed(DType::U8, 4), typed(DType::I32, 16)];
        let error = comm.all_gather_list(&typed(DType::U8, 4), &mut lists).unwrap_err().to_string();
        assert!(error.contains("u8") && error.contains("i32"), "{error}");
        // No rank has waited, and the communicator is still usable.
        let mut same = [typed(DType::U8, 5), typed(DType::U8, 0)];
        comm.all_reduce_many(&mut same, ReduceOp::Sum).unwrap();
        assert_eq!(same[0].bytes()[..], [2; 5]);
    });
}

#[test]
fn a_list_of_no_buffer_is_compared_whatever_its_elements_and_op() {
    for wiring in [Wiring::Shm, Wiring::Tcp, Wiring::Pairs] {
        threads(wiring, 3, |comm| {
            let mut none: Vec<TypedBytes<Vec<u8>>> = Vec::new();
            for op in [ReduceOp::Sum, ReduceOp::PreMulSum(0.5), ReduceOp::BitXor] {
                comm.all_reduce_many(&mut none, op).unwrap();
                comm.reduce_scatter_many_into(&Vec::<TypedBytes<Vec<u8>>>::new(), &mut none, op).unwrap();
            }
            comm.broadcast_many(&mut none, 1).unwrap();
            comm.all_gather_many_into(&Vec::<TypedBytes<Vec<u8>>>::new(), &mut none).unwrap();
            let largest =
                CustomOp::new("largest", |into: &mut [f32], from: &[f32]| into.iter_mut().zip(from).for_each(|(a, b)| *a = a.max(*b)));
            comm.all_reduce_many(&mut none, &largest).unwrap();
        });
        // One rank has no buffer and the others have one: all get an error.
        threads(wiring, 3, |comm| {
            let mut list: Vec<_> = (comm.rank() != 1).then(|| TypedBytes::new(DType::F32, vec![0_u8; 8]).unwrap()).into_iter().collect();
            let error = comm.all_reduce_many(&mut list, ReduceOp::Sum).unwrap_err();
            assert!(error.is_mismatch(), "{error}");
        });
    }
}
