//! The settings of a measurement, made from the command line once and checked.

use std::path::{Path, PathBuf};
use std::time::Duration;

use collectives::{DType, ReduceOp};

use crate::arguments::{Arguments, Backend, DeviceFlags, Links, RankKind};
use crate::collective::Collective;
use crate::contradictions;
use crate::environment::Environment;
use crate::failure::Failure;
use crate::launch::Asked;
use crate::sizes::{self, Step};
use crate::statistics::Average;
use crate::subset::Subset;
use crate::table::Columns;
use crate::traffic::{Exchange, Traffic};

/// All settings that the ranks need. Every rank makes them from the same command line.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) collectives: Vec<Collective>,
    /// The requested sizes in bytes.
    pub(crate) sizes: Vec<usize>,
    /// How the sizes were made; `None` for a list.
    pub(crate) step: Option<Step>,
    pub(crate) ops: Vec<ReduceOp>,
    pub(crate) dtypes: Vec<DType>,
    /// The root; `None`: each rank in turn.
    pub(crate) root: Option<usize>,
    pub(crate) iterations: usize,
    /// Calls in each iteration.
    pub(crate) aggregated: usize,
    pub(crate) warmup: usize,
    /// How often the sweep is repeated; 0: without end.
    pub(crate) cycles: usize,
    pub(crate) check: usize,
    pub(crate) blocking: Blocking,
    pub(crate) timeout: Option<Duration>,
    pub(crate) average: Average,
    pub(crate) unalign: usize,
    pub(crate) columns: Columns,
    /// The number of first calls that the statistics of single calls exclude.
    pub(crate) skip: usize,
    /// Ranks to start here, or for each thread; `None`: as many as there are GPUs.
    pub(crate) ranks: Option<usize>,
    /// The number of threads, if requested; `ranks` is then the number of ranks for each thread.
    pub(crate) threads: Option<usize>,
    /// The kind of ranks; `None`: whichever suits the other settings.
    pub(crate) rank_kind: Option<RankKind>,
    pub(crate) parallel_init: bool,
    /// The groups that run at the same time.
    pub(crate) subset: Option<Subset>,
    /// The device of the first rank of a process. It may differ between processes.
    pub(crate) first_device: Option<usize>,
    pub(crate) backend: Backend,
    pub(crate) device: Device,
    pub(crate) transport: Links,
    pub(crate) bind: Asked,
    /// The variable in which another launcher gives this process its rank, if one does.
    pub(crate) launcher: Option<&'static str>,
    /// Sample each cell for this long, instead of timing a number of calls.
    pub(crate) cell: Option<Duration>,
    pub(crate) json: Option<PathBuf>,
    pub(crate) csv: Option<Destination>,
    pub(crate) prometheus: Option<PathBuf>,
    pub(crate) markdown: bool,
    pub(crate) plot: Option<PathBuf>,
    pub(crate) html: Option<PathBuf>,
    pub(crate) trace: Option<PathBuf>,
    /// The mean bus bandwidth to reach, in 10^9 bytes per second.
    pub(crate) least_busbw: Option<f64>,
    /// Whether to print a histogram of single calls below each row.
    pub(crate) histogram: bool,
    /// The blocks of `all_to_all_v`, if they differ from this program's own.
    pub(crate) traffic: Option<Traffic>,
    /// Whether to print the bytes and bandwidths of each rank in `all_to_all_v`.
    pub(crate) traffic_summary: bool,
    /// Unsupported combinations, with the reasons. They are not failures, because `all` includes them.
    pub(crate) refused: Vec<String>,
}

/// The action between two timed calls (`-z`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blocking {
    /// Nothing: the next call is made immediately.
    No,
    /// A wait until the first of the two calls has ended.
    Wait,
    /// A wait and a barrier, both timed.
    Barrier,
    /// A timed wait, and a barrier that is not timed.
    UntimedBarrier,
}

/// Settings of devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Device {
    /// How often the graph of the timed calls is launched; 0: no graph.
    pub(crate) graph: usize,
    /// Whether to report the time to issue a call.
    pub(crate) issue_time: bool,
    pub(crate) register: Register,
    pub(crate) null_stream: bool,
    pub(crate) cta_policy: Option<u8>,
    pub(crate) memory: bool,
    /// Why the host backend refuses the first of these flags that is given.
    pub(crate) refusal: Option<String>,
}

