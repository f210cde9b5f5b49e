//! A scheduler ends a job: SIGTERM reaches some ranks, at any time. All ranks stop in the same step, save one checkpoint
//! and end. A job with fewer ranks finds this checkpoint.

use std::path::{Path, PathBuf};

use collectives::Communicator;
use collectives_train::StopFlag;
use collectives_train::checkpoint::{Checkpoint, Piece, Writer};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::ranks::{Wiring, is_rank_of, patience};
use crate::processes::Ranks;

const FOLDER: &str = "COLLECTIVES_TEST_FOLDER";

/// Takes steps until a rank gets SIGTERM, and saves the number of the last step.
fn train(comm: &Communicator, folder: &Path) {
    let stop = StopFlag::new();
    signal_hook::flag::register(signal_hook::consts::SIGTERM, stop.handle()).unwrap();
    let mut step = 0;
    while !stop.agreed(comm).unwrap() {
        step += 1;
        if step == 1 {
            println!("@ready");
        }
    }
    let (mut writer, saved) = (Writer::new(comm, folder), [step]);
    writer.tensor("step", &[1], Piece::Whole, &saved);
    writer.commit(step).unwrap();
    println!("@{step}");
}

/// Runs a job of three ranks until the given ranks get SIGTERM. Returns the step that all ranks reached.
fn stopped_at(name: &str, folder: &Path, asked: &[usize]) -> u64 {
    let mut ranks = Ranks::spawn_with(name, 3, &[(FOLDER, folder.display().to_string())]);
    for _ in 0..3 {
        assert_eq!(ranks.next("it is ready").1, "ready");
    }
    asked.iter().for_each(|rank| kill_process(Pid::from_child(&ranks.children[*rank]), Signal::TERM).unwrap());
    let steps: Vec<_> = (0..3).map(|rank| ranks.last_words(rank, patience(60)).unwrap().pop().unwrap()).collect();
    assert!(steps.iter().all(|step| *step == steps[0]), "{steps:?}, asked {asked:?}");
    steps[0].parse().unwrap()
}

fn a_signal_ends_a_job(name: &str, wiring: Wiring) {
    if is_rank_of(name) {
        let rank = std::env::var("RANK").unwrap().parse().unwrap();
        let comm = wiring.builder(rank).from_env().unwrap();
        train(&comm, &PathBuf::from(std::env::var(FOLDER).unwrap()));
        return comm.close().unwrap();
    }
    for asked in [&[0][..], &[2], &[1, 0, 2]] {
        let folder = tempfile::tempdir().unwrap();
        let step = stopped_at(name, folder.path(), asked);
        let found = Communicator::run_local(2, |comm| {
            let (checkpoint, mut saved) = (Checkpoint::resume(comm, folder.path())?.unwrap(), [0_u64]);
            checkpoint.read("step", &[1], Piece::Whole, &mut saved)?;
            Ok((checkpoint.step(), saved))
        });
        assert_eq!(found.unwrap(), [(Some(step), [step]); 2], "asked {asked:?}");
    }
}

#[test]
fn a_signal_to_some_ranks_ends_a_job_with_one_checkpoint_of_all() {
    a_signal_ends_a_job("checkpoint::signals::a_signal_to_some_ranks_ends_a_job_with_one_checkpoint_of_all", Wiring::Shm);
}

#[test]
fn a_signal_to_some_ranks_ends_a_job_over_tcp() {
    a_signal_ends_a_job("checkpoint::signals::a_signal_to_some_ranks_ends_a_job_over_tcp", Wiring::Tcp);
}
