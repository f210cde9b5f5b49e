//! Who listens where, and links to them when they are wanted.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::Channel;
use super::address::Address;
use super::connector::Connector;
use super::hello::{Hello, Membership};
use super::listener::Acceptor;
use super::tcp::TcpLink;
use crate::deadline::Deadline;
use crate::error::{Error, Peer, Result};
use crate::event;
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::exchange::Exchange;
use crate::proof::Secret;

/// The longest a wait goes without looking whether it still makes sense.
const SLICE: Duration = Duration::from_millis(20);
/// What goes wrong in [`Mesh::exchange`] went wrong with this.
const DOING: &str = "opening links between hosts";

/// This rank's way to all others. Clones are the same mesh: one for each thread that opens links.
///
/// Whoever waits in here also takes in the links that others open, so that ranks that wait for each other in a circle get on.
#[derive(Debug, Clone)]
pub(crate) struct Mesh {
    pub(super) shared: Arc<Shared>,
}

/// What all threads of a rank use.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) me: Membership,
    /// What whoever is linked to has to know.
    secret: Option<Secret>,
    /// By rank; `None` for those who do not listen.
    pub(super) addresses: Vec<Option<SocketAddr>>,
    /// `None` where this rank does not listen.
    listening: Option<Listening>,
}

/// The acceptor, and apart from its lock what says that it has something to do.
#[derive(Debug)]
struct Listening {
    acceptor: Mutex<Acceptor>,
    readiness: Arc<OwnedFd>,
}

impl Mesh {
    /// Listens on `listen` where `needs_listener` says so, and learns where the others do. Every rank of the communicator takes
    /// part, with the same nonce, number and world size; no link is opened.
    #[expect(clippy::too_many_arguments, reason = "each is a fact of its own, and there is one caller")]
    pub(crate) fn exchange(
        exchange: &mut dyn Exchange,
        rank: usize,
        world_size: usize,
        needs_listener: bool,
        listen: IpAddr,
        job_nonce: [u8; 16],
        communicator: u64,
        secret: Option<&Secret>,
        deadline: &Deadline,
    ) -> Result<Self> {
        let me = match (u32::try_from(rank), u32::try_from(world_size)) {
            (Ok(rank), Ok(world_size)) if rank < world_size => Membership { job_nonce, communicator, rank, world_size },
            _ => return Err(Error::config(format!("rank {rank} of {world_size}"), "ranks are numbered from 0 to world size - 1")),
        };
        let acceptor = needs_listener.then(|| start_listening(listen, me, secret)).transpose();
        let mine = match &acceptor {
            Ok(Some((_, address))) => Address::At(*address),
            Ok(None) => Address::None,
            Err(error) => Address::Failed(error.to_string()),
        };
        // A rank that cannot listen says so first, for otherwise the others wait for it.
        let gathered = exchange.all_gather(&mine.to_bytes(), deadline);
        let listening = acceptor?.map(|(acceptor, _)| Listening { readiness: acceptor.readiness(), acceptor: Mutex::new(acceptor) });
        let addresses = read_addresses(&gathered?, world_size, deadline)?;
        Ok(Self { shared: Arc::new(Shared { me, secret: secret.cloned(), addresses, listening }) })
    }

    /// Begins to open a point-to-point link to `peer`; see [`Connector::advance`]. Nothing waits, so that other links progress
    /// meanwhile; [`Mesh::accepted`] has to be called now and then, for the peer may be waiting for this rank at the same time.
    pub(crate) fn connecting(&self, peer: usize) -> std::result::Result<Connector, Interrupted> {
        self.shared.connector(Channel::PointToPoint, peer)
    }

    /// Opens a point-to-point link to `peer`, and waits for it. `interrupted` is asked now and then whether to give up.
    #[cfg(test)]
    pub(crate) fn connect(
        &self,
        peer: usize,
        deadline: &Deadline,
        interrupted: &mut dyn FnMut() -> Option<AbortReason>,
    ) -> std::result::Result<TcpLink, Interrupted> {
        let mut connector = self.connecting(peer)?;
        loop {
            self.shared.serve();
            if let Some(link) = connector.advance()? {
                return Ok(link);
            }
            if let Some(abort_reason) = interrupted() {
                return Err(abort_reason.into());
            }
            if deadline.has_passed() {
                event::warn!("no link to {}", connector.progress());
                return Err(self.shared.timed_out(&[peer], &[]));
            }
            self.shared.wait(connector.interest().into_iter().collect(), deadline);
        }
    }

    /// The links of this kind that peers have opened since the last call, with their ranks.
    pub(crate) fn accepted(&self, channel: Channel) -> Vec<(usize, TcpLink)> {
        let Some(mut acceptor) = self.shared.acceptor() else { return Vec::new() };
        acceptor.poll();
        acceptor.take_all(channel)
    }

    /// Readable when [`Mesh::accepted`] has something to do, though not for each link that it then returns: another thread may
    /// have taken it in. `None` where this rank does not listen.
    pub(crate) fn listener_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.shared.listening.as_ref().map(|listening| listening.readiness.as_fd())
    }
}

impl Shared {
    /// Greets whoever has come.
    pub(super) fn serve(&self) {
        if let Some(mut acceptor) = self.acceptor() {
            acceptor.poll();
        }
    }

    /// The link of this kind that `peer` has opened, if it has. An error where it never can.
    pub(super) fn take(&self, channel: Channel, peer: usize) -> std::result::Result<Option<TcpLink>, Interrupted> {
        let rank = self.known(peer)?;
        let Some(mut acceptor) = self.acceptor() else {
            event::error!("rank {} waits for a link from rank {peer} but does not listen", self.me.rank);
            return Err(AbortReason::Failed { rank: self.me.rank }.into());
        };
        acceptor.poll();
        Ok(acceptor.take(channel, rank))
    }

