//! Properties of a set of plans under every schedule and any capacity of the links, shown on the graph of their steps.
//!
//! Plans name their partners in advance, so only the timing is undetermined. In the graph of "comes after", the two
//! ends of each message are tied together as if links could hold nothing. If this graph has no cycle, no schedule can
//! deadlock.

use super::simulator::Rank;
use crate::host::plan::{Action, Space, Span};

/// A set of ranks, one bit each.
type Heard = u32;

/// What to check about a set of plans, in addition to what holds for all.
#[derive(Debug, Clone, Copy)]
pub(super) struct Claims {
    pub(super) element: usize,
    /// Whether a rank (given with the root) must have heard from every rank when it is done, even if it writes nothing.
    /// `None` if every rank has heard from all others before it begins.
    pub(super) hears: Option<fn(usize, usize) -> bool>,
    /// The root, for `hears`.
    pub(super) root: usize,
}

/// Returns what a step reads and writes.
fn accesses(action: &Action) -> (Vec<Span>, Option<Span>) {
    match action {
        Action::Send { from, .. } => (vec![*from], None),
        Action::Receive { into, .. } => (vec![], Some(*into)),
        Action::Fold { into, inputs, .. } => (inputs.clone(), Some(*into)),
        Action::Copy { from, into } => (vec![*from], Some(*into)),
    }
}

/// Checks everything.
pub(super) fn prove(ranks: &[Rank], claims: Claims) {
    for rank in ranks {
        check_steps(rank, claims.element);
        check_races(rank);
    }
    check_messages(ranks, claims);
}

/// Checks that steps name earlier ones, spans fit, lengths agree, the source is not written, and folds are of whole,
/// aligned elements.
fn check_steps(rank: &Rank, element: usize) {
    for (index, step) in rank.plan.steps.iter().enumerate() {
        assert!(step.after.iter().all(|earlier| *earlier < index), "{index} comes after a later step: {:?}", step.after);
        let (reads, write) = accesses(&step.action);
        for span in reads.iter().chain(&write) {
            rank.range(*span);
        }
        assert!(write.is_none_or(|span| span.space != Space::Source), "writes the source: {step:?}");
        if let (Action::Fold { .. } | Action::Copy { .. }, Some(into)) = (&step.action, write) {
            assert!(!reads.is_empty() && reads.iter().all(|span| span.len == into.len), "lengths differ: {step:?}");
        }
        if let (Action::Fold { inputs, .. }, Some(into)) = (&step.action, write) {
            for span in inputs.iter().chain(&write) {
                let alignment = if span.space == Space::Scratch { 64.max(element & element.wrapping_neg()) } else { element };
                assert!(span.offset % alignment == 0 && span.len % element == 0, "not whole elements: {step:?}");
                let (a, b) = (rank.range(*span), rank.range(into));
                assert!(a == b || a.end <= b.start || b.end <= a.start, "overlaps in part: {step:?}");
            }
        }
    }
}

/// Returns, for each step, the set of steps that are done before it starts.
fn ancestors(rank: &Rank) -> Vec<Vec<u64>> {
    let steps = &rank.plan.steps;
    let mut sets: Vec<Vec<u64>> = Vec::with_capacity(steps.len());
    for step in steps {
        let mut set = vec![0; steps.len().div_ceil(64)];
        for earlier in &step.after {
            set[earlier / 64] |= 1 << (earlier % 64);
            set.iter_mut().zip(&sets[*earlier]).for_each(|(word, more)| *word |= more);
        }
        sets.push(set);
    }
    sets
}

