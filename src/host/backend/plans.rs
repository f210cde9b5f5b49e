//! Chooses the algorithm of a call over links, and keeps the plans of the latest calls: a training step makes the same
//! calls again and again.
//!
//! A plan is looked up by everything that it depends on. Each plan remembers the memory for which it was last checked.
//! So a call of a known shape neither allocates nor checks its plan again. Plans of `all_to_all_v` are not kept,
//! because their counts usually differ from call to call.

use std::sync::Arc;

use crate::base::tuning::plan::{KEPT, KEPT_BYTES, KEPT_BYTES_OF_ONE};
use crate::call::Collective;
use crate::call::algorithm::Algorithm;
use crate::config::Config;
use crate::host::engine::CheckedPlan;
use crate::host::fold::Fold;
use crate::host::plan::cost::{CostTable, LinkClass, Order, Policy, Question};
use crate::host::plan::{Blocks, Shape};
use crate::host::reduce::Kernel;

/// The choice of algorithms.
#[derive(Debug, Clone)]
pub(super) struct Chooser {
    policy: Policy,
    /// The kind of links between hosts.
    class: LinkClass,
    reproducible: bool,
}

impl Chooser {
    /// Creates the chooser from these settings. `one_host`: every rank is on this host, even if each one counts as a
    /// host of its own.
    pub(super) fn new(config: &Config, one_host: bool) -> Self {
        let class = if one_host { LinkClass::Loopback } else { LinkClass::Tcp };
        Self { policy: Policy::new(CostTable::default(), config.algorithms.clone()), class, reproducible: config.reproducible }
    }

    /// Whether contributions must be folded in rank order.
    pub(super) fn in_rank_order(&self, kernel: Option<&Kernel>) -> bool {
        self.order(kernel) != Order::Any
    }

    /// Returns the order that folds must keep.
    fn order(&self, kernel: Option<&Kernel>) -> Order {
        match kernel {
            Some(_) if self.reproducible => Order::Exact,
            Some(kernel) if !kernel.is_commutative() => Order::Ranks,
            _ => Order::Any,
        }
    }

    /// Returns the algorithm of a call on `bytes` in total.
    pub(super) fn algorithm(&self, kind: Collective, bytes: usize, participants: &Participants<'_>) -> Algorithm {
        let (n, order) = (participants.ranks.len(), self.order(participants.kernel));
        self.choose(kind, bytes, participants.element_bytes(), n, order)
    }

    /// Describes the choices between `n` hosts.
    pub(super) fn explain(&self, n: usize) -> String {
        self.policy.explain(n, self.class).to_string()
    }

    /// Returns the algorithm of a call with built-in ops on `bytes` in total, between `n` ranks.
    pub(super) fn algorithm_of_builtin(&self, kind: Collective, bytes: usize, element_bytes: usize, n: usize) -> Algorithm {
        let folds = kind.reduces();
        let order = if folds && self.reproducible { Order::Exact } else { Order::Any };
        self.choose(kind, bytes, if folds { element_bytes } else { 1 }, n, order)
    }

    fn choose(&self, kind: Collective, bytes: usize, element_bytes: usize, n: usize, order: Order) -> Algorithm {
        self.policy.choose(&Question { kind, bytes, element_bytes, n, class: self.class, order })
    }

    /// Returns the size of the segments of large messages, in bytes.
    pub(super) fn segment(&self) -> usize {
        self.policy.segment_bytes(self.class)
    }
}

/// The ranks that take part in one exchange over links, and the kernel that folds their elements.
pub(super) struct Participants<'a> {
    /// The ranks, in the order in which they are numbered here.
    pub(super) ranks: Arc<[usize]>,
    /// This rank's index among them.
    pub(super) me: usize,
    pub(super) kernel: Option<&'a Kernel>,
}

impl Participants<'_> {
    pub(super) fn element_bytes(&self) -> usize {
        self.kernel.map_or(1, Kernel::element_bytes)
    }
}

/// Plans by shape. If a new plan does not fit, the least recently used ones are dropped.
#[derive(Debug, Default)]
pub(super) struct Plans {
    kept: Vec<Kept>,
    /// The memory that they occupy in total, in bytes.
    bytes: usize,
    /// How many times a plan was used.
    uses: u64,
}

#[derive(Debug)]
struct Kept {
    /// If the blocks differ in length, the list here is empty, and the lengths are in `counts`.
    shape: Shape<'static>,
    counts: Box<[usize]>,
    plan: CheckedPlan,
    bytes: usize,
    /// The number of its latest use.
    used: u64,
}

impl Plans {
    /// Runs the plan of a shape, and keeps it if that succeeds.
    pub(super) fn run<E>(&mut self, shape: &Shape<'_>, run: impl FnOnce(&CheckedPlan) -> Result<(), E>) -> Result<(), E> {
        self.uses += 1;
        if let Some(kept) = self.kept.iter_mut().find(|kept| kept.is_of(shape)) {
            kept.used = self.uses;
            return run(&kept.plan);
        }
        let plan = CheckedPlan::new(shape.plan());
        run(&plan)?;
        self.keep(shape, plan);
        Ok(())
    }

    /// Keeps a plan, and drops others if it does not fit.
    fn keep(&mut self, shape: &Shape<'_>, plan: CheckedPlan) {
        let Some(kept) = Kept::new(shape, plan, self.uses).filter(|kept| kept.bytes <= KEPT_BYTES_OF_ONE) else { return };
        while self.kept.len() >= KEPT || self.bytes + kept.bytes > KEPT_BYTES {
            let Some((oldest, _)) = self.kept.iter().enumerate().min_by_key(|(_, kept)| kept.used) else { return };
            self.bytes -= self.kept.swap_remove(oldest).bytes;
        }
        self.bytes += kept.bytes;
        self.kept.push(kept);
    }
}

