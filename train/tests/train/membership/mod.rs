//! Training goes on with another number of ranks, in the same processes: a rank joins, then a rank leaves without notice.
//! All parameters have the bits of a training by one process.

mod models;
mod problem;

use collectives::{Communicator, Error, Result};
use collectives_train::checkpoint::Piece;
use collectives_train::{LossScaler, Sampler, StateTransfer};

use self::models::{Replicated, ShardedMoments, ShardedParameters, Trained};
use self::problem::{BATCH, Lists, SCALER, STEPS, gradients, train_alone};
use crate::common::meeting::{Meeting, wait_until};
use crate::common::random::Random;

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

/// Gives the state to newcomers, and gives each rank its new shares. Returns the number of the step.
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
