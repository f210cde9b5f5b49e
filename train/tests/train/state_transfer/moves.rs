//! Every type and shape, cut into random pieces, arrives bit by bit; other calls run at the same time.

use std::any::Any;

use collectives::{Communicator, DType, Element, ReduceOp, Result};
use collectives_train::StateTransfer;
use collectives_train::checkpoint::Piece;

use crate::checkpoint::tensors::{Tensor, tensors, with_type};
use crate::common::oracle::Predict;
use crate::common::random::Random;
use crate::common::ranks::{Wiring, processes, threads};
use crate::common::typed::{bytes_of, elements_of};

/// Pieces of tensors, each with its elements.
type Values = Vec<(Tensor, Piece, Box<dyn Any + Send + Sync>)>;

fn filled(tensor: &Tensor, bytes: &[u8]) -> Box<dyn Any + Send + Sync> {
    fn typed<T: Predict>(bytes: &[u8]) -> Box<dyn Any + Send + Sync> {
        Box::new(elements_of::<T>(bytes))
    }
    with_type!(tensor.dtype, typed::<_>(bytes))
}

fn bytes(tensor: &Tensor, values: &dyn Any) -> Vec<u8> {
    fn typed<T: Predict>(values: &dyn Any) -> Vec<u8> {
        bytes_of(values.downcast_ref::<Vec<T>>().unwrap())
    }
    with_type!(tensor.dtype, typed::<_>(values))
}

/// Moves the offered pieces into the wanted ones.
fn transfer(comm: &Communicator, offered: &Values, wanted: &mut Values) -> Result<()> {
    fn offer<'a, T: Element>(transfer: &mut StateTransfer<'a>, tensor: &Tensor, piece: &Piece, values: &'a dyn Any) {
        transfer.offer(&tensor.name, &tensor.shape, piece.clone(), values.downcast_ref::<Vec<T>>().unwrap());
    }
    fn want<'a, T: Element>(transfer: &mut StateTransfer<'a>, tensor: &Tensor, piece: &Piece, values: &'a mut dyn Any) {
        transfer.want(&tensor.name, &tensor.shape, piece.clone(), values.downcast_mut::<Vec<T>>().unwrap());
    }
    let mut transfer = StateTransfer::new(comm)?;
    for (tensor, piece, values) in offered {
        with_type!(tensor.dtype, offer::<_>(&mut transfer, tensor, piece, &**values));
    }
    for (tensor, piece, values) in wanted {
        with_type!(tensor.dtype, want::<_>(&mut transfer, tensor, piece, &mut **values));
    }
    let progress = transfer.progress();
    assert_eq!(progress.total_bytes(), None);
    transfer.run()?;
    assert_eq!(progress.total_bytes(), Some(progress.moved_bytes()));
    Ok(())
}

/// Moves random pieces on this rank, which draws the same numbers as the others.
fn move_pieces(comm: &Communicator, seed: u64) {
    let random = &mut Random(seed);
    let (mut offered, mut wanted): (Values, Values) = (Vec::new(), Vec::new());
    for tensor in tensors(random) {
        let has = |piece: &Piece| piece.len(&tensor.shape).unwrap() > 0;
        let held = tensor.divide(random, comm.world_size()).swap_remove(comm.rank());
        let asked = tensor.divide(random, comm.world_size()).swap_remove(comm.rank());
        for piece in held.into_iter().filter(has) {
            let values = filled(&tensor, &tensor.piece(&piece));
            offered.push((tensor.clone(), piece, values));
        }
        for piece in asked {
            let values = filled(&tensor, &vec![0; tensor.piece(&piece).len()]);
            wanted.push((tensor.clone(), piece, values));
        }
    }
    // No rank offers elements of a tensor without elements.
    wanted.retain(|(tensor, ..)| tensor.shape.iter().all(|side| *side > 0));
    transfer(comm, &offered, &mut wanted).unwrap();
    for (tensor, piece, values) in &wanted {
        assert!(bytes(tensor, &**values) == tensor.piece(piece), "tensor {:?} {piece}, seed {seed}", tensor.name);
    }
    for (tensor, piece, values) in &offered {
        assert!(bytes(tensor, &**values) == tensor.piece(piece), "offered {:?} {piece}, seed {seed}", tensor.name);
    }
}

