//! Which algorithm a call over links takes.

use std::sync::Arc;

use crate::call::Kind;
use crate::config::Config;
use crate::error::Result;
use crate::host::fold::Fold;
use crate::host::plan::Algorithm;
use crate::host::plan::cost::{CostTable, LinkClass, Order, Policy, Question};
use crate::host::plan::overrides::Overrides;
use crate::host::reduce::Kernel;

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
    pub(super) fn new(config: &Config, one_host: bool) -> Result<Self> {
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
    pub(super) fn algorithm(&self, kind: Kind, bytes: usize, participants: &Participants<'_>) -> Algorithm {
        let (n, order) = (participants.ranks.len(), self.order(participants.kernel));
        self.policy.choose(&Question { kind, bytes, element_bytes: participants.element_bytes(), n, class: self.class, order })
    }

    /// The choices between `n` hosts, in words.
    pub(super) fn explain(&self, n: usize) -> String {
        self.policy.explain(n, self.class).to_string()
    }

    /// The algorithm of a call of built-in ops on `bytes` in all, between `n` ranks.
    pub(super) fn name(&self, kind: Kind, bytes: usize, element_bytes: usize, n: usize) -> &'static str {
        let folds = matches!(kind, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter | Kind::ReduceScatterV);
        let order = if folds && self.reproducible { Order::Exact } else { Order::Any };
        let element_bytes = if folds { element_bytes } else { 1 };
        let question = Question { kind, bytes, element_bytes, n, class: self.class, order };
        self.policy.choose(&question).name()
    }

    /// The segments in which large messages travel.
    pub(super) fn segment(&self) -> usize {
        self.policy.segment_bytes(self.class)
    }
}

/// Who takes part in one exchange over links, and how elements are folded.
pub(super) struct Participants<'a> {
    /// The ranks, in the order in which they are numbered here.
    pub(super) ranks: Arc<[usize]>,
    /// This rank's place among them.
    pub(super) me: usize,
    pub(super) kernel: Option<&'a Kernel>,
}

impl Participants<'_> {
    pub(super) fn element_bytes(&self) -> usize {
        self.kernel.map_or(1, Kernel::element_bytes)
    }
}
