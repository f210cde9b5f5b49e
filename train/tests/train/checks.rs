//! Ranks that differ in a value or a parameter, and ranks with NaN, are named on every rank. The communicator works on.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use collectives::{Communicator, DType, ReduceOp, Result, TypedBytes, bf16, f16};
use collectives_train::{DataParallel, Float, Options, Parameter, check_finite, check_replicas, check_same};

use crate::common::random::Random;
use crate::common::ranks::{Wiring, communicators, each, processes, threads};

/// Runs a check that fails on every rank, and returns the text that all ranks get.
fn refused(wiring: Wiring, world_size: usize, check: impl Fn(&Communicator) -> Result<()> + Sync) -> String {
    let errors = threads(wiring, world_size, |comm| {
        let error = check(comm).unwrap_err();
        let mut ranks = 1_u32;
        comm.all_reduce(&mut ranks, ReduceOp::Sum).expect("the communicator lives on");
        assert_eq!(ranks as usize, world_size);
        error.to_string()
    });
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    errors[0].clone()
}

#[track_caller]
fn assert_words(text: &str, words: &[&str]) {
    assert!(words.iter().all(|word| text.contains(word)), "{text}\nlacks one of {words:?}");
}

#[derive(Debug)]
#[expect(dead_code, reason = "the fields are only printed")]
struct TrainingOptions {
    rate: f32,
    name: &'static str,
}

#[test]
fn equal_values_pass_on_any_number_of_ranks() {
    for wiring in Wiring::ALL {
        for world_size in [1, 2, 3, 4] {
            threads(wiring, world_size, |comm| {
                check_same(comm, "options", &TrainingOptions { rate: 0.1, name: "sgd" }).unwrap();
                check_same(comm, "", "").unwrap();
                check_same(comm, "text", &"é".repeat(100_000)).unwrap();
                check_same(comm, "none", &None::<u8>).unwrap();
            });
        }
    }
}

#[test]
fn a_value_that_differs_is_printed_with_the_ranks_that_have_it() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        let text = refused(wiring, 4, |comm| check_same(comm, "samples", &[100, 99][comm.rank() % 2]));
        assert_words(&text, &["rank 0 called check_same(\"samples\") with 100, but rank 1 called check_same(\"samples\") with 99"]);
        assert_words(&text, &["of 4 ranks, these differ from rank 0: 1, 3;"]);
        // Most ranks agree, but not with rank 0.
        let text = refused(wiring, 4, |comm| {
            check_same(comm, "options", &TrainingOptions { rate: if comm.rank() == 0 { 0.1 } else { 0.2 }, name: "sgd" })
        });
        assert_words(&text, &["rank 1 called", "rate: 0.2, name: \"sgd\"", "but rank 0 called", "rate: 0.1", "differ from rank 1: 0;"]);
    }
}

#[test]
fn values_that_differ_only_in_the_last_bit_differ() {
    let text = refused(Wiring::Shm, 2, |comm| check_same(comm, "rate", &f64::from_bits(0.1_f64.to_bits() + comm.rank() as u64)));
    assert_words(&text, &["with 0.1,", "with 0.10000000000000002;"]);
    let text = refused(Wiring::Shm, 2, |comm| check_same(comm, "zero", &[0.0_f32, -0.0][comm.rank()]));
    assert_words(&text, &["with 0.0,", "with -0.0;"]);
}

#[test]
fn labels_that_differ_are_an_error_even_if_values_are_equal() {
    let text = refused(Wiring::Tcp, 3, |comm| check_same(comm, if comm.rank() == 1 { "epochs" } else { "steps" }, &7));
    assert_words(&text, &["rank 0 called check_same(\"steps\") with 7, but rank 1 called check_same(\"epochs\") with 7"]);
    // The same characters, divided differently between label and value.
    let text = refused(Wiring::Shm, 2, |comm| check_same(comm, ["a", "a1"][comm.rank()], &[11, 1][comm.rank()]));
    assert_words(&text, &["check_same(\"a\") with 11", "check_same(\"a1\") with 1"]);
}