    /// A link to `peer` to be opened. An error where it never can.
    pub(super) fn connector(&self, channel: Channel, peer: usize) -> std::result::Result<Connector, Interrupted> {
        self.way(channel, peer).map(|(address, hello, same_host)| Connector::new(address, hello, self.secret.clone(), same_host))
    }

    /// What looks whether `peer` lives, which is to open a link for collectives.
    pub(super) fn probing(&self, peer: usize) -> std::result::Result<Connector, Interrupted> {
        self.way(Channel::Collective, peer).map(|(address, hello, same_host)| Connector::probing(address, hello, same_host))
    }

    /// Where `peer` listens, what to say there, and whether that is on this host.
    fn way(&self, channel: Channel, peer: usize) -> std::result::Result<(SocketAddr, Hello, bool), Interrupted> {
        let receiver = self.known(peer)?;
        let Some(address) = self.addresses[peer] else {
            event::error!("rank {} wants a link to rank {peer}, which does not listen", self.me.rank);
            return Err(AbortReason::Failed { rank: self.me.rank }.into());
        };
        let my_ip = self.addresses[self.me.rank as usize].map(|address| address.ip());
        let same_host = address.ip().is_loopback() || my_ip == Some(address.ip());
        Ok((address, Hello { channel, sender: self.me, receiver }, same_host))
    }

    /// Waits until one of `interests` or the acceptor is ready, not longer than a slice.
    pub(super) fn wait<'a>(&'a self, mut interests: Vec<PollFd<'a>>, deadline: &Deadline) {
        if let Some(listening) = &self.listening {
            interests.push(PollFd::new(&listening.readiness, PollFlags::IN));
        }
        let slice = deadline.remaining().min(SLICE);
        let slice = Timespec { tv_sec: 0, tv_nsec: slice.subsec_nanos().into() };
        match rustix::event::poll(&mut interests, Some(&slice)) {
            // A signal is as good a reason to look again as any.
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                event::warn!("waiting for a link: {error}");
                std::thread::sleep(SLICE.min(deadline.remaining()));
            }
        }
    }

    /// The end of a wait for `missing`, the first of which is told to others, when `arrived` were there.
    pub(super) fn timed_out(&self, missing: &[usize], arrived: &[usize]) -> Interrupted {
        let ranks = |peers: &[usize]| peers.iter().map(|&peer| peer as u32).collect::<Vec<_>>();
        let (waiting, missing) = (self.me.rank, ranks(missing));
        let abort_reason = AbortReason::TimedOut { waiting, missing: missing.first().copied().unwrap_or(waiting) };
        let mut arrived = ranks(arrived);
        arrived.push(waiting);
        arrived.sort_unstable();
        Interrupted { abort_reason, missing, arrived }
    }

    /// `peer` as it is on the wire. An error for this rank itself and for ranks that do not exist.
    fn known(&self, peer: usize) -> std::result::Result<u32, Interrupted> {
        match u32::try_from(peer) {
            Ok(rank) if rank < self.me.world_size && rank != self.me.rank => Ok(rank),
            _ => {
                event::error!("rank {} of {} wants a link to rank {peer}", self.me.rank, self.me.world_size);
                Err(AbortReason::Failed { rank: self.me.rank }.into())
            }
        }
    }

    /// The acceptor, where there is one. A thread that panicked with the lock left nothing half done that matters here.
    fn acceptor(&self) -> Option<event::Locked<'_, Acceptor>> {
        self.listening.as_ref().map(|listening| event::lock(&listening.acceptor))
    }
}

/// An acceptor and where peers reach it.
fn start_listening(listen: IpAddr, me: Membership, secret: Option<&Secret>) -> Result<(Acceptor, SocketAddr)> {
    if listen.is_unspecified() {
        return Err(Error::config(format!("listen address {listen}"), "peers cannot connect to it; name one address of this host"));
    }
    let doing = |source: io::Error| Error::io(format!("listening for peers on {listen}"), source);
    let acceptor = Acceptor::bind(listen, me, secret.cloned()).map_err(doing)?;
    let address = acceptor.address().map_err(doing)?;
    if secret.is_none() && !listen.is_loopback() {
        event::warn!(%address, "no secret is set: whoever can reach this address can pose as a rank (COLLECTIVES_SECRET)");
    }
    Ok((acceptor, address))
}

/// Everyone's address, from what they sent.
fn read_addresses(blobs: &[Vec<u8>], world_size: usize, deadline: &Deadline) -> Result<Vec<Option<SocketAddr>>> {
    if blobs.len() != world_size {
        let reason = format!("{} addresses for {world_size} ranks", blobs.len());
        return Err(Error::Protocol { with: "the exchange of addresses".to_owned(), reason });
    }
    let read = |(rank, blob): (usize, &Vec<u8>)| match Address::from_bytes(blob) {
        Ok(Address::None) => Ok(None),
        Ok(Address::At(address)) => Ok(Some(address)),
        Ok(Address::Failed(reason)) => Err(Error::PeerLost {
            doing: DOING.to_owned(),
            peer: Peer::unknown(rank),
            elapsed: deadline.elapsed(),
            reason: format!("it cannot listen: {}", reason.escape_debug()),
        }),
        Err(reason) => Err(Error::Protocol { with: format!("rank {rank}"), reason }),
    };
    blobs.iter().enumerate().map(read).collect()
}
