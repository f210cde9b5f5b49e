//! Runs the plans of all ranks over links of small capacity, in random order.

use std::collections::VecDeque;
use std::ops::Range;

use crate::base::random::Random;
use crate::host::plan::{Action, Plan, Space, Span};

/// One rank: its plan, its contribution, and where its destination lies.
pub(super) struct Rank {
    pub(super) plan: Plan,
    pub(super) source: Vec<u8>,
    pub(super) destination_len: usize,
    /// In place: where the destination begins, relative to the start of the source.
    pub(super) in_place: Option<isize>,
}

/// Addresses of the spaces of a rank in one memory.
const SOURCE_AT: usize = 1 << 20;

impl Rank {
    fn base(&self, space: Space) -> usize {
        match (space, self.in_place) {
            (Space::Source, _) => SOURCE_AT,
            (Space::Destination, Some(offset)) => SOURCE_AT.checked_add_signed(offset).expect("offset"),
            (Space::Destination, None) => 2 * SOURCE_AT,
            (Space::Scratch, _) => 4 * SOURCE_AT,
        }
    }

    /// Returns the range of a span. Fails if it does not fit its space.
    pub(super) fn range(&self, span: Span) -> Range<usize> {
        let len = match span.space {
            Space::Source => self.source.len(),
            Space::Destination => self.destination_len,
            Space::Scratch => self.plan.scratch_bytes,
        };
        assert!(span.offset.checked_add(span.len).is_some_and(|end| end <= len), "{span:?} does not fit {len}");
        let start = self.base(span.space) + span.offset;
        start..start + span.len
    }
}

/// The ops with which plans are tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    /// Bytes are added: any order is correct.
    Sum,
    /// Every four bytes are a 2x2 matrix modulo 256, and are multiplied; other bytes are added. Associative, not
    /// commutative.
    Matrix,
    /// A hash over all inputs' elements. It is neither associative nor commutative, so every grouping gives a different
    /// result.
    Hash,
}

impl Op {
    /// Returns the fold of these inputs. `last` changes every byte, which shows if it is missing or done twice.
    pub(super) fn fold(self, inputs: &[&[u8]], element: usize, last: bool) -> Vec<u8> {
        let mut folded = match self {
            Op::Sum => add(inputs),
            Op::Matrix => multiply(inputs, element),
            Op::Hash => hash(inputs, element),
        };
        folded.iter_mut().filter(|_| last).for_each(|byte| *byte ^= 0xa5);
        folded
    }
}

fn add(inputs: &[&[u8]]) -> Vec<u8> {
    (0..inputs[0].len()).map(|at| inputs.iter().fold(0, |sum: u8, input| sum.wrapping_add(input[at]))).collect()
}

fn multiply(inputs: &[&[u8]], element: usize) -> Vec<u8> {
    let mut folded = add(inputs);
    for start in (0..folded.len()).step_by(element) {
        for at in (start..start + element / 4 * 4).step_by(4) {
            let matrices = inputs.iter().map(|input| [input[at], input[at + 1], input[at + 2], input[at + 3]]);
            let product = matrices.reduce(|[a, b, c, d], [e, f, g, h]| {
                let cell = |p: u8, q: u8, r: u8, s: u8| p.wrapping_mul(q).wrapping_add(r.wrapping_mul(s));
                [cell(a, e, b, g), cell(a, f, b, h), cell(c, e, d, g), cell(c, f, d, h)]
            });
            folded[at..at + 4].copy_from_slice(&product.expect("inputs"));
        }
    }
    folded
}

fn hash(inputs: &[&[u8]], element: usize) -> Vec<u8> {
    let mut folded = Vec::with_capacity(inputs[0].len());
    for start in (0..inputs[0].len()).step_by(element) {
        let mut state = inputs.len() as u64;
        for byte in inputs.iter().flat_map(|input| &input[start..start + element]) {
            state = (state ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
        }
        folded.extend(Random(state).bytes(element));
    }
    folded
}

/// One direction between two ranks: the remaining steps, in order, and the bytes in transit.
#[derive(Default)]
struct Link {
    sends: VecDeque<usize>,
    receives: VecDeque<usize>,
    /// Whether the first message has been sent, and received, at least in part.
    first_sent: bool,
    first_received: bool,
    /// Bytes that the first step of each end has moved.
    sent: usize,
    received: usize,
    under_way: VecDeque<u8>,
}

/// A rank's memory and progress.
struct State {
    memory: std::collections::HashMap<Space, Vec<Option<u8>>>,
    waiting: Vec<usize>,
    /// The steps that each step enables.
    allows: Vec<Vec<usize>>,
    local: Vec<usize>,
    undone: usize,
}

/// All ranks, and the random state of the schedule.
struct World<'a> {
    ranks: &'a [Rank],
    states: Vec<State>,
    /// `links[from * n + to]`.
    links: Vec<Link>,
    capacity: usize,
    op: Op,
    element: usize,
    random: Random,
}

