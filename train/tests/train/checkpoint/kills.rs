//! Ranks that are killed while they save: the latest checkpoint is still whole, and so are those before it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use collectives::{Communicator, Result};
use collectives_train::checkpoint::{Checkpoint, Piece, Saver, Writer};
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::common::random::Random;
use crate::common::ranks::{Wiring, is_rank_of, patience};
use crate::processes::Ranks;

const FOLDER: &str = "COLLECTIVES_TEST_FOLDER";
/// The rank that the system kills, and the byte of a file at which it does so.
const VICTIM: &str = "COLLECTIVES_TEST_VICTIM";
const LIMIT: &str = "COLLECTIVES_TEST_LIMIT";
const WORLD_SIZE: usize = 3;
const SHAPE: [usize; 2] = [97, 1031];
const KEPT: usize = 3;

/// An element of the tensor in a save.
fn element(save: u64, index: usize) -> u32 {
    (save as u32).wrapping_mul(1_000_003).wrapping_add(index as u32)
}

/// Saves a step, in the background if there is a saver.
fn save(comm: &Communicator, directory: &Path, number: u64, step: u64, saver: Option<&mut Saver>) -> Result<()> {
    let all: Vec<u32> = (0..SHAPE[0] * SHAPE[1]).map(|index| element(number, index)).collect();
    let rows = Piece::part(0, SHAPE[0], comm.rank(), comm.world_size());
    let Piece::Along { range, .. } = rows.clone() else { unreachable!() };
    let mut writer = Writer::new(comm, directory);
    writer.tensor("rows", &SHAPE, rows, &all[range.start * SHAPE[1]..range.end * SHAPE[1]]);
    writer.tensor("whole", &SHAPE, Piece::Whole, &all).metadata("save", number.to_string()).keep(KEPT);
    match saver {
        None => writer.commit(step).map(drop),
        Some(saver) => saver.save(writer, step),
    }
}

/// Returns the number of the save that a checkpoint contains.
fn number(checkpoint: &Checkpoint) -> u64 {
    checkpoint.metadata()["save"].parse().unwrap()
}

/// Saves again and again, until a rank is lost. In the background, saves each step twice.
fn rank_that_saves(in_background: bool) {
    let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
    let directory = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let comm = Wiring::Shm.builder(rank).from_env().unwrap();
    let latest = Checkpoint::resume(&comm, &directory).unwrap();
    let mut last = latest.as_ref().map_or(0, number);
    let mut saver = in_background.then(|| Saver::new(&comm).unwrap());
    if std::env::var(VICTIM).is_ok_and(|victim| victim == rank.to_string()) {
        let limit = std::env::var(LIMIT).unwrap().parse().unwrap();
        setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }).unwrap();
        // A process that writes beyond the limit is killed (SIGXFSZ), in the middle of a file.
        setrlimit(Resource::Fsize, Rlimit { current: Some(limit), maximum: Some(limit) }).unwrap();
    }
    loop {
        last += 1;
        println!("@saving {last}");
        let step = if in_background { last.div_ceil(2) } else { last };
        if let Err(error) = save(&comm, &directory, last, step, saver.as_mut()) {
            assert!(error.is_peer_lost() || error.is_poisoned(), "{error}");
            return;
        }
        // In the background, the call shows that the previous save is done.
        println!("@saved {}", last - u64::from(in_background));
    }
}

/// Checks every checkpoint, and returns the number of the latest save.
fn assert_whole(directory: &Path, what: &str) -> u64 {
    let steps = Checkpoint::steps(directory).unwrap();
    // A rank can be killed between the renaming of a checkpoint and the removal of the oldest one, in a few trials in a row.
    assert!(steps.len() <= KEPT + 4, "{steps:?}, {what}");
    let mut latest = 0;
    for step in &steps {
        let checkpoint = Checkpoint::open(directory.join(format!("step-{step:08}"))).unwrap();
        checkpoint.check().unwrap();
        assert_eq!(checkpoint.step(), Some(*step), "{what}");
        assert!(number(&checkpoint) > latest, "{what}");
        latest = number(&checkpoint);
        for name in ["rows", "whole"] {
            let values: Vec<u32> = checkpoint.read_vec(name, &SHAPE, Piece::Whole).unwrap();
            assert!(values.iter().enumerate().all(|(index, value)| *value == element(latest, index)), "{name} of step {step}, {what}");
        }
    }
    latest
}

