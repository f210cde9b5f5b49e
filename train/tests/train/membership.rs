//! Training goes on with another number of ranks, in the same processes: a rank joins, then a rank leaves without notice.
//! All parameters have the bits of a training by one process.

use collectives::{Communicator, Error, Result};
use collectives_train::checkpoint::{Piece, Sharded};
use collectives_train::{
    DataParallel, FullySharded, FullyShardedOptions, LossScaler, LossScalerOptions, Options, Parameter, Sampler, ShardedOptimizer,
    StateTransfer, Unit,
};

use crate::common::meeting::{Meeting, wait_until};
use crate::common::random::Random;

/// Samples of a batch: every number of ranks here divides it.
const BATCH: usize = 12;
const STEPS: u64 = 9;
const SCALER: LossScalerOptions = LossScalerOptions { initial_scale: 1024.0, growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 2 };

/// One list of numbers for each parameter, bucket or unit.
type Lists = Vec<Vec<f32>>;

fn parameters() -> Vec<Parameter> {
    let shapes: [&[usize]; 5] = [&[31, 17], &[], &[2, 3], &[1099], &[1]];
    shapes.iter().enumerate().map(|(index, shape)| Parameter::new::<f32>(format!("p{index}"), shape)).collect()
}

fn options() -> Options {
    Options { first_bucket_bytes: 64, bucket_bytes: 3000, ..Options::default() }
}

fn lens() -> Vec<usize> {
    parameters().iter().map(|parameter| parameter.shape.iter().product()).collect()
}

fn zeros(lens: impl IntoIterator<Item = usize>) -> Lists {
    lens.into_iter().map(|len| vec![0.0; len]).collect()
}

fn slices(lists: &Lists) -> impl Iterator<Item = &[f32]> {
    lists.iter().map(Vec::as_slice)
}

fn slices_mut(lists: &mut Lists) -> impl Iterator<Item = &mut [f32]> {
    lists.iter_mut().map(Vec::as_mut_slice)
}

/// Returns the parameters before the first step.
fn initial() -> Lists {
    lens().iter().enumerate().map(|(index, len)| (0..*len).map(|at| (at % 7) as f32 * 0.1 - index as f32).collect()).collect()
}

/// Adam (Kingma, Ba 2015), in place, except for a parameter's position.
fn adam(step: u64, x: &mut [f32], slopes: &[f32], (means, squares): (&mut [f32], &mut [f32])) {
    for (((x, slope), mean), square) in x.iter_mut().zip(slopes).zip(means).zip(squares) {
        *mean = 0.9 * *mean + 0.1 * slope;
        *square = 0.999 * *square + 0.001 * slope * slope;
        let (mean, square) = (*mean / (1.0 - 0.9_f32.powi(step as i32 + 1)), *square / (1.0 - 0.999_f32.powi(step as i32 + 1)));
        *x -= 0.01 * mean / (square.sqrt() + 1e-8);
    }
}

/// Returns one sample's gradient of a parameter: 12 times a small whole number, for which every mean here is exact.
fn slopes(seed: u64, sample: usize, index: usize, len: usize) -> Vec<f32> {
    let mut random = Random(seed ^ (sample as u64) << 20 ^ index as u64);
    (0..len).map(|_| 12.0 * (random.below(17) as f32 - 8.0)).collect()
}

/// Returns the mean of the scaled gradients of some samples, for each parameter.
fn gradients(seed: u64, samples: &[usize], scale: f32) -> Lists {
    let mean = |(index, len): (usize, usize)| {
        let mut sum = vec![0.0; len];
        for sample in samples {
            sum.iter_mut().zip(slopes(seed, *sample, index, len)).for_each(|(sum, slope)| *sum += slope);
        }
        sum.iter_mut().for_each(|sum| *sum = *sum / samples.len() as f32 * scale);
        sum
    };
    lens().into_iter().enumerate().map(mean).collect()
}

/// Trains in one process, without this crate's models. Returns the parameters.
fn train_alone(seed: u64) -> Lists {
    let (mut values, mut means, mut squares) = (initial(), zeros(lens()), zeros(lens()));
    let order: Vec<usize> = Sampler::of_rank(0, 1, BATCH * STEPS as usize).unwrap().epoch(0).collect();
    for (step, batch) in (0..STEPS).zip(order.chunks(BATCH)) {
        let gradients = gradients(seed, batch, 1.0);
        for (index, x) in values.iter_mut().enumerate() {
            adam(step, x, &gradients[index], (&mut means[index], &mut squares[index]));
        }
    }
    values
}

