//! Parameters with the same name in a checkpoint are refused on every rank, before anything is written: a rank's part
//! of one could be mistaken for a copy of another rank's part of the other.

use std::path::Path;

use collectives::{Communicator, Error};
use collectives_train::checkpoint::{Checkpoint, Piece, Writer};
use collectives_train::{FullySharded, FullyShardedOptions, Options, Parameter, ShardedOptimizer, Unit};

use crate::common::ranks::{Wiring, threads};

/// Creates an optimiser with both parameters in one bucket: each of two ranks has one of them.
fn optimiser(comm: &Communicator, names: [&str; 2]) -> ShardedOptimizer {
    let parameters = names.map(|name| Parameter::new::<f32>(name, &[4])).to_vec();
    ShardedOptimizer::new(comm, parameters, Options::default()).unwrap()
}

/// Returns the error of a save that must fail, after a check that it left nothing behind.
fn refused<'a>(comm: &'a Communicator, directory: &Path, add: impl FnOnce(&mut Writer<'a>)) -> String {
    let mut writer = Writer::new(comm, directory);
    add(&mut writer);
    let error = writer.commit(1).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    comm.barrier().unwrap();
    assert_eq!(std::fs::read_dir(directory).unwrap().count(), 0);
    comm.barrier().unwrap();
    error.to_string()
}

#[test]
fn parameters_of_one_name_are_refused_and_named_on_every_rank() {
    for (wiring, world_size) in [(Wiring::Shm, 1), (Wiring::Shm, 2), (Wiring::Tcp, 3)] {
        let folder = tempfile::tempdir().unwrap();
        threads(wiring, world_size, |comm| {
            let model = optimiser(comm, ["weight", "weight"]);
            let state: Vec<Vec<f32>> = model.shard_lens().map(|len| vec![comm.rank() as f32; len]).collect();
            let error = refused(comm, folder.path(), |writer| {
                writer.shares("mean", &model, state.iter().map(Vec::as_slice));
            });
            assert!(error.contains("state \"mean\": two parameters are named \"mean.weight\""), "{error}");
            // With different names each is saved, and state saved under one name is not read for both.
            let named = optimiser(comm, ["weight", "bias"]);
            let mut writer = Writer::new(comm, folder.path());
            writer.shares("mean", &named, state.iter().map(Vec::as_slice));
            writer.commit(1).unwrap();
            let checkpoint = Checkpoint::resume(comm, folder.path()).unwrap().unwrap();
            let mut read: Vec<Vec<f32>> = state.iter().map(|share| vec![9.0; share.len()]).collect();
            let error = checkpoint.read_shares("mean", &model, read.iter_mut().map(Vec::as_mut_slice)).unwrap_err().to_string();
            assert!(error.contains("read_shares") && error.contains("two parameters are named \"mean.weight\""), "{error}");
            assert!(read.concat().iter().all(|x| *x == 9.0), "nothing was read");
        });
    }
}

#[test]
fn names_of_units_and_parameters_that_come_to_the_same_are_refused() {
    let unit = |name: &str, parameter: &str| Unit::new(name, vec![Parameter::new::<f32>(parameter, &[3])]);
    for (units, name) in [
        (vec![unit("a.b", "c"), unit("a", "b.c")], "\"model.a.b.c\""),
        (vec![unit("layer", "weight"), unit("head", "weight"), unit("layer", "weight")], "\"model.layer.weight\""),
    ] {
        let folder = tempfile::tempdir().unwrap();
        threads(Wiring::Shm, 2, |comm| {
            let model = FullySharded::new(comm, units.clone(), FullyShardedOptions::default()).unwrap();
            let state: Vec<Vec<f32>> = model.shard_lens().map(|len| vec![1.0; len]).collect();
            let error = refused(comm, folder.path(), |writer| {
                writer.shares("model", &model, state.iter().map(Vec::as_slice));
            });
            assert!(error.contains(&format!("two parameters are named {name}")), "{error}");
        });
    }
}

#[test]
fn a_name_of_shares_is_nobody_elses() {
    let folder = tempfile::tempdir().unwrap();
    threads(Wiring::Shm, 2, |comm| {
        let (model, other) = (optimiser(comm, ["weight", "bias"]), optimiser(comm, ["head", "bias"]));
        let state: Vec<Vec<f32>> = model.shard_lens().map(|len| vec![1.0; len]).collect();
        let shares = || state.iter().map(Vec::as_slice);
        let errors = [
            refused(comm, folder.path(), |writer| {
                writer.shares("mean", &model, shares()).shares("mean", &other, shares());
            }),
            refused(comm, folder.path(), |writer| {
                writer.shares("mean", &model, shares()).tensor("mean.bias", &[4], Piece::Flat(0..0), &[0.0_f32; 0]);
            }),
            refused(comm, folder.path(), |writer| {
                writer.tensor("mean.bias", &[4], Piece::Flat(0..0), &[0.0_f32; 0]).shares("mean", &model, shares());
            }),
        ];
        errors.iter().for_each(|error| assert!(error.contains("tensor \"mean.bias\"") && error.contains("its own prefix"), "{error}"));
        let mut writer = Writer::new(comm, folder.path());
        writer.shares("mean", &model, shares()).shares("other mean", &other, shares());
        writer.commit(1).unwrap();
    });
}
