//! A network trained on many ranks, threads and processes, ends like one trained by a single process on the whole
//! batch.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsAccumulator, GradientsParams, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use collectives::{Communicator, Transport};
use collectives_burn::{DataParallel, Error, Trainer, broadcast_parameters};
use collectives_train::Options;
use training_common::{largest_difference, uniform};

#[path = "../../tests/common/hosts.rs"]
mod hosts;
#[path = "../../tests/common/ports.rs"]
mod ports;

use hosts::{Hosts, skip};

/// Samples per step, for any number of ranks.
const BATCH: usize = 12;
const STEPS: u64 = 40;
const RATE: f64 = 0.01;

/// The allowed difference of parameters: sums in different orders differ in the last bit, and Adam's 40 steps of 0.01
/// amplify that.
const BOUND: f32 = 1e-4;

#[derive(Module, Debug)]
struct Network {
    layers: Vec<Linear>,
    norm: LayerNorm,
    output: Linear,
}

impl Network {
    fn new(device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        Self { layers: vec![linear(3, 16), linear(16, 8)], norm: LayerNormConfig::new(8).init(device), output: linear(8, 2) }
    }

    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        let inner = self.layers.iter().fold(input, |x, layer| layer.forward(x).tanh());
        self.output.forward(self.norm.forward(inner))
    }

    /// Returns the loss over these samples of a step.
    fn loss(&self, seed: u64, step: u64, samples: std::ops::Range<usize>) -> Tensor<1> {
        let device = self.output.weight.val().device();
        let of = |part: u64, side: usize| {
            let all = uniform(seed * 1000 + step * 2 + part, 1.0, BATCH * side);
            let mine = all[samples.start * side..samples.end * side].to_vec();
            Tensor::<2>::from_data(TensorData::new(mine, [samples.len(), side]), &device)
        };
        let input = of(0, 3);
        let target = input.clone().slice([0..samples.len(), 0..2]).powi_scalar(2) + of(1, 2) * 0.1;
        MseLoss::new().forward(self.forward(input), target, Reduction::Mean)
    }

    fn parameters(&self) -> Vec<f32> {
        let linear = |layer: &Linear| [layer.weight.val().flatten::<1>(0, 1), layer.bias.as_ref().unwrap().val()];
        let mut tensors: Vec<Tensor<1>> = self.layers.iter().chain([&self.output]).flat_map(linear).collect();
        tensors.push(self.norm.gamma.val());
        tensors.into_iter().flat_map(|tensor| tensor.into_data().try_into_vec::<f32>().unwrap()).collect()
    }
}

/// Returns the initial network. Only rank 0 has the weights that all worlds start with; those of other ranks must be
/// overwritten.
fn start(comm: &Communicator, seed: u64) -> Network {
    let device = Device::default().autodiff();
    let mut network = Network::new(&device);
    if comm.rank() == 0 {
        for (number, layer) in network.layers.iter_mut().enumerate() {
            let [inputs, outputs] = layer.weight.dims();
            let values = uniform(seed + number as u64, 0.5, inputs * outputs);
            let tensor = || Tensor::from_data(TensorData::new(values, [inputs, outputs]), &device).require_grad();
            layer.weight = layer.weight.clone().map(|_| tensor());
            layer.bias = layer.bias.take().map(|bias| bias.map(|bias| bias.zeros_like().require_grad()));
        }
        let values = uniform(seed + 9, 0.5, 16);
        network.output.weight =
            network.output.weight.clone().map(|_| Tensor::from_data(TensorData::new(values, [8, 2]), &device).require_grad());
        network.output.bias = network.output.bias.take().map(|bias| bias.map(|bias| bias.zeros_like().require_grad()));
    }
    network
}

/// Returns this rank's samples.
fn share(comm: &Communicator) -> std::ops::Range<usize> {
    let count = BATCH / comm.world_size();
    comm.rank() * count..(comm.rank() + 1) * count
}

/// Trains, and returns the losses and the parameters at the end.
fn trained(comm: &Communicator, seed: u64, options: Options) -> (Vec<f64>, Vec<f32>) {
    let (mut trainer, mut network) = Trainer::with_options(comm, start(comm, seed), AdamConfig::new().init(), options).unwrap();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let loss = network.loss(seed, step, share(comm));
        let mean;
        (network, mean) = trainer.step(RATE, network, loss).unwrap();
        losses.push(mean);
    }
    (losses, network.parameters())
}

