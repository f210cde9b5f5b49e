//! Decides which rank sends which elements to which rank. Every rank computes the same plan from the same declarations.
//! Pure.
//!
//! The elements that a rank wants are divided into *windows*, and a window by the offered parts that contain it. Each of
//! these *steps* is one message, or a copy if the rank has the elements itself. A window is small enough that every rank
//! which offers the elements can send some, and that a message stays small. The steps of different receivers alternate.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::checkpoint::piece::{Extent, element_count, lens_by_source, most_pairs};
use crate::checkpoint::plan::{Declared, Holders, distinct, element_bytes};
use crate::tuning::state_transfer::{COMPARED_HOLDERS, LEAST_BYTES, MOST_BYTES, MOST_MESSAGES};

/// The parts of tensors that a rank offers, and those that it wants.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Declaration {
    pub(super) offered: Vec<Declared>,
    pub(super) wanted: Vec<Declared>,
}

/// A tensor that a rank wants.
#[derive(Debug)]
pub(super) struct Tensor {
    pub(super) name: String,
    /// The type's name and the shape, for errors.
    pub(super) form: String,
    pub(super) element_bytes: usize,
    /// The distinct parts that ranks offer, in order. Together they are the whole tensor.
    pub(super) sources: Vec<Extent>,
    /// The ranks that offer each source, each with the number of its part.
    pub(super) holders: Vec<Holders>,
    /// The most ranks that offer the same source.
    most_holders: usize,
}

/// A part that a rank wants.
#[derive(Debug)]
pub(super) struct Want {
    pub(super) tensor: usize,
    pub(super) rank: usize,
    /// The number of the part among those that the rank wants.
    pub(super) number: usize,
    pub(super) extent: Extent,
}

/// Everything that is sent.
#[derive(Debug, Default)]
pub(super) struct Plan {
    ranks: usize,
    /// The fewest and the most bytes of a window.
    pub(super) limits: (usize, usize),
    pub(super) tensors: Vec<Tensor>,
    /// In the order of ranks.
    pub(super) wants: Vec<Want>,
}

/// One message or copy: the elements at `window` of a wanted part that are in one source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) want: usize,
    pub(super) source: usize,
    /// The rank that sends, and the number of its part.
    pub(super) from: (usize, usize),
    /// Elements of the wanted part.
    pub(super) window: Range<usize>,
    /// The number of elements that are sent.
    pub(super) len: usize,
}

/// The ranks that offer and want parts of a tensor, each with the number of its part.
type Roles = (Holders, Holders);

impl Plan {
    /// Plans the transfer of the parts that all ranks have declared. The error says why it is impossible.
    pub(super) fn new(all: &[Declaration]) -> Result<Self, String> {
        let mut tensors: BTreeMap<&str, Roles> = BTreeMap::new();
        for (rank, Declaration { offered, wanted }) in all.iter().enumerate() {
            offered.iter().enumerate().for_each(|(number, part)| tensors.entry(&part.name).or_default().0.push((rank, number)));
            wanted.iter().enumerate().for_each(|(number, part)| tensors.entry(&part.name).or_default().1.push((rank, number)));
        }
        let mut plan = Self { ranks: all.len(), limits: (LEAST_BYTES, MOST_BYTES), ..Self::default() };
        for (name, roles) in tensors.iter().filter(|(_, (_, wanted))| !wanted.is_empty()) {
            plan.add(all, name, roles).map_err(|reason| format!("tensor {name:?}: {reason}"))?;
        }
        plan.wants.sort_by_key(|want| want.rank);
        let messages = |want: &Want| most_pairs(&want.extent, plan.window_len(want), &plan.tensors[want.tensor].sources);
        match plan.wants.iter().map(messages).fold(0, u64::saturating_add) {
            0..=MOST_MESSAGES => Ok(plan),
            more => Err(format!(
                "the transfer needs up to {more} messages in total; the limit is {MOST_MESSAGES}: transfer to fewer ranks at a time, or divide \
                 the tensors into fewer parts"
            )),
        }
    }

    /// Adds a tensor, and the parts of it that ranks want.
    fn add(&mut self, all: &[Declaration], name: &str, (offered, wanted): &Roles) -> Result<(), String> {
        let Some((first, number)) = offered.first().copied() else {
            let rank = wanted.first().map_or(0, |want| want.0);
            return Err(format!("rank {rank} wants it, but no rank offers it"));
        };
        let Declared { dtype, shape, .. } = &all[first].offered[number];
        for (rank, number) in wanted {
            let theirs = &all[*rank].wanted[*number];
            if (&theirs.dtype, &theirs.shape) != (dtype, shape) {
                return Err(format!(
                    "rank {first} offers {dtype}{shape:?}, but rank {rank} wants {}{:?}: pass the same type and shape",
                    theirs.dtype, theirs.shape
                ));
            }
        }
        let holders = distinct(|(rank, number)| &all[*rank].offered[*number], offered)?;
        if element_count(shape)? == 0 {
            return Ok(());
        }
        let first_of = |holders: &Holders| holders.first().map(|(rank, number)| all[*rank].offered[*number].piece.extent(shape));
        let sources = holders.iter().filter_map(first_of).collect::<Result<Vec<_>, _>>()?;
        let tensor = self.tensors.len();
        for (rank, number) in wanted {
            let extent = all[*rank].wanted[*number].piece.extent(shape)?;
            if extent.len() > 0 {
                self.wants.push(Want { tensor, rank: *rank, number: *number, extent });
            }
        }
        let (name, form, element_bytes) = (name.to_owned(), format!("{dtype}{shape:?}"), element_bytes(dtype)?);
        let most_holders = holders.iter().map(Vec::len).max().unwrap_or(1);
        self.tensors.push(Tensor { name, form, element_bytes, sources, holders, most_holders });
        Ok(())
    }

