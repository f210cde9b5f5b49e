//! The matching of messages and receives. No I/O.
//!
//! A message is matched with the earliest posted receive, and a receive with the earliest arrived message. Source and
//! tag must be equal, unless the receive leaves them open. Each source's messages are kept in arrival order. So
//! messages with the same source and tag are received in the order in which they were sent.

use std::collections::VecDeque;

/// A receive that waits for its message.
#[derive(Debug)]
struct Posted {
    order: u64,
    tag: Option<u64>,
    request: u32,
}

/// A message that waits for its receive.
#[derive(Debug)]
struct Arrived<A> {
    order: u64,
    tag: u64,
    what: A,
}

/// The two queues. They are never both non-empty for the same source and tag.
#[derive(Debug)]
pub(super) struct Matching<A> {
    /// Receives by source; the last queue holds those from any source.
    posted: Vec<VecDeque<Posted>>,
    /// Messages by source.
    arrived: Vec<VecDeque<Arrived<A>>>,
    /// The counter that numbers receives and messages in the order in which they arrive.
    order: u64,
}

impl<A> Matching<A> {
    pub(super) fn new(world_size: usize) -> Self {
        Self {
            posted: (0..=world_size).map(|_| VecDeque::new()).collect(),
            arrived: (0..world_size).map(|_| VecDeque::new()).collect(),
            order: 0,
        }
    }

    /// Returns the number of something that arrives now, in the order of all arrivals.
    pub(super) fn next_order(&mut self) -> u64 {
        self.order += 1;
        self.order
    }

    /// Returns the index of the queue of receives from `source`.
    fn queue(&self, source: Option<usize>) -> usize {
        source.unwrap_or(self.arrived.len())
    }

    /// Adds a receive for which there is no message yet ([`Matching::take_arrived`] returned `None`).
    pub(super) fn post(&mut self, source: Option<usize>, tag: Option<u64>, request: u32) {
        let order = self.next_order();
        let queue = self.queue(source);
        self.posted[queue].push_back(Posted { order, tag, request });
    }

    /// Takes the receive that matches a message of this source and tag.
    pub(super) fn take_posted(&mut self, source: usize, tag: u64) -> Option<u32> {
        let first = |queue: usize| {
            let accepts = |posted: &Posted| posted.tag.is_none_or(|wanted| wanted == tag);
            let at = self.posted[queue].iter().position(accepts)?;
            Some((self.posted[queue][at].order, queue, at))
        };
        let (_, queue, at) = [first(source), first(self.queue(None))].into_iter().flatten().min()?;
        self.posted[queue].remove(at).map(|posted| posted.request)
    }

    /// Returns the source of a message with this tag that has arrived and has not been received.
    #[cfg(feature = "cuda")]
    pub(super) fn has_arrived(&self, tag: u64) -> Option<usize> {
        self.arrived.iter().position(|from| from.iter().any(|arrived| arrived.tag == tag))
    }

    /// Whether there is no waiting receive that could match a message of this source, and no waiting message of it.
    #[inline]
    pub(super) fn is_clear(&self, source: usize) -> bool {
        self.arrived[source].is_empty() && self.posted[source].is_empty() && self.posted[self.queue(None)].is_empty()
    }

    /// Removes a waiting receive.
    pub(super) fn unpost(&mut self, source: Option<usize>, request: u32) {
        let queue = self.queue(source);
        self.posted[queue].retain(|posted| posted.request != request);
    }

    /// Adds a message for which there is no receive yet ([`Matching::take_posted`] returned `None`).
    pub(super) fn arrive(&mut self, source: usize, tag: u64, what: A) {
        let order = self.next_order();
        self.arrived[source].push_back(Arrived { order, tag, what });
    }

    /// Adds a message for which there is no receive, at its original position.
    pub(super) fn put_back(&mut self, source: usize, tag: u64, order: u64, what: A) {
        let from = &mut self.arrived[source];
        let at = from.partition_point(|arrived| arrived.order < order);
        from.insert(at, Arrived { order, tag, what });
    }

    /// Returns the first unmatched message of `source` that satisfies `fits`.
    pub(super) fn find_arrived(&mut self, source: usize, mut fits: impl FnMut(&A) -> bool) -> Option<&mut A> {
        self.arrived[source].iter_mut().map(|arrived| &mut arrived.what).find(|what| fits(what))
    }

    /// Takes the message that matches a receive of this source and tag, with its own source, tag and order.
    pub(super) fn take_arrived(&mut self, source: Option<usize>, tag: Option<u64>) -> Option<(usize, u64, u64, A)> {
        let first = |source: usize| {
            let accepts = |arrived: &Arrived<A>| tag.is_none_or(|wanted| wanted == arrived.tag);
            let at = self.arrived[source].iter().position(accepts)?;
            Some((self.arrived[source][at].order, source, at))
        };
        let (order, source, at) = match source {
            Some(source) => first(source)?,
            None => (0..self.arrived.len()).filter_map(first).min()?,
        };
        self.arrived[source].remove(at).map(|arrived| (source, arrived.tag, order, arrived.what))
    }

