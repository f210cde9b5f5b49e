//! A model whose parameters are sharded over ranks trains like a model of one process.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module as _, Result, Tensor, Var};
use candle_nn::{AdamW, Init, Optimizer, ParamsAdamW, SGD, VarBuilder, VarMap};
use collectives::Communicator;
use collectives_candle::{FullySharded, Unit};
use collectives_train::{FullyShardedOptions, LossScaler, ShardingStrategy};
use training_common::{largest_difference, uniform};

const RANKS: [usize; 4] = [1, 2, 3, 4];
/// Samples of a step, on all ranks together.
const BATCH: usize = 12;
const STEPS: u64 = 6;
/// The units. None can be split equally between two, three and four ranks; one has a single number.
const UNITS: [&str; 5] = ["embedding", "layers.0", "layers.1", "scale", "head"];
/// The largest allowed difference of losses and parameters. Sums are in another order, and AdamW divides by them.
const BOUND: f32 = 2e-5;

type Layer = Box<dyn Fn(&Tensor) -> Result<Tensor>>;

/// Makes a unit's module: of the model of one process, and of the sharded model.
fn module(name: &str, vb: VarBuilder<'static>) -> Result<Layer> {
    Ok(match name {
        "embedding" => {
            let table = candle_nn::embedding(11, 6, vb)?;
            Box::new(move |ids| table.forward(ids))
        }
        "scale" => {
            let scale = vb.get_with_hints(1, "factor", Init::Const(1.0))?;
            Box::new(move |x| x.broadcast_mul(&scale))
        }
        "head" => {
            let head = candle_nn::linear(6, 3, vb)?;
            Box::new(move |x| head.forward(x))
        }
        _ => {
            let (up, down) = (candle_nn::linear(6, 7, vb.pp("up"))?, candle_nn::linear_no_bias(7, 6, vb.pp("down"))?);
            Box::new(move |x| x + down.forward(&up.forward(x)?.tanh()?)?)
        }
    })
}

fn units() -> Vec<Unit> {
    UNITS.iter().map(|name| Unit::new(*name, move |vb| module(name, vb))).collect()
}

fn ranks<R: Send>(count: usize, program: impl Fn(&Communicator) -> Result<R> + Sync) -> Vec<R> {
    Communicator::run_local(count, |comm| {
        comm.set_timeout(Duration::from_secs(60));
        Ok(program(comm).unwrap())
    })
    .unwrap()
}

/// Returns the ids and targets of some samples of a step.
fn samples(step: u64, range: std::ops::Range<usize>) -> Result<(Tensor, Tensor)> {
    let ids: Vec<u32> = range.clone().map(|sample| ((sample as u64 * 7 + step * 3) % 11) as u32).collect();
    let table = uniform(100, 1.0, 11 * 3);
    let targets = ids.iter().flat_map(|id| table[*id as usize * 3..][..3].to_vec()).collect();
    Ok((Tensor::new(ids, &Device::Cpu)?, Tensor::from_vec(targets, (range.len(), 3), &Device::Cpu)?))
}

fn share(comm: &Communicator) -> std::ops::Range<usize> {
    let each = BATCH / comm.world_size();
    comm.rank() * each..(comm.rank() + 1) * each
}

/// Returns the values that every run begins with, by name.
fn start() -> HashMap<String, Tensor> {
    let whole = whole_model();
    let mut names: Vec<_> = whole.data().lock().unwrap().iter().map(|(name, value)| (name.clone(), value.shape().clone())).collect();
    names.sort_by(|(one, _), (other, _)| one.cmp(other));
    let value = |(number, (name, shape)): (usize, (String, candle_core::Shape))| {
        let values = uniform(1 + number as u64, 0.7, shape.elem_count());
        (name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap())
    };
    names.into_iter().enumerate().map(value).collect()
}

fn whole_model() -> VarMap {
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    UNITS.iter().for_each(|name| drop(module(name, vb.pp(name)).unwrap()));
    variables
}

