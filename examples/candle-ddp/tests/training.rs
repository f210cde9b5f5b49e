//! Many ranks reach the same result as one process on the whole batch. `training_common::testing` states the bound.

use training_common::testing;

const PROGRAM: &str = env!("CARGO_BIN_EXE_candle-ddp");

#[test]
fn one_two_and_four_ranks_reach_the_same_network_which_has_learnt() {
    testing::threads_reach_the_network_of_one_process(candle_ddp::train);
}

#[test]
fn one_to_four_processes_have_the_losses_of_one_process() {
    testing::processes_have_the_losses_of_one_process(PROGRAM);
}

#[test]
fn a_batch_that_cannot_be_shared_out_is_refused() {
    testing::a_batch_that_cannot_be_shared_out_is_refused(candle_ddp::train);
}

#[test]
fn flags_that_do_not_fit_together_are_refused() {
    testing::flags_that_do_not_fit_together_are_refused(PROGRAM);
}
