//! Makes the calls of a recorded job again.

mod agreement;
mod buffers;
mod calls;
mod gaps;
mod messages;
mod order;
mod outcome;
mod pauses;
mod player;
mod recording;
mod script;
mod shape;
mod source;
mod tap;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use collectives::observe::CallReport;
use collectives::{Builder, Communicator, ReduceOp};

use crate::contradictions::one_file_for_each;
use crate::failure::Failure;
use crate::job;
use crate::machine::now;
use crate::output_file::OutputFile;
use crate::report::answer;
pub(crate) use outcome::{FORMAT, Outcome, Timed, VERSION};
use player::{Gaps, Manner};
use recording::Recording;
use script::Script;
use shape::Changes;
use tap::Tap;

/// Makes the calls of a recorded job again, and compares their times with the recorded ones.
///
/// The record is a folder or a list of files: the traces of COLLECTIVES_TRACE, what collperf trace merged from them,
/// flight records, or the files of PyTorch's flight recorder (pickle or JSON). It must contain every rank of the job. The
/// replay has as many ranks as the record. It makes the same calls with the same types, sizes, order and concurrency, in
/// host memory. The output lists what the record does not contain.
///
/// Ranks whose calls differ, or wait for each other, are found before any call is made. collperf report A.json B.json
/// compares two replays call by call. Exit codes: 0 success; 1 a file or process error, or ranks that differ; 3 a
/// collective failed; 4 a call timed out; 5 not supported; 6 wrong command line or environment variable.
#[derive(Debug, Clone, Parser)]
#[command(name = "collperf replay", bin_name = "collperf replay", max_term_width = 110, args_override_self = true)]
pub(crate) struct Arguments {
    /// The folder of the record, or its files
    #[arg(value_name = "RECORD", required = true)]
    record: Vec<PathBuf>,
    #[command(flatten)]
    job: job::Flags,
    /// The time between calls. keep: as recorded, in which ranks compute; sleep: as recorded, in which ranks sleep; none:
    /// no time
    #[arg(long, value_enum, default_value_t = Gaps::Keep)]
    gaps: Gaps,
    /// Replay the calls this many times, and report medians
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    repeat: u32,
    /// Write every call with both times to this file, for collperf report
    #[arg(short = 'J', long = "json", value_name = "FILE.json")]
    json: Option<PathBuf>,
    /// Write every call with both times to this file as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

/// A record that can be replayed.
struct Prepared {
    recording: Recording,
    scripts: Vec<Script>,
    changes: Changes,
}

impl Arguments {
    /// Checks the files for the results, and reads and checks the record. Only the host of rank 0 needs these files.
    fn prepare(&self) -> Result<Prepared, Failure> {
        one_file_for_each(&[("-J", &self.json), ("--csv", &self.csv)])?;
        for path in self.json.iter().chain(&self.csv) {
            OutputFile::new(path)?.is_none_of(self.record.iter().map(|path| &**path))?;
        }
        let mut recording = source::read(&self.record)?;
        agreement::check(&mut recording).map_err(Failure::internal)?;
        if recording.ranks.iter().all(Vec::is_empty) {
            let reason = "the record contains no call that can be replayed";
            return Err(Failure::internal([&[reason.to_owned()], &recording.notes[..]].concat().join("\n")));
        }
        let (mut scripts, changes) = script::write(&recording).map_err(Failure::unsupported)?;
        match self.gaps {
            Gaps::None => scripts.iter_mut().flat_map(|script| &mut script.steps).for_each(|step| step.gap_ns = 0),
            Gaps::Keep | Gaps::Sleep => recording.notes.extend(pauses::shorten(&mut scripts)),
        }
        for (rank, script) in scripts.iter().enumerate() {
            script.shapes.iter().try_for_each(|shape| buffers::bytes(script, shape, rank).map(drop))?;
        }
        recording.notes.extend(order::arrange(&recording, &mut scripts).map_err(Failure::internal)?);
        Ok(Prepared { recording, scripts, changes })
    }

