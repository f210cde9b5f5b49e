//! Keeps the addresses that ranks listen on, and opens links to these ranks when needed.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::Channel;
use super::connector::Connector;
use super::hello::{Hello, Membership, REFUSAL_TEXT_BYTES, quote};
use super::link::{Link, Terms};
use super::listener::Acceptor;
use super::opening::Opening;
use super::own_address;
use crate::base::deadline::Deadline;
use crate::base::event;
use crate::base::tuning::net::OPENING_SLICE;
use crate::config::PortRange;
use crate::error::{Error, Peer, Result};
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::exchange::Exchange;

/// What is being done, in errors of [`Mesh::exchange`].
const DOING: &str = "opening links between hosts";
/// What is being done, in errors about accepting links.
const ACCEPTING: &str = "accepting a link from another rank";

/// The addresses of all other ranks and this rank's listener, shared by the threads that open links.
#[derive(Debug)]
pub(crate) struct Mesh {
    me: Membership,
    terms: Terms,
    /// By rank; `None` for ranks that do not listen.
    addresses: Vec<Option<SocketAddr>>,
    /// By rank: whether it runs on this host, at whatever address. Empty if unknown.
    neighbours: Vec<bool>,
    /// `None` if this rank does not listen.
    listening: Option<Listening>,
    /// The reason why links cannot be opened, if this process lacks resources for it.
    lack: OnceLock<Error>,
}

/// The acceptor, and a descriptor that shows, without the lock of the acceptor, that the acceptor has something to do.
#[derive(Debug)]
struct Listening {
    acceptor: Arc<Mutex<Acceptor>>,
    readiness: Arc<OwnedFd>,
}

impl Listening {
    /// Does the pending work, and returns the reason why no connection can be accepted, if this process lacks resources
    /// for it.
    fn poll(&self) -> Option<io::Error> {
        let mut acceptor = event::lock(&self.acceptor);
        acceptor.poll();
        acceptor.lack()
    }
}

impl Mesh {
    /// Listens on `listen` if `needs_listener`, and learns the addresses of the other ranks. Every rank of the
    /// communicator takes part, with the same nonce, number and world size. No link is opened.
    #[expect(clippy::too_many_arguments, reason = "the parameters are independent, and there is one caller")]
    pub(crate) fn exchange(
        exchange: &mut dyn Exchange,
        rank: usize,
        world_size: usize,
        needs_listener: bool,
        listen: IpAddr,
        job_nonce: [u8; 16],
        communicator: u64,
        terms: &Terms,
        deadline: &Deadline,
    ) -> Result<Self> {
        let me = match (u32::try_from(rank), u32::try_from(world_size)) {
            (Ok(rank), Ok(world_size)) if rank < world_size => Membership { job_nonce, communicator, rank, world_size },
            _ => return Err(Error::config(format!("rank {rank} of {world_size}"), "ranks are numbered from 0 to world size - 1")),
        };
        let acceptor = needs_listener.then(|| start_listening(listen, me, terms)).transpose();
        let mine = match &acceptor {
            Ok(Some((_, address))) => Address::At(*address),
            Ok(None) => Address::None,
            Err(error) => Address::Failed(error.to_string()),
        };
        // A rank that cannot listen notifies the others first: otherwise they would wait for it.
        let gathered = exchange.all_gather(&mine.to_bytes(), deadline);
        let listening =
            acceptor?.map(|(acceptor, _)| Listening { readiness: acceptor.readiness(), acceptor: Arc::new(Mutex::new(acceptor)) });
        let addresses = read_addresses(&gathered?, world_size, deadline)?;
        let addresses = addresses.into_iter().map(|address| Some(own_address::seen_from(listen, address?))).collect();
        Ok(Self { me, terms: terms.clone(), addresses, neighbours: Vec::new(), listening, lack: OnceLock::new() })
    }

    /// Records, by rank, which ranks run on this host. Their addresses do not show that if they are in another network
    /// namespace. Call this before any link is opened.
    pub(crate) fn set_neighbours(&mut self, neighbours: Vec<bool>) {
        if let Some(listening) = &self.listening {
            event::lock(&listening.acceptor).neighbours.clone_from(&neighbours);
        }
        self.neighbours = neighbours;
    }

    /// Returns the address that a rank listens on; `None` if it does not listen.
    pub(crate) fn address(&self, rank: usize) -> Option<SocketAddr> {
        self.addresses.get(rank).copied().flatten()
    }