/// How buffers are prepared (`-R`). On the host backend, all variants except the first use buffers from the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Register {
    Nothing,
    /// This rank's buffers are registered with NCCL.
    Local,
    /// The buffers of all ranks are registered with NCCL together, as NCCL windows.
    Window,
}

impl Device {
    fn new(flags: &DeviceFlags, first_device: Option<usize>) -> Self {
        let chosen = first_device.map(|device| format!("NCCL_TESTS_DEVICE={device}: the host backend uses no device; unset the variable"));
        Self {
            graph: flags.graph as usize,
            issue_time: flags.issue_time == 1,
            register: match flags.register {
                0 => Register::Nothing,
                1 => Register::Local,
                _ => Register::Window,
            },
            null_stream: flags.null_stream == 1,
            cta_policy: flags.cta_policy,
            memory: flags.memory == 1,
            refusal: flags.refusal().or(chosen),
        }
    }
}

/// The destination of CSV.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Destination {
    Stdout,
    File(PathBuf),
}

impl Settings {
    /// Checks a command line, and makes the settings.
    pub(crate) fn new(arguments: &Arguments, environment: &Environment) -> Result<Self, Failure> {
        if let Some(refusal) = arguments.elsewhere.refusal() {
            return Err(Failure::usage(refusal));
        }
        let device = Device::new(&arguments.device, environment.first_device);
        contradictions::refuse(arguments, environment, device.refusal.as_ref())?;
        let all_ops = arguments.op == "all";
        let ops = if all_ops { ReduceOp::ALL.to_vec() } else { vec![arguments.op.parse().map_err(|error| known(&error))?] };
        let all_dtypes = arguments.datatype == "all";
        let dtypes = if all_dtypes { DType::ALL.to_vec() } else { vec![arguments.datatype.parse().map_err(|error| known(&error))?] };
        let collectives = collectives(arguments)?;
        let (sizes, step) = sizes(arguments)?;
        let names_sizes = arguments.min_bytes.is_some() || arguments.max_bytes.is_some() || !arguments.sizes.is_empty();
        contradictions::refuse_of(arguments, environment, &collectives, names_sizes && sizes.len() > 1)?;
        let refused = refused(&collectives, &ops, &dtypes);
        if let Some(refusal) = refused.first().filter(|_| !all_ops && !all_dtypes) {
            return Err(Failure::unsupported(refusal));
        }
        Ok(Self {
            collectives,
            sizes,
            step,
            ops,
            dtypes,
            root: root(&arguments.root)?,
            iterations: arguments.iterations as usize,
            aggregated: arguments.aggregated as usize,
            warmup: arguments.warmup as usize,
            cycles: arguments.cycles as usize,
            check: arguments.check as usize,
            blocking: match arguments.blocking {
                1 => Blocking::Barrier,
                2 => Blocking::Wait,
                3 => Blocking::UntimedBarrier,
                _ => Blocking::No,
            },
            timeout: arguments.timeout.map(Duration::from_secs),
            average: [Average::Rank0, Average::Mean, Average::Min, Average::Max][usize::from(arguments.average & 3)],
            unalign: usize::from(arguments.unalign),
            columns: Columns {
                per_iteration: arguments.per_iteration == 1,
                timestamps: arguments.timestamps == 1,
                issue_time: device.issue_time,
                predictions: arguments.explain,
            },
            skip: arguments.skip as usize,
            ranks: arguments.ranks_here.map(usize::from).or((arguments.nccl_tests_defaults || arguments.threads.is_some()).then_some(1)),
            threads: arguments.threads.map(usize::from),
            rank_kind: arguments.ranks,
            parallel_init: arguments.parallel_init == 1,
            subset: environment.subset,
            first_device: environment.first_device,
            backend: arguments.backend,
            device,
            transport: arguments.transport,
            bind: match arguments.bind {
                Some(bind) => Asked::For(bind),
                None if arguments.pin => Asked::CoresInTurns,
                None => Asked::Nothing,
            },
            launcher: None,
            cell: arguments.cell_ms,
            json: json(arguments.json.as_deref())?,
            csv: csv(arguments),
            prometheus: arguments.prometheus.clone(),
            markdown: arguments.markdown,
            plot: arguments.plot.clone(),
            html: arguments.html.clone(),
            trace: arguments.trace.clone(),
            least_busbw: environment.least_busbw,
            histogram: arguments.histogram,
            traffic: environment.traffic.clone(),
            traffic_summary: environment.traffic_summary,
            refused,
        })
    }

