//! Starts the ranks of a test: as threads of this process, or as processes that run the same test again.

use std::collections::HashSet;
use std::fs;
use std::net::SocketAddr;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use collectives::{Communicator, Config, Result, Transport};

pub use super::meeting::{Meeting, patience};
pub use super::ports::free_port;

/// The connections between the ranks of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wiring {
    /// All on one host, in shared memory.
    Shm,
    /// TCP only.
    Tcp,
    /// Hosts of up to two ranks, side by side: 0 1 | 2 3 | 4 …
    Pairs,
    /// Two hosts of unequal size. Every third rank is on the second: 0 1 3 4 | 2 5.
    Dealt,
    /// TCP only, all of it encrypted.
    #[cfg(feature = "encryption")]
    Encrypted,
}

impl Wiring {
    pub const ALL: [Wiring; 4] = [Wiring::Shm, Wiring::Tcp, Wiring::Pairs, Wiring::Dealt];

    /// Returns the communicator builder of one rank.
    pub fn builder(self, rank: usize) -> collectives::Builder {
        self.builder_with(rank, Config::default())
    }

    /// Does the same as [`Wiring::builder`], for a test whose threads make calls at the same time.
    pub fn builder_for_threads(self, rank: usize) -> collectives::Builder {
        let mut config = Config::default();
        config.check_threads = false;
        self.builder_with(rank, config)
    }

    /// Does the same as [`Wiring::builder`], in addition to the test's own settings.
    pub fn builder_with(self, rank: usize, mut config: Config) -> collectives::Builder {
        config.timeout = patience(60);
        match self {
            Wiring::Shm => config.transport = Transport::Shm,
            Wiring::Tcp => config.transport = Transport::Tcp,
            Wiring::Pairs => config.host_identity = Some(format!("pair {}", rank / 2)),
            Wiring::Dealt => config.host_identity = Some(if rank % 3 == 2 { "second" } else { "first" }.to_owned()),
            #[cfg(feature = "encryption")]
            Wiring::Encrypted => {
                config.transport = Transport::Tcp;
                config.secret = Some(collectives::Secret::new("the secret of an encrypted wiring").unwrap());
                config.encrypt = true;
            }
        }
        Communicator::builder().config(config)
    }
}

/// Runs `program` on `world_size` threads, each a rank of one job. Returns their results in rank order.
pub fn threads<R: Send>(wiring: Wiring, world_size: usize, program: impl Fn(&Communicator) -> R + Sync) -> Vec<R> {
    threads_with(world_size, |rank| wiring.builder(rank), program)
}

/// Does the same as [`threads`], with a builder for each rank.
pub fn threads_with<R: Send>(
    world_size: usize,
    builder: impl Fn(usize) -> collectives::Builder + Sync,
    program: impl Fn(&Communicator) -> R + Sync,
) -> Vec<R> {
    each(communicators_with(world_size, builder), |comm| program(&comm))
}

/// Returns the communicators of one job in rank order, for tests that move or drop them. All are complete: a rank that
/// fails at once cannot disturb one that is still joining.
pub fn communicators(wiring: Wiring, world_size: usize) -> Vec<Communicator> {
    communicators_with(world_size, |rank| wiring.builder(rank))
}