/// A model with its optimiser's state, on one rank.
trait Trained: Sized {
    /// Starts from the initial parameters on founders. The values on newcomers do not matter.
    fn new(comm: &Communicator) -> Result<Self>;

    /// Takes the place of `old` on another communicator.
    fn resized(old: &Self, comm: &Communicator) -> Result<Self>;

    /// Declares the state that `old` has, and the state that this model needs.
    fn declare<'a>(&'a mut self, old: Option<&'a Self>, transfer: &mut StateTransfer<'a>);

    /// Uses the state that was transferred.
    fn load(&mut self) -> Result<()>;

    /// Takes a step.
    fn step(&mut self, comm: &Communicator, step: u64, gradients: &Lists, scaler: &mut LossScaler) -> Result<()>;

    /// Returns all parameters.
    fn values(&mut self) -> Result<Lists>;
}

/// Offers whole tensors on members, and asks for them on newcomers.
fn declare_whole<'a>(transfer: &mut StateTransfer<'a>, kind: &str, own: Option<&'a Lists>, wanted: &'a mut Lists) {
    for (index, (Parameter { name, shape, .. }, wanted)) in parameters().iter().zip(wanted).enumerate() {
        match own {
            Some(own) => transfer.offer(&format!("{kind}.{name}"), shape, Piece::Whole, &own[index]),
            None => transfer.want(&format!("{kind}.{name}"), shape, Piece::Whole, wanted),
        };
    }
}

/// This rank's shares of some kinds of state, and a copy of the shares of the rank before it.
struct Shares {
    own: Vec<(&'static str, Lists)>,
    /// The number of the other rank, and its shares.
    copies: Option<(usize, Vec<Lists>)>,
}

impl Shares {
    fn new(kinds: &[&'static str], lens: &[usize]) -> Self {
        Self { own: kinds.iter().map(|kind| (*kind, zeros(lens.iter().copied()))).collect(), copies: None }
    }

    /// Copies the shares of the rank before this one.
    fn renew_copies(&mut self, comm: &Communicator) -> Result<()> {
        let ranks = comm.world_size();
        let (next, before) = ((comm.rank() + 1) % ranks, (comm.rank() + ranks - 1) % ranks);
        let mut copies: Vec<Lists> = self.own.iter().map(|(_, lists)| lists.clone()).collect();
        for ((_, lists), copies) in self.own.iter().zip(&mut copies) {
            for (list, copy) in lists.iter().zip(copies) {
                comm.send_recv(list, next, copy, before)?;
            }
        }
        self.copies = Some((before, copies));
        Ok(())
    }

    fn offer<'a>(&'a self, transfer: &mut StateTransfer<'a>, model: &impl Sharded) {
        for (kind, lists) in &self.own {
            transfer.offer_shares(kind, model, slices(lists));
        }
        if let Some((before, copies)) = &self.copies {
            for ((kind, _), lists) in self.own.iter().zip(copies) {
                transfer.offer_shares_of(kind, model, *before, slices(lists));
            }
        }
    }

    fn want<'a>(&'a mut self, transfer: &mut StateTransfer<'a>, model: &impl Sharded) {
        for (kind, lists) in &mut self.own {
            transfer.want_shares(kind, model, slices_mut(lists));
        }
    }
}

/// The same parameters and moments on every rank.
struct Replicated {
    model: DataParallel,
    values: Lists,
    means: Lists,
    squares: Lists,
}

impl Trained for Replicated {
    fn new(comm: &Communicator) -> Result<Self> {
        let model = DataParallel::new(comm, parameters(), options())?;
        Ok(Self { model, values: initial(), means: zeros(lens()), squares: zeros(lens()) })
    }

    fn resized(old: &Self, comm: &Communicator) -> Result<Self> {
        let model = old.model.resized(comm)?;
        Ok(Self { model, values: old.values.clone(), means: old.means.clone(), squares: old.squares.clone() })
    }

