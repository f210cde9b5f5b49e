//! Calls that run over links, by a plan: between ranks of different hosts, or of several kinds.

#![expect(unsafe_code, reason = "hands the caller's buffers to the engine")]

use super::HostPlane;
use super::job::{Job, Operands};
use crate::call::{Call, Kind, Layout};
use crate::config::Config;
use crate::deadline::Deadline;
use crate::error::Result as CrateResult;
use crate::host::engine::{Memory, Request};
use crate::host::fold::Fold;
use crate::host::notice::{Notice, Stop};
use crate::host::plan::cost::{CostTable, LinkClass, LinkCost, Order, Policy, Question};
use crate::host::plan::overrides::Overrides;
use crate::host::plan::{self, Algorithm, Blocks, Plan};
use crate::host::reduce::Kernel;
use crate::host::shm::{Group, Task};

/// Decides how a call is done.
#[derive(Debug, Clone)]
pub(super) struct Chooser {
    policy: Policy,
    /// What the links between hosts are.
    class: LinkClass,
    reproducible: bool,
}

impl Chooser {
    /// As the settings say. `one_host`: every rank is on this one, though they may be taken for hosts.
    pub(super) fn new(config: &Config, one_host: bool) -> CrateResult<Self> {
        let overrides = config.algorithm.as_deref().map(Overrides::parse).transpose()?.unwrap_or_default();
        let class = if one_host { LinkClass::Loopback } else { LinkClass::Tcp };
        Ok(Self { policy: Policy::new(CostTable::default(), overrides), class, reproducible: config.reproducible })
    }

    /// Whether contributions must be folded in rank order.
    pub(super) fn in_rank_order(&self, kernel: Option<&Kernel>) -> bool {
        self.order(kernel) != Order::Any
    }

    /// What folds have to promise.
    fn order(&self, kernel: Option<&Kernel>) -> Order {
        match kernel {
            Some(_) if self.reproducible => Order::Exact,
            Some(kernel) if !kernel.is_commutative() => Order::Ranks,
            _ => Order::Any,
        }
    }

    /// The algorithm of a call on `bytes` in all.
    fn algorithm(&self, kind: Kind, bytes: usize, leg: &Leg<'_>) -> Algorithm {
        let (n, order) = (leg.participants.len(), self.order(leg.kernel));
        self.policy.choose(&Question { kind, bytes, element_bytes: leg.element_bytes(), n, class: self.class, order })
    }

    /// The choices between `n` hosts, in words.
    pub(super) fn explain(&self, n: usize) -> String {
        self.policy.explain(n, self.class).to_string()
    }

    /// What a link is taken to cost.
    pub(super) fn cost(&self) -> LinkCost {
        self.policy.cost(self.class)
    }

    /// The algorithm of a call of built-in ops between `n` ranks, and how many nanoseconds it should take where a link costs this.
    pub(super) fn predict(&self, task: &Task, n: usize, cost: &LinkCost) -> Option<(&'static str, f64)> {
        let Task { kind, bytes, element_bytes, .. } = *task;
        let folds = matches!(kind, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter | Kind::ReduceScatterV);
        let order = if folds && self.reproducible { Order::Exact } else { Order::Any };
        let element_bytes = if folds { element_bytes } else { 1 };
        let question = Question { kind, bytes, element_bytes, n, class: self.class, order };
        let algorithm = self.policy.choose(&question);
        Some((algorithm.name(), Policy::nanoseconds(algorithm, &question, cost)))
    }