/// Checks that if two steps touch the same byte and at least one of them writes, one step comes after the other. This
/// also covers in-place calls, because the ranges are addresses.
fn check_races(rank: &Rank) {
    let mut touched = Vec::new();
    for (index, step) in rank.plan.steps.iter().enumerate() {
        let (reads, write) = accesses(&step.action);
        if matches!(step.action, Action::Copy { from, into } if rank.range(from) == rank.range(into)) {
            continue;
        }
        touched.extend(reads.iter().map(|span| (rank.range(*span), false, index)));
        touched.extend(write.iter().map(|span| (rank.range(*span), true, index)));
    }
    touched.retain(|(range, ..)| !range.is_empty());
    touched.sort_by_key(|(range, ..)| range.start);
    let before = ancestors(rank);
    for (at, (range, writes, index)) in touched.iter().enumerate() {
        for (_, other_writes, other) in touched[at + 1..].iter().take_while(|(other, ..)| other.start < range.end) {
            let (early, late) = (index.min(other), index.max(other));
            if early != late && (*writes || *other_writes) {
                let steps = &rank.plan.steps;
                assert!(before[*late][early / 64] >> (early % 64) & 1 == 1, "{:?} and {:?} race", steps[*early], steps[*late]);
            }
        }
    }
}

/// The two nodes of a step in the graph: when it may start, and when it is done.
#[derive(Clone, Copy)]
enum End {
    Start(usize, usize),
    Done(usize, usize),
}

/// The graph of all ranks' steps.
struct Graph<'a> {
    ranks: &'a [Rank],
    /// For each rank, the index of its first step when all ranks' steps are numbered consecutively.
    first: Vec<usize>,
    edges: Vec<Vec<usize>>,
    incoming: Vec<usize>,
    /// For a receive that waits for a message: its send.
    matching: Vec<Option<usize>>,
    /// The previous receive from the same rank.
    previous: Vec<Option<usize>>,
}

impl<'a> Graph<'a> {
    fn new(ranks: &'a [Rank]) -> Self {
        let first: Vec<usize> = ranks.iter().scan(0, |sum, rank| Some(std::mem::replace(sum, *sum + rank.plan.steps.len()))).collect();
        let count = ranks.iter().map(|rank| rank.plan.steps.len()).sum::<usize>();
        let (edges, incoming) = (vec![Vec::new(); 2 * count], vec![0; 2 * count]);
        let mut graph = Self { ranks, first, edges, incoming, matching: vec![None; count], previous: vec![None; count] };
        graph.connect_steps();
        for from in 0..ranks.len() {
            for to in 0..ranks.len() {
                graph.connect_link(from, to);
            }
        }
        graph
    }

    fn node(&self, end: End) -> usize {
        match end {
            End::Start(rank, step) => 2 * (self.first[rank] + step),
            End::Done(rank, step) => 2 * (self.first[rank] + step) + 1,
        }
    }

    fn connect(&mut self, early: End, late: End) {
        let (early, late) = (self.node(early), self.node(late));
        self.edges[early].push(late);
        self.incoming[late] += 1;
    }

    fn connect_steps(&mut self) {
        let ranks = self.ranks;
        for (me, rank) in ranks.iter().enumerate() {
            for (index, step) in rank.plan.steps.iter().enumerate() {
                self.connect(End::Start(me, index), End::Done(me, index));
                step.after.iter().for_each(|earlier| self.connect(End::Done(me, *earlier), End::Start(me, index)));
            }
        }
    }