    fn declare<'a>(&'a mut self, old: Option<&'a Self>, transfer: &mut StateTransfer<'a>) {
        declare_whole(transfer, "value", old.map(|old| &old.values), &mut self.values);
        declare_whole(transfer, "mean", old.map(|old| &old.means), &mut self.means);
        declare_whole(transfer, "square", old.map(|old| &old.squares), &mut self.squares);
    }

    fn load(&mut self) -> Result<()> {
        Ok(())
    }

    fn step(&mut self, comm: &Communicator, step: u64, gradients: &Lists, scaler: &mut LossScaler) -> Result<()> {
        for (index, gradient) in gradients.iter().enumerate().rev() {
            self.model.ready(index, gradient)?;
        }
        let mut averaged = self.model.finish()?;
        averaged.unscale(scaler)?;
        assert!(scaler.update(comm)?);
        for (index, x) in self.values.iter_mut().enumerate() {
            adam(step, x, averaged.gradient(index)?, (&mut self.means[index], &mut self.squares[index]));
        }
        Ok(())
    }

    fn values(&mut self) -> Result<Lists> {
        Ok(self.values.clone())
    }
}

/// The same parameters on every rank, and a share of the moments.
struct ShardedMoments {
    model: ShardedOptimizer,
    values: Lists,
    moments: Shares,
}

impl ShardedMoments {
    fn of(model: ShardedOptimizer, values: Lists) -> Self {
        let moments = Shares::new(&["mean", "square"], &model.shard_lens().collect::<Vec<_>>());
        Self { model, values, moments }
    }
}

impl Trained for ShardedMoments {
    fn new(comm: &Communicator) -> Result<Self> {
        ShardedOptimizer::new(comm, parameters(), options()).map(|model| Self::of(model, initial()))
    }

    fn resized(old: &Self, comm: &Communicator) -> Result<Self> {
        Ok(Self::of(old.model.resized(comm)?, old.values.clone()))
    }

    fn declare<'a>(&'a mut self, old: Option<&'a Self>, transfer: &mut StateTransfer<'a>) {
        declare_whole(transfer, "value", old.map(|old| &old.values), &mut self.values);
        old.iter().for_each(|old| old.moments.offer(transfer, &old.model));
        self.moments.want(transfer, &self.model);
    }

    fn load(&mut self) -> Result<()> {
        self.values.iter().enumerate().try_for_each(|(index, values)| self.model.load(index, values))
    }

    fn step(&mut self, comm: &Communicator, step: u64, gradients: &Lists, scaler: &mut LossScaler) -> Result<()> {
        for (index, gradient) in gradients.iter().enumerate() {
            self.model.ready(index, gradient)?;
        }
        let mut shards = self.model.reduce()?;
        shards.unscale(scaler)?;
        assert!(scaler.update(comm)?);
        let [(_, means), (_, squares)] = &mut self.moments.own[..] else { unreachable!() };
        let updated = shards.update(|shard| {
            let moments = (&mut means[shard.bucket][..], &mut squares[shard.bucket][..]);
            shard.values::<f32>().map(|(x, slopes)| adam(step, x, slopes, moments))
        })?;
        self.values.iter_mut().enumerate().try_for_each(|(index, values)| updated.copy_to(index, values))?;
        self.moments.renew_copies(comm)
    }

    fn values(&mut self) -> Result<Lists> {
        Ok(self.values.clone())
    }
}

/// A share of the parameters and of the moments.
struct ShardedParameters {
    model: FullySharded,
    state: Shares,
}

impl ShardedParameters {
    fn of(model: FullySharded) -> Self {
        let state = Shares::new(&["value", "mean", "square"], &model.shard_lens().collect::<Vec<_>>());
        Self { model, state }
    }
}

/// The parameters in two units.
const UNITS: [std::ops::Range<usize>; 2] = [0..2, 2..5];

impl Trained for ShardedParameters {
    fn new(comm: &Communicator) -> Result<Self> {
        let unit = |range: std::ops::Range<usize>| Unit::new(format!("unit{}", range.start), parameters()[range].to_vec());
        let mut model = FullySharded::new(comm, UNITS.map(unit).to_vec(), FullyShardedOptions::default())?;
        for (unit, range) in UNITS.into_iter().enumerate() {
            for (number, values) in initial()[range].iter().enumerate() {
                model.load(unit, number, values)?;
            }
        }
        let mut this = Self::of(model);
        for (unit, share) in this.state.own[0].1.iter_mut().enumerate() {
            share.copy_from_slice(this.model.shard(unit)?);
        }
        Ok(this)
    }

