//! Refuses command lines whose flags contradict each other, or request something that is not supported.

use std::path::PathBuf;

use crate::arguments::{Arguments, Backend, RankKind};
use crate::collective::Collective;
use crate::environment::Environment;
use crate::failure::Failure;
use crate::output_file::OutputFile;
use crate::traffic::Traffic;

/// Why there are no predictions for devices.
pub(crate) const EXPLAIN_ON_DEVICE: &str = "--explain: NCCL gives no predictions for calls on devices; use --backend host";

/// The most ranks of one process.
const MOST_RANKS: usize = 4096;

/// Refuses flags that contradict each other. If a given flag needs a device, `asks_for_device` is the reason why the
/// host backend refuses it.
pub(crate) fn refuse(arguments: &Arguments, environment: &Environment, asks_for_device: Option<&String>) -> Result<(), Failure> {
    if arguments.backend == Backend::Device && !cfg!(feature = "cuda") {
        return Err(Failure::unsupported("--backend device: this build of collperf has no device backend; use --backend host"));
    }
    if let Some(refusal) = asks_for_device.filter(|_| arguments.backend == Backend::Host || !cfg!(feature = "cuda")) {
        return Err(Failure::unsupported(refusal));
    }
    if arguments.explain && arguments.backend == Backend::Device {
        return Err(Failure::unsupported(EXPLAIN_ON_DEVICE));
    }
    if arguments.explain && arguments.device.register != 0 {
        return Err(Failure::unsupported(format!(
            "--explain -R {}: predictions exist only for calls on ordinary buffers; leave out -R",
            arguments.device.register
        )));
    }
    let graph = arguments.device.graph;
    if graph > 0 && arguments.device.null_stream == 1 {
        return Err(Failure::usage(format!("-G {graph} -y 1: the null stream cannot be captured in a graph; leave out -y")));
    }
    if graph > 0 && arguments.per_iteration == 1 {
        return Err(Failure::usage(format!("-G {graph} -I 1: calls inside a graph cannot be timed separately; leave out -I")));
    }
    if graph > 0 && arguments.cell_ms.is_some() {
        return Err(Failure::usage(format!("-G {graph} --cell-ms: cells are measured without a graph; leave out -G")));
    }
    if let (Some(threads), Some(RankKind::Process)) = (arguments.threads, arguments.ranks) {
        return Err(Failure::usage(format!("-t {threads} --ranks process: -t starts ranks as threads; use -g for processes")));
    }
    let ranks = usize::from(arguments.threads.unwrap_or(1)) * usize::from(arguments.ranks_here.unwrap_or(1));
    if ranks > MOST_RANKS {
        return Err(Failure::usage(format!(
            "-t and -g: their product is {ranks} ranks in one process, but at most {MOST_RANKS} are possible"
        )));
    }
    if let (Some(subset), Some(_)) = (environment.subset, arguments.cell_ms) {
        return Err(Failure::usage(format!(
            "NCCL_TESTS_SPLIT={subset} --cell-ms: --cell-ms measures all ranks together; unset the variable"
        )));
    }
    if graph > 0 && arguments.histogram {
        return Err(Failure::usage(format!("-G {graph} --histogram: calls inside a graph cannot be timed separately; leave out -G")));
    }
    let is_csv = arguments.csv.as_deref() == Some(std::path::Path::new("-"));
    if arguments.histogram && (is_csv || arguments.cell_ms.is_some()) {
        return Err(Failure::usage("--histogram: histograms stand below the rows of the table, so leave out --csv - and --cell-ms"));
    }
    if let Some(other) = other_than_markdown(arguments).filter(|_| arguments.markdown) {
        return Err(Failure::usage(format!(
            "--markdown {other}: Markdown tables cannot show the output of {other}; use --csv FILE or -J FILE"
        )));
    }
    if arguments.trace.is_some() && arguments.cycles == 0 {
        return Err(Failure::usage(
            "--trace -N 0: the trace is written after the last cycle, but a run with -N 0 never ends; give another number of cycles",
        ));
    }
    refuse_one_file_for_two(arguments)?;
    if arguments.skip > 0 && arguments.per_iteration == 0 && !arguments.histogram && arguments.json.is_none() && arguments.csv.is_none() {
        return Err(Failure::usage(format!("-K {}: no calls are timed separately, so there are none to skip; add -I 1", arguments.skip)));
    }
    if arguments.skip >= arguments.iterations {
        return Err(Failure::usage(format!(
            "-K {}: this number would skip all {} calls (-n); use a smaller number",
            arguments.skip, arguments.iterations
        )));
    }
    Ok(())
}

