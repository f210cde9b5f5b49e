//! Everyone's block goes to the root, or comes from it.

use super::blocks::Part;
use super::builder::{Builder, alone};
use super::{Blocks, Plan, Space};

/// A plan for `gather` to `root`. A rank other than the root needs to know its own block's length alone. No scratch.
pub(crate) fn gather(n: usize, me: usize, root: usize, blocks: Blocks<'_>) -> Plan {
    let own = Part::whole(blocks.len(me)).of(Space::Source);
    if n == 1 {
        return alone(own.len);
    }
    let mut plan = Builder::agreed(n, me);
    if me != root {
        if own.len > 0 {
            plan.send(root, own, &[]);
        }
        return plan.finish();
    }
    for (rank, block) in blocks.parts(n).into_iter().enumerate().filter(|(_, block)| block.len > 0) {
        let into = block.of(Space::Destination);
        if rank == me {
            plan.copy(own, into, &[])
        } else {
            plan.receive(rank, into, &[])
        };
    }
    plan.finish()
}

/// A plan for `scatter` from `root`. A rank other than the root needs to know its own block's length alone. No scratch.
pub(crate) fn scatter(n: usize, me: usize, root: usize, blocks: Blocks<'_>) -> Plan {
    let own = Part::whole(blocks.len(me)).of(Space::Destination);
    if n == 1 {
        return alone(own.len);
    }
    let mut plan = Builder::agreed(n, me);
    if me != root {
        if own.len > 0 {
            plan.receive(root, own, &[]);
        }
        return plan.finish();
    }
    for (rank, block) in blocks.parts(n).into_iter().enumerate().filter(|(_, block)| block.len > 0) {
        let from = block.of(Space::Source);
        if rank == me {
            plan.copy(from, own, &[])
        } else {
            plan.send(rank, from, &[])
        };
    }
    plan.finish()
}
