//! Connections that a job refuses, and what unproven connections cost it.

#[cfg(feature = "encryption")]
mod line;
mod unproven;
#[cfg(feature = "encryption")]
mod wire;

use std::fmt::{Debug, Write as _};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Output};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::common::ranks::{self, Wiring, patience};
use collectives::{
    Communicator, ReduceOp, Result, Secret,
    store::{MemoryStore, Store, TcpStore, TcpStoreServer},
};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Longer than anything here takes unless it hangs.
const LONG: Duration = patience(20);
/// The secret of the tests' jobs, and a different one.
const RIGHT: &str = "the secret of the tests";
const WRONG: &str = "another secret of tests";

fn secret(text: &str) -> Secret {
    Secret::new(text).unwrap()
}

/// Makes calls of every kind that opens connections or shares memory: collectives, messages, shared buffers and a
/// split.
fn everything(comm: &Communicator) -> Result<()> {
    let (n, me) = (comm.world_size(), comm.rank());
    let mut sum = vec![me as u64 + 1; 1000];
    comm.all_reduce(&mut sum, ReduceOp::Sum)?;
    assert_eq!(sum, vec![(n * (n + 1) / 2) as u64; 1000]);
    messages(comm)?;
    let mut buffer = comm.alloc::<u32>(10_000)?;
    buffer.fill(1 << me);
    comm.all_reduce(&mut buffer, ReduceOp::BitOr)?;
    assert!(buffer.iter().all(|value| *value == (1 << n) - 1));
    let half = comm.split(Some(u32::from(me != 1)), 0)?.unwrap();
    let mut count = 1_u8;
    half.all_reduce(&mut count, ReduceOp::Sum)?;
    assert_eq!(usize::from(count), if me == 1 { 1 } else { n - 1 });
    half.close()
}

/// Sends one message from each rank to each other rank.
fn messages(comm: &Communicator) -> Result<()> {
    let (n, me) = (comm.world_size(), comm.rank());
    let others = || (0..n).filter(|other| *other != me);
    let sent: Vec<_> = others().map(|other| comm.start_send(vec![(me * 100 + other) as u64; 7], other)).collect::<Result<_>>()?;
    for other in others() {
        let mut got = vec![0_u64; 7];
        comm.recv(&mut got, other)?;
        assert_eq!(got, vec![(other * 100 + me) as u64; 7]);
    }
    sent.into_iter().try_for_each(|work| work.wait().map(drop))
}

fn job_with_a_secret(name: &str, wiring: Wiring) {
    ranks::processes_with(name, 3, |rank| wiring.builder(rank).configure(|config| config.secret = Some(secret(RIGHT))), everything);
}

#[test]
fn a_job_with_a_secret_in_shared_memory() {
    job_with_a_secret("security::a_job_with_a_secret_in_shared_memory", Wiring::Shm);
}

#[test]
fn a_job_with_a_secret_over_tcp() {
    job_with_a_secret("security::a_job_with_a_secret_over_tcp", Wiring::Tcp);
}

#[test]
fn a_job_with_a_secret_over_both() {
    job_with_a_secret("security::a_job_with_a_secret_over_both", Wiring::Pairs);
}

/// Runs a rank of a job that meets at a URL, with the secret from its environment. It reports its end on standard
/// error.
fn rank_at_a_url() {
    let variable = |name| std::env::var(name).unwrap();
    let url = format!("tcp://127.0.0.1:{}?rank={}&world_size={}", variable("MASTER_PORT"), variable("RANK"), variable("WORLD_SIZE"));
    match Communicator::builder().configure(|config| config.timeout = LONG).from_url(&url) {
        Ok(comm) => {
            everything(&comm).unwrap();
            comm.close().unwrap();
            eprintln!("RANK DONE");
        }
        Err(error) => eprintln!("unauthorized {}: {error}", error.is_unauthorized()),
    }
}

fn spawn(name: &str, rank: usize, port: u16, secret: Option<&str>) -> Child {
    let variables: Vec<_> = secret.map(|secret| ("COLLECTIVES_SECRET", secret.to_owned())).into_iter().collect();
    ranks::spawn_rank(name, rank, 3, port, &variables)
}

