//! Plays a rank's part.

use std::collections::HashMap;
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use collectives::Communicator;

use super::buffers::{self, Arena, Buffers};
use super::calls::{self, Started};
use super::script::{Script, Step};
use super::tap::Tap;
use crate::failure::Failure;
use crate::stragglers::Work;

/// The end of a pause in which a rank neither sleeps nor computes, because it would end the pause late.
const AWAKE: Duration = Duration::from_micros(150);

/// The size of each of the two areas on which a rank works in gaps. Together they do not fit into most last-level
/// caches, like what a training works on. So the calls find their buffers in memory, as in the program.
const WORKED_ON: usize = 16 << 20;

/// The time between calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Gaps {
    /// As recorded; ranks compute
    Keep,
    /// As recorded; ranks sleep
    Sleep,
    /// None
    None,
}

impl Gaps {
    pub(super) fn name(self) -> &'static str {
        match self {
            Gaps::Keep => "keep",
            Gaps::Sleep => "sleep",
            Gaps::None => "none",
        }
    }
}

/// How to play.
#[derive(Debug, Clone, Copy)]
pub(super) struct Manner {
    pub(super) gaps: Gaps,
    pub(super) repetitions: usize,
}

/// One rank.
struct Player<'a> {
    script: &'a Script,
    rank: usize,
    /// The communicators of which the rank is a member.
    comms: Vec<Option<Communicator>>,
    arena: Arena,
    gaps: Gaps,
    work: Work,
    /// The background calls that have not been waited for.
    open: HashMap<usize, Started>,
}

/// Plays a rank's script, and returns the time of each step of each repetition, in nanoseconds.
pub(super) fn play(world: &Communicator, script: &Script, tap: &Tap, manner: Manner) -> Result<Vec<u64>, Failure> {
    let (rank, host) = (world.rank(), &world.peers()[world.rank()].host);
    let ranks_here = world.peers().iter().filter(|peer| peer.host == *host).count();
    let arena = Arena::new(script, rank, ranks_here)?;
    let comms = communicators(world, &script.groups)?;
    for (group, comm) in comms.iter().enumerate() {
        comm.as_ref().map_or(Ok(()), |comm| tap.learn(group, comm))?;
    }
    let mut player = Player { script, rank, comms, arena, gaps: manner.gaps, work: Work::on(WORKED_ON), open: HashMap::new() };
    for repetition in 1..=manner.repetitions {
        world.barrier()?;
        tap.turn(true);
        player.once()?;
        // Background messages may be reported late. The barrier must not be among the reports.
        tap.wait_for(script.steps.len() * repetition)?;
        tap.turn(false);
    }
    tap.times(script, manner.repetitions)
}

/// Makes the communicators of the record. The first one with all ranks in order is the job's own.
fn communicators(world: &Communicator, groups: &[Vec<usize>]) -> Result<Vec<Option<Communicator>>, Failure> {
    let everyone: Vec<usize> = (0..world.world_size()).collect();
    let own = groups.iter().position(|members| *members == everyone);
    let others: Vec<&[usize]> = groups.iter().enumerate().filter(|(number, _)| Some(*number) != own).map(|(_, list)| &list[..]).collect();
    let mut made = if others.is_empty() { Vec::new() } else { world.subgroups(&others)? };
    if let Some(own) = own {
        made.insert(own, Some(world.clone()));
    }
    Ok(made)
}

impl Player<'_> {
    /// Makes all calls once.
    fn once(&mut self) -> Result<(), Failure> {
        let mut over = Instant::now();
        for (place, step) in self.script.steps.iter().enumerate() {
            for earlier in &step.after {
                self.wait(*earlier, step.computes)?;
                over = Instant::now();
            }
            over = self.make(place, step, over)?;
        }
        let rest: Vec<usize> = self.open.keys().copied().collect();
        rest.into_iter().try_for_each(|place| self.wait(place, false))
    }

    /// Makes a call after its pause, which began at `over`. Returns when the call was over, or had begun if it runs in
    /// the background.
    fn make(&mut self, place: usize, step: &Step, over: Instant) -> Result<Instant, Failure> {
        let shape = &self.script.shapes[step.shape];
        let bytes = buffers::bytes(self.script, shape, self.rank)?;
        let lack = || Failure::internal(format!("call {place}: rank {} is not a member of its communicator", self.rank));
        let comm = self.comms.get(shape.group).and_then(Clone::clone).ok_or_else(lack)?;
        let pause = Duration::from_nanos(step.gap_ns);
        if step.is_background {
            let buffers = Buffers { source: buffers::touched(bytes.0), destination: buffers::touched(bytes.1) };
            self.pause_until(over + pause);
            let began = Instant::now();
            self.open.insert(place, calls::start(&comm, shape, buffers)?);
            return Ok(began);
        }
        self.pause_until(over + pause);
        calls::perform(&comm, shape, self.arena.of(bytes))?;
        Ok(Instant::now())
    }

    fn pause_until(&mut self, moment: Instant) {
        let left = || moment.saturating_duration_since(Instant::now());
        match self.gaps {
            Gaps::None => return,
            Gaps::Sleep => thread::sleep(left().saturating_sub(AWAKE)),
            Gaps::Keep => {
                while left() > AWAKE {
                    self.work.perform(1);
                }
            }
        }
        while !left().is_zero() {
            thread::yield_now();
        }
    }

    /// Waits for a background call, during which the program may have computed.
    fn wait(&mut self, place: usize, computes: bool) -> Result<(), Failure> {
        let Some(call) = self.open.remove(&place) else { return Ok(()) };
        while computes && self.gaps == Gaps::Keep && !call.is_done() {
            self.work.perform(1);
        }
        Ok(call.wait().map(drop)?)
    }
}
