//! The engine as a whole, over links in memory and over sockets.

#![expect(unsafe_code, reason = "posting takes memory for longer than the call")]

mod direct;
mod ends;
mod protocol;
mod test_network;
mod traffic;

use std::time::Duration;

use super::requests::Request;
use super::{Connector, Envelope, MessageError, Messages, Outcome, Ticket};
use crate::deadline::Deadline;
use crate::element::{DType, TypeTag};
use crate::host::abort_reason::Interrupted;

/// Every byte is an element.
const BYTES: TypeTag = TypeTag::Scalar(DType::U8);

/// xorshift64*, seeded.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Less than `bound`.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 16) as usize % bound
    }
}

/// Bytes that no other `which` has, nor another place of the same.
fn pattern(which: u64, bytes: usize) -> Vec<u8> {
    let mut random = Random(which.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut data = Vec::with_capacity(bytes + 8);
    // Drawing takes Miri too long: the same bytes again and again.
    let drawn = if cfg!(miri) { bytes.min(500) } else { bytes };
    while data.len() < drawn {
        data.extend_from_slice(&random.next().to_le_bytes());
    }
    if drawn < bytes {
        data = data.repeat(bytes / data.len() + 1);
    }
    data.truncate(bytes);
    data
}

/// Long enough that only a hang reaches it.
fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// What tests say to an engine. All memory that is passed in outlives its request: each test holds its buffers until it has
/// polled, cancelled or dropped the engine.
trait Talk {
    fn isend_typed(&mut self, to: usize, tag: u64, element: TypeTag, data: &[u8]) -> Result<Ticket, Interrupted>;
    fn irecv_typed(&mut self, from: Option<usize>, tag: Option<u64>, element: TypeTag, into: &mut [u8]) -> Result<Ticket, Interrupted>;
    /// Moves things until all these requests are finished. Ends early where one fails because its peer is gone, or with a peer's
    /// word that the communicator ended.
    fn finish_all(&mut self, tickets: &[Ticket]) -> Result<(), Interrupted>;
    fn outcome(&mut self, ticket: Ticket) -> Outcome;

    fn isend(&mut self, to: usize, tag: u64, data: &[u8]) -> Ticket {
        self.isend_typed(to, tag, BYTES, data).expect("the peer is there")
    }

    fn irecv(&mut self, from: Option<usize>, tag: Option<u64>, into: &mut [u8]) -> Ticket {
        self.irecv_typed(from, tag, BYTES, into).expect("the peer is there")
    }

    /// Sends and waits.
    fn send(&mut self, to: usize, tag: u64, data: &[u8]) {
        let ticket = self.isend(to, tag, data);
        self.finish_all(&[ticket]).expect("sent");
        assert_eq!(self.outcome(ticket).map(|envelope| envelope.bytes), Ok(data.len()));
    }

    /// Receives and waits; what came.
    fn recv(&mut self, from: Option<usize>, tag: Option<u64>, capacity: usize) -> (Envelope, Vec<u8>) {
        let mut into = vec![0; capacity];
        let ticket = self.irecv(from, tag, &mut into);
        self.finish_all(&[ticket]).expect("received");
        let envelope = self.outcome(ticket).expect("received well");
        into.truncate(envelope.bytes);
        (envelope, into)
    }
}

impl<C: Connector> Talk for Messages<C> {
    fn isend_typed(&mut self, to: usize, tag: u64, element: TypeTag, data: &[u8]) -> Result<Ticket, Interrupted> {
        // SAFETY: see the trait.
        unsafe { self.post_send(to, tag, element, data.as_ptr(), data.len()) }
    }

    fn irecv_typed(&mut self, from: Option<usize>, tag: Option<u64>, element: TypeTag, into: &mut [u8]) -> Result<Ticket, Interrupted> {
        // SAFETY: see the trait.
        unsafe { self.post_receive(from, tag, element, into.as_mut_ptr(), into.len()) }
    }

    fn finish_all(&mut self, tickets: &[Ticket]) -> Result<(), Interrupted> {
        let deadline = soon();
        self.progress();
        loop {
            let mut pending = false;
            for index in tickets.iter().filter_map(|ticket| self.matching_state.requests.index(*ticket)) {
                match self.matching_state.requests.request(index) {
                    Some(Request::Done(Err(MessageError::Ended(abort_reason)))) => return Err((*abort_reason).into()),
                    Some(Request::Done(_)) | None => {}
                    Some(_) => pending = true,
                }
            }
            match self.heard() {
                _ if !pending => return Ok(()),
                Some(abort_reason) => return Err(abort_reason.into()),
                None => assert!(!deadline.has_passed(), "a request hangs"),
            }
            self.wait_step(Duration::from_millis(1));
        }
    }

    fn outcome(&mut self, ticket: Ticket) -> Outcome {
        self.poll(ticket).expect("finished")
    }
}
