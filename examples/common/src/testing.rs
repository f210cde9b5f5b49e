//! Checks that the tests of both examples make: many ranks reach the same result as one process on the whole batch.

#![allow(clippy::missing_panics_doc, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::num::NonZeroUsize;
use std::process::{Child, Command, Output, Stdio};

use collectives::Communicator;

use crate::{Averaging, Options, Outcome, Over, largest_difference};

#[path = "../../../tests/common/ports.rs"]
mod ports;

/// The largest allowed difference of a parameter or a loss: sums in different orders round differently, and 200 steps
/// amplify that.
const BOUND: f32 = 1e-4;

/// The function that trains on one rank.
pub type Train = fn(&Communicator, &Options) -> anyhow::Result<Outcome>;

fn trained(train: Train, ranks: usize, change: impl FnOnce(&mut Options)) -> Vec<Outcome> {
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
    for (one, other) in [(&outcomes[0].parameters, &alone.parameters), (&outcomes[0].losses, &alone.losses)] {
        let difference = largest_difference(one, other);
        println!("{what}: the largest difference is {difference:e}");
        assert!(difference <= BOUND, "{what}: {difference:e}");
    }
}

/// Checks that one, two and four threads reach the same network in every way, and that the network has learnt.
pub fn threads_reach_the_network_of_one_process(train: Train) {
    let alone = trained(train, 1, |_| {}).remove(0);
    let (first, last) = (alone.losses[0], *alone.losses.last().unwrap());
    assert!(last < 0.5 * first, "the loss went from {first} to {last}");
    let check = |ranks, way, change: &dyn Fn(&mut Options)| same(&trained(train, ranks, change), &alone, &format!("{ranks} ranks, {way}"));
    check(1, "sharded", &|options| options.fully_sharded = true);
    for ranks in [2, 4] {
        check(ranks, "buckets", &|_| {});
        check(ranks, "small buckets", &|options| options.bucket_bytes = 4096);
        check(ranks, "each parameter", &|options| options.averaging = Averaging::EachParameter);
        check(ranks, "TCP", &|options| options.transport = Over::Tcp);
        check(ranks, "sharded", &|options| options.fully_sharded = true);
    }
}

/// Checks that a batch that cannot be split equally is refused.
pub fn a_batch_that_cannot_be_shared_out_is_refused(train: Train) {
    for fully_sharded in [false, true] {
        let options = Options { ranks: NonZeroUsize::new(3), fully_sharded, ..Options::new() };
        let error = options.run(|comm| train(comm, &options)).unwrap_err().to_string();
        assert!(error.contains("--batch 256 cannot be split equally between 3 ranks"), "{error}");
    }
}

/// Checks that the program has the same losses in one to four processes, with whole and with sharded parameters.
pub fn processes_have_the_losses_of_one_process(program: &str) {
    let alone = losses(program, 1, &[], "Buckets: ");
    assert!(alone[alone.len() - 1] < alone[0], "nothing was learnt: {alone:?}");
    for ranks in 1..=4 {
        for (flags, way) in [(&[][..], "Buckets: "), (&["--fully-sharded"][..], "FullySharded: ")] {
            let difference = largest_difference(&losses(program, ranks, flags, way), &alone);
            println!("{ranks} processes, {way}the largest difference is {difference:e}");
            assert!(difference <= BOUND, "{ranks} processes, {way}{difference:e}");
        }
    }
}

/// Runs the program in processes, and returns the losses that rank 0 prints: that of every fifth step, and the last.
fn losses(program: &str, ranks: usize, flags: &[&str], way: &str) -> Vec<f32> {
    let outputs = run(program, ranks, &[&["--steps", "50", "--every", "5", "--batch", "240"], flags].concat());
    for (rank, output) in outputs.iter().enumerate() {
        assert!(output.status.success(), "rank {rank} of {ranks}: {}", in_words(output));
        assert_eq!(output.stdout.is_empty(), rank != 0, "rank {rank} of {ranks}: {}", in_words(output));
    }
    let printed = String::from_utf8_lossy(&outputs[0].stdout);
    assert!(printed.lines().last().unwrap().starts_with(way), "{printed}");
    let after_loss = printed.lines().filter_map(|line| line.split_once("loss ")?.1.split([' ', ',']).next());
    let losses: Vec<f32> = after_loss.map(|loss| loss.parse().unwrap()).collect();
    assert_eq!(losses.len(), 11, "{printed}");
    losses
}

/// Checks that flags which have no meaning for sharded parameters are refused beside `--fully-sharded`.
pub fn flags_that_do_not_fit_together_are_refused(program: &str) {
    for other in ["--averaging=buckets", "--bucket-bytes=4096"] {
        let output = run(program, 1, &["--fully-sharded", other]).remove(0);
        let (said, flag) = (in_words(&output), other.split('=').next().unwrap());
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("--fully-sharded") && said.contains("cannot be used with") && said.contains(flag), "{said}");
    }
}

/// Runs the program as every rank of a job. Returns the outputs in rank order.
fn run(program: &str, ranks: usize, arguments: &[&str]) -> Vec<Output> {
    let port = ports::free_port().to_string();
    let rank = |rank: usize| {
        let mut command = Command::new(program);
        command.args(arguments).env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port).env("COLLECTIVES_TIMEOUT", "120");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let started: Vec<Child> = (0..ranks).map(rank).collect();
    started.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect()
}

fn in_words(output: &Output) -> String {
    format!("{}\n{}{}", output.status, String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}
