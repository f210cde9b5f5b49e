//! The settings of a communicator, and the only place where the environment is read.

#[cfg(feature = "cuda")]
pub(crate) mod device_environment;
mod interfaces;
#[cfg(feature = "cuda")]
pub(crate) mod nccl;
mod port_range;
mod variable_names;

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::sync::OnceLock;
use std::time::Duration;

use crate::authentication::Secret;
use crate::base::tuning::net::SILENCE_TIMEOUT;
use crate::call::algorithm::AlgorithmRanges;
#[cfg(feature = "cuda")]
use crate::config::nccl::{CheckDeviceCalls, NcclConfig, NcclLibrary};
use crate::error::{Error, Result};
use crate::observe::Observer;

pub use interfaces::Interfaces;
pub use port_range::PortRange;

/// The links that the host backend may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Transport {
    /// Shared memory inside a host, TCP between hosts.
    #[default]
    Auto,
    /// Shared memory only. A job with ranks on several hosts is refused.
    Shm,
    /// TCP only, even inside a host.
    Tcp,
}

impl Transport {
    /// Every choice.
    pub const ALL: [Transport; 3] = [Transport::Auto, Transport::Shm, Transport::Tcp];

    /// Returns the name used in `COLLECTIVES_TRANSPORT`, in error texts and on command lines: `auto`, `shm`, `tcp`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Transport::Auto => "auto",
            Transport::Shm => "shm",
            Transport::Tcp => "tcp",
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How a rank waits for other ranks in calls on host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Waiting {
    /// Polls for as long as most waits take, and then sleeps. If other threads need the same cores, polls only for
    /// about as long as a wake-up takes.
    #[default]
    Auto,
    /// Never sleeps. Meant for ranks that each have a core to themselves and must notice the end of a wait immediately.
    Spin,
    /// Sleeps immediately. Meant for ranks that wait for a long time, or that share their cores with more important
    /// programs.
    Sleep,
}

impl Waiting {
    /// Every choice.
    pub const ALL: [Waiting; 3] = [Waiting::Auto, Waiting::Spin, Waiting::Sleep];

