//! Symmetric windows of an `NcclCommunicator`. Before any rank registers a buffer, every rank reports over NCCL whether
//! its buffer is suitable, and the buffer's length. If only one rank refused, the other ranks would wait inside NCCL.
//! If NCCL refused, its communicator would end.

#![expect(unsafe_code, reason = "how windows are used in later calls cannot be checked")]

use crate::base::deadline::Deadline;
use crate::call::element::Data;
use crate::device::{NcclCommunicator, Registrable, Window, Words, suits_window};
use crate::error::{Error, Peer, Result};

const CALL: &str = "window";

/// The tag that distinguishes a rank's words from those of other calls.
const TAG: [u8; 8] = *b"window 1";

/// Returns what a rank sends: its tag, the length of its buffer, and whether it has one.
fn words(suits: &Result<usize>) -> Words {
    let mut words: Words = [0; _];
    words[..8].copy_from_slice(&TAG);
    words[8..16].copy_from_slice(&(*suits.as_ref().unwrap_or(&0) as u64).to_le_bytes());
    words[16] = suits.is_ok().into();
    words
}

/// Returns an error unless all ranks open windows of one length. Every rank gets the same result.
fn agreed(heard: &[Words]) -> Result<()> {
    let in_words = |words: &Words| match words.first_chunk() {
        Some(&TAG) => format!("{CALL} on {} B", words[8..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))),
        _ => "another call".to_owned(),
    };
    let differ = |other: usize| Error::Mismatch {
        first: Peer::unknown(0),
        first_call: in_words(&heard[0]),
        second: Peer::unknown(other),
        second_call: in_words(&heard[other]),
    };
    let is_other = |words: &Words| !words.starts_with(&TAG);
    let refuses = |words: &Words| words[16] == 0;
    if let Some(other) = heard.iter().position(is_other) {
        return Err(differ(other));
    }
    if let Some(rank) = heard.iter().position(refuses) {
        let reason = format!(
            "rank {rank} has no buffer that can be a window (the error on that rank gives the reason), so no rank has registered its buffer"
        );
        return Err(Error::unsupported("a window", reason));
    }
    heard.iter().position(|words| words[8..16] != heard[0][8..16]).map_or(Ok(()), |other| Err(differ(other)))
}

impl NcclCommunicator {
    /// Opens a symmetric NCCL window over a buffer. All ranks must make this call, with buffers of the same length.
    /// Needs NCCL 2.27.3 or later.
    ///
    /// The memory must come from [`NcclCommunicator::allocate`] or the driver's `cuMemCreate`, because NCCL passes a
    /// handle of it to the other ranks. A `CudaSlice` does not work, because its memory comes from a pool. The ranks
    /// first compare their buffers over NCCL, so that every rank gets an error if the buffer of one rank is not
    /// suitable. After such an error, the communicator stays usable, and the buffers are dropped.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if this rank's buffer is empty or belongs to another context.
    /// - `Unsupported` if this rank's memory does not come from `allocate` or `cuMemCreate`. Memory of `cuMemCreate` must
    ///   also begin at a multiple of 4 KiB in its allocation.
    /// - `Unsupported` if this rank's buffer is suitable, but another rank's is not.
    /// - `Unsupported` if NCCL is too old.
    /// - `Mismatch` if the ranks' buffers differ in length, or if another rank makes a different call.
    /// - `Nccl`, `Timeout`.
    ///
    /// # Safety
    ///
    /// NCCL derives the other ranks' windows from this rank's own window, so all ranks must open their windows in the
    /// same order. In each later call, either all ranks must use the windows that they opened together, or no rank may
    /// use a window.
    #[doc(alias = "ncclCommWindowRegister")]
    pub unsafe fn window<T: Data, B: Registrable<Element = T>>(&self, buffer: B) -> Result<Window<T, B>> {
        let (backend, timeout) = (self.backend(), self.config().timeout);
        let _turn = self.turn(CALL)?;
        let suits = suits_window(backend.comm(), &buffer);
        let heard = if self.world_size() == 1 {
            vec![words(&suits)]
        } else {
            backend.gather_words(&words(&suits), &|| format!("{CALL} of rank {} of {}", self.rank(), self.world_size()), timeout)?
        };
        // This rank's own error has more detail than the fact that one rank refused.
        suits?;
        agreed(&heard)?;
        // From here on the others register their windows and wait for this rank's. A refusal on this rank alone ends
        // the communicator. If the library lacks a function, it does so on all ranks.
        let opened = Window::new(backend.comm(), buffer, &Deadline::after(timeout));
        opened.inspect_err(|error| {
            if !error.is_unsupported() {
                backend.comm().fail(error);
            }
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn ranks_open_windows_of_one_length_or_none() {
        let refused = || words(&Err(Error::unsupported("a window", "a pool's")));
        assert!(agreed(&[words(&Ok(8)), words(&Ok(8))]).is_ok());
        let error = agreed(&[words(&Ok(8)), refused(), refused()]).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("rank 1"), "{error}");
        let error = agreed(&[words(&Ok(8)), words(&Ok(8)), words(&Ok(16))]).unwrap_err().to_string();
        assert!(error.contains("window on 8 B") && error.contains("window on 16 B") && error.contains("rank 2"), "{error}");
        let error = agreed(&[words(&Ok(8)), [7; size_of::<Words>()]]).unwrap_err().to_string();
        assert!(error.contains("another call"), "{error}");
    }
}
