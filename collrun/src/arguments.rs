//! The command line of `collrun`: torchrun's flags and some of its own.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, ArgMatches, CommandFactory, FromArgMatches, Parser};
use collectives_launch::{Bind, NumaBinding, Streams};

use crate::control::Control;
use crate::count::Count;
use crate::environment::{self, Variable};
use crate::mpirun;
use crate::place::Place;
use crate::rendezvous::{Conf, Nodes, seconds};

/// Starts the ranks of a job and stops them together.
///
/// Every rank is a process with torchrun's variables in its environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
/// so on). collrun serves the store at which the ranks meet. If a rank fails, collrun reports which, stops the others
/// and exits with that rank's code. Signals are passed on, and a second Ctrl-C kills the ranks. No rank, and no other
/// process in a rank's process group, outlives collrun. Flags are torchrun's, with - or _ between words. A flag that is
/// not given is read from torchrun's variable (PET_NNODES for --nnodes).
#[derive(Debug, Parser)]
#[command(name = "collrun", version, max_term_width = 110, args_override_self = true)]
pub(crate) struct Arguments {
    /// Ranks to start on this host: a number; gpu: one for each GPU; cpu: one for each processor; auto: one for
    /// each GPU, or for each processor if there are no GPUs [default: 1]
    #[arg(long, value_name = "N|auto|gpu|cpu")]
    pub(crate) nproc_per_node: Option<Count>,
    /// Same as --nproc-per-node, for command lines of mpirun. For jobs on one host only, since mpirun counts the ranks
    /// of all hosts. Also -np
    #[arg(short = 'n', long, value_name = "N", overrides_with = "nproc_per_node")]
    pub(crate) np: Option<Count>,
    /// Number of hosts in the job. Start collrun once on each of them, or use --hosts. MIN:MAX starts the job with at
    /// least MIN hosts, and restarts all ranks when a host is lost or another one comes; needs --rdzv-endpoint
    #[arg(long, value_name = "M|MIN:MAX", default_value = "1")]
    pub(crate) nnodes: Nodes,
    /// Start the ranks on these hosts by ssh: a,b or a:4,b:4 with the number of ranks of each. The program and the
    /// current folder must have the same paths there
    #[arg(long, value_name = "HOST[:N],…", conflicts_with_all = ["hostfile", "nnodes", "node_rank", "rdzv_endpoint", "standalone", "local_addr"])]
    pub(crate) hosts: Option<String>,
    /// Like --hosts, from a file with one host in each line, followed by slots=N if the host has several ranks
    #[arg(long, value_name = "FILE", conflicts_with_all = ["nnodes", "node_rank", "rdzv_endpoint", "standalone", "local_addr"])]
    pub(crate) hostfile: Option<PathBuf>,
    /// Command that runs a command on another host. Its arguments are the host and that command, and it must not ask
    /// for a password
    #[arg(long, value_name = "COMMAND", default_value = "ssh -o BatchMode=yes")]
    pub(crate) ssh: String,
    /// Path of collrun on the other hosts [default: its path on this host]
    #[arg(long, value_name = "PATH")]
    pub(crate) remote_collrun: Option<PathBuf>,
    /// Environment variable to set for the ranks of all hosts, in addition to COLLECTIVES_* and NCCL_*. NAME alone
    /// copies its value from this shell
    #[arg(long, value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<String>,
    /// Folder in which the ranks start. The program's path is relative to it [default: the current folder]. Also -wdir,
    /// --chdir
    #[arg(long, visible_alias = "chdir", value_name = "FOLDER")]
    pub(crate) wdir: Option<PathBuf>,
    /// Reads what to start from standard input
    #[arg(long, hide = true)]
    pub(crate) read_order: bool,
    /// Started by another collrun, which gives this host's place and sends signals on standard input
    #[arg(long, hide = true)]
    pub(crate) controlled: Option<Control>,
    /// Number of this host, from 0. Needed if --nnodes is above 1, unless --rdzv-endpoint numbers the hosts
    #[arg(long, value_name = "R")]
    pub(crate) node_rank: Option<u16>,
    /// Address of host 0, at which the ranks meet. Needed if --nnodes is above 1, unless --rdzv-endpoint is given
    #[arg(long, value_name = "A")]
    pub(crate) master_addr: Option<String>,
    /// Port of the store on host 0. Needed with --master-addr if --nnodes is above 1 [default: a free port on one host,
    /// 29500 with --hosts]
    #[arg(long, value_name = "P", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) master_port: Option<u16>,
    /// Address at which several hosts meet and get their numbers. The host with this address serves the store
    #[arg(long, value_name = "HOST[:PORT]")]
    pub(crate) rdzv_endpoint: Option<String>,
    /// How --rdzv-endpoint numbers the hosts: c10d by itself, or static, which needs --node-rank
    #[arg(long, value_name = "NAME", value_parser = backend)]
    pub(crate) rdzv_backend: Option<String>,
    /// Name of the job. It must be the same on every host
    #[arg(long, value_name = "NAME")]
    pub(crate) rdzv_id: Option<String>,
    /// join_timeout=SECONDS or timeout=SECONDS: how long to wait for the other hosts to start [default: 1800]. With
    /// --nnodes MIN:MAX also last_call_timeout=SECONDS: how long to wait for more hosts once MIN are there [default: 30];
    /// keep_alive_interval=SECONDS and keep_alive_max_attempt=N: a host without an answer for SECONDS times N is lost
    /// [default: 5 and 3]
    #[arg(long, value_name = "KEY=VALUE,…")]
    pub(crate) rdzv_conf: Option<Conf>,
    /// Run a job on this host only, at a free port. Overrides flags that give an address or a port
    #[arg(long)]
    pub(crate) standalone: bool,
    /// Address at which other hosts reach the ranks of this host
    #[arg(long, value_name = "A")]
    pub(crate) local_addr: Option<String>,
    /// How many times all ranks, on every host, are restarted after a failure. With --replace, how many failed processes
    /// are replaced
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) max_restarts: u32,
    /// Folder for log files and the ranks' error files, in which each run creates a new folder. Without it, log files
    /// are in TMPDIR/collrun
    #[arg(long, value_name = "FOLDER")]
    pub(crate) log_dir: Option<PathBuf>,
    /// Write these streams to log files instead of the terminal: 1 stdout, 2 stderr, 3 both; or by local rank, as in
    /// 0:1,1:2
    #[arg(short, long, value_name = "STREAMS", default_value = "0")]
    pub(crate) redirects: Streams,
    /// Write these streams to log files and also to the terminal
    #[arg(short, long, value_name = "STREAMS", default_value = "0")]
    pub(crate) tee: Streams,
    /// Show only the output of these local ranks
    #[arg(long, value_name = "R,R", value_delimiter = ',')]
    pub(crate) local_ranks_filter: Option<Vec<usize>>,
    /// Text before each line, with ${role_name}, ${local_rank}, ${rank} and ${hostname} filled in [default: the
    /// rank in brackets, and the host with --hosts]
    #[arg(long, value_name = "TEXT")]
    pub(crate) log_line_prefix_template: Option<String>,
    /// Role of all ranks, which they get as ROLE_NAME
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub(crate) role: String,
    /// The program is a Python module
    #[arg(short, long, conflicts_with = "no_python")]
    pub(crate) module: bool,
    /// Run the program as it is, even if its name ends in .py
    #[arg(long)]
    pub(crate) no_python: bool,
    /// The program is a Python script, even if its name does not end in .py
    #[arg(long)]
    pub(crate) run_path: bool,
    /// Let each rank see only its own GPU, and give it local rank 0
    #[arg(long)]
    pub(crate) virtual_local_rank: bool,
    /// The cores that each rank is bound to. core: its share of the host's cores, in one last-level cache if possible;
    /// cache, numa: all cores of one last-level cache or NUMA node; none: not bound [default: core if a host has as
    /// many cores as ranks, else none]. Also --bind-to. Two jobs on one host are bound to the same cores
    #[arg(long, aliases = ["bind-to", "bind_to"], value_name = "none|core|cache|numa")]
    pub(crate) bind: Option<Bind>,
    /// Binds each rank near its GPU. node: all cores of the GPU's NUMA node; socket: all cores of its socket; exclusive: a
    /// share of the node's cores; core-complex: cores of the node that share a cache. The GPU of a rank is the visible GPU
    /// with the local rank's number, by PCI address. Without GPUs, ranks are spread evenly
    #[arg(long, value_name = "node|socket|exclusive|core-complex", conflicts_with = "bind")]
    pub(crate) numa_binding: Option<NumaBinding>,
    /// Print the cores that the ranks of each host are bound to
    #[arg(long)]
    pub(crate) report_bindings: bool,
    /// Signals to pass on to the ranks
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = signal, default_value = "SIGTERM,SIGINT,SIGHUP,SIGQUIT")]
    pub(crate) signals_to_handle: Vec<i32>,
    /// No effect, accepted for torchrun's command lines: collrun notices at once that a rank has ended
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) monitor_interval: Option<Duration>,
    /// No effect, accepted for torchrun's command lines: programs are always started in the same way
    #[arg(long, value_name = "METHOD", value_parser = ["spawn", "fork", "forkserver"])]
    pub(crate) start_method: Option<String>,
    /// Make a secret for this job, pass it to the ranks, and admit only processes that have it. The ranks must be
    /// programs that use collectives. No effect if COLLECTIVES_SECRET or COLLECTIVES_SECRET_FILE is set; set one of
    /// them instead if you start collrun on several hosts
    #[arg(long)]
    pub(crate) secret: bool,
    /// Leave the ranks' output unchanged, without the rank in brackets before each line
    #[arg(long)]
    pub(crate) no_prefix: bool,
    /// If a rank fails, let the others continue, for programs that call Communicator::shrink. The exit code is 0 if any
    /// rank succeeds. Any rank may fail, because collrun serves the store
    #[arg(long, conflicts_with = "max_restarts")]
    pub(crate) keep_going: bool,
    /// If a rank fails, start a new process in its place, which joins the running job. The others continue in their
    /// processes. At most --max-restarts N processes are started so. For programs that call Communicator::from_env and
    /// admit, on one host. The exit code is 0 if any rank succeeds
    #[arg(long, conflicts_with = "keep_going")]
    pub(crate) replace: bool,
    /// How long ranks may take to end before they are killed [default: 5 after another rank has failed, 30 after a
    /// signal]
    #[arg(long, aliases = ["shutdown-timeout", "shutdown_timeout"], value_name = "SECONDS", value_parser = seconds)]
    pub(crate) grace: Option<Duration>,
    #[command(flatten)]
    pub(crate) refused: Refused,
    /// The variables that stand for flags.
    #[arg(skip)]
    pub(crate) variables: Vec<Variable>,
    /// The program and its arguments
    #[arg(required_unless_present = "read_order", trailing_var_arg = true, value_name = "PROGRAM")]
    pub(crate) command: Vec<OsString>,
}

