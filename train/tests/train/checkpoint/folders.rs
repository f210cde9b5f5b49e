//! Folders that do not exist or contain something else: an error on every rank, and the next save elsewhere works.

use std::fs;
use std::path::Path;

use collectives::{Communicator, Error, Result};
use collectives_train::checkpoint::{Checkpoint, Piece, Writer};
use collectives_train::{FullySharded, FullyShardedOptions, Mesh, Parameter, Unit};

use crate::common::ranks::{Wiring, alone_in_a_process, threads};

/// Saves one tensor, of which each rank has a part.
fn save(comm: &Communicator, directory: &Path, step: u64) -> Result<()> {
    let part = Piece::part(0, 5, comm.rank(), comm.world_size());
    let values = vec![step as f32; part.len(&[5])?];
    let mut writer = Writer::new(comm, directory);
    writer.tensor("a", &[5], part, &values);
    writer.commit(step).map(drop)
}

/// Returns the step of the latest checkpoint, after a check that its values are those of the step.
fn latest(comm: &Communicator, directory: &Path) -> Result<Option<u64>> {
    let Some(checkpoint) = Checkpoint::resume(comm, directory)? else { return Ok(None) };
    let values: Vec<f32> = checkpoint.read_vec("a", &[5], Piece::Whole)?;
    assert_eq!(Some(values[3] as u64), checkpoint.step());
    Ok(checkpoint.step())
}

#[test]
fn a_directory_that_is_a_file_or_below_one_is_an_error_on_every_rank() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "not a folder").unwrap();
        threads(wiring, 3, |comm| {
            for wrong in [file.clone(), file.join("below"), file.join("far/below"), "/proc/no-such-folder".into()] {
                let error = save(comm, &wrong, 1).unwrap_err();
                assert!(matches!(error, Error::Io { .. }), "{wrong:?}: {error}");
                assert!(comm.rank() == 0 || error.to_string().contains("on rank 0"), "{error}");
                assert!(error.to_string().contains(wrong.to_str().unwrap()), "{error}");
            }
            for wrong in [&file, &file.join("below")] {
                let error = latest(comm, wrong).unwrap_err().to_string();
                assert!(error.contains("file") && (comm.rank() == 0 || error.contains("on rank 0")), "{error}");
            }
            assert_eq!(latest(comm, &folder.path().join("absent")).unwrap(), None);
            save(comm, &folder.path().join("made/below"), 1).unwrap();
            assert_eq!(latest(comm, &folder.path().join("made/below")).unwrap(), Some(1));
        });
        assert_eq!(fs::read_to_string(&file).unwrap(), "not a folder");
    }
}

#[test]
fn a_folder_without_a_name_is_the_one_in_which_the_process_works() {
    alone_in_a_process("checkpoint::folders::a_folder_without_a_name_is_the_one_in_which_the_process_works", || {
        let folder = tempfile::tempdir().unwrap();
        std::env::set_current_dir(folder.path()).unwrap();
        let directory = Path::new("checkpoint").parent().unwrap();
        threads(Wiring::Shm, 2, |comm| {
            assert_eq!(latest(comm, directory).unwrap(), None);
            comm.barrier().unwrap();
            save(comm, directory, 4).unwrap();
            assert_eq!(latest(comm, directory).unwrap(), Some(4));
        });
        assert_eq!(Checkpoint::latest("").unwrap().unwrap().step(), Some(4));
        assert!(folder.path().join("step-00000004").is_dir());
        std::env::set_current_dir("/").unwrap();
    });
}

#[test]
fn what_has_the_name_of_a_checkpoint_and_is_none_is_told_to_all_and_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    threads(Wiring::Shm, 2, |comm| save(comm, path, 3).unwrap());
    fs::create_dir(path.join("step-00000005")).unwrap();
    fs::write(path.join("step-00000007"), "a file").unwrap();
    for (step, words) in [(7, "step-00000007"), (5, "step-00000005")] {
        threads(Wiring::Shm, 2, |comm| {
            let error = latest(comm, path).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
            let error = save(comm, path, step).unwrap_err().to_string();
            assert!(error.contains(&format!("step {step} is not after")), "{error}");
        });
        let occupied = path.join(format!("step-{step:08}"));
        if step == 7 { fs::remove_file(occupied) } else { fs::remove_dir(occupied) }.unwrap();
    }
    threads(Wiring::Shm, 2, |comm| {
        assert_eq!(latest(comm, path).unwrap(), Some(3));
        comm.barrier().unwrap();
        save(comm, path, u64::MAX).unwrap();
        assert_eq!(latest(comm, path).unwrap(), Some(u64::MAX));
    });
}

