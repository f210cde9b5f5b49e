//! The ranks of one host that share a region: how they find it, and what one of them holds.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;

use super::cut::Pace;
use super::door::{self, Door};
use super::layout::{CHANNELS, Layout, MAX_RANKS};
use super::region::{self, Region};
use super::ring::{Channel, RingLink};
use super::steps::Standing;
use crate::deadline::Deadline;
use crate::error::{Error, Peer, Result};
use crate::host::bootstrap::Exchange;
use crate::host::notice::Notice;

/// One rank's part in the shared memory of its host. Used by one thread at a time.
pub(crate) struct Group {
    pub(super) region: Arc<Region>,
    /// This rank's local index.
    pub(super) me: usize,
    /// How many ranks share the region.
    pub(super) ranks: usize,
    /// The global rank of each local index.
    pub(super) globals: Box<[u32]>,
    /// The step that this rank has published last.
    pub(super) step: u64,
    /// Whether the next call may start right away.
    pub(super) standing: Standing,
    /// How often a waiter looks before it gives up the core.
    pub(super) spins: u32,
    /// How calls are cut into steps.
    pub(super) pace: Pace,
    /// Room for one pointer per rank, so that a fold's inputs need no allocation.
    pub(super) inputs: Box<[*const u8]>,
    links_taken: Box<[bool]>,
}

// SAFETY: `inputs` is scratch space whose pointers are only used inside one call; everything else is Send.
#[expect(unsafe_code, reason = "raw pointers as scratch space take Send away")]
unsafe impl Send for Group {}

impl Group {
    /// Sets up the shared memory of the ranks `members` (global ranks of this host, ascending). Every rank of the communicator
    /// calls it, each with the members of its own host; it takes two rounds of the exchange.
    ///
    /// # Errors
    ///
    /// `Unsupported` for more than [`MAX_RANKS`] members, `Io` where this rank cannot map the region, `PeerLost` naming a rank
    /// that could not, and whatever the exchange says.
    pub(crate) fn establish(
        exchange: &mut dyn Exchange,
        members: &[usize],
        my_global_rank: usize,
        world_size: usize,
        deadline: &Deadline,
    ) -> Result<Self> {
        let me = check_members(members, my_global_rank, world_size)?;
        let layout = Layout::new(members.len()).ok_or_else(|| Error::Unsupported {
            what: format!("shared memory between {} ranks of one host", members.len()),
            reason: format!("the most is {MAX_RANKS}; use the tcp transport"),
        });
        let entered = match layout {
            Ok(layout) if me == 0 => lead(exchange, layout, deadline),
            layout => follow(exchange, layout, members[0], me, deadline),
        };
        Ok(Self::new(entered?, members))
    }

    fn new(region: Region, members: &[usize]) -> Self {
        let (ranks, me) = (region.layout().ranks, region.me());
        let is_crowded = super::wait::is_crowded(&region);
        Self {
            me,
            ranks,
            globals: members.iter().map(|rank| *rank as u32).collect(),
            step: 0,
            standing: Standing::Ready,
            spins: super::wait::spins(is_crowded),
            pace: Pace::new(region.layout().slot_bytes(), is_crowded),
            inputs: vec![std::ptr::null(); ranks].into(),
            links_taken: vec![false; ranks * CHANNELS].into(),
            region: Arc::new(region),
        }
    }

    /// This rank's place among the ranks of its host.
    #[cfg(test)]
    pub(crate) fn local_index(&self) -> usize {
        self.me
    }

    /// How many ranks this host has.
    #[cfg(test)]
    pub(crate) fn size(&self) -> usize {
        self.ranks
    }

    /// The byte stream to and from another rank of this host; `None` where it was taken before, and for this rank itself.
    pub(crate) fn link(&mut self, local_peer: usize, channel: Channel) -> Option<RingLink> {
        if local_peer == self.me || local_peer >= self.ranks {
            return None;
        }
        let taken = &mut self.links_taken[local_peer * CHANNELS + channel as usize];
        if std::mem::replace(taken, true) {
            return None;
        }
        Some(RingLink::new(Arc::clone(&self.region), local_peer, channel))
    }

    /// Tells the ranks of this host why the communicator ended, unless one has told already, and wakes those who sleep.
    pub(crate) fn tell(&self, notice: &Notice) {
        self.region.tell(notice);
    }

    /// Why the communicator ended, where a rank of this host has told.
    pub(crate) fn notice(&self) -> Option<Notice> {
        self.region.notice()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.region.depart();
    }
}