    /// Returns all steps, in an order that is the same on every rank.
    pub(super) fn steps(&self) -> Steps<'_> {
        let mut receivers: VecDeque<Receiver> = VecDeque::new();
        for (index, want) in self.wants.iter().enumerate() {
            match receivers.back_mut().filter(|receiver| receiver.rank == want.rank) {
                Some(receiver) => receiver.wants.end = index + 1,
                None => {
                    let received = HashMap::new();
                    receivers.push_back(Receiver { rank: want.rank, wants: index..index + 1, reached: 0, received, steps: want.rank });
                }
            }
        }
        Steps { plan: self, receivers, ready: VecDeque::new(), sent: vec![0; self.ranks] }
    }

    /// Returns the number of elements of a window of a wanted part.
    fn window_len(&self, want: &Want) -> usize {
        let tensor = &self.tensors[want.tensor];
        let bytes = want.extent.len() * tensor.element_bytes;
        (bytes.div_ceil(tensor.most_holders.max(1)).clamp(self.limits.0, self.limits.1) / tensor.element_bytes).max(1)
    }
}

/// A rank that receives.
struct Receiver {
    rank: usize,
    /// Its wants that are not done. The first one is done up to `reached`.
    wants: Range<usize>,
    reached: usize,
    /// The bytes that it receives from each rank in the steps so far.
    received: HashMap<usize, u64>,
    /// The number of its steps so far, plus its rank: different receivers begin with different holders.
    steps: usize,
}

/// The steps of a plan.
pub(super) struct Steps<'a> {
    plan: &'a Plan,
    receivers: VecDeque<Receiver>,
    ready: VecDeque<Step>,
    /// The bytes that each rank sends in the steps so far.
    sent: Vec<u64>,
}

impl Iterator for Steps<'_> {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        loop {
            if let Some(step) = self.ready.pop_front() {
                return Some(step);
            }
            let mut receiver = self.receivers.pop_front()?;
            if self.divide_next(&mut receiver) {
                self.receivers.push_back(receiver);
            }
        }
    }
}

impl Steps<'_> {
    /// Divides the next window of a receiver. Returns `false` if there was none.
    fn divide_next(&mut self, receiver: &mut Receiver) -> bool {
        let index = receiver.wants.start;
        if receiver.wants.is_empty() {
            return false;
        }
        let want = &self.plan.wants[index];
        let window = receiver.reached..(receiver.reached.saturating_add(self.plan.window_len(want))).min(want.extent.len());
        receiver.reached = window.end;
        if window.end == want.extent.len() {
            (receiver.wants.start, receiver.reached) = (index + 1, 0);
        }
        let tensor = &self.plan.tensors[want.tensor];
        for (source, len) in lens_by_source(&want.extent, window.clone(), &tensor.sources) {
            let bytes = (len * tensor.element_bytes) as u64;
            if let Some(from) = self.sender(receiver, &tensor.holders[source], bytes) {
                self.ready.push_back(Step { want: index, source, from, window: window.clone(), len });
            }
        }
        true
    }

    /// Chooses the holder that sends: the receiver itself, or the holder that has sent least to the receiver, and among
    /// equals the one that has sent least in total. Of many holders, each step compares only some, and the next step
    /// compares those from the next holder on.
    fn sender(&mut self, receiver: &mut Receiver, holders: &Holders, bytes: u64) -> Option<(usize, usize)> {
        // Holders are in the order of ranks.
        if let Ok(own) = holders.binary_search_by_key(&receiver.rank, |(rank, _)| *rank) {
            return Some(holders[own]);
        }
        let first = if holders.len() > COMPARED_HOLDERS { receiver.steps % holders.len() } else { 0 };
        // Nothing received yet comes before any number of bytes.
        let compared = holders[first..].iter().chain(&holders[..first]).take(COMPARED_HOLDERS);
        let (rank, number) = *compared.min_by_key(|(rank, _)| (receiver.received.get(rank), self.sent[*rank]))?;
        receiver.steps = receiver.steps.wrapping_add(1);
        *receiver.received.entry(rank).or_default() += bytes;
        self.sent[rank] += bytes;
        Some((rank, number))
    }
}

#[cfg(test)]
mod tests;
