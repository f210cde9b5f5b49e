//! Calls that run over links, by a plan: between ranks of different hosts, or of several kinds.

#![expect(unsafe_code, reason = "hands the caller's buffers to the engine")]

use super::HostPlane;
use super::job::{Job, Layout, Operands};
use crate::call::{Call, Kind};
use crate::config::Config;
use crate::deadline::Deadline;
use crate::error::Result as CrateResult;
use crate::host::engine::{Memory, Request};
use crate::host::fold::Fold;
use crate::host::notice::{Notice, Stop};
use crate::host::plan::{self, Algorithm, Choice, Place, Plan, SEGMENT_BYTES};
use crate::host::reduce::Kernel;
use crate::host::shm::Group;

/// Decides how a call is done.
#[derive(Debug, Clone)]
pub(super) struct Chooser {
    choice: Choice,
    reproducible: bool,
}

impl Chooser {
    /// As the settings say.
    pub(super) fn new(config: &Config) -> CrateResult<Self> {
        Ok(Self { choice: Choice::new(config.algorithm.as_deref())?, reproducible: config.reproducible })
    }

    /// Whether contributions must be folded in rank order, all at once.
    pub(super) fn in_rank_order(&self, kernel: Option<&Kernel>) -> bool {
        kernel.is_some_and(|kernel| self.reproducible || !kernel.is_commutative())
    }

    /// The algorithm of a call.
    fn algorithm(&self, kind: Kind, bytes: usize, n: usize, kernel: Option<&Kernel>) -> Algorithm {
        if self.in_rank_order(kernel) {
            return Algorithm::Direct;
        }
        self.choice.choose(kind, bytes, n)
    }
}

/// Who takes part in one exchange over links, and how elements are folded.
pub(super) struct Leg<'a> {
    /// The ranks, in the order in which they are numbered here.
    pub(super) participants: Vec<usize>,
    /// This rank's place among them.
    pub(super) me: usize,
    pub(super) kernel: Option<&'a Kernel>,
}

impl Leg<'_> {
    fn place(&self) -> Place {
        Place { n: self.participants.len(), me: self.me }
    }

    fn element_bytes(&self) -> usize {
        self.kernel.map_or(1, Kernel::element_bytes)
    }
}

impl HostPlane {
    /// Runs a call over links between all ranks.
    pub(super) fn run_flat(&mut self, job: &Job, call: &Call, deadline: &Deadline) -> Result<(), Stop> {
        let n = self.peers.len();
        let leg = Leg { participants: (0..n).collect(), me: self.rank, kernel: job.kernel.as_ref() };
        let operands = job.narrowed(self.rank);
        let root = call.root.unwrap_or_default() as usize;
        let lengths = || job.layout.blocks(n);
        let own = job.layout.block(self.rank).1;
        let at_root = (self.rank == root).then(lengths);
        let (place, element) = (leg.place(), job.element_bytes);
        let choose = |bytes: usize| self.chooser.algorithm(call.kind, bytes, n, leg.kernel);
        let plan = match call.kind {
            Kind::Barrier => plan::barrier(place),
            Kind::AllReduce => return self.all_reduce_between(&leg, operands, own, call, deadline),
            Kind::Reduce => return self.reduce_between(&leg, operands, own, root, call, deadline),
            Kind::Broadcast => return self.broadcast_between(&leg, operands, own, root, call, deadline),
            Kind::AllGather | Kind::AllGatherV => plan::all_gather(choose(operands.destination_len), place, &lengths(), SEGMENT_BYTES),
            Kind::ReduceScatter | Kind::ReduceScatterV => {
                plan::reduce_scatter(choose(operands.source_len), place, &lengths(), element, SEGMENT_BYTES)
            }
            Kind::Gather | Kind::GatherV => plan::gather(place, own, at_root.as_deref(), root),
            Kind::Scatter | Kind::ScatterV => plan::scatter(place, own, at_root.as_deref(), root),
            Kind::AllToAll => plan::all_to_all(place, &lengths(), &lengths(), job.is_in_place()),
            Kind::AllToAllV => match &job.layout {
                Layout::Pairs { send, receive } => plan::all_to_all(place, send, receive, false),
                _ => return Err(Notice::Failed { rank: self.rank as u32 }.into()),
            },
        };
        self.execute(&plan, &leg, operands, call, deadline)
    }

    /// All-reduce among the participants of a leg.
    pub(super) fn all_reduce_between(
        &mut self,
        leg: &Leg<'_>,
        operands: Operands,
        bytes: usize,
        call: &Call,
        deadline: &Deadline,
    ) -> Result<(), Stop> {
        let place = leg.place();
        let algorithm = self.chooser.algorithm(Kind::AllReduce, bytes, place.n, leg.kernel);
        let plan = plan::all_reduce(algorithm, place, bytes, leg.element_bytes(), SEGMENT_BYTES);
        self.execute(&plan, leg, operands, call, deadline)
    }

    /// Reduce among the participants of a leg, to the one numbered `root`.
    pub(super) fn reduce_between(
        &mut self,
        leg: &Leg<'_>,
        operands: Operands,
        bytes: usize,
        root: usize,
        call: &Call,
        deadline: &Deadline,
    ) -> Result<(), Stop> {
        let place = leg.place();
        let algorithm = self.chooser.algorithm(Kind::Reduce, bytes, place.n, leg.kernel);
        let plan = plan::reduce(algorithm, place, bytes, leg.element_bytes(), SEGMENT_BYTES, root);
        self.execute(&plan, leg, operands, call, deadline)
    }

    /// Broadcast among the participants of a leg, from the one numbered `root`.
    pub(super) fn broadcast_between(
        &mut self,
        leg: &Leg<'_>,
        operands: Operands,
        bytes: usize,
        root: usize,
        call: &Call,
        deadline: &Deadline,
    ) -> Result<(), Stop> {
        let place = leg.place();
        let algorithm = self.chooser.algorithm(Kind::Broadcast, bytes, place.n, None);
        let plan = plan::broadcast(algorithm, place, bytes, SEGMENT_BYTES, root);
        self.execute(&plan, leg, operands, call, deadline)
    }

    /// Barrier among the participants of a leg.
    pub(super) fn barrier_between(&mut self, leg: &Leg<'_>, call: &Call, deadline: &Deadline) -> Result<(), Stop> {
        let nothing = Operands { source: std::ptr::null(), source_len: 0, destination: std::ptr::null_mut(), destination_len: 0 };
        self.execute(&plan::barrier(leg.place()), leg, nothing, call, deadline)
    }

    /// Runs a plan.
    fn execute(&mut self, plan: &Plan, leg: &Leg<'_>, operands: Operands, call: &Call, deadline: &Deadline) -> Result<(), Stop> {
        let Operands { source, source_len, destination, destination_len } = operands;
        let group = self.group.as_ref();
        let mut interrupted = || group.and_then(Group::notice);
        let request = Request {
            plan,
            participants: &leg.participants,
            // SAFETY: the buffers of a job, or scratch memory of the plane's, which live until this call returns; aligned to their
            // elements, of which they hold whole ones; the same or apart.
            memory: unsafe { Memory::new(source, source_len, destination, destination_len) },
            call,
            fold: leg.kernel.map(|kernel| kernel as &dyn Fold),
            deadline,
            health: &self.health,
            interrupted: &mut interrupted,
        };
        self.engine.run(request, &mut self.links)
    }
}
