//! Calls that run over links, by a plan: between ranks of different hosts, or of several kinds.

#![expect(unsafe_code, reason = "hands the caller's buffers to the engine")]

use super::HostPlane;
use super::chooser::Participants;
use super::job::{Job, Operands};
use crate::call::{BlockLayout, Call, Kind};
use crate::deadline::Deadline;
use crate::host::abort_reason::Interrupted;
use crate::host::engine::{Execution, Memory};
use crate::host::fold::Fold;
use crate::host::plan::{Blocks, Shape};
use crate::host::shm::Group;

impl HostPlane {
    /// Runs a call over links between all ranks.
    pub(super) fn run_inter_host(&mut self, job: &Job, call: &Call, deadline: &Deadline) -> Result<(), Interrupted> {
        let participants = Participants { ranks: self.topology.everyone(), me: self.rank, kernel: job.kernel.as_ref() };
        let operands = job.narrowed(self.rank);
        let own = job.layout.block(self.rank).1;
        let bytes = match call.kind {
            Kind::AllGather | Kind::AllGatherV => operands.destination_len,
            Kind::ReduceScatter | Kind::ReduceScatterV => operands.source_len,
            _ => own,
        };
        let (blocks, receives) = match &job.layout {
            BlockLayout::Equal(bytes) => (Blocks::Equal(*bytes), None),
            BlockLayout::Blocks(blocks) => (Blocks::Each(blocks), None),
            BlockLayout::Own(len) => (Blocks::Own { rank: self.rank, len: *len }, None),
            BlockLayout::Pairs { send, receive, .. } => (Blocks::Each(send), Some(&receive[..])),
        };
        let in_place = job.in_place && call.kind == Kind::AllToAll;
        let root = call.root.unwrap_or_default() as usize;
        let shape = Shape { blocks, receives, in_place, ..self.shape(call.kind, &participants, bytes, root) };
        self.execute(&shape, &participants, operands, call, deadline)
    }

    /// Runs a call among the participants, on vectors of `bytes`, where there is a root to or from the one numbered `root`.
    pub(super) fn run_leg(
        &mut self,
        participants: &Participants<'_>,
        operands: Operands,
        bytes: usize,
        root: usize,
        call: &Call,
        deadline: &Deadline,
    ) -> Result<(), Interrupted> {
        let shape = self.shape(call.kind, participants, bytes, root);
        self.execute(&shape, participants, operands, call, deadline)
    }

    /// The shape of a call on `bytes` in all.
    fn shape(&self, kind: Kind, participants: &Participants<'_>, bytes: usize, root: usize) -> Shape<'static> {
        Shape {
            kind,
            algorithm: self.chooser.algorithm(kind, bytes, participants),
            n: participants.ranks.len(),
            me: participants.me,
            root,
            blocks: Blocks::Equal(bytes),
            receives: None,
            element: participants.element_bytes(),
            segment: self.chooser.segment(),
            in_place: false,
        }
    }

    /// Runs the plan of a shape.
    fn execute(
        &mut self,
        shape: &Shape<'_>,
        participants: &Participants<'_>,
        operands: Operands,
        call: &Call,
        deadline: &Deadline,
    ) -> Result<(), Interrupted> {
        let Operands { source, source_len, destination, destination_len } = operands;
        let Self { plans, engine, links, group, health, recorder, .. } = self;
        let mut interrupted = || group.as_ref().and_then(Group::abort_reason);
        plans.run(shape, |plan| {
            let request = Execution {
                plan,
                participants: &participants.ranks,
                // SAFETY: these are a job's buffers, scratch memory of the plane's, or null and of length 0. Both hold what their lengths say,
                // initialised, until this call returns: a job's are made of borrows (`prepare`), and nothing reserves scratch meanwhile. They
                // are aligned to their elements: borrows of these, blocks of whole elements of them, or 64 bytes, which is what folds ask of
                // scratch. In place one is the other, or a block of it (`Job::narrowed`); nobody but the engine uses either meanwhile.
                memory: unsafe { Memory::new(source, source_len, destination, destination_len) },
                call,
                fold: participants.kernel.map(|kernel| kernel as &dyn Fold),
                deadline,
                health,
                recorder,
                interrupted: &mut interrupted,
            };
            engine.run(request, links)
        })
    }
}