#[test]
fn long_labels_and_values_give_short_errors() {
    let (long, label) = ("x".repeat(1_000_000), "é".repeat(5000));
    let text = refused(Wiring::Shm, 2, |comm| check_same(comm, &label, &format!("{long}{}", comm.rank())));
    assert_words(&text, &["a value of 1000003 B (SHA-256 of label and value: "]);
    assert!(text.len() < 1000, "{} B", text.len());
    // A label of characters that Debug escapes, so that the value has no room.
    let text = refused(Wiring::Shm, 2, |comm| check_same(comm, &"\u{1}".repeat(5000), &comm.rank()));
    assert!(text.contains("check_same(\"\\u{1}") && text.len() < 1000, "{text}");
}

/// Cannot be printed on one rank.
struct Unprintable(bool);

impl fmt::Debug for Unprintable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 { Err(fmt::Error) } else { f.write_str("printable") }
    }
}

#[test]
fn a_value_that_one_rank_cannot_print_is_an_error_on_every_rank() {
    let errors = threads(Wiring::Shm, 3, |comm| {
        let error = check_same(comm, "value", &Unprintable(comm.rank() == 2)).unwrap_err();
        check_same(comm, "value", &Unprintable(false)).unwrap();
        error.to_string()
    });
    assert_words(&errors[2], &["check_same: \"value\": the value cannot be printed"]);
    assert_words(&errors[0], &["with printable, but rank 2 called check_same(\"value\") with a value that cannot be printed"]);
    threads(Wiring::Shm, 2, |comm| assert!(check_same(comm, "value", &Unprintable(true)).is_err()));
}

/// Panics on one rank instead of being printed.
struct Panicking(bool);

impl fmt::Debug for Panicking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        assert!(!self.0, "this is the panic of a test");
        f.write_str("calm")
    }
}

#[test]
fn a_rank_whose_value_or_iterator_panics_leaves_no_other_rank_waiting() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        for of_parameters in [false, true] {
            each(communicators(wiring, 3), |comm| {
                let panics = comm.rank() == 1;
                let parameters =
                    [1.0_f32].iter().map(|value| if panics { panic!("this is the panic of a test") } else { ("weight", *value) });
                let check = || match of_parameters {
                    true => check_replicas(&comm, parameters),
                    false => check_same(&comm, "value", &Panicking(panics)),
                };
                match catch_unwind(AssertUnwindSafe(check)) {
                    Ok(result) => assert!(result.unwrap_err().is_peer_lost()),
                    Err(_) => assert!(panics),
                }
            });
        }
    }
}

#[test]
fn two_different_checks_are_an_error_on_both_ranks() {
    let errors = threads(Wiring::Tcp, 2, |comm| match comm.rank() {
        0 => check_same(comm, "value", &1).unwrap_err(),
        _ => check_replicas(comm, [("weight", [1.0_f32])]).unwrap_err(),
    });
    assert!(errors.iter().all(collectives::Error::is_mismatch), "{errors:?}");
}

/// Parameters of one type, and what one rank changes in them.
fn parameters<T: Float>(change: impl FnOnce(&mut Vec<(String, Vec<T>)>)) -> Vec<(String, Vec<T>)> {
    let values = |len: usize| (0..len).map(|index| T::from_f64(index as f64 - 3.0)).collect();
    let mut all: Vec<_> = [9, 0, 1, 300].into_iter().enumerate().map(|(index, len)| (format!("layer.{index}"), values(len))).collect();
    change(&mut all);
    all
}

#[test]
fn equal_replicas_pass_in_every_type() {
    fn typed<T: Float>(comm: &Communicator) {
        check_replicas(comm, parameters::<T>(|_| ())).unwrap();
    }
    for wiring in Wiring::ALL {
        for world_size in [1, 2, 3] {
            threads(wiring, world_size, |comm| {
                typed::<f32>(comm);
                typed::<f64>(comm);
                typed::<f16>(comm);
                typed::<bf16>(comm);
                check_replicas(comm, [("nan", [f32::NAN])]).unwrap();
                check_replicas(comm, [("grid", vec![[1_u8, 2]])]).unwrap();
                check_replicas(comm, [("bytes", TypedBytes::new(DType::Bf16, &[0_u8, 1][..]).unwrap())]).unwrap();
                check_replicas(comm, std::iter::empty::<(&str, &[f32])>()).unwrap();
            });
        }
    }
}

