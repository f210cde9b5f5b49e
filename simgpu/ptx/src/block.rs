//! The threads of a block: their turns, and the barriers at which they wait for each other.

use crate::fault::{Fault, FaultKind, FaultPlace};
use crate::machine::{Machine, State, Thread};
use crate::model::BlockModel;
use crate::program::{Barrier, Reduction};
use crate::warp;

/// The steps in one turn of a block.
const TURN: u64 = 1 << 20;

/// The steps in one turn of a block if the memory order is modelled.
const MODEL_TURN: u64 = 1 << 12;

/// The number of barriers of a block.
const BARRIERS: usize = 16;

pub(crate) struct Block {
    threads: Vec<Thread>,
    index: [u32; 3],
    /// Its shared memory and its part of the memory order, while another block runs.
    shared: Vec<u8>,
    model: BlockModel,
    /// Threads at barriers that wait for a stated number of threads.
    arrived: [Arrived; BARRIERS],
}

/// Threads that have come to a barrier since it last opened.
#[derive(Clone, Copy, Default)]
struct Arrived {
    /// The number of these threads.
    all: u64,
    /// The number of threads that the first one waits for.
    count: u64,
    /// The number of these threads that did not wait.
    passed: u64,
}

impl Block {
    pub(crate) fn new(machine: &mut Machine<'_>, index: [u32; 3]) -> Self {
        let threads = (0..machine.block.iter().product()).map(|number| machine.thread(number)).collect();
        let shared = vec![0; machine.shared_bytes];
        let mut block = Self { threads, index, shared, model: BlockModel::default(), arrived: [Arrived::default(); BARRIERS] };
        block.begin(machine, index);
        block
    }

    /// Reuses the threads of a block that has ended for another block.
    pub(crate) fn begin(&mut self, machine: &mut Machine<'_>, index: [u32; 3]) {
        (self.index, self.arrived) = (index, [Arrived::default(); BARRIERS]);
        self.shared.fill(0xA5);
        machine.current = index;
        self.threads.iter_mut().for_each(|thread| machine.restart(thread));
        if let Some(model) = &machine.model {
            self.model = BlockModel::new();
            (0..).zip(&mut self.threads).for_each(|(number, thread)| model.begin(&mut thread.model, &self.model, number));
        }
    }

    /// Runs the block until it has ended or its turn is over. Returns whether it has ended.
    pub(crate) fn run(&mut self, machine: &mut Machine<'_>) -> Result<bool, Fault> {
        machine.current = self.index;
        self.exchange(machine);
        let ended = self.rounds(machine);
        self.exchange(machine);
        ended
    }

    /// Exchanges the block's own memory with that of the machine.
    fn exchange(&mut self, machine: &mut Machine<'_>) {
        std::mem::swap(&mut self.shared, &mut machine.shared);
        if let Some(model) = &mut machine.model {
            std::mem::swap(&mut self.model, &mut model.block);
        }
    }

    fn rounds(&mut self, machine: &mut Machine<'_>) -> Result<bool, Fault> {
        let until = machine.steps.saturating_add(if machine.model.is_some() { MODEL_TURN } else { TURN });
        loop {
            let waits = machine.waits;
            for first in (0..self.threads.len()).step_by(32) {
                self.run_warp(machine, first)?;
            }
            if machine.model.is_some() {
                self.threads.iter_mut().for_each(|thread| machine.drift(&mut thread.model));
            }
            let (mut ready, mut done) = (0, 0);
            for thread in &self.threads {
                ready += usize::from(thread.state == State::Ready);
                done += usize::from(thread.state == State::Done);
            }
            if done == self.threads.len() {
                return Ok(machine.block_ends(&mut self.threads));
            }
            if ready == 0 && !self.release_full(machine)? && !self.unstick(machine)? {
                return Err(self.stuck(machine));
            }
            if ready > 0 && machine.waits == waits || machine.steps >= until {
                return Ok(false);
            }
        }
    }