#[test]
fn a_step_that_is_saved_again_replaces_what_was_saved_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let saved = |comm: &Communicator, scale: f32| {
        let part = Piece::part(0, 5, comm.rank(), comm.world_size());
        let values = vec![scale; part.len(&[5])?];
        let mut writer = Writer::new(comm, path);
        writer.tensor("a", &[5], part, &values).keep(2);
        writer.commit(9)
    };
    threads(Wiring::Shm, 3, |comm| {
        save(comm, path, 8).unwrap();
        saved(comm, 0.5).unwrap();
        let replaced = Checkpoint::resume(comm, path).unwrap().unwrap();
        for scale in [1.0, 2.0, 3.0] {
            assert!(saved(comm, scale).unwrap().ends_with("step-00000009"));
            let latest = Checkpoint::resume(comm, path).unwrap().unwrap();
            assert_eq!(latest.read_vec::<f32>("a", &[5], Piece::Whole).unwrap(), [scale; 5]);
            comm.barrier().unwrap();
        }
        // Reading an open checkpoint returns its own values or an error: values of two saves are never mixed.
        let old = replaced.read_vec::<f32>("a", &[5], Piece::Whole);
        assert!(old.as_ref().is_err_and(|error| error.to_string().contains("step-00000009")), "{old:?}");
        comm.barrier().unwrap();
        let error = save(comm, path, 8).unwrap_err().to_string();
        assert!(error.contains("step 8 is not after step-00000009"), "{error}");
    });
    let mut left: Vec<_> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, ["step-00000008", "step-00000009"]);
}

#[test]
fn a_folder_that_goes_away_in_the_middle_is_an_error_of_reading_alone() {
    let folder = tempfile::tempdir().unwrap();
    threads(Wiring::Shm, 2, |comm| {
        save(comm, folder.path(), 1).unwrap();
        let checkpoint = Checkpoint::resume(comm, folder.path()).unwrap().unwrap();
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            fs::remove_dir_all(folder.path().join("step-00000001")).unwrap();
        }
        comm.barrier().unwrap();
        let mut values = [7.0_f32; 5];
        let error = checkpoint.read("a", &[5], Piece::Whole, &mut values).unwrap_err();
        assert!(matches!(error, Error::Io { .. }) && error.to_string().contains("step-00000001"), "{error}");
        assert_eq!(values, [7.0; 5]);
        save(comm, folder.path(), 1).unwrap();
    });
}

#[test]
fn one_copy_of_a_sharded_model_saves_and_all_load() {
    let folder = tempfile::tempdir().unwrap();
    let values: Vec<f32> = (0..7).map(|x| x as f32).collect();
    threads(Wiring::Shm, 4, |comm| {
        let mesh = Mesh::new(comm, &[("replicate", 2), ("shard", 2)]).unwrap();
        let shard = mesh.dimension("shard").unwrap();
        let model = || {
            FullySharded::new(shard, vec![Unit::new("layer", vec![Parameter::new::<f32>("weight", &[7])])], FullyShardedOptions::default())
        };
        let mut saved = model().unwrap();
        saved.load(0, 0, &values).unwrap();
        let own = saved.shard_range(0).unwrap();
        let (elements, within) = saved.layouts().next().unwrap().slots[0].overlap(&own);
        if mesh.coordinate("replicate").unwrap() == 0 {
            let mut writer = Writer::new(shard, folder.path());
            writer.tensor("weight", &[7], Piece::Flat(elements.clone()), &saved.shard::<f32>(0).unwrap()[within.clone()]);
            writer.commit(1).unwrap();
        }
        comm.barrier().unwrap();
        let checkpoint = Checkpoint::resume(comm, folder.path()).unwrap().unwrap();
        for (name, shape) in [("weight", &[8][..]), ("weight", &[7, 1]), ("bias", &[7])] {
            checkpoint.read(name, shape, Piece::Flat(elements.clone()), &mut vec![0.0_f32; elements.len()]).unwrap_err();
        }
        let (mut loaded, mut share) = (model().unwrap(), vec![0.0_f32; own.len()]);
        checkpoint.read("weight", &[7], Piece::Flat(elements), &mut share[within]).unwrap();
        loaded.load_shard(0, &share).unwrap();
        loaded.gather(0).unwrap();
        assert_eq!(loaded.parameter::<f32>(0, 0).unwrap(), values);
    });
}
