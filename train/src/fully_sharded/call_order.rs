//! Records the calls for units. The communicator cannot tell apart units of the same length, so ranks compare the order
//! of these calls.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::agreement::{Listed, agree};
use crate::flat::Pending;
use collectives::Communicator;
use collectives::ReduceOp;
use collectives::{Error, Result};

/// The number of calls of a step that are kept by name. For later calls, ranks only know whether they differ.
const MOST_LISTED: usize = 4096;

/// A call for a unit.
#[derive(Debug, Clone, Copy)]
pub(super) enum UnitCall {
    Gather(usize),
    Reduce(usize),
}

impl fmt::Display for UnitCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gather(unit) => write!(f, "the gathering of unit {unit}"),
            Self::Reduce(unit) => write!(f, "the reduction of unit {unit}"),
        }
    }
}

/// The calls of a step, in their order.
#[derive(Default)]
pub(super) struct CallOrder {
    listed: Vec<UnitCall>,
    digest: Sha256,
}

impl CallOrder {
    /// Adds a call.
    pub(super) fn note(&mut self, call: UnitCall) {
        let (kind, unit) = match call {
            UnitCall::Gather(unit) => (0_u8, unit),
            UnitCall::Reduce(unit) => (1, unit),
        };
        self.digest.update([kind]);
        self.digest.update((unit as u64).to_le_bytes());
        if self.listed.len() < MOST_LISTED {
            self.listed.push(call);
        }
    }

    /// Starts to compare this rank's calls with the other ranks'. The maximum of the numbers and the maximum of their
    /// complements are complements of each other only if all ranks have the same number.
    pub(super) fn start(&self, comm: &Communicator) -> Result<Pending<[u64; 2]>> {
        let mine = self.number();
        match comm.world_size() {
            1 => Ok(Pending::Ended([mine, !mine])),
            _ => comm.start_all_reduce([mine, !mine], ReduceOp::Max).map(Pending::Going),
        }
    }

    /// Refuses ranks that made different calls, and clears the calls of this step. Collective.
    pub(super) fn finish(&mut self, comm: &Communicator, call: &'static str, largest: [u64; 2]) -> Result<()> {
        if largest[0] != !largest[1] {
            let lines = self.listed.iter().map(UnitCall::to_string).collect();
            agree(comm, call, &Listed { noun: "calls", lines }, "the calls of this step")?;
            let reason = format!("ranks made different calls for units, after the first {MOST_LISTED} of this step");
            return Err(Error::argument(call, reason));
        }
        *self = Self::default();
        Ok(())
    }

    fn number(&self) -> u64 {
        let digest = self.digest.clone().finalize();
        digest.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte))
    }
}
