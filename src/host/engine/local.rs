//! Folds and copies, in pieces short enough that the links do not starve meanwhile.

#![expect(unsafe_code, reason = "folds and copies work on raw memory")]

use super::run_state::Context;
use super::schedule::Schedule;
use crate::host::fold::Fold;
use crate::host::plan::{Action, Span};

/// How many bytes of a result are made before the links have their turn.
pub(super) const PIECE_BYTES: usize = 256 << 10;

/// Where the inputs of a fold are. Kept for its capacity: empty between two folds.
#[derive(Debug, Default)]
struct Pointers(Vec<*const u8>);

// SAFETY: the pointers are only followed in the call that put them there, which clears what a panic may have left.
unsafe impl Send for Pointers {}

/// The fold or copy that is under way.
#[derive(Debug, Default)]
pub(super) struct Local {
    /// How much of it is done.
    done: usize,
    inputs: Pointers,
}

impl Local {
    /// Forgets the run before.
    pub(super) fn begin(&mut self) {
        self.done = 0;
    }

    /// Does about one piece of what can be done; says whether there was anything to do.
    pub(super) fn advance(&mut self, schedule: &mut Schedule, context: &Context<'_>, fold: Option<&dyn Fold>) -> bool {
        let (mut budget, mut any) = (PIECE_BYTES, false);
        while budget > 0
            && let Some(step) = schedule.local()
        {
            any = true;
            let (len, piece) = match (&context.plan.steps[step as usize].action, fold) {
                (Action::Copy { from, into }, _) => (into.len, self.copy(*from, *into, context)),
                (Action::Fold { into, inputs, last }, Some(fold)) => (into.len, self.fold(*into, inputs, *last, context, fold)),
                // The check of the plan lets neither through: nothing to do.
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

    /// Copies a piece; returns its length.
    fn copy(&self, from: Span, into: Span, context: &Context<'_>) -> usize {
        let (source, target) = (context.spaces.pointer(from), context.spaces.pointer(into));
        if source == target {
            return into.len;
        }
        let piece = (into.len - self.done).min(PIECE_BYTES);
        // SAFETY: both spans lie in their memory, are equally long and, not being the same, have nothing in common (checked when
        // the run began); nothing else touches them meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(source.add(self.done), target.add(self.done), piece) };
        piece
    }

    /// Folds a piece; returns its length.
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
        // - All spans lie in their memory, are equally long, consist of whole aligned elements, and `into` is the same as an input
        //   or has nothing in common with it (checked when the run began); a piece is a whole number of elements.
        // - All of them are initialised: the caller's (promised to `Memory::new`), and the scratch from when it was reserved. What peers
        //   have written there may be no value, which a fold reckons with. Nothing else touches them meanwhile.
        unsafe { fold.fold(target, &self.inputs.0, piece, last) };
        self.inputs.0.clear();
        piece
    }
}
