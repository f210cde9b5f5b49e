//! The data that ranks without a host backend send each other before a call is queued. Each rank sends 64 bytes, over
//! NCCL itself, on a separate stream.

#![expect(unsafe_code, reason = "copies to and from the backend's own device memory")]

use std::time::Duration;

use cudarc::driver::{DriverError, result};
use nccl_sys::Version;

use super::enqueue::{Running, together};
use super::kept_plan::Steps;
use super::{DeviceBackend, WORDS_BYTES, Words};
use crate::base::deadline::Deadline;
use crate::base::tuning::device::HEARING_WAIT;
use crate::device::driver::{self, cuda_error};
use crate::device::plan::{Plan, Step, Transfer};
use crate::error::Error;
use crate::error::Result;

/// The settings of a backend that decide how calls are made: 16 bytes that must be the same on all ranks.
pub(crate) type Terms = [u8; 16];

impl DeviceBackend {
    /// Sends the same words to every rank and returns the words of each rank. This is one NCCL all-gather; the function
    /// waits for its end.
    ///
    /// # Errors
    ///
    /// The errors of NCCL and the driver, and `Timeout`; they end the communicator.
    pub(crate) fn gather_words(&self, mine: &Words, doing: &dyn Fn() -> String, timeout: Duration) -> Result<Vec<Words>> {
        let transfer = Transfer::AllGather { source: self.told(0), destination: self.words, bytes: WORDS_BYTES };
        self.exchange(mine, vec![transfer], doing, timeout)
    }

    /// Sends words to each of these peers, and returns the words that each sent to this rank, in the order of the
    /// peers. This is one NCCL group; the function waits for its end.
    ///
    /// # Errors
    ///
    /// The errors of [`DeviceBackend::gather_words`].
    pub(crate) fn swap_words(&self, mine: &[(usize, Words)], doing: &dyn Fn() -> String, timeout: Duration) -> Result<Vec<Words>> {
        let (peers, said): (Vec<usize>, Vec<Words>) = mine.iter().copied().unzip();
        let mut heard = self.exchange(said.as_flattened(), self.swaps(&peers), doing, timeout)?;
        heard.truncate(mine.len());
        Ok(heard)
    }

    /// Waits for a while until each of these peers has received the words of [`DeviceBackend::swap_words`]. For this
    /// purpose, both ranks swap words a second time: a rank sends again only once it has received the other rank's
    /// words. NCCL may complete a send while a proxy still holds its bytes, and an abort would lose them. Used by a
    /// rank that ends its communicator next and has set the reason ([`NcclComm::will_fail`]), so a failure of the
    /// second exchange does not matter.
    ///
    /// [`NcclComm::will_fail`]: crate::device::comm::NcclComm::will_fail
    pub(crate) fn await_hearing(&self, peers: &[usize], doing: &dyn Fn() -> String, timeout: Duration) {
        let deadline = Deadline::after(timeout.min(HEARING_WAIT));
        let said = vec![0; peers.len() * WORDS_BYTES];
        // A separate limit, in case NCCL does not send the bytes.
        let _ = self
            .queue_words(&said, self.swaps(peers), doing, timeout.min(2 * HEARING_WAIT))
            .and_then(|()| self.comm.wait_for(&self.exchange, &deadline));
    }

    /// Returns the transfers that swap words with each of these peers.
    fn swaps(&self, peers: &[usize]) -> Vec<Transfer> {
        let swap = |(place, &peer): (usize, &usize)| {
            let heard = self.words + (place * WORDS_BYTES) as u64;
            let send = Transfer::Send { address: self.told(place), bytes: WORDS_BYTES, peer };
            [send, Transfer::Receive { address: heard, bytes: WORDS_BYTES, peer }]
        };
        peers.iter().enumerate().flat_map(swap).collect()
    }

    /// Returns the device address of the words that this rank sends.
    fn told(&self, place: usize) -> u64 {
        self.words + ((self.ranks.n + place) * WORDS_BYTES) as u64
    }

