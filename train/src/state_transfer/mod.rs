//! Gives state to ranks that lack it, from ranks that have it.
//!
//! # Design
//!
//! Each rank declares the parts that it offers and those that it wants (`StateTransfer`). The ranks exchange their
//! declarations, and every rank computes the same plan (`plan.rs`). Then each rank carries out its own steps of the plan
//! by messages (`messages.rs`), and all ranks compare digests (`digests.rs`). The transfer has its own communicator, so
//! its messages never meet those of the program. If a rank fails, that communicator ends, so no rank waits for ever.

mod digests;
#[cfg(feature = "__internals")]
pub mod fuzz;
mod messages;
mod plan;
mod progress;
mod shares;
mod values;

use std::fmt;

use self::digests::compare;
use self::messages::Mover;
use self::plan::{Declaration, Plan};
use self::values::Parts;
use crate::agreement::everywhere;
use crate::checkpoint::piece::Piece;
use crate::checkpoint::plan::Declared;
use crate::tuning::state_transfer::MOST_DESCRIBED;
use collectives::{Communicator, Element, Error, Result};

pub use self::progress::TransferProgress;

/// The operation in which all ranks fail together, for their errors.
const TRANSFERRING: &str = "transferring state";

/// Sends named tensors from ranks that offer them to ranks that want them, without a disk. For example, newcomers to a
/// running job ([`Communicator::join`]) get the state of the members. If the number of ranks has changed, each rank
/// gets its new share of sharded state.
///
/// Each rank calls [`offer`](Self::offer) for the [`Piece`]s that it has, and [`want`](Self::want) for those that it
/// needs. A rank may do both, even for the same tensor. No rank needs to know the other ranks' pieces. If several ranks
/// offer a piece, each of them sends a part of it.
///
/// ```
/// use collectives::Communicator;
/// use collectives_train::StateTransfer;
/// use collectives_train::checkpoint::Piece;
///
/// let got = Communicator::run_local(3, |comm| {
///     let mut weight = vec![0.5_f32; 6]; // ranks 0 and 1 have it, rank 2 is new
///     let half = [comm.rank() as f64; 4]; // momentum, sharded over ranks 0 and 1
///     let mut third = [0.0; 3];
///     let range = |len: usize, rank: usize| rank * len..(rank * len + len).min(8);
///     let mut transfer = StateTransfer::new(comm)?;
///     if comm.rank() < 2 {
///         transfer.offer("weight", &[6], Piece::Whole, &weight);
///         transfer.offer("momentum", &[8], Piece::Flat(range(4, comm.rank())), &half);
///     } else {
///         weight.fill(0.0);
///         transfer.want("weight", &[6], Piece::Whole, &mut weight);
///     }
///     // The new shares have 3, 3 and 2 elements.
///     let wanted = range(3, comm.rank());
///     transfer.want("momentum", &[8], Piece::Flat(wanted.clone()), &mut third[..wanted.len()]);
///     transfer.run()?;
///     Ok((weight, third))
/// })?;
/// assert!(got.iter().all(|(weight, _)| *weight == [0.5; 6]));
/// let thirds: Vec<[f64; 3]> = got.into_iter().map(|(_, third)| third).collect();
/// assert_eq!(thirds, [[0.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0]]);
/// # Ok::<(), collectives::Error>(())
/// ```
///
/// **Meanwhile.** A transfer has its own communicator, and borrows the tensors. So another thread may make calls on the
/// program's communicator while [`run`](Self::run) runs, and may read what is offered. To change the state meanwhile,
/// offer a copy of it.
///
/// **Memory.** In addition to the tensors, a rank needs at most 17 MiB for messages, about 100 B for each piece of each
/// rank, and the memory of one [`Communicator::duplicate`]. Tensors on a GPU must be copied to the host first.
///
/// **Failures.** If a rank is lost, every rank gets an error, and none waits longer than the timeout. After an error,
/// wanted values may be partly overwritten: if you still need the old values, let the transfer fill a new buffer.
/// Offered values never change. The transfer does not end the program's communicator. After [`Communicator::admit`] or
/// [`Communicator::shrink`], make a new transfer.
pub struct StateTransfer<'a> {
    comm: Communicator,
    declaration: Declaration,
    parts: Parts<'a>,
    progress: TransferProgress,
    mistake: Option<Error>,
}