/// This rank's place among the members, which must be ascending and in the world.
fn check_members(members: &[usize], my_global_rank: usize, world_size: usize) -> Result<usize> {
    let ascending = members.windows(2).all(|pair| pair[0] < pair[1]);
    let inside = members.last().is_some_and(|last| *last < world_size) && u32::try_from(world_size).is_ok();
    let me = members.iter().position(|rank| *rank == my_global_rank);
    me.filter(|_| ascending && inside).ok_or_else(|| Error::Conflict {
        reason: format!("rank {my_global_rank} of {world_size} was told that its host has the ranks {members:?}"),
    })
}

/// The first byte of the leader's blob before a socket's name; anything else is followed by what went wrong.
const NAME: u8 = 1;

/// The leader's part: makes the region and hands it out while the exchange runs.
fn lead(exchange: &mut dyn Exchange, layout: Layout, deadline: &Deadline) -> Result<Region> {
    let made = region::create(&layout).and_then(|file| Ok((file.try_clone()?, Region::enter(file, layout, 0)?, Door::open()?)));
    let (file, region, door) = match made {
        Ok(made) => made,
        Err(error) => {
            let error = Error::io(format!("making a shared region of {} bytes", layout.bytes), error);
            exchange.all_gather(format!("\0{error}").as_bytes(), deadline)?;
            exchange.all_gather(error.to_string().as_bytes(), deadline)?;
            return Err(error);
        }
    };
    thread::scope(|scope| {
        let served = thread::Builder::new().name("collectives-door".to_owned()).spawn_scoped(scope, || door.serve(file.as_fd()));
        let served = served.map(drop).map_err(|error| Error::io("starting the thread that hands out the shared region", error));
        let outcome = announce(exchange, &door, &served, deadline);
        door.close();
        outcome
    })?;
    Ok(region)
}

/// The leader's two rounds.
fn announce(exchange: &mut dyn Exchange, door: &Door, served: &Result<()>, deadline: &Deadline) -> Result<()> {
    let blob = match served {
        Ok(()) => [&[NAME], door.name().as_bytes()].concat(),
        Err(error) => format!("\0{error}").into_bytes(),
    };
    exchange.all_gather(&blob, deadline)?;
    agree(exchange, served.clone(), deadline)
}

/// Everybody else's part: gets the region from the leader.
fn follow(exchange: &mut dyn Exchange, layout: Result<Layout>, leader: usize, me: usize, deadline: &Deadline) -> Result<Region> {
    let blobs = exchange.all_gather(&[], deadline)?;
    let entered = layout.and_then(|layout| {
        let file = receive(blobs.get(leader).map_or(&[], Vec::as_slice), leader, deadline)?;
        Region::enter(file, layout, me).map_err(|error| Error::io(format!("mapping the shared region of {} bytes", layout.bytes), error))
    });
    let (region, outcome) = match entered {
        Ok(region) => (Some(region), Ok(())),
        Err(error) => (None, Err(error)),
    };
    agree(exchange, outcome, deadline)?;
    region.ok_or_else(|| Error::Conflict { reason: "a region was agreed on that is not there".to_owned() })
}

/// Reads the leader's blob and fetches the region's file.
fn receive(blob: &[u8], leader: usize, deadline: &Deadline) -> Result<OwnedFd> {
    let protocol = |reason: String| Error::Protocol { with: format!("rank {leader}, which leads its host,"), reason };
    match blob.split_first() {
        Some((&NAME, name)) => {
            let name = std::str::from_utf8(name).map_err(|_| protocol(format!("{name:?} is not a socket's name")))?;
            door::fetch(name, deadline)
                .map_err(|error| Error::io(format!("getting the shared region from rank {leader} at @{name}"), error))
        }
        Some((_, reason)) => Err(failed(leader, reason, deadline)),
        None => Err(protocol("an empty message in place of a socket's name".to_owned())),
    }
}

/// The last round: nobody goes on unless everybody has the region.
fn agree(exchange: &mut dyn Exchange, outcome: Result<()>, deadline: &Deadline) -> Result<()> {
    let reason = outcome.as_ref().err().map(Error::to_string).unwrap_or_default();
    let blobs = exchange.all_gather(reason.as_bytes(), deadline)?;
    outcome?;
    match blobs.iter().enumerate().find(|(_, reason)| !reason.is_empty()) {
        Some((rank, reason)) => Err(failed(rank, reason, deadline)),
        None => Ok(()),
    }
}

/// Another rank's failure, in its own words.
fn failed(rank: usize, reason: &[u8], deadline: &Deadline) -> Error {
    let reason = String::from_utf8_lossy(reason).into_owned();
    Error::PeerLost { doing: "setting up shared memory".to_owned(), peer: Peer::unknown(rank), elapsed: deadline.elapsed(), reason }
}
