//! A module whose parameters are sharded over ranks trains like a module of one process.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer, Optimizer, SgdConfig};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use collectives::Communicator;
use collectives_burn::{FullySharded, Result};
use collectives_train::{FullyShardedOptions, LossScaler, ShardingStrategy};
use training_common::{largest_difference, uniform};

const RANKS: [usize; 4] = [1, 2, 3, 4];
const UNITS: [&str; 4] = ["embedding", "layers.0", "layers.1", "output"];
/// Samples of a step, on all ranks together.
const BATCH: usize = 12;
const STEPS: usize = 6;
/// The largest allowed difference of losses and parameters. Sums are in another order, and Adam divides by them.
const BOUND: f32 = 2e-5;

#[derive(Module, Debug)]
struct Network {
    embedding: Embedding,
    layers: Vec<Linear>,
    output: Linear,
}

/// Gives parameters values that depend only on their order.
struct Begin(u64);

impl ModuleMapper for Begin {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        param.map(|old| {
            let values = uniform(self.0, 0.7, old.dims().iter().product());
            Tensor::from_data(TensorData::new(values, old.dims()), &old.device()).require_grad()
        })
    }
}

/// Reads parameters in their order.
#[derive(Default)]
struct Read(Vec<f32>);

impl ModuleVisitor for Read {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.extend(param.val().into_data().iter::<f32>());
    }
}

fn read<M: Module>(module: &M) -> Vec<f32> {
    let mut read = Read::default();
    module.visit(&mut read);
    read.0
}

/// Returns a network whose parts cannot be split equally between two, three and four ranks. Only rank 0 has the values
/// that all worlds begin with.
fn network(rank: usize) -> Network {
    let device = Device::default().autodiff();
    let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device);
    let embedding = EmbeddingConfig::new(11, 5).init(&device);
    Network { embedding, layers: vec![linear(5, 7), linear(7, 5)], output: linear(5, 1) }.map(&mut Begin(1000 * rank as u64))
}

fn samples(range: std::ops::Range<usize>) -> (Tensor<2, Int>, Tensor<3>) {
    let device = Device::default();
    let ids: Vec<i64> = range.clone().map(|sample| (sample * 7 % 11) as i64).collect();
    let targets: Vec<f32> = ids.iter().map(|id| uniform(50 + *id as u64, 1.0, 1)[0]).collect();
    let count = range.len();
    (Tensor::from_data(TensorData::new(ids, [count, 1]), &device), Tensor::from_data(TensorData::new(targets, [count, 1, 1]), &device))
}

fn share(comm: &Communicator) -> std::ops::Range<usize> {
    let each = BATCH / comm.world_size();
    comm.rank() * each..(comm.rank() + 1) * each
}

fn layer(layer: &Linear, x: Tensor<3>) -> Tensor<3> {
    layer.forward(x).tanh()
}

fn output(layer: &Linear, x: Tensor<3>) -> Tensor<3> {
    layer.forward(x)
}

/// Returns the loss of the network of one process.
fn whole_loss(network: &Network, (ids, targets): (Tensor<2, Int>, Tensor<3>)) -> Tensor<1> {
    let device = network.output.weight.val().device();
    let hidden = network.layers.iter().fold(network.embedding.forward(ids.to_device(&device)), |x, one| layer(one, x));
    MseLoss::new().forward(output(&network.output, hidden), targets.to_device(&device), Reduction::Mean)
}

/// Runs a forward and a backward pass, and returns the loss.
fn pass(sharded: &mut FullySharded, network: &Network, range: std::ops::Range<usize>, factor: f32) -> Result<f32> {
    let device = Device::default().autodiff();
    let (ids, targets) = samples(range);
    let (ids, targets) = (ids.to_device(&device), targets.to_device(&device));
    let embed = |table: &Embedding, _: Tensor<1>| table.forward(ids.clone());
    let nothing = Tensor::<1>::zeros([1], &device);
    let first = sharded.forward(0, &network.embedding, nothing.clone(), embed)?;
    let second = sharded.forward(1, &network.layers[0], first.clone(), layer)?;
    let third = sharded.forward(2, &network.layers[1], second.clone(), layer)?;
    let last = sharded.forward(3, &network.output, third.clone(), output)?;
    let loss = MseLoss::new().forward(last.clone(), targets, Reduction::Mean);
    let slope = last.grad(&loss.clone().mul_scalar(factor).backward()).unwrap();
    let slope = sharded.backward(3, &network.output, third, slope, output)?;
    let slope = sharded.backward(2, &network.layers[1], second, slope, layer)?;
    let slope = sharded.backward(1, &network.layers[0], first, slope, layer)?;
    assert_eq!(sharded.backward(0, &network.embedding, nothing, slope, embed)?.dims(), [1]);
    Ok(loss.into_scalar())
}