    fn resized(old: &Self, comm: &Communicator) -> Result<Self> {
        old.model.resized(comm).map(Self::of)
    }

    fn declare<'a>(&'a mut self, old: Option<&'a Self>, transfer: &mut StateTransfer<'a>) {
        old.iter().for_each(|old| old.state.offer(transfer, &old.model));
        self.state.want(transfer, &self.model);
    }

    fn load(&mut self) -> Result<()> {
        self.state.own[0].1.iter().enumerate().try_for_each(|(unit, share)| self.model.load_shard(unit, share))
    }

    fn step(&mut self, comm: &Communicator, step: u64, gradients: &Lists, scaler: &mut LossScaler) -> Result<()> {
        for (unit, range) in UNITS.into_iter().enumerate().rev() {
            self.model.reduce_gradients(unit, &gradients[range])?;
        }
        let mut reduced = self.model.reduce()?;
        reduced.unscale(scaler)?;
        assert!(scaler.update(comm)?);
        let [(_, values), (_, means), (_, squares)] = &mut self.state.own[..] else { unreachable!() };
        reduced.update(|shard| {
            let moments = (&mut means[shard.bucket][..], &mut squares[shard.bucket][..]);
            let (x, slopes) = shard.values::<f32>()?;
            adam(step, x, slopes, moments);
            Ok(())
        })?;
        for (unit, share) in values.iter_mut().enumerate() {
            share.copy_from_slice(self.model.shard(unit)?);
        }
        self.state.renew_copies(comm)
    }

    fn values(&mut self) -> Result<Lists> {
        let mut all = Vec::new();
        for (unit, range) in UNITS.into_iter().enumerate() {
            self.model.gather(unit)?;
            for number in 0..range.len() {
                all.push(self.model.parameter::<f32>(unit, number)?.to_vec());
            }
            self.model.release(unit)?;
        }
        Ok(all)
    }
}

/// A rank in training.
struct Rank<M> {
    comm: Communicator,
    trained: M,
    scaler: LossScaler,
    sampler: Sampler,
    step: u64,
    seed: u64,
}

impl<M: Trained> Rank<M> {
    fn founder(comm: Communicator, seed: u64) -> Result<Self> {
        let mut trained = M::new(&comm)?;
        trained.load()?;
        let sampler = Sampler::new(&comm, BATCH * STEPS as usize);
        Ok(Self { trained, scaler: LossScaler::new(SCALER)?, sampler, step: 0, seed, comm })
    }

    /// Begins on a newcomer, whose state comes from the members.
    fn newcomer(comm: Communicator, seed: u64) -> Result<Self> {
        let (mut trained, mut scaler) = (M::new(&comm)?, LossScaler::new(SCALER)?);
        let sampler = Sampler::new(&comm, BATCH * STEPS as usize);
        let step = transfer(&comm, None, &mut trained, &mut scaler, 0)?;
        Ok(Self { comm, trained, scaler, sampler, step, seed })
    }

    /// Goes on with the ranks of another communicator.
    fn change(&mut self, comm: Communicator) -> Result<()> {
        let mut trained = M::resized(&self.trained, &comm)?;
        transfer(&comm, Some(&self.trained), &mut trained, &mut self.scaler, self.step)?;
        self.sampler = self.sampler.resized(&comm);
        (self.comm, self.trained) = (comm, trained);
        Ok(())
    }

    fn train_to(&mut self, end: u64) -> Result<()> {
        while self.step < end {
            let taken = self.step as usize * BATCH;
            let own: Vec<usize> = self.sampler.epoch_from(0, taken)?.take(BATCH / self.comm.world_size()).collect();
            let gradients = gradients(self.seed, &own, self.scaler.scale());
            self.trained.step(&self.comm, self.step, &gradients, &mut self.scaler)?;
            self.step += 1;
        }
        Ok(())
    }
}

/// Gives the state to newcomers, and deals out shares anew. Returns the number of the step.
fn transfer<M: Trained>(comm: &Communicator, old: Option<&M>, new: &mut M, scaler: &mut LossScaler, step: u64) -> Result<u64> {
    let [scale, good_steps]: [f64; 2] = scaler.state().into();
    let own = [step as f64, scale, good_steps];
    let mut numbers = own;
    let mut transfer = StateTransfer::new(comm)?;
    match old {
        Some(_) => transfer.offer("numbers", &[3], Piece::Whole, &own),
        None => transfer.want("numbers", &[3], Piece::Whole, &mut numbers),
    };
    new.declare(old, &mut transfer);
    transfer.run()?;
    new.load()?;
    scaler.restore([numbers[1], numbers[2]].into())?;
    Ok(numbers[0] as u64)
}