/// Runs all plans to their end and returns the destinations. `None` is a byte that was never written.
///
/// An empty message that is not the first of its link is received at once: links need not carry it.
pub(super) fn simulate(ranks: &[Rank], op: Op, element: usize, capacity: usize, seed: u64) -> Vec<Vec<Option<u8>>> {
    let n = ranks.len();
    let mut links: Vec<Link> = (0..n * n).map(|_| Link::default()).collect();
    for (me, rank) in ranks.iter().enumerate() {
        for (index, step) in rank.plan.steps.iter().enumerate() {
            match step.action {
                Action::Send { to, .. } => links[me * n + to].sends.push_back(index),
                Action::Receive { from, .. } => links[from * n + me].receives.push_back(index),
                _ => {}
            }
        }
    }
    let states = ranks.iter().map(State::new).collect();
    let mut world = World { ranks, states, links, capacity, op, element, random: Random(seed) };
    world.run();
    (0..n).map(|me| world.destination(me)).collect()
}

impl State {
    fn new(rank: &Rank) -> Self {
        let steps = &rank.plan.steps;
        let mut allows = vec![Vec::new(); steps.len()];
        for (index, step) in steps.iter().enumerate() {
            step.after.iter().for_each(|earlier| allows[*earlier].push(index));
        }
        let source: Vec<Option<u8>> = rank.source.iter().copied().map(Some).collect();
        let mut memory = std::collections::HashMap::new();
        memory.insert(Space::Scratch, vec![None; rank.plan.scratch_bytes]);
        if let Some(offset) = rank.in_place {
            // One shared memory, starting at the lower of the two starts.
            let before = offset.min(0).unsigned_abs();
            let end = (rank.source.len() + before).max(rank.destination_len + offset.max(0).unsigned_abs());
            let mut shared = vec![None; end];
            shared[before..before + source.len()].copy_from_slice(&source);
            memory.insert(Space::Source, shared);
        } else {
            memory.insert(Space::Source, source);
            memory.insert(Space::Destination, vec![None; rank.destination_len]);
        }
        let waiting: Vec<usize> = steps.iter().map(|step| step.after.len()).collect();
        let mut state = Self { memory, waiting, allows, local: Vec::new(), undone: steps.len() };
        for index in 0..steps.len() {
            state.offer(rank, index);
        }
        state
    }

    /// Queues a fold or copy that may start.
    fn offer(&mut self, rank: &Rank, index: usize) {
        let local = matches!(rank.plan.steps[index].action, Action::Fold { .. } | Action::Copy { .. });
        if local && self.waiting[index] == 0 {
            self.local.push(index);
        }
    }

    fn place(rank: &Rank, span: Span) -> (Space, usize) {
        let Some(offset) = rank.in_place else { return (span.space, span.offset) };
        match span.space {
            Space::Source => (Space::Source, span.offset + offset.min(0).unsigned_abs()),
            Space::Destination => (Space::Source, span.offset + offset.max(0).unsigned_abs()),
            Space::Scratch => (Space::Scratch, span.offset),
        }
    }

    fn read(&self, rank: &Rank, span: Span, part: Range<usize>) -> Vec<u8> {
        let (space, offset) = Self::place(rank, span);
        let bytes = &self.memory[&space][offset + part.start..offset + part.end];
        bytes.iter().map(|byte| byte.unwrap_or_else(|| panic!("reads what was never written: {span:?}"))).collect()
    }

    fn write(&mut self, rank: &Rank, span: Span, at: usize, bytes: &[u8]) {
        let (space, offset) = Self::place(rank, span);
        let memory = self.memory.get_mut(&space).expect("space");
        for (cell, byte) in memory[offset + at..].iter_mut().zip(bytes) {
            *cell = Some(*byte);
        }
    }
}

