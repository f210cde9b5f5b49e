//! Many ranks reach the same result as one process on the whole batch.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::num::NonZeroUsize;

use burn_ddp::train;
use training_common::{Averaging, Options, Outcome, Over, largest_difference};

/// The largest allowed difference of a parameter: sums in different orders round differently, and 200 steps amplify
/// that.
const BOUND: f32 = 1e-4;

fn trained(ranks: usize, change: impl FnOnce(&mut Options)) -> Vec<Outcome> {
    let mut options = Options { ranks: NonZeroUsize::new(ranks), every: 0, ..Options::new() };
    change(&mut options);
    options.run(|comm| train(comm, &options)).unwrap()
}

/// Checks that every rank has the same bits, close to the result of one rank.
fn same(outcomes: &[Outcome], alone: &Outcome, what: &str) {
    for outcome in outcomes {
        assert_eq!(outcome.parameters, outcomes[0].parameters, "{what}: ranks differ");
        assert_eq!(outcome.losses, outcomes[0].losses, "{what}: ranks differ");
    }
    let difference = largest_difference(&outcomes[0].parameters, &alone.parameters);
    println!("{what}: the largest difference is {difference:e}");
    assert!(difference <= BOUND, "{what}: {difference:e}");
}

#[test]
fn one_two_and_four_ranks_reach_the_same_network_which_has_learnt() {
    let alone = trained(1, |_| {}).remove(0);
    let (first, last) = (alone.losses[0], *alone.losses.last().unwrap());
    assert!(last < 0.5 * first, "the loss went from {first} to {last}");
    for ranks in [2, 4] {
        same(&trained(ranks, |_| {}), &alone, &format!("{ranks} ranks, buckets"));
        same(&trained(ranks, |options| options.bucket_bytes = 4096), &alone, &format!("{ranks} ranks, small buckets"));
        same(&trained(ranks, |options| options.averaging = Averaging::EachParameter), &alone, &format!("{ranks} ranks, each parameter"));
        same(&trained(ranks, |options| options.transport = Over::Tcp), &alone, &format!("{ranks} ranks, TCP"));
    }
}

#[test]
fn a_batch_that_cannot_be_shared_out_is_refused() {
    let options = Options { ranks: NonZeroUsize::new(3), ..Options::new() };
    let error = options.run(|comm| train(comm, &options)).unwrap_err().to_string();
    assert!(error.contains("--batch 256 cannot be split equally between 3 ranks"), "{error}");
}