    /// Returns the number of connections of each link for collectives.
    pub(crate) fn connections(&self) -> u8 {
        self.terms.connections_of(Channel::Collective)
    }

    /// Returns a link to `peer` that is yet to be opened, or an error if that is impossible. A caller that opens one
    /// for messages must call [`Mesh::accepted`] now and then, because the peer may be waiting for this rank at the
    /// same time.
    pub(crate) fn connecting(&self, channel: Channel, peer: usize) -> std::result::Result<Opening, Interrupted> {
        let failed = Err(AbortReason::Failed { rank: self.me.rank }.into());
        let Some(receiver) = u32::try_from(peer).ok().filter(|rank| *rank < self.me.world_size && *rank != self.me.rank) else {
            event::error!("rank {} of {} cannot open a link to rank {peer}", self.me.rank, self.me.world_size);
            return failed;
        };
        let Some(address) = self.addresses[peer] else {
            event::error!("rank {} needs a link to rank {peer}, which does not listen", self.me.rank);
            return failed;
        };
        let hello = Hello { channel, connection: 0, sender: self.me, receiver };
        if hello.is_opened_by_receiver() && self.listening.is_none() {
            event::error!("rank {} waits for a link from rank {peer} but does not listen", self.me.rank);
            return failed;
        }
        let my_ip = self.addresses[self.me.rank as usize].map(|address| address.ip());
        let is_neighbour = self.neighbours.get(peer).is_some_and(|is_near| *is_near);
        let same_host = is_neighbour || my_ip == Some(address.ip()) || own_address::is_own(address);
        let collective = self.listening.as_ref().filter(|_| channel == Channel::Collective);
        let acceptor = || collective.map(|listening| Arc::clone(&listening.acceptor));
        let hellos = (0..self.terms.connections_of(channel)).map(|connection| Hello { connection, ..hello });
        Ok(Opening::new(hellos.map(|hello| Connector::new(address, hello, self.terms.clone(), same_host, acceptor()))))
    }

    /// Opens the links to all `peers` at the same time, and waits for them. `interrupted` is called now and then: if it
    /// returns a reason, the wait ends.
    pub(crate) fn open(
        &self,
        channel: Channel,
        peers: &[usize],
        deadline: &Deadline,
        interrupted: &mut dyn FnMut() -> Option<AbortReason>,
    ) -> std::result::Result<Vec<(usize, Link)>, Interrupted> {
        let begun = peers.iter().map(|&peer| Ok((peer, self.connecting(channel, peer)?)));
        let mut opening = begun.collect::<std::result::Result<Vec<_>, Interrupted>>()?;
        let mut open = Vec::new();
        loop {
            if let Some(lack) = self.listening.as_ref().and_then(Listening::poll) {
                return Err(self.lacking(ACCEPTING, lack));
            }
            let mut missing = Vec::new();
            for (peer, mut connector) in opening {
                match connector.advance().map_err(|error| error.met_by(self.me.rank))? {
                    Some(link) => open.push((peer, link)),
                    None => missing.push((peer, connector)),
                }
            }
            opening = missing;
            if let Some(lack) = opening.iter().find_map(|(_, connector)| connector.lack()) {
                return Err(self.lacking("opening a link to another rank", lack));
            }
            if opening.is_empty() {
                return Ok(open);
            }
            if let Some(abort_reason) = interrupted() {
                return Err(abort_reason.into());
            }
            if deadline.has_passed() {
                opening.iter().for_each(|(_, connector)| event::warn!("no link to {}", connector.progress()));
                return Err(self.timed_out(opening.iter().map(|(peer, _)| *peer), open.iter().map(|(peer, _)| *peer)));
            }
            self.wait(opening.iter().flat_map(|(_, connector)| connector.interests()).collect(), deadline);
        }
    }

    /// Opens the links for collectives to the partners of a dissemination among `participants`: those at distance 1, 2,
    /// 4 … in both directions. `participants` are ranks, in the same order on every rank. Every participant calls this.
    /// Afterwards, several ranks notice if one dies.
    pub(crate) fn connect_partners(
        &self,
        participants: &[usize],
        deadline: &Deadline,
        interrupted: &mut dyn FnMut() -> Option<AbortReason>,
    ) -> std::result::Result<Vec<(usize, Link)>, Interrupted> {
        let me = self.me.rank as usize;
        let Some(position) = participants.iter().position(|&rank| rank == me) else { return Ok(Vec::new()) };
        let partners: Vec<usize> = partners(position, participants.len()).iter().map(|&at| participants[at]).collect();
        self.open(Channel::Collective, &partners, deadline, interrupted)
    }