/// Refuses two kinds of results in one file, since only the last would remain.
fn refuse_one_file_for_two(arguments: &Arguments) -> Result<(), Failure> {
    let Arguments { json, csv, prometheus, html, plot, trace, .. } = arguments;
    one_file_for_each(&[("-J", json), ("--csv", csv), ("--prometheus", prometheus), ("--html", html), ("--plot", plot), ("--trace", trace)])
}

/// Refuses flags that name the same file.
pub(crate) fn one_file_for_each(files: &[(&str, &Option<PathBuf>)]) -> Result<(), Failure> {
    let named: Vec<_> = files.iter().filter_map(|(flag, path)| Some((*flag, path.as_ref()?))).collect();
    let mut pairs = named.iter().enumerate().flat_map(|(place, one)| named[place + 1..].iter().map(move |other| (one, other)));
    match pairs.find(|((_, one), (_, other))| OutputFile::is_same(one, other) && !one.starts_with("/dev")) {
        Some(((one, path), (other, _))) => Err(Failure::usage(format!("{one} and {other} name the same file, {}", path.display()))),
        None => Ok(()),
    }
}

/// Returns a flag that needs another form of output, or columns that Markdown tables do not have.
fn other_than_markdown(arguments: &Arguments) -> Option<&'static str> {
    let is_csv = arguments.csv.as_deref() == Some(std::path::Path::new("-"));
    let others = [
        ("-I 1", arguments.per_iteration == 1),
        ("-S 1", arguments.timestamps == 1),
        ("-C 1", arguments.device.issue_time == 1),
        ("--explain", arguments.explain),
        ("--histogram", arguments.histogram),
        ("--cell-ms", arguments.cell_ms.is_some()),
        ("--csv -", is_csv),
    ];
    others.into_iter().find(|(_, is_asked)| *is_asked).map(|(name, _)| name)
}

/// Refuses `-m` for calls that cannot be grouped, and variables that a collective would have to ignore.
///
/// `is_sweep`: whether the command line asks for several sizes.
pub(crate) fn refuse_of(
    arguments: &Arguments,
    environment: &Environment,
    collectives: &[Collective],
    is_sweep: bool,
) -> Result<(), Failure> {
    let aggregated = arguments.aggregated;
    if aggregated > 1 && arguments.cell_ms.is_some() {
        return Err(Failure::usage(format!("-m {aggregated} --cell-ms: cells are measured without groups; leave out -m")));
    }
    if aggregated > 1 && collectives.contains(&Collective::Hypercube) {
        return Err(Failure::usage(format!("-m {aggregated}: the steps of hypercube wait for each other, so its calls cannot be grouped")));
    }
    let only_exchange = collectives == [Collective::AllToAllV];
    let is_matrix = environment.traffic.as_ref().is_some_and(Traffic::is_matrix);
    if is_matrix && only_exchange && is_sweep {
        return Err(Failure::usage(
            "NCCL_TESTS_ALLTOALLV_MATRIX_FILE: the sizes come from the file, so there is no sweep; leave out -b, -e and --sizes",
        ));
    }
    if is_matrix && arguments.explain && collectives.contains(&Collective::AllToAllV) {
        return Err(Failure::usage(
            "NCCL_TESTS_ALLTOALLV_MATRIX_FILE --explain: there are no predictions for a matrix; leave out --explain",
        ));
    }
    Ok(())
}
