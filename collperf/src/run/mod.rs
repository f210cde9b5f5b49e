//! One rank's run: every requested collective, op, type, root and size.
//!
//! All ranks process the same list in the same order; rank 0 also reports.

mod backend;
pub(crate) mod binding;
mod buffer;
mod call;
mod check;
mod curve;
#[cfg(feature = "cuda")]
mod device;
mod forecast;
mod host;
mod session;
mod subjects;
mod sweep;
mod timing;
mod words;

use collectives::Communicator;

use crate::arguments::Backend as BackendChoice;
use crate::collective::Collective;
#[cfg(feature = "cuda")]
use crate::contradictions::EXPLAIN_ON_DEVICE;
use crate::facts::{Bound, Gpu, On, RankFacts, RunFacts};
use crate::failure::{CHECK, Failure};
#[cfg(not(feature = "cuda"))]
use crate::gpus;
use crate::machine::{Machine, available_memory, now};
use crate::report::Report;
use crate::settings::Settings;
use crate::sizes::human;
use crate::tails::Pauses;
use backend::Backend;
use check::Checks;
use curve::Curve;
use host::Host;
use session::Session;
use subjects::{expected_rows, largest_buffer};
use words::{NAME_BYTES, name, share, text};

/// Runs this rank and returns its exit code. Only rank 0's code reports wrong results. `number` determines the rank's
/// group, if ranks are divided into groups.
pub(crate) fn run(world: &Communicator, number: usize, settings: &Settings) -> Result<u8, Failure> {
    // Before ranks are bound, while all cores are visible.
    let machine = Machine::here();
    let bound = binding::bind(world, settings.bind, settings.launcher)?;
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

/// All ranks, and the communicator for this rank's calls.
struct Ranks<'a> {
    world: &'a Communicator,
    comm: &'a Communicator,
    color: u32,
    machine: &'a Machine,
    bound: &'a Bound,
}

impl Ranks<'_> {
    /// Checks that groups of these sizes can make the requested calls: all process one list of calls.
    fn check(&self, settings: &Settings) -> Result<(), Failure> {
        let sizes = share(self.world, &[self.comm.world_size() as u64])?;
        let least = sizes.iter().copied().min().unwrap_or(1) as usize;
        settings.check_root(least)?;
        let rooted = settings.collectives.iter().any(|collective| collective.is_rooted());
        if rooted && settings.root.is_none() && sizes.iter().any(|size| *size != sizes[0]) {
            return Err(Failure::usage(
                "-r -1: the groups of NCCL_TESTS_SPLIT differ in size, so some roots do not exist in every group; give one root",
            ));
        }
        let refusal = |collective: &Collective| sizes.iter().find_map(|size| collective.check_ranks(*size as usize).err());
        settings.collectives.iter().find_map(refusal).map_or(Ok(()), |refusal| Err(Failure::usage(refusal)))
    }

    /// Returns the same ranks with another communicator for the calls.
    #[cfg(feature = "cuda")]
    fn with<'b>(&'b self, comm: &'b Communicator) -> Ranks<'b> {
        Ranks { comm, ..*self }
    }
}

/// Runs in host memory.
fn on_host(ranks: &Ranks<'_>, settings: &Settings) -> Result<u8, Failure> {
    let comm = ranks.comm;
    let asked_of_device = settings.device.refusal.as_ref();
    let why = (settings.backend == BackendChoice::Auto).then(|| why_no_device(ranks.world));
    match (asked_of_device, &why) {
        (Some(asked), Some(why)) => return Err(Failure::unsupported(format!("{asked}, and there is no device: {why}"))),
        (Some(asked), None) => return Err(Failure::unsupported(asked)),
        (None, _) => {}
    }
    check_room(ranks, settings)?;
    let facts = RunFacts { on: On::Host { why }, ..facts(ranks, "")? };
    measure(ranks, &Host::new(comm, settings.device.register), settings, facts)
}

/// Runs in device memory.
#[cfg(feature = "cuda")]
fn on_device(ranks: &Ranks<'_>, device: collectives::Device, settings: &Settings) -> Result<u8, Failure> {
    if settings.columns.predictions {
        return Err(Failure::unsupported(EXPLAIN_ON_DEVICE));
    }
    // A group's communicator has the device of its ranks, and its own stream there.
    let device = ranks.comm.device().unwrap_or(device);
    let null_stream = device.context().default_stream();
    let on_null_stream = settings.device.null_stream.then(|| ranks.comm.with_stream(&null_stream));
    let ranks = ranks.with(on_null_stream.as_ref().unwrap_or(ranks.comm));
    let stream = if settings.device.null_stream { &null_stream } else { device.stream() };
    let backend = device::OnDevice::new(ranks.comm, &device, stream, settings)?;
    let facts = RunFacts { on: On::Device { nccl: backend.nccl_version() }, ..facts(&ranks, &backend.describe())? };
    let code = measure(&ranks, &backend, settings, facts)?;
    backend.close()?;
    Ok(code)
}

/// Returns why a communicator has no device.
fn why_no_device(comm: &Communicator) -> String {
    #[cfg(feature = "cuda")]
    return comm.why_no_device().unwrap_or_default();
    #[cfg(not(feature = "cuda"))]
    return gpus::count().err().filter(|_| comm.world_size() > 0).unwrap_or_default();
}

/// Checks that this host has enough memory for all its ranks' buffers.
fn check_room(ranks: &Ranks<'_>, settings: &Settings) -> Result<(), Failure> {
    let largest = largest_buffer(settings, ranks.comm.world_size());
    let needed = largest.saturating_mul(2 * ranks.world.local_world_size());
    match available_memory().filter(|available| needed > *available) {
        Some(available) => Err(Failure::internal(format!(
            "the ranks of this host need {} of memory, but only {} are free; use a smaller -e",
            human(needed),
            human(available)
        ))),
        None => Ok(()),
    }
}

/// Measures everything that was requested, on a backend.
fn measure<P: Backend>(ranks: &Ranks<'_>, backend: &P, settings: &Settings, facts: RunFacts) -> Result<u8, Failure> {
    let Ranks { world, comm, .. } = *ranks;
    let opened = (world.rank() == 0).then(|| Report::open(settings, facts, &expected_rows(settings, comm.world_size())));
    // All ranks learn that files cannot be created: a rank that continued could fail before rank 0 prints the reason.
    let is_hopeless = share(world, &[u64::from(matches!(opened, Some(Err(_))))])?.contains(&1);
    let report = opened.transpose()?;
    if is_hopeless {
        return Ok(0);
    }
    let checks = Checks::new(world);
    let pauses = settings.histogram.then(|| Pauses::observe(world)).transpose()?;
    let curve = Curve::default();
    let mut session = Session { world, comm, backend, settings, report, checks, curve, pauses, wrong_cells: 0 };
    let told = session.pauses.as_ref().map_or(String::new(), |pauses| format!("# {}\n", pauses.told()));
    session.remark(&told)?;
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

/// Collects the facts of all ranks. Every rank contributes its processor and, in `gpu`, its device; the rest is known.
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
