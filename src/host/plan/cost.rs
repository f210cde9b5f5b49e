//! Chooses the algorithm of a collective: the one with the least estimated time, unless the caller has requested
//! another.

use std::fmt;

use super::builder::is_carried;
use super::reduce::{is_flat, is_star};
use crate::call::Collective;
use crate::call::algorithm::{Algorithm, AlgorithmRanges, Size};

/// The kind of links between the participants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum LinkClass {
    /// TCP between processes of one host. The data crosses no network, and the processor copies everything.
    Loopback,
    /// TCP between hosts.
    Tcp,
}

impl fmt::Display for LinkClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LinkClass::Loopback => "loopback",
            LinkClass::Tcp => "tcp",
        })
    }
}

/// The guarantee that a fold must give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Order {
    /// The same bits on every rank.
    Any,
    /// Operands in rank order, because the op is not commutative. Any grouping is allowed.
    Ranks,
    /// All operands in one pass, in rank order, so that every transport gives the same bits (`Config::reproducible`).
    Exact,
}

/// The costs of links of a class, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LinkCost {
    /// From handing over a small message until the peer sees it.
    pub(crate) latency: f64,
    /// Processor time for one message, sent or received, regardless of its length.
    pub(crate) message: f64,
    /// Per byte, one way.
    pub(crate) byte: f64,
    /// Per byte folded or copied.
    pub(crate) fold: f64,
    /// The size in bytes of the segments in which large messages travel.
    pub(crate) segment_bytes: usize,
}

/// The costs of each class of links.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CostTable {
    pub(crate) loopback: LinkCost,
    pub(crate) tcp: LinkCost,
}

impl Default for CostTable {
    /// Returns the costs of the loopback device as measured between two cores of one machine, and of TCP as assumed for
    /// a fast network.
    fn default() -> Self {
        Self {
            loopback: LinkCost { latency: 2_500.0, message: 3_500.0, byte: 0.14, fold: 0.03, segment_bytes: 256 << 10 },
            tcp: LinkCost { latency: 10_000.0, message: 3_000.0, byte: 0.2, fold: 0.03, segment_bytes: 256 << 10 },
        }
    }
}

impl CostTable {
    /// Returns the costs of links of this class.
    pub(crate) fn link(&self, class: LinkClass) -> &LinkCost {
        match class {
            LinkClass::Loopback => &self.loopback,
            LinkClass::Tcp => &self.tcp,
        }
    }
}

/// The call to choose an algorithm for. All participants must ask the same question to get the same answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) kind: Collective,
    /// The length of the whole vector, or of all blocks together for `all_gather` and `reduce_scatter`. Ignored for
    /// kinds with one candidate.
    pub(crate) bytes: usize,
    pub(crate) element_bytes: usize,
    pub(crate) n: usize,
    pub(crate) class: LinkClass,
    pub(crate) order: Order,
}

/// Returns the algorithms of a collective that give this guarantee; never empty.
pub(crate) fn candidates(kind: Collective, order: Order) -> &'static [Algorithm] {
    use Algorithm::{Binomial, Chain, Direct, Doubling, Ring, ScatterGather};
    match (kind, order) {
        (Collective::Barrier, _) => &[Doubling],
        (Collective::AllReduce, Order::Any) => &[Doubling, Ring, Direct],
        (Collective::AllReduce, Order::Ranks) => &[Doubling, Direct],
        (Collective::Reduce, Order::Any) => &[Binomial, ScatterGather, Direct],
        (Collective::Reduce, Order::Ranks) => &[Binomial, Direct],
        (Collective::ReduceScatter | Collective::ReduceScatterV, Order::Any) => &[Ring, Direct],
        (Collective::Broadcast, _) => &[Binomial, Chain],
        (Collective::AllGather | Collective::AllGatherV, _) => &[Doubling, Ring, Direct],
        (Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter | Collective::ReduceScatterV, _) => &[Direct],
        (
            Collective::Gather
            | Collective::GatherV
            | Collective::Scatter
            | Collective::ScatterV
            | Collective::AllToAll
            | Collective::AllToAllV,
            _,
        ) => &[Direct],
    }
}

