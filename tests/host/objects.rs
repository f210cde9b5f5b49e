//! Collectives on any serialisable value (feature `serde`): nested, empty, of unequal sizes, too large, and of the wrong type.

use std::collections::BTreeMap;

use crate::common::ranks::{Wiring, threads, threads_with};

use collectives::{Communicator, Config, Error, ReduceOp};
use serde::{Deserialize, Serialize};

/// A struct with many kinds of fields.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Report {
    host: String,
    loss: Option<f64>,
    shape: (u16, [i8; 3]),
    layers: BTreeMap<String, Vec<Layer>>,
    nothing: (),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Layer {
    Dense { inputs: u64, outputs: u64 },
    Dropout(f32),
    Identity,
}

/// Returns a value that differs between ranks: empty on rank 0, large on others, and not ASCII.
fn report(rank: usize) -> Report {
    let layer = |number: usize| match (rank + number) % 3 {
        0 => Layer::Dense { inputs: u64::MAX - number as u64, outputs: rank as u64 },
        1 => Layer::Dropout(0.1 * number as f32),
        _ => Layer::Identity,
    };
    Report {
        host: "höst 🚀 ".repeat(rank % 4 * 50),
        loss: (rank % 2 == 1).then_some(rank as f64 / 7.0),
        shape: (rank as u16, [-1, 0, rank as i8]),
        layers: (0..rank).map(|name| (name.to_string(), (0..name * 40).map(layer).collect())).collect(),
        nothing: (),
    }
}

/// Checks that a communicator still works on all ranks.
fn assert_usable(comm: &Communicator) {
    let mut x = [1_u32; 10];
    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
    assert_eq!(x, [comm.world_size() as u32; 10]);
}

#[test]
fn nested_values_of_unequal_sizes() {
    for wiring in Wiring::ALL {
        for ranks in [1, 2, 3, 5, 8] {
            threads(wiring, ranks, |comm| {
                let all: Vec<Report> = (0..ranks).map(report).collect();
                let mine = &all[comm.rank()];
                assert_eq!(comm.all_gather_object(mine).unwrap(), all);
                for root in 0..ranks {
                    let is_root = comm.rank() == root;
                    assert_eq!(comm.broadcast_object(is_root.then_some(mine), root).unwrap(), all[root]);
                    assert_eq!(comm.gather_object(mine, root).unwrap(), is_root.then(|| all.clone()));
                    assert_eq!(comm.scatter_object(is_root.then_some(&all[..]), root).unwrap(), *mine);
                }
                assert_usable(comm);
            });
        }
    }
}

#[test]
fn values_of_no_bytes_and_empty_lists() {
    for wiring in Wiring::ALL {
        threads(wiring, 3, |comm| {
            let root = comm.rank() == 1;
            assert_eq!(comm.all_gather_object(&()).unwrap(), [(); 3]);
            comm.broadcast_object(root.then_some(&()), 1).unwrap();
            assert_eq!(comm.gather_object(&(), 1).unwrap(), root.then(|| vec![(); 3]));
            comm.scatter_object(root.then_some(&[(); 3][..]), 1).unwrap();

            assert_eq!(comm.all_gather_object(&Vec::<u8>::new()).unwrap(), vec![Vec::<u8>::new(); 3]);
            // A value from one rank, and empty ones from the others.
            let mine = if root { "one".to_owned() } else { String::new() };
            assert_eq!(comm.all_gather_object(&mine).unwrap(), ["", "one", ""]);
            assert_eq!(comm.gather_object(&mine, 0).unwrap().is_some(), comm.rank() == 0);
            let lists = [vec![], vec![1_i64, -1], vec![]];
            assert_eq!(comm.scatter_object(root.then_some(&lists[..]), 1).unwrap(), lists[comm.rank()]);
        });
    }
}

#[test]
fn large_values() {
    for wiring in Wiring::ALL {
        threads(wiring, 3, |comm| {
            let text = |rank: usize| char::from(b'a' + rank as u8).to_string().repeat(if rank == 2 { 5 } else { 700_000 });
            assert_eq!(comm.all_gather_object(&text(comm.rank())).unwrap(), [text(0), text(1), text(2)]);
            assert_eq!(comm.broadcast_object((comm.rank() == 0).then_some(&text(0)), 0).unwrap(), text(0));
        });
    }
}

