//! Finds the steps of a plan that can proceed: keeps track of what each step waits for, and of the order in which each
//! peer is served. Folds and copies are done here, in pieces short enough not to delay the links.

#![expect(unsafe_code, reason = "folds and copies work on raw memory")]

use std::collections::VecDeque;

use super::memory::Context;
use crate::base::tuning::engine::PIECE_BYTES;
use crate::host::fold::Fold;
use crate::host::plan::{Action, Plan, Span};

/// No step.
pub(super) const NONE: u32 = u32::MAX;

/// The unfinished part of a plan. All vectors are reused between runs.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    /// For each step: how many steps it still waits for.
    waits: Vec<u32>,
    /// For each step: the first of the `edges` that start at it.
    first_edge: Vec<u32>,
    /// A step that waits, and the next edge with the same start.
    edges: Vec<(u32, u32)>,
    /// For each step: the next one with the same peer in the same direction.
    next: Vec<u32>,
    /// For each step: whether it is a fold or a copy.
    is_local: Vec<bool>,
    /// Folds and copies that can proceed.
    local: VecDeque<u32>,
    /// How many steps are unfinished.
    left: usize,
}

impl Schedule {
    /// Loads a plan. Calls `queue` for every send and receive, in reverse order; `queue` returns the step that follows
    /// with the same peer in the same direction.
    pub(super) fn begin(&mut self, plan: &Plan, mut queue: impl FnMut(u32, &Action) -> Result<u32, String>) -> Result<(), String> {
        let count = plan.steps.len();
        if u32::try_from(count).is_err() {
            return Err(format!("{count} steps are more than a plan can have"));
        }
        refill(&mut self.waits, count, 0);
        refill(&mut self.first_edge, count, NONE);
        refill(&mut self.next, count, NONE);
        refill(&mut self.is_local, count, false);
        self.edges.clear();
        self.local.clear();
        self.left = count;
        for (index, step) in plan.steps.iter().enumerate().rev() {
            self.is_local[index] = matches!(step.action, Action::Fold { .. } | Action::Copy { .. });
            if !self.is_local[index] {
                self.next[index] = queue(index as u32, &step.action)?;
            }
            for &before in &step.after {
                if before >= index {
                    return Err(format!("step {index} waits for step {before}, which is not an earlier one"));
                }
                self.edges.push((index as u32, self.first_edge[before]));
                self.first_edge[before] = self.edges.len() as u32 - 1;
                self.waits[index] += 1;
            }
        }
        let local = (0..count).filter(|index| self.is_local[*index] && self.waits[*index] == 0);
        self.local.extend(local.map(|index| index as u32));
        Ok(())
    }

    /// Whether all steps are done.
    pub(super) fn is_done(&self) -> bool {
        self.left == 0
    }

    /// Whether `step` is a step and waits for no other.
    pub(super) fn is_ready(&self, step: u32) -> bool {
        step != NONE && self.waits[step as usize] == 0
    }

    /// Returns the step after this one with the same peer in the same direction.
    pub(super) fn following(&self, step: u32) -> u32 {
        self.next[step as usize]
    }

    /// Returns the fold or copy to continue with.
    pub(super) fn local(&self) -> Option<u32> {
        self.local.front().copied()
    }

    /// Marks the fold or copy that [`Schedule::local`] returned as done.
    pub(super) fn finish_local(&mut self) {
        if let Some(step) = self.local.pop_front() {
            self.finish(step);
        }
    }

    /// Marks a step as done. Returns the step that follows it with the same peer in the same direction.
    pub(super) fn finish(&mut self, step: u32) -> u32 {
        self.left -= 1;
        let mut edge = self.first_edge[step as usize];
        while edge != NONE {
            let (follower, next) = self.edges[edge as usize];
            let waits = &mut self.waits[follower as usize];
            *waits -= 1;
            if *waits == 0 && self.is_local[follower as usize] {
                self.local.push_back(follower);
            }
            edge = next;
        }
        self.next[step as usize]
    }
}

/// Fills a vector with `count` copies of `value`.
fn refill<T: Clone>(vector: &mut Vec<T>, count: usize, value: T) {
    vector.clear();
    vector.resize(count, value);
}

/// The addresses of the inputs of a fold. It is kept for its capacity and empty between two folds.
#[derive(Debug, Default)]
struct Pointers(Vec<*const u8>);