/// torchrun's flags that are not supported, each with what to do instead.
#[derive(Debug, clap::Args)]
pub(crate) struct Refused {
    #[arg(long, hide = true, action = ArgAction::Set)]
    event_log_handler: Option<String>,
    #[arg(long, hide = true, action = ArgAction::Set)]
    logs_specs: Option<String>,
    #[arg(long, hide = true, action = ArgAction::Set)]
    duplicate_stdout_filters: Option<String>,
    #[arg(long, hide = true, action = ArgAction::Set)]
    duplicate_stderr_filters: Option<String>,
    #[arg(long, hide = true, action = ArgAction::Set)]
    print_completion: Option<String>,
}

impl Refused {
    /// Returns why a given flag is refused, if one is.
    fn reason(&self) -> Option<&'static str> {
        let all = [
            (
                &self.event_log_handler.clone().filter(|name| name != "null"),
                "--event-log-handler: collrun runs no Python handlers; it prints failures on standard error",
            ),
            (&self.logs_specs, "--logs-specs: collrun loads no Python classes; use --log-dir, --redirects and --tee"),
            (
                &self.duplicate_stdout_filters,
                "--duplicate-stdout-filters: collrun does not filter output; use -t 1 and search the log files",
            ),
            (
                &self.duplicate_stderr_filters,
                "--duplicate-stderr-filters: collrun does not filter output; use -t 2 and search the log files",
            ),
            (&self.print_completion, "--print-completion: collrun has no completions for shells; use collrun --help for a list of flags"),
        ];
        all.into_iter().find_map(|(value, reason)| value.is_some().then_some(reason))
    }
}