/// Runs a founder. Returns its parameters, if it stays.
fn run_founder<M: Trained>(comm: Communicator, seed: u64, meeting: &Meeting) -> Option<(Lists, f32)> {
    let mut rank = Rank::<M>::founder(comm, seed).unwrap();
    rank.train_to(3).unwrap();
    let is_asked = rank.comm.rank() == 0;
    wait_until("a newcomer asks", || !is_asked || rank.comm.waiting_newcomers().unwrap() == 1);
    let membership = rank.comm.admit().unwrap();
    assert_eq!(membership.newcomers, 2..3);
    rank.change(membership.communicator).unwrap();
    run_rest(rank, meeting, 1)
}

/// Runs a rank of three, of which `victim` leaves without notice after step 6.
fn run_rest<M: Trained>(mut rank: Rank<M>, meeting: &Meeting, victim: usize) -> Option<(Lists, f32)> {
    rank.train_to(6).unwrap();
    meeting.meet();
    if rank.comm.rank() == victim {
        return None;
    }
    let error = rank.train_to(STEPS).unwrap_err();
    assert!(error.is_peer_lost() || matches!(error, Error::Aborted { .. }), "{error}");
    assert_eq!(rank.step, 6);
    let comm = rank.comm.admit().unwrap().communicator;
    assert_eq!(comm.world_size(), 2);
    rank.change(comm).unwrap();
    rank.train_to(STEPS).unwrap();
    let values = rank.trained.values().unwrap();
    // No rank leaves before the others have ended their calls.
    rank.comm.barrier().unwrap();
    Some((values, rank.scaler.scale()))
}

fn compare<M: Trained>() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    let seed = random.next();
    let (alone, meeting) = (train_alone(seed), &Meeting::new(3));
    let founders = Communicator::local(2).unwrap();
    let address = founders[0].join_address().unwrap();
    let results = std::thread::scope(|scope| {
        let newcomer = scope.spawn(move || {
            let comm = Communicator::join(address).unwrap().communicator;
            run_rest(Rank::<M>::newcomer(comm, seed).unwrap(), meeting, 1)
        });
        let founders: Vec<_> = founders.into_iter().map(|comm| scope.spawn(move || run_founder::<M>(comm, seed, meeting))).collect();
        let ranks = founders.into_iter().chain([newcomer]);
        ranks.map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect::<Vec<_>>()
    });
    let bits = |lists: &Lists| lists.iter().map(|list| list.iter().map(|x| x.to_bits()).collect()).collect::<Vec<Vec<u32>>>();
    let stayed: Vec<_> = results.iter().flatten().collect();
    assert_eq!(stayed.len(), 2);
    for (values, scale) in stayed {
        assert!(bits(values) == bits(&alone), "seed {seed}");
        assert_eq!(*scale, 1024.0 * 16.0, "four times, after each second of nine steps");
    }
}

#[test]
fn replicated_training_goes_on_with_other_ranks() {
    compare::<Replicated>();
}

#[test]
fn a_sharded_optimiser_goes_on_with_other_ranks() {
    compare::<ShardedMoments>();
}

#[test]
fn sharded_parameters_go_on_with_other_ranks() {
    compare::<ShardedParameters>();
}

#[test]
fn shares_that_only_a_lost_rank_had_are_named_on_all_ranks() {
    let errors = Communicator::run_local(3, |comm| {
        let old = ShardedMoments::new(comm)?;
        // As if rank 2 was lost, and no rank had a copy of its shares.
        let Some(rest) = comm.split((comm.rank() < 2).then_some(0), 0)? else { return Ok(None) };
        let mut new = ShardedMoments::resized(&old, &rest)?;
        let mut transfer = StateTransfer::new(&rest)?;
        new.declare(Some(&old), &mut transfer);
        Ok(Some(transfer.run().unwrap_err().to_string()))
    });
    for error in errors.unwrap().into_iter().flatten() {
        assert!(error.contains("tensor \"mean.p") && error.contains("held by no rank"), "{error}");
    }
}