    /// Returns the name used in `COLLECTIVES_WAITING` and in error texts: `auto`, `spin`, `sleep`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Waiting::Auto => "auto",
            Waiting::Spin => "spin",
            Waiting::Sleep => "sleep",
        }
    }
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Settings of a communicator.
///
/// Look at four settings first: `timeout`, `transport`, `secret` and `flight_recorder_dir`.
///
/// When a communicator is made, each field that still has its default value is read from its environment variable. The
/// field's documentation names the variable, if there is one. A field that the program sets to the default value is
/// read from the variable too. So `COLLECTIVES_REPRODUCIBLE=1` always switches `reproducible` on, and
/// `COLLECTIVES_ENCRYPT=1` always switches `encrypt` on. `COLLECTIVES_CHECK_DEVICE_CALLS=1` takes effect even if the
/// program asks to compare fewer calls.
///
/// ```
/// # use collectives::{Communicator, Config, Transport};
/// # use std::time::Duration;
/// let mut config = Config::default();
/// config.timeout = Duration::from_secs(60);
/// config.transport = Transport::Tcp;
/// // `Builder::configure` changes them in a chain, without a `Config` of your own.
/// let timeouts = Communicator::builder().config(config).run_local(2, |comm| Ok(comm.config().timeout))?;
/// assert_eq!(timeouts, [Duration::from_secs(60); 2]);
/// # Ok::<(), collectives::Error>(())
/// ```
///
/// **Use the same settings on every rank.** Only the following settings may differ: `timeout`, `waiting`,
/// `check_threads`, `flight_recorder_calls`, `flight_recorder_dir`, `stall_warning`, `status_socket`, `observer`,
/// `trace`, `trace_dir`, `metrics_dir`, `metrics_address`, `device_scratch_bytes`, `listen_address`, `interfaces`,
/// `port_range` and `host_identity`.
///
/// When the ranks start, they compare `transport`, `reproducible`, `algorithms`, `connections`, `encrypt` and
/// `check_device_calls`. The start fails with [`Conflict`](Error::Conflict) if these settings differ, and with
/// [`Unauthorized`](Error::Unauthorized) if the secrets differ. But if the store is served over TCP, a rank whose
/// `encrypt` differs from the server's gets `Unauthorized`, because the server refuses the rank's connection before the
/// ranks compare anything.
///
/// The remaining settings must also be the same, but the ranks do not compare them. A difference has these effects:
///
/// - `silence_timeout`: each rank uses its own value, so some ranks notice a silent host sooner than others.
/// - `object_limit_bytes`: an object collective can fail on one rank while the other ranks wait for it.
/// - `keep_store`: the method [`store`](crate::Communicator::store) fails on the ranks that do not set `keep_store`. If
///   rank 0 serves the store and does not set `keep_store`, the store is gone for all ranks.
/// - `nccl`: NCCL needs the same settings on all ranks, but no check compares them.
/// - `nccl_library`: ranks may load different files, but if these contain different versions of NCCL, no rank gets a
///   device backend.
///
/// # What a rank costs
///
/// The `n` ranks of a host share one region of memory. In this region, each rank has six *slots*, through which it
/// passes the data of collectives to the other ranks. Each rank also has two *queues* for every rank of the host,
/// including itself: one for messages, and one for collectives that involve other hosts too. The size of the region is
/// `6 n · slot + 2 n² · (queue + 256 B)` plus at most `9 KiB · n + 8 KiB`:
///
/// | ranks of the host | slot | queue | region |
/// | --- | --- | --- | --- |
/// | 2 | 1 MiB | 4 MiB | 44 MiB |
/// | up to 4 | 1 MiB | 1 MiB | 4 ranks: 56 MiB |
/// | up to 8 | 512 KiB | 256 KiB | 8 ranks: 56 MiB |
/// | up to 16 | 256 KiB | 64 KiB | 16 ranks: 56 MiB |
/// | up to 32 | 128 KiB | 16 KiB | 32 ranks: 57 MiB |
/// | up to 1024 | 64 KiB | 4 KiB | 64 ranks: 59 MiB |
///
/// The region is address space, which takes up no memory before it is used. Only these parts of it take up memory:
/// - about 4.5 KiB per rank at the start,
/// - the parts of a rank's six slots that its calls fill,
/// - the queues between ranks that send each other messages.
///
/// Each rank of a job listens on one port, and serves requests there only after a call of
/// [`shrink`](crate::Communicator::shrink), [`admit`](crate::Communicator::admit) or
/// [`join_address`](crate::Communicator::join_address). With `Tcp`, or if the job has several hosts, each rank also
/// listens on a second port. At the start of a job on h hosts, one rank of each host opens about log₂ h connections,
/// and accepts as many. With `Tcp`, every rank of a job of n ranks opens about log₂ n connections, and accepts as many.
/// Other connections are opened when they are first needed. For each different call over TCP, a communicator prepares a
/// plan of the transfers. It keeps the latest 32 plans, which take at most 1 MiB in total. At the start of a job, each
/// rank sends about 22 requests to the store.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// The longest time that a call may take. Some waits have other limits, for example those in `shrink`: see *How
    /// long each wait is for a silent host* in `docs/src/failures.md`. Default: 30 minutes, as for Gloo in
    /// `torch.distributed`. Variable: `COLLECTIVES_TIMEOUT` (seconds).
    pub timeout: Duration,
    /// How long the host of a peer may take to acknowledge data that was sent over TCP. After this time, the peer
    /// counts as lost. Zero turns the limit off: a wait for a silent host then ends after `timeout`, or when Linux
    /// itself gives up the connection (`net.ipv4.tcp_retries2`, about 15 minutes). If a process ends while its host
    /// still answers, the peers usually notice this within a second: see *Going on without the dead* in
    /// `docs/src/failures.md`. The time is counted in whole seconds. On an idle connection, it is at least 2 seconds.
    /// Default: 60 seconds, which is longer than the failover of a switch or the migration of a virtual machine takes.
    /// Variable: `COLLECTIVES_SILENCE_TIMEOUT` (seconds, `0` for no limit).
    pub silence_timeout: Duration,
    /// The links to use. Default: `Auto`. Variable: `COLLECTIVES_TRANSPORT` (`auto`, `shm` or `tcp`).
    pub transport: Transport,
    /// How this rank waits for other ranks in calls on host memory. Ranks may have different settings. If there are
    /// more ranks than cores, a rank that never sleeps gives up its core between two polls. Default: `Auto`. Variable:
    /// `COLLECTIVES_WAITING` (`auto`, `spin` or `sleep`).
    pub waiting: Waiting,
    /// Reduces only in rank order, so that the result has the same bits for every transport, algorithm and number of
    /// hosts. Default: off. Variable: `COLLECTIVES_REPRODUCIBLE` (`0` or `1`).
    ///
    /// Costs bandwidth if several hosts have several ranks each: `all_reduce` and `reduce` then send the inputs of all
    /// ranks between the hosts, instead of one partial result of each host. If all ranks communicate over TCP, or if
    /// each host has only one rank, every reduction uses the algorithm `direct`. This algorithm moves as many bytes as
    /// a ring. For small vectors, `direct` needs more messages than `doubling`. In shared memory on one host,
    /// `reproducible` costs nothing.
    pub reproducible: bool,
    /// The host identity: ranks with equal values count as ranks of one host. If this is `None` (the default), a host
    /// is identified by its boot id, and by the network namespace, the user namespace and the user id of the process.
    /// To try a job of several hosts on one machine, set different values on the ranks. If ranks with equal values
    /// cannot share memory, they use TCP. Variable: `COLLECTIVES_HOST_IDENTITY`.
    pub host_identity: Option<String>,
    /// Algorithms for ranges of sizes, instead of the automatic choice. `"doubling:0-16K,ring:16K-".parse()?` makes
    /// such ranges from text. The automatic choice still applies to sizes that no range covers, to collectives that do
    /// not have the algorithm, and to ops that do not allow it. Calls in shared memory inside a host are not affected,
    /// because they have no choice of algorithm. Default: none. Variable: `COLLECTIVES_ALGORITHM`.
    pub algorithms: AlgorithmRanges,
    /// The limit on the size of objects, in bytes. An object collective fails with
    /// [`InvalidArgument`](Error::InvalidArgument) if all its objects together exceed the limit. A receive fails with
    /// [`Message`](Error::Message) if its object exceeds the limit. Default: 256 MiB.
    pub object_limit_bytes: usize,
    /// Keeps the store at which the ranks met, for [`Communicator::store`](crate::Communicator::store). If rank 0
    /// serves the store, it needs a thread, a listener and a port for the store as long as its communicators live. The
    /// other ranks need nothing until they use the store. All ranks must have the same setting. Default: off, so rank 0
    /// stops serving the store once every rank has joined.
    pub keep_store: bool,
    /// Whether a collective is refused while another thread of this rank is in a collective on the same communicator.
    /// Two such calls have no fixed order, so each can get the results of the other, and no other check detects this
    /// mistake. The refused call returns [`Unordered`](Error::Unordered), and the communicator ends. Give each thread
    /// its own [lane](crate::Communicator::lane), or order the calls.
    ///
    /// Only blocking calls are checked. Switch the check off if the program itself orders the calls of its threads, but
    /// lets a call begin before the previous one has returned. Cost: an atomic operation for each call. Default: on if
    /// this crate is built with `debug_assertions` (as in `cargo build` without `--release`), otherwise off. Variable:
    /// `COLLECTIVES_CHECK_THREADS` (`0`, `1`).
    pub check_threads: bool,
    /// The address on which this rank listens for peers of other hosts. If this is `None` (the default), the rank
    /// listens on the address from which it reaches rank 0's store. If there is no such address (for a store in a file,
    /// or your own store), the rank listens on the loopback interface. Variable: `COLLECTIVES_LISTEN_ADDRESS`.
    pub listen_address: Option<std::net::IpAddr>,
    /// The network interfaces on which this rank may listen for peers of other hosts. The rank chooses an interface
    /// that is up, by the first name in the list that fits. Of the addresses there, it prefers the address from which
    /// it reaches rank 0's store. If the list only excludes names, the loopback interface comes last. The start fails
    /// with [`Config`](Error::Config) if no interface fits, or if `listen_address` is not an address of one that fits.
    /// Default: `None`, so all interfaces. Variable: `COLLECTIVES_SOCKET_IFNAME`, in the syntax of
    /// `NCCL_SOCKET_IFNAME`: see [`Interfaces`].
    pub interfaces: Option<Interfaces>,
    /// The ports on which this rank may listen. A rank needs one port for the job, and one more for each of its
    /// communicators that uses TCP. Ranks of one host can share a range. If no port of the range is free, the start
    /// fails with [`Config`](Error::Config). The port of the store and the port of `metrics_address` are settings of
    /// their own. Choose a range outside `net.ipv4.ip_local_port_range`: in that range, Linux may give the ports to
    /// other connections. Default: `None`, so Linux chooses. Variable: `COLLECTIVES_PORT_RANGE` (`LOW:HIGH`).
    pub port_range: Option<PortRange>,
    /// The number of TCP connections to each peer that carry the data of collectives, from 1 to 16. If there are
    /// several, the data takes turns on them in stripes of 128 KiB. This helps if one connection does not fill the
    /// network, because packets are lost, or because the network limits each connection. Each further connection costs
    /// one file descriptor for each peer. Messages, and links that are encrypted, use one connection. All ranks must
    /// have the same number. Default: 1. Variable: `COLLECTIVES_CONNECTIONS`.
    pub connections: usize,
    /// The number of calls of each kind (collectives, messages, device calls) that the flight recorder keeps, rounded
    /// up to a power of two. With 0, the flight recorder is off. Default: 1024. Variable:
    /// `COLLECTIVES_FLIGHT_RECORDER`.
    ///
    /// Costs 64 B of memory for each call that is kept. Recording takes 1 % of the time of an all-reduce of 8 B in
    /// shared memory (2 ranks, 2 virtual CPUs, AMD EPYC; `benches/record/overhead.md`).
    pub flight_recorder_calls: usize,
    /// The folder to which the flight recorder's records are written when a call fails because of a peer: after a
    /// timeout, a lost peer, a mismatch or an abort. `collperf --explain-hang FOLDER` reads the files of all ranks.
    /// Default: `None`, so no file is written. Variable: `COLLECTIVES_FLIGHT_RECORDER_DIR`.
    pub flight_recorder_dir: Option<PathBuf>,
    /// How long a call may wait for its peers before a warning reports the call and the missing ranks. A call that
    /// still waits is reported again once a minute. The warning goes to `tracing`, or to standard error if the program
    /// has no subscriber. If a call's timeout is less than twice this time, the warning comes at half the timeout, and
    /// only to `tracing`. Zero turns the warnings off. Default: 30 seconds. Variable: `COLLECTIVES_STALL_WARNING`
    /// (seconds, `0` for never).
    pub stall_warning: Duration,
    /// Whether the process answers `collperf ps`, which shows the calls of running jobs. The first communicator of a
    /// process opens a Unix socket and starts a thread, which sleeps until a program asks. Only programs of the same
    /// user, or of root, get an answer. If the flight recorder is off, there is no answer. If the system refuses the
    /// socket or the thread, the communicator works, but `collperf ps` does not show it. Default: on. Variable:
    /// `COLLECTIVES_STATUS_SOCKET` (`0` or `1`).
    pub status_socket: bool,
    /// Receives the figures of every call when the call has ended; see [`observe`](crate::observe). Communicators made
    /// from this communicator also report to this observer. Default: `None`.
    ///
    /// Costs each call 0.15 µs plus the observer's own time. An all-reduce of 8 B in shared memory takes 157 ns without
    /// an observer, and almost twice as long with an observer (2 ranks, 2 virtual CPUs, AMD EPYC;
    /// `benches/record/overhead.md`).
    pub observer: Option<Arc<dyn Observer>>,
    /// Keeps the times of the last 131,072 calls of this communicator and of the communicators made from it, for
    /// [`write_trace`](crate::Communicator::write_trace). Default: off.
    ///
    /// Costs up to 30 MiB of memory in total. Costs each call 0.2 µs, because the call takes a lock and writes a
    /// record. An all-reduce of 8 B in shared memory takes 157 ns without the trace, and 2.4 times as long with the
    /// trace (2 ranks, 2 virtual CPUs, AMD EPYC; `benches/record/overhead.md`).
    pub trace: bool,
    /// The folder in which a file `trace-ID-rankR.json` with the times of calls is written; see
    /// [`observe`](crate::observe). The file is written when the communicator, and all communicators made from it, have
    /// been dropped. No file is written if the process crashes or calls `exit` before that. A folder also switches
    /// `trace` on. Default: `None`. Variable: `COLLECTIVES_TRACE`.
    pub trace_dir: Option<PathBuf>,
    /// The folder in which each process keeps a file `collectives-HOST-PID.prom` with live metrics. The metrics are
    /// calls, bytes and seconds by communicator, backend and kind; the number of errors; and how long the oldest call
    /// has waited. The file is OpenMetrics text. It is written about every five seconds, and once more when the last
    /// communicator ends. It is not removed at the end of the process. Costs each call as much as an `observer` does.
    /// Default: `None`. Variable: `COLLECTIVES_METRICS` (a folder).
    pub metrics_dir: Option<PathBuf>,
    /// The address at which the first process of each host serves the same metrics over HTTP (`GET /metrics`). The other
    /// processes of the host add the index of their first rank among the host's ranks to the port. If that port is in
    /// use, a process takes another port of its host's ranks; if all are in use, it logs a warning and serves none.
    ///
    /// Even if the job has a secret, any program that reaches the port can read the metrics: the names of communicators,
    /// and the kinds, numbers, sizes and times of calls, but no data. Costs each call as much as an `observer` does, and
    /// one thread of the process. Default: `None`. Variable: `COLLECTIVES_METRICS` (`tcp://127.0.0.1:9400`; the host must
    /// be an IP address, and `0.0.0.0` means all interfaces).
    pub metrics_address: Option<SocketAddr>,
    /// The secret of the job. Every rank and the server of the store must have the same secret; otherwise, they refuse
    /// each other's connections. Default: `None`, so any process that reaches a rank or the store can connect.
    /// Variables: `COLLECTIVES_SECRET`, or `COLLECTIVES_SECRET_FILE` (see [`Secret::from_file`]).
    pub secret: Option<Secret>,
    /// Encrypts all TCP connections between ranks and to the store. An attacker on the network cannot read the data,
    /// and cannot change it without being noticed (`SECURITY.md` lists the remaining risks). NCCL then encrypts its own
    /// TCP connections too. If the loaded NCCL cannot do so, there is no device backend. Shared memory inside a host is
    /// not encrypted. Needs a secret, and the crate's feature `encryption`.
    ///
    /// All ranks and the server of their store must have the same `encrypt`. If a rank's value differs from the
    /// server's, the server refuses the rank's connection, and the rank gets [`Unauthorized`](Error::Unauthorized). If
    /// the values of two ranks differ and no server refuses them, for example because the store is a file, the start
    /// fails with [`Conflict`](Error::Conflict). Default: off. Variable: `COLLECTIVES_ENCRYPT` (`0` or `1`).
    pub encrypt: bool,
    /// NCCL's own settings for the communicator. Default: none, so NCCL decides. Device support is experimental: no
    /// real GPU has run it.
    #[cfg(feature = "cuda")]
    pub nccl: NcclConfig,
    /// The NCCL library to load. The program promises that this file is an NCCL library. If this is `None` (the
    /// default), the communicator uses the NCCL library that the process has already loaded. If the process has loaded
    /// none, the system's loader looks for `libnccl.so.2`. The first communicator with a device determines the library
    /// for the whole process. Variable: `COLLECTIVES_NCCL_LIBRARY` (a file).
    #[cfg(feature = "cuda")]
    pub nccl_library: Option<NcclLibrary>,
    /// The maximum device memory, in bytes, that a communicator uses as scratch memory. Two kinds of calls need scratch
    /// memory: reductions with an op that NCCL lacks, and in-place `all_to_all`. The communicator allocates 8 MiB at
    /// the start. The first such call on more than about 16 MiB needs more than these 8 MiB, and the communicator then
    /// allocates the maximum. So make one such call before you capture calls of these kinds into a graph. A call that
    /// needs more than the maximum works in several steps. If the ranks have different maximums, all ranks use the
    /// smallest. Default: 256 MiB. Scratch memory was tested only on a simulated GPU.
    #[cfg(feature = "cuda")]
    pub device_scratch_bytes: usize,
    /// Which device calls the ranks compare over the host backend before they queue them. All ranks compare a
    /// collective. The two ends of a message compare the message. Default: all calls are compared. Variable:
    /// `COLLECTIVES_CHECK_DEVICE_CALLS` (`1` for all calls, even if the program asks to compare fewer). All ranks must
    /// have the same setting. No real GPU has run device calls.
    ///
    /// NCCL itself compares nothing: on a mismatch, NCCL hangs, moves wrong bytes, or writes past the end of a buffer.
    /// With [`CheckDeviceCalls::unchecked_after`], the ranks compare fewer calls, and you promise that all other calls
    /// match.
    ///
    /// **What is compared.** Of each call, the ranks compare the kind, op (a custom op by its name), element type,
    /// count, root and lists of counts. Of a group, they compare each call. If anything differs, the ranks get a
    /// `Mismatch` before the call is queued, and the communicator stays usable. There are two exceptions: messages, and
    /// groups of several communicators ([`Communicator::group_across`](crate::Communicator::group_across)). A mismatch
    /// in these ends the communicators involved, because other ranks already know of the calls when a rank finds the
    /// mismatch.
    ///
    /// **Cost.** A compared collective returns only after every rank has called it. The comparison of a collective costs
    /// as much time as an `all_gather_into` of 40 B on the host. A compared receive returns only when its sender has
    /// made the send. The comparison of a message costs one message of 24 B on the host. A compared send returns
    /// immediately, unless many earlier sends are still waiting for their receives.
    ///
    /// **Order.** A communicator's device calls and its collectives on host memory have one common order. All ranks
    /// must make these calls in the same order. A device call waits for the other ranks, as a collective on host memory
    /// does. Suppose that rank 0 makes a device call and then sends a message, but rank 1 receives this message before
    /// it makes its device call. Then the two ranks wait for each other. A thread that drives several ranks must make
    /// the collectives of these ranks in `group_across`.
    ///
    /// **Graphs.** If one rank captures a call into a graph, all ranks must capture it. The calls are compared during
    /// the capture. Launches of the graph are not compared: the program must make sure that all ranks launch the same
    /// graphs in the same order.
    ///
    /// **Without a host backend.** The typed calls of an [`NcclCommunicator`](crate::nccl::NcclCommunicator) are
    /// compared over NCCL. For each compared call, every rank sends 64 B, and the calling thread waits for the
    /// comparison. If the two ends of a message on an `NcclCommunicator` differ, both ends get a `Mismatch`. A compared
    /// call of an `NcclCommunicator` cannot be captured into a graph.
    #[cfg(feature = "cuda")]
    pub check_device_calls: CheckDeviceCalls,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30 * 60),
            silence_timeout: SILENCE_TIMEOUT,
            transport: Transport::Auto,
            waiting: Waiting::Auto,
            reproducible: false,
            host_identity: None,
            algorithms: AlgorithmRanges::new(),
            object_limit_bytes: 256 << 20,
            keep_store: false,
            check_threads: cfg!(debug_assertions),
            listen_address: None,
            interfaces: None,
            port_range: None,
            connections: 1,
            flight_recorder_calls: 1024,
            flight_recorder_dir: None,
            stall_warning: Duration::from_secs(30),
            status_socket: true,
            observer: None,
            trace: false,
            trace_dir: None,
            metrics_dir: None,
            metrics_address: None,
            secret: None,
            encrypt: false,
            #[cfg(feature = "cuda")]
            nccl: NcclConfig::default(),
            #[cfg(feature = "cuda")]
            nccl_library: None,
            #[cfg(feature = "cuda")]
            device_scratch_bytes: 256 << 20,
            #[cfg(feature = "cuda")]
            check_device_calls: CheckDeviceCalls::default(),
        }
    }
}

