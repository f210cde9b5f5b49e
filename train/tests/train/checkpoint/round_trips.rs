//! n ranks save and m ranks load the same bits, with any division of the tensors among the ranks.

use std::collections::BTreeSet;

use collectives::Communicator;
use collectives_train::checkpoint::{Checkpoint, Piece, Writer};
use safetensors::SafeTensors;

use super::tensors::{Tensor, load, save, tensors};
use crate::common::random::Random;
use crate::common::ranks::{Wiring, processes, threads};

/// Returns every tensor with its pieces, for each rank.
fn divided(random: &mut Random, tensors: &[Tensor], ranks: usize) -> Vec<Vec<(Tensor, Vec<Piece>)>> {
    let mut held = vec![Vec::new(); ranks];
    for tensor in tensors {
        for (held, pieces) in held.iter_mut().zip(tensor.divide(random, ranks)) {
            held.push((tensor.clone(), pieces));
        }
    }
    held
}

fn round_trip(random: &mut Random, wiring: Wiring, savers: usize, loaders: usize, seed: u64) {
    let folder = tempfile::tempdir().unwrap();
    let tensors = tensors(random);
    let held = divided(random, &tensors, savers);
    threads(wiring, savers, |comm| save(comm, folder.path(), 5, &held[comm.rank()]).unwrap());
    let wanted = divided(random, &tensors, loaders);
    threads(wiring, loaders, |comm| {
        let checkpoint = Checkpoint::resume(comm, folder.path()).unwrap().unwrap();
        assert_eq!((checkpoint.step(), checkpoint.world_size()), (Some(5), Some(savers)));
        checkpoint.check().unwrap();
        for (tensor, pieces) in &wanted[comm.rank()] {
            assert_eq!((checkpoint.dtype(&tensor.name).unwrap(), checkpoint.shape(&tensor.name).unwrap()), (tensor.dtype, &*tensor.shape));
            for piece in pieces {
                let loaded = load(&checkpoint, tensor, piece).unwrap();
                assert!(loaded == tensor.piece(piece), "{piece} of {} from {savers} to {loaders}, seed {seed}", tensor.name);
            }
        }
    });
}

#[test]
fn what_some_ranks_save_any_number_of_ranks_loads() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for savers in 1..=4 {
        for loaders in 1..=4 {
            for wiring in [Wiring::Shm, Wiring::Tcp] {
                round_trip(&mut random, wiring, savers, loaders, seed);
            }
        }
    }
}

#[test]
fn processes_save_and_load() {
    let variable = "COLLECTIVES_TEST_FOLDER";
    let name = "checkpoint::round_trips::processes_save_and_load";
    // The ranks get the folder by broadcast; rank 0 creates it.
    processes(name, Wiring::Pairs, 3, |comm| {
        let mut path = std::env::temp_dir().join(format!("{variable}-{}", std::process::id())).into_os_string().into_encoded_bytes();
        path.resize(200, b' ');
        comm.broadcast(&mut path, 0)?;
        let path = std::path::PathBuf::from(String::from_utf8(path).unwrap().trim_end());
        let random = &mut Random(7);
        let all = tensors(random);
        save(comm, &path, 1, &divided(random, &all, 3)[comm.rank()])?;
        let checkpoint = Checkpoint::resume(comm, &path)?.unwrap();
        for tensor in &all {
            assert!(load(&checkpoint, tensor, &Piece::Whole)? == tensor.bytes, "{}", tensor.name);
        }
        comm.barrier()?;
        if comm.rank() == 0 {
            std::fs::remove_dir_all(&path).unwrap();
        }
        Ok(())
    });
}

#[test]
fn every_file_is_one_that_other_readers_take() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    let random = &mut random;
    let folder = tempfile::tempdir().unwrap();
    let tensors = tensors(random);
    let held = divided(random, &tensors, 3);
    threads(Wiring::Shm, 3, |comm| save(comm, folder.path(), 5, &held[comm.rank()]).unwrap());
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder.path().join("step-00000005")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            assert_eq!(path.file_name().unwrap(), "checkpoint.json");
            continue;
        }
        let bytes = std::fs::read(&path).unwrap();
        for (key, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let (name, piece) = key.split_once('#').map_or((&*key, None), |(name, piece)| (name, Some(piece)));
            let tensor = tensors.iter().find(|tensor| tensor.name == name).unwrap();
            let piece = piece.map_or(Piece::Whole, parsed);
            assert!(view.data() == tensor.piece(&piece), "{key}, seed {seed}");
            assert_eq!(view.shape().iter().product::<usize>() * tensor.dtype.size_bytes(), view.data().len());
            // Aligned as the format requires, so that a file can be mapped.
            assert_eq!(view.data().as_ptr().addr().wrapping_sub(bytes.as_ptr().addr()) % tensor.dtype.size_bytes(), 0, "{key}");
            found.push((name.to_owned(), view.data().len()));
        }
    }
    for tensor in &tensors {
        let bytes: usize = found.iter().filter(|(name, _)| *name == tensor.name).map(|(_, bytes)| bytes).sum();
        assert_eq!(bytes, tensor.bytes.len(), "{} is written once", tensor.name);
        assert!(found.iter().any(|(name, _)| *name == tensor.name));
    }
}

/// Parses the piece in a name: `start-end` or `dimension:start-end`.
fn parsed(text: &str) -> Piece {
    let range = |text: &str| {
        let (start, end) = text.split_once('-').unwrap();
        start.parse().unwrap()..end.parse().unwrap()
    };
    match text.split_once(':') {
        Some((dimension, text)) => Piece::Along { dimension: dimension.parse().unwrap(), range: range(text) },
        None => Piece::Flat(range(text)),
    }
}

#[test]
fn steps_words_and_names_come_back_and_old_checkpoints_go() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("made").join("here");
    assert!(Checkpoint::latest(&directory).unwrap().is_none());
    assert!(Checkpoint::resume(&Communicator::local(1).unwrap()[0], &directory).unwrap().is_none());
    threads(Wiring::Shm, 2, |comm| {
        for step in [3, 8, 100_000_000, 100_000_007] {
            let mut writer = Writer::new(comm, &directory);
            let number = [step];
            writer.tensor("b", &[1], Piece::Whole, &number).tensor("a", &[], Piece::Whole, &[true]).keep(2);
            writer.metadata("epoch", "4").metadata(format!("rank {}", comm.rank()), "here \"\n");
            let path = writer.commit(step).unwrap();
            assert!(path.starts_with(&directory));
        }
        // Ranks continue as soon as the checkpoint exists; rank 0 then removes old ones.
        comm.barrier().unwrap();
    });
    assert_eq!(Checkpoint::steps(&directory).unwrap(), [100_000_000, 100_000_007]);
    let checkpoint = Checkpoint::latest(&directory).unwrap().unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"]);
    let words: BTreeSet<_> = checkpoint.metadata().iter().map(|(key, value)| (&**key, &**value)).collect();
    assert_eq!(words, BTreeSet::from([("epoch", "4"), ("rank 0", "here \"\n"), ("rank 1", "here \"\n")]));
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 2);
}