// SAFETY: the pointers are dereferenced only in the call that stored them, which first clears what a panic may have
// left.
unsafe impl Send for Pointers {}

/// The fold or copy in progress.
#[derive(Debug, Default)]
pub(super) struct Local {
    /// How many bytes of it are done.
    done: usize,
    inputs: Pointers,
}

impl Local {
    /// Discards the state of the previous run.
    pub(super) fn begin(&mut self) {
        self.done = 0;
    }

    /// Does about one piece of the available work. Returns whether there was any.
    pub(super) fn advance(&mut self, schedule: &mut Schedule, context: &Context<'_>, fold: Option<&dyn Fold>) -> bool {
        let (mut budget, mut any) = (PIECE_BYTES, false);
        while budget > 0
            && let Some(step) = schedule.local()
        {
            any = true;
            let (len, piece) = match (&context.plan.steps[step as usize].action, fold) {
                (Action::Copy { from, into }, _) => (into.len, self.copy(*from, *into, context)),
                (Action::Fold { into, inputs, last }, Some(fold)) => (into.len, self.fold(*into, inputs, *last, context, fold)),
                // The check of the plan rejects both cases, so there is nothing to do.
                (Action::Fold { .. } | Action::Send { .. } | Action::Receive { .. }, _) => (0, 0),
            };
            self.done += piece;
            budget = budget.saturating_sub(piece);
            if self.done >= len {
                self.done = 0;
                schedule.finish_local();
            }
        }
        any
    }

    /// Copies a piece. Returns its length.
    fn copy(&self, from: Span, into: Span, context: &Context<'_>) -> usize {
        let (source, target) = (context.spaces.pointer(from), context.spaces.pointer(into));
        if source == target {
            return into.len;
        }
        let piece = (into.len - self.done).min(PIECE_BYTES);
        // SAFETY: both spans lie in their memory, are equally long and, since they are not the same, are disjoint
        // (checked when the run began); nothing else touches them meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(source.add(self.done), target.add(self.done), piece) };
        piece
    }

    /// Folds a piece. Returns its length.
    fn fold(&mut self, into: Span, inputs: &[Span], last: bool, context: &Context<'_>, fold: &dyn Fold) -> usize {
        let element_bytes = fold.element_bytes();
        let most = (PIECE_BYTES - PIECE_BYTES % element_bytes).max(element_bytes);
        let piece = (into.len - self.done).min(most);
        if piece == 0 {
            return 0;
        }
        self.inputs.0.clear();
        self.inputs.0.extend(inputs.iter().map(|input| context.spaces.pointer(*input).wrapping_add(self.done).cast_const()));
        let target = context.spaces.pointer(into).wrapping_add(self.done);
        // SAFETY:
        // - All spans lie in their memory, are equally long and consist of whole aligned elements. `into` is either the
        //   same as an input or disjoint from it (checked when the run began). A piece is a whole number of elements.
        // - All of them are initialised: the caller's (promised to `Memory::new`), and the scratch since it was
        //   reserved. Bytes that peers have written there may not be a valid value, which a fold allows for. Nothing
        //   else touches them meanwhile.
        unsafe { fold.fold(target, &self.inputs.0, piece, last) };
        self.inputs.0.clear();
        piece
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::plan::{Space, Step};

    fn copy(after: Vec<usize>) -> Step {
        let span = Span { space: Space::Scratch, offset: 0, len: 0 };
        Step { action: Action::Copy { from: span, into: span }, after }
    }

    #[test]
    fn steps_come_when_what_they_wait_for_is_done() {
        let plan = Plan { steps: vec![copy(vec![]), copy(vec![0, 0]), copy(vec![]), copy(vec![1, 2])], scratch_bytes: 0 };
        let mut schedule = Schedule::default();
        // The second time reuses the vectors of the first.
        for _ in 0..2 {
            schedule.begin(&plan, |_, _| Ok(NONE)).expect("a sound plan");
            let mut order = vec![];
            while let Some(step) = schedule.local() {
                order.push(step);
                schedule.finish_local();
            }
            assert_eq!(order, [0, 2, 1, 3]);
            assert!(schedule.is_done());
        }
    }

    #[test]
    fn a_step_waits_only_for_earlier_ones() {
        for after in [0, 1, usize::MAX] {
            let plan = Plan { steps: vec![copy(vec![after])], scratch_bytes: 0 };
            assert!(Schedule::default().begin(&plan, |_, _| Ok(NONE)).is_err());
        }
    }
}