/// Runs the model of one process.
fn whole_loss(variables: &VarMap, (ids, targets): &(Tensor, Tensor)) -> Result<Tensor> {
    let vb = VarBuilder::from_varmap(variables, DType::F32, &Device::Cpu);
    let output = UNITS.iter().try_fold(ids.clone(), |x, name| module(name, vb.pp(name))?.forward(&x))?;
    candle_nn::loss::mse(&output, targets)
}

fn sharded_loss(model: &FullySharded, (ids, targets): &(Tensor, Tensor)) -> Result<Tensor> {
    let output = (0..UNITS.len()).try_fold(ids.clone(), |x, unit| model.forward(unit, &x))?;
    candle_nn::loss::mse(&output, targets)
}

fn sharded(comm: &Communicator, options: FullyShardedOptions) -> Result<FullySharded> {
    let model = FullySharded::new(comm, units(), DType::F32, options)?;
    let start = start();
    (0..UNITS.len()).try_for_each(|unit| model.set_tensors(unit, &start))?;
    Ok(model)
}

fn begun() -> VarMap {
    let mut variables = whole_model();
    variables.set(start().into_iter()).unwrap();
    variables
}

/// Returns all parameters in the order of their names.
fn in_order(values: impl IntoIterator<Item = (String, Tensor)>) -> Result<Vec<f32>> {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_by(|(one, _), (other, _)| one.cmp(other));
    Ok(values.iter().map(|(_, value)| value.flatten_all()?.to_dtype(DType::F32)?.to_vec1()).collect::<Result<Vec<Vec<f32>>>>()?.concat())
}

fn parameters(model: &FullySharded) -> Result<Vec<f32>> {
    in_order((0..UNITS.len()).map(|unit| model.tensors(unit)).collect::<Result<Vec<_>>>()?.into_iter().flatten())
}

fn whole_parameters(variables: &VarMap) -> Vec<f32> {
    let values = variables.data().lock().unwrap();
    in_order(values.iter().map(|(name, value)| (name.clone(), value.as_detached_tensor()))).unwrap()
}

fn adam() -> ParamsAdamW {
    ParamsAdamW { lr: 0.02, eps: 1e-3, ..ParamsAdamW::default() }
}

/// Returns the losses and parameters of one process.
fn alone() -> Result<(Vec<f32>, Vec<f32>)> {
    let variables = begun();
    let mut optimizer = AdamW::new(variables.all_vars(), adam())?;
    let losses = (0..STEPS).map(|step| {
        let loss = whole_loss(&variables, &samples(step, 0..BATCH)?)?;
        optimizer.step(&loss.backward()?)?;
        loss.to_scalar::<f32>()
    });
    Ok((losses.collect::<Result<_>>()?, whole_parameters(&variables)))
}

#[test]
fn any_number_of_ranks_ends_where_one_process_does() {
    let (losses, expected) = alone().unwrap();
    assert!(losses[STEPS as usize - 1] < losses[0], "nothing was learnt: {losses:?}");
    for count in RANKS {
        for (strategy, prefetch) in [(ShardingStrategy::FullShard, 1), (ShardingStrategy::FullShard, 0), (ShardingStrategy::ShardGradOp, 9)]
        {
            let ends = ranks(count, |comm| {
                let model = sharded(comm, FullyShardedOptions { strategy, prefetch, ..FullyShardedOptions::default() })?;
                let mut optimizer = AdamW::new(model.variables()?, adam())?;
                let mut losses = Vec::new();
                for step in 0..STEPS {
                    sharded_loss(&model, &samples(step + 1, share(comm))?)?; // an evaluation changes nothing
                    let loss = sharded_loss(&model, &samples(step, share(comm))?)?;
                    loss.backward()?;
                    model.step(&mut optimizer)?;
                    losses.push(loss.to_scalar::<f32>()?);
                }
                Ok((losses, parameters(&model)?))
            });
            let means: Vec<f32> =
                (0..STEPS as usize).map(|step| ends.iter().map(|(losses, _)| losses[step]).sum::<f32>() / count as f32).collect();
            let apart = largest_difference(&means, &losses).max(largest_difference(&ends[0].1, &expected));
            println!("{count} ranks, {strategy:?}, prefetch {prefetch}: {apart:e}");
            assert!(apart <= BOUND, "{count} ranks, {strategy:?}: {apart:e}");
            assert!(ends.iter().all(|(_, end)| end == &ends[0].1), "ranks end with other bits");
        }
    }
}