#[test]
fn pieces_of_every_type_arrive_bit_by_bit() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for wiring in [Wiring::Shm, Wiring::Tcp, Wiring::Pairs] {
        for ranks in [1, 2, 3, 4] {
            let seed = random.next();
            threads(wiring, ranks, |comm| move_pieces(comm, seed));
        }
    }
}

#[test]
fn pieces_arrive_between_processes() {
    processes("state_transfer::moves::pieces_arrive_between_processes", Wiring::Shm, 3, |comm| {
        move_pieces(comm, 7);
        Ok(())
    });
}

#[test]
fn large_state_comes_from_several_members_while_the_program_makes_calls() {
    const LEN: usize = 3_000_017;
    let all: Vec<u64> = (0..LEN as u64).map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        let moved = threads(wiring, 4, |comm| {
            let mut mine = vec![0; LEN];
            let is_newcomer = comm.rank() == 3;
            let mut transfer = StateTransfer::new(comm).unwrap();
            match is_newcomer {
                true => transfer.want("w", &[LEN], Piece::Whole, &mut mine),
                false => transfer.offer("w", &[LEN], Piece::Whole, &all),
            };
            let progress = transfer.progress();
            std::thread::scope(|scope| {
                let moving = scope.spawn(|| transfer.run());
                for step in 0..100 {
                    let mut sum = [step + comm.rank() as u64];
                    comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                    assert_eq!(sum, [4 * step + 6]);
                }
                moving.join().unwrap()
            })
            .unwrap();
            assert!(!is_newcomer || mine == all);
            progress.moved_bytes()
        });
        assert_eq!(moved[3], 8 * LEN as u64);
        assert_eq!(moved[..3].iter().sum::<u64>(), moved[3]);
        let (least, most) = (moved[..3].iter().min().unwrap(), moved[..3].iter().max().unwrap());
        assert!(most - least <= 1 << 20, "{moved:?}");
    }
}

/// Returns a number of kB from this process's status.
fn status(field: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_matches([':', ' ', '\t', 'k', 'B']).parse().unwrap()
}

#[test]
fn a_transfer_needs_far_less_memory_than_the_state() {
    const LEN: usize = 32 << 20;
    processes("state_transfer::moves::a_transfer_needs_far_less_memory_than_the_state", Wiring::Tcp, 3, |comm| {
        let mut state: Vec<u32> = (0..LEN as u32).map(|at| if comm.rank() < 2 { at } else { 1 }).collect();
        let mut transfer = StateTransfer::new(comm)?;
        match comm.rank() {
            2 => transfer.want("state", &[LEN], Piece::Whole, &mut state),
            _ => transfer.offer("state", &[LEN], Piece::Whole, &state),
        };
        let before = status("VmHWM");
        transfer.run()?;
        let more = status("VmHWM") - before;
        assert!(more < 40 * 1024, "{more} kB for a state of {} kB", LEN * 4 / 1024);
        assert!(state.iter().enumerate().all(|(at, x)| *x == at as u32));
        Ok(())
    });
}

#[test]
fn ranks_without_state_to_move_pass_through() {
    threads(Wiring::Shm, 3, |comm| {
        StateTransfer::new(comm).unwrap().run().unwrap();
        let (weight, mut empty): (_, [f32; 0]) = ([comm.rank() as f32], []);
        let mut transfer = StateTransfer::new(comm).unwrap();
        // No rank wants these elements, so they are not compared.
        transfer.offer("weight", &[1], Piece::Whole, &weight).offer("empty", &[0, 4], Piece::Whole, &[0.0_f32; 0]);
        transfer.want("empty", &[0, 4], Piece::Whole, &mut empty);
        transfer.run().unwrap();
    });
}

#[test]
fn all_types_are_among_the_tensors() {
    let tensors = tensors(&mut Random(1));
    assert!(DType::ALL.iter().all(|dtype| tensors.iter().any(|tensor| tensor.dtype == *dtype)));
}