fn seed() -> u64 {
    let seed = std::env::var("COLLECTIVES_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()) % 10_000);
    println!("COLLECTIVES_TEST_SEED={seed}");
    seed
}

fn alone(seed: u64) -> (Vec<f64>, Vec<f32>) {
    Communicator::run_local(1, |comm| Ok(trained(comm, seed, Options::default()))).unwrap().remove(0)
}

#[test]
fn any_number_of_ranks_ends_where_one_process_does() {
    let seed = seed();
    let (losses, parameters) = alone(seed);
    assert!(losses[STEPS as usize - 1] < 0.5 * losses[0], "nothing was learnt: {losses:?}");
    for count in 1..=4 {
        for transport in [Transport::Shm, Transport::Tcp] {
            for bucket_bytes in [256, 1 << 20] {
                let mut ranks = Communicator::builder().configure(|config| config.transport = transport).local(count).unwrap();
                let options = Options { bucket_bytes, ..Options::default() };
                let (ranks, options) = (ranks.iter_mut(), &options);
                let ends: Vec<_> = std::thread::scope(|scope| {
                    let started: Vec<_> = ranks.map(|comm| scope.spawn(move || trained(comm, seed, options.clone()))).collect();
                    started.into_iter().map(|rank| rank.join().unwrap()).collect()
                });
                for end in &ends {
                    assert_eq!(end, &ends[0], "ranks end with other bits");
                }
                let apart = largest_difference(&ends[0].1, &parameters);
                println!("{count} ranks, {transport:?}, buckets of {bucket_bytes}: {apart:e}");
                assert!(apart <= BOUND, "{apart:e} apart");
            }
        }
    }
}

/// Trains as a rank of the test `name`, if this process is one, and prints the parameters.
fn is_rank_of(name: &str) -> bool {
    if std::env::var("COLLECTIVES_TEST_RANK_OF").as_deref() != Ok(name) {
        return false;
    }
    let comm = Communicator::from_env().unwrap();
    let (_, parameters) = trained(&comm, seed(), Options::default());
    let bits: Vec<String> = parameters.iter().map(|parameter| parameter.to_bits().to_string()).collect();
    println!("parameters: {}", bits.join(" "));
    comm.close().unwrap();
    true
}

/// Starts this program again as a rank of a test.
fn start_rank(mut command: Command, name: &str, seed: u64, rank: [usize; 3], root: (&str, u16)) -> Child {
    let [rank, world_size, local_rank] = rank.map(|number| number.to_string());
    command.args(["--exact", name, "--nocapture"]).env("COLLECTIVES_TEST_RANK_OF", name).env("COLLECTIVES_TEST_SEED", seed.to_string());
    command.env("RANK", rank).env("WORLD_SIZE", world_size).env("LOCAL_RANK", local_rank);
    command.env("MASTER_ADDR", root.0).env("MASTER_PORT", root.1.to_string()).env("COLLECTIVES_TIMEOUT", "60");
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for the ranks. All must end with the same bits, close to the parameters of a single process.
fn assert_trained(ranks: Vec<Child>, parameters: &[f32]) {
    let ended = |rank: Child| {
        let output = rank.wait_with_output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{out}{err}");
        let bits = out.lines().find_map(|line| line.split_once("parameters: ")).unwrap().1;
        bits.split(' ').map(|bits| f32::from_bits(bits.parse().unwrap())).collect::<Vec<_>>()
    };
    let ends: Vec<_> = ranks.into_iter().map(ended).collect();
    assert!(ends.iter().all(|end| end == &ends[0]), "ranks end with other bits");
    let apart = largest_difference(&ends[0], parameters);
    assert!(apart <= BOUND, "{apart:e} apart");
}

#[test]
fn processes_end_where_one_process_does() {
    const NAME: &str = "processes_end_where_one_process_does";
    if is_rank_of(NAME) {
        return;
    }
    let (seed, port) = (seed(), ports::free_port());
    let program = std::env::current_exe().unwrap();
    let rank = |rank: usize| start_rank(Command::new(&program), NAME, seed, [rank, 3, rank], ("127.0.0.1", port));
    let ranks = (0..3).map(rank).collect();
    assert_trained(ranks, &alone(seed).1);
}

#[test]
fn two_hosts_of_two_processes_end_where_one_process_does() {
    const NAME: &str = "two_hosts_of_two_processes_end_where_one_process_does";
    if is_rank_of(NAME) {
        return;
    }
    let hosts = match Hosts::up(1, 2) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    let (seed, program) = (seed(), std::env::current_exe().unwrap());
    let rank = |rank: usize| {
        let command = hosts.command(rank / 2, program.to_str().unwrap());
        start_rank(command, NAME, seed, [rank, 4, rank % 2], ("10.99.1.1", 29512))
    };
    let ranks = (0..4).map(rank).collect();
    assert_trained(ranks, &alone(seed).1);
}

/// Gives a module's parameters another type.
struct Cast(FloatDType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.cast(self.0).detach().require_grad())
    }
}

