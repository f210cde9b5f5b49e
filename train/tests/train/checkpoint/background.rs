//! Saves in the background: they contain the values at the time of the call, and a failure reaches every rank.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use collectives::{Communicator, Error, ReduceOp, Result};
use collectives_train::checkpoint::{Checkpoint, Piece, Saver, Writer};

use crate::common::random::Random;
use crate::common::ranks::{Wiring, threads};

/// The values of a tensor in a step, computed without knowledge of ranks.
fn values(seed: u64, step: u64, len: usize) -> Vec<u32> {
    let mut random = Random(seed ^ step << 32);
    (0..len).map(|_| random.next() as u32).collect()
}

/// Checks that the sum over all ranks is right, which shows that the communicator still works.
fn assert_works(comm: &Communicator) {
    let mut one = [1_u32];
    comm.all_reduce(&mut one, ReduceOp::Sum).unwrap();
    assert_eq!(one, [comm.world_size() as u32]);
}

/// Begins to save a tensor that all ranks have.
fn begin(saver: &mut Saver, comm: &Communicator, directory: &Path, step: u64) -> Result<()> {
    let whole = [step as f32; 3];
    let mut writer = Writer::new(comm, directory);
    writer.tensor("whole", &[3], Piece::Whole, &whole);
    saver.save(writer, step)
}

fn assert_saved(directory: &Path, step: u64) {
    let checkpoint = Checkpoint::latest(directory).unwrap().unwrap();
    checkpoint.check().unwrap();
    assert_eq!(checkpoint.step(), Some(step));
    assert_eq!(checkpoint.read_vec::<f32>("whole", &[3], Piece::Whole).unwrap(), [step as f32; 3]);
}

#[test]
fn values_that_change_after_the_call_are_saved_as_they_were_and_any_number_of_ranks_loads_them() {
    let (_, seed) = Random::new();
    println!("seed {seed}");
    const LAST: u64 = 6;
    for (wiring, ranks, loading) in [(Wiring::Shm, 1, 3), (Wiring::Tcp, 2, 1), (Wiring::Shm, 3, 2), (Wiring::Pairs, 3, 4)] {
        let folder = tempfile::tempdir().unwrap();
        threads(wiring, ranks, |comm| {
            let mut saver = Saver::new(comm).unwrap();
            assert!(saver.is_done() && saver.wait().unwrap().is_none());
            let rows = Piece::part(0, 7, comm.rank(), ranks);
            let Piece::Along { range, .. } = rows.clone() else { unreachable!() };
            for step in 0..=LAST {
                let mut whole = values(seed, step, 5);
                let mut own = values(seed, step, 7 * 11)[range.start * 11..range.end * 11].to_vec();
                let mut writer = Writer::new(comm, folder.path());
                writer.tensor("whole", &[5], Piece::Whole, &whole).tensor("rows", &[7, 11], rows.clone(), &own);
                writer.tensor("empty", &[0, 4], Piece::Whole, &[0_u8; 0]).metadata("step", step.to_string()).keep(2);
                saver.save(writer, step).unwrap();
                whole.fill(0);
                own.fill(u32::MAX);
                assert_works(comm);
            }
            assert_eq!(saver.wait().unwrap(), Some(folder.path().join("step-00000006")));
            assert!(saver.is_done() && saver.wait().unwrap().is_none());
        });
        assert_eq!(Checkpoint::steps(folder.path()).unwrap(), [LAST - 1, LAST]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing else is left");
        threads(wiring, loading, |comm| {
            for step in [LAST - 1, LAST] {
                let checkpoint = Checkpoint::open(folder.path().join(format!("step-{step:08}"))).unwrap();
                assert_eq!((checkpoint.world_size(), &*checkpoint.metadata()["step"]), (Some(ranks), &*step.to_string()));
                assert_eq!(checkpoint.read_vec::<u32>("whole", &[5], Piece::Whole).unwrap(), values(seed, step, 5));
                let all = values(seed, step, 7 * 11);
                let own = Piece::part(0, 7, comm.rank(), loading);
                let Piece::Along { range, .. } = own.clone() else { unreachable!() };
                let read = checkpoint.read_vec::<u32>("rows", &[7, 11], own).unwrap();
                assert_eq!(read, all[range.start * 11..range.end * 11], "seed {seed}, step {step}");
                assert!(checkpoint.read_vec::<u8>("empty", &[0, 4], Piece::Whole).unwrap().is_empty());
            }
        });
    }
}

#[test]
fn the_failure_of_one_rank_reaches_all_at_the_next_save_and_the_one_after_it_saves() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a file");
    fs::write(&file, "not a folder").unwrap();
    let directory = folder.path().join("checkpoints");
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        for (victim, wrong) in [(0, file.join("below")), (1, file.clone()), (2, "/proc/no-such-folder".into())] {
            threads(wiring, 3, |comm| {
                let mut saver = Saver::new(comm).unwrap();
                let given = if comm.rank() == victim { &wrong } else { &directory };
                begin(&mut saver, comm, &directory, 1).unwrap();
                begin(&mut saver, comm, given, 2).unwrap();
                assert_works(comm);
                let error = begin(&mut saver, comm, &directory, 3).unwrap_err();
                assert!(matches!(error, Error::Io { .. }), "{error}");
                let error = error.to_string();
                assert!(error.contains(wrong.to_str().unwrap()), "{error}");
                assert!(comm.rank() == victim || error.contains(&format!("on rank {victim}")), "{error}");
                // It is reported once, and the failed call saved nothing.
                assert!(saver.wait().unwrap().is_none());
                comm.barrier().unwrap();
                assert_saved(&directory, 1);
                comm.barrier().unwrap();
                begin(&mut saver, comm, &directory, 4).unwrap();
                assert_eq!(saver.wait().unwrap(), Some(directory.join("step-00000004")));
                // If only some ranks ask, all still fail at the next call.
                begin(&mut saver, comm, given, 5).unwrap();
                if comm.rank() == 1 {
                    saver.wait().unwrap_err();
                }
                let error = begin(&mut saver, comm, &directory, 5);
                assert!(comm.rank() == 1 || error.is_err());
                if comm.rank() == 1 {
                    assert!(error.unwrap_err().to_string().contains("on rank 0"));
                }
                drop(saver);
                comm.barrier().unwrap();
                assert_saved(&directory, 4);
            });
            fs::remove_dir_all(&directory).unwrap();
        }
    }
}