/// Returns all parameters.
fn whole(sharded: &mut FullySharded, network: &Network) -> Result<Vec<f32>> {
    let mut values = read(&sharded.gather(0, &network.embedding)?);
    for (number, layer) in network.layers.iter().chain([&network.output]).enumerate() {
        values.extend(read(&sharded.gather(number + 1, layer)?));
    }
    Ok(values)
}

fn ranks<R: Send>(count: usize, program: impl Fn(&Communicator) -> Result<R> + Sync) -> Vec<R> {
    Communicator::run_local(count, |comm| {
        comm.set_timeout(Duration::from_secs(60));
        Ok(program(comm).unwrap())
    })
    .unwrap()
}

fn sharded(comm: &Communicator, options: FullyShardedOptions) -> Result<(FullySharded, Network)> {
    FullySharded::new(comm, network(comm.rank()), &UNITS, options)
}

#[test]
fn any_number_of_ranks_ends_where_one_process_does() {
    let (mut alone, mut optimizer) = (network(0), AdamConfig::new().with_epsilon(1e-3).init());
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let loss = whole_loss(&alone, samples(0..BATCH));
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &alone);
        alone = optimizer.step(0.02, alone, gradients);
    }
    assert!(losses[STEPS - 1] < losses[0], "nothing was learnt: {losses:?}");
    for count in RANKS {
        for (strategy, prefetch) in [(ShardingStrategy::FullShard, 1), (ShardingStrategy::ShardGradOp, 0)] {
            let ends = ranks(count, |comm| {
                let (mut model, network) = sharded(comm, FullyShardedOptions { strategy, prefetch, ..FullyShardedOptions::default() })?;
                assert!(read(&network).is_empty(), "the module keeps no values");
                let mut optimizer = AdamConfig::new().with_epsilon(1e-3).init();
                let mut losses = Vec::new();
                for _ in 0..STEPS {
                    losses.push(pass(&mut model, &network, share(comm), 1.0)?);
                    model.step(0.02, &mut optimizer)?;
                }
                Ok((losses, whole(&mut model, &network)?))
            });
            let means: Vec<f32> = (0..STEPS).map(|step| ends.iter().map(|(losses, _)| losses[step]).sum::<f32>() / count as f32).collect();
            let apart = largest_difference(&means, &losses).max(largest_difference(&ends[0].1, &read(&alone)));
            println!("{count} ranks, {strategy:?}: {apart:e}");
            assert!(apart <= BOUND, "{count} ranks, {strategy:?}: {apart:e}");
            assert!(ends.iter().all(|(_, end)| end == &ends[0].1), "ranks end with other bits");
        }
    }
}

/// Returns the gradient of one process, and its norm.
fn gradient_alone() -> (Vec<f32>, f64) {
    let network = network(0);
    let begin = read(&network);
    let gradients = GradientsParams::from_grads(whole_loss(&network, samples(0..BATCH)).backward(), &network);
    let end = read(&SgdConfig::new().init().step(1.0, network, gradients));
    let gradient: Vec<f32> = begin.iter().zip(end).map(|(begin, end)| begin - end).collect();
    let norm = gradient.iter().map(|slope| f64::from(*slope).powi(2)).sum::<f64>().sqrt();
    (gradient, norm)
}