impl World<'_> {
    /// Makes random moves until all is done. Fails if no move is possible.
    fn run(&mut self) {
        let n = self.ranks.len();
        let used: Vec<usize> =
            (0..n * n).filter(|link| !self.links[*link].sends.is_empty() || !self.links[*link].receives.is_empty()).collect();
        let kinds = 2 * used.len() + n;
        while self.states.iter().any(|state| state.undone > 0) {
            // Tries the moves from a random one on, in turn: each round makes at least one move, or none is possible.
            let first = self.random.below(kinds);
            let moved = (first..first + kinds).map(|kind| kind % kinds).any(|kind| match kind {
                kind if kind < used.len() => self.send(used[kind]),
                kind if kind < 2 * used.len() => self.receive(used[kind - used.len()]),
                kind => self.compute(kind - 2 * used.len()),
            });
            assert!(moved, "deadlock: {:?} steps undone", self.states.iter().map(|state| state.undone).collect::<Vec<_>>());
        }
    }

    fn finish(&mut self, me: usize, index: usize) {
        let state = &mut self.states[me];
        state.undone -= 1;
        for later in state.allows[index].clone() {
            state.waiting[later] -= 1;
            state.offer(&self.ranks[me], later);
        }
    }

    /// Sends some bytes of the next message.
    fn send(&mut self, link: usize) -> bool {
        let me = link / self.ranks.len();
        let Some(&index) = self.links[link].sends.front() else { return false };
        let Action::Send { from, .. } = self.ranks[me].plan.steps[index].action else { unreachable!("a send") };
        if self.states[me].waiting[index] > 0 {
            return false;
        }
        let room = self.capacity - self.links[link].under_way.len();
        let rest = from.len - self.links[link].sent;
        if rest > 0 && room == 0 {
            return false;
        }
        let count = if rest == 0 { 0 } else { 1 + self.random.below(rest.min(room)) };
        let state = &mut self.links[link];
        let bytes = self.states[me].read(&self.ranks[me], from, state.sent..state.sent + count);
        state.first_sent = true;
        state.under_way.extend(bytes);
        state.sent += count;
        if state.sent == from.len {
            state.sent = 0;
            state.sends.pop_front();
            self.finish(me, index);
        }
        true
    }

    /// Receives some bytes of the next message.
    fn receive(&mut self, link: usize) -> bool {
        let me = link % self.ranks.len();
        let Some(&index) = self.links[link].receives.front() else { return false };
        let Action::Receive { into, .. } = self.ranks[me].plan.steps[index].action else { unreachable!("a receive") };
        let state = &mut self.links[link];
        let there = match into.len {
            0 => state.first_received || state.first_sent,
            _ => !state.under_way.is_empty(),
        };
        if self.states[me].waiting[index] > 0 || !there {
            return false;
        }
        let rest = into.len - state.received;
        let count = if rest == 0 { 0 } else { 1 + self.random.below(rest.min(state.under_way.len())) };
        let bytes: Vec<u8> = state.under_way.drain(..count).collect();
        self.states[me].write(&self.ranks[me], into, state.received, &bytes);
        state.received += count;
        state.first_received = true;
        if state.received == into.len {
            state.received = 0;
            state.receives.pop_front();
            self.finish(me, index);
        }
        true
    }

    /// Folds or copies.
    fn compute(&mut self, me: usize) -> bool {
        if self.states[me].local.is_empty() {
            return false;
        }
        let chosen = self.random.below(self.states[me].local.len());
        let index = self.states[me].local.swap_remove(chosen);
        let (rank, state) = (&self.ranks[me], &mut self.states[me]);
        match &rank.plan.steps[index].action {
            Action::Copy { from, into } => {
                let bytes = state.read(rank, *from, 0..from.len);
                state.write(rank, *into, 0, &bytes);
            }
            Action::Fold { into, inputs, last } => {
                let inputs: Vec<Vec<u8>> = inputs.iter().map(|input| state.read(rank, *input, 0..input.len)).collect();
                let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
                let folded = self.op.fold(&inputs, self.element, *last);
                state.write(rank, *into, 0, &folded);
            }
            Action::Send { .. } | Action::Receive { .. } => unreachable!("not local"),
        }
        self.finish(me, index);
        true
    }

    fn destination(&self, me: usize) -> Vec<Option<u8>> {
        let (space, offset) = State::place(&self.ranks[me], Span { space: Space::Destination, offset: 0, len: 0 });
        self.states[me].memory[&space][offset..offset + self.ranks[me].destination_len].to_vec()
    }
}