impl Kept {
    /// Returns `None` for shapes that are not kept.
    fn new(shape: &Shape<'_>, plan: CheckedPlan, used: u64) -> Option<Self> {
        let (blocks, counts) = match shape.blocks {
            _ if shape.receives.is_some() => return None,
            Blocks::Each(counts) => (Blocks::Each(&[]), counts),
            Blocks::Equal(len) => (Blocks::Equal(len), &[][..]),
            Blocks::Own { rank, len } => (Blocks::Own { rank, len }, &[][..]),
        };
        let bytes = size_of::<Self>() + size_of_val(counts) + plan.plan().bytes();
        let shape = Shape { blocks, receives: None, ..*shape };
        Some(Self { shape, counts: counts.into(), plan, bytes, used })
    }

    fn is_of(&self, shape: &Shape<'_>) -> bool {
        let blocks = if let Blocks::Each(_) = self.shape.blocks { Blocks::Each(&self.counts) } else { self.shape.blocks };
        Shape { blocks, ..self.shape } == *shape
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::plan::Plan;

    fn shape(blocks: Blocks<'_>) -> Shape<'_> {
        Shape {
            kind: Collective::AllGatherV,
            algorithm: Algorithm::Ring,
            n: 3,
            me: 1,
            root: 0,
            blocks,
            receives: None,
            element: 1,
            segment: 64 << 10,
            in_place: false,
        }
    }

    /// Runs a shape, and compares its plan with a newly made one. Returns whether the plan had been kept.
    fn was_there(plans: &mut Plans, shape: &Shape<'_>) -> bool {
        let places: Vec<*const Plan> = plans.kept.iter().map(|kept| std::ptr::from_ref(kept.plan.plan())).collect();
        let mut found = None;
        let run = |plan: &CheckedPlan| {
            assert_eq!(*plan.plan(), shape.plan(), "{shape:?}");
            found = Some(places.contains(&std::ptr::from_ref(plan.plan())));
            Ok::<(), ()>(())
        };
        plans.run(shape, run).unwrap();
        assert!(plans.kept.len() <= KEPT && plans.bytes <= KEPT_BYTES);
        assert_eq!(plans.bytes, plans.kept.iter().map(|kept| kept.bytes).sum::<usize>());
        found.unwrap()
    }

    #[test]
    fn every_part_of_a_shape_has_a_plan_of_its_own() {
        let first = shape(Blocks::Each(&[4, 8, 12]));
        let others = [
            Shape { kind: Collective::GatherV, ..first },
            Shape { algorithm: Algorithm::Direct, ..first },
            Shape { n: 2, ..first },
            Shape { me: 2, ..first },
            Shape { root: 1, ..first },
            Shape { blocks: Blocks::Each(&[4, 8, 13]), ..first },
            Shape { blocks: Blocks::Each(&[4, 8, 12, 0]), ..first },
            Shape { blocks: Blocks::Equal(8), ..first },
            Shape { blocks: Blocks::Own { rank: 1, len: 8 }, ..first },
            Shape { element: 4, ..first },
            Shape { segment: 4, ..first },
            Shape { in_place: true, ..first },
        ];
        let mut plans = Plans::default();
        assert!(!was_there(&mut plans, &first));
        for other in others {
            assert!(!was_there(&mut plans, &other), "{other:?}");
            assert!(was_there(&mut plans, &other), "{other:?}");
            assert!(was_there(&mut plans, &first), "{other:?}");
        }
    }

    #[test]
    fn the_plan_that_was_not_used_for_longest_makes_room() {
        let mut plans = Plans::default();
        let of = |len: usize| shape(Blocks::Equal(len));
        (0..KEPT).for_each(|len| assert!(!was_there(&mut plans, &of(len))));
        assert!(was_there(&mut plans, &of(0)));
        assert!(!was_there(&mut plans, &of(KEPT)));
        assert!(was_there(&mut plans, &of(0)) && !was_there(&mut plans, &of(1)));
        assert_eq!(plans.kept.len(), KEPT);
    }

    #[test]
    fn plans_take_no_more_than_a_bounded_number_of_bytes() {
        let mut plans = Plans::default();
        // A segment for each byte: plans of a few hundred steps.
        let of = |len: usize| Shape { segment: 1, ..shape(Blocks::Equal(len)) };
        let mut pushed_out = false;
        for len in 100..100 + KEPT {
            was_there(&mut plans, &of(len));
            pushed_out |= plans.kept.len() < len - 99;
        }
        assert!(pushed_out, "{} plans of {} B", plans.kept.len(), plans.bytes);
        let before = plans.kept.len();
        let huge = of(100_000);
        assert!(huge.plan().bytes() > KEPT_BYTES_OF_ONE);
        assert!(!was_there(&mut plans, &huge) && !was_there(&mut plans, &huge));
        assert_eq!(plans.kept.len(), before);
    }

    #[test]
    fn what_fails_or_varies_is_not_kept() {
        let mut plans = Plans::default();
        assert_eq!(plans.run(&shape(Blocks::Equal(8)), |_| Err("told")), Err("told"));
        assert!(!was_there(&mut plans, &shape(Blocks::Equal(8))));
        let varying = Shape { kind: Collective::AllToAllV, receives: Some(&[8, 8, 8]), ..shape(Blocks::Each(&[8, 8, 8])) };
        assert!(!was_there(&mut plans, &varying) && !was_there(&mut plans, &varying));
    }
}