#[test]
fn values_that_are_too_large_are_refused_on_every_rank_alike() {
    for wiring in Wiring::ALL {
        let mut config = Config::default();
        config.object_limit_bytes = 1000;
        threads_with(
            3,
            |rank| wiring.builder_with(rank, config.clone()),
            |comm| {
                let is_root = comm.rank() == 2;
                // Too large together, though each alone is not.
                let part = "x".repeat(400);
                let whole = "x".repeat(1001);
                let refused = [
                    comm.all_gather_object(&part).map(drop),
                    comm.gather_object(&part, 2).map(drop),
                    comm.scatter_object(is_root.then_some(&[part.clone(), part.clone(), part.clone()][..]), 2).map(drop),
                    comm.broadcast_object(is_root.then_some(&whole), 2).map(drop),
                    // Only the root's is too large, which the others cannot know.
                    comm.all_gather_object(if is_root { &whole } else { &part }).map(drop),
                ];
                for (number, result) in refused.into_iter().enumerate() {
                    let error = result.expect_err("the limit is 1000 bytes");
                    let text = error.to_string();
                    assert!(matches!(error, Error::InvalidArgument { .. }) && text.contains("1000"), "call {number}: {text}");
                    assert_usable(comm);
                }
                // Exactly the limit: 998 letters after two bytes of length.
                let full = "x".repeat(998);
                assert_eq!(comm.broadcast_object(is_root.then_some(&full), 2).unwrap(), full);
                assert_eq!(comm.all_gather_object(&"x".repeat(300)).unwrap().len(), 3);
            },
        );
    }
}

#[test]
fn bytes_of_another_type_are_a_protocol_error_that_names_the_sender() {
    for wiring in Wiring::ALL {
        threads(wiring, 3, |comm| {
            // Rank 1 uses different types: what it sends is not a Layer, and what it receives is not a (bool, bool).
            let errors = if comm.rank() == 1 {
                let errors =
                    [comm.all_gather_object(&(true, false)).unwrap_err(), comm.scatter_object::<(bool, bool)>(None, 0).unwrap_err()];
                assert_eq!(comm.broadcast_object(Some(&"words".to_owned()), 1).unwrap(), "words");
                errors
            } else {
                let layers = [Layer::Dropout(0.3), Layer::Dropout(0.5), Layer::Identity];
                let gathered = comm.all_gather_object(&Layer::Dropout(0.5)).unwrap_err();
                comm.scatter_object((comm.rank() == 0).then_some(&layers[..]), 0).unwrap();
                [gathered, comm.broadcast_object::<Layer>(None, 1).unwrap_err()]
            };
            for error in errors {
                assert!(matches!(error, Error::Protocol { .. }), "{error}");
                assert!(error.to_string().contains("rank ") && error.to_string().contains(" B is not of the expected type"), "{error}");
            }
            assert_usable(comm);
        });
    }
}

#[test]
fn bytes_that_are_left_over_are_of_another_type_too() {
    for wiring in Wiring::ALL {
        threads(wiring, 2, |comm| {
            // The encoding of a pair begins with its first half.
            if comm.rank() == 0 {
                comm.broadcast_object(Some(&(7_u32, "and more".to_owned())), 0).unwrap();
            } else {
                let error = comm.broadcast_object::<u32>(None, 0).expect_err("a number and more is no number");
                assert!(matches!(error, Error::Protocol { .. }) && error.to_string().contains("rank 0"), "{error}");
            }
            assert_usable(comm);
        });
    }
}

#[test]
fn bad_arguments_are_refused_before_anything_is_sent() {
    threads(Wiring::Shm, 2, |comm| {
        let other = 1 - comm.rank();
        let refused = [
            comm.broadcast_object(Some(&1), other).map(drop),
            comm.broadcast_object::<i32>(None, comm.rank()).map(drop),
            comm.broadcast_object(Some(&1), 2).map(drop),
            comm.scatter_object(Some(&[1, 2][..]), other).map(drop),
            comm.scatter_object::<i32>(None, comm.rank()).map(drop),
            comm.scatter_object(Some(&[1][..]), comm.rank()).map(drop),
            comm.gather_object(&1, 7).map(drop),
        ];
        for (number, result) in refused.into_iter().enumerate() {
            let error = result.expect_err(&format!("call {number} must be refused"));
            assert!(matches!(error, Error::InvalidArgument { .. }), "call {number}: {error}");
        }
        assert_usable(comm);
    });
}