#[test]
fn several_passes_clipping_and_scaling_give_the_step_of_one_process() {
    let (gradient, norm) = gradient_alone();
    let limit = norm / 8.0;
    let expected: Vec<f32> =
        read(&network(0)).iter().zip(gradient).map(|(x, slope)| (f64::from(*x) - f64::from(slope) * limit / norm) as f32).collect();
    for (count, passes) in [(1, 3), (2, 2), (3, 4), (4, 1)] {
        let ends = ranks(count, |comm| {
            let (mut model, network) = sharded(comm, FullyShardedOptions::default())?;
            let (mut optimizer, mut scaler) = (SgdConfig::new().init(), LossScaler::default());
            let (own, each, mut seen) = (share(comm), BATCH / count / passes, Vec::new());
            for step in 0..2 {
                // In the first step, a gradient of the last rank overflows.
                let overflow = if step == 0 && comm.rank() == count - 1 { f32::INFINITY } else { 1.0 };
                for pass in 0..passes {
                    let begin = own.start + pass * each;
                    self::pass(&mut model, &network, begin..begin + each, scaler.scale() * overflow / passes as f32)?;
                }
                seen.push(model.step_with(1.0, &mut optimizer, |gradients| {
                    gradients.unscale(&mut scaler)?;
                    let found = gradients.clip_norm(limit)?;
                    assert!(step == 0 || (found - norm).abs() <= 1e-5 * norm, "{found} instead of {norm}");
                    scaler.update(comm)
                })?);
            }
            Ok((seen, whole(&mut model, &network)?))
        });
        for (seen, end) in &ends {
            assert_eq!(seen, &[false, true]);
            let apart = largest_difference(end, &expected);
            assert!(apart <= 1e-6, "{count} ranks, {passes} passes: {apart:e}");
        }
    }
}

/// An optimiser that panics.
#[derive(Clone)]
struct Panics;

impl Optimizer for Panics {
    type State<const D: usize> = ();

    fn step<const D: usize>(&self, _: f64, _: Tensor<D>, _: Tensor<D>, _: Option<Self::State<D>>) -> (Tensor<D>, Option<Self::State<D>>) {
        panic!("no step today")
    }

    fn to_device<const D: usize>((): Self::State<D>, _: &Device) -> Self::State<D> {}
}

#[test]
fn an_optimiser_that_panics_on_one_rank_is_an_error_on_all() {
    let ends = ranks(3, |comm| {
        let (mut model, network) = sharded(comm, FullyShardedOptions::default())?;
        pass(&mut model, &network, share(comm), 1.0)?;
        let mut optimizer = if comm.rank() == 1 { ModuleOptimizer::from(Panics) } else { SgdConfig::new().init() };
        let ended = catch_unwind(AssertUnwindSafe(|| model.step(0.1, &mut optimizer)));
        let words = ended.map_or_else(|_| "panicked".to_owned(), |step| step.unwrap_err().to_string());
        Ok((words, model.gather(0, &network.embedding).unwrap_err().to_string()))
    });
    assert_eq!(ends[1].0, "panicked");
    for (words, later) in [&ends[0], &ends[2]] {
        assert!(words.contains("failed on rank 1") && later.contains("a step of this sharded model failed"), "{words}, {later}");
    }
}

/// Gives a module's parameters another type.
struct Cast(FloatDType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.cast(self.0).detach().require_grad())
    }
}

#[test]
fn parameters_and_gathered_parameters_have_the_types_that_were_asked_for() {
    let trained = |comm: &Communicator, own: FloatDType, gather_type: Option<collectives::DType>, used: FloatDType| {
        let device = Device::default().autodiff();
        let module = LinearConfig::new(3, 1).init(&device).map(&mut Begin(5)).map(&mut Cast(own));
        let options = FullyShardedOptions { gather_type, ..FullyShardedOptions::default() };
        let (mut model, module) = FullySharded::new(comm, module, &["weight", "bias", "without parameters"], options)?;
        let (weight, x) = (|one: &Linear, x: Tensor<2>| x.matmul(one.weight.val()), Tensor::<2>::ones([2, 3], &device).cast(used));
        for _ in 0..3 {
            let y = model.forward(0, &module, x.clone(), weight)?;
            let slope = model.backward(0, &module, x.clone(), y.clone().inner() * 0.125, weight)?;
            assert!(y.dtype() == used.into() && slope.dtype() == used.into());
            model.step(1.0, &mut SgdConfig::new().init())?;
        }
        let whole = model.gather(0, &module)?.weight.val();
        Ok(whole.into_data().iter::<f32>().collect::<Vec<_>>())
    };
    use FloatDType::{BF16, F16, F32, F64};
    let exact = ranks(1, |comm| trained(comm, F32, None, F32)).remove(0);
    let half = Some(collectives::DType::F16);
    for (own, gather_type, used, bits) in [(F16, None, F16, 11), (BF16, None, BF16, 8), (F64, None, F64, 23), (F32, half, F16, 11)] {
        for count in RANKS {
            // Values are below 2, and each of three steps rounds a few times to `bits` bits.
            let bound = 16.0 * 0.5_f32.powi(bits);
            let ends = ranks(count, |comm| trained(comm, own, gather_type, used));
            assert!(ends.iter().all(|end| largest_difference(end, &exact) <= bound), "{own:?}, {used:?}, {count} ranks: {ends:?}");
        }
    }
}

