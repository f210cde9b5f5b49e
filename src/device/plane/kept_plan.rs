//! The plan of the last call that took more than one step. A program often makes the same call again, and then nothing is planned or allocated.

use crate::ReduceOp;
use crate::call::{BlockLayout, Call};
use crate::device::plan::{Job, Reduction, Step};
use crate::job::Operands;

/// A plan, and what it follows from on one plane.
#[derive(Debug)]
pub(super) struct KeptPlan {
    call: Call,
    memory: Operands<u64, u64>,
    layout: BlockLayout,
    in_place: bool,
    op: Option<ReduceOp>,
    steps: Vec<Step>,
}

impl KeptPlan {
    /// Keeps the steps of a job, unless it is one whose plan follows from more: kernels of the caller's come and go, and lists have lengths of
    /// their own.
    pub(super) fn of(job: &Job, steps: Vec<Step>) -> Option<Self> {
        let op = match &job.reduction {
            Some(Reduction::User(_)) => return None,
            Some(Reduction::Builtin(op)) => Some(*op),
            None => None,
        };
        let keeps = job.lists.is_none();
        let kept = || Self { call: job.call, memory: job.memory, layout: job.layout.clone(), in_place: job.in_place, op, steps };
        keeps.then(kept)
    }

    /// Whether it is this job's plan, too.
    pub(super) fn is_of(&self, job: &Job) -> bool {
        let op = match &job.reduction {
            Some(Reduction::User(_)) => return false,
            Some(Reduction::Builtin(op)) => Some(*op),
            None => None,
        };
        // The number is the one thing of a call that a plan does not know.
        let call = Call { sequence: self.call.sequence, ..job.call };
        let place = |memory: &Operands<u64, u64>| (memory.source, memory.source_len, memory.destination, memory.destination_len);
        let is_same = self.call == call && self.in_place == job.in_place && place(&self.memory) == place(&job.memory);
        is_same && same_op(self.op, op) && job.lists.is_none() && self.layout == job.layout
    }

    pub(super) fn steps(&self) -> &[Step] {
        &self.steps
    }
}

/// Whether two ops do the same to every bit.
fn same_op(first: Option<ReduceOp>, second: Option<ReduceOp>) -> bool {
    match (first, second) {
        // 0 and -0 are equal, and do not give the same.
        (Some(ReduceOp::PreMulSum(first)), Some(ReduceOp::PreMulSum(second))) => first.to_bits() == second.to_bits(),
        (first, second) => first == second,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::call::Collective;
    use crate::element::TypeTag;

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
        let kept = KeptPlan::of(&job(ReduceOp::PreMulSum(0.0)), vec![Step::Transfer(Vec::new())]).unwrap();
        let same = job(ReduceOp::PreMulSum(0.0));
        assert!(kept.is_of(&same) && kept.is_of(&Job { call: Call { sequence: 8, ..same.call }, ..job(ReduceOp::PreMulSum(0.0)) }));
        assert_eq!(kept.steps(), [Step::Transfer(Vec::new())]);
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
            let mut other = job(ReduceOp::PreMulSum(0.0));
            change(&mut other);
            assert!(!kept.is_of(&other), "change {at}");
        }
    }
}