#[test]
fn a_mistake_is_an_error_of_the_call_itself_on_every_rank_and_disturbs_no_running_save() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path();
    threads(Wiring::Shm, 3, |comm| {
        let (mut saver, mut other) = (Saver::new(comm).unwrap(), Saver::new(comm).unwrap());
        begin(&mut saver, comm, directory, 1).unwrap();
        let too_short = vec![1.0_f32; 3 - comm.rank() / 2];
        let mut writer = Writer::new(comm, directory);
        writer.tensor("whole", &[3], Piece::Whole, &too_short);
        let error = saver.save(writer, 2).unwrap_err().to_string();
        assert!(error.contains("2 elements were passed") && (comm.rank() == 2 || error.contains("on rank 2")), "{error}");
        let mut writer = Writer::new(comm, directory);
        writer.tensor("part", &[3], Piece::Flat(0..1), &[1.0_f32]);
        let error = saver.save(writer, 2).unwrap_err().to_string();
        assert!(error.contains("elements 1..3 of the flattened tensor are held by no rank"), "{error}");
        let error = begin(&mut saver, comm, directory, 2 + comm.rank() as u64 / 2).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("Saver::save(3)"), "{error}");
        let chosen = if comm.rank() == 1 { &mut other } else { &mut saver };
        let error = begin(chosen, comm, directory, 2).unwrap_err();
        assert!(error.is_mismatch(), "{error}");
        let error = if comm.rank() == 1 {
            let mut writer = Writer::new(comm, directory);
            writer.tensor("whole", &[3], Piece::Whole, &[2.0_f32; 3]);
            writer.commit(2).unwrap_err()
        } else {
            begin(&mut saver, comm, directory, 2).unwrap_err()
        };
        assert!(error.is_mismatch() && error.to_string().contains("Writer::commit(2)"), "{error}");
        // A step that is not after the latest one is found by the thread.
        begin(&mut saver, comm, directory, 0).unwrap();
        let error = saver.wait().unwrap_err().to_string();
        assert!(error.contains("step 0 is not after step-00000001"), "{error}");
        comm.barrier().unwrap();
        assert_saved(directory, 1);
    });
}

#[test]
fn a_writer_of_other_ranks_than_those_of_the_saver_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    threads(Wiring::Shm, 4, |comm| {
        let mut saver = Saver::new(comm).unwrap();
        let reversed = comm.split(Some(0), -(comm.rank() as i64)).unwrap().unwrap();
        let half = comm.split(Some(comm.rank() as u32 / 2), 0).unwrap().unwrap();
        for wrong in [&reversed, &half] {
            let error = begin(&mut saver, wrong, folder.path(), 1).unwrap_err();
            assert!(error.to_string().contains("the saver was made for rank"), "{error}");
        }
        // The halves have the same sizes and numbers, and some other members.
        let mut of_half = Saver::new(&half).unwrap();
        let crossed = comm.split(Some(u32::from([0, 3].contains(&comm.rank()))), 0).unwrap().unwrap();
        let error = begin(&mut of_half, &crossed, folder.path(), 1).unwrap_err();
        assert!(error.is_mismatch(), "{error}");
        begin(&mut saver, comm, folder.path(), 1).unwrap();
        saver.wait().unwrap();
    });
    assert_saved(folder.path(), 1);
}