/// Does the same as [`communicators`], with a builder for each rank.
pub fn communicators_with(world_size: usize, builder: impl Fn(usize) -> collectives::Builder + Sync) -> Vec<Communicator> {
    let store = collectives::store::MemoryStore::new();
    let join = |rank: usize| builder(rank).with_store(std::sync::Arc::new(store.clone()), rank, world_size).unwrap();
    std::thread::scope(|scope| {
        let join = &join;
        let ranks: Vec<_> = (0..world_size).map(|rank| scope.spawn(move || join(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// Runs `program` on one thread for each communicator. Returns the results in rank order.
pub fn each<R: Send>(communicators: Vec<Communicator>, program: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let program = &program;
        let ranks: Vec<_> = communicators.into_iter().map(|comm| scope.spawn(move || program(comm))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// The variable that marks a process as a rank of the test it names.
const CHILD: &str = "COLLECTIVES_TEST_CHILD";

/// Whether this process is a rank of the test `name`.
pub fn is_rank_of(name: &str) -> bool {
    std::env::var(CHILD).as_deref() == Ok(name)
}

/// Starts a process that runs the test `name` of this binary as one rank, with `variables` in addition to the usual
/// ones.
pub fn spawn_rank(name: &str, rank: usize, world_size: usize, port: u16, variables: &[(&str, String)]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(CHILD, name);
    let variables = variables.iter().map(|(name, value)| (*name, value.as_str()));
    as_rank(&mut command, rank, world_size, port).envs(variables).spawn().unwrap()
}

/// Makes a command one rank of a job on this host. Rank 0 serves the store at `port`.
pub fn as_rank(command: &mut Command, rank: usize, world_size: usize, port: u16) -> &mut Command {
    command
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", world_size.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .env("COLLECTIVES_TIMEOUT", patience(120).as_secs().to_string())
        .env_remove("LOCAL_RANK")
        .env_remove("TORCHELASTIC_USE_AGENT_STORE")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
}

/// Runs a program as every rank of a job. Returns their outputs in rank order.
pub fn run_ranks(world_size: usize, command: impl Fn() -> Command) -> Vec<Output> {
    let port = free_port();
    let ranks: Vec<Child> = (0..world_size).map(|rank| as_rank(&mut command(), rank, world_size, port).spawn().unwrap()).collect();
    ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect()
}

/// Runs `program` in `world_size` processes, each a rank, and checks that all succeed. `name` is the full name of the
/// calling test.
pub fn processes(name: &str, wiring: Wiring, world_size: usize, program: impl Fn(&Communicator) -> Result<()>) {
    processes_with(name, world_size, |rank| wiring.builder(rank), program);
}

/// Does the same as [`processes`], with a builder for each rank.
pub fn processes_with(
    name: &str,
    world_size: usize,
    builder: impl Fn(usize) -> collectives::Builder,
    program: impl Fn(&Communicator) -> Result<()>,
) {
    if is_rank_of(name) {
        let rank = std::env::var("RANK").unwrap().parse().unwrap();
        let comm = builder(rank).from_env().unwrap();
        program(&comm).unwrap();
        comm.close().unwrap();
        return;
    }
    if std::env::var(CHILD).is_ok() {
        return;
    }
    let port = free_port();
    let ranks: Vec<Child> = (0..world_size).map(|rank| spawn_rank(name, rank, world_size, port, &[])).collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "rank {rank} of {name}: {}\n{out}\n{err}", output.status);
    }
}

/// Runs `program` in a separate process, which runs the same test again. `name` is the test's full name.
pub fn alone_in_a_process(name: &str, program: impl FnOnce()) {
    alone_in(|| Command::new(std::env::current_exe().unwrap()), name, program);
}

/// Does the same as [`alone_in_a_process`], in a pid namespace of its own, so that no other process uses its numbers.
/// If namespaces are not allowed, the numbers are the machine's.
pub fn alone_with_numbers(name: &str, program: impl FnOnce()) {
    const NUMBERS: [&str; 4] = ["--user", "--map-root-user", "--pid", "--fork"];
    let own_numbers = || {
        let mut command = Command::new("unshare");
        command.args(NUMBERS);
        command
    };
    let is_allowed = || own_numbers().arg("true").output().is_ok_and(|output| output.status.success());
    let command = || {
        let program = std::env::current_exe().unwrap();
        let mut command = if is_allowed() { own_numbers() } else { return Command::new(program) };
        command.arg(program);
        command
    };
    alone_in(command, name, program);
}

fn alone_in(command: impl FnOnce() -> Command, name: &str, program: impl FnOnce()) {
    const INSIDE: &str = "COLLECTIVES_TEST_INSIDE";
    if std::env::var(INSIDE).as_deref() == Ok(name) {
        return program();
    }
    let output = command()
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(INSIDE, name)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name}: {}\n{out}\n{err}", output.status);
}

/// Returns the addresses on which this process listens.
pub fn listening() -> HashSet<SocketAddr> {
    let links = fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    let sockets: HashSet<String> =
        links.filter_map(|link| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())).collect();
    let table = fs::read_to_string("/proc/self/net/tcp").unwrap();
    let address = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let port = u16::from_str_radix(fields[1].split_once(':')?.1, 16).ok()?;
        (fields[3] == "0A" && sockets.contains(fields[9])).then(|| SocketAddr::from(([127, 0, 0, 1], port)))
    };
    table.lines().skip(1).filter_map(address).collect()
}