/// Starts a rank with the secret, with or without encryption.
#[cfg(feature = "encryption")]
fn spawn_encrypting(name: &str, rank: usize, port: u16, encrypts: bool) -> Child {
    let variables = [("COLLECTIVES_SECRET", RIGHT.to_owned()), ("COLLECTIVES_ENCRYPT", u8::from(encrypts).to_string())];
    ranks::spawn_rank(name, rank, 3, port, &variables)
}

fn said(child: Child) -> String {
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&stderr).into_owned();
    assert!(status.success(), "{said}{}", String::from_utf8_lossy(&stdout));
    assert!(!said.contains(RIGHT) && !said.contains(WRONG), "a secret was told: {said}");
    said
}

#[test]
fn a_rank_with_another_secret_is_refused_and_the_job_waits_for_the_right_one() {
    const NAME: &str = "security::a_rank_with_another_secret_is_refused_and_the_job_waits_for_the_right_one";
    if ranks::is_rank_of(NAME) {
        return rank_at_a_url();
    }
    let port = ranks::free_port();
    let members: Vec<Child> = (0..2).map(|rank| spawn(NAME, rank, port, Some(RIGHT))).collect();
    for (other, words) in [(Some(WRONG), "it has a different secret than this process"), (None, "this process has no secret")] {
        let said = said(spawn(NAME, 2, port, other));
        assert!(said.contains("unauthorized true") && said.contains(words), "{said}");
    }
    let last = spawn(NAME, 2, port, Some(RIGHT));
    for member in members.into_iter().chain([last]) {
        let said = said(member);
        assert!(said.contains("RANK DONE"), "{said}");
    }
}

#[cfg(feature = "encryption")]
#[test]
fn ranks_that_encrypt_and_ranks_that_do_not_refuse_each_other_at_once() {
    const NAME: &str = "security::ranks_that_encrypt_and_ranks_that_do_not_refuse_each_other_at_once";
    if ranks::is_rank_of(NAME) {
        return rank_at_a_url();
    }
    for (encrypts, words) in [
        (true, "it encrypts its connections, and this process does not; set COLLECTIVES_ENCRYPT=1"),
        (false, "it does not encrypt its connections, and this process does; set COLLECTIVES_ENCRYPT=1"),
    ] {
        let port = ranks::free_port();
        let members: Vec<Child> = (0..2).map(|rank| spawn_encrypting(NAME, rank, port, encrypts)).collect();
        let refused = said(spawn_encrypting(NAME, 2, port, !encrypts));
        assert!(refused.contains("unauthorized true") && refused.contains(words) && refused.contains(&port.to_string()), "{refused}");
        let last = spawn_encrypting(NAME, 2, port, encrypts);
        for member in members.into_iter().chain([last]) {
            assert!(said(member).contains("RANK DONE"));
        }
    }
}

#[cfg(feature = "encryption")]
#[test]
fn ranks_that_meet_at_a_store_of_their_own_find_who_does_not_encrypt() {
    let store = MemoryStore::new();
    let join = |rank: usize| {
        let builder = Communicator::builder().configure(|config| {
            config.timeout = LONG;
            config.secret = Some(secret(RIGHT));
            config.encrypt = rank != 2;
        });
        builder.with_store(Arc::new(store.clone()), rank, 3).unwrap_err().to_string()
    };
    thread::scope(|scope| {
        let join = &join;
        let ranks: Vec<_> = (0..3).map(|rank| scope.spawn(move || join(rank))).collect();
        for rank in ranks {
            let error = rank.join().unwrap();
            assert!(error.contains("rank 2") && error.contains("COLLECTIVES_ENCRYPT"), "{error}");
        }
    });
}

#[test]
fn a_rank_with_a_secret_does_not_join_a_job_without() {
    const NAME: &str = "security::a_rank_with_a_secret_does_not_join_a_job_without";
    if ranks::is_rank_of(NAME) {
        return rank_at_a_url();
    }
    let port = ranks::free_port();
    let members: Vec<Child> = (0..2).map(|rank| spawn(NAME, rank, port, None)).collect();
    let refused = said(spawn(NAME, 2, port, Some(RIGHT)));
    assert!(refused.contains("unauthorized true") && refused.contains("it has no secret, and this process has one"), "{refused}");
    let last = spawn(NAME, 2, port, None);
    for member in members.into_iter().chain([last]) {
        assert!(said(member).contains("RANK DONE"));
    }
}