/// Takes one step of gradient descent with one process, and returns the parameters and the norm of the gradient.
fn one_step_alone(rate: f64, limit: f64) -> (Vec<f32>, f64) {
    let variables = begun();
    let gradients = whole_loss(&variables, &samples(0, 0..BATCH).unwrap()).unwrap().backward().unwrap();
    let values = variables.data().lock().unwrap();
    let slopes = in_order(values.iter().map(|(name, value)| (name.clone(), gradients.get(value).unwrap().clone()))).unwrap();
    let norm = slopes.iter().map(|slope| f64::from(*slope).powi(2)).sum::<f64>().sqrt();
    let begin = in_order(values.iter().map(|(name, value)| (name.clone(), value.as_detached_tensor()))).unwrap();
    let factor = rate * (limit / norm).min(1.0);
    (begin.iter().zip(slopes).map(|(x, slope)| (f64::from(*x) - factor * f64::from(slope)) as f32).collect(), norm)
}

#[test]
fn several_backward_passes_count_as_one_of_all_samples() {
    let (expected, _) = one_step_alone(0.5, f64::INFINITY);
    for (count, passes) in [(1, 3), (2, 2), (3, 4)] {
        let ends = ranks(count, |comm| {
            let model = sharded(comm, FullyShardedOptions::default())?;
            let mut optimizer = SGD::new(model.variables()?, 0.5)?;
            let (own, each) = (share(comm), BATCH / count / passes);
            for pass in 0..passes {
                let begin = own.start + pass * each;
                (sharded_loss(&model, &samples(0, begin..begin + each)?)? / passes as f64)?.backward()?;
            }
            model.step(&mut optimizer)?;
            parameters(&model)
        });
        assert!(ends.iter().all(|end| largest_difference(end, &expected) <= 1e-6), "{count} ranks, {passes} passes");
    }
}

#[test]
fn gradients_are_clipped_by_the_norm_over_all_ranks() {
    let (expected, norm) = one_step_alone(1.0, 0.01);
    for count in RANKS {
        let ends = ranks(count, |comm| {
            let model = sharded(comm, FullyShardedOptions::default())?;
            let mut optimizer = SGD::new(model.variables()?, 1.0)?;
            sharded_loss(&model, &samples(0, share(comm))?)?.backward()?;
            let mut found = 0.0;
            let taken = model.step_with(&mut optimizer, |gradients| {
                found = gradients.clip_norm(0.01)?;
                Ok(true)
            })?;
            Ok((taken, found, parameters(&model)?))
        });
        for (taken, found, end) in &ends {
            assert!(*taken && (found - norm).abs() <= 1e-6 * norm, "{count} ranks: norm {found} instead of {norm}");
            assert!(largest_difference(end, &expected) <= 1e-6, "{count} ranks");
        }
    }
}

#[test]
fn a_step_with_an_overflow_on_one_rank_is_skipped_on_all() {
    let (expected, _) = one_step_alone(0.5, f64::INFINITY);
    for count in RANKS {
        let ends = ranks(count, |comm| {
            let model = sharded(comm, FullyShardedOptions::default())?;
            let (mut optimizer, mut scaler) = (SGD::new(model.variables()?, 0.5)?, LossScaler::default());
            let mut taken = Vec::new();
            for step in 0..2 {
                let loss = (sharded_loss(&model, &samples(0, share(comm))?)? * f64::from(scaler.scale()))?;
                let overflows = step == 0 && comm.rank() == count - 1;
                (loss * if overflows { f64::INFINITY } else { 1.0 })?.backward()?;
                taken.push(model.step_with(&mut optimizer, |gradients| {
                    gradients.unscale(&mut scaler)?;
                    scaler.update(comm)
                })?);
            }
            Ok((taken, scaler.scale(), parameters(&model)?))
        });
        for (taken, scale, end) in &ends {
            assert_eq!((&taken[..], *scale), (&[false, true][..], 32_768.0));
            assert!(largest_difference(end, &expected) <= 1e-6, "{count} ranks");
        }
    }
}

/// An optimiser that fails, or panics, on some ranks.
struct Failing(Option<bool>);