    /// Removes the messages of `source` that satisfy `fits`, and passes them to `each`.
    pub(super) fn take_back(&mut self, source: usize, mut fits: impl FnMut(&A) -> bool, mut each: impl FnMut(A)) {
        while let Some(at) = self.arrived[source].iter().position(|arrived| fits(&arrived.what)) {
            if let Some(arrived) = self.arrived[source].remove(at) {
                each(arrived.what);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::random::Random;

    /// The same rules, over two plain lists.
    #[derive(Default)]
    struct Oracle {
        posted: Vec<(Option<usize>, Option<u64>, u32)>,
        arrived: Vec<(usize, u64, u32)>,
    }

    fn next(matching: &mut Matching<u32>, (source, tag): (Option<usize>, Option<u64>)) -> Option<(usize, u64, u32)> {
        matching.take_arrived(source, tag).map(|(source, tag, _, what)| (source, tag, what))
    }

    #[test]
    fn a_message_that_is_put_back_goes_before_those_that_came_after_it() {
        let mut matching = Matching::new(2);
        for what in [1, 2, 3] {
            matching.arrive(0, 7, what);
        }
        let (_, _, order, first) = matching.take_arrived(Some(0), Some(7)).unwrap();
        matching.arrive(1, 7, 4);
        let met = matching.next_order();
        matching.arrive(0, 7, 6);
        matching.put_back(0, 7, met, 5);
        matching.put_back(0, 7, order, first);
        *matching.find_arrived(0, |what| *what == 3).unwrap() = 30;
        assert!(matching.find_arrived(1, |what| *what == 3).is_none());
        let all: Vec<u32> = std::iter::from_fn(|| next(&mut matching, (None, None))).map(|(_, _, what)| what).collect();
        assert_eq!(all, [1, 2, 30, 4, 5, 6]);
    }

    fn fits((source, tag): (Option<usize>, Option<u64>), message: (usize, u64)) -> bool {
        source.is_none_or(|source| source == message.0) && tag.is_none_or(|tag| tag == message.1)
    }

    #[test]
    fn matches_as_two_plain_lists_do() {
        let seed = 0x5eed_0002;
        let mut random = Random(seed);
        let mut matching = Matching::new(4);
        let mut oracle = Oracle::default();
        let mut matched = 0;
        for step in 0..20_000_u32 {
            let (source, tag) = (random.below(4), random.below(3) as u64);
            match random.below(5) {
                0 | 1 => {
                    let wanted = ((random.below(3) > 0).then_some(source), (random.below(3) > 0).then_some(tag));
                    let at = oracle.arrived.iter().position(|message| fits(wanted, (message.0, message.1)));
                    let expected = at.map(|at| oracle.arrived.remove(at));
                    assert_eq!(next(&mut matching, wanted), expected, "seed {seed:#x} step {step}");
                    matched += usize::from(expected.is_some());
                    if expected.is_none() {
                        matching.post(wanted.0, wanted.1, step);
                        oracle.posted.push((wanted.0, wanted.1, step));
                    }
                }
                2 | 3 => {
                    let at = oracle.posted.iter().position(|posted| fits((posted.0, posted.1), (source, tag)));
                    let expected = at.map(|at| oracle.posted.remove(at).2);
                    assert_eq!(matching.take_posted(source, tag), expected, "seed {seed:#x} step {step}");
                    if expected.is_none() {
                        matching.arrive(source, tag, step);
                        oracle.arrived.push((source, tag, step));
                    }
                }
                _ if oracle.posted.is_empty() => {}
                _ => {
                    let (source, _, request) = oracle.posted.remove(random.below(oracle.posted.len()));
                    matching.unpost(source, request);
                }
            }
        }
        assert!(matched > 1000, "only {matched} messages met a receive");
    }

    #[test]
    fn messages_are_taken_back_from_one_source_only() {
        let mut matching = Matching::new(2);
        for (source, what) in [(0, 1), (1, 2), (0, 3), (0, 4)] {
            matching.arrive(source, 0, what);
        }
        let mut taken = Vec::new();
        matching.take_back(0, |what| *what != 3, |what| taken.push(what));
        assert_eq!(taken, [1, 4]);
        assert_eq!(next(&mut matching, (None, None)), Some((1, 0, 2)));
        assert_eq!(next(&mut matching, (None, None)), Some((0, 0, 3)));
        assert_eq!(next(&mut matching, (None, None)), None);
    }
}