    /// Returns the number of ranks of a process that a launcher started.
    pub(crate) fn ranks_of_process(&self) -> usize {
        self.threads.unwrap_or(1) * self.ranks.unwrap_or(1)
    }

    /// Checks that this many ranks, together or in groups, can do what was requested.
    pub(crate) fn check_ranks(&self, ranks: usize) -> Result<(), Failure> {
        self.check_root(ranks)?;
        if self.subset.is_none()
            && self.collectives.contains(&Collective::AllToAllV)
            && self.traffic.as_ref().is_some_and(Traffic::is_matrix)
        {
            self.exchange(Collective::AllToAllV, ranks, 0, 1)?;
        }
        let refusal = self.collectives.iter().find_map(|collective| collective.check_ranks(ranks).err());
        // Groups have other sizes, and are checked once they exist.
        refusal.filter(|_| self.subset.is_none()).map_or(Ok(()), |refusal| Err(Failure::usage(refusal)))
    }

    /// Checks that the root is one of this many ranks.
    pub(crate) fn check_root(&self, world_size: usize) -> Result<(), Failure> {
        match self.root {
            Some(root) if root >= world_size => Err(Failure::usage(format!("-r {root}: there are {world_size} ranks, numbered from 0"))),
            _ => Ok(()),
        }
    }

    /// Returns the blocks of `all_to_all_v`, if they differ from this program's own. `total` is the bytes that each rank
    /// sends, unless a file says it.
    pub(crate) fn exchange(
        &self,
        collective: Collective,
        ranks: usize,
        total: usize,
        element_bytes: usize,
    ) -> Result<Option<Exchange>, Failure> {
        let traffic = self.traffic.as_ref().filter(|_| collective == Collective::AllToAllV);
        let exchange = traffic.map(|traffic| traffic.exchange(ranks, total, element_bytes)).transpose().map_err(Failure::usage)?;
        match exchange {
            Some(exchange) if exchange.largest().is_none_or(|most| most > isize::MAX as usize / element_bytes) => {
                Err(Failure::usage("all_to_all_v: the blocks of a rank are more bytes than can be counted; use smaller ones"))
            }
            exchange => Ok(exchange),
        }
    }

    /// Whether the time of every single call is needed. Calls in a graph have none.
    pub(crate) fn wants_samples(&self) -> bool {
        self.device.graph == 0 && (self.columns.per_iteration || self.histogram || self.json.is_some() || self.csv.is_some())
    }
}

/// Creates the failure for an unknown name; the library's message lists the known ones.
fn known(error: &collectives::Error) -> Failure {
    Failure::usage(format!("{error}, all"))
}

/// Returns the collectives that `all`, `--colls` and the names stand for.
fn collectives(arguments: &Arguments) -> Result<Vec<Collective>, Failure> {
    if arguments.collective != "all" {
        if !arguments.colls.is_empty() {
            return Err(Failure::usage(format!("--colls: works only with the collective `all`, not with {}", arguments.collective)));
        }
        return Ok(vec![arguments.collective.parse().map_err(Failure::usage)?]);
    }
    if arguments.colls.is_empty() {
        return Ok(Collective::ALL.to_vec());
    }
    arguments.colls.iter().map(|name| name.parse().map_err(Failure::usage)).collect()
}

/// Returns the pairs of op and type that the library refuses, with its reasons: one line for each op and reason.
fn refused(collectives: &[Collective], ops: &[ReduceOp], dtypes: &[DType]) -> Vec<String> {
    if !collectives.iter().any(|collective| collective.reduces()) {
        return vec![];
    }
    let mut lines = Vec::new();
    for op in ops {
        let mut reasons: Vec<(String, Vec<&str>)> = Vec::new();
        for dtype in dtypes {
            let Err(error) = op.check(*dtype) else { continue };
            let reason = match error {
                collectives::Error::Unsupported { reason, .. } => reason,
                other => other.to_string(),
            };
            match reasons.iter_mut().find(|(known, _)| *known == reason) {
                Some((_, names)) => names.push(dtype.name()),
                None => reasons.push((reason, vec![dtype.name()])),
            }
        }
        lines.extend(reasons.into_iter().map(|(reason, names)| format!("{op} of {}: {reason}", names.join(", "))));
    }
    lines
}

