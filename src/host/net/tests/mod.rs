//! Meshes of threads, and unproven connections at their listeners.

mod greeting;

use std::collections::BTreeMap;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::BorrowedFd;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::hello::{Hello, Membership};
use super::mesh::Mesh;
use super::{Channel, Link, Terms};
use crate::authentication::Secret;
use crate::base::deadline::Deadline;
use crate::base::random::Random;
use crate::base::tuning::net::SILENCE_TIMEOUT;
use crate::error::{Error, Result};
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::exchange::{Exchange, local};
use crate::host::link::ByteLink;

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const NONCE: [u8; 16] = *b"a nonce of tests";
const COMMUNICATOR: u64 = 77;
const PAYLOAD: usize = 3001;

/// Returns a deadline that passes only if the test fails.
fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn terms(secret: Option<Secret>) -> Terms {
    Terms { secret, silence_timeout: SILENCE_TIMEOUT, connections: 1, ports: None }
}

fn shuffled(random: &mut Random, mut items: Vec<usize>) -> Vec<usize> {
    for end in (1..items.len()).rev() {
        items.swap(end, random.below(end + 1));
    }
    items
}

fn new_mesh(exchange: &mut dyn Exchange, rank: usize, size: usize, listen: IpAddr) -> Mesh {
    new_mesh_with(None, exchange, rank, size, listen)
}

fn new_mesh_with(secret: Option<&Secret>, exchange: &mut dyn Exchange, rank: usize, size: usize, listen: IpAddr) -> Mesh {
    Mesh::exchange(exchange, rank, size, true, listen, NONCE, COMMUNICATOR, &terms(secret.cloned()), &soon()).unwrap()
}

/// Runs `body` as each rank of a mesh on its own thread, and returns the results by rank.
fn run<R: Send>(size: usize, listen: IpAddr, body: impl Fn(usize, Mesh) -> R + Sync) -> Vec<R> {
    run_with(None, size, listen, body)
}

fn run_with<R: Send>(secret: Option<&Secret>, size: usize, listen: IpAddr, body: impl Fn(usize, Mesh) -> R + Sync) -> Vec<R> {
    let body = &body;
    thread::scope(|scope| {
        let ranks: Vec<_> = (local::exchanges(size).into_iter().enumerate())
            .map(|(rank, mut exchange)| scope.spawn(move || body(rank, new_mesh_with(secret, &mut exchange, rank, size, listen))))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

impl Mesh {
    /// Opens a point-to-point link to `peer`, and waits for it.
    fn connect(
        &self,
        peer: usize,
        deadline: &Deadline,
        interrupted: &mut dyn FnMut() -> Option<AbortReason>,
    ) -> std::result::Result<Link, Interrupted> {
        self.open(Channel::PointToPoint, &[peer], deadline, interrupted).map(|mut links| links.remove(0).1)
    }
}

/// The links for collectives of one rank, opened when they are first needed.
struct CollectiveLinks<'a> {
    mesh: &'a Mesh,
    open: BTreeMap<usize, Link>,
}

impl<'a> CollectiveLinks<'a> {
    fn of(mesh: &'a Mesh) -> Self {
        Self { mesh, open: BTreeMap::new() }
    }

    fn link(
        &mut self,
        peer: usize,
        deadline: &Deadline,
        interrupted: &mut dyn FnMut() -> Option<AbortReason>,
    ) -> std::result::Result<&mut Link, Interrupted> {
        if !self.open.contains_key(&peer) {
            self.open.extend(self.mesh.open(Channel::Collective, &[peer], deadline, interrupted)?);
        }
        Ok(self.open.get_mut(&peer).unwrap())
    }

    fn for_each_open(&mut self, mut visit: impl FnMut(usize, &mut Link)) {
        self.open.iter_mut().for_each(|(peer, link)| visit(*peer, link));
    }
}

/// An exchange that records the addresses of a mesh, as any rank learns them.
struct Eavesdropper<'a>(&'a mut dyn Exchange, Vec<Vec<u8>>);

impl Exchange for Eavesdropper<'_> {
    fn all_gather(&mut self, mine: &[u8], deadline: &Deadline) -> Result<Vec<Vec<u8>>> {
        self.1 = self.0.all_gather(mine, deadline)?;
        Ok(self.1.clone())
    }
}