    fn manner(&self) -> Manner {
        Manner { gaps: self.gaps, repetitions: self.repeat as usize }
    }
}

/// Replays a record; rank 0 prints the outcome.
pub(crate) fn run(arguments: &Arguments) -> Result<u8, Failure> {
    // Checked once, before there are ranks.
    let ranks = || arguments.prepare().map(|prepared| prepared.scripts.len());
    job::run_recorded(&arguments.job, ranks, |builder| one_rank(arguments, builder))
}

/// Runs one rank.
fn one_rank(arguments: &Arguments, builder: Builder) -> Result<u8, Failure> {
    let tap = Arc::new(Tap::default());
    let observer = Arc::clone(&tap);
    let comm =
        builder.configure(|config| config.observer = Some(Arc::new(move |call: &CallReport<'_>| observer.receive(call)))).from_env()?;
    let prepared = if comm.rank() == 0 { Some(arguments.prepare().and_then(|prepared| prepared.of_as_many(&comm))) } else { None };
    let Some(script) = deal(&comm, prepared.as_ref())? else {
        return prepared.map_or(Ok(FAILED_ELSEWHERE), |prepared| prepared.map(|_| FAILED_ELSEWHERE));
    };
    if let Some(Ok(prepared)) = &prepared {
        answer(&pauses::announced(&prepared.scripts, arguments.repeat as usize))?;
    }
    let mut longest = [script.longest_gap_ns()];
    comm.all_reduce(&mut longest, ReduceOp::Max)?;
    comm.set_timeout(arguments.job.timeout().saturating_add(Duration::from_nanos(longest[0])));
    let times = player::play(&comm, &script, &tap, arguments.manner())?;
    match prepared {
        Some(prepared) => arguments.report(&comm, &prepared?, times)?,
        None => comm.send(&times[..], 0)?,
    }
    comm.close()?;
    Ok(0)
}

/// The exit code of a rank that made no call because rank 0 cannot read the record. Rank 0 gives the reason.
const FAILED_ELSEWHERE: u8 = 1;

impl Prepared {
    /// Refuses a job that has not as many ranks as the record.
    fn of_as_many(self, comm: &Communicator) -> Result<Self, Failure> {
        let (recorded, here) = (self.scripts.len(), comm.world_size());
        if recorded == here { Ok(self) } else { Err(Failure::usage(job::other_number(recorded, here))) }
    }
}

/// Sends each rank its script, and all of them the communicators. Returns this rank's script, or `None` if rank 0 has
/// none.
fn deal(comm: &Communicator, prepared: Option<&Result<Prepared, Failure>>) -> Result<Option<Script>, Failure> {
    // The last length is that of the communicators.
    let mut lengths = vec![0_u64; comm.world_size() + 1];
    let (mut texts, mut groups) = (Vec::new(), Vec::new());
    if let Some(Ok(prepared)) = prepared {
        groups = serde_json::to_vec(&*prepared.scripts[0].groups).map_err(Failure::internal)?;
        lengths[comm.world_size()] = groups.len() as u64;
        for (length, script) in lengths.iter_mut().zip(&prepared.scripts) {
            let text = serde_json::to_vec(script).map_err(Failure::internal)?;
            *length = text.len() as u64;
            texts.push(text);
        }
    }
    comm.broadcast(&mut lengths[..], 0)?;
    let mine = usize::try_from(lengths[comm.rank()]).map_err(Failure::internal)?;
    if mine == 0 {
        return Ok(None);
    }
    groups.resize(usize::try_from(lengths[comm.world_size()]).map_err(Failure::internal)?, 0);
    comm.broadcast(&mut groups[..], 0)?;
    let groups = serde_json::from_slice(&groups).map_err(Failure::internal)?;
    if comm.rank() == 0 {
        texts.iter().enumerate().skip(1).try_for_each(|(rank, text)| comm.send(&text[..], rank))?;
    } else {
        let mut text = vec![0; mine];
        comm.recv(&mut text[..], 0)?;
        texts = vec![text];
    }
    let script: Script = serde_json::from_slice(&texts[0]).map_err(Failure::internal)?;
    Ok(Some(Script { groups: Arc::new(groups), ..script }))
}

impl Arguments {
    /// Collects the times of all ranks on rank 0, and prints and writes the outcome.
    fn report(&self, comm: &Communicator, prepared: &Prepared, times: Vec<u64>) -> Result<(), Failure> {
        let Prepared { recording, scripts, changes } = prepared;
        let repetitions = self.repeat as usize;
        let mut calls = outcome::timed(0, &recording.ranks[0], &scripts[0], &times, repetitions)?;
        for (rank, script) in scripts.iter().enumerate().skip(1) {
            let mut times = vec![0; script.steps.len() * repetitions];
            comm.recv(&mut times[..], rank)?;
            calls.extend(outcome::timed(rank, &recording.ranks[rank], script, &times, repetitions)?);
        }
        let outcome = Outcome {
            format: FORMAT.to_owned(),
            version: VERSION,
            start_time: now(),
            source: recording.origin.name().to_owned(),
            ranks: scripts.len(),
            transport: self.job.transport().to_owned(),
            gaps: self.gaps.name().to_owned(),
            repetitions,
            not_recorded: gaps::not_recorded(recording, *changes),
            notes: recording.notes.clone(),
            communicators: outcome::members(recording),
            calls,
        };
        answer(&outcome.text())?;
        if let Some(path) = &self.json {
            OutputFile::new(path)?.write(&serde_json::to_string(&outcome).map_err(Failure::internal)?)?;
        }
        self.csv.as_ref().map_or(Ok(()), |path| OutputFile::new(path)?.write(&outcome.csv()))
    }
}