    /// Copies `mine` to the device, makes the transfers, waits for them, and returns the words that arrived. At most as
    /// many words as there are ranks.
    fn exchange(&self, mine: &[u8], transfers: Vec<Transfer>, doing: &dyn Fn() -> String, timeout: Duration) -> Result<Vec<Words>> {
        self.refuse_if_over(doing)?;
        let deadline = Deadline::after(timeout);
        let outcome = self.queue_words(mine, transfers, doing, timeout).and_then(|()| self.fetch_words(doing, &deadline));
        outcome.map_err(|error| match error {
            // The communicator ended while this call waited: by the watchdog, which may be quicker than this thread, or
            // by an abort.
            Error::Poisoned { cause, .. } => (*cause).clone(),
            error => {
                // Other ranks may wait for this rank's words.
                self.comm.fail(&error);
                error
            }
        })
    }

    fn queue_words(&self, mine: &[u8], transfers: Vec<Transfer>, doing: &dyn Fn() -> String, timeout: Duration) -> Result<()> {
        let _alone = crate::base::event::lock(&self.queueing);
        driver::bind(&self.gpu.context).map_err(failed(doing))?;
        // SAFETY: `mine` is no longer than the half of the words' room that begins there (`n` words). Nothing else uses
        // that, since every exchange is waited for before the next begins, or the communicator has ended. The driver
        // has copied ordinary memory when it returns.
        unsafe { result::memcpy_htod_async(self.told(0), mine, self.exchange.cu_stream()) }.map_err(failed(doing))?;
        let steps = Steps::of(Plan::Steps(vec![Step::Transfer(transfers)]));
        // SAFETY: the transfers use words of the backend's memory, which lives until its streams have passed them: the
        // stream takes that memory and frees it, and the backend's end waits for it.
        unsafe { together(&mut [Running::new(self, steps, &self.exchange)], doing, timeout) }
    }

    fn fetch_words(&self, doing: &dyn Fn() -> String, deadline: &Deadline) -> Result<Vec<Words>> {
        self.comm.wait_for(&self.exchange, deadline)?;
        let mut heard = vec![[0; WORDS_BYTES]; self.ranks.n];
        // SAFETY: as many words as there is room for on the device. The stream has completed all its work, so that this
        // ends at once, and ordinary memory is filled when the driver returns.
        unsafe { result::memcpy_dtoh_async(heard.as_flattened_mut(), self.words, self.exchange.cu_stream()) }.map_err(failed(doing))?;
        Ok(heard)
    }

    /// Returns the settings that decide how calls are made.
    pub(crate) fn terms(&self) -> Terms {
        let mut terms = [0; size_of::<Terms>()];
        let (capability, library) = (self.capabilities.capability, self.library);
        terms[..8].copy_from_slice(&(self.scratch.most() as u64).to_le_bytes());
        terms[8..12].copy_from_slice(&self.capabilities.nccl.code().to_le_bytes());
        terms[12..14].copy_from_slice(&[capability.0 as u8, capability.1 as u8]);
        let switches = [library.all_to_all, library.gather, library.scatter, self.capabilities.reproducible, self.common.has_switch];
        terms[14] = switches.into_iter().rev().fold(0, |bits, switch| bits << 1 | u8::from(switch));
        terms
    }

    /// Describes terms: `33554432 B of scratch memory, compute capability 9.0, NCCL 2.28.9`.
    pub(crate) fn terms_in_words(terms: &Terms) -> String {
        let scratch = terms.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let version = terms[8..].first_chunk().map_or(0, |bytes| i32::from_le_bytes(*bytes));
        let reproducible = if terms[14] & 8 == 0 { "" } else { ", reproducible" };
        let switch = if terms[14] & 16 == 0 { "" } else { ", on one NVLink switch" };
        let version = Version::from_code(version);
        format!("{scratch} B of scratch memory, compute capability {}.{}, NCCL {version}{reproducible}{switch}", terms[12], terms[13])
    }
}

fn failed(doing: &dyn Fn() -> String) -> impl FnOnce(DriverError) -> Error {
    move |error| cuda_error(doing(), error)
}
