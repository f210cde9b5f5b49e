//! One rank's run: every collective, op, type, root and size that was asked for.
//!
//! All ranks walk the same list in the same order; rank 0 also reports.

mod binding;
mod buffer;
mod call;
mod check;
#[cfg(feature = "cuda")]
mod device;
mod forecast;
mod host;
mod plane;
mod sweep;
mod timing;

use collectives::{Communicator, DType, Data, ReduceOp};

use crate::arguments::Plane as PlaneChoice;
use crate::collective::Collective;
#[cfg(feature = "cuda")]
use crate::contradictions::EXPLAIN_ON_DEVICE;
use crate::facts::{Bound, Gpu, On, RankFacts, RunFacts};
use crate::failure::{CHECK, Failure};
#[cfg(not(feature = "cuda"))]
use crate::gpus;
use crate::inputs::with_element;
use crate::machine::{Machine, available_memory, now};
use crate::report::{Report, say};
use crate::row::Row;
use crate::settings::Settings;
use crate::sizes::human;
use check::Checks;
use forecast::Curve;
use host::Host;
use plane::Plane;
use sweep::{EXTRA_TYPES, Subject};

/// What a rank carries through its run.
struct Session<'a, P> {
    /// All ranks.
    world: &'a Communicator,
    /// Those that calls are made by: all, or a group of them.
    comm: &'a Communicator,
    plane: &'a P,
    settings: &'a Settings,
    /// On rank 0.
    report: Option<Report<'a>>,
    checks: Checks<'a>,
    /// What calls of the collective at hand cost here, where that was asked for.
    curve: Curve,
    /// Sampled cells whose check failed, and which have no row.
    wrong_cells: usize,
}

/// Runs this rank and returns its exit code. A rank other than 0 leaves it to rank 0 to say that something was wrong. `number` is what the
/// rank's group goes by, where ranks are divided into groups.
pub(crate) fn run(world: &Communicator, number: usize, settings: &Settings) -> Result<u8, Failure> {
    // Before a core of their own is all that ranks see.
    let machine = Machine::here();
    let bound = binding::bind(world, settings)?;
    let color = settings.subset.map(|subset| subset.color(number));
    let group = color.map(|color| world.split(Some(color), 0)).transpose()?.flatten();
    let ranks = Ranks { world, comm: group.as_ref().unwrap_or(world), color: color.unwrap_or(0), machine: &machine, bound: &bound };
    ranks.check(settings)?;
    #[cfg(feature = "cuda")]
    if let Some(device) = world.device() {
        return on_device(&ranks, device, settings);
    }
    on_host(&ranks, settings)
}

/// All ranks, and those that this one makes its calls with.
struct Ranks<'a> {
    world: &'a Communicator,
    comm: &'a Communicator,
    color: u32,
    machine: &'a Machine,
    bound: &'a Bound,
}

impl Ranks<'_> {
    /// Whether groups of such sizes can do what is asked for: all walk one list of calls.
    fn check(&self, settings: &Settings) -> Result<(), Failure> {
        let sizes = share(self.world, &[self.comm.world_size() as u64])?;
        let least = sizes.iter().copied().min().unwrap_or(1) as usize;
        settings.check_root(least)?;
        let rooted = settings.collectives.iter().any(|collective| collective.is_rooted());
        if rooted && settings.root.is_none() && sizes.iter().any(|size| *size != sizes[0]) {
            return Err(Failure::usage("-r -1: the groups of NCCL_TESTS_SPLIT differ in size, so they have no roots in common"));
        }
        let refusal = |collective: &Collective| sizes.iter().find_map(|size| collective.check_ranks(*size as usize).err());
        settings.collectives.iter().find_map(refusal).map_or(Ok(()), |refusal| Err(Failure::usage(refusal)))
    }

    /// The same with another communicator for the calls.
    #[cfg(feature = "cuda")]
    fn with<'b>(&'b self, comm: &'b Communicator) -> Ranks<'b> {
        Ranks { comm, ..*self }
    }
}