/// Returns the address in a blob of the IPv4 form.
fn address(blob: &[u8]) -> SocketAddr {
    let &[4, a, b, c, d, high, low] = blob else { panic!("{blob:?}") };
    SocketAddr::from(([a, b, c, d], u16::from_be_bytes([high, low])))
}

/// Returns what rank `from` sends to rank `to`: different for each pair, channel and position.
fn payload(channel: Channel, from: usize, to: usize) -> Vec<u8> {
    let seed = from * 31 + to * 7 + usize::from(channel == Channel::Collective) * 101;
    (0..PAYLOAD).map(|index| (seed + index * 3 + index / 256) as u8).collect()
}

fn wait_for(link: &Link, flags: PollFlags) {
    // There is no descriptor if something was read ahead.
    let descriptor = if flags == PollFlags::OUT { link.write_descriptor() } else { link.descriptor() };
    if let Some(descriptor) = descriptor {
        wait_for_descriptor(descriptor, flags);
    }
}

/// Waits, and fails if nothing arrives: the other end may have failed.
fn wait_for_descriptor(descriptor: BorrowedFd<'_>, flags: PollFlags) {
    let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_ne!(poll(&mut [PollFd::from_borrowed_fd(descriptor, flags)], Some(&limit)).unwrap(), 0, "waited in vain for {flags:?}");
}

fn write_all(link: &mut Link, bytes: &[u8]) {
    let mut sent = 0;
    while sent < bytes.len() {
        let (head, tail) = bytes[sent..].split_at((bytes.len() - sent) / 3);
        match link.try_write(&[IoSlice::new(head), IoSlice::new(tail)]) {
            Ok(written) => sent += written,
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait_for(link, PollFlags::OUT),
            Err(error) => panic!("{error}"),
        }
    }
}

fn read_exactly(link: &mut Link, len: usize) -> Vec<u8> {
    let (mut bytes, mut got) = (vec![0; len], 0);
    while got < len {
        match link.try_read(&mut bytes[got..]) {
            Ok(read) => got += read,
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait_for(link, PollFlags::IN),
            Err(error) => panic!("{error}"),
        }
    }
    bytes
}

/// Waits until the mesh's acceptor has something to do.
fn wait_for_caller(mesh: &Mesh) {
    wait_for_descriptor(mesh.listener_descriptor().unwrap(), PollFlags::IN);
}

/// Returns `count` point-to-point links that peers have opened.
fn accept_all(mesh: &Mesh, count: usize) -> Vec<(usize, Link)> {
    let mut links = mesh.accepted(Channel::PointToPoint);
    while links.len() < count {
        wait_for_caller(mesh);
        links.extend(mesh.accepted(Channel::PointToPoint));
    }
    links
}

/// Opens all links in random order, then exchanges bytes on every link in both directions.
fn full_mesh(size: usize, listen: IpAddr, seed: u64) {
    full_mesh_with(None, size, listen, seed);
}