#[test]
fn a_saver_that_is_dropped_finishes_its_save() {
    for ranks in 1..4 {
        let folder = tempfile::tempdir().unwrap();
        let all = threads(Wiring::Shm, ranks, |comm| {
            let mut saver = Saver::new(comm).unwrap();
            begin(&mut saver, comm, folder.path(), 3).unwrap();
            drop(saver);
            comm.barrier().unwrap();
            assert_saved(folder.path(), 3);
        });
        assert_eq!(all.len(), ranks);
    }
}

#[test]
fn the_same_step_saved_again_replaces_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    threads(Wiring::Shm, 2, |comm| {
        let mut saver = Saver::new(comm).unwrap();
        for version in 0..5_u16 {
            let mut writer = Writer::new(comm, path);
            writer.tensor("version", &[2], Piece::Flat(comm.rank()..comm.rank() + 1), std::slice::from_ref(&version));
            saver.save(writer, 7).unwrap();
            assert_eq!(saver.wait().unwrap(), Some(path.join("step-00000007")));
            let latest = Checkpoint::resume(comm, path).unwrap().unwrap();
            assert_eq!(latest.read_vec::<u16>("version", &[2], Piece::Whole).unwrap(), [version; 2]);
            comm.barrier().unwrap();
        }
    });
    assert_eq!(fs::read_dir(path).unwrap().count(), 1);
}

#[test]
fn only_a_rank_that_writes_a_tensor_reads_it() {
    const TENSORS: usize = 9;
    let reads: Vec<AtomicUsize> = (0..TENSORS).map(|_| AtomicUsize::new(0)).collect();
    let folder = tempfile::tempdir().unwrap();
    threads(Wiring::Shm, 3, |comm| {
        let mut saver = Saver::new(comm).unwrap();
        for step in 1..3 {
            let mut writer = Writer::new(comm, folder.path());
            for (number, reads) in reads.iter().enumerate() {
                writer.tensor_with(&format!("tensor {number}"), &[number, 2], Piece::Whole, move || {
                    reads.fetch_add(1, Ordering::SeqCst);
                    Ok(vec![number as i64; 2 * number])
                });
            }
            if step == 1 { writer.commit(step).map(drop) } else { saver.save(writer, step) }.unwrap();
        }
        saver.wait().unwrap();
    });
    assert!(reads.iter().all(|reads| reads.load(Ordering::SeqCst) == 2), "{reads:?}");
    let checkpoint = Checkpoint::latest(folder.path()).unwrap().unwrap();
    assert_eq!(fs::read_dir(folder.path().join("step-00000002")).unwrap().count(), 4, "every rank wrote a file");
    for number in 0..TENSORS {
        let values: Vec<i64> = checkpoint.read_vec(&format!("tensor {number}"), &[number, 2], Piece::Whole).unwrap();
        assert_eq!(values, vec![number as i64; 2 * number]);
    }
}

#[test]
fn a_tensor_that_cannot_be_read_fails_the_save_on_every_rank_and_leaves_nothing() {
    type Read = fn() -> Result<Vec<u8>>;
    let mistakes: [(Read, &str); 3] = [
        (|| Err(Error::argument("copy", "the device is gone")), "copy: the device is gone"),
        (|| Ok(vec![1; 3]), "tensor \"bad\": `read` returned 3 elements, but the piece has 2"),
        (|| panic!("a panic on purpose"), "tensor \"bad\": `read` panicked"),
    ];
    let folder = tempfile::tempdir().unwrap();
    threads(Wiring::Shm, 3, |comm| {
        let mut saver = Saver::new(comm).unwrap();
        for (read, words) in &mistakes {
            for in_background in [false, true] {
                let mut writer = Writer::new(comm, folder.path());
                writer.tensor("good", &[2], Piece::Whole, &[1.0_f32, 2.0]);
                if comm.rank() == 1 {
                    writer.tensor_with("bad", &[2], Piece::Whole, read);
                }
                let failed = match in_background {
                    false => writer.commit(1).map(drop),
                    true => saver.save(writer, 1).and_then(|()| saver.wait().map(drop)),
                };
                let error = failed.unwrap_err().to_string();
                assert!(error.contains(words) && (comm.rank() == 1 || error.contains("on rank 1")), "{error}");
                comm.barrier().unwrap();
                assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
                comm.barrier().unwrap();
            }
        }
        let mut writer = Writer::new(comm, folder.path());
        writer.tensor_with("bad", &[2], Piece::Flat(1..3), || Ok(vec![0_u8; 2]));
        let error = writer.commit(1).unwrap_err().to_string();
        assert!(error.contains("there is no part"), "{error}");
        let mut writer = Writer::new(comm, folder.path());
        writer.refuse(Error::argument("layer", "a type that is not supported"));
        let error = writer.commit(1).unwrap_err().to_string();
        assert_eq!(error, "layer: a type that is not supported");
    });
}