/// The rules for choosing algorithms.
#[derive(Debug, Clone, Default)]
pub(crate) struct Policy {
    costs: CostTable,
    asked: AlgorithmRanges,
}

impl Policy {
    /// Creates a policy that chooses by these costs, if the program's requests leave a choice.
    pub(crate) fn new(costs: CostTable, asked: AlgorithmRanges) -> Self {
        Self { costs, asked }
    }

    /// Returns the size in bytes of the segments in which large messages travel on links of this class.
    pub(crate) fn segment_bytes(&self, class: LinkClass) -> usize {
        self.costs.link(class).segment_bytes
    }

    /// Returns the algorithm to use.
    pub(crate) fn choose(&self, question: &Question) -> Algorithm {
        let candidates = candidates(question.kind, question.order);
        if let [only] = candidates {
            return *only;
        }
        let estimate = Estimate::new(question, self.costs.link(question.class));
        // Ties go to the earlier candidate, regardless of rounding.
        let cheaper = |best: (Algorithm, f64), other: &Algorithm| {
            let time = estimate.nanoseconds(*other);
            if time < 0.99 * best.1 { (*other, time) } else { best }
        };
        let cheapest = || candidates.iter().fold((candidates[0], f64::INFINITY), cheaper).0;
        self.asked.find(question.bytes, candidates).unwrap_or_else(cheapest)
    }

    /// Returns the choices for `n` participants over links of one class, in the form in which a caller would request
    /// them.
    pub(crate) fn explain(&self, n: usize, class: LinkClass) -> Explanation<'_> {
        Explanation { policy: self, n, class }
    }
}

impl fmt::Display for Policy {
    /// Prints the costs and the caller's requests.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for class in [LinkClass::Loopback, LinkClass::Tcp] {
            let LinkCost { latency, message, byte, fold, segment_bytes, .. } = self.costs.link(class);
            let segment = Size(*segment_bytes);
            writeln!(f, "{class}: latency {latency} ns, message {message} ns, {byte} ns/B, fold {fold} ns/B, segments of {segment}")?;
        }
        if self.asked.is_empty() { write!(f, "requested algorithms: none") } else { write!(f, "requested algorithms: {}", self.asked) }
    }
}

/// Prints a line for each collective that has a choice, e.g. `all_reduce: doubling:0-16K,ring:16K-`.
pub(crate) struct Explanation<'a> {
    policy: &'a Policy,
    n: usize,
    class: LinkClass,
}

impl fmt::Display for Explanation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut sizes: Vec<usize> = std::iter::once(0).chain((8..36).map(|bits| 1 << bits)).chain(self.policy.asked.borders()).collect();
        sizes.sort_unstable();
        sizes.dedup();
        write!(f, "{} ranks, {}", self.n, self.class)?;
        for kind in [Collective::AllReduce, Collective::Reduce, Collective::Broadcast, Collective::AllGather, Collective::ReduceScatter] {
            let choose = |bytes| {
                let (n, class, order) = (self.n, self.class, Order::Any);
                self.policy.choose(&Question { kind, bytes, element_bytes: 1, n, class, order })
            };
            write!(f, "\n{}: {}:0-", kind.name(), choose(0))?;
            for (before, size) in sizes.iter().zip(&sizes[1..]) {
                if choose(*size) != choose(*before) {
                    write!(f, "{},{}:{}-", Size(*size), choose(*size), Size(*size))?;
                }
            }
        }
        Ok(())
    }
}

/// The estimates for one question.
struct Estimate<'a> {
    question: &'a Question,
    cost: &'a LinkCost,
    /// The participants, the bytes, and the number of messages for one share of the vector.
    n: f64,
    bytes: f64,
    share_messages: f64,
    /// ceil(log2 n).
    rounds: f64,
    /// The fraction of the vector that comes from other ranks.
    others: f64,
    /// Per byte received and folded in segments: both proceed at the same time, and the slower one counts.
    overlapped: f64,
    /// Per byte that goes one way only. Over loopback it is half, because `byte` is the time of a processor that sends
    /// and receives.
    one_way: f64,
    /// Per byte when all ranks send to one rank at once, as measured over loopback with four ranks on two processors.
    crowded: f64,
}

