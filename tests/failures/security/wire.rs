//! Attacks on encrypted connections between two ranks, or to the store, lead to errors and to nothing else.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use collectives::store::{Store, TcpStore, TcpStoreServer};
use collectives::{Communicator, Config, ReduceOp, Result, Secret, Transport};

use super::line::{Attack, Between, Carried, Change};
use super::{LONG, RIGHT, recorder, secret};
use crate::common::meeting::End;
use crate::common::oracle::hash;
use crate::common::ranks::{Meeting, patience};

/// The timeout of ranks under attack.
const SOON: Duration = patience(3);
/// Bytes that occur nowhere else.
const PATTERN: &[u8; 64] = b"Forty-two ships lie off the northern cape; nobody is to know it.";
/// The last bytes of a link, for which no rank may wait.
const LAST_WORDS: usize = 4096;
/// The elements of a large all-reduce, and the bytes of a large message.
const LARGE: usize = 100_003;
const LONG_MESSAGE: usize = 300_001;

fn encrypting() -> Secret {
    secret(RIGHT).encrypting().unwrap()
}

fn config(encrypt: bool, timeout: Duration) -> Config {
    let mut config = Config::default();
    config.transport = Transport::Tcp;
    config.timeout = timeout;
    config.secret = Some(secret(RIGHT));
    config.encrypt = encrypt;
    config
}

/// The outcome of a job of two ranks.
struct Outcome {
    errors: [Option<String>; 2],
    /// Whether a call returned success with wrong bits.
    is_wrong: bool,
    has_fired: bool,
    carried: Vec<Carried>,
}

/// Runs collectives and messages of two ranks, small and large. Sets `wrong` if a result is wrong.
fn program(comm: &Communicator, wrong: &AtomicBool) -> Result<()> {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let right = |is_right: bool| {
        if !is_right {
            wrong.store(true, Ordering::SeqCst);
        }
    };
    for round in 0..3 {
        let mut small: Vec<u64> = (0..13).map(|index| hash(round, me, index)).collect();
        comm.all_reduce(&mut small, ReduceOp::BitXor)?;
        right((0..13).all(|index| small[index] == hash(round, 0, index) ^ hash(round, 1, index)));

        let said = PATTERN.map(|byte| byte ^ (round as u8) << 1);
        if me == 0 {
            comm.send(&said[..], peer)?;
        }
        let mut heard = [0_u8; 64];
        if me == 1 {
            comm.recv(&mut heard[..], peer)?;
            right(heard == said);
            comm.send(&heard[..], peer)?;
        } else {
            comm.recv(&mut heard[..], peer)?;
            right(heard == said);
        }

        let mut large: Vec<u32> = (0..LARGE).map(|index| hash(round, me, index) as u32).collect();
        comm.all_reduce(&mut large, ReduceOp::Sum)?;
        right((0..LARGE).all(|index| large[index] == (hash(round, 0, index) as u32).wrapping_add(hash(round, 1, index) as u32)));

        let mut pattern = if me == 0 { PATTERN.repeat(50) } else { vec![0; 3200] };
        comm.broadcast(&mut pattern, 0)?;
        right(pattern == PATTERN.repeat(50));

        let byte = |from: usize, index: usize| hash(round + 9, from, index) as u8;
        let sent = comm.start_send((0..LONG_MESSAGE).map(|index| byte(me, index)).collect::<Vec<u8>>(), peer)?;
        let mut long = vec![0_u8; LONG_MESSAGE];
        comm.recv(&mut long, peer)?;
        right((0..LONG_MESSAGE).all(|index| long[index] == byte(peer, index)));
        sent.wait()?;
    }
    comm.barrier()
}

/// Runs them with an attacker on the line.
fn run(encrypt: bool, timeout: Duration, attack: Option<Attack>) -> Outcome {
    let between = Arc::new(Between::new(attack));
    let wrong = AtomicBool::new(false);
    let rank = |rank: usize| {
        let comm = Communicator::builder().config(config(encrypt, timeout)).with_store(between.clone(), rank, 2)?;
        program(&comm, &wrong)?;
        comm.close()
    };
    let errors = thread::scope(|scope| {
        let rank = &rank;
        let ranks = [0, 1].map(|number| scope.spawn(move || rank(number)));
        ranks.map(|rank| rank.join().unwrap().err().map(|error| error.to_string()))
    });
    Outcome { errors, is_wrong: wrong.load(Ordering::SeqCst), has_fired: between.has_fired(), carried: between.carried() }
}

/// Returns how many bytes the busiest connection carries to its listener, and back.
fn lengths() -> [usize; 2] {
    let clean = run(true, LONG, None);
    assert_eq!((clean.errors, clean.is_wrong), ([None, None], false));
    [0, 1].map(|direction| clean.carried.iter().map(|carried| carried[direction].len()).max().unwrap())
}