impl Config {
    /// Fills in settings left at their default from the variables named above.
    pub(crate) fn with_environment(self) -> Result<Self> {
        variable_names::check(std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned()))?;
        self.with_variables(&environment)
    }

    /// Does the same as [`Config::with_environment`], with the variables that `read` returns.
    pub(crate) fn with_variables(mut self, read: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let default = Self::default();
        if let Some(ranges) = read("COLLECTIVES_ALGORITHM").filter(|_| self.algorithms.is_empty()) {
            self.algorithms = ranges.parse().map_err(|error| of_variable("COLLECTIVES_ALGORITHM", &ranges, error))?;
        }
        self.host_identity = self.host_identity.or_else(|| read("COLLECTIVES_HOST_IDENTITY"));
        if let Some(address) = read("COLLECTIVES_LISTEN_ADDRESS").filter(|_| self.listen_address.is_none()) {
            // The interface after `%` is looked up instead: the address belongs to this host.
            let ip = address.split_once('%').map_or(&*address, |(ip, _)| ip);
            self.listen_address = Some(ip.parse().map_err(|_| wrong("COLLECTIVES_LISTEN_ADDRESS", &address, "an IP address"))?);
        }
        self.interfaces = self.interfaces.map_or_else(|| parsed(read, "COLLECTIVES_SOCKET_IFNAME"), |given| Ok(Some(given)))?;
        self.port_range = self.port_range.map_or_else(|| parsed(read, "COLLECTIVES_PORT_RANGE"), |given| Ok(Some(given)))?;
        if let Some(connections) = read("COLLECTIVES_CONNECTIONS").filter(|_| self.connections == default.connections) {
            let expected = "the number of TCP connections to each peer, from 1 to 16";
            self.connections = connections.parse().map_err(|_| wrong("COLLECTIVES_CONNECTIONS", &connections, expected))?;
        }
        if !(1..=Self::MAX_CONNECTIONS).contains(&self.connections) {
            let what = format!("COLLECTIVES_CONNECTIONS={} (or Config::connections)", self.connections);
            return Err(Error::config(what, "expected 1 to 16 TCP connections to each peer"));
        }
        if self.secret.is_none() {
            self.secret = secret(read)?;
        }
        self.encrypt |= switch(read, ENCRYPT)?;
        self.encrypt |= self.secret.as_ref().is_some_and(Secret::encrypts);
        if self.encrypt {
            let reason = "there is no secret to encrypt with; set COLLECTIVES_SECRET (or Config::secret), the same on every rank";
            let secret = self.secret.ok_or_else(|| Error::config(format!("{ENCRYPT}=1 (or Config::encrypt)"), reason))?;
            self.secret = Some(secret.encrypting()?);
        }
        if let Some(transport) = read("COLLECTIVES_TRANSPORT").filter(|_| self.transport == default.transport) {
            self.transport = transport.parse().map_err(|_| wrong("COLLECTIVES_TRANSPORT", &transport, "auto, shm or tcp"))?;
        }
        if let Some(waiting) = read("COLLECTIVES_WAITING").filter(|_| self.waiting == default.waiting) {
            self.waiting = waiting.parse().map_err(|_| wrong("COLLECTIVES_WAITING", &waiting, "auto, spin or sleep"))?;
        }
        self.reproducible |= switch(read, "COLLECTIVES_REPRODUCIBLE")?;
        if self.check_threads == default.check_threads && read(CHECK_THREADS).is_some() {
            self.check_threads = switch(read, CHECK_THREADS)?;
        }
        #[cfg(feature = "cuda")]
        {
            // Comparing fewer is a promise about the program, which the user who starts it cannot make.
            match read("COLLECTIVES_CHECK_DEVICE_CALLS").as_deref() {
                None => {}
                Some("1") => self.check_device_calls = CheckDeviceCalls::ALWAYS,
                Some(other) => {
                    let expected = "1 (all calls); only the program can ask to compare fewer, with CheckDeviceCalls::unchecked_after";
                    return Err(wrong("COLLECTIVES_CHECK_DEVICE_CALLS", other, expected));
                }
            }
            self.nccl_library = self.nccl_library.or_else(|| read("COLLECTIVES_NCCL_LIBRARY").map(NcclLibrary::of_environment));
        }
        if let Some(calls) = read("COLLECTIVES_FLIGHT_RECORDER").filter(|_| self.flight_recorder_calls == default.flight_recorder_calls) {
            let calls_kept = calls.parse().ok().filter(|calls| *calls <= Self::MAX_FLIGHT_RECORDER_CALLS);
            self.flight_recorder_calls =
                calls_kept.ok_or_else(|| wrong("COLLECTIVES_FLIGHT_RECORDER", &calls, "the number of calls to keep, at most 16777216"))?;
        }
        self.flight_recorder_dir = self.flight_recorder_dir.or_else(|| read("COLLECTIVES_FLIGHT_RECORDER_DIR").map(PathBuf::from));
        self.trace_dir = self.trace_dir.or_else(|| read("COLLECTIVES_TRACE").map(PathBuf::from));
        if let Some(sink) = read(METRICS) {
            match address_of_metrics(&sink)? {
                Some(address) => self.metrics_address = self.metrics_address.or(Some(address)),
                None => self.metrics_dir = self.metrics_dir.or_else(|| Some(PathBuf::from(sink))),
            }
        }
        if self.stall_warning == default.stall_warning {
            self.stall_warning = seconds(read, "COLLECTIVES_STALL_WARNING")?.unwrap_or(self.stall_warning);
        }
        if self.status_socket == default.status_socket && read(STATUS_SOCKET).is_some() {
            self.status_socket = switch(read, STATUS_SOCKET)?;
        }
        if self.timeout == default.timeout {
            self.timeout = seconds(read, "COLLECTIVES_TIMEOUT")?.unwrap_or(self.timeout);
        }
        if self.silence_timeout == default.silence_timeout {
            self.silence_timeout = silence_timeout(read)?;
        }
        Ok(self)
    }

    /// Returns the value of `COLLECTIVES_SILENCE_TIMEOUT`, or the default of
    /// [`silence_timeout`](Self::silence_timeout). Intended for a launcher, which has no communicator.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the variable is not a number of seconds.
    pub fn silence_timeout_from_env() -> Result<Duration> {
        silence_timeout(&environment)
    }

    /// The largest number of connections of a link.
    pub(crate) const MAX_CONNECTIONS: usize = 16;

    /// The largest number of calls that a recorder may keep. They take 1 GiB.
    pub(crate) const MAX_FLIGHT_RECORDER_CALLS: usize = 1 << 24;
}