impl<'a> StateTransfer<'a> {
    /// Creates a transfer between the ranks of a communicator. The transfer has the timeout of `comm`. Collective.
    ///
    /// # Errors
    ///
    /// The errors of [`Communicator::duplicate`].
    pub fn new(comm: &Communicator) -> Result<Self> {
        let (declaration, parts) = (Declaration::default(), Parts::default());
        Ok(Self { comm: comm.duplicate()?, declaration, parts, progress: TransferProgress::default(), mistake: None })
    }

    /// Offers this rank's piece of a tensor to ranks that want elements of it. `values` are the elements of the piece,
    /// in row-major order. `shape` is the shape of the whole tensor, and must be the same on every rank.
    ///
    /// If a rank wants elements of the tensor, the pieces that ranks offer must together be the whole tensor. Several
    /// ranks may offer the same piece, but different pieces must not overlap.
    ///
    /// This call returns no error. [`run`](Self::run) returns `InvalidArgument` if the tensor has no such piece, if
    /// `values` does not have the piece's length, or if the name is empty, contains a `#`, or is `__metadata__`.
    pub fn offer<T: Element>(&mut self, name: &str, shape: &[usize], piece: Piece, values: &'a [T]) -> &mut Self {
        match declared::<T>("StateTransfer::offer", name, shape, piece, values.len()) {
            Ok(declared) => {
                self.declaration.offered.push(declared);
                self.parts.offered.push(crate::bytes::bytes_of(values));
            }
            Err(error) => self.refuse(error),
        }
        self
    }

    /// Asks for a piece of a tensor. The arguments have the same meaning as those of [`offer`](Self::offer), but `run`
    /// overwrites `values` with the elements.
    ///
    /// This call returns no error. [`run`](Self::run) returns `InvalidArgument` in the cases that `offer` lists.
    pub fn want<T: Element>(&mut self, name: &str, shape: &[usize], piece: Piece, values: &'a mut [T]) -> &mut Self {
        match declared::<T>("StateTransfer::want", name, shape, piece, values.len()) {
            Ok(declared) => {
                self.declaration.wanted.push(declared);
                self.parts.wanted.push(Box::new(values));
            }
            Err(error) => self.refuse(error),
        }
        self
    }

    /// Makes [`run`](Self::run) fail on every rank. The first error counts.
    fn refuse(&mut self, mistake: Error) {
        self.mistake.get_or_insert(mistake);
    }

    /// Returns a handle that shows how far the transfer has come.
    ///
    /// ```
    /// use collectives::Communicator;
    /// use collectives_train::StateTransfer;
    /// use collectives_train::checkpoint::Piece;
    ///
    /// Communicator::run_local(2, |comm| {
    ///     let mut weight = vec![comm.rank() as f32; 1000];
    ///     let mut transfer = StateTransfer::new(comm)?;
    ///     match comm.rank() {
    ///         0 => transfer.offer("weight", &[1000], Piece::Whole, &weight),
    ///         _ => transfer.want("weight", &[1000], Piece::Whole, &mut weight),
    ///     };
    ///     let progress = transfer.progress();
    ///     std::thread::scope(|scope| {
    ///         let moving = scope.spawn(|| transfer.run());
    ///         // Meanwhile, this thread computes, makes calls on `comm`, and shows the progress.
    ///         println!("{} of {:?} bytes", progress.moved_bytes(), progress.total_bytes());
    ///         moving.join().expect("it does not panic")
    ///     })?;
    ///     assert_eq!((progress.moved_bytes(), progress.total_bytes()), (4000, Some(4000)));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), collectives::Error>(())
    /// ```
    #[must_use]
    pub fn progress(&self) -> TransferProgress {
        self.progress.clone()
    }

