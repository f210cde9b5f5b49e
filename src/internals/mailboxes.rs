//! The step protocol of shared memory, between threads of this process.

use std::time::Duration;

use super::exchanging;
use crate::Result;
use crate::call::{Call, Kind};
use crate::deadline::Deadline;
use crate::element::TypeTag;
use crate::error::{Error, Peer};
use crate::flight::Flight;
use crate::host::health::Health;
use crate::host::shm::{CallContext, Group};

/// How long a step may take.
const LIMIT: Duration = Duration::from_secs(20);
/// How often a volley looks for the other's flag: seconds, if it comes to that.
const LOOKS: u64 = 1 << 30;

/// One rank's part in the shared memory of a host. It goes to a thread of its own.
pub struct Mailboxes {
    group: Group,
    health: Health,
    recorder: Flight,
    sequence: u64,
}

impl Mailboxes {
    /// The parts of so many ranks, over one region.
    ///
    /// # Errors
    ///
    /// Where the region cannot be made or mapped.
    pub fn between(ranks: usize) -> Result<Vec<Self>> {
        let members: Vec<usize> = (0..ranks).collect();
        exchanging(ranks, |rank, exchange| {
            let group = Group::establish(exchange, &members, rank, members.len(), None, &Deadline::after(LIMIT))?;
            Ok(Self { group, health: Health::default(), recorder: Flight::default(), sequence: 0 })
        })
    }

    /// One step of everybody: publish, wait for all, compare what they published.
    ///
    /// # Errors
    ///
    /// Where a rank is late, gone, or at another step.
    pub fn step(&mut self) -> Result<()> {
        let sequence = self.next();
        let call = Call { kind: Kind::Barrier, op: 0, element: TypeTag::of::<u8>(), count: 0, root: None, counts_hash: 0, sequence };
        let deadline = Deadline::lazily(LIMIT);
        let met = self.group.barrier(&CallContext { call: &call, deadline: &deadline, health: &self.health, recorder: &self.recorder });
        met.map_err(|stop| stop.to_error("a step", &deadline, &[]))
    }

    /// One flag there and one back: the first of two ranks serves, the second answers. Each checks what the other published.
    ///
    /// # Errors
    ///
    /// Where the other is late or at another volley.
    pub fn volley(&mut self, is_first: bool) -> Result<()> {
        let number = self.next();
        let words = |is_first: bool| [number, u64::from(is_first), !number, 7];
        match self.group.volley(is_first, words(is_first), LOOKS) {
            Some(theirs) if theirs == words(!is_first) => Ok(()),
            Some(theirs) => Err(Error::Protocol { with: "the other rank".to_owned(), reason: format!("{theirs:?} in volley {number}") }),
            None => {
                Err(Error::Timeout { doing: "a volley".to_owned(), elapsed: LIMIT, missing: vec![Peer::unknown(1)], arrived: Vec::new() })
            }
        }
    }

    fn next(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }
}

impl std::fmt::Debug for Mailboxes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mailboxes(call {})", self.sequence)
    }
}