/// The variable that turns the check of threads on or off.
const CHECK_THREADS: &str = "COLLECTIVES_CHECK_THREADS";

/// The variable that turns the answers to `collperf ps` on or off.
const STATUS_SOCKET: &str = "COLLECTIVES_STATUS_SOCKET";

/// The variable with the folder or the address of the metrics.
const METRICS: &str = "COLLECTIVES_METRICS";

/// The variable that turns encryption on.
const ENCRYPT: &str = "COLLECTIVES_ENCRYPT";

/// The variable with the addresses of a running job.
const JOIN: &str = "COLLECTIVES_JOIN";

/// The variable with the path of the file to which a process writes its join address.
const JOIN_FILE: &str = "COLLECTIVES_JOIN_FILE";

/// Reads a variable whose type parses itself; `None` if it is not set.
fn parsed<T: FromStr<Err = Error>>(read: &dyn Fn(&str) -> Option<String>, name: &str) -> Result<Option<T>> {
    read(name).map(|text| text.parse().map_err(|error| of_variable(name, &text, error))).transpose()
}

/// Reads a variable that is a number of seconds.
fn seconds(read: &dyn Fn(&str) -> Option<String>, name: &str) -> Result<Option<Duration>> {
    let Some(seconds) = read(name) else { return Ok(None) };
    let duration = seconds.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    duration.ok_or_else(|| wrong(name, &seconds, "a number of seconds")).map(Some)
}