impl Optimizer for Failing {
    type Config = Option<bool>;

    fn new(_: Vec<Var>, config: Self::Config) -> Result<Self> {
        Ok(Self(config))
    }

    fn step(&mut self, _: &GradStore) -> Result<()> {
        match self.0 {
            None => Ok(()),
            Some(false) => candle_core::bail!("no step today"),
            Some(true) => panic!("no step at all"),
        }
    }

    fn learning_rate(&self) -> f64 {
        0.0
    }

    fn set_learning_rate(&mut self, _: f64) {}
}

#[test]
fn an_optimiser_that_fails_on_one_rank_is_an_error_on_all() {
    for panics in [false, true] {
        let ends = ranks(3, |comm| {
            let model = sharded(comm, FullyShardedOptions::default())?;
            sharded_loss(&model, &samples(0, share(comm))?)?.backward()?;
            let mut optimizer = Failing((comm.rank() == 1).then_some(panics));
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| model.step(&mut optimizer)));
            let words = ended.map_or_else(|_| "panicked".to_owned(), |step| step.unwrap_err().to_string());
            Ok((words, model.forward(0, &Tensor::new(&[1_u32], &Device::Cpu)?).unwrap_err().to_string()))
        });
        assert_eq!(ends[1].0.lines().next().unwrap(), if panics { "panicked" } else { "no step today" });
        for (words, later) in [&ends[0], &ends[2]] {
            assert!(words.contains("failed on rank 1") && later.contains("a step of this sharded model failed"), "{words}, {later}");
        }
    }
}

#[test]
fn decisions_that_differ_and_calls_from_inside_a_step_are_errors() {
    let words = ranks(2, |comm| {
        let model = sharded(comm, FullyShardedOptions::default())?;
        let inside = model.step_with(&mut Failing(None), |_| {
            assert!(model.tensors(0).unwrap_err().to_string().contains("in use"));
            Ok(true)
        });
        assert!(inside?);
        Ok(model.step_with(&mut Failing(None), |_| Ok(comm.rank() == 0)).unwrap_err().to_string())
    });
    assert!(words.iter().all(|words| words.contains("rank 1 skipped the step and rank 0 did not")), "{words:?}");
}

#[test]
fn a_unit_that_is_used_twice_adds_up_its_gradients() {
    let loss = |table: &Tensor, ids: &Tensor| -> Result<Tensor> {
        let embedded = table.embedding(ids)?.tanh()?;
        embedded.matmul(&table.t()?)?.sqr()?.mean_all()
    };
    let values = Tensor::from_vec(uniform(3, 1.0, 15), (5, 3), &Device::Cpu).unwrap();
    let ids = |rank: usize| Tensor::new(&[(rank % 5) as u32, 4], &Device::Cpu).unwrap();
    for count in RANKS {
        let table = Var::from_tensor(&values).unwrap();
        let losses = (0..count).map(|rank| loss(&table, &ids(rank)).unwrap()).reduce(|one, other| (one + other).unwrap()).unwrap();
        let slope = (losses / count as f64).unwrap().backward().unwrap().remove(&table).unwrap();
        let expected: Vec<f32> = (values.clone() - slope).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        let ends = ranks(count, |comm| {
            let tied = Unit::new("tied", |vb: VarBuilder<'static>| {
                let table = vb.get((5, 3), "table")?;
                Ok(move |x: &Tensor| if x.dtype().is_int() { table.embedding(x)?.tanh() } else { x.matmul(&table.t()?) })
            });
            let empty = Unit::new("square", |_| Ok(|x: &Tensor| x.sqr()));
            let model = FullySharded::new(comm, vec![tied, empty], DType::F32, FullyShardedOptions::default())?;
            model.set_tensors(0, &HashMap::from([("tied.table".to_owned(), values.clone())]))?;
            let output = model.forward(0, &model.forward(0, &ids(comm.rank()))?)?;
            model.forward(1, &output)?.mean_all()?.backward()?;
            model.step(&mut SGD::new(model.variables()?, 1.0)?)?;
            model.tensors(0)?["tied.table"].flatten_all()?.to_vec1::<f32>()
        });
        assert!(ends.iter().all(|end| largest_difference(end, &expected) <= 1e-6), "{count} ranks");
    }
}

