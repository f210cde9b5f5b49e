//! The cost of a job as it gets larger, counted, not timed: messages to start it, links, memory, and clients at one
//! store.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use collectives::{
    Communicator, Error, Transport,
    store::{Store, TcpStore, TcpStoreServer},
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const WORLDS: [usize; 5] = [2, 4, 8, 16, 32];
const LONG: Duration = Duration::from_secs(60);
/// How often a rank that waits at the store asks whether ranks contradict each other, and the requests of each such
/// slice.
const SLICE: Duration = Duration::from_millis(100);
const REQUESTS_PER_SLICE: u64 = 4;

/// Locks out the other tests. They count what the process has open or mapped, so they run one after another.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The cost of a job of threads, counted while all its ranks were running.
struct Cost {
    requests: u64,
    /// The sockets between ranks, including listeners.
    sockets: usize,
    elapsed: Duration,
}

/// Starts `n` ranks, each with its own client of one server, and counts.
fn start(n: usize, transport: Transport) -> Cost {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let connect = |_| TcpStore::connect("127.0.0.1", server.local_addr().port(), LONG).unwrap();
    let stores: Vec<Arc<TcpStore>> = (0..n).map(connect).collect();
    let before = open_sockets();
    let began = Instant::now();
    let all_here = Barrier::new(n + 1);
    let (requests, sockets, elapsed) = std::thread::scope(|scope| {
        for (rank, store) in stores.iter().enumerate() {
            let all_here = &all_here;
            scope.spawn(move || {
                let comm = Communicator::builder()
                    .configure(|config| {
                        config.transport = transport;
                        config.timeout = LONG;
                        // One socket of the process, however many ranks it has.
                        config.status_socket = false;
                    })
                    .with_store(Arc::clone(store) as _, rank, n);
                all_here.wait();
                all_here.wait();
                comm.unwrap().close().unwrap();
            });
        }
        all_here.wait();
        let counted = (server.requests_served(), open_sockets(), began.elapsed());
        all_here.wait();
        counted
    });
    Cost { requests, sockets: sockets - before, elapsed }
}

/// Starts `n` ranks except one, and counts.
fn start_without_one(n: usize, absent: usize, limit: Duration) -> (u64, Duration) {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let connect = |_| TcpStore::connect("127.0.0.1", server.local_addr().port(), LONG).unwrap();
    let stores: Vec<Arc<TcpStore>> = (0..n).map(connect).collect();
    let began = Instant::now();
    std::thread::scope(|scope| {
        for (rank, store) in stores.iter().enumerate().filter(|(rank, _)| *rank != absent) {
            scope.spawn(move || {
                let started =
                    Communicator::builder().configure(|config| config.timeout = limit).with_store(Arc::clone(store) as _, rank, n);
                let error = started.map(drop).unwrap_err();
                let Error::Timeout { missing, arrived, .. } = &error else { panic!("{error}") };
                let numbers = |peers: &[collectives::Peer]| peers.iter().map(|peer| peer.rank).collect::<Vec<_>>();
                assert_eq!(numbers(missing), [absent], "rank {rank}: {error}");
                assert!(numbers(arrived).into_iter().eq((0..n).filter(|rank| *rank != absent)), "rank {rank}: {error}");
            });
        }
    });
    (server.requests_served(), began.elapsed())
}

#[test]
fn what_it_costs_to_say_who_did_not_come_grows_with_the_ranks_and_not_with_their_square() {
    const LIMIT: Duration = Duration::from_secs(2);
    let _alone = alone();
    for n in [16, 64, 256] {
        let (requests, elapsed) = start_without_one(n, 7, LIMIT);
        let slices = elapsed.as_millis() as u64 / SLICE.as_millis() as u64 + 1;
        println!("{n} ranks, one of them absent: {requests} requests in {elapsed:?}");
        // Each rank's start, a look in each slice, and the last questions. Each time, rank 0 also asks which keys are
        // missing.
        let most = n as u64 * (20 + slices * REQUESTS_PER_SLICE) + slices * 64;
        assert!(requests <= most, "{n} ranks cost {requests} requests in {elapsed:?}, which is more than {most}");
    }
}

fn open_sockets() -> usize {
    let entries = fs::read_dir("/proc/self/fd").unwrap();
    let is_socket = |entry: &fs::DirEntry| fs::read_link(entry.path()).is_ok_and(|to| to.to_string_lossy().starts_with("socket:"));
    entries.filter(|entry| entry.as_ref().is_ok_and(is_socket)).count()
}

/// Returns the logarithm of a power of two.
fn log2(n: usize) -> usize {
    n.ilog2() as usize
}