/// Runs on ordinary memory.
fn on_host(ranks: &Ranks<'_>, settings: &Settings) -> Result<u8, Failure> {
    let comm = ranks.comm;
    let asked_of_device = settings.device.refusal.as_ref();
    let why = (settings.plane == PlaneChoice::Auto).then(|| why_no_device(ranks.world));
    match (asked_of_device, &why) {
        (Some(asked), Some(why)) => return Err(Failure::unsupported(format!("{asked}, and there is no device: {why}"))),
        (Some(asked), None) => return Err(Failure::unsupported(asked)),
        (None, _) => {}
    }
    check_room(ranks, settings)?;
    let facts = RunFacts { on: On::Host { why }, ..facts(ranks, "")? };
    measure(ranks, &Host::new(comm, settings.device.register), settings, facts)
}

/// Runs on device memory.
#[cfg(feature = "cuda")]
fn on_device(ranks: &Ranks<'_>, device: collectives::Device, settings: &Settings) -> Result<u8, Failure> {
    if settings.columns.predictions {
        return Err(Failure::unsupported(EXPLAIN_ON_DEVICE));
    }
    // A group's communicator has the device of its ranks, and a stream of its own there.
    let device = ranks.comm.device().unwrap_or(device);
    let null_stream = device.context().default_stream();
    let on_null_stream = settings.device.null_stream.then(|| ranks.comm.with_stream(&null_stream));
    let ranks = ranks.with(on_null_stream.as_ref().unwrap_or(ranks.comm));
    let stream = if settings.device.null_stream { &null_stream } else { device.stream() };
    let plane = device::OnDevice::new(ranks.comm, &device, stream, settings)?;
    let facts = RunFacts { on: On::Device { nccl: plane.nccl_version() }, ..facts(&ranks, &plane.describe())? };
    let code = measure(&ranks, &plane, settings, facts)?;
    plane.close()?;
    Ok(code)
}

/// Why a communicator has no device, in words.
fn why_no_device(comm: &Communicator) -> String {
    #[cfg(feature = "cuda")]
    return comm.why_no_device().unwrap_or_default();
    #[cfg(not(feature = "cuda"))]
    return gpus::count().err().filter(|_| comm.world_size() > 0).unwrap_or_default();
}

/// Whether this host has room for all its ranks' buffers.
fn check_room(ranks: &Ranks<'_>, settings: &Settings) -> Result<(), Failure> {
    let largest = largest_buffer(settings, ranks.comm.world_size());
    let needed = largest.saturating_mul(2 * ranks.world.local_world_size());
    match available_memory().filter(|available| needed > *available) {
        Some(available) => {
            Err(Failure::internal(format!("this host's ranks need {}, and {} are free; use a smaller -e", human(needed), human(available))))
        }
        None => Ok(()),
    }
}

/// The bytes of the largest buffer that any row needs.
fn largest_buffer(settings: &Settings, world_size: usize) -> usize {
    let sizes = settings.sizes.iter().copied().max().unwrap_or(0);
    let types = settings.dtypes.iter().map(|dtype| dtype.size_bytes());
    let bytes =
        |collective: Collective, element: usize| collective.bytes(collective.count(sizes, element, world_size), element, world_size);
    let of_type = |element: usize| settings.collectives.iter().map(move |collective| bytes(*collective, element)).max();
    types.filter_map(of_type).max().unwrap_or(0)
}

/// Everything that was asked for, on a plane.
fn measure<P: Plane>(ranks: &Ranks<'_>, plane: &P, settings: &Settings, facts: RunFacts) -> Result<u8, Failure> {
    let Ranks { world, comm, .. } = *ranks;
    let opened = (world.rank() == 0).then(|| Report::open(settings, facts, row_count(settings, comm.world_size())));
    // All hear of files that cannot be made: a rank that was left alone could fail before rank 0 says why.
    let is_hopeless = share(world, &[u64::from(matches!(opened, Some(Err(_))))])?.contains(&1);
    let report = opened.transpose()?;
    if is_hopeless {
        return Ok(0);
    }
    let checks = Checks::new(world);
    let mut session = Session { world, comm, plane, settings, report, checks, curve: Curve::default(), wrong_cells: 0 };
    let result = settings.collectives.iter().try_for_each(|collective| session.collective(*collective));
    let result = result.and_then(|()| if settings.device.memory { session.tell_memory() } else { Ok(()) });
    match (result, session.report) {
        (Err(failure), Some(report)) => {
            report.abandon(&failure);
            Err(failure)
        }
        (Err(failure), None) => Err(failure),
        (Ok(()), Some(report)) => Ok(report.finish()?.max(if session.wrong_cells > 0 { CHECK } else { 0 })),
        (Ok(()), None) => Ok(0),
    }
}