impl<'a> Estimate<'a> {
    fn new(question: &'a Question, cost: &'a LinkCost) -> Self {
        let n = question.n as f64;
        Self {
            question,
            cost,
            n,
            bytes: question.bytes as f64,
            share_messages: (question.bytes / question.n).div_ceil(cost.segment_bytes.max(1)).max(1) as f64,
            rounds: f64::from(usize::BITS - (question.n - 1).leading_zeros()),
            others: (n - 1.0) / n,
            overlapped: cost.byte.max(cost.fold),
            one_way: cost.byte * if question.class == LinkClass::Loopback { 0.5 } else { 1.0 },
            crowded: cost.byte * (1.0 + 0.1 * (n - 2.0)).clamp(1.0, 2.0),
        }
    }

    /// Returns the estimated time of this algorithm.
    fn nanoseconds(&self, algorithm: Algorithm) -> f64 {
        match self.question.kind {
            Collective::AllReduce => self.all_reduce(algorithm),
            Collective::Reduce => self.reduce(algorithm),
            Collective::Broadcast => self.broadcast(algorithm),
            Collective::AllGather | Collective::AllGatherV => self.all_gather(algorithm),
            Collective::ReduceScatter | Collective::ReduceScatterV => self.reduce_scatter(algorithm),
            // Each of the other kinds has one algorithm.
            _ => 0.0,
        }
    }

    /// Returns the time in which a part of the vector goes to, or comes from, each other rank.
    fn to_each(&self) -> f64 {
        self.cost.latency + (self.n - 1.0) * self.cost.message + self.others * self.bytes * self.crowded
    }

    /// Returns the time of a message of `bytes` bytes.
    fn hop(&self, bytes: f64) -> f64 {
        self.cost.latency + self.cost.message + bytes * self.cost.byte
    }

    /// Returns the time of a message of `bytes` bytes while nothing is sent in the other direction.
    fn one_way_hop(&self, bytes: f64) -> f64 {
        self.cost.latency + self.cost.message + bytes * self.one_way
    }

    /// Returns the time of an agreement before the data. Between two ranks, the first message of the data is the
    /// agreement.
    fn agreement(&self) -> f64 {
        if self.question.n <= 2 { 0.0 } else { self.rounds * self.hop(0.0) }
    }

    /// Returns the message cost of `times` shares to or from each other rank.
    fn messages(&self, times: f64) -> f64 {
        times * (self.n - 1.0) * self.share_messages * self.cost.message
    }

    /// Returns the message cost of `times` shares around a ring. Both directions are used if there are more than two
    /// ranks and more than one segment.
    fn ring_messages(&self, times: f64) -> f64 {
        let ways = if self.question.n > 2 && self.question.bytes > self.cost.segment_bytes { 2.0 } else { 1.0 };
        let pieces = (self.bytes / self.n / ways / self.cost.segment_bytes.max(1) as f64).ceil().max(1.0);
        times * (self.n - 1.0) * ways * pieces * self.cost.message
    }

    /// Returns the time in which every rank's whole vector goes directly to the rank, or ranks, that fold it.
    fn whole_vectors(&self) -> f64 {
        let each = self.cost.message + self.bytes * (self.crowded + self.cost.fold);
        self.cost.latency + (self.n - 1.0) * each
    }

    /// Returns the time in which all ranks exchange shares of the vector with all others twice, in segments.
    fn shares(&self) -> f64 {
        2.0 * self.cost.latency + self.messages(2.0) + self.others * self.bytes * (self.crowded + self.crowded.max(self.cost.fold))
    }

    fn all_reduce(&self, algorithm: Algorithm) -> f64 {
        let element = self.question.element_bytes.max(1);
        match algorithm {
            Algorithm::Ring => {
                let bytes = self.others * self.bytes * (self.overlapped + self.cost.byte);
                2.0 * (self.n - 1.0) * self.cost.latency + self.ring_messages(2.0) + bytes
            }
            Algorithm::Direct if is_flat(self.question.n, self.question.bytes, element) => self.whole_vectors(),
            Algorithm::Direct => self.shares(),
            _ => {
                let uneven = if self.question.n.is_power_of_two() { 0.0 } else { 1.0 };
                (self.rounds + uneven) * self.hop(self.bytes) + self.rounds * self.bytes * self.cost.fold
            }
        }
    }