/// torchrun's default port.
pub(crate) const PORT: u16 = 29500;

impl Arguments {
    /// Reads the command line, where flags may have _ for -, and adds the flags that variables stand for. If the
    /// command line is wrong, prints the error and exits with code 2. If a variable is wrong, returns the error.
    pub(crate) fn read() -> Result<Self, String> {
        let words: Vec<OsString> = std::env::args_os().collect();
        Self::of(&words, |name| std::env::var_os(name)).unwrap_or_else(|error| match error.print() {
            Err(failed) if failed.kind() != std::io::ErrorKind::BrokenPipe => std::process::exit(1),
            _ => std::process::exit(error.exit_code()),
        })
    }

    /// Reads a command line, and variables for flags that it does not have.
    pub(crate) fn of(words: &[OsString], value_of: impl Fn(&str) -> Option<OsString>) -> Result<Result<Self, String>, clap::Error> {
        let command = Self::spelled_both_ways();
        let words = mpirun::with_two_dashes(&command, words);
        let line = match command.clone().try_get_matches_from(&words) {
            Ok(line) => line,
            Err(error) => return mpirun::hint(&error, &words).map_or(Err(error), |hint| Ok(Err(hint))),
        };
        let alone = Self::from_arg_matches(&line)?;
        // This process becomes another launcher, which reads the variables.
        Ok(if alone.read_order { Ok(alone) } else { Self::with_variables(&command, &line, &words, value_of) })
    }

