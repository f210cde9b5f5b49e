//! Collectives on serialisable values.
#![cfg(feature = "serde")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::ranks::{Wiring, threads, threads_with};

use collectives::{Config, Error};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Shape {
    Nothing,
    Named(String),
    Nested { sides: Vec<f64>, inner: Option<Box<Shape>> },
}

/// A value of another length on each rank.
fn shape(rank: usize) -> Shape {
    match rank % 3 {
        0 => Shape::Nothing,
        1 => Shape::Named("x".repeat(rank * 1000)),
        _ => Shape::Nested { sides: vec![0.5; rank], inner: Some(Box::new(shape(rank - 1))) },
    }
}

#[test]
fn objects_of_any_length_go_everywhere() {
    for wiring in Wiring::ALL {
        for ranks in [1, 2, 5] {
            threads(wiring, ranks, |comm| {
                let me = comm.rank();
                let all: Vec<Shape> = (0..ranks).map(shape).collect();
                assert_eq!(comm.all_gather_object(&shape(me)).unwrap(), all);
                let root = ranks - 1;
                assert_eq!(comm.gather_object(&shape(me), root).unwrap(), (me == root).then(|| all.clone()));
                let given = (me == root).then(|| shape(7));
                assert_eq!(comm.broadcast_object(given.as_ref(), root).unwrap(), shape(7));
                let given = (me == root).then_some(&all[..]);
                assert_eq!(comm.scatter_object(given, root).unwrap(), shape(me));
            });
        }
    }
}

#[test]
fn objects_that_are_too_large_are_refused_by_everyone_and_the_communicator_lives_on() {
    let mut config = Config::default();
    config.object_limit_bytes = 1000;
    threads_with(
        3,
        |_| collectives::Communicator::builder().config(config.clone()),
        |comm| {
            let text = "y".repeat(if comm.rank() == 1 { 2000 } else { 1 });
            for error in [
                comm.all_gather_object(&text).map(drop).unwrap_err(),
                comm.gather_object(&text, 0).map(drop).unwrap_err(),
                comm.broadcast_object((comm.rank() == 1).then_some(&text), 1).map(drop).unwrap_err(),
                comm.scatter_object((comm.rank() == 1).then_some(&[text.clone(), text.clone(), text.clone()][..]), 1)
                    .map(drop)
                    .unwrap_err(),
            ] {
                assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains("1000 B"), "{error}");
            }
            assert_eq!(comm.all_gather_object(&comm.rank()).unwrap(), [0, 1, 2]);
        },
    );
}

#[test]
fn an_object_of_another_type_is_named_with_its_sender() {
    threads(Wiring::Shm, 2, |comm| {
        let error = match comm.rank() {
            0 => comm.all_gather_object(&"a text that is no number".to_owned()).map(drop).unwrap_err(),
            _ => comm.all_gather_object(&[u64::MAX; 2]).map(drop).unwrap_err(),
        };
        assert!(matches!(error, Error::Protocol { .. }) && error.to_string().contains("rank "), "{error}");
    });
}
