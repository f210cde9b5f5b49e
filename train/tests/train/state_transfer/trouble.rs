//! Mistakes and copies that differ are every rank's error, and the program's communicator stays usable.

use collectives::{Communicator, Error, ReduceOp};
use collectives_train::checkpoint::Piece;
use collectives_train::{Options, Parameter, ShardedOptimizer, StateTransfer};

use crate::common::ranks::{Wiring, threads};

/// Returns the errors of a transfer between three ranks, which must all fail.
fn errors(declare: impl Fn(&mut StateTransfer<'_>, usize) + Sync) -> Vec<Error> {
    threads(Wiring::Shm, 3, |comm| {
        let mut transfer = StateTransfer::new(comm).unwrap();
        declare(&mut transfer, comm.rank());
        let error = transfer.run().unwrap_err();
        assert_usable(comm);
        error
    })
}

fn assert_usable(comm: &Communicator) {
    let mut sum = [1];
    comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum, [3]);
    let mut weight = [comm.rank() as f32];
    let mut transfer = StateTransfer::new(comm).unwrap();
    match comm.rank() {
        2 => transfer.offer("w", &[1], Piece::Whole, &weight),
        _ => transfer.want("w", &[1], Piece::Whole, &mut weight),
    };
    transfer.run().unwrap();
    assert_eq!(weight, [2.0]);
}

type Mistake = fn(&mut StateTransfer<'_>);

#[test]
fn wrong_arguments_of_one_rank_fail_on_all() {
    let cases: [(Mistake, &str); 5] = [
        (
            |transfer| _ = transfer.offer("w", &[4], Piece::Whole, &[0.0_f32; 3]),
            "3 elements were passed, but the part (all of it) of a tensor of shape [4] has 4",
        ),
        (|transfer| _ = transfer.offer("w", &[4], Piece::Flat(3..5), &[0.0_f32; 2]), "there is no part"),
        (|transfer| _ = transfer.offer("a#b", &[1], Piece::Whole, &[0_u8]), "a name must not be empty, contain #"),
        (|transfer| _ = transfer.offer("", &[1], Piece::Whole, &[0_u8]), "a name must not be empty"),
        (|transfer| _ = transfer.offer("w", &[usize::MAX, 2], Piece::Whole, &[0_u8]), "address space"),
    ];
    for (mistake, words) in cases {
        let errors = errors(|transfer, rank| {
            if rank == 1 {
                mistake(transfer);
            }
        });
        for (rank, error) in errors.iter().enumerate() {
            let text = error.to_string();
            assert!(text.contains(words) && (rank == 1 || text.contains("transferring state on rank 1")), "{text}");
        }
        assert!(matches!(errors[1], Error::InvalidArgument { .. }), "{}", errors[1]);
    }
}

type Roles = fn(&mut StateTransfer<'_>, usize);

#[test]
fn roles_that_do_not_fit_together_fail_on_all_with_the_same_words() {
    let cases: [(Roles, &str); 2] = [
        (
            |transfer, rank| match rank {
                0 => _ = transfer.offer("w", &[2], Piece::Whole, &[1.0_f32, 2.0]),
                _ => _ = transfer.want("w", &[2], Piece::Whole, Box::leak(Box::new([0.0_f64; 2]))),
            },
            "tensor \"w\": rank 0 offers F32[2], but rank 1 wants F64[2]",
        ),
        (
            |transfer, rank| match rank {
                0 => _ = transfer.want("w", &[2], Piece::Whole, Box::leak(Box::new([0_u8; 2]))),
                _ => _ = transfer.offer("w", &[2], Piece::Flat(0..1), &[1_u8]),
            },
            "tensor \"w\": elements 1..2 of the flattened tensor are held by no rank",
        ),
    ];
    for (declare, words) in cases {
        let errors = errors(declare);
        errors.iter().for_each(|error| assert!(error.to_string().contains(words), "{error}"));
        errors.iter().for_each(|error| assert!(matches!(error, Error::InvalidArgument { .. }), "{error}"));
    }
}

#[test]
fn copies_that_differ_are_named_on_all_ranks() {
    for (wiring, large) in [(Wiring::Shm, 1), (Wiring::Tcp, 700_000)] {
        let errors = threads(wiring, 4, |comm| {
            let mut weight = vec![0.5_f32; large];
            let bias = [0_u8, 1];
            if comm.rank() == 1 {
                weight[0] = 0.500_001; // a rank that has drifted apart
            }
            let (mut own, mut own_bias) = (vec![0.0_f32; large], [0_u8; 2]);
            let mut transfer = StateTransfer::new(comm).unwrap();
            match comm.rank() {
                3 => transfer.want("weight", &[large], Piece::Whole, &mut own).want("bias", &[2], Piece::Whole, &mut own_bias),
                _ => transfer.offer("weight", &[large], Piece::Whole, &weight).offer("bias", &[2], Piece::Whole, &bias),
            };
            let error = transfer.run().unwrap_err();
            let mut sum = [1];
            comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [4]);
            error
        });
        for error in &errors {
            let text = error.to_string();
            let is_named = text.contains("tensor \"weight\" (F32[") && text.contains("of 4 ranks, these differ from rank 0: 1");
            assert!(error.is_mismatch() && is_named, "{text}");
            assert_eq!(text, errors[0].to_string());
        }
    }
}

#[test]
fn shares_of_the_wrong_number_or_length_are_refused() {
    threads(Wiring::Shm, 2, |comm| {
        let parameters = vec![Parameter::new::<f32>("a", &[3]), Parameter::new::<f32>("b", &[2])];
        let options = Options { first_bucket_bytes: 0, bucket_bytes: 0, ..Options::default() };
        let model = ShardedOptimizer::new(comm, parameters, options).unwrap();
        let lens: Vec<usize> = model.shard_lens().collect();
        let zeros = |lens: &[usize]| lens.iter().map(|len| vec![0.0_f32; *len]).collect::<Vec<_>>();
        let refused = |state: Vec<Vec<f32>>, words: &str| {
            let mut wanted = state.clone();
            for is_offer in [true, false] {
                let mut transfer = StateTransfer::new(comm).unwrap();
                match is_offer {
                    true => transfer.offer_shares("m", &model, state.iter().map(Vec::as_slice)),
                    false => transfer.want_shares("m", &model, wanted.iter_mut().map(Vec::as_mut_slice)),
                };
                let error = transfer.run().unwrap_err().to_string();
                assert!(error.contains(words), "{error}");
            }
        };
        refused(zeros(&lens[..1]), "there is no slice for bucket 1");
        refused(zeros(&[lens[0], lens[1] + 1]), "elements were passed for bucket 1, but this rank's share of the bucket has");
        refused(zeros(&[lens[0], lens[1], 1]), "more slices were passed than the model has buckets (2)");
        let state = zeros(&lens);
        let mut transfer = StateTransfer::new(comm).unwrap();
        transfer.offer_shares_of("m", &model, 2, state.iter().map(Vec::as_slice));
        let error = transfer.run().unwrap_err().to_string();
        assert!(error.contains("the model has no rank 2: its ranks are 0 to 1"), "{error}");
    });
}