    /// Sends and receives all elements, and compares the ranks' copies. Collective on the transfer's own communicator:
    /// every rank must call `run`, and may call it in any thread.
    ///
    /// **Cost**: each wanted element is sent once to each rank that wants it. If that rank also offers the element, the
    /// element is copied instead. Each rank reads its pieces once more to compute their SHA-256. Every rank receives
    /// the description of each piece: about 100 B. If no rank wants anything, only the descriptions are exchanged.
    ///
    /// # Errors
    ///
    /// If one rank fails, all fail.
    ///
    /// - `InvalidArgument` if an earlier call on this transfer had invalid arguments. Other ranks get an `Io` that names
    ///   the failing rank and the reason.
    /// - `InvalidArgument` on every rank if a rank wants a tensor that no rank offers, or that ranks offer only in part;
    ///   if ranks name different types or shapes; or if offered pieces overlap. The error names the tensor and the ranks.
    /// - `InvalidArgument` on every rank if the transfer may need more than 2²⁸ messages in total. A message has elements
    ///   of one offered piece and one wanted piece, and at most 1 MiB.
    /// - `Mismatch` on every rank if several ranks offer copies that differ, or if the copy that a rank got differs
    ///   from the one that was offered. The error names the tensor and the ranks.
    /// - The errors common to all collectives, if a rank is lost or late. Ranks that did not detect this themselves get
    ///   `Aborted`.
    pub fn run(mut self) -> Result<()> {
        self.transfer().map_err(|error| match error {
            // The program does not know the transfer's communicator. So it gets the error that has ended it.
            Error::Poisoned { cause, .. } => (*cause).clone(),
            error => error,
        })
    }

    fn transfer(&mut self) -> Result<()> {
        everywhere(&self.comm, TRANSFERRING, self.mistake.take().map_or(Ok(()), Err))?;
        let all = self.exchange()?;
        // All ranks have the same declarations, so this is every rank's error.
        let plan = Plan::new(&all).map_err(|reason| Error::argument("StateTransfer::run", reason))?;
        drop(all);
        self.carry_out(&plan).inspect_err(|error| {
            // Other ranks may wait for this rank's messages. After a `Mismatch`, no rank waits.
            if !error.is_mismatch() {
                self.comm.abort();
            }
        })
    }

    fn carry_out(&mut self, plan: &Plan) -> Result<()> {
        let Self { comm, parts, progress, .. } = self;
        let mut mover = Mover { comm, plan, parts, progress, free: Vec::new() };
        progress.begin(mover.total_bytes());
        mover.run()?;
        compare(comm, plan, parts)
    }

    /// Returns the declarations of all ranks.
    fn exchange(&self) -> Result<Vec<Declaration>> {
        let comm = &self.comm;
        let mine = serde_json::to_vec(&self.declaration).map_err(|error| Error::argument("StateTransfer::run", error.to_string()));
        let mine = everywhere(comm, TRANSFERRING, mine)?;
        let mut lengths = vec![0_u64; comm.world_size()];
        comm.all_gather_into(&[mine.len() as u64], &mut lengths)?;
        let total = lengths.iter().try_fold(0_u64, |sum, length| sum.checked_add(*length));
        if total.is_none_or(|total| total > MOST_DESCRIBED) {
            let reason = format!("the ranks' descriptions of their tensors have {lengths:?} B; the limit is {MOST_DESCRIBED} B in total");
            return Err(Error::argument("StateTransfer::run", reason));
        }
        let counts: Vec<usize> = lengths.iter().map(|length| *length as usize).collect();
        let mut text = vec![0; counts.iter().sum()];
        comm.all_gather_v_into(&mine, &mut text, &counts)?;
        let (mut all, mut rest) = (Vec::new(), &text[..]);
        for (peer, count) in comm.peers().iter().zip(counts) {
            let (theirs, behind) = rest.split_at(count);
            let wrong = |error: serde_json::Error| Error::Protocol { with: peer.to_string(), reason: error.to_string() };
            all.push(serde_json::from_slice(theirs).map_err(wrong)?);
            rest = behind;
        }
        Ok(all)
    }
}

/// Declares a piece of `len` elements, if the tensor has such a piece.
fn declared<T: Element>(call: &'static str, name: &str, shape: &[usize], piece: Piece, len: usize) -> Result<Declared> {
    let checked = piece.extent(shape).and_then(|extent| match extent.len() == len {
        true => Declared::new(name, T::ELEMENT_TYPE, shape, piece),
        false => Err(format!("{len} elements were passed, but the part {piece} of a tensor of shape {shape:?} has {}", extent.len())),
    });
    checked.map_err(|reason| Error::argument(call, format!("tensor {name:?}: {reason}")))
}

impl fmt::Debug for StateTransfer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Declaration { offered, wanted } = &self.declaration;
        write!(f, "StateTransfer({} offered and {} wanted pieces on {:?})", offered.len(), wanted.len(), self.comm)
    }
}

/// Checks that a thread can run a transfer.
const _: () = {
    const fn sendable<T: Send>() {}
    sendable::<StateTransfer<'static>>();
};

#[cfg(test)]
mod tests;
