//! Mistakes in the use of units are named, and ranks that do different things get an error.

use collectives::{Communicator, DType, ReduceOp, Result};
use collectives_train::{FullySharded, FullyShardedOptions, Parameter, ShardingStrategy, Unit};

use crate::common::ranks::{Wiring, threads};

/// Returns two units of one length and one of another.
fn units() -> Vec<Unit> {
    let unit = |name: &str, len| Unit::new(name, vec![Parameter::new::<f32>("weight", &[len]), Parameter::new::<f32>("bias", &[2])]);
    vec![unit("first", 10), unit("second", 10), unit("third", 40)]
}

fn model(comm: &Communicator, options: FullyShardedOptions) -> FullySharded {
    let mut model = FullySharded::new(comm, units(), options).unwrap();
    for (unit, listed) in units().iter().enumerate() {
        for (index, parameter) in listed.parameters.iter().enumerate() {
            model.load(unit, index, &vec![1.0_f32; parameter.shape[0]]).unwrap();
        }
    }
    model
}

/// Returns options without prefetching.
fn alone() -> FullyShardedOptions {
    FullyShardedOptions { prefetch: 0, ..FullyShardedOptions::default() }
}

fn gradients(len: usize) -> [Vec<f32>; 2] {
    [vec![1.0; len], vec![1.0; 2]]
}

#[test]
fn mistakes_of_one_call_are_refused_there_and_harm_nothing() {
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp] {
        threads(Wiring::Shm, 2, |comm| {
            let mut model = model(comm, FullyShardedOptions { strategy, ..FullyShardedOptions::default() });
            model.reduce_gradients(1, &gradients(10)).unwrap();
            model.gather(1).unwrap();
            let said = |result: Result<()>| result.unwrap_err().to_string();
            for (error, words) in [
                (said(model.gather(3)), "there is no unit 3: the model has 3 units, numbered from 0"),
                (said(model.prefetch(3)), "there is no unit 3: the model has 3"),
                (said(model.release(0)), "unit 0 \"first\" is not gathered"),
                (said(model.parameter::<f32>(0, 0).map(drop)), "unit 0 \"first\" is not gathered"),
                (said(model.parameter::<f32>(1, 2).map(drop)), "unit 1 \"second\" has no parameter 2: the unit has 2"),
                (said(model.parameter::<f64>(1, 0).map(drop)), "elements of f64 were passed"),
                (said(model.copy_to(1, 0, &mut [0.0_f32; 9])), "9 elements were passed"),
                (said(model.load(1, 0, &[0.0_f32; 10])), "unit 1 \"second\" is gathered: release it first"),
                (said(model.load(0, 0, &[0.0_f32; 11])), "parameter 0 \"weight\" (f32[10]): 11 elements were passed"),
                (said(model.broadcast(0, 1, &mut [0.0_f64; 2], 0)), "elements of f64 were passed"),
                (said(model.reduce_gradients(1, &gradients(10))), "its gradients were already given in this backward pass"),
                (said(model.reduce_gradients(3, &gradients(10))), "there is no unit 3: the model has 3"),
                (said(model.reduce_gradients(0, &gradients(10)[..1])), "1 gradients were passed for 2 parameters"),
                (said(model.reduce_gradients(0, &gradients(11))), "parameter 0 \"weight\" (f32[10]): 11 elements were passed"),
                (said(model.reduce_gradients(0, &[vec![1.0_f64; 10], vec![1.0; 2]])), "elements of f64 were passed"),
                (said(model.reduce().unwrap().clip_norm(-1.0).map(drop)), "a positive number"),
            ] {
                assert!(error.contains(words), "{error}");
            }
            model.release(1).unwrap();
            model.reduce_gradients(0, &gradients(10)).unwrap();
            assert_eq!(model.reduce().unwrap().norm().unwrap(), 12_f64.sqrt());
        });
    }
}

#[test]
fn gradients_come_in_the_type_in_which_units_are_gathered() {
    let comm = &Communicator::local(1).unwrap()[0];
    let mut model = model(comm, FullyShardedOptions { gather_type: Some(DType::Bf16), ..FullyShardedOptions::default() });
    let error = model.reduce_gradients(0, &gradients(10)).unwrap_err().to_string();
    assert!(error.contains("(f32[10]), which is gathered as bf16: elements of f32 were passed"), "{error}");
    model.gather(0).unwrap();
    assert!(model.parameter::<f32>(0, 0).is_err());
}