/// Returns the number of the save that a line reports as done.
fn saved(line: &str) -> Option<u64> {
    line.strip_prefix("saved ")?.parse().ok()
}

/// Kills ranks in one run, and returns the last save that a rank reported as done.
fn run_until_killed(name: &str, folder: &Path, random: &mut Random, trial: usize) -> u64 {
    let mut variables = vec![(FOLDER, folder.to_str().unwrap().to_owned())];
    let victim = random.below(WORLD_SIZE);
    let at_a_byte = trial % 3 == 2;
    if at_a_byte {
        // The smallest amount that a rank writes: its own rows, of which some ranks have one fewer.
        let bytes = SHAPE[0] / WORLD_SIZE * SHAPE[1] * 4;
        variables.extend([(VICTIM, victim.to_string()), (LIMIT, random.below(bytes).to_string())]);
    }
    let mut ranks = Ranks::spawn_with(name, WORLD_SIZE, &variables);
    let mut told = 0;
    if !at_a_byte {
        for _ in 0..1 + random.below(8 * WORLD_SIZE) + if trial == 0 { 4 * WORLD_SIZE } else { 0 } {
            told = told.max(saved(&ranks.next("it saves").1).unwrap_or(0));
        }
        // A random time within a save, not synchronized with the ranks.
        std::thread::park_timeout(Duration::from_micros(random.below(8000) as u64));
        let all = trial % 3 == 1;
        for (rank, child) in ranks.children.iter_mut().enumerate() {
            if all || rank == victim {
                child.kill().unwrap();
            }
        }
        if all {
            return told;
        }
    }
    for rank in (0..WORLD_SIZE).filter(|rank| *rank != victim) {
        let words = ranks.last_words(rank, patience(20)).unwrap();
        told = words.iter().filter_map(|line| saved(line)).fold(told, u64::max);
    }
    assert!(ranks.outcome(victim).is_err(), "the victim was to be killed");
    told
}

/// Kills ranks in many runs, and checks all checkpoints after each run.
fn kill_again_and_again(name: &str, trials: usize) {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    let folder = tempfile::tempdir().unwrap();
    let (mut before, mut interrupted) = (0, 0);
    for trial in 0..trials {
        let what = format!("trial {trial}, seed {seed}");
        let told = run_until_killed(name, folder.path(), &mut random, trial);
        let latest = assert_whole(folder.path(), &what);
        assert!(latest >= told.max(before), "{latest} is the latest, {told} was saved and {before} was there before; {what}");
        before = latest;
        let names = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        interrupted += usize::from(names.into_iter().any(|name| name.starts_with(".step-")));
    }
    assert!(before > trials as u64 / 4, "only {before} saves were done, seed {seed}");
    assert!(interrupted >= trials / 4, "only {interrupted} runs were killed in a save, seed {seed}");
    // The next save removes the remains.
    save(&Communicator::local(1).unwrap()[0], folder.path(), before + 1, before + 1, None).unwrap();
    let names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.len() == KEPT && names.iter().all(|name| name.starts_with("step-")), "{names:?}");
    println!("{trials} runs were killed, {interrupted} of them in a save, and {before} saves were done");
}

#[test]
fn a_rank_killed_while_saving_leaves_whole_checkpoints() {
    let name = "checkpoint::kills::a_rank_killed_while_saving_leaves_whole_checkpoints";
    if is_rank_of(name) {
        return rank_that_saves(false);
    }
    kill_again_and_again(name, 120);
}

#[test]
fn a_rank_that_is_killed_during_a_save_in_the_background_leaves_whole_checkpoints() {
    let name = "checkpoint::kills::a_rank_that_is_killed_during_a_save_in_the_background_leaves_whole_checkpoints";
    if is_rank_of(name) {
        return rank_that_saves(true);
    }
    kill_again_and_again(name, 40);
}
