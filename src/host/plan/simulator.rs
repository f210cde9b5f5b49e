//! Runs the plans of all participants on simulated links in random order, and checks what every plan promises.

use std::collections::{BTreeSet, VecDeque};

use super::*;

/// A small generator of random numbers (SplitMix64).
pub(super) struct Random(pub(super) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// One element: the list of contributions folded into it, in order. Folding joins lists: associative, and nothing commutes.
type Element = Vec<u16>;

/// What travels: elements, and whom the sender had heard from.
struct Message {
    elements: Vec<Element>,
    heard: BTreeSet<usize>,
}

/// One participant: its plan and its memory, an element per byte.
struct Node {
    plan: Plan,
    memory: [Vec<Element>; 3],
    /// Where the source lies in the destination (or the destination in the source), for calls in place.
    alias: Option<InPlace>,
    done: Vec<bool>,
    heard: BTreeSet<usize>,
    folded_last: usize,
}

/// How two buffers share memory.
#[derive(Debug, Clone, Copy)]
pub(super) enum InPlace {
    /// The source is the destination from this offset on.
    SourceInDestination(usize),
    /// The destination is the source from this offset on.
    DestinationInSource(usize),
}

impl Node {
    fn at(&self, span: Span) -> (usize, std::ops::Range<usize>) {
        let range = span.offset..span.offset + span.len;
        match (span.space, self.alias) {
            (Space::Source, Some(InPlace::SourceInDestination(offset))) => (1, range.start + offset..range.end + offset),
            (Space::Destination, Some(InPlace::DestinationInSource(offset))) => (0, range.start + offset..range.end + offset),
            (space, _) => (space as usize, range),
        }
    }

    fn read(&self, span: Span) -> Vec<Element> {
        let (space, range) = self.at(span);
        self.memory[space][range].to_vec()
    }

    fn write(&mut self, span: Span, elements: Vec<Element>, n: usize) {
        assert_eq!(elements.len(), span.len);
        if span.space == Space::Destination && span.len > 0 {
            assert_eq!(self.heard.len(), n, "written before everyone was heard from: {span:?}");
        }
        assert_ne!(span.space, Space::Source, "the source is written");
        let (space, range) = self.at(span);
        self.memory[space][range].clone_from_slice(&elements);
    }

    fn is_ready(&self, step: usize) -> bool {
        !self.done[step] && self.plan.steps[step].after.iter().all(|before| self.done[*before])
    }

    /// Whether an earlier step on the same stream is still to be done.
    fn is_behind(&self, step: usize) -> bool {
        let stream = |action: &Action| match action {
            Action::Send { to, .. } => Some((0, *to)),
            Action::Receive { from, .. } => Some((1, *from)),
            _ => None,
        };
        let mine = stream(&self.plan.steps[step].action);
        mine.is_some() && (0..step).any(|earlier| !self.done[earlier] && stream(&self.plan.steps[earlier].action) == mine)
    }
}

/// The outcome of a simulated collective.
pub(super) struct Outcome {
    /// Every participant's destination.
    pub(super) destinations: Vec<Vec<Element>>,
    /// Elements that each has sent.
    pub(super) sent: Vec<usize>,
}

/// Runs `plans` with each participant's source (element `i` of participant `p` is `contribution(p, i)`), in an order drawn from `seed`.
pub(super) fn simulate(
    plans: Vec<Plan>,
    sources: Vec<Vec<Element>>,
    destination_len: impl Fn(usize) -> usize,
    alias: impl Fn(usize) -> Option<InPlace>,
    seed: u64,
) -> Outcome {
    let n = plans.len();
    let mut random = Random(seed);
    let mut links: Vec<VecDeque<Message>> = (0..n * n).map(|_| VecDeque::new()).collect();
    let mut sent = vec![0; n];
    let mut nodes: Vec<Node> = plans
        .into_iter()
        .zip(sources)
        .enumerate()
        .map(|(me, (plan, source))| {
            let blank = vec![vec![u16::MAX]; destination_len(me)];
            let scratch = vec![vec![u16::MAX]; plan.scratch_bytes];
            let (source, destination) = match alias(me) {
                Some(InPlace::SourceInDestination(offset)) => {
                    let mut joined = blank;
                    joined[offset..offset + source.len()].clone_from_slice(&source);
                    (Vec::new(), joined)
                }
                Some(InPlace::DestinationInSource(_)) => (source, Vec::new()),
                None => (source, blank),
            };
            let done = vec![false; plan.steps.len()];
            Node { plan, memory: [source, destination, scratch], alias: alias(me), done, heard: BTreeSet::from([me]), folded_last: 0 }
        })
        .collect();
    loop {
        let enabled: Vec<(usize, usize)> = (0..n)
            .flat_map(|me| (0..nodes[me].plan.steps.len()).map(move |step| (me, step)))
            .filter(|(me, step)| nodes[*me].is_ready(*step) && !nodes[*me].is_behind(*step))
            .filter(|(me, step)| match &nodes[*me].plan.steps[*step].action {
                // A link holds two messages at most.
                Action::Send { to, .. } => links[me * n + to].len() < 2,
                Action::Receive { from, .. } => !links[from * n + me].is_empty(),
                _ => true,
            })
            .collect();
        if enabled.is_empty() {
            break;
        }
        let (me, step) = enabled[random.below(enabled.len())];
        let action = nodes[me].plan.steps[step].action.clone();
        match action {
            Action::Send { to, from } => {
                assert_ne!(to, me);
                sent[me] += from.len;
                let message = Message { elements: nodes[me].read(from), heard: nodes[me].heard.clone() };
                links[me * n + to].push_back(message);
            }
            Action::Receive { from, into } => {
                let message = links[from * n + me].pop_front().expect("enabled");
                nodes[me].heard.extend(message.heard);
                nodes[me].write(into, message.elements, n);
            }
            Action::Fold { into, inputs, last } => {
                let columns: Vec<Vec<Element>> = inputs.iter().map(|input| nodes[me].read(*input)).collect();
                let folded = (0..into.len).map(|index| columns.iter().flat_map(|column| column[index].clone()).collect()).collect();
                nodes[me].folded_last += if last { into.len } else { 0 };
                nodes[me].write(into, folded, n);
            }
            Action::Copy { from, into } => {
                if nodes[me].at(from) != nodes[me].at(into) {
                    let elements = nodes[me].read(from);
                    nodes[me].write(into, elements, n);
                }
            }
        }
        nodes[me].done[step] = true;
    }
    for (me, node) in nodes.iter().enumerate() {
        assert!(node.done.iter().all(|done| *done), "participant {me} of {n} is stuck, seed {seed}: {:?}", node.plan);
    }
    assert!(links.iter().all(VecDeque::is_empty), "something sent was not received");
    let destination = |node: &Node| match node.alias {
        Some(InPlace::DestinationInSource(_)) => node.memory[0].clone(),
        _ => node.memory[1].clone(),
    };
    Outcome { destinations: nodes.iter().map(destination).collect(), sent }
}

/// Contribution of `p` at `index`.
fn contribution(p: usize, index: usize) -> Element {
    vec![(p * 1000 + index % 1000) as u16]
}

fn sources(lengths: impl Iterator<Item = usize>) -> Vec<Vec<Element>> {
    lengths.enumerate().map(|(p, len)| (0..len).map(|index| contribution(p, index)).collect()).collect()
}

/// All contributions at `index` in rank order.
fn in_order(n: usize, index: usize) -> Element {
    (0..n).flat_map(|p| contribution(p, index)).collect()
}

/// Whether a folded element has every contribution once; in rank order where that is asked for.
fn check_fold(got: &Element, n: usize, index: usize, ordered: bool, what: &str) {
    let expected = in_order(n, index);
    let mut sorted = got.clone();
    sorted.sort_unstable();
    let mut all = expected.clone();
    all.sort_unstable();
    assert_eq!(sorted, all, "{what}: contributions");
    assert!(!ordered || *got == expected, "{what}: order {got:?}");
}

const WORLDS: [usize; 11] = [2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17];
const SIZES: [usize; 5] = [0, 1, 3, 7, 40];
const SEGMENT: usize = 4;

fn places(n: usize) -> impl Iterator<Item = Place> {
    (0..n).map(move |me| Place { n, me })
}

#[test]
fn all_reduce_folds_everything_once_and_alike_on_all() {
    for n in WORLDS {
        for bytes in SIZES {
            for (algorithm, ordered) in [(Algorithm::Doubling, true), (Algorithm::Ring, false), (Algorithm::Direct, true)] {
                for in_place in [false, true] {
                    let what = format!("{algorithm} of {bytes} among {n}, in place {in_place}");
                    let plans: Vec<Plan> = places(n).map(|place| all_reduce(algorithm, place, bytes, 1, SEGMENT)).collect();
                    let alias = |_| in_place.then_some(InPlace::SourceInDestination(0));
                    let outcome = simulate(plans, sources((0..n).map(|_| bytes)), |_| bytes, alias, n as u64 + bytes as u64);
                    for destination in &outcome.destinations {
                        assert_eq!(*destination, outcome.destinations[0], "{what}: alike");
                    }
                    for index in 0..bytes {
                        check_fold(&outcome.destinations[0][index], n, index, ordered, &what);
                    }
                    if algorithm == Algorithm::Ring {
                        let bound = 2 * (n - 1) * bytes.div_ceil(n);
                        assert!(outcome.sent.iter().all(|sent| *sent <= bound), "{what}: {:?} > {bound}", outcome.sent);
                    }
                }
            }
        }
    }
}

#[test]
fn ring_scratch_is_two_blocks_and_doubling_scratch_grows_as_the_logarithm() {
    for n in WORLDS {
        let bytes = 64 * 1024 * n;
        let ring = all_reduce(Algorithm::Ring, Place { n, me: 0 }, bytes, 4, 4096);
        assert!(ring.scratch_bytes <= 2 * (bytes / n + 64));
        let doubling = all_reduce(Algorithm::Doubling, Place { n, me: 0 }, bytes, 4, 4096);
        assert!(doubling.scratch_bytes <= 2 * (n.ilog2() as usize + 1) * bytes);
    }
}

#[test]
fn elements_are_never_cut() {
    for n in [3, 8] {
        for me in 0..n {
            let plans = [
                all_reduce(Algorithm::Ring, Place { n, me }, 12 * 50, 12, 100),
                all_reduce(Algorithm::Direct, Place { n, me }, 12 * 50, 12, 100),
                reduce(Algorithm::Ring, Place { n, me }, 12 * 50, 12, 100, 1),
            ];
            for span in plans.iter().flat_map(|plan| &plan.steps).flat_map(|step| match &step.action {
                Action::Send { from, .. } => vec![*from],
                Action::Receive { into, .. } => vec![*into],
                Action::Fold { into, inputs, .. } => [&inputs[..], &[*into]].concat(),
                Action::Copy { from, into } => vec![*from, *into],
            }) {
                assert_eq!(span.len % 12, 0);
                assert!(span.space == Space::Scratch || span.offset % 12 == 0);
            }
        }
    }
}

#[test]
fn reduce_reaches_the_root_and_touches_nobody_else() {
    for n in WORLDS {
        for bytes in SIZES {
            for root in [0, n / 2, n - 1] {
                for (algorithm, ordered) in [(Algorithm::Tree, true), (Algorithm::Ring, false), (Algorithm::Direct, true)] {
                    for in_place in [false, true] {
                        let what = format!("{algorithm} of {bytes} among {n} to {root}, in place {in_place}");
                        let plans: Vec<Plan> = places(n).map(|place| reduce(algorithm, place, bytes, 1, SEGMENT, root)).collect();
                        let alias = |_| in_place.then_some(InPlace::SourceInDestination(0));
                        let given = sources((0..n).map(|_| bytes));
                        let outcome = simulate(plans, given.clone(), |_| bytes, alias, n as u64 ^ bytes as u64);
                        for (me, destination) in outcome.destinations.iter().enumerate() {
                            for index in 0..bytes {
                                match (me == root, in_place) {
                                    (true, _) => check_fold(&destination[index], n, index, ordered, &what),
                                    (false, true) => assert_eq!(destination[index], given[me][index], "{what}"),
                                    (false, false) => assert_eq!(destination[index], [u16::MAX], "{what}"),
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Unequal lengths, some of them zero.
fn unequal(n: usize, size: usize) -> Vec<usize> {
    (0..n).map(|rank| (rank * 7 + 3) % 4 * size).collect()
}

fn starts(lengths: &[usize]) -> Vec<usize> {
    (0..lengths.len()).map(|rank| lengths[..rank].iter().sum()).collect()
}

#[test]
fn reduce_scatter_leaves_each_its_block() {
    for n in WORLDS {
        for lengths in [vec![0; n], vec![5; n], unequal(n, 3)] {
            for (algorithm, ordered) in [(Algorithm::Ring, false), (Algorithm::Direct, true)] {
                for in_place in [false, true] {
                    let what = format!("{algorithm} of {lengths:?}, in place {in_place}");
                    let (total, starts) = (lengths.iter().sum::<usize>(), starts(&lengths));
                    let plans: Vec<Plan> = places(n).map(|place| reduce_scatter(algorithm, place, &lengths, 1, SEGMENT)).collect();
                    let alias = |me: usize| in_place.then_some(InPlace::DestinationInSource(starts[me]));
                    let given = sources((0..n).map(|_| total));
                    let outcome = simulate(plans, given.clone(), |me| lengths[me], alias, n as u64);
                    for (me, destination) in outcome.destinations.iter().enumerate() {
                        for (index, element) in destination.iter().enumerate() {
                            let own = starts[me]..starts[me] + lengths[me];
                            match in_place {
                                true if !own.contains(&index) => assert_eq!(*element, given[me][index], "{what}"),
                                true => check_fold(element, n, index, ordered, &what),
                                false => check_fold(element, n, starts[me] + index, ordered, &what),
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn broadcast_reaches_everyone() {
    for n in WORLDS {
        for bytes in SIZES {
            for root in [0, n / 2, n - 1] {
                for algorithm in [Algorithm::Tree, Algorithm::Chain] {
                    for in_place in [false, true] {
                        let plans: Vec<Plan> = places(n).map(|place| broadcast(algorithm, place, bytes, SEGMENT, root)).collect();
                        let alias = |me: usize| (in_place && me == root).then_some(InPlace::SourceInDestination(0));
                        let given = sources((0..n).map(|_| bytes));
                        let outcome = simulate(plans, given.clone(), |_| bytes, alias, n as u64);
                        assert!(outcome.destinations.iter().all(|destination| *destination == given[root]), "{algorithm} {bytes} {n}");
                    }
                }
            }
        }
    }
}

#[test]
fn all_gather_joins_all_blocks() {
    for n in WORLDS {
        for lengths in [vec![0; n], vec![5; n], unequal(n, 3)] {
            for algorithm in [Algorithm::Direct, Algorithm::Ring] {
                for in_place in [false, true] {
                    let (total, starts) = (lengths.iter().sum::<usize>(), starts(&lengths));
                    let plans: Vec<Plan> = places(n).map(|place| all_gather(algorithm, place, &lengths, SEGMENT)).collect();
                    let alias = |me: usize| in_place.then_some(InPlace::SourceInDestination(starts[me]));
                    let given = sources(lengths.iter().copied());
                    let outcome = simulate(plans, given.clone(), |_| total, alias, n as u64);
                    assert!(outcome.destinations.iter().all(|destination| *destination == given.concat()), "{algorithm} {lengths:?}");
                }
            }
        }
    }
}

#[test]
fn gather_and_scatter_are_each_others_reverse() {
    for n in WORLDS {
        for lengths in [vec![0; n], vec![5; n], unequal(n, 3)] {
            let (total, starts) = (lengths.iter().sum::<usize>(), starts(&lengths));
            for root in [0, n - 1] {
                for in_place in [false, true] {
                    let known = |me: usize| (me == root).then_some(&lengths[..]);
                    let here = |me: usize| in_place && me == root;
                    let plans: Vec<Plan> = places(n).map(|place| gather(place, lengths[place.me], known(place.me), root)).collect();
                    let given = sources(lengths.iter().copied());
                    let alias = |me: usize| here(me).then_some(InPlace::SourceInDestination(starts[me]));
                    let outcome = simulate(plans, given.clone(), |me| if me == root { total } else { 0 }, alias, n as u64);
                    assert_eq!(outcome.destinations[root], given.concat());

                    let plans: Vec<Plan> = places(n).map(|place| scatter(place, lengths[place.me], known(place.me), root)).collect();
                    let given = sources((0..n).map(|me| if me == root { total } else { 0 }));
                    let alias = |me: usize| here(me).then_some(InPlace::DestinationInSource(starts[me]));
                    let outcome = simulate(plans, given.clone(), |me| lengths[me], alias, n as u64);
                    for me in (0..n).filter(|me| !here(*me)) {
                        assert_eq!(outcome.destinations[me], given[root][starts[me]..starts[me] + lengths[me]]);
                    }
                }
            }
        }
    }
}

#[test]
fn all_to_all_transposes() {
    for n in WORLDS {
        for equal in [true, false] {
            for in_place in [false, true] {
                if in_place && !equal {
                    continue;
                }
                let pair = |from: usize, to: usize| if equal { 3 } else { (from * 5 + to * 3) % 4 };
                let sends = |me: usize| (0..n).map(|to| pair(me, to)).collect::<Vec<_>>();
                let receives = |me: usize| (0..n).map(|from| pair(from, me)).collect::<Vec<_>>();
                let plans: Vec<Plan> = places(n).map(|place| all_to_all(place, &sends(place.me), &receives(place.me), in_place)).collect();
                let given = sources((0..n).map(|me| sends(me).iter().sum()));
                let alias = |_| in_place.then_some(InPlace::SourceInDestination(0));
                let outcome = simulate(plans, given.clone(), |me| receives(me).iter().sum(), alias, n as u64);
                for me in 0..n {
                    let block = |from: usize| given[from][starts(&sends(from))[me]..][..pair(from, me)].to_vec();
                    assert_eq!(outcome.destinations[me], (0..n).flat_map(block).collect::<Vec<_>>(), "{me} of {n}");
                }
            }
        }
    }
}

#[test]
fn a_barrier_lets_nobody_pass_before_everyone_has_come() {
    for n in WORLDS {
        // The destination's one byte may only be written when everyone was heard from, which `simulate` checks.
        let plans = places(n).map(|place| {
            let mut plan = barrier(place);
            let nothing = Span { space: Space::Source, offset: 0, len: 1 };
            let after = (0..plan.steps.len()).collect();
            plan.steps.push(Step { action: Action::Copy { from: nothing, into: Span { space: Space::Destination, ..nothing } }, after });
            plan
        });
        simulate(plans.collect(), sources((0..n).map(|_| 1)), |_| 1, |_| None, n as u64);
    }
}