#[test]
fn ranks_that_meet_at_a_store_of_their_own_find_another_secret_too() {
    for secrets in [[Some(RIGHT), Some(RIGHT), Some(WRONG)], [Some(RIGHT), None, Some(RIGHT)]] {
        let store = MemoryStore::new();
        let join = |rank: usize| {
            let builder = Communicator::builder().configure(|config| {
                config.timeout = LONG;
                config.secret = secrets[rank].map(secret);
            });
            builder.with_store(Arc::new(store.clone()), rank, 3).unwrap_err()
        };
        thread::scope(|scope| {
            let ranks: Vec<_> = (0..3).map(|rank| scope.spawn(move || join(rank))).collect();
            for (rank, thread) in ranks.into_iter().enumerate() {
                let error = thread.join().unwrap();
                assert!(error.is_unauthorized(), "rank {rank}: {error}");
            }
        });
    }
}

/// Forwards bytes between one client and the server, and returns what the client sent.
fn recorder(server: &TcpStoreServer) -> (u16, thread::JoinHandle<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let address = server.local_addr();
    let recording = thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut server = TcpStream::connect(address).unwrap();
        let (mut answers, mut back) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        let answering = thread::spawn(move || std::io::copy(&mut answers, &mut back));
        let (mut record, mut bytes) = (Vec::new(), [0; 4096]);
        while let Ok(read @ 1..) = client.read(&mut bytes) {
            record.extend_from_slice(&bytes[..read]);
            server.write_all(&bytes[..read]).unwrap();
        }
        let _ = server.shutdown(Shutdown::Both);
        answering.join().unwrap().unwrap();
        record
    });
    (port, recording)
}

#[test]
fn a_recorded_client_cannot_be_played_again() {
    let server = TcpStoreServer::bind_with_secret("127.0.0.1:0", &secret(RIGHT)).unwrap();
    let (port, recording) = recorder(&server);
    let store = TcpStore::connect_with_secret("127.0.0.1", port, LONG, &secret(RIGHT)).unwrap();
    store.set("k", b"v").unwrap();
    assert_eq!(store.add("n", 1).unwrap(), 1);
    drop(store);
    let record = recording.join().unwrap();

    let mut again = TcpStream::connect(server.local_addr()).unwrap();
    again.set_read_timeout(Some(LONG)).unwrap();
    // Each part is sent when it is due: the opening, and the rest after the challenge.
    let mut reply = [0; 44];
    again.write_all(&record[..44]).unwrap();
    again.read_exact(&mut reply).unwrap();
    assert!(reply.starts_with(b"colproof\x01\x01"), "{}", reply.escape_ascii());
    again.write_all(&record[44..76]).unwrap();
    again.read_exact(&mut reply).unwrap();
    assert!(reply.starts_with(b"colproof\x01\x03\x03"), "{}", reply.escape_ascii());
    assert_eq!(again.read(&mut reply).unwrap(), 0, "the server hangs up");
    let store = TcpStore::connect_with_secret("127.0.0.1", server.local_addr().port(), LONG, &secret(RIGHT)).unwrap();
    assert_eq!(store.get("n", LONG).unwrap(), b"1");
}

/// Collects the warnings of one thread.
#[derive(Default, Clone)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Words(String);
        impl Visit for Words {
            fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
                write!(self.0, "{field}={value:?} ").unwrap();
            }
        }
        let mut words = Words(String::new());
        event.record(&mut words);
        self.0.lock().unwrap().push(words.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn a_store_that_anybody_can_reach_and_use_is_warned_of_once() {
    let warnings = Warnings::default();
    let warned = |start: &dyn Fn() -> Result<TcpStoreServer>| {
        tracing::subscriber::with_default(warnings.clone(), || drop(start().unwrap()));
        std::mem::take(&mut *warnings.0.lock().unwrap())
    };
    assert!(warned(&|| TcpStoreServer::bind("127.0.0.1:0")).is_empty());
    assert!(warned(&|| TcpStoreServer::bind_with_secret("0.0.0.0:0", &secret(RIGHT))).is_empty());
    let words = warned(&|| TcpStoreServer::bind("0.0.0.0:0"));
    assert!(words.len() == 1 && words[0].contains("COLLECTIVES_SECRET") && words[0].contains("0.0.0.0"), "{words:?}");
}