fn full_mesh_with(secret: Option<&Secret>, size: usize, listen: IpAddr, seed: u64) {
    println!("{size} ranks on {listen}, seed {seed}");
    run_with(secret, size, listen, |rank, mesh| {
        let mut random = Random(seed + rank as u64);
        let mut links = CollectiveLinks::of(&mesh);
        let peers: Vec<usize> = (0..size).filter(|&peer| peer != rank).collect();
        let mut outgoing = Vec::new();
        // Collective links in a random order, and point-to-point links interleaved in another.
        for (collective, single) in shuffled(&mut random, peers.clone()).into_iter().zip(shuffled(&mut random, peers.clone())) {
            links.link(collective, &soon(), &mut || None).unwrap();
            outgoing.push((single, mesh.connect(single, &soon(), &mut || None).unwrap()));
        }
        let mut incoming = accept_all(&mesh, peers.len());
        let mut from: Vec<usize> = incoming.iter().map(|(peer, _)| *peer).collect();
        from.sort_unstable();
        assert_eq!(from, peers, "one from each");
        let mut open = Vec::new();
        links.for_each_open(|peer, _| open.push(peer));
        assert_eq!(open, peers);

        links.for_each_open(|peer, link| write_all(link, &payload(Channel::Collective, rank, peer)));
        for (peer, link) in outgoing.iter_mut().chain(&mut incoming) {
            write_all(link, &payload(Channel::PointToPoint, rank, *peer));
        }
        links.for_each_open(|peer, link| assert_eq!(read_exactly(link, PAYLOAD), payload(Channel::Collective, peer, rank)));
        for (peer, link) in outgoing.iter_mut().chain(&mut incoming) {
            assert_eq!(read_exactly(link, PAYLOAD), payload(Channel::PointToPoint, *peer, rank));
        }
    });
}

#[test]
fn every_rank_reaches_every_other() {
    full_mesh(1, LOCALHOST, 1);
    for (size, seed) in [(2, 11), (2, 12), (5, 13), (5, 14), (13, 15)] {
        full_mesh(size, LOCALHOST, seed);
    }
}

#[test]
fn every_rank_reaches_every_other_where_they_have_a_secret() {
    let secret = Secret::new("a secret of the tests").unwrap();
    full_mesh_with(Some(&secret), 3, LOCALHOST, 16);
    #[cfg(feature = "encryption")]
    for (size, seed) in [(2, 17), (5, 18), (13, 19)] {
        full_mesh_with(Some(&secret.clone().encrypting().unwrap()), size, LOCALHOST, seed);
    }
}

#[test]
fn over_version_six_of_the_protocol_too() {
    let six = IpAddr::V6(Ipv6Addr::LOCALHOST);
    if let Err(error) = TcpListener::bind((six, 0)) {
        return println!("skipped: {six}: {error}");
    }
    full_mesh(5, six, 21);
}