fn sizes(arguments: &Arguments) -> Result<(Vec<usize>, Option<Step>), Failure> {
    if !arguments.sizes.is_empty() {
        return Ok((arguments.sizes.clone(), None));
    }
    let theirs = (32 << 20, 32 << 20, Step::Bytes(1 << 20));
    let (least, most, step) = if arguments.nccl_tests_defaults { theirs } else { (8, 128 << 20, Step::Factor(2)) };
    let step = match (arguments.step_factor, arguments.step_bytes) {
        (Some(factor), _) => Step::Factor(factor),
        (None, Some(bytes)) => Step::Bytes(bytes),
        (None, None) => step,
    };
    let sizes = sizes::sweep(arguments.min_bytes.unwrap_or(least), arguments.max_bytes.unwrap_or(most), step).map_err(Failure::usage)?;
    Ok((sizes, Some(step)))
}

fn root(root: &str) -> Result<Option<usize>, Failure> {
    match root {
        "-1" | "all" => Ok(None),
        _ => root.parse().map(Some).map_err(|_| Failure::usage(format!("-r {root}: expected a rank, or -1 or all for each rank in turn"))),
    }
}

fn json(path: Option<&Path>) -> Result<Option<PathBuf>, Failure> {
    match path {
        Some(path) if path.extension().is_none_or(|extension| extension != "json") => {
            Err(Failure::usage(format!("-J {}: the name must end in .json", path.display())))
        }
        path => Ok(path.map(Path::to_owned)),
    }
}