/// Takes four steps with a weight of the given type, and returns the weight.
fn trained_as(comm: &Communicator, dtype: DType, gather_type: Option<collectives::DType>) -> Result<(DType, Vec<f32>)> {
    let unit = Unit::new("scale", |vb: VarBuilder<'static>| {
        let weight = vb.get(5, "weight")?;
        Ok(move |x: &Tensor| x.to_dtype(weight.dtype())?.broadcast_mul(&weight))
    });
    let model = FullySharded::new(comm, vec![unit], dtype, FullyShardedOptions { gather_type, ..FullyShardedOptions::default() })?;
    let start = Tensor::from_vec(uniform(1, 1.0, 5), 5, &Device::Cpu)?.to_dtype(dtype)?;
    model.set_tensors(0, &HashMap::from([("scale.weight".to_owned(), start)]))?;
    let mut optimizer = SGD::new(model.variables()?, 0.25)?;
    for step in 0..4 {
        let own = share(comm);
        let all = Tensor::from_vec(uniform(9 + step, 1.0, BATCH * 5), (BATCH, 5), &Device::Cpu)?;
        let output = model.forward(0, &all.narrow(0, own.start, own.len())?)?;
        output.to_dtype(DType::F32)?.sqr()?.mean(0)?.sum_all()?.backward()?;
        model.step(&mut optimizer)?;
    }
    let weight = &model.tensors(0)?["scale.weight"];
    Ok((weight.dtype(), weight.to_dtype(DType::F32)?.to_vec1()?))
}

#[test]
fn parameters_and_gathered_parameters_have_the_types_that_were_asked_for() {
    use collectives::DType as Gathered;
    let cases = [(DType::F16, None, 11), (DType::BF16, None, 8), (DType::F64, None, 24)];
    for (dtype, gather_type, bits) in
        cases.into_iter().chain([(DType::F32, Some(Gathered::F16), 11), (DType::F32, Some(Gathered::Bf16), 8)])
    {
        // Weights and slopes are at most 1, and each of four steps rounds a few times to `bits` bits.
        let bound = 16.0 * 0.5_f32.powi(bits);
        let exact = ranks(1, |comm| trained_as(comm, DType::F32, None)).remove(0).1;
        for count in RANKS {
            for (found, end) in ranks(count, |comm| trained_as(comm, dtype, gather_type)) {
                let apart = largest_difference(&end, &exact);
                assert!(found == dtype && apart <= bound, "{dtype:?}, {gather_type:?}, {count} ranks: {apart:e}");
            }
        }
    }
}

#[test]
fn each_rank_has_only_its_part_and_the_units_that_compute() {
    const LAYERS: usize = 24;
    const LEN: usize = 64 * 64;
    for count in [2, 4] {
        let most = ranks(count, |comm| {
            let layer = |index| Unit::new(format!("layers.{index}"), |vb| candle_nn::linear_no_bias(64, 64, vb));
            let model = FullySharded::new(comm, (0..LAYERS).map(layer).collect(), DType::F32, FullyShardedOptions::default())?;
            let mut optimizer = SGD::new(model.variables()?, 0.1)?;
            let mut most = 0;
            for _ in 0..2 {
                let mut x = Tensor::ones((2, 64), DType::F32, &Device::Cpu)?;
                for unit in 0..LAYERS {
                    x = model.forward(unit, &x)?;
                    most = most.max(model.memory_bytes()?);
                }
                x.sqr()?.mean_all()?.backward()?;
                most = most.max(model.memory_bytes()?);
                model.step(&mut optimizer)?;
            }
            Ok(most)
        });
        let allowed = 4 * (3 * LAYERS * LEN / count + 4 * LEN);
        assert!(most.iter().all(|most| (1..=allowed).contains(most)), "{most:?} bytes instead of at most {allowed}");
    }
}

fn linear(name: &str, outputs: usize) -> Unit {
    Unit::new(name, move |vb| candle_nn::linear(2, outputs, vb))
}