#[test]
fn each_rank_has_only_its_part_and_the_units_that_compute() {
    const LAYERS: usize = 24;
    for count in [2, 4] {
        let bytes = ranks(count, |comm| {
            let device = Device::default().autodiff();
            let layers: Vec<Linear> = (0..LAYERS).map(|_| LinearConfig::new(64, 64).with_bias(false).init(&device)).collect();
            let names: Vec<String> = (0..LAYERS).map(|layer| layer.to_string()).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let (mut model, layers) = FullySharded::new(comm, layers, &names, FullyShardedOptions::default())?;
            let (mut inputs, forward) = (vec![Tensor::<2>::ones([2, 64], &device)], |layer: &Linear, x: Tensor<2>| layer.forward(x));
            for unit in 0..LAYERS {
                inputs.push(model.forward(unit, &layers[unit], inputs[unit].clone(), forward)?);
            }
            let mut slope = inputs[LAYERS].clone();
            for unit in (0..LAYERS).rev() {
                slope = model.backward(unit, &layers[unit], inputs[unit].clone(), slope, forward)?;
            }
            Ok(model.memory_bytes())
        });
        let allowed = 4 * 64 * 64 * (3 * LAYERS / count + 4);
        assert!(bytes.iter().all(|bytes| (1..=allowed).contains(bytes)), "{bytes:?} bytes instead of at most {allowed}");
    }
}

#[test]
fn calls_that_cannot_be_right_are_errors() {
    let words = ranks(2, |comm| {
        let made =
            |units: &[&str]| FullySharded::new(comm, network(0), units, FullyShardedOptions::default()).map(drop).unwrap_err().to_string();
        let (missing, twice) = (made(&["embedding", "layers"]), made(&["embedding", "layers", "layers.1", "output"]));
        let other = made(if comm.rank() == 0 { &UNITS } else { &["embedding", "layers", "output"] });
        let (mut model, network) = sharded(comm, FullyShardedOptions::default())?;
        let x = Tensor::<3>::ones([1, 1, 5], &Device::default().autodiff());
        assert!(model.forward(4, &network.output, x.clone(), output).unwrap_err().to_string().contains("there is no unit 4"));
        let slope = Tensor::<3>::ones([1, 2, 1], &Device::default());
        let shape = model.backward(3, &network.output, x, slope, output).unwrap_err().to_string();
        assert!(
            model
                .step_with(0.1, &mut SgdConfig::new().init(), |_| Ok(comm.rank() == 0))
                .unwrap_err()
                .to_string()
                .contains("rank 1 skipped")
        );
        Ok([missing, twice, other, shape])
    });
    for (words, expected) in
        words[0].iter().zip(["output.weight belongs to no unit", "belongs to several units", "units", "the slope has shape"])
    {
        assert!(words.contains(expected), "{words}");
    }
}

#[test]
fn a_rank_that_dies_is_an_error_of_the_step() {
    let ends = ranks(2, |comm| {
        let (mut model, network) = sharded(comm, FullyShardedOptions::default())?;
        if comm.rank() == 1 {
            comm.abort();
            return Ok(true);
        }
        Ok(pass(&mut model, &network, share(comm), 1.0).is_err() && model.step(0.1, &mut SgdConfig::new().init()).is_err())
    });
    assert_eq!(ends, [true, true]);
}