    /// The segments in which large messages travel.
    fn segment(&self) -> usize {
        self.policy.segment_bytes(self.class)
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
    /// How many take part.
    fn n(&self) -> usize {
        self.participants.len()
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
        let (me, root) = (self.rank, call.root.unwrap_or_default() as usize);
        let (own, element, segment) = (job.layout.block(me).1, job.element_bytes, self.chooser.segment());
        // Of a gather or scatter with unequal blocks, the others know their own alone.
        let mut only_own = Vec::new();
        let blocks = match &job.layout {
            Layout::Equal(bytes) => Blocks::Equal(*bytes),
            Layout::Blocks(blocks) => Blocks::Each(blocks),
            Layout::Own(bytes) => {
                only_own.resize(n, 0);
                only_own[me] = *bytes;
                Blocks::Each(&only_own)
            }
            Layout::Pairs { send, .. } => Blocks::Each(send),
        };
        let choose = |bytes: usize| self.chooser.algorithm(call.kind, bytes, &leg);
        let plan = match call.kind {
            Kind::Barrier => plan::barrier(n, me),
            Kind::AllReduce => return self.all_reduce_between(&leg, operands, own, call, deadline),
            Kind::Reduce => return self.reduce_between(&leg, operands, own, root, call, deadline),
            Kind::Broadcast => return self.broadcast_between(&leg, operands, own, root, call, deadline),
            Kind::AllGather | Kind::AllGatherV => plan::all_gather(choose(operands.destination_len), n, me, blocks, segment),
            Kind::ReduceScatter | Kind::ReduceScatterV => {
                plan::reduce_scatter(choose(operands.source_len), n, me, blocks, element, segment)
            }
            Kind::Gather | Kind::GatherV => plan::gather(n, me, root, blocks),
            Kind::Scatter | Kind::ScatterV => plan::scatter(n, me, root, blocks),
            Kind::AllToAll => plan::all_to_all(n, me, blocks, blocks, job.in_place, segment),
            Kind::AllToAllV => match &job.layout {
                Layout::Pairs { receive, .. } => plan::all_to_all(n, me, blocks, Blocks::Each(receive), false, segment),
                _ => return Err(Notice::Failed { rank: me as u32 }.into()),
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
        let algorithm = self.chooser.algorithm(Kind::AllReduce, bytes, leg);
        let plan = plan::all_reduce(algorithm, leg.n(), leg.me, bytes, leg.element_bytes(), self.chooser.segment());
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
        let algorithm = self.chooser.algorithm(Kind::Reduce, bytes, leg);
        let plan = plan::reduce(algorithm, leg.n(), leg.me, root, bytes, leg.element_bytes(), self.chooser.segment());
        let plan = plan::agreed(plan, leg.n(), leg.me);
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
        let algorithm = self.chooser.algorithm(Kind::Broadcast, bytes, leg);
        let plan = plan::broadcast(algorithm, leg.n(), leg.me, root, bytes, self.chooser.segment());
        self.execute(&plan, leg, operands, call, deadline)
    }

    /// Barrier among the participants of a leg.
    pub(super) fn barrier_between(&mut self, leg: &Leg<'_>, call: &Call, deadline: &Deadline) -> Result<(), Stop> {
        let nothing = Operands { source: std::ptr::null(), source_len: 0, destination: std::ptr::null_mut(), destination_len: 0 };
        self.execute(&plan::barrier(leg.n(), leg.me), leg, nothing, call, deadline)
    }

    /// Runs a plan.
    fn execute(&mut self, plan: &Plan, leg: &Leg<'_>, operands: Operands, call: &Call, deadline: &Deadline) -> Result<(), Stop> {
        let Operands { source, source_len, destination, destination_len } = operands;
        let group = self.group.as_ref();
        let mut interrupted = || group.and_then(Group::notice);
        let request = Request {
            plan,
            participants: &leg.participants,
            // SAFETY: these are a job's buffers, scratch memory of the plane's, or null and of length 0. Both hold what their lengths say,
            // initialised, until this call returns: a job's are made of borrows (`prepare`), and nothing reserves scratch meanwhile. They
            // are aligned to their elements: borrows of these, blocks of whole elements of them, or 64 bytes, which is what folds ask of
            // scratch. In place one is the other, or a block of it (`Job::narrowed`); nobody but the engine uses either meanwhile.
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