/// Returns the destination of CSV. Sampled cells have no table, so their CSV goes to standard output unless a file is
/// named.
fn csv(arguments: &Arguments) -> Option<Destination> {
    match arguments.csv.as_deref() {
        Some(path) if path == Path::new("-") => Some(Destination::Stdout),
        Some(path) => Some(Destination::File(path.to_owned())),
        None => arguments.cell_ms.map(|_| Destination::Stdout),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn settings(line: &str) -> Result<Settings, Failure> {
        let words = std::iter::once("collperf").chain(line.split_whitespace());
        Settings::new(&Arguments::try_parse_from(words).map_err(|error| Failure::usage(error.to_string()))?, &Environment::default())
    }

    fn refusal(line: &str) -> (u8, String) {
        let failure = settings(line).expect_err(line);
        (failure.code, failure.message)
    }

    #[test]
    fn defaults_are_those_of_nccl_tests_but_for_the_sweep() {
        let settings = settings("all_reduce").unwrap();
        assert_eq!((settings.sizes[0], settings.sizes.len(), *settings.sizes.last().unwrap()), (8, 25, 128 << 20));
        assert_eq!((settings.iterations, settings.warmup, settings.cycles, settings.check), (20, 1, 1, 1));
        assert_eq!((settings.ops.clone(), settings.dtypes.clone(), settings.root), (vec![ReduceOp::Sum], vec![DType::F32], Some(0)));
        assert_eq!((settings.average, settings.blocking, settings.ranks), (Average::Mean, Blocking::No, None));
        assert_eq!((settings.csv.clone(), settings.wants_samples()), (None, false));
    }

    #[test]
    fn steps_are_added_only_when_asked() {
        assert_eq!(settings("all_reduce -b 1K -e 3K -i 1K").unwrap().sizes, [1024, 2048, 3072]);
        assert_eq!(settings("all_reduce -b 1K -e 3K -i 1K -f 2").unwrap().sizes, [1024, 2048]);
        assert_eq!(settings("all_reduce --sizes 4,1K,3").unwrap().sizes, [4, 1024, 3]);
        assert_eq!(refusal("all_reduce -b 9 -e 8").0, 6);
        assert_eq!(refusal("all_reduce -f 1").0, 6);
    }

    #[test]
    fn unknown_names_list_the_known_ones() {
        for (line, words) in [
            ("all_reduce -o plus", "sum, prod"),
            ("all_reduce -d f33", "f32, f64"),
            ("allredcue", "all_reduce, "),
            ("all --colls x", "sendrecv"),
        ] {
            let (code, message) = refusal(line);
            assert!(code == 6 && message.contains(words) && message.contains(", all"), "{message}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused_or_listed() {
        assert_eq!(refusal("all_reduce -o avg -d bool").0, 5);
        assert_eq!(refusal("reduce -o band -d half").0, 5);
        // A broadcast has no op.
        assert!(settings("broadcast -o band -d half").unwrap().refused.is_empty());
        let all = settings("all -o all -d all").unwrap();
        let starts = ["avg of bool: ", "band of f32, f64, f16, bf16, f8e4m3, f8e5m2: ", "bor of f32", "bxor of f32", "mulsum of i8, "];
        assert_eq!(all.refused.len(), starts.len());
        assert!(all.refused.iter().zip(starts).all(|(refusal, start)| refusal.starts_with(start)), "{:?}", all.refused);
        assert_eq!(all.collectives.len(), 15);
    }

    #[test]
    fn flags_of_devices_are_refused_on_the_host_with_a_reason() {
        for flag in ["-G 1", "-C 1", "-x 0", "-M 1", "-y 1"] {
            let (code, message) = refusal(&format!("all_reduce --backend host {flag}"));
            assert!(code == 5 && message.starts_with(&format!("{flag}: ")) && message.contains("the host backend"), "{message}");
        }
        for flag in ["-D 3", "-V 16"] {
            let (code, message) = refusal(&format!("all_reduce {flag}"));
            assert!(code == 6 && message.starts_with(flag), "{message}");
        }
        // Their off values change nothing.
        // `--plane` is the former name of `--backend`.
        assert_eq!(settings("all_reduce --plane host -R 2").unwrap().device.register, Register::Window);
        assert_eq!(settings("all_reduce --backend host -R 2").unwrap().device.register, Register::Window);
        assert!(settings("all_reduce --backend host -G 0 -R 0 -C 0 -t 1 -m 1 -y 0 -p 0 -D 0 -M 0").is_ok());
    }

    #[test]
    fn flags_that_do_not_go_together_are_refused() {
        assert_eq!(refusal("all_reduce -n 5 -K 5 -I 1").0, 6);
        assert!(refusal("all_reduce -n 5 -K 1").1.contains("-I 1"));
        assert_eq!(settings("all_reduce -n 5 -K 4 -I 1").unwrap().skip, 4);
        #[cfg(feature = "cuda")]
        for line in ["-G 2 -y 1", "-G 2 -I 1", "-G 2 --cell-ms 5"] {
            let (code, message) = refusal(&format!("all_reduce {line}"));
            assert!(code == 6 && message.starts_with("-G 2 "), "{message}");
        }
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn what_is_asked_of_devices_is_kept_until_there_is_one() {
        let device = settings("all_reduce -G 3 -C 1 -R 2 -x 1 -M 1 -z 2").unwrap().device;
        assert_eq!((device.graph, device.issue_time, device.register, device.cta_policy), (3, true, Register::Window, Some(1)));
        assert!(device.memory && device.refusal.unwrap().starts_with("-G 3"));
        assert_eq!(settings("all_reduce -n 7").unwrap().device.refusal, None);
        assert!(!settings("all_reduce -G 1 -J x.json").unwrap().wants_samples());
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_build_without_devices_says_so() {
        assert!(refusal("all_reduce --backend device").1.contains("no device backend"));
        assert_eq!(refusal("all_reduce -G 1").0, 5);
    }

    #[test]
    fn roots_and_files_are_checked() {
        assert_eq!(settings("reduce -r -1").unwrap().root, None);
        assert_eq!(settings("reduce -r all").unwrap().root, None);
        assert_eq!(settings("reduce -r 7").unwrap().root, Some(7));
        assert_eq!(refusal("reduce -r -2").0, 6);
        assert!(refusal("reduce -J x.txt").1.contains(".json"));
        assert_eq!(settings("reduce --csv -").unwrap().csv, Some(Destination::Stdout));
        assert_eq!(settings("reduce --cell-ms 5").unwrap().csv, Some(Destination::Stdout));
        for line in
            ["reduce --cell-ms 0", "reduce --cell-ms -1", "reduce -g 0", "reduce -n 0", "reduce -a 4", "reduce -z 4", "reduce -b x", ""]
        {
            assert_eq!(refusal(line).0, 6, "{line}");
        }
    }

    #[test]
    fn what_the_comparison_of_peers_asks_is_understood() {
        let line = "all -g 2 --backend host --transport shm --colls all_reduce,barrier --sizes 4,1024 --cell-ms 150 --csv - --pin";
        let settings = settings(line).unwrap();
        assert_eq!(settings.collectives, [Collective::AllReduce, Collective::Barrier]);
        assert_eq!((settings.cell, settings.transport), (Some(Duration::from_millis(150)), Links::Shm));
        assert_eq!(settings.bind, Asked::CoresInTurns);
    }
}