/// Returns the address of metrics; `None` if the value is a folder.
fn address_of_metrics(value: &str) -> Result<Option<SocketAddr>> {
    if !value.contains("://") {
        return Ok(None);
    }
    let address = value.strip_prefix("tcp://").and_then(|address| address.parse().ok()).filter(|address: &SocketAddr| address.port() > 0);
    let expected = "a folder, or tcp://IP:PORT with an IP address and a port, such as tcp://127.0.0.1:9400";
    address.ok_or_else(|| wrong(METRICS, value, expected)).map(Some)
}

/// Reads the silence timeout, or returns the default.
fn silence_timeout(read: &dyn Fn(&str) -> Option<String>) -> Result<Duration> {
    Ok(seconds(read, "COLLECTIVES_SILENCE_TIMEOUT")?.unwrap_or(SILENCE_TIMEOUT))
}

impl Secret {
    /// Returns the secret from the variable `COLLECTIVES_SECRET`, or from the file that `COLLECTIVES_SECRET_FILE`
    /// names. Returns `None` if neither variable is set. The secret is [`encrypting`](Secret::encrypting) if
    /// `COLLECTIVES_ENCRYPT` is `1`.
    ///
    /// # Errors
    ///
    /// - [`Error::Config`] if both variables are set, or if the value is not a valid secret.
    /// - [`Error::Io`] if the file cannot be read.
    /// - [`Error::Unsupported`] if `COLLECTIVES_ENCRYPT` is `1` and this build cannot encrypt.
    pub fn from_env() -> Result<Option<Self>> {
        secret(&environment)?.map(Self::encrypting_if_asked).transpose()
    }

