//! The plans of the latest calls over links: a training step makes the same calls again and again.
//!
//! A plan is looked for by the whole of what it depends on, and was checked for the memory that it last ran on, so a call of a known shape neither
//! allocates nor looks through its plan. Those of `all_to_all_v` are not kept: their counts differ from call to call as a rule.

use crate::host::engine::CheckedPlan;
use crate::host::plan::{Blocks, Shape};

/// How many plans are kept.
const MOST: usize = 32;
/// How many bytes they take in all, and how many one of them: to make a larger one takes no time beside the transfer.
const MOST_BYTES: usize = 1 << 20;
const MOST_BYTES_OF_ONE: usize = MOST_BYTES / 8;

/// Plans by shape; the one that was not used for longest makes room.
#[derive(Debug, Default)]
pub(super) struct Plans {
    kept: Vec<Kept>,
    /// What they take in all.
    bytes: usize,
    /// How often one was used.
    uses: u64,
}

#[derive(Debug)]
struct Kept {
    /// With blocks that differ, these are `counts`.
    shape: Shape<'static>,
    counts: Box<[usize]>,
    plan: CheckedPlan,
    bytes: usize,
    /// The use that was its latest.
    used: u64,
}

impl Plans {
    /// Has the plan of a shape run; keeps it where that went well.
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

    /// Keeps a plan, and as many of the others as there is room for.
    fn keep(&mut self, shape: &Shape<'_>, plan: CheckedPlan) {
        let Some(kept) = Kept::new(shape, plan, self.uses).filter(|kept| kept.bytes <= MOST_BYTES_OF_ONE) else { return };
        while self.kept.len() >= MOST || self.bytes + kept.bytes > MOST_BYTES {
            let Some((oldest, _)) = self.kept.iter().enumerate().min_by_key(|(_, kept)| kept.used) else { return };
            self.bytes -= self.kept.swap_remove(oldest).bytes;
        }
        self.bytes += kept.bytes;
        self.kept.push(kept);
    }
}

impl Kept {
    /// `None` for shapes that are not kept.
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
    use crate::call::Kind;
    use crate::host::plan::{Algorithm, Plan};

    fn shape(blocks: Blocks<'_>) -> Shape<'_> {
        Shape {
            kind: Kind::AllGatherV,
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

    /// Runs a shape; says whether its plan was there, having compared it with one made anew.
    fn was_there(plans: &mut Plans, shape: &Shape<'_>) -> bool {
        let places: Vec<*const Plan> = plans.kept.iter().map(|kept| std::ptr::from_ref(kept.plan.plan())).collect();
        let mut found = None;
        let run = |plan: &CheckedPlan| {
            assert_eq!(*plan.plan(), shape.plan(), "{shape:?}");
            found = Some(places.contains(&std::ptr::from_ref(plan.plan())));
            Ok::<(), ()>(())
        };
        plans.run(shape, run).unwrap();
        assert!(plans.kept.len() <= MOST && plans.bytes <= MOST_BYTES);
        assert_eq!(plans.bytes, plans.kept.iter().map(|kept| kept.bytes).sum::<usize>());
        found.unwrap()
    }

    #[test]
    fn every_part_of_a_shape_has_a_plan_of_its_own() {
        let first = shape(Blocks::Each(&[4, 8, 12]));
        let others = [
            Shape { kind: Kind::GatherV, ..first },
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
        (0..MOST).for_each(|len| assert!(!was_there(&mut plans, &of(len))));
        assert!(was_there(&mut plans, &of(0)));
        assert!(!was_there(&mut plans, &of(MOST)));
        assert!(was_there(&mut plans, &of(0)) && !was_there(&mut plans, &of(1)));
        assert_eq!(plans.kept.len(), MOST);
    }

    #[test]
    fn plans_take_no_more_than_a_bounded_number_of_bytes() {
        let mut plans = Plans::default();
        // A segment for each so many bytes: plans of a few hundred steps.
        let of = |len: usize| Shape { segment: 1, ..shape(Blocks::Equal(len)) };
        let mut pushed_out = false;
        for len in 100..100 + MOST {
            was_there(&mut plans, &of(len));
            pushed_out |= plans.kept.len() < len - 99;
        }
        assert!(pushed_out, "{} plans of {} B", plans.kept.len(), plans.bytes);
        let before = plans.kept.len();
        let huge = of(100_000);
        assert!(huge.plan().bytes() > MOST_BYTES_OF_ONE);
        assert!(!was_there(&mut plans, &huge) && !was_there(&mut plans, &huge));
        assert_eq!(plans.kept.len(), before);
    }

    #[test]
    fn what_fails_or_varies_is_not_kept() {
        let mut plans = Plans::default();
        assert_eq!(plans.run(&shape(Blocks::Equal(8)), |_| Err("told")), Err("told"));
        assert!(!was_there(&mut plans, &shape(Blocks::Equal(8))));
        let varying = Shape { kind: Kind::AllToAllV, receives: Some(&[8, 8, 8]), ..shape(Blocks::Each(&[8, 8, 8])) };
        assert!(!was_there(&mut plans, &varying) && !was_there(&mut plans, &varying));
    }
}
