//! The arguments of one collective on device memory, for raw and typed calls that are made without a `Communicator`.

use super::plan::{Job, Reduction};
use crate::call::element::TypeTag;
use crate::call::job::Operands;
use crate::call::{BlockLayout, Call, Collective};
use crate::error::{Error, Result};

/// Unchecked arguments. Lengths are in elements.
#[derive(Debug)]
pub(crate) struct Arguments {
    /// All-reduce, reduce, broadcast, all-gather, reduce-scatter or all-to-all.
    pub(crate) kind: Collective,
    pub(crate) root: Option<usize>,
    /// The reduction with its code; the code is 0 if nothing is reduced.
    pub(crate) reduction: (u64, Option<Reduction>),
    pub(crate) element: TypeTag,
    /// The length of the memory that is read; `None` if this rank reads nothing, or reads the destination.
    pub(crate) source: Option<usize>,
    /// The length of the memory that is written; `None` if this rank receives nothing.
    pub(crate) destination: Option<usize>,
    /// Whether the destination is also read.
    pub(crate) in_place: bool,
}

impl Arguments {
    /// Checks the arguments for a communicator of `size` ranks, and returns the call. Its buffers have no addresses
    /// yet, and the call has no number.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a root that does not exist, and for lengths that do not fit.
    pub(crate) fn job(self, size: usize) -> Result<Job> {
        let Self { kind, root, reduction: (op, reduction), element, source, destination, in_place } = self;
        if root.is_some_and(|root| root >= size) {
            return Err(Error::argument(kind.name(), format!("the root does not exist: the ranks are 0 to {}", size - 1)));
        }
        let block = block(kind, source, destination, in_place, size)?;
        let element_bytes = element.size_bytes();
        let bytes = |elements: usize| {
            let bytes = elements.checked_mul(element_bytes);
            bytes.ok_or_else(|| Error::argument(kind.name(), format!("{elements} elements do not fit into the address space")))
        };
        let destination_len = bytes(destination.unwrap_or_default())?;
        let source_len = if in_place { destination_len } else { bytes(source.unwrap_or_default())? };
        let root = root.map(|root| root as u32);
        let call = Call { kind, op, element, count: block as u64, root, counts_hash: 0, sequence: 0 };
        let memory = Operands { source: 0, source_len, destination: 0, destination_len };
        Ok(Job { call, memory, layout: BlockLayout::Equal(block * element_bytes), lists: None, reduction, element_bytes, in_place })
    }
}

/// Returns the number of elements of a block, or of the whole vector of a call without blocks.
fn block(kind: Collective, source: Option<usize>, destination: Option<usize>, in_place: bool, size: usize) -> Result<usize> {
    // Whether there is a block for each rank.
    let (source_has_all, destination_has_all) = match kind {
        Collective::AllGather => (false, true),
        Collective::ReduceScatter => (true, in_place),
        Collective::AllToAll => (true, true),
        _ => (false, false),
    };
    let share = |what: &str, length: usize, has_all: bool| match has_all {
        true if !length.is_multiple_of(size) => {
            Err(Error::argument(kind.name(), format!("{what} has {length} elements, which is not a multiple of the world size {size}")))
        }
        true => Ok(length / size),
        false => Ok(length),
    };
    let read = source.map(|length| share("the source", length, source_has_all)).transpose()?;
    let written = destination.map(|length| share("the destination", length, destination_has_all)).transpose()?;
    match (read, written) {
        (Some(read), Some(written)) if read != written => {
            let (source, destination) = (source.unwrap_or_default(), destination.unwrap_or_default());
            Err(Error::argument(
                kind.name(),
                format!("with {size} ranks, a source of {source} elements does not fit a destination of {destination} elements"),
            ))
        }
        (read, written) => Ok(written.or(read).unwrap_or_default()),
    }
}