/// Returns attacks in the handshake, and at any position before the last tenth. No rank may need the bytes behind that.
fn attacks(seed: u64) -> Vec<Attack> {
    let lengths = lengths();
    let mut attacks = Vec::new();
    for (number, change) in Change::ALL.into_iter().enumerate() {
        for to_listener in [true, false] {
            let bytes = lengths[usize::from(!to_listener)];
            for case in 0..7 {
                let drawn = hash(seed, number * 2 + usize::from(to_listener), case);
                let at = if case < 3 { drawn as usize % 150 } else { 150 + drawn as usize % (bytes * 9 / 10 - 150) };
                let length = [1, 7, 64, 1500][(drawn >> 40) as usize % 4];
                attacks.push(Attack { change, to_listener, at, length });
            }
        }
    }
    attacks
}

#[test]
fn whoever_changes_the_line_achieves_an_error_that_names_the_peer() {
    let seed = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    println!("seed {seed}");
    let attacks = attacks(seed);
    let (next, fired, errors) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        while let Some(attack) = attacks.get(next.fetch_add(1, Ordering::SeqCst)) {
            let began = Instant::now();
            let outcome = run(true, SOON, Some(*attack));
            let case = format!("seed {seed}, {attack:?}: {:?}", outcome.errors);
            assert!(!outcome.is_wrong, "a wrong result: {case}");
            assert!(began.elapsed() < patience(60), "{:?}: {case}", began.elapsed());
            fired.fetch_add(usize::from(outcome.has_fired), Ordering::SeqCst);
            // Links differ between runs. This run may not have reached the position, or it is in the last bytes of a
            // link.
            let lengths = outcome.carried.iter().map(|carried| carried[usize::from(!attack.to_listener)].len());
            let matters = lengths.max().is_some_and(|length| length > attack.at + 2 * attack.length + LAST_WORDS);
            let has_error = outcome.errors.iter().any(Option::is_some);
            assert!(has_error || !outcome.has_fired || !matters, "nobody noticed: {case}");
            for (rank, error) in outcome.errors.iter().enumerate() {
                // The peer may notice first. Over another link, it then reports that it has lost this rank.
                let names = |error: &String| error.contains(&format!("rank {}", 1 - rank)) && !error.contains(&format!("lost rank {rank}"));
                assert!(error.as_ref().is_none_or(names), "rank {rank} does not name its peer: {case}");
                errors.fetch_add(usize::from(error.is_some()), Ordering::SeqCst);
            }
        }
    };
    thread::scope(|scope| (0..6).for_each(|_| drop(scope.spawn(work))));
    let (fired, errors) = (fired.into_inner(), errors.into_inner());
    println!("{} attacks, {fired} came to their place, {errors} errors", attacks.len());
    assert!(fired > attacks.len() * 2 / 3 && errors >= fired, "{fired} of {} attacks, {errors} errors", attacks.len());
}

#[test]
fn the_same_changes_of_plain_links_give_wrong_results() {
    // Deep in the payload of a large message, which the checks of messages do not cover.
    let lies = (0..6).map(|case| Attack { change: Change::Flip, to_listener: true, at: 300_000 + 20_011 * case, length: 1 });
    let is_harmful = |attack| {
        let outcome = run(false, SOON, Some(attack));
        outcome.has_fired && outcome.is_wrong && outcome.errors == [None, None]
    };
    assert!(lies.into_iter().any(is_harmful), "whoever is on the line does not change anything");
}

fn holds(carried: &[Carried], words: &[u8]) -> bool {
    carried.iter().flatten().any(|bytes| bytes.windows(words.len()).any(|window| window == words))
}

#[test]
fn what_ranks_say_is_on_a_plain_line_and_not_on_an_encrypted_one() {
    let plain = run(false, LONG, None);
    assert_eq!((plain.errors, plain.is_wrong), ([None, None], false));
    assert!(holds(&plain.carried, PATTERN), "the pattern is not found where it is");
    let encrypted = run(true, LONG, None);
    assert_eq!((encrypted.errors, encrypted.is_wrong), ([None, None], false));
    let bytes = |carried: &[Carried]| carried.iter().flatten().map(Vec::len).sum::<usize>();
    assert!(bytes(&encrypted.carried) > bytes(&plain.carried));
    // Not even a part of the pattern appears.
    assert!(PATTERN.chunks(8).all(|part| !holds(&encrypted.carried, part)));
}