impl<P: Plane> Session<'_, P> {
    /// Everything that was asked of one collective.
    fn collective(&mut self, collective: Collective) -> Result<(), Failure> {
        if self.settings.columns.predictions {
            // Anew for each: where processors are virtual they move, and a flag then takes ten times as long for a while.
            self.curve = self.curve_of(collective)?;
        }
        if let Some(report) = &mut self.report {
            report.begin(collective)?;
        }
        if collective == Collective::Barrier {
            self.barrier()?;
        } else {
            for (dtype, op, root) in subjects(self.settings, collective, self.comm.world_size()) {
                let subject = Subject { collective, op, root };
                let unknown = || Err(Failure::unsupported(format!("{dtype}: collperf has no inputs of this type")));
                let swept = with_element!(dtype, T => self.sweep::<T>(subject), unknown());
                swept.or_else(|failure| self.forgive(failure))?;
            }
        }
        self.report.as_mut().map_or(Ok(()), |report| report.end(collective))
    }

    /// What the library refuses is no failure where `all` asked for it.
    fn forgive(&mut self, failure: Failure) -> Result<(), Failure> {
        let by_all = self.settings.collectives.len() > 1 || self.settings.ops.len() > 1 || self.settings.dtypes.len() > 1;
        if !failure.is_unsupported() || !by_all {
            return Err(failure);
        }
        if let Some(report) = &mut self.report {
            report.refuse(failure.message);
        }
        Ok(())
    }

    /// Has the report say how much memory is in use on the device that has the most of it in use.
    fn tell_memory(&mut self) -> Result<(), Failure> {
        let all = share(self.world, &self.plane.memory_use()?)?;
        let most = all.chunks_exact(3).max_by_key(|of_rank| of_rank[1]);
        match (&mut self.report, most) {
            (Some(report), Some([buffers, used, total])) => report.memory([*buffers, *used, *total].map(|bytes| bytes as usize)),
            _ => Ok(()),
        }
    }

    /// Says on a terminal what is being measured.
    fn announce(&self, row: &Row) {
        if let Some(report) = &self.report {
            report.working_on(&format!("{} {} {} {}", row.collective, row.op_name(), row.type_name(), human(row.bytes)));
        }
    }

    /// Hands a row to rank 0's report.
    fn give(&mut self, mut row: Row) -> Result<(), Failure> {
        let prediction = self.forecast(&row);
        for half in [&mut row.out_of_place, &mut row.in_place].into_iter().flatten() {
            half.prediction = prediction;
        }
        self.report.as_mut().map_or(Ok(()), |report| report.row(row))
    }

    /// Says something on standard error, once for all ranks.
    fn tell(&self, text: &str) {
        if self.report.is_some() {
            say(text);
        }
    }

    /// Whether sampled all-reduces come in 16-bit floats too.
    fn has_extra_types(&self) -> bool {
        has_extra_types(self.settings)
    }
}

/// Whether the defaults were asked for, in cells: then all-reduce is sampled in 16-bit floats too.
fn has_extra_types(settings: &Settings) -> bool {
    settings.cell.is_some() && settings.dtypes == [DType::F32] && settings.ops == [ReduceOp::Sum]
}

/// The types, ops and roots of a collective, without those that the library refuses.
fn subjects(settings: &Settings, collective: Collective, world_size: usize) -> Vec<(DType, Option<ReduceOp>, usize)> {
    let ops: Vec<Option<ReduceOp>> = if collective.reduces() { settings.ops.iter().copied().map(Some).collect() } else { vec![None] };
    let roots = match settings.root {
        _ if !collective.is_rooted() || settings.cell.is_some() => 0..1,
        Some(root) => root..root + 1,
        None => 0..world_size,
    };
    let extra: &[DType] = if collective == Collective::AllReduce && has_extra_types(settings) { &EXTRA_TYPES } else { &[] };
    let dtypes = settings.dtypes.iter().chain(extra);
    let pairs = dtypes.flat_map(|dtype| ops.iter().map(|op| (*dtype, *op)));
    let possible = pairs.filter(|(dtype, op)| op.is_none_or(|op| op.check(*dtype).is_ok()));
    possible.flat_map(|(dtype, op)| roots.clone().map(move |root| (dtype, op, root))).collect()
}