    fn with_variables(
        command: &clap::Command,
        line: &ArgMatches,
        words: &[OsString],
        value_of: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, String> {
        if let Some(reason) = environment::refused(&value_of) {
            return Err(reason);
        }
        let variables = environment::given(command, line, value_of)?;
        let matches = command.clone().try_get_matches_from(environment::words(&variables, words.iter().cloned()));
        let read = matches.and_then(|matches| Self::from_arg_matches(&matches));
        match read {
            Ok(read) => Ok(Self { variables, ..read }),
            Err(error) => Err(named(&variables, environment::sentence(&error))),
        }
    }

    /// Adds to an error the variables that it is about.
    pub(crate) fn named(&self, reason: String) -> String {
        named(&self.variables, reason)
    }

    fn spelled_both_ways() -> clap::Command {
        Self::command().mut_args(|argument| match argument.get_long().map(|name| name.replace('-', "_")) {
            Some(name) if name.contains('_') => argument.alias(name),
            _ => argument,
        })
    }

    /// Checks the flags that belong together, and returns this host's place.
    pub(crate) fn place(&self) -> Result<Place, String> {
        self.found_place().map_err(|reason| self.named(reason))
    }

    fn found_place(&self) -> Result<Place, String> {
        if let Some(reason) = self.refused.reason() {
            return Err(reason.to_owned());
        }
        self.can_replace()?;
        if let Some(control) = &self.controlled {
            return Ok(control.place());
        }
        if let Some(np) = self.np.filter(|_| self.nnodes.most > 1) {
            return Err(format!("-n {np}: {}; give --nproc-per-node, which is the number of ranks on each host", mpirun::COUNTS_ALL));
        }
        if self.standalone {
            let several = format!("--standalone --nnodes {}: a standalone job has one host; leave out one of the two flags", self.nnodes);
            return if self.nnodes.most == 1 { Ok(Place::Alone { address: None, port: None }) } else { Err(several) };
        }
        let endpoint = self.rdzv_endpoint.as_deref().map(|endpoint| address_and_port(endpoint, self.master_port)).transpose()?;
        if self.nnodes.most == 1 {
            return match (self.node_rank, endpoint) {
                (None | Some(0), Some((address, port))) => Ok(Place::Alone { address: Some(address), port: Some(port) }),
                (None | Some(0), None) => Ok(Place::Alone { address: self.master_addr.clone(), port: self.master_port }),
                (Some(node), _) => Err(format!("--node-rank {node}: the job has only host 0; give --nnodes if it has more hosts")),
            };
        }
        if self.nnodes.is_range() {
            self.fits_elastic()?;
        }
        if let Some((address, 0)) = &endpoint {
            return Err(format!("--rdzv-endpoint {address}:0: other hosts cannot know which port the system chooses; name a port"));
        }
        let missing = |flag: &str| format!("--nnodes {}: {flag} is needed with several hosts", self.nnodes);
        if self.nnodes.is_range() {
            let (address, port) = endpoint.ok_or_else(|| missing("--rdzv-endpoint"))?;
            return Ok(Place::Elastic { address, port });
        }
        let is_static = self.rdzv_backend.as_deref() == Some("static");
        if let (Some((address, port)), None, false) = (&endpoint, self.node_rank, is_static) {
            return Ok(Place::Unnumbered { address: address.clone(), port: *port });
        }
        let node = self.node_rank.ok_or_else(|| missing("--node-rank, or --rdzv-endpoint without --rdzv-backend static,"))?;
        if node >= self.nnodes.most {
            return Err(format!("--node-rank {node}: the hosts of --nnodes {} are numbered from 0", self.nnodes));
        }
        let (address, port) = match (endpoint, &self.master_addr) {
            (Some(endpoint), _) => endpoint,
            (None, Some(address)) => (unbracketed(address).to_owned(), self.master_port.ok_or_else(|| missing("--master-port"))?),
            (None, None) => return Err(missing("--master-addr")),
        };
        Ok(Place::Among { node, address, port })
    }

    /// Checks the flags that `--replace` needs or excludes.
    fn can_replace(&self) -> Result<(), String> {
        if self.replace && (self.nnodes.most > 1 || self.hosts.is_some() || self.hostfile.is_some()) {
            return Err("--replace: ranks are replaced only in jobs of one host; give --keep-going instead, and start new processes with \
                        COLLECTIVES_JOIN"
                .to_owned());
        }
        if self.replace && self.max_restarts == 0 {
            return Err("--replace: give --max-restarts N, the largest number of new processes; --keep-going starts none".to_owned());
        }
        Ok(())
    }

    /// Checks the flags that a range of hosts excludes.
    fn fits_elastic(&self) -> Result<(), String> {
        let nnodes = self.nnodes;
        let numbered = "the hosts get their numbers at --rdzv-endpoint";
        if let Some(node) = self.node_rank {
            return Err(format!("--nnodes {nnodes} --node-rank {node}: {numbered}; leave out --node-rank"));
        }
        if self.rdzv_backend.as_deref() == Some("static") {
            return Err(format!("--nnodes {nnodes} --rdzv-backend static: {numbered}; give --rdzv-backend c10d"));
        }
        if self.keep_going {
            return Err(format!(
                "--nnodes {nnodes} --keep-going: ranks that go on cannot get another world size; leave out one of the flags"
            ));
        }
        Ok(())
    }

    /// Returns the settings of the rendezvous.
    pub(crate) fn conf(&self) -> Conf {
        self.rdzv_conf.unwrap_or_default()
    }

    /// Returns the largest number of hosts in the job.
    pub(crate) fn nodes(&self) -> u16 {
        self.controlled.as_ref().map_or(self.nnodes.most, |control| control.nodes)
    }

    /// Returns the number of ranks on this host.
    pub(crate) fn local_world_size(&self) -> Result<usize, String> {
        let listed = self.controlled.as_ref().and_then(|control| control.ranks).map(Count::Number);
        listed.or(self.np).or(self.nproc_per_node).unwrap_or(Count::Number(1)).ranks().map_err(|reason| self.named(reason))
    }

    /// Returns the text before each line of a rank.
    pub(crate) fn prefix(&self) -> String {
        match (&self.log_line_prefix_template, &self.controlled) {
            _ if self.no_prefix => String::new(),
            (Some(template), _) => template.clone(),
            (None, Some(control)) => format!("[{} ${{rank}}] ", control.name),
            (None, None) => "[${rank}] ".to_owned(),
        }
    }

    /// Returns the program of a rank, and its arguments.
    pub(crate) fn program(&self) -> (OsString, Vec<OsString>) {
        let mut words = self.command.iter().cloned();
        let program = words.next().unwrap_or_default();
        let is_script = self.run_path || (!self.no_python && std::path::Path::new(&program).extension().is_some_and(|end| end == "py"));
        if !self.module && !is_script {
            return (program, words.collect());
        }
        let python = std::env::var_os("PYTHON_EXEC").filter(|python| !python.is_empty()).unwrap_or_else(|| "python3".into());
        let mut arguments: Vec<OsString> = vec!["-u".into()];
        arguments.extend(self.module.then(|| "-m".into()));
        arguments.extend(std::iter::once(program).chain(words));
        (python, arguments)
    }
}

/// Adds to an error the variables that stand for the flags in it.
fn named(variables: &[Variable], reason: String) -> String {
    let meant: Vec<String> = variables.iter().filter(|variable| variable.is_meant(&reason)).map(Variable::sentence).collect();
    if meant.is_empty() { reason } else { format!("{reason} ({})", meant.join(", ")) }
}

/// Reads `HOST`, `HOST:PORT`, and `[V6]:PORT`.
fn address_and_port(endpoint: &str, port: Option<u16>) -> Result<(String, u16), String> {
    // A link-local address ends with its interface, as in fe80::1%eth0.
    let is_bare = endpoint.split('%').next().is_some_and(|address| address.parse::<std::net::Ipv6Addr>().is_ok());
    // In an address in brackets without a port, the last colon is inside the brackets.
    let is_whole = |address: &str| !address.starts_with('[') || address.ends_with(']');
    match endpoint.rsplit_once(':').filter(|(address, _)| !is_bare && is_whole(address)) {
        None => Ok((unbracketed(endpoint).to_owned(), port.unwrap_or(PORT))),
        Some((address, number)) => match number.parse() {
            Ok(number) if !address.is_empty() => Ok((unbracketed(address).to_owned(), number)),
            _ => Err(format!("--rdzv-endpoint {endpoint}: expected a host and a port, as in 10.0.0.1:29500")),
        },
    }
}

fn unbracketed(address: &str) -> &str {
    address.strip_prefix('[').and_then(|address| address.strip_suffix(']')).unwrap_or(address)
}

fn backend(text: &str) -> Result<String, String> {
    match text {
        "c10d" | "static" => Ok(text.to_owned()),
        _ => Err("expected c10d or static: one of the job's hosts serves the store, so no other program is needed".to_owned()),
    }
}

fn signal(text: &str) -> Result<i32, String> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
    let known = [SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2];
    let named = known.into_iter().find(|signal| signal_hook::low_level::signal_name(*signal) == Some(text));
    named.ok_or_else(|| "expected one of SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2".to_owned())
}

#[cfg(test)]
mod tests;