#[test]
fn gradients_of_half_precision_are_averaged_exactly_where_the_mean_is_a_number_of_theirs() {
    for (dtype, count) in [FloatDType::F16, FloatDType::BF16].into_iter().flat_map(|dtype| (1..=4).map(move |count| (dtype, count))) {
        let gradients = Communicator::run_local(count, |comm| {
            let device = Device::flex().autodiff();
            let model = LinearConfig::new(3, 2).init(&device).map(&mut Cast(dtype));
            let (mut parallel, model) = DataParallel::new(comm, model).unwrap();
            // The ranks' gradients are 12, 24, 36 …, whose means are whole numbers.
            let input = Tensor::<2>::full([1, 3], 12.0 * (1.0 + comm.rank() as f32), &device).cast(dtype);
            let gradients = GradientsParams::from_grads(model.forward(input).sum().backward(), &model);
            let gradients = parallel.average(&model, gradients).unwrap();
            let slope = gradients.get::<2>(model.weight.id).unwrap();
            let own_type = slope.dtype() == dtype.into();
            Ok((own_type, slope.into_data().iter::<f32>().collect::<Vec<_>>()))
        });
        for gradient in gradients.unwrap() {
            assert_eq!(gradient, (true, vec![6.0 * (count + 1) as f32; 6]), "{dtype:?}, {count} ranks");
        }
    }
}

/// Returns the loss and the parameters of a half-precision network after ten steps.
fn trained_in_half(comm: &Communicator, dtype: FloatDType) -> (f64, Vec<f32>) {
    let device = Device::flex().autodiff();
    let weights = Tensor::<2>::from_data(TensorData::new(uniform(3, 0.5, 12), [3, 4]), &device);
    let mut model = LinearConfig::new(3, 4).init(&device);
    model.weight = model.weight.map(|_| weights.require_grad());
    model.bias = model.bias.map(|bias| bias.map(|bias| bias.zeros_like().require_grad()));
    let (mut trainer, mut model): (_, Linear) = Trainer::new(comm, model.map(&mut Cast(dtype)), SgdConfig::new().init()).unwrap();
    let mut mean = f64::NAN;
    for step in 0..10 {
        let mine = share(comm);
        let values = uniform(100 + step, 1.0, BATCH * 3)[mine.start * 3..mine.end * 3].to_vec();
        let input = Tensor::<2>::from_data(TensorData::new(values, [mine.len(), 3]), &device).cast(dtype);
        (model, mean) = trainer.step(0.1, model.clone(), model.forward(input).powi_scalar(2).mean()).unwrap();
    }
    let bias = model.bias.unwrap().val().into_data();
    (mean, model.weight.val().into_data().iter::<f32>().chain(bias.iter::<f32>()).collect())
}

#[test]
fn a_network_of_half_precision_ends_near_where_one_process_does() {
    // A parameter is below 1, and each of ten steps rounds it to `bits` bits. Ranks may differ from one process by one
    // rounding in each.
    for (dtype, bits) in [(FloatDType::F16, 11), (FloatDType::BF16, 8)] {
        let bound = 10.0 * 0.5_f32.powi(bits);
        let alone = Communicator::run_local(1, |comm| Ok(trained_in_half(comm, dtype))).unwrap().remove(0);
        for count in 2..=4 {
            let ends = Communicator::run_local(count, |comm| Ok(trained_in_half(comm, dtype))).unwrap();
            assert!(ends.iter().all(|end| end == &ends[0]), "ranks end with other bits");
            let apart = largest_difference(&ends[0].1, &alone.1);
            println!("{dtype:?}, {count} ranks: {apart:e}, bound {bound:e}");
            assert!(apart <= bound && (ends[0].0 - alone.0).abs() <= f64::from(bound), "{dtype:?}, {count} ranks: {apart:e}");
        }
    }
}

