//! The ranks that foreign launchers start: this test binary itself.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use collectives::{
    Communicator, ReduceOp,
    store::{PrefixStore, Store, TcpStore},
};

use crate::peer::LONG;

/// The variable that names what a rank does.
const PROGRAM: &str = "COLLECTIVES_INTEROP_RANK";

/// Returns the command line of a rank.
pub(crate) fn command() -> [String; 5] {
    let program: PathBuf = std::env::current_exe().unwrap();
    [program.to_str().unwrap(), "rank::program", "--exact", "--nocapture", "--test-threads=1"].map(str::to_owned)
}

/// Returns the variable that makes the process a rank.
pub(crate) fn variable(what: &str) -> (&'static str, String) {
    (PROGRAM, what.to_owned())
}

#[test]
fn program() {
    match std::env::var(PROGRAM).as_deref() {
        Ok("sums") => sums(),
        Ok("hangs") => hangs(),
        Ok("dies once") => dies_once(),
        Ok("mixed") => mixed(),
        _ => {}
    }
}

fn variable_of(name: &str) -> Option<usize> {
    std::env::var(name).ok()?.parse().ok()
}

/// Checks that each rank's number reaches all ranks.
fn sum(comm: &Communicator) {
    let (me, n) = (comm.rank() as u64, comm.world_size() as u64);
    let mut sums = [me + 1, 1 << me];
    comm.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
    assert_eq!(sums, [n * (n + 1) / 2, (1 << n) - 1]);
}

/// Prints the rank on a line of its own, even if other ranks print at the same time.
fn say(comm: &Communicator, what: &str) {
    println!("\nrank {} of {} {what}", comm.rank(), comm.world_size());
}

fn sums() {
    let comm = Communicator::from_env().unwrap();
    sum(&comm);
    say(&comm, "is right");
    comm.close().unwrap();
}

/// Lets the last rank not come to a call, until the launcher ends the job.
fn hangs() {
    let comm = Communicator::builder().configure(|config| config.timeout = LONG).from_env().unwrap();
    sum(&comm);
    if comm.rank() == comm.world_size() - 1 {
        say(&comm, "is late");
        std::thread::park_timeout(LONG);
    }
    drop(comm.all_reduce(&mut [1_u8], ReduceOp::Max));
}

/// Lets one rank die in the first life of an elastic job, after all ranks have connected.
fn dies_once() {
    let life = variable_of("TORCHELASTIC_RESTART_COUNT").unwrap();
    let comm = Communicator::builder().configure(|config| config.timeout = LONG).from_env().unwrap();
    sum(&comm);
    if life == 0 && comm.rank() == 2 {
        std::process::abort();
    }
    if life == 0 {
        let mut never = [0_u8];
        let error = comm.all_reduce(&mut never, ReduceOp::Max).unwrap_err();
        assert!(error.is_peer_lost(), "{error}");
        std::process::exit(3);
    }
    sum(&comm);
    say(&comm, &format!("is right in life {life}"));
    comm.close().unwrap();
}

/// Runs odd ranks in Rust and even ranks in Python. Each publishes a key that all others read. The Rust ranks form a
/// communicator.
fn mixed() {
    let [rank, n] = ["RANK", "WORLD_SIZE"].map(|name| variable_of(name).unwrap());
    let port = variable_of("MASTER_PORT").and_then(|port| u16::try_from(port).ok()).unwrap();
    let store = TcpStore::connect(&std::env::var("MASTER_ADDR").unwrap(), port, LONG).unwrap();
    store.set(&format!("mixed/{rank}"), format!("rust {rank}").as_bytes()).unwrap();
    for other in 0..n {
        let expected = format!("{} {other}", if other % 2 == 0 { "python" } else { "rust" });
        assert_eq!(store.get(&format!("mixed/{other}"), LONG).unwrap(), expected.as_bytes());
    }
    let own: Arc<dyn Store> = Arc::new(PrefixStore::new("rust", Arc::clone(&store) as Arc<dyn Store>));
    let comm = Communicator::builder().configure(|config| config.timeout = LONG).with_store(own, rank / 2, n / 2).unwrap();
    sum(&comm);
    comm.close().unwrap();
    store.add("mixed/done", 1).unwrap();
    store.barrier("mixed/end", n, LONG).unwrap();
    assert_eq!(store.get("mixed/done", Duration::ZERO).unwrap(), n.to_string().as_bytes());
    println!("\nrank {rank} has met the others");
}