#[test]
fn messages_and_links_of_a_start_grow_as_n_log_n_at_most() {
    let _alone = alone();
    for transport in [Transport::Shm, Transport::Tcp] {
        for n in WORLDS {
            let Cost { requests, sockets, elapsed } = start(n, transport);
            let slices = elapsed.as_millis() as u64 / SLICE.as_millis() as u64;
            let patience = n as u64 * slices * REQUESTS_PER_SLICE;
            println!("{transport:?}, {n} ranks: {requests} requests in {elapsed:?}, {sockets} sockets");
            assert!(requests <= 24 * (n * log2(n)) as u64 + patience, "{n} ranks cost {requests} requests in {elapsed:?}");
            match transport {
                // One listener for each rank, for use after a failure.
                Transport::Shm => assert_eq!(sockets, n, "{n} ranks in shared memory need no links"),
                // Each rank has one more listener, and a link has two ends.
                _ => assert!(sockets <= 2 * n + 2 * n * log2(n), "{n} ranks have {sockets} sockets"),
            }
        }
    }
}

/// Returns the mappings of the shared region in this process, one for each rank: bytes mapped and bytes in memory.
fn regions() -> Vec<(usize, usize)> {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut found = Vec::new();
    let mut inside = false;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        if !first.ends_with(':') {
            inside = line.contains("/memfd:collectives");
        } else if inside && (first == "Size:" || first == "Rss:") {
            let bytes = words.next().unwrap().parse::<usize>().unwrap() << 10;
            match first {
                "Size:" => found.push((bytes, 0)),
                _ => found.last_mut().unwrap().1 = bytes,
            }
        }
    }
    found
}

/// Returns the least and the most bytes that `Config` promises:
/// - for each rank, a slot ring of six times a slot
/// - from each rank to each, two rings
/// - at most 9 KiB for each rank, plus 8 KiB
fn promised(n: usize) -> (usize, usize) {
    let (slot, ring) = match n {
        0..=2 => (1024, 4096),
        3..=4 => (1024, 1024),
        5..=8 => (512, 256),
        9..=16 => (256, 64),
        17..=32 => (128, 16),
        _ => (64, 4),
    };
    let large = n * 6 * (slot << 10) + n * n * 2 * ((ring << 10) + 256);
    (large, large + n * (9 << 10) + (8 << 10))
}

#[test]
fn the_shared_region_is_as_large_as_the_formula_says() {
    let _alone = alone();
    for n in WORLDS.into_iter().chain([33, 64]) {
        let comms = Communicator::builder()
            .configure(|config| {
                config.transport = Transport::Shm;
                config.timeout = LONG;
            })
            .local(n)
            .unwrap();
        let regions = regions();
        let (least, most) = promised(n);
        println!(
            "{n} ranks: {} bytes mapped, {} in memory after the start",
            regions[0].0,
            regions.iter().map(|region| region.1).max().unwrap()
        );
        assert_eq!(regions.len(), n, "one mapping for each rank");
        assert!(regions.iter().all(|(bytes, _)| (least..=most).contains(bytes)), "{n} ranks: {regions:?}, not {least} to {most}");
        drop(comms);
    }
}

/// A client that sends raw bytes. One thread can have thousands of them wait at once.
struct Client(TcpStream);

impl Client {
    fn connect(server: &TcpStoreServer) -> Self {
        let stream = TcpStream::connect(server.local_addr()).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.set_nodelay(true).unwrap();
        let mut client = Self(stream);
        client.ask(0, &[], &0x3C85_F7CE_u32.to_le_bytes());
        client
    }

    /// Sends a request: its number, texts preceded by their lengths, and the rest.
    fn ask(&mut self, query: u8, texts: &[&[u8]], rest: &[u8]) {
        let texts = texts.iter().flat_map(|text| [&(text.len() as u64).to_le_bytes()[..], text].concat());
        let message: Vec<u8> = std::iter::once(query).chain(texts).chain(rest.iter().copied()).collect();
        self.0.write_all(&message).unwrap();
    }

    fn set(&mut self, key: &str, value: &[u8]) {
        self.ask(1, &[key.as_bytes(), value], &[]);
    }

    /// Asks for a wait, which [`Client::released`] ends.
    fn wait(&mut self, key: &str) {
        let key = [&1_u64.to_le_bytes()[..], &(key.len() as u64).to_le_bytes(), key.as_bytes()].concat();
        self.ask(6, &[], &key);
    }

    fn add(&mut self, key: &str) {
        self.ask(4, &[key.as_bytes()], &1_i64.to_le_bytes());
    }