/// Runs `body` as each of two ranks, whose links have these numbers of connections.
fn run_striped<R: Send>(connections: [u8; 2], body: impl Fn(usize, Mesh) -> R + Sync) -> Vec<R> {
    let body = &body;
    thread::scope(|scope| {
        let ranks = local::exchanges(2).into_iter().enumerate().map(|(rank, mut exchange)| {
            let terms = Terms { connections: connections[rank], ..terms(None) };
            let mut mesh = move || Mesh::exchange(&mut exchange, rank, 2, true, LOCALHOST, NONCE, COMMUNICATOR, &terms, &soon()).unwrap();
            scope.spawn(move || body(rank, mesh()))
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn links_for_collectives_may_have_several_connections() {
    const BYTES: usize = 1 << 20;
    for connections in [2, 5, 16] {
        run_striped([connections; 2], |rank, mesh| {
            let mut links = CollectiveLinks::of(&mesh);
            let link = links.link(1 - rank, &soon(), &mut || None).unwrap();
            let whole = |from: usize| (0..BYTES).map(|index| (from * 7 + index * 3 + index / 4096) as u8).collect::<Vec<_>>();
            // Both write at the same time what fits, and then one after the other.
            write_all(link, &payload(Channel::Collective, rank, 1 - rank));
            assert_eq!(read_exactly(link, PAYLOAD), payload(Channel::Collective, 1 - rank, rank));
            for sender in [0, 1] {
                if rank == sender {
                    write_all(link, &whole(rank));
                } else {
                    assert!(read_exactly(link, BYTES) == whole(sender), "{connections} connections");
                }
            }
            assert!(matches!(link, Link::Striped(_)));
            // Messages use one connection.
            let mine = mesh.connect(1 - rank, &soon(), &mut || None).unwrap();
            assert!(matches!(mine, Link::Plain(_)) && matches!(accept_all(&mesh, 1).remove(0).1, Link::Plain(_)));
        });
    }
}

#[test]
fn a_rank_whose_links_have_fewer_connections_refuses_the_others() {
    let errors = run_striped([3, 1], |rank, mesh| {
        let limit = if rank == 0 { soon() } else { Deadline::after(Duration::from_millis(500)) };
        mesh.open(Channel::Collective, &[1 - rank], &limit, &mut || None).map(drop).map_err(|stop| stop.abort_reason)
    });
    assert_eq!(errors[0], Err(AbortReason::Lost { rank: 1, by: 0 }), "{errors:?}");
}

#[test]
fn partners_connect_all_at_once() {
    for participants in [vec![3], vec![0, 6], vec![6, 0, 2, 4, 5], (0..7).collect()] {
        let participants = &participants;
        let open = run(7, LOCALHOST, |_, mesh| {
            let links = mesh.connect_partners(participants, &soon(), &mut || None).unwrap();
            links.iter().map(|(peer, _)| *peer).collect::<Vec<_>>()
        });
        for (rank, open) in open.iter().enumerate() {
            assert!(open.iter().all(|peer| participants.contains(peer)), "rank {rank} opened {open:?} of {participants:?}");
            // In groups of up to seven, the distances 1, 2, 4 reach every participant.
            let expected = if participants.contains(&rank) { participants.len() - 1 } else { 0 };
            assert_eq!(open.len(), expected, "rank {rank} opened {open:?} of {participants:?}");
        }
    }
}

#[test]
fn links_opened_from_both_ends_at_once_are_two() {
    for _ in 0..20 {
        run(2, LOCALHOST, |rank, mesh| {
            let peer = 1 - rank;
            let mut mine = mesh.connect(peer, &soon(), &mut || None).unwrap();
            let mut theirs = accept_all(&mesh, 1).remove(0).1;
            write_all(&mut mine, &payload(Channel::PointToPoint, rank, peer));
            write_all(&mut theirs, &payload(Channel::Collective, rank, peer));
            assert_eq!(read_exactly(&mut theirs, PAYLOAD), payload(Channel::PointToPoint, peer, rank));
            assert_eq!(read_exactly(&mut mine, PAYLOAD), payload(Channel::Collective, peer, rank));
        });
    }
}

/// Returns the hello of a rank in the tests' job of three.
fn hello(sender: u32, receiver: u32) -> Hello {
    Hello { channel: Channel::PointToPoint, connection: 0, sender: membership(sender), receiver }
}

fn membership(rank: u32) -> Membership {
    Membership { job_nonce: NONCE, communicator: COMMUNICATOR, rank, world_size: 3 }
}

/// Whether the other end has closed the connection, perhaps after some bytes.
fn is_closed(stream: &mut TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    loop {
        match stream.read(&mut [0; 512]) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != ErrorKind::WouldBlock,
        }
    }
}

#[test]
fn unproven_connections_do_not_disturb_the_job() {
    let exchanges = local::exchanges(3);
    thread::scope(|scope| {
        for (rank, mut exchange) in exchanges.into_iter().enumerate() {
            scope.spawn(move || {
                let mut eavesdropper = Eavesdropper(&mut exchange, Vec::new());
                let mesh = new_mesh(&mut eavesdropper, rank, 3, LOCALHOST);
                // Each rank sends junk to the next before it does anything else.
                let target = address(&eavesdropper.1[(rank + 1) % 3]);
                let say = |words: &[u8]| {
                    let mut stream = TcpStream::connect(target).unwrap();
                    stream.write_all(words).unwrap();
                    stream
                };
                let mut wrong_job = hello(0, 1);
                wrong_job.sender.job_nonce = [0; 16];
                let silent = [say(b""), say(b"c"), say(&hello(0, 1).to_bytes()[..51])];
                let mut junk = [
                    say(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
                    say(&[0xff; 4096]),
                    say(&wrong_job.to_bytes()),
                    say(&hello(9, 1).to_bytes()),
                ];
                drop(say(b"colhel"));
                let mut links = CollectiveLinks::of(&mesh);
                for peer in (0..3).filter(|&peer| peer != rank) {
                    let link = links.link(peer, &soon(), &mut || None).unwrap();
                    write_all(link, &payload(Channel::Collective, rank, peer));
                }
                for peer in (0..3).filter(|&peer| peer != rank) {
                    let link = links.link(peer, &soon(), &mut || None).unwrap();
                    assert_eq!(read_exactly(link, PAYLOAD), payload(Channel::Collective, peer, rank));
                }
                assert!(mesh.accepted(Channel::PointToPoint).is_empty(), "no unproven connection came in");
                // Each rank's junk is dropped by the next, so all continue until every rank has seen it.
                let deadline = soon();
                loop {
                    assert!(mesh.accepted(Channel::PointToPoint).is_empty());
                    let thrown_out = junk.iter_mut().all(is_closed);
                    let all = exchange.all_gather(&[u8::from(thrown_out)], &deadline).unwrap();
                    if all.iter().all(|blob| blob == &[1]) {
                        break;
                    }
                    assert!(!deadline.has_passed());
                }
                drop(silent);
            });
        }
    });
}

#[test]
fn a_peer_that_has_gone_is_lost_at_once() {
    let began = Instant::now();
    let stops = run(3, LOCALHOST, |rank, mesh| match rank {
        0 => None,
        1 => {
            let mut links = CollectiveLinks::of(&mesh);
            // Rank 2 ends once it has been reached, and its listener goes first.
            let mut link = mesh.connect(2, &soon(), &mut || None).unwrap();
            wait_for(&link, PollFlags::IN);
            assert_eq!(link.try_read(&mut [0]).unwrap_err().kind(), ErrorKind::UnexpectedEof);
            let collective = links.link(2, &soon(), &mut || None).map(|_| ()).unwrap_err();
            let single = mesh.connect(2, &soon(), &mut || None).unwrap_err();
            assert_eq!(collective, single);
            Some(single)
        }
        _ => {
            let links = accept_all(&mesh, 1);
            drop(mesh);
            drop(links);
            None
        }
    });
    assert_eq!(stops[1], Some(Interrupted::from(AbortReason::Lost { rank: 2, by: 1 })));
    assert!(began.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_deadline_names_whom_it_waited_for() {
    let limit = Duration::from_millis(60);
    let stops = run(3, LOCALHOST, |rank, mesh| {
        let mut links = CollectiveLinks::of(&mesh);
        let began = Instant::now();
        let stop = match rank {
            // Rank 2 is idle and serves no rank. Rank 0 waits for the answer of rank 2, and rank 1 waits for rank 0,
            // which never connects to it.
            0 => links.link(2, &Deadline::after(limit), &mut || None).map(|_| ()).unwrap_err(),
            1 => links.link(0, &Deadline::after(limit), &mut || None).map(|_| ()).unwrap_err(),
            _ => return (None, mesh),
        };
        assert!(began.elapsed() >= limit && began.elapsed() < Duration::from_secs(5));
        (Some(stop), mesh)
    });
    let stop = |waiting, missing| Interrupted {
        abort_reason: AbortReason::TimedOut { waiting, missing },
        missing: vec![missing],
        arrived: vec![waiting],
    };
    assert_eq!(stops[0].0, Some(stop(0, 2)));
    assert_eq!(stops[1].0, Some(stop(1, 0)));
}

#[test]
fn after_a_deadline_the_next_wait_goes_on() {
    let mut exchanges = local::exchanges(2).into_iter();
    let (mut first, mut second) = (exchanges.next().unwrap(), exchanges.next().unwrap());
    let other = thread::spawn(move || {
        let mesh = new_mesh(&mut second, 1, 2, LOCALHOST);
        second.all_gather(b"", &soon()).unwrap();
        let mut links = CollectiveLinks::of(&mesh);
        read_exactly(links.link(0, &soon(), &mut || None).unwrap(), 5)
    });
    let mesh = new_mesh(&mut first, 0, 2, LOCALHOST);
    let mut links = CollectiveLinks::of(&mesh);
    let passed = Deadline::after(Duration::from_millis(30));
    assert!(matches!(links.link(1, &passed, &mut || None), Err(Interrupted { abort_reason: AbortReason::TimedOut { .. }, .. })));
    assert!(matches!(mesh.connect(1, &passed, &mut || None), Err(Interrupted { abort_reason: AbortReason::TimedOut { .. }, .. })));
    first.all_gather(b"", &soon()).unwrap();
    write_all(links.link(1, &soon(), &mut || None).unwrap(), b"hello");
    assert_eq!(other.join().unwrap(), b"hello");
}

#[test]
fn an_interruption_ends_a_wait() {
    run(2, LOCALHOST, |rank, mesh| {
        let mut links = CollectiveLinks::of(&mesh);
        let abort_reason = AbortReason::Aborted { by: 1 };
        let mut asked = 0;
        let mut interrupted = || {
            asked += 1;
            (asked > 2).then_some(abort_reason)
        };
        // Rank 1 waits until it is interrupted, because rank 0 never connects to it.
        if rank == 1 {
            let stop = links.link(0, &soon(), &mut interrupted).map(|_| ()).unwrap_err();
            assert_eq!(stop, Interrupted::from(abort_reason));
        }
    });
}

#[test]
fn what_cannot_be_is_an_error() {
    run(2, LOCALHOST, |rank, mesh| {
        let mut links = CollectiveLinks::of(&mesh);
        for peer in [rank, 2, usize::MAX] {
            let failed = Interrupted::from(AbortReason::Failed { rank: rank as u32 });
            assert_eq!(links.link(peer, &soon(), &mut || None).map(|_| ()).unwrap_err(), failed);
            assert_eq!(mesh.connect(peer, &soon(), &mut || None).unwrap_err(), failed);
        }
        assert!(links.open.is_empty());
    });
    let mut exchange = local::exchanges(1).remove(0);
    let error = Mesh::exchange(&mut exchange, 3, 3, true, LOCALHOST, NONCE, 0, &terms(None), &soon()).unwrap_err();
    assert!(error.to_string().contains("rank 3 of 3"), "{error}");
}

#[test]
fn who_does_not_listen_cannot_be_reached() {
    let exchanges = local::exchanges(2);
    thread::scope(|scope| {
        for (rank, mut exchange) in exchanges.into_iter().enumerate() {
            scope.spawn(move || {
                let mesh = Mesh::exchange(&mut exchange, rank, 2, false, LOCALHOST, NONCE, 0, &terms(None), &soon()).unwrap();
                assert!(mesh.listener_descriptor().is_none());
                assert!(mesh.accepted(Channel::PointToPoint).is_empty());
                let failed = Interrupted::from(AbortReason::Failed { rank: rank as u32 });
                assert_eq!(CollectiveLinks::of(&mesh).link(1 - rank, &soon(), &mut || None).map(|_| ()).unwrap_err(), failed);
                assert_eq!(mesh.connect(1 - rank, &soon(), &mut || None).unwrap_err(), failed);
            });
        }
    });
}

#[test]
fn a_rank_that_cannot_listen_tells_everyone() {
    // 192.0.2.0/24 is reserved for documentation: no host has it.
    for (bad, needle) in [(IpAddr::from([192, 0, 2, 1]), "192.0.2.1"), (IpAddr::from([0, 0, 0, 0]), "0.0.0.0")] {
        let exchanges = local::exchanges(3);
        thread::scope(|scope| {
            for (rank, mut exchange) in exchanges.into_iter().enumerate() {
                scope.spawn(move || {
                    let listen = if rank == 1 { bad } else { LOCALHOST };
                    let error = Mesh::exchange(&mut exchange, rank, 3, true, listen, NONCE, 0, &terms(None), &soon()).unwrap_err();
                    assert!(error.to_string().contains(needle), "{error}");
                    assert_eq!(error.is_peer_lost(), rank != 1, "{error}");
                });
            }
        });
    }
}

/// An exchange that returns given blobs.
struct Forged(Vec<Vec<u8>>);

impl Exchange for Forged {
    fn all_gather(&mut self, _mine: &[u8], _deadline: &Deadline) -> Result<Vec<Vec<u8>>> {
        Ok(self.0.clone())
    }
}

#[test]
fn forged_addresses_are_refused() {
    for forged in [vec![], vec![vec![]], vec![vec![], b"junk".to_vec()], vec![vec![], vec![4, 0, 0, 0, 0, 0, 0]], vec![vec![]; 3]] {
        let error = Mesh::exchange(&mut Forged(forged), 0, 2, false, LOCALHOST, NONCE, 0, &terms(None), &soon()).unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
    }
}

/// Returns how many descriptors this process has open.
fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Checks that no descriptor or thread is left. It is valid only if no other test runs in the process: see the next
/// test.
fn leave_nothing_behind() {
    full_mesh(2, LOCALHOST, 31);
    let before = open_descriptors();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let threads_before = threads();
    full_mesh(5, LOCALHOST, 32);
    let mut exchange = local::exchanges(1).remove(0);
    let mesh = new_mesh(&mut exchange, 0, 1, LOCALHOST);
    let during = open_descriptors();
    assert!(during > before);
    drop(mesh);
    assert_eq!(open_descriptors(), before);
    // The kernel takes a moment to forget a thread that was joined.
    let deadline = soon();
    while threads() > threads_before {
        assert!(!deadline.has_passed(), "{} threads, {threads_before} before", threads());
        thread::yield_now();
    }
}

#[test]
fn nothing_is_left_behind() {
    const ALONE: &str = "COLLECTIVES_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return leave_nothing_behind();
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "host::net::tests::nothing_is_left_behind", "--test-threads=2"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn threads_share_a_mesh() {
    // One thread opens collective links while another accepts point-to-point ones, as a communicator's two threads do.
    run(4, LOCALHOST, |rank, mesh| {
        let mut links = CollectiveLinks::of(&mesh);
        let peers: Vec<usize> = (0..4).filter(|&peer| peer != rank).collect();
        thread::scope(|scope| {
            let progress = &mesh;
            let peers = &peers;
            scope.spawn(move || {
                let mut opening: Vec<_> =
                    peers.iter().map(|&peer| (peer, progress.connecting(Channel::PointToPoint, peer).unwrap())).collect();
                let (mut outgoing, mut incoming) = (Vec::new(), Vec::new());
                while outgoing.len() < peers.len() || incoming.len() < peers.len() {
                    incoming.extend(progress.accepted(Channel::PointToPoint));
                    opening.retain_mut(|(peer, connector)| match connector.advance().unwrap() {
                        Some(link) => {
                            outgoing.push((*peer, link));
                            false
                        }
                        None => true,
                    });
                    let mut interests: Vec<_> = opening.iter().flat_map(|(_, connector)| connector.interests()).collect();
                    interests.push(PollFd::from_borrowed_fd(progress.listener_descriptor().unwrap(), PollFlags::IN));
                    let slice = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
                    poll(&mut interests, Some(&slice)).unwrap();
                }
                for (peer, link) in &mut outgoing {
                    write_all(link, &payload(Channel::PointToPoint, rank, *peer));
                }
                for (peer, link) in &mut incoming {
                    assert_eq!(read_exactly(link, PAYLOAD), payload(Channel::PointToPoint, *peer, rank));
                }
            });
            for &peer in peers.iter().rev() {
                write_all(links.link(peer, &soon(), &mut || None).unwrap(), &payload(Channel::Collective, rank, peer));
            }
            links.for_each_open(|peer, link| assert_eq!(read_exactly(link, PAYLOAD), payload(Channel::Collective, peer, rank)));
        });
    });
}
