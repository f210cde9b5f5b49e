//! Models with their optimisers' state: the same on every rank, or sharded.

use collectives::{Communicator, Result};
use collectives_train::checkpoint::{Piece, Sharded};
use collectives_train::{DataParallel, FullySharded, FullyShardedOptions, LossScaler, Parameter, ShardedOptimizer, StateTransfer, Unit};

use super::problem::{Lists, adam, initial, lens, options, parameters, slices, slices_mut, zeros};

/// A model with its optimiser's state, on one rank.
pub(super) trait Trained: Sized {
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
pub(super) fn declare_whole<'a>(transfer: &mut StateTransfer<'a>, kind: &str, own: Option<&'a Lists>, wanted: &'a mut Lists) {
    for (index, (Parameter { name, shape, .. }, wanted)) in parameters().iter().zip(wanted).enumerate() {
        match own {
            Some(own) => transfer.offer(&format!("{kind}.{name}"), shape, Piece::Whole, &own[index]),
            None => transfer.want(&format!("{kind}.{name}"), shape, Piece::Whole, wanted),
        };
    }
}

/// This rank's shares of some kinds of state, and a copy of the shares of the rank before it.
pub(super) struct Shares {
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
pub(super) struct Replicated {
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
pub(super) struct ShardedMoments {
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
pub(super) struct ShardedParameters {
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
pub(super) const UNITS: [std::ops::Range<usize>; 2] = [0..2, 2..5];

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