    /// Returns this secret, which becomes [`encrypting`](Secret::encrypting) if `COLLECTIVES_ENCRYPT` is `1`. Intended
    /// for a launcher that makes a secret for its job.
    ///
    /// # Errors
    ///
    /// - [`Error::Config`] if `COLLECTIVES_ENCRYPT` is neither `0` nor `1`.
    /// - [`Error::Unsupported`] if `COLLECTIVES_ENCRYPT` is `1` and this build cannot encrypt.
    pub fn encrypting_if_asked(self) -> Result<Self> {
        if switch(&environment, ENCRYPT)? { self.encrypting() } else { Ok(self) }
    }
}

/// Returns the secret that the variables give. No error quotes it.
fn secret(read: &dyn Fn(&str) -> Option<String>) -> Result<Option<Secret>> {
    match (read("COLLECTIVES_SECRET"), read("COLLECTIVES_SECRET_FILE")) {
        (None, None) => Ok(None),
        (None, Some(path)) => Secret::from_file(path).map(Some),
        (Some(_), Some(_)) => Err(Error::config(
            "COLLECTIVES_SECRET and COLLECTIVES_SECRET_FILE",
            "both are set; set only one of them, with the same secret on every rank",
        )),
        // Bytes that are not UTF-8 have been replaced with one character, so several secrets would be equal.
        (Some(text), None) if text.contains(char::REPLACEMENT_CHARACTER) => {
            Err(Error::config("COLLECTIVES_SECRET", "the secret is not UTF-8; write it in hexadecimal digits"))
        }
        (Some(text), None) => Secret::new(text).map(Some).map_err(|error| match error {
            Error::Config { reason, .. } => Error::config("COLLECTIVES_SECRET", reason),
            other => other,
        }),
    }
}