    fn reduce(&self, algorithm: Algorithm) -> f64 {
        let element = self.question.element_bytes.max(1);
        match algorithm {
            Algorithm::ScatterGather => {
                let bytes = self.others * self.bytes * (self.overlapped + self.cost.byte);
                self.n * self.cost.latency + self.ring_messages(2.0) + bytes
            }
            Algorithm::Direct if is_star(self.question.n, self.question.bytes, element) => self.whole_vectors(),
            Algorithm::Direct => self.shares(),
            _ => self.rounds * (self.hop(self.bytes) + self.bytes * self.cost.fold),
        }
    }

    fn broadcast(&self, algorithm: Algorithm) -> f64 {
        let agreement = self.agreement();
        let carried = is_carried(self.question.n, self.question.bytes);
        match algorithm {
            _ if self.question.n <= 2 => self.one_way_hop(self.bytes),
            Algorithm::Chain => {
                let segment = self.bytes.min(self.cost.segment_bytes as f64);
                let segments = self.question.bytes.div_ceil(self.cost.segment_bytes.max(1)) as f64;
                agreement + (self.n - 1.0) * self.hop(segment) + segments * self.cost.message + self.bytes * self.cost.byte
            }
            // In all rounds except the first, several ranks send at once.
            _ => {
                let rounds = self.one_way_hop(self.bytes) + (self.rounds - 1.0) * self.hop(self.bytes);
                rounds + if carried { self.bytes * self.cost.fold } else { agreement }
            }
        }
    }

    fn all_gather(&self, algorithm: Algorithm) -> f64 {
        let (agreement, bytes) = (self.agreement(), self.others * self.bytes);
        match algorithm {
            Algorithm::Direct if is_carried(self.question.n, self.question.bytes) => self.to_each() + self.bytes * self.cost.fold,
            Algorithm::Ring => agreement + (self.n / 2.0).floor() * self.cost.latency + self.messages(1.0) + bytes * self.cost.byte,
            Algorithm::Direct => agreement + self.to_each() + self.bytes / self.n * self.cost.fold,
            _ => self.rounds * self.hop(0.0) + bytes * self.cost.byte + 2.0 * self.bytes * self.cost.fold,
        }
    }

