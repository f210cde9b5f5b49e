//! PyTorch's TCPStore protocol as values: requests and replies to bytes and back. No sockets.
//!
//! A request is one byte that says which query it is, then its fields; a reply is its fields alone. Integers are little-endian,
//! lengths and counts 64 bits wide; text and bytes are a length and then that many bytes. There are no frames: where a message ends
//! is known only by reading its fields, which [`scan`] does as the bytes come in.

mod reply;
mod request;
mod scan;

pub(super) use reply::{Expect, Reply, ReplyDecoder, push_bytes};
pub(super) use request::{RequestDecoder, StoreRequest, encode, encode_keys, query};
#[cfg(test)]
mod tests;

/// What the first request of a connection carries.
pub(super) const MAGIC: u32 = 0x3C85_F7CE;
/// The answer to WAIT and BARRIER: what was waited for is there.
pub(super) const STOP_WAITING: u8 = 0;
/// The answer to CANCEL_WAIT.
pub(super) const WAIT_CANCELED: u8 = 1;
/// The answer to CHECK where every key is there.
pub(super) const READY: u8 = 0;
/// The answer to CHECK where one is not.
pub(super) const NOT_READY: u8 = 1;

/// Bytes that are not the protocol, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Malformed(pub(super) String);