#[test]
fn a_recorded_connection_of_a_rank_cannot_be_played_again() {
    let between = Arc::new(Between::new(None));
    let played = Meeting::new(3);
    let (wrong, done) = (AtomicBool::new(false), AtomicBool::new(false));
    let rank = |rank: usize| {
        let comm = Communicator::builder().config(config(true, LONG)).with_store(between.clone(), rank, 2).unwrap();
        program(&comm, &wrong).unwrap();
        played.meet();
        // A rank serves its listener while it moves one of its own messages.
        let mut goes_on = 1_u8;
        while goes_on == 1 {
            if rank == 0 {
                goes_on = u8::from(!done.load(Ordering::SeqCst));
                comm.send(&goes_on, 1).unwrap();
                comm.recv(&mut goes_on, 1).unwrap();
            } else {
                comm.recv(&mut goes_on, 0).unwrap();
                comm.send(&goes_on, 0).unwrap();
            }
        }
        program(&comm, &wrong).unwrap();
        comm.close().unwrap();
    };
    thread::scope(|scope| {
        let rank = &rank;
        let ranks = [0, 1].map(|number| scope.spawn(move || rank(number)));
        // Ends the ranks, however this scope ends.
        let end = End(&done);
        played.meet();
        let carried = between.carried();
        assert!(carried.len() >= 2, "a link for collectives, and one for messages");
        let mut refused = 0;
        for listener in between.listeners() {
            for [said, _] in &carried {
                refused += usize::from(play(listener, said));
            }
        }
        drop(end);
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
        // Each listener accepts the openings that were recorded for it, and then asks for proof.
        assert_eq!(refused, 2 * carried.len(), "recordings that were understood, and then refused");
    });
    assert!(!wrong.into_inner());
}

/// Replays a recording to a listener, each part when it is due. Returns whether the listener asked for proof and then
/// refused it.
fn play(listener: std::net::SocketAddr, said: &[u8]) -> bool {
    let mut stream = TcpStream::connect(listener).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let (opening, rest) = said.split_at(112);
    stream.write_all(opening).unwrap();
    let mut reply = [0; 60];
    stream.read_exact(&mut reply[..44]).unwrap();
    if reply.starts_with(b"colproof\x01\x03") {
        return false;
    }
    assert!(reply.starts_with(b"colproof\x01\x01\0\x01"), "{}", reply.escape_ascii());
    stream.read_exact(&mut reply[44..]).unwrap();
    stream.write_all(&rest[..32]).unwrap();
    stream.read_exact(&mut reply[..44]).unwrap();
    assert!(reply.starts_with(b"colproof\x01\x03\x03"), "{}", reply.escape_ascii());
    assert!(matches!(stream.read(&mut reply), Ok(0) | Err(_)), "the listener hangs up");
    true
}

/// Sets and gets at a store through a recorder, and returns what the client sent.
fn said_to_the_store(secret: &Secret) -> Vec<u8> {
    let server = TcpStoreServer::bind_with_secret("127.0.0.1:0", secret).unwrap();
    let (port, recording) = recorder(&server);
    let store = TcpStore::connect_with_secret("127.0.0.1", port, LONG, secret).unwrap();
    let long = PATTERN.repeat(5000);
    store.set("pattern", PATTERN).unwrap();
    store.set("long", &long).unwrap();
    assert_eq!(store.get("pattern", LONG).unwrap(), PATTERN);
    assert!(store.get("long", LONG).unwrap() == long);
    drop(store);
    recording.join().unwrap()
}

#[test]
fn what_is_said_to_a_store_can_be_read_on_a_plain_line_and_not_on_an_encrypted_one() {
    let finds = |said: &[u8], words: &[u8]| said.windows(words.len()).any(|window| window == words);
    assert!(finds(&said_to_the_store(&secret(RIGHT)), PATTERN));
    let said = said_to_the_store(&encrypting());
    assert!(said.len() > 64 * 5000 && !finds(&said, &PATTERN[..8]) && !finds(&said, b"pattern"));
}

#[test]
fn a_changed_byte_on_the_way_to_a_store_is_an_error_and_stores_nothing() {
    let server = TcpStoreServer::bind_with_secret("127.0.0.1:0", &encrypting()).unwrap();
    let direct = || TcpStore::connect_with_secret("127.0.0.1", server.local_addr().port(), LONG, &encrypting()).unwrap();
    let target = server.local_addr();
    for to_listener in [true, false] {
        // The handshake, the greeting, and the request or its answer.
        let bytes = if to_listener { 190 } else { 150 };
        for at in (0..bytes).step_by(9) {
            let attack = Attack { change: Change::Flip, to_listener, at, length: 1 };
            let (line, _between) = Between::before(target, attack);
            let patience = Duration::from_millis(300);
            let outcome = TcpStore::connect_with_secret("127.0.0.1", line.port(), patience, &encrypting()).and_then(|store| {
                store.set("key", format!("{attack:?}").as_bytes())?;
                store.add("count", 0)
            });
            let error = outcome.map_or_else(|error| error.to_string(), |_| panic!("nobody noticed {attack:?}"));
            assert!(error.contains(&format!("127.0.0.1:{}", line.port())), "{attack:?}: {error}");
        }
    }
    let store = direct();
    assert_eq!(store.add("count", 1).unwrap(), 1);
}