    /// Connects the messages of a link: as many sends as receives, equally long, in order, and neither end done before
    /// the other starts.
    fn connect_link(&mut self, from: usize, to: usize) {
        let ranks = self.ranks;
        let steps = |rank: usize, wanted: fn(&Action, usize) -> Option<usize>, peer| {
            let steps = ranks[rank].plan.steps.iter().enumerate();
            steps.filter_map(|(index, step)| wanted(&step.action, peer).map(|len| (index, len))).collect::<Vec<_>>()
        };
        let sends =
            steps(from, |action, peer| matches!(action, Action::Send { to, .. } if *to == peer).then(|| accesses(action).0[0].len), to);
        let receives = steps(
            to,
            |action, peer| match action {
                Action::Receive { from, into } if *from == peer => Some(into.len),
                _ => None,
            },
            from,
        );
        let lens = |list: &[(usize, usize)]| list.iter().map(|(_, len)| *len).collect::<Vec<_>>();
        assert_eq!(lens(&sends), lens(&receives), "messages from {from} to {to}");
        assert!(from != to || sends.is_empty(), "rank {from} sends to itself");
        for (at, ((send, len), (receive, _))) in sends.iter().zip(&receives).enumerate() {
            if at > 0 {
                self.connect(End::Done(from, sends[at - 1].0), End::Done(from, *send));
                self.connect(End::Done(to, receives[at - 1].0), End::Done(to, *receive));
                self.previous[self.first[to] + receive] = Some(self.first[to] + receives[at - 1].0);
            }
            if at == 0 || *len > 0 {
                self.connect(End::Start(from, *send), End::Done(to, *receive));
                self.connect(End::Start(to, *receive), End::Done(from, *send));
                self.matching[self.first[to] + receive] = Some(self.first[from] + send);
            }
        }
    }

    /// Returns all nodes, each after all nodes that must come before it. Fails if there is a cycle.
    fn order(&self) -> Vec<usize> {
        let mut waiting = self.incoming.clone();
        let mut order: Vec<usize> = (0..waiting.len()).filter(|node| waiting[*node] == 0).collect();
        let mut at = 0;
        while let Some(node) = order.get(at).copied() {
            at += 1;
            for late in &self.edges[node] {
                waiting[*late] -= 1;
                if waiting[*late] == 0 {
                    order.push(*late);
                }
            }
        }
        assert_eq!(order.len(), waiting.len(), "a cycle: some schedule can stop for ever");
        order
    }
}

/// Checks that messages match, that nothing can deadlock, and that only ranks that have heard from all others write to
/// destinations.
fn check_messages(ranks: &[Rank], claims: Claims) {
    let graph = Graph::new(ranks);
    let all: Heard = ((1_u64 << ranks.len()) - 1) as Heard;
    let owners: Vec<(usize, usize)> =
        ranks.iter().enumerate().flat_map(|(me, rank)| (0..rank.plan.steps.len()).map(move |step| (me, step))).collect();
    let (mut at_start, mut when_done) = (vec![0; owners.len()], vec![0; owners.len()]);
    let initially = |me: usize| if claims.hears.is_some() { 1 << me } else { all };
    let mut finally: Vec<Heard> = (0..ranks.len()).map(initially).collect();
    for node in graph.order() {
        let (step, (me, index)) = (node / 2, owners[node / 2]);
        let Some(plan_step) = ranks[me].plan.steps.get(index) else { unreachable!("a step") };
        if node % 2 == 0 {
            at_start[step] = plan_step.after.iter().fold(initially(me), |heard, earlier| heard | when_done[graph.first[me] + earlier]);
            continue;
        }
        let earlier = graph.previous[step].map_or(0, |previous| when_done[previous]);
        let message = graph.matching[step].map_or(0, |send| at_start[send]);
        when_done[step] = at_start[step] | earlier | message;
        finally[me] |= when_done[step];
        let writes = accesses(&plan_step.action).1.is_some_and(|into| into.space == Space::Destination && into.len > 0);
        assert!(!writes || when_done[step] == all, "rank {me} has heard {:b} alone when it does {plan_step:?}", when_done[step]);
    }
    for (me, heard) in finally.iter().enumerate() {
        assert!(*heard == all || claims.hears.is_some_and(|hears| !hears(me, claims.root)), "rank {me} ends and has heard {heard:b} alone");
    }
}

/// Returns how many bytes a rank sends.
pub(super) fn sent_bytes(rank: &Rank) -> usize {
    rank.plan.steps.iter().map(|step| if let Action::Send { from, .. } = step.action { from.len } else { 0 }).sum()
}