#[test]
fn models_that_cannot_be_made_are_errors_on_every_rank() {
    let made = |comm: &Communicator, unit: Unit, dtype| {
        FullySharded::new(comm, vec![unit], dtype, FullyShardedOptions::default()).map(drop).unwrap_err().to_string()
    };
    let words = ranks(2, |comm| {
        let fails = comm.rank() == 1;
        let on_one = Unit::new("a", move |vb| if fails { candle_core::bail!("no module") } else { candle_nn::linear(2, 2, vb) });
        let calls = AtomicUsize::new(0);
        let changing = Unit::new("a", move |vb| candle_nn::linear(2, 2 + calls.fetch_add(1, Ordering::Relaxed), vb));
        let mixed = Unit::new("a", |vb: VarBuilder<'static>| {
            let (_, one) = (vb.get(2, "a")?, vb.get_with_hints_dtype(2, "b", Init::Const(0.0), DType::F64)?);
            Ok(move |x: &Tensor| x + &one)
        });
        let integers =
            Unit::new("a", |vb: VarBuilder<'static>| vb.get_with_hints(2, "a", Init::Const(0.0)).map(|one| move |x: &Tensor| x + &one));
        Ok([
            made(comm, on_one, DType::F32),
            made(comm, changing, DType::F32),
            made(comm, mixed, DType::F32),
            made(comm, integers, DType::U8),
            made(comm, linear("a", 2 + comm.rank()), DType::F32),
        ])
    });
    let expected = ["", "", "must have the same type", "must be f32, f64, f16 or bf16", "f32[3]"];
    for words in &words {
        for (words, expected) in words.iter().zip(expected) {
            assert!(words.contains(expected), "{words}");
        }
    }
    assert!(words[0][0].contains("failed on rank 1") && words[1][0].contains("no module"), "{words:?}");
    assert!(words[0][1].contains("asked for other parameters") && words[1][1].contains("failed on rank 0"), "{words:?}");
}

#[test]
fn calls_that_cannot_be_right_are_refused() {
    ranks(2, |comm| {
        let model = FullySharded::new(comm, vec![linear("a", 3)], DType::F32, FullyShardedOptions::default())?;
        let (input, before) = (Tensor::ones((1, 2), DType::F32, &Device::Cpu)?, model.tensors(0)?);
        assert!(model.forward(1, &input).unwrap_err().to_string().contains("there is no unit 1"));
        assert!(model.tensors(9).is_err() && model.set_tensors(1, &before).is_err());
        assert!(model.forward(0, &Tensor::ones((1, 5), DType::F32, &Device::Cpu)?).is_err());
        let mut wrong = before.clone();
        wrong.insert("a.weight".to_owned(), Tensor::zeros((3, 2), DType::F32, &Device::Cpu)?);
        wrong.insert("a.bias".to_owned(), Tensor::zeros(4, DType::F32, &Device::Cpu)?);
        assert!(model.set_tensors(0, &wrong).unwrap_err().to_string().contains("a.bias has shape [3]"));
        wrong.remove("a.bias");
        assert!(model.set_tensors(0, &wrong).unwrap_err().to_string().contains("no value for parameter a.bias"));
        assert_eq!(in_order(model.tensors(0)?)?, in_order(before)?);
        let stale = model.forward(0, &input)?.sum_all()?;
        model.step(&mut SGD::new(model.variables()?, 1.0)?)?;
        assert!(stale.backward().unwrap_err().to_string().contains("updated after this forward pass"));
        model.forward(0, &input)?.sum_all()?.backward().map(drop)
    });
    let nothing = ranks(2, |comm| FullySharded::new(comm, Vec::new(), DType::F32, FullyShardedOptions::default())?.variables());
    assert!(nothing.iter().all(Vec::is_empty));
}

#[test]
fn a_rank_that_dies_is_an_error_of_the_backward_pass() {
    let ends = ranks(2, |comm| {
        let model = sharded(comm, FullyShardedOptions::default())?;
        let loss = sharded_loss(&model, &samples(0, share(comm))?)?;
        if comm.rank() == 1 {
            comm.abort();
            return Ok(true);
        }
        Ok(loss.backward().is_err() && model.step(&mut Failing(None)).is_err())
    });
    assert_eq!(ends, [true, true]);
}