    /// Returns the links of this kind that peers have opened since the last call, with their ranks.
    pub(crate) fn accepted(&self, channel: Channel) -> Vec<(usize, Link)> {
        let Some(listening) = &self.listening else { return Vec::new() };
        let mut acceptor = event::lock(&listening.acceptor);
        acceptor.poll();
        if let Some(lack) = acceptor.lack() {
            let _ = self.lacking(ACCEPTING, lack);
        }
        acceptor.take_all(channel)
    }

    /// Returns a descriptor that is readable when [`Mesh::accepted`] has something to do. It is not readable for a link
    /// that another thread has already accepted, although [`Mesh::accepted`] returns that link. `None` if this rank
    /// does not listen.
    pub(crate) fn listener_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.listening.as_ref().map(|listening| listening.readiness.as_fd())
    }

    /// Waits until one of `interests` or the acceptor is ready, at most for one slice.
    fn wait<'a>(&'a self, mut interests: Vec<PollFd<'a>>, deadline: &Deadline) {
        if let Some(listening) = &self.listening {
            interests.push(PollFd::new(&listening.readiness, PollFlags::IN));
        }
        let slice = deadline.remaining().min(OPENING_SLICE);
        let slice = Timespec { tv_sec: 0, tv_nsec: slice.subsec_nanos().into() };
        match rustix::event::poll(&mut interests, Some(&slice)) {
            // After a signal, look again.
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                event::warn!("waiting for a link: {error}");
                std::thread::sleep(OPENING_SLICE.min(deadline.remaining()));
            }
        }
    }

    /// Returns the reason why links cannot be opened, if this process lacks resources for it. In this case, the waits
    /// for links end.
    pub(crate) fn lack(&self) -> Option<&Error> {
        self.lack.get()
    }

    /// Records that this process lacks resources for links.
    fn lacking(&self, doing: &str, lack: io::Error) -> Interrupted {
        self.lack.get_or_init(|| Error::io(doing, lack));
        AbortReason::Failed { rank: self.me.rank }.into()
    }

    /// Returns the result of a wait that timed out: `arrived` were there, and `missing` were not. Other ranks are
    /// notified of the first of `missing`.
    fn timed_out(&self, missing: impl Iterator<Item = usize>, arrived: impl Iterator<Item = usize>) -> Interrupted {
        let waiting = self.me.rank;
        let missing: Vec<u32> = missing.map(|peer| peer as u32).collect();
        let mut arrived: Vec<u32> = arrived.map(|peer| peer as u32).chain([waiting]).collect();
        arrived.sort_unstable();
        let abort_reason = AbortReason::TimedOut { waiting, missing: missing.first().copied().unwrap_or(waiting) };
        Interrupted { abort_reason, missing, arrived }
    }
}

/// Returns an acceptor and the address at which peers reach it.
fn start_listening(listen: IpAddr, me: Membership, terms: &Terms) -> Result<(Acceptor, SocketAddr)> {
    if listen.is_unspecified() {
        return Err(Error::config(format!("listen address {listen}"), "peers cannot connect to it; set one address of this host"));
    }
    let doing = |error: io::Error| PortRange::error(format!("listening for peers on {listen}"), error);
    let acceptor = Acceptor::bind(listen, me, terms.clone()).map_err(doing)?;
    let address = acceptor.address().map_err(doing)?;
    if terms.secret.is_none() && !listen.is_loopback() {
        event::warn!(%address, "no secret is set: any process that can reach this address can pose as a rank; set COLLECTIVES_SECRET");
    }
    Ok((acceptor, address))
}

/// Returns the ranks' addresses, from what they sent.
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

/// The address of a rank, as it is exchanged at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Address {
    /// The rank does not listen, because no rank opens a link to it.
    None,
    /// The rank listens here.
    At(SocketAddr),
    /// The rank should have listened but could not, for this reason. All ranks are notified, so that no rank waits for
    /// this rank.
    Failed(String),
}