#[test]
fn one_bit_of_one_rank_is_found() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        for world_size in [3, 4] {
            for index in [0, 2, 3] {
                let (rank, place, bit) = (random.below(world_size), random.below([9, 0, 1, 300][index]), random.below(32));
                let flip = |all: &mut Vec<(String, Vec<f32>)>| {
                    let value = &mut all[index].1[place];
                    *value = f32::from_bits(value.to_bits() ^ 1 << bit);
                };
                let text = refused(wiring, world_size, |comm| {
                    check_replicas(
                        comm,
                        parameters(|all| {
                            if comm.rank() == rank {
                                flip(all)
                            }
                        }),
                    )
                });
                let (parameter, usual) = (format!("parameter {index} \"layer.{index}\" (f32["), usize::from(rank == 0));
                let ranks = format!("of {world_size} ranks, these differ from rank {usual}: {rank};");
                assert_words(&text, &[&parameter, &ranks, "broadcast the parameters"]);
            }
        }
    }
}

#[test]
fn the_first_of_several_differences_is_named() {
    let text = refused(Wiring::Shm, 4, |comm| {
        check_replicas(
            comm,
            parameters::<f32>(|all| match comm.rank() {
                1 => all[3].1[7] += 1.0,
                2 => (all[2].1[0], all[3].1[0]) = (7.0, -7.0),
                _ => (),
            }),
        )
    });
    assert_words(&text, &["parameter 2 \"layer.2\" (f32[1])", "these differ from rank 0: 2;"]);
    let text = refused(Wiring::Shm, 2, |comm| check_replicas(comm, [("zero", [[0.0_f32, -0.0][comm.rank()]])]));
    assert_words(&text, &["\"zero\" (f32[1]), SHA-256"]);
}

#[test]
fn names_lengths_types_and_numbers_that_differ_are_told() {
    let text = refused(Wiring::Tcp, 3, |comm| {
        check_replicas(
            comm,
            parameters::<f32>(|all| {
                if comm.rank() == 1 {
                    all[2].0 = "bias".to_owned()
                }
            }),
        )
    });
    assert_words(&text, &["parameter 2 \"layer.2\" (f32[1])", "parameter 2 \"bias\" (f32[1])"]);
    let text = refused(Wiring::Shm, 3, |comm| {
        check_replicas(
            comm,
            parameters::<f32>(|all| {
                if comm.rank() == 1 {
                    all[1].1.push(0.0)
                }
            }),
        )
    });
    assert_words(&text, &["\"layer.1\" (f32[0])", "\"layer.1\" (f32[1])"]);
    let text = refused(Wiring::Shm, 3, |comm| {
        check_replicas(
            comm,
            parameters::<f32>(|all| {
                if comm.rank() == 2 {
                    drop(all.pop())
                }
            }),
        )
    });
    assert_words(&text, &["rank 0 called check_replicas with 4 parameters, but rank 2 called check_replicas with 3 parameters"]);
    let text = refused(Wiring::Shm, 2, |comm| match comm.rank() {
        0 => check_replicas(comm, [("weight", vec![0.0_f32])]),
        _ => check_replicas(comm, [("weight", vec![0_u32])]),
    });
    assert_words(&text, &["\"weight\" (f32[1])", "\"weight\" (u32[1])"]);
}

#[test]
fn replicas_of_processes_are_compared() {
    processes("checks::replicas_of_processes_are_compared", Wiring::Tcp, 3, |comm| {
        check_replicas(comm, parameters::<f32>(|_| ()))?;
        let error = check_replicas(comm, parameters::<f32>(|all| all[3].1[299] += comm.rank() as f32)).unwrap_err();
        assert_words(&error.to_string(), &["\"layer.3\" (f32[300])", "these differ from rank 0: 1, 2;"]);
        check_same(comm, "world size", &comm.world_size())
    });
}

#[test]
fn finite_values_pass_and_ranks_may_have_different_numbers_of_them() {
    for wiring in Wiring::ALL {
        for world_size in [1, 2, 3] {
            threads(wiring, world_size, |comm| {
                check_finite(comm, "gradient", &vec![f16::MAX; comm.rank() * 100]).unwrap();
                check_finite(comm, "loss", &[f64::MAX]).unwrap();
                check_finite::<f32>(comm, "nothing", &[]).unwrap();
            });
        }
    }
}

