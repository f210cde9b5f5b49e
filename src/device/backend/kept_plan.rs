//! The plan of the last call that took more than one step. A program often makes the same call again, and then nothing
//! is planned or allocated.

use std::sync::Arc;

use crate::call::job::Operands;
use crate::call::op::ReduceOp;
use crate::call::{BlockLayout, Call};
use crate::device::plan::{Job, Plan, Reduction, Step, Transfer};

/// The steps of a plan.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Steps {
    pub(super) list: Arc<[Step]>,
    /// Whether the steps use the backend's memory or kernels.
    pub(super) uses_room: bool,
}

impl Steps {
    /// Returns the steps of a plan.
    pub(super) fn of(plan: Plan) -> Self {
        match plan {
            Plan::Nothing => Self::joined(Vec::new(), Vec::new(), Vec::new()),
            Plan::One(transfer) => Self::joined(vec![transfer], Vec::new(), Vec::new()),
            Plan::Group { transfers, after } => Self::joined(transfers, after, Vec::new()),
            Plan::Steps(steps) => Self { list: steps.into(), uses_room: true },
        }
    }

    /// Joins a group of transfers (which may be empty), this rank's own work, and steps that use the backend's memory.
    pub(super) fn joined(transfers: Vec<Transfer>, after: Vec<Step>, rest: Vec<Step>) -> Self {
        let uses_room = !after.is_empty() || !rest.is_empty();
        Self { list: [Step::Transfer(transfers)].into_iter().chain(after).chain(rest).collect(), uses_room }
    }
}

/// A plan's steps, and the inputs that they follow from on one backend.
#[derive(Debug)]
pub(super) struct KeptPlan {
    call: Call,
    memory: Operands<u64, u64>,
    layout: BlockLayout,
    in_place: bool,
    op: Option<ReduceOp>,
    steps: Steps,
}

impl KeptPlan {
    /// Keeps the plan of a job. Returns `None` if the plan also depends on other inputs: custom kernels come and go,
    /// and lists contain addresses.
    pub(super) fn of(job: &Job, steps: &Steps) -> Option<Self> {
        let (op, steps) = (known_op(job)?, steps.clone());
        Some(Self { call: job.call, memory: job.memory, layout: job.layout.clone(), in_place: job.in_place, op, steps })
    }

    /// Returns the steps if they are valid for this job too.
    pub(super) fn steps(&self, job: &Job) -> Option<Steps> {
        // The number is the only part of a call that a plan does not depend on.
        let call = Call { sequence: self.call.sequence, ..job.call };
        let place = |memory: &Operands<u64, u64>| (memory.source, memory.source_len, memory.destination, memory.destination_len);
        let is_same = self.call == call && self.in_place == job.in_place && place(&self.memory) == place(&job.memory);
        let is_same = is_same && known_op(job).is_some_and(|op| same_op(self.op, op)) && self.layout == job.layout;
        is_same.then(|| self.steps.clone())
    }
}

/// Returns the built-in op of a job, or `Some(None)` if the job does not fold; `None` for other jobs.
fn known_op(job: &Job) -> Option<Option<ReduceOp>> {
    match &job.reduction {
        _ if job.lists.is_some() => None,
        Some(Reduction::User(_)) => None,
        Some(Reduction::Builtin(op)) => Some(Some(*op)),
        None => Some(None),
    }
}

/// Whether two ops give the same result in every bit.
fn same_op(first: Option<ReduceOp>, second: Option<ReduceOp>) -> bool {
    match (first, second) {
        // 0 and -0 are equal, but give different results.
        (Some(ReduceOp::PreMulSum(first)), Some(ReduceOp::PreMulSum(second))) => first.to_bits() == second.to_bits(),
        (first, second) => first == second,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::call::Collective;
    use crate::call::element::DType;
    use crate::call::element::TypeTag;

    fn job(op: ReduceOp) -> Job {
        let (element, kind) = (TypeTag::Scalar(DType::F32), Collective::AllReduce);
        Job {
            call: Call { kind, op: 1, element, count: 4, root: None, counts_hash: 0, sequence: 7 },
            memory: Operands { source: 4096, source_len: 16, destination: 8192, destination_len: 16 },
            layout: BlockLayout::Equal(16),
            element_bytes: 4,
            lists: None,
            reduction: Some(Reduction::Builtin(op)),
            in_place: false,
        }
    }

    #[test]
    fn a_plan_is_kept_for_the_same_call_alone() {
        let same = || job(ReduceOp::PreMulSum(0.0));
        let steps = Steps { list: vec![Step::Transfer(Vec::new())].into(), uses_room: true };
        let kept = KeptPlan::of(&same(), &steps).unwrap();
        let later = Job { call: Call { sequence: 8, ..same().call }, ..same() };
        assert_eq!((kept.steps(&same()), kept.steps(&later)), (Some(steps.clone()), Some(steps)));
        let others: [fn(&mut Job); 9] = [
            |job| job.reduction = Some(Reduction::Builtin(ReduceOp::PreMulSum(-0.0))),
            |job| job.reduction = Some(Reduction::Builtin(ReduceOp::Sum)),
            |job| job.reduction = None,
            |job| job.call.count = 5,
            |job| job.call.element = TypeTag::Scalar(DType::I32),
            |job| job.memory.source += 16,
            |job| job.memory.destination_len = 12,
            |job| job.layout = BlockLayout::Equal(12),
            |job| job.in_place = true,
        ];
        for (at, change) in others.into_iter().enumerate() {
            let mut other = same();
            change(&mut other);
            assert!(kept.steps(&other).is_none(), "change {at}");
        }
    }
}