    /// Runs every ready thread of a warp, and repeats that as long as they meet and their share of steps lasts.
    fn run_warp(&mut self, machine: &mut Machine<'_>, first: usize) -> Result<(), Fault> {
        let last = (first + 32).min(self.threads.len());
        let until = machine.steps.saturating_add(machine.limits.turn.saturating_mul(32));
        loop {
            let mut meeting = false;
            for number in first..last {
                if self.threads[number].state == State::Ready {
                    machine.run(&mut self.threads[number]).map_err(|kind| fault(machine, &self.threads[number], kind))?;
                    self.arrive(machine, number)?;
                }
                meeting |= matches!(self.threads[number].state, State::Meeting(_));
            }
            if !meeting || !self.meet(machine, first, false)? || machine.steps >= until {
                return Ok(());
            }
        }
    }

    fn meet(&mut self, machine: &Machine<'_>, first: usize, stuck: bool) -> Result<bool, Fault> {
        let last = (first + 32).min(self.threads.len());
        let warp = &mut self.threads[first..last];
        warp::meet(machine.program, warp, stuck).map_err(|(lane, kind)| fault(machine, &self.threads[first + lane], kind))
    }

    /// Lets threads that wait without a mask meet, since no other thread can come any more.
    fn unstick(&mut self, machine: &Machine<'_>) -> Result<bool, Fault> {
        let mut met = false;
        for first in (0..self.threads.len()).step_by(32) {
            met |= self.meet(machine, first, true)?;
        }
        Ok(met)
    }