/// Reads a variable that is `0` or `1`; `false` if it is not set.
fn switch(read: &dyn Fn(&str) -> Option<String>, name: &str) -> Result<bool> {
    match read(name).as_deref() {
        None | Some("0") => Ok(false),
        Some("1") => Ok(true),
        Some(other) => Err(wrong(name, other, "0 or 1")),
    }
}

/// Returns the variables of NCCL and of the CUDA driver as they are now.
#[cfg(feature = "cuda")]
pub(crate) fn device_environment() -> device_environment::DeviceEnvironment {
    device_environment::DeviceEnvironment::of(&environment)
}

/// Whether the CUDA driver waits for each kernel before it returns. Read once, as the driver does.
#[cfg(feature = "cuda")]
pub(crate) fn launches_block() -> bool {
    static BLOCK: OnceLock<bool> = OnceLock::new();
    *BLOCK.get_or_init(|| device_environment().launches_block)
}

/// Returns the library of a tool that collects NVTX ranges. Such tools set this variable for the processes that they
/// start.
pub(crate) fn nvtx_injection() -> Option<PathBuf> {
    std::env::var_os("NVTX_INJECTION64_PATH").filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Returns the file from which this rank's launcher reads why the rank failed.
pub(crate) fn error_file() -> Option<PathBuf> {
    std::env::var_os("TORCHELASTIC_ERROR_FILE").filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Turns the error of parsing a setting into one that quotes the variable.
fn of_variable(name: &str, value: &str, error: Error) -> Error {
    match error {
        Error::Config { reason, .. } => Error::config(format!("{name}={value:?}"), reason),
        other => other,
    }
}

/// Returns the error for a variable with an invalid value.
fn wrong(name: &str, value: &str, expected: &str) -> Error {
    Error::config(format!("{name}={value:?}"), format!("expected {expected}"))
}

impl FromStr for Transport {
    type Err = Error;

    /// Parses the name.
    fn from_str(text: &str) -> Result<Self> {
        Transport::ALL.into_iter().find(|transport| transport.name() == text).ok_or_else(|| {
            let known = Transport::ALL.map(Transport::name).join(", ");
            Error::config(format!("transport {text:?}"), format!("not known; one of {known}"))
        })
    }
}

impl FromStr for Waiting {
    type Err = Error;

    /// Parses the name.
    fn from_str(text: &str) -> Result<Self> {
        Waiting::ALL.into_iter().find(|waiting| waiting.name() == text).ok_or_else(|| {
            let known = Waiting::ALL.map(Waiting::name).join(", ");
            Error::config(format!("waiting {text:?}"), format!("not known; one of {known}"))
        })
    }
}

/// Returns the addresses in `COLLECTIVES_JOIN`: those of ranks of a running job that this process shall join.
pub(crate) fn join_addresses() -> Result<Option<Vec<SocketAddr>>> {
    environment(JOIN).map(|text| parse_join_addresses(&text)).transpose()
}

/// Returns the file to which this process writes its join address, for processes that join later.
pub(crate) fn join_address_file() -> Option<PathBuf> {
    std::env::var_os(JOIN_FILE).filter(|path| !path.is_empty()).map(PathBuf::from)
}

fn parse_join_addresses(text: &str) -> Result<Vec<SocketAddr>> {
    let mut addresses = Vec::new();
    for address in text.split(',').map(str::trim).filter(|address| !address.is_empty()) {
        let failed = |error| Error::config(format!("{JOIN}={text:?}"), format!("{address}: {error}"));
        addresses.extend(address.to_socket_addrs().map_err(failed)?);
    }
    if addresses.is_empty() {
        return Err(wrong(JOIN, text, "addresses of ranks of a running job, each as HOST:PORT, separated by commas"));
    }
    Ok(addresses)
}

/// Reads one variable of the environment. Bytes that are not UTF-8 are replaced, so that errors can quote it.
pub(crate) fn environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests;