/// How many rows there will be in one cycle, about.
fn row_count(settings: &Settings, world_size: usize) -> usize {
    let rows = |collective: &Collective| match collective {
        Collective::Barrier => 1,
        _ => settings.sizes.len() * subjects(settings, *collective, world_size).len(),
    };
    settings.collectives.iter().map(rows).sum()
}

/// Everyone's part of the same length, in rank order.
fn share<T: Data + Default>(comm: &Communicator, mine: &[T]) -> collectives::Result<Vec<T>> {
    let mut all = vec![T::default(); mine.len() * comm.world_size()];
    comm.all_gather_into(mine, &mut all)?;
    Ok(all)
}

/// The longest name that is told to others, in bytes.
const NAME_BYTES: usize = 128;

/// Who takes part. Every rank tells its processor and, in `gpu`, its device; the rest is known.
fn facts(ranks: &Ranks<'_>, gpu: &str) -> Result<RunFacts, Failure> {
    let (machine, bound) = (ranks.machine.clone(), Some(ranks.bound.clone()));
    let all = share(ranks.world, &[name(&machine.processor), name(gpu)].concat())?;
    let groups = share(ranks.world, &[ranks.color])?;
    let (peers, is_encrypted) = (ranks.world.peers(), ranks.world.config().encrypt);
    let ranks = peers.iter().zip(all.chunks_exact(2 * NAME_BYTES)).enumerate().map(|(rank, (peer, said))| RankFacts {
        peer: peer.clone(),
        group: groups[rank],
        local_rank: peers[..rank].iter().filter(|other| other.host == peer.host).count(),
        processor: text(&said[..NAME_BYTES]),
        gpu: Gpu::from_words(&text(&said[NAME_BYTES..])),
    });
    Ok(RunFacts { ranks: ranks.collect(), on: On::Host { why: None }, machine, bound, is_encrypted, start_time: now() })
}

/// What was told.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned()
}

/// A text in as many bytes as all ranks tell.
fn name(text: &str) -> [u8; NAME_BYTES] {
    let mut bytes = [0_u8; NAME_BYTES];
    for (byte, from) in bytes.iter_mut().zip(text.bytes()) {
        *byte = from;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::arguments::Arguments;

    fn settings(line: &str) -> Settings {
        Settings::new(
            &Arguments::parse_from(std::iter::once("collperf").chain(line.split(' '))),
            &crate::environment::Environment::default(),
        )
        .unwrap()
    }

    #[test]
    fn the_largest_buffer_is_known_beforehand() {
        for (line, bytes) in [
            ("all_reduce -e 1M", 1 << 20),
            ("all -e 1M", 1 << 20),
            ("all -d all -b 1 -e 1", 24),
            ("all --sizes 9,7,100 -d i16", 100),
            ("barrier", 0),
        ] {
            assert_eq!(largest_buffer(&settings(line), 3), bytes, "{line}");
        }
    }

    #[test]
    fn subjects_are_what_was_asked_for() {
        let all = settings("all -o all -d all -r -1");
        // Not avg of bool, three bitwise ops of six floats, mulsum of eight integers and bool.
        assert_eq!(subjects(&all, Collective::AllReduce, 3).len(), 15 * 9 - 1 - 3 * 6 - 9);
        assert_eq!(subjects(&all, Collective::Broadcast, 3).len(), 15 * 3);
        assert_eq!(subjects(&all, Collective::AllGather, 3).len(), 15);
        assert_eq!(subjects(&settings("reduce -r 2"), Collective::Reduce, 3), [(DType::F32, Some(ReduceOp::Sum), 2)]);
    }

    #[test]
    fn cells_of_all_reduce_come_in_16_bits_too() {
        let types =
            |line: &str, collective| subjects(&settings(line), collective, 2).into_iter().map(|subject| subject.0).collect::<Vec<_>>();
        assert_eq!(types("all --cell-ms 5", Collective::AllReduce), [DType::F32, DType::F16, DType::Bf16]);
        assert_eq!(types("all --cell-ms 5", Collective::ReduceScatter), [DType::F32]);
        assert_eq!(types("all --cell-ms 5 -d bf16", Collective::AllReduce), [DType::Bf16]);
        assert_eq!(types("all", Collective::AllReduce), [DType::F32]);
    }
}