    fn site<'m>(machine: &Machine<'m>, thread: &Thread) -> Option<&'m Barrier> {
        let State::Barrier(site) = thread.state else { return None };
        machine.program.function(thread.function).barriers.get(site as usize)
    }

    /// Returns the barrier's number, and the number of threads it waits for if the instruction states one.
    fn claim(machine: &Machine<'_>, thread: &Thread) -> Option<(u64, Option<u64>)> {
        let site = Self::site(machine, thread)?;
        Some((thread.slot(site.id) & 0xffff_ffff, site.count.map(|count| thread.slot(count) & 0xffff_ffff)))
    }

    /// Handles the arrival of a thread at a barrier: checks its operands, and opens the barrier if only this thread
    /// was missing.
    fn arrive(&mut self, machine: &Machine<'_>, number: usize) -> Result<(), Fault> {
        let thread = &self.threads[number];
        let Some((id, count)) = Self::claim(machine, thread) else { return Ok(()) };
        if id >= BARRIERS as u64 {
            return Err(fault(machine, thread, FaultKind::Divergence(format!("there is no barrier {id}; the last one is 15"))));
        }
        let Some(count) = count else { return Ok(()) };
        if count == 0 || count % 32 != 0 {
            let message = format!("barrier {id} is to wait for {count} threads, which is no multiple of 32");
            return Err(fault(machine, thread, FaultKind::Divergence(message)));
        }
        let passes = Self::site(machine, thread).is_some_and(|site| !site.waits);
        let arrived = &mut self.arrived[id as usize];
        if arrived.all == 0 {
            arrived.count = count;
        }
        (arrived.all, arrived.passed) = (arrived.all + 1, arrived.passed + u64::from(passes));
        let Arrived { all, count: first, passed } = *arrived;
        if passes {
            self.threads[number].resume();
        }
        // The waiting threads are compared once per barrier, and if something is wrong.
        if all < count && first == count {
            return Ok(());
        }
        let waiting = self.waiting(machine, id);
        let same = |&other: &usize| Self::claim(machine, &self.threads[other]) == Some((id, Some(count)));
        if first != count || !waiting.iter().all(same) {
            let message = format!("threads wait at barrier {id} for different numbers of threads");
            return Err(fault(machine, &self.threads[number], FaultKind::Divergence(message)));
        }
        if waiting.len() as u64 + passed == count {
            self.open(machine, id, &waiting)?;
        }
        Ok(())
    }

    fn waiting(&self, machine: &Machine<'_>, id: u64) -> Vec<usize> {
        let waits = |number: &usize| Self::claim(machine, &self.threads[*number]).is_some_and(|(other, _)| other == id);
        (0..self.threads.len()).filter(waits).collect()
    }

    /// Opens the barrier if all threads that have not ended wait there.
    fn release_full(&mut self, machine: &Machine<'_>) -> Result<bool, Fault> {
        let live: Vec<usize> = (0..self.threads.len()).filter(|&number| self.threads[number].state != State::Done).collect();
        let Some((id, None)) = Self::claim(machine, &self.threads[live[0]]) else { return Ok(false) };
        if live.iter().any(|&number| Self::claim(machine, &self.threads[number]) != Some((id, None))) {
            return Ok(false);
        }
        self.open(machine, id, &live)?;
        Ok(true)
    }

    fn open(&mut self, machine: &Machine<'_>, id: u64, waiting: &[usize]) -> Result<(), Fault> {
        let (mut previous, mut reduces): (Option<usize>, _) = (None, false);
        for &number in waiting {
            let thread = &self.threads[number];
            let other = previous.filter(|other| other / 32 == number / 32).map(|other| &self.threads[other]);
            let (aligned, reduction) = Self::site(machine, thread).map_or((false, false), |site| (site.aligned, site.reduction.is_some()));
            reduces |= reduction;
            if let Some(other) = other.filter(|other| aligned && (other.function, other.at) != (thread.function, thread.at)) {
                let line = machine.program.function(other.function).code[other.at].line;
                let message = format!("threads of one warp came to barrier {id} by different instructions, here and in line {line}");
                return Err(fault(machine, thread, FaultKind::Divergence(message)));
            }
            previous = Some(number);
        }
        if reduces {
            self.reduce(machine, waiting);
        }
        self.arrived[id as usize] = Arrived::default();
        waiting.iter().for_each(|&number| self.threads[number].resume());
        Ok(())
    }

    /// Gives the threads at `bar.red` their common result.
    fn reduce(&mut self, machine: &Machine<'_>, waiting: &[usize]) {
        let site = |thread: &Thread| Self::site(machine, thread).and_then(|site| site.reduction);
        let set = |number: &&usize| site(&self.threads[**number]).is_some_and(|(_, value, _)| self.threads[**number].slot(value) & 1 == 1);
        let votes = waiting.iter().filter(set).count();
        for &number in waiting {
            if let Some((operation, _, to)) = site(&self.threads[number]) {
                let result = match operation {
                    Reduction::Popc => votes as u64,
                    Reduction::And => u64::from(votes == waiting.len()),
                    Reduction::Or => u64::from(votes > 0),
                };
                self.threads[number].set(to, result);
            }
        }
    }

    fn stuck(&self, machine: &Machine<'_>) -> Fault {
        let mut places: Vec<(u32, usize, &Thread)> = Vec::new();
        for thread in self.threads.iter().filter(|thread| thread.state != State::Done) {
            let line = machine.program.function(thread.function).code[thread.at].line;
            match places.iter_mut().find(|(other, ..)| *other == line) {
                Some((_, count, _)) => *count += 1,
                None => places.push((line, 1, thread)),
            }
        }
        let ended = self.threads.iter().filter(|thread| thread.state == State::Done).count();
        let list: Vec<_> = places.iter().map(|(line, count, _)| format!("{count} in line {line}")).collect();
        let message = format!("threads wait for others that never come: {}; {ended} have ended", list.join(", "));
        fault(machine, places[0].2, FaultKind::Divergence(message))
    }
}

fn fault(machine: &Machine<'_>, thread: &Thread, kind: FaultKind) -> Fault {
    let code = &machine.program.function(thread.function).code;
    let line = code[thread.at.min(code.len() - 1)].line;
    let text = machine.program.functions[thread.function].text;
    let place = FaultPlace { text, line, thread: thread.index, block: machine.current };
    Fault { kernel: machine.kernel.name().to_owned(), kind, place: Some(place) }
}