#[test]
fn the_rank_the_value_and_the_place_of_nan_and_infinity_are_named() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        let text = refused(wiring, 3, |comm| check_finite(comm, "loss", &[[0.5, 0.5, f32::NAN][comm.rank()]]));
        assert_words(&text, &["check_finite: \"loss\" is NaN on rank 2 (host", "skip this step"]);
        let mut gradient = [bf16::ONE; 77];
        gradient[70] = bf16::NEG_INFINITY;
        let text = refused(wiring, 4, |comm| check_finite(comm, "gradient", &gradient[..comm.rank() * 25]));
        assert_words(&text, &["element 70 (from 0) of the 75 elements of \"gradient\" is -inf on rank 3"]);
        let text = refused(wiring, 4, |comm| check_finite(comm, "loss", &[1.0 / (comm.rank() % 2) as f64]));
        assert_words(&text, &["\"loss\" is inf on rank 0", "values are not finite on these ranks either: 2;"]);
    }
    let text = refused(Wiring::Shm, 1, |comm| check_finite(comm, &"é".repeat(1000), &[f32::NAN]));
    assert!(text.contains("is NaN on rank 0") && text.len() < 500, "{text}");
}

#[test]
fn a_mean_with_nan_is_refused_with_its_parameter_and_the_next_step_follows() {
    let parameters = || {
        vec![
            Parameter::new::<f32>("weight", &[100]),
            Parameter::new::<f16>("half", &[3]),
            Parameter::new::<f32>("empty", &[0]),
            Parameter::new::<f64>("bias", &[]),
        ]
    };
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        for world_size in [1, 3] {
            threads(wiring, world_size, |comm| {
                let mut model = DataParallel::new(comm, parameters(), Options::default()).unwrap();
                let is_last = comm.rank() + 1 == world_size;
                for (bad, words) in [
                    (None, ""),
                    (Some(0), "parameter 0 \"weight\" (f32[100]): its averaged gradient is NaN"),
                    (Some(1), "\"half\""),
                    (Some(3), "\"bias\""),
                    (None, ""),
                ] {
                    let value = |index: usize| if is_last && bad == Some(index) { f32::INFINITY } else { 1.0 };
                    model.ready(0, &[vec![1.0; 99], vec![value(0)]].concat()).unwrap();
                    model.ready(1, &[f16::MAX, f16::MAX, f16::from_f32(value(1))].map(|x| x / f16::from_f32(8.0))).unwrap();
                    model.ready(2, &[0.0_f32; 0]).unwrap();
                    model.ready(3, &f64::from(value(3))).unwrap();
                    match model.finish().unwrap().check_finite() {
                        Ok(()) => assert_eq!(bad, None),
                        Err(error) => assert!(bad.is_some() && error.to_string().contains(words), "{error}"),
                    }
                }
            });
        }
    }
}

#[test]
fn means_whose_squares_are_too_large_are_refused_alone_but_not_for_their_sum() {
    threads(Wiring::Shm, 2, |comm| {
        let parameters = vec![Parameter::new::<f64>("first", &[1]), Parameter::new::<f64>("second", &[1])];
        let mut model = DataParallel::new(comm, parameters, Options::default()).unwrap();
        for (value, is_refused) in [(1e154, false), (1e155, true)] {
            model.ready(0, &1.3e154).unwrap();
            model.ready(1, &value).unwrap();
            let averaged = model.finish().unwrap();
            assert!(averaged.norm().unwrap().is_infinite());
            assert_eq!(averaged.check_finite().is_err_and(|error| error.to_string().contains("\"second\"")), is_refused);
        }
    });
}

#[test]
fn a_mean_of_no_parameters_is_finite_and_one_that_was_taken_is_not_checked() {
    threads(Wiring::Shm, 2, |comm| {
        let mut none = DataParallel::new(comm, Vec::new(), Options::default()).unwrap();
        none.finish().unwrap().check_finite().unwrap();
        let mut model = DataParallel::new(comm, vec![Parameter::new::<f32>("weight", &[3])], Options::default()).unwrap();
        model.ready(0, &[f32::NAN; 3]).unwrap();
        let mut averaged = model.finish().unwrap();
        averaged.take::<f32>(0).unwrap();
        assert_words(&averaged.check_finite().unwrap_err().to_string(), &["\"weight\"", "was taken"]);
    });
}