#[test]
fn what_ranks_make_differently_is_named() {
    let mut renamed = units();
    renamed[1].parameters[1].name = "offset".to_owned();
    let narrow = FullyShardedOptions { gather_type: Some(DType::Bf16), ..FullyShardedOptions::default() };
    let cases = [
        (renamed, FullyShardedOptions::default(), "unit 1 \"second\", parameter 1 \"offset\" (f32[2])"),
        (units()[..2].to_vec(), FullyShardedOptions::default(), "2 units"),
        (units(), narrow, "gather_type bf16"),
        (units(), alone(), "prefetch 0"),
    ];
    for (units_of_one, options_of_one, words) in &cases {
        threads(Wiring::Tcp, 3, |comm| {
            let (units, options) = match comm.rank() {
                1 => (units_of_one.clone(), options_of_one.clone()),
                _ => (units(), FullyShardedOptions::default()),
            };
            let error = FullySharded::new(comm, units, options).unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains(words), "{error}");
        });
    }
    threads(Wiring::Shm, 2, |comm| {
        let mixed = Unit::new("mixed", vec![Parameter::new::<f32>("a", &[1]), Parameter::new::<f64>("b", &[1])]);
        let error = FullySharded::new(comm, vec![mixed], FullyShardedOptions::default()).unwrap_err().to_string();
        assert!(error.contains("all parameters of a unit must have the same type"), "{error}");
        let whole = FullyShardedOptions { reduce_type: Some(DType::I32), ..FullyShardedOptions::default() };
        assert!(FullySharded::new(comm, units(), whole).unwrap_err().to_string().contains("the gather or reduce type is i32"));
        let largest = FullyShardedOptions { op: ReduceOp::Max, ..FullyShardedOptions::default() };
        assert!(FullySharded::new(comm, units(), largest).unwrap_err().is_unsupported());
    });
}

#[test]
fn units_of_other_lengths_are_a_mismatch_at_once() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        threads(wiring, 2, |comm| {
            let mut model = model(comm, alone());
            let error = model.gather(2 - comm.rank()).unwrap_err();
            assert!(error.is_mismatch(), "{error}");
            assert!(model.gather(0).unwrap_err().is_poisoned());
        });
    }
}

#[test]
fn another_order_of_units_of_one_length_is_a_mismatch_before_anything_is_updated() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        threads(wiring, 3, |comm| {
            let mut model = model(comm, alone());
            let order = if comm.rank() == 1 { [0, 1] } else { [1, 0] };
            model.gather(2).unwrap();
            order.into_iter().for_each(|unit| model.reduce_gradients(unit, &gradients(10)).unwrap());
            let error = model.reduce().map(drop).unwrap_err();
            let (text, words) = (error.to_string(), ["the reduction of unit 1", "the reduction of unit 0", "rank 1"]);
            assert!(error.is_mismatch() && words.iter().all(|word| text.contains(word)), "{text}");
            assert!(model.reduce_gradients(0, &gradients(10)).unwrap_err().is_poisoned());
        });
    }
}

#[test]
fn an_optimiser_that_fails_or_panics_ends_the_steps() {
    let comm = &Communicator::local(1).unwrap()[0];
    let mut failing = model(comm, FullyShardedOptions::default());
    let error = failing.reduce().unwrap().update(|shard| shard.values::<f64>().map(drop)).unwrap_err().to_string();
    assert!(error.contains("bucket 0 holds elements of f32"), "{error}");
    assert!(failing.gather(0).unwrap_err().is_poisoned());
    let mut panicking = model(comm, FullyShardedOptions::default());
    let reduced = panicking.reduce().unwrap();
    let update = std::panic::AssertUnwindSafe(|| reduced.update(|_| panic!("a panic of the test's")).map(drop));
    assert!(std::panic::catch_unwind(update).is_err());
    assert!(panicking.end_backward().unwrap_err().is_poisoned());
}