impl Address {
    /// Encodes the address as nothing; as a kind (4 or 6), the address and the port; or as a zero and a text.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Self::None => {}
            Self::At(address) => {
                match address.ip() {
                    IpAddr::V4(ip) => {
                        bytes.push(4);
                        bytes.extend_from_slice(&ip.octets());
                    }
                    IpAddr::V6(ip) => {
                        bytes.push(6);
                        bytes.extend_from_slice(&ip.octets());
                    }
                }
                bytes.extend_from_slice(&address.port().to_be_bytes());
            }
            Self::Failed(reason) => {
                bytes.push(0);
                bytes.extend_from_slice(&reason.as_bytes()[..reason.len().min(REFUSAL_TEXT_BYTES)]);
            }
        }
        bytes
    }

    /// Decodes [`Address::to_bytes`]. The error quotes what is wrong.
    pub(super) fn from_bytes(bytes: &[u8]) -> std::result::Result<Self, String> {
        let address = match bytes {
            [] => return Ok(Self::None),
            [0, reason @ ..] if reason.len() <= REFUSAL_TEXT_BYTES => {
                return Ok(Self::Failed(String::from_utf8_lossy(reason).into_owned()));
            }
            &[4, a, b, c, d, high, low] => SocketAddr::from((Ipv4Addr::new(a, b, c, d), u16::from_be_bytes([high, low]))),
            [6, ip @ .., high, low] => match <[u8; 16]>::try_from(ip) {
                Ok(ip) => SocketAddr::from((Ipv6Addr::from(ip), u16::from_be_bytes([*high, *low]))),
                Err(_) => return Err(format!("an address of {} bytes: {}", bytes.len(), quote(bytes))),
            },
            other => return Err(format!("an address of {} bytes: {}", other.len(), quote(other))),
        };
        if address.port() == 0 || address.ip().is_unspecified() {
            return Err(format!("the address {address}, to which no rank can connect"));
        }
        Ok(Self::At(address))
    }
}

/// Returns the positions at distance 1, 2, 4 … from `position` around a ring of `len`, each once, in order.
fn partners(position: usize, len: usize) -> Vec<usize> {
    let mut partners = Vec::new();
    let mut distance = 1;
    while distance < len {
        partners.extend([(position + distance) % len, (position + len - distance) % len]);
        distance *= 2;
    }
    partners.sort_unstable();
    partners.dedup();
    partners
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails says where")]
mod tests {
    use super::*;

    #[test]
    fn partnership_is_mutual_and_reaches_everyone() {
        assert!(partners(0, 0).is_empty());
        assert!(partners(0, 1).is_empty());
        assert_eq!(partners(1, 2), [0]);
        assert_eq!(partners(4, 5), [0, 1, 2, 3]);
        assert_eq!(partners(0, 13), [1, 2, 4, 5, 8, 9, 11, 12]);
        for len in 1..40 {
            for position in 0..len {
                let mine = partners(position, len);
                assert!(!mine.contains(&position), "{position} of {len}");
                assert!(mine.iter().all(|&other| partners(other, len).contains(&position)), "{position} of {len}");
                assert!(len == 1 || mine.contains(&((position + 1) % len)), "{position} of {len}");
            }
        }
    }

    #[test]
    fn addresses_survive_the_wire() {
        for address in [
            Address::None,
            Address::At("10.1.2.3:65535".parse().unwrap()),
            Address::At("[fd00::1:2]:258".parse().unwrap()),
            Address::Failed("no such address".to_owned()),
            Address::Failed(String::new()),
        ] {
            assert_eq!(Address::from_bytes(&address.to_bytes()), Ok(address));
        }
        let long = Address::Failed("x".repeat(1000));
        assert_eq!(Address::from_bytes(&long.to_bytes()), Ok(Address::Failed("x".repeat(REFUSAL_TEXT_BYTES))));
    }

    #[test]
    fn malformed_addresses_are_quoted() {
        for bytes in [&b"\x04abc"[..], b"\x06abc", b"\x06", b"\x05abcdef", &[4; 8], &[6; 20], &[0; 300]] {
            let text = Address::from_bytes(bytes).expect_err("malformed");
            assert!(text.contains(&quote(bytes)), "{text}");
        }
        assert!(Address::from_bytes(&[4, 0, 0, 0, 0, 1, 1]).is_err_and(|text| text.contains("0.0.0.0:257")));
        assert!(Address::from_bytes(&[4, 127, 0, 0, 1, 0, 0]).is_err_and(|text| text.contains("127.0.0.1:0")));
        assert!(Address::from_bytes(&[6; 19]).is_ok());
    }
}