#[test]
fn several_backward_passes_are_averaged_as_one() {
    let seed = seed();
    let gradients_of = |comm: &Communicator, passes: usize| {
        let (mut parallel, network) = DataParallel::new(comm, start(comm, seed)).unwrap();
        let mut sum = GradientsAccumulator::new();
        let mine = share(comm);
        let count = mine.len() / passes;
        for pass in 0..passes {
            let samples = mine.start + pass * count..mine.start + (pass + 1) * count;
            let loss = network.loss(seed, 0, samples).div_scalar(passes as f32);
            sum.accumulate(&network, GradientsParams::from_grads(loss.backward(), &network));
        }
        let gradients = parallel.average(&network, sum.grads()).unwrap();
        assert_eq!(gradients.len(), 8);
        gradients.get::<2>(network.output.weight.id).unwrap().into_data().try_into_vec::<f32>().unwrap()
    };
    let expected = Communicator::run_local(1, |comm| Ok(gradients_of(comm, 1))).unwrap().remove(0);
    for (ranks, passes) in [(1, 3), (2, 2), (3, 4)] {
        for found in Communicator::run_local(ranks, |comm| Ok(gradients_of(comm, passes))).unwrap() {
            assert!(largest_difference(&found, &expected) <= 1e-6, "{ranks} ranks, {passes} passes");
        }
    }
}

#[test]
fn frozen_parameters_are_given_to_all_and_not_averaged() {
    let outcomes = Communicator::run_local(2, |comm| {
        let device = Device::default().autodiff();
        let mut network = Network::new(&device);
        network.output = network.output.no_grad();
        let (mut parallel, network) = DataParallel::new(comm, network).unwrap();
        let frozen = network.output.weight.val();
        assert!(!frozen.is_require_grad() && network.norm.gamma.val().is_require_grad());
        let loss = network.loss(3, 0, share(comm));
        let gradients = parallel.average(&network, GradientsParams::from_grads(loss.backward(), &network)).unwrap();
        Ok((frozen.into_data().try_into_vec::<f32>().unwrap(), gradients.len()))
    });
    let outcomes = outcomes.unwrap();
    assert!(outcomes[0] == outcomes[1] && outcomes[0].1 == 6, "{:?}", outcomes[0].1);
}

#[test]
fn ranks_with_other_modules_are_told_which_parameter_differs() {
    let errors = Communicator::run_local(2, |comm| {
        let device = Device::default().autodiff();
        Ok(DataParallel::new(comm, vec![LinearConfig::new(3, 4 + comm.rank()).init(&device)]).unwrap_err())
    });
    for error in errors.unwrap() {
        let words = error.to_string();
        assert!(matches!(error, Error::Collective(_)) && words.contains("0.weight") && words.contains("[3, 4]"), "{words}");
    }
}

#[test]
fn a_loss_without_a_backward_pass_and_a_type_that_is_none_are_errors() {
    let words = Communicator::run_local(2, |comm| {
        let device = Device::default().autodiff();
        let (mut trainer, network) = Trainer::new(comm, LinearConfig::new(1, 1).init(&device), AdamConfig::new().init()).unwrap();
        let untracked = trainer.step(0.1, network, Tensor::<1>::ones([1], &Device::default())).unwrap_err();
        comm.abort();
        let lost = broadcast_parameters(comm, LinearConfig::new(1, 1).init(&device), 0).unwrap_err();
        Ok((untracked.to_string(), matches!(lost, Error::Collective(_))))
    });
    assert!(words.unwrap().iter().all(|(words, lost)| words.contains("no backward pass") && *lost));
}

#[test]
fn a_rank_that_dies_is_an_error_of_the_step() {
    let ends = Communicator::run_local(2, |comm| {
        comm.set_timeout(Duration::from_secs(20));
        let (mut trainer, network) = Trainer::new(comm, start(comm, 1), AdamConfig::new().init()).unwrap();
        if comm.rank() == 1 {
            comm.abort();
            return Ok(true);
        }
        let loss = network.loss(1, 0, share(comm));
        Ok(matches!(trainer.step(RATE, network, loss), Err(Error::Collective(_))))
    });
    assert_eq!(ends.unwrap(), [true, true]);
}