    fn reduce_scatter(&self, algorithm: Algorithm) -> f64 {
        let bytes = self.others * self.bytes;
        match algorithm {
            Algorithm::Direct => self.cost.latency + self.messages(1.0) + bytes * self.crowded.max(self.cost.fold),
            _ => (self.n - 1.0) * self.cost.latency + self.ring_messages(1.0) + bytes * self.overlapped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(kind: Collective, bytes: usize, n: usize, class: LinkClass) -> Question {
        Question { kind, bytes, element_bytes: 4, n, class, order: Order::Any }
    }

    fn asked(ranges: &str) -> AlgorithmRanges {
        ranges.parse().expect("ranges")
    }

    #[test]
    fn small_is_chosen_for_latency_and_large_for_bandwidth() {
        let policy = Policy::default();
        for class in [LinkClass::Loopback, LinkClass::Tcp] {
            let choose = |kind, bytes, n| policy.choose(&question(kind, bytes, n, class));
            assert_ne!(choose(Collective::AllReduce, 4, 8), Algorithm::Ring);
            assert_ne!(choose(Collective::AllReduce, 64 << 20, 8), Algorithm::Doubling);
            assert_eq!(choose(Collective::Broadcast, 4, 8), Algorithm::Binomial);
            assert_eq!(choose(Collective::Broadcast, 64 << 20, 8), Algorithm::Chain);
            assert_ne!(choose(Collective::AllGather, 64, 8), Algorithm::Ring);
            assert_ne!(choose(Collective::AllGather, 64 << 20, 8), Algorithm::Doubling);
            assert_ne!(choose(Collective::Reduce, 64 << 20, 8), Algorithm::Binomial);
        }
    }

    #[test]
    fn loopback_is_chosen_for_as_it_was_measured() {
        let policy = Policy::default();
        let choose = |kind, bytes, n| policy.choose(&question(kind, bytes, n, LinkClass::Loopback));
        for bytes in [4, 1 << 10, 64 << 10] {
            assert_eq!(choose(Collective::AllReduce, bytes, 2), Algorithm::Doubling);
            assert_eq!(choose(Collective::AllReduce, bytes, 4), Algorithm::Doubling);
        }
        assert_eq!(choose(Collective::AllGather, 16, 4), Algorithm::Doubling);
        assert_ne!(choose(Collective::AllReduce, 4 << 20, 2), Algorithm::Doubling);
        assert_eq!(choose(Collective::AllReduce, 16 << 20, 4), Algorithm::Ring);
    }

    #[test]
    fn estimates_grow_with_the_size() {
        let table = CostTable::default();
        for class in [LinkClass::Loopback, LinkClass::Tcp] {
            for (kind, algorithm) in
                Collective::ALL.into_iter().flat_map(|kind| candidates(kind, Order::Any).iter().map(move |found| (kind, *found)))
            {
                let time = |bytes| Estimate::new(&question(kind, bytes, 4, class), table.link(class)).nanoseconds(algorithm);
                let has_choice = candidates(kind, Order::Any).len() > 1;
                assert!(!has_choice || (time(0) > 0.0 && time(64 << 20) > time(1 << 20)), "{kind:?} {algorithm}");
            }
        }
    }

    #[test]
    fn every_choice_is_a_candidate() {
        let policy = Policy::new(CostTable::default(), asked("chain:0-,ring:0-1K"));
        for kind in Collective::ALL {
            for order in [Order::Any, Order::Ranks, Order::Exact] {
                for (bytes, n) in [(0, 1), (1, 2), (usize::MAX, 3), (1 << 20, 1000), (17, usize::MAX)] {
                    let chosen = policy.choose(&Question { order, ..question(kind, bytes, n, LinkClass::Tcp) });
                    assert!(candidates(kind, order).contains(&chosen), "{kind:?} {order:?}");
                }
            }
        }
    }

    #[test]
    fn what_was_asked_for_wins_where_it_exists() {
        let policy = Policy::new(CostTable::default(), asked("ring:0-"));
        let ask = |kind, order| policy.choose(&Question { order, ..question(kind, 4, 4, LinkClass::Tcp) });
        assert_eq!(ask(Collective::AllReduce, Order::Any), Algorithm::Ring);
        assert_eq!(ask(Collective::AllReduce, Order::Exact), Algorithm::Direct);
        assert_ne!(ask(Collective::AllReduce, Order::Ranks), Algorithm::Ring);
        assert_eq!(ask(Collective::Broadcast, Order::Any), Algorithm::Binomial);
    }

    #[test]
    fn an_explanation_can_be_asked_for() {
        let policy = Policy::default();
        for (n, class) in [(2, LinkClass::Tcp), (4, LinkClass::Loopback), (16, LinkClass::Tcp)] {
            let text = policy.explain(n, class).to_string();
            for (kind, line) in
                [Collective::AllReduce, Collective::Reduce, Collective::Broadcast, Collective::AllGather, Collective::ReduceScatter]
                    .iter()
                    .zip(text.lines().skip(1))
            {
                let (name, rules) = line.split_once(": ").expect("name and rules");
                assert_eq!(name, kind.name());
                let written = Policy::new(CostTable::default(), asked(rules));
                for bits in 8..36 {
                    let question = Question { element_bytes: 1, ..question(*kind, 1 << bits, n, class) };
                    assert_eq!(written.choose(&question), policy.choose(&question), "{text}");
                }
            }
        }
    }

    #[test]
    fn a_policy_says_what_it_goes_by() {
        let policy = Policy::new(CostTable::default(), asked("ring:16K-"));
        assert_eq!(
            policy.to_string(),
            "loopback: latency 2500 ns, message 3500 ns, 0.14 ns/B, fold 0.03 ns/B, segments of 256K\n\
             tcp: latency 10000 ns, message 3000 ns, 0.2 ns/B, fold 0.03 ns/B, segments of 256K\n\
             requested algorithms: ring:16K-"
        );
    }
}
