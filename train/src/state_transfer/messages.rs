//! Carries out the steps of a plan by messages.
//!
//! Every rank goes through its own steps in the order of the plan. It starts each step, and waits for its oldest step
//! when `IN_FLIGHT` steps have started. This order is the same on all ranks, so the oldest step of all has started on
//! both of its ranks, and no ranks wait for each other in a circle.

use std::collections::VecDeque;

use super::plan::{Plan, Step};
use super::progress::TransferProgress;
use super::values::Parts;
use crate::checkpoint::piece::{Run, runs_of};
use crate::tuning::state_transfer::IN_FLIGHT;
use collectives::{Communicator, Error, Received, Result, Work};

/// A message that has started.
enum Flight {
    Send(Work<Vec<u8>>),
    Receive(Work<(Vec<u8>, Received)>, Step),
}

/// Moves the elements on one rank.
pub(super) struct Mover<'m, 'a> {
    pub(super) comm: &'m Communicator,
    pub(super) plan: &'m Plan,
    pub(super) parts: &'m mut Parts<'a>,
    pub(super) progress: &'m TransferProgress,
    /// The buffers of messages that have ended.
    pub(super) free: Vec<Vec<u8>>,
}

/// Returns the elements of a step that are contiguous on both sides.
fn runs<'p>(plan: &'p Plan, step: &Step) -> impl Iterator<Item = Run> + use<'p> {
    let want = &plan.wants[step.want];
    runs_of(&want.extent, step.window.clone(), &plan.tensors[want.tensor].sources, step.source)
}

impl Mover<'_, '_> {
    /// Carries out all steps of this rank.
    pub(super) fn run(&mut self) -> Result<()> {
        let rank = self.comm.rank();
        let (plan, mut flights) = (self.plan, VecDeque::new());
        let receiver = |step: &Step| plan.wants[step.want].rank;
        for step in plan.steps().filter(|step| step.from.0 == rank || receiver(step) == rank) {
            if flights.len() >= IN_FLIGHT {
                self.end_oldest(&mut flights)?;
            }
            match (step.from.0 == rank, receiver(&step) == rank) {
                (true, true) => self.copy(&step)?,
                (true, false) => flights.push_back(self.send(&step, receiver(&step))?),
                _ => flights.push_back(self.receive(step)?),
            }
        }
        while !flights.is_empty() {
            self.end_oldest(&mut flights)?;
        }
        Ok(())
    }

    /// Returns the bytes that this rank sends, receives or copies.
    pub(super) fn total_bytes(&self) -> u64 {
        let rank = self.comm.rank();
        let own = self.plan.steps().filter(|step| step.from.0 == rank || self.plan.wants[step.want].rank == rank);
        own.map(|step| self.bytes(&step) as u64).sum()
    }

    /// Returns the number of bytes of a step.
    fn bytes(&self, step: &Step) -> usize {
        step.len * self.element_bytes(step)
    }

    fn element_bytes(&self, step: &Step) -> usize {
        self.plan.tensors[self.plan.wants[step.want].tensor].element_bytes
    }

    /// Returns the bytes of a step, from the part that this rank offers.
    fn packed(&mut self, step: &Step) -> Vec<u8> {
        let (mut buffer, size) = (self.free.pop().unwrap_or_default(), self.element_bytes(step));
        let offered = self.parts.offered[step.from.1];
        buffer.clear();
        buffer.reserve_exact(self.bytes(step));
        runs(self.plan, step).for_each(|run| buffer.extend_from_slice(&offered[run.from * size..(run.from + run.len) * size]));
        buffer
    }

    /// Writes the bytes of a step to the part that this rank wants.
    fn unpack(&mut self, step: &Step, bytes: &[u8]) -> Result<()> {
        let (want, size, mut start) = (&self.plan.wants[step.want], self.element_bytes(step), 0);
        for run in runs(self.plan, step) {
            let end = start + run.len * size;
            let Some(part) = bytes.get(start..end) else { return Err(self.malformed(step, bytes.len())) };
            if !self.parts.wanted[want.number].put(run.to, part) {
                let reason = format!("{} B arrived, but some of them are not values of type bool", bytes.len());
                return Err(self.protocol(step, &reason));
            }
            start = end;
        }
        self.progress.add(bytes.len() as u64);
        Ok(())
    }

    /// Returns the error for bytes that are not the elements of a step.
    fn malformed(&self, step: &Step, got: usize) -> Error {
        self.protocol(step, &format!("{got} B arrived for {} elements, which have {} B in total", step.len, self.bytes(step)))
    }

    fn protocol(&self, step: &Step, reason: &str) -> Error {
        let name = &self.plan.tensors[self.plan.wants[step.want].tensor].name;
        Error::Protocol { with: self.comm.peers()[step.from.0].to_string(), reason: format!("tensor {name:?}: {reason}") }
    }

    fn copy(&mut self, step: &Step) -> Result<()> {
        let bytes = self.packed(step);
        self.unpack(step, &bytes)?;
        self.free.push(bytes);
        Ok(())
    }

    fn send(&mut self, step: &Step, to: usize) -> Result<Flight> {
        let bytes = self.packed(step);
        self.comm.start_send(bytes, to).map(Flight::Send)
    }

    fn receive(&mut self, step: Step) -> Result<Flight> {
        let mut buffer = self.free.pop().unwrap_or_default();
        buffer.resize(self.bytes(&step), 0);
        Ok(Flight::Receive(self.comm.start_recv(buffer, step.from.0)?, step))
    }

    /// Waits for the message that started first.
    fn end_oldest(&mut self, flights: &mut VecDeque<Flight>) -> Result<()> {
        let buffer = match flights.pop_front() {
            None => return Ok(()),
            Some(Flight::Send(work)) => {
                let sent = work.wait()?;
                self.progress.add(sent.len() as u64);
                sent
            }
            Some(Flight::Receive(work, step)) => {
                let (buffer, received) = work.wait()?;
                if received.count != buffer.len() {
                    return Err(self.malformed(&step, received.count));
                }
                self.unpack(&step, &buffer)?;
                buffer
            }
        };
        self.free.push(buffer);
        Ok(())
    }
}