    fn barrier(&mut self, key: &str, world_size: usize) {
        self.ask(18, &[key.as_bytes()], &(world_size as i64).to_le_bytes());
    }

    fn number(&mut self) -> i64 {
        let mut bytes = [0; 8];
        self.0.read_exact(&mut bytes).unwrap();
        i64::from_le_bytes(bytes)
    }

    fn released(&mut self) {
        let mut flag = [9];
        self.0.read_exact(&mut flag).unwrap();
        assert_eq!(flag, [0], "the wait was not ended by what it was for");
    }

    fn value(&mut self, into: &mut Vec<u8>) {
        into.resize(self.number() as usize, 0);
        self.0.read_exact(into).unwrap();
    }
}

/// Lets this process open `files` files. Returns `false` if the system does not allow it.
fn may_open(files: u64) -> bool {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    current.is_none_or(|current| current >= files)
        || (maximum.is_none_or(|maximum| maximum >= files) && setrlimit(Resource::Nofile, Rlimit { current: Some(files), maximum }).is_ok())
}

/// Returns this process's peak memory since [`forget_peak`], or since its start if the system cannot reset the peak.
fn peak_memory() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

/// Resets the peak of memory.
fn forget_peak() {
    if let Err(error) = fs::write("/proc/self/clear_refs", "5") {
        println!("the peak of memory cannot be forgotten: {error}");
    }
}

#[test]
fn one_store_holds_four_thousand_ranks_through_a_rendezvous() {
    const RANKS: usize = 4096;
    const BLOB: usize = 128;
    /// Clients whose answers are under way at once.
    const BATCH: usize = 64;
    const MEMORY: usize = 256 << 20;
    let _alone = alone();
    if !may_open(2 * RANKS as u64 + 200) {
        return println!("skipped: {} open files are not allowed here (ulimit -Hn)", 2 * RANKS + 200);
    }
    forget_peak();
    let memory = peak_memory();
    let began = Instant::now();
    let lap = |what: &str| println!("{what}: {:?}", began.elapsed());
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let leader = TcpStore::connect("127.0.0.1", server.local_addr().port(), LONG).unwrap();
    let mut clients: Vec<Client> = (0..RANKS).map(|_| Client::connect(&server)).collect();
    lap("connected");

    // Each client claims a number, writes its identity and its blob, and waits until all are there.
    for (rank, client) in clients.iter_mut().enumerate() {
        client.add(&format!("/claim/{rank}"));
        client.set(&format!("/who/{rank}"), b"a host, a process");
        client.set(&format!("/0/{rank}"), &[rank as u8; BLOB]);
        client.wait("/0/all");
    }
    for client in &mut clients {
        assert_eq!(client.number(), 1, "a number was claimed twice");
    }
    lap("handed in");
    let keys: Vec<String> = (0..RANKS).map(|rank| format!("0/{rank}")).collect();
    let blobs = leader.multi_get(&keys.iter().map(String::as_str).collect::<Vec<_>>(), LONG).unwrap();
    assert!(blobs.iter().enumerate().all(|(rank, blob)| *blob == [rank as u8; BLOB]));
    let all = blobs.concat();
    leader.set("0/all", &all).unwrap();
    clients.iter_mut().for_each(Client::released);
    lap("released");
    let mut value = Vec::new();
    for batch in clients.chunks_mut(BATCH) {
        batch.iter_mut().for_each(|client| client.ask(3, &[b"/0/all"], &[]));
        for client in batch {
            client.value(&mut value);
            assert!(value == all, "other bytes than were set");
        }
    }
    lap("read");

    // A barrier by counting, as in PyTorch, and the store's own barrier: no client passes before the last arrives.
    clients.iter_mut().for_each(|client| client.add("/count"));
    let mut counts: Vec<i64> = clients.iter_mut().map(Client::number).collect();
    counts.sort_unstable();
    assert!(counts.into_iter().eq(1..=RANKS as i64));
    clients.iter_mut().for_each(|client| client.barrier("/barrier", RANKS + 1));
    assert!(leader.check(&["count"]).unwrap());
    clients[0].0.set_nonblocking(true).unwrap();
    assert_eq!(clients[0].0.peek(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "passed before the last");
    clients[0].0.set_nonblocking(false).unwrap();
    leader.barrier("barrier", RANKS + 1, LONG).unwrap();
    clients.iter_mut().for_each(Client::released);
    lap("passed a barrier");
    assert_eq!(leader.num_keys().unwrap(), 3 * RANKS as i64 + 3);
    let more = peak_memory() - memory;
    println!("{} requests, {} MiB", server.requests_served(), more >> 20);
    assert!(more < MEMORY, "{more} bytes for {RANKS} clients and their store");
}
