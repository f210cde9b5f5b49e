//! Messages that carry a serialisable value from one rank to another (feature `serde`). Each value is encoded with
//! postcard and sent as one message, whose size is limited.
//!
//! An object's message has its own element type. So a receive of a buffer fails if it matches an object's message, and
//! a receive of an object fails if it matches a buffer's message. A receive of an object allocates memory after a
//! message has matched it, so no size is sent in advance.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::call::element::TypeTag;
use crate::communicator::Communicator;
use crate::communicator::work::message::{Envelope, MessageContext, Received};
use crate::error::Result;

/// # Objects as messages (feature `serde`)
///
/// These methods send and receive values as [`send`](Self::send) and [`recv`](Self::recv) do buffers: to one rank, from
/// one rank or any rank, with a tag, and with a timeout if needed. Each object is one message. If two threads receive
/// objects with the same source and tag, each thread gets whole objects, in no particular order.
///
/// Objects and buffers with the same source and tag form one sequence. A `recv` whose next message is an object, or a
/// `recv_object` whose next message is a buffer, fails with `Message`, as for any other types that differ. The failed
/// receive also consumes the message.
///
/// Cost: encoding with `postcard`, a message of the encoded size, and decoding. A send of up to 64 KiB returns without
/// waiting for its receive. Objects travel over the host backend even if there are devices. Received data is never
/// executed.
///
/// To send or receive objects in the background, use your own thread with a clone of the communicator.
impl Communicator {
    /// Sends a value to a rank, which receives it with [`recv_object`](Self::recv_object).
    ///
    /// ```
    /// # use collectives::{Communicator, Envelope};
    /// let got = Communicator::run_local(2, |comm| {
    ///     if comm.rank() == 0 {
    ///         comm.send_object(&("epoch", 3_u32), 1)?;
    ///         comm.send_object("a str, or a slice", Envelope::rank(1).tag(7))?;
    ///         return Ok(None);
    ///     }
    ///     let (said, received) = comm.recv_object::<String>(Envelope::any().tag(7))?;
    ///     assert_eq!((said.as_str(), received.source), ("a str, or a slice", 0));
    ///     comm.recv_object::<(String, u32)>(0).map(|(pair, _)| Some(pair))
    /// })?;
    /// assert_eq!(got[1], Some(("epoch".to_owned(), 3)));
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to messages, and:
    /// - `InvalidArgument` if the value cannot be serialised. Nothing is sent in this case, and the receiver keeps
    ///   waiting.
    /// - `Message` if the object has more than 64 KiB and the receiver cannot accept the object. If the object has at
    ///   most 64 KiB, only the receiver gets an error.
    #[doc(alias("send_object_list", "MPI_Send"))]
    pub fn send_object<T: Serialize + ?Sized>(&self, value: &T, to: impl Into<Envelope>) -> Result<()> {
        let to = to.into();
        let context = self.object_context("send_object", &to)?;
        Self::destination("send_object", &to)?;
        let bytes = Self::encode("send_object", value)?;
        self.core.shared.progress.send_object(&context, &bytes, to.timeout.unwrap_or_else(|| self.timeout()))
    }

    /// Receives a value from one rank. With [`Envelope::any`], receives from the rank that sends a value first. Returns
    /// the value and a [`Received`], in which `source` is the sender and `count` is the size of the encoded value in
    /// bytes.
    ///
    /// ```
    /// # use collectives::{Communicator, Envelope};
    /// let got = Communicator::run_local(3, |comm| {
    ///     if comm.rank() > 0 {
    ///         return comm.send_object(&vec!["x"; comm.rank()], 0).map(|()| 0);
    ///     }
    ///     let mut sum = 0;
    ///     for _ in 1..comm.world_size() {
    ///         let (list, received) = comm.recv_object::<Vec<String>>(Envelope::any())?;
    ///         assert_eq!(list.len(), received.source);
    ///         sum += list.len();
    ///     }
    ///     Ok(sum)
    /// })?;
    /// assert_eq!(got[0], 3);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to messages, and:
    /// - `Message`, which names the sender, if the object is larger than this rank's
    ///   [`Config::object_limit_bytes`](crate::Config::object_limit_bytes). No memory is allocated for the object.
    /// - `Protocol`, which names the sender, if the bytes do not encode a `T`.
    ///
    /// After such a `Message` or `Protocol` error, no later receive gets the message, and the communicator stays
    /// usable.
    #[doc(alias("recv_object_list", "MPI_Recv"))]
    pub fn recv_object<T: DeserializeOwned>(&self, from: impl Into<Envelope>) -> Result<(T, Received)> {
        let from = from.into();
        let context = self.object_context("recv_object", &from)?;
        let most = self.config().object_limit_bytes;
        let limit = from.timeout.unwrap_or_else(|| self.timeout());
        let (received, bytes) = self.core.shared.progress.receive_object(&context, most, limit)?;
        self.decode(received.source, &bytes).map(|value| (value, received))
    }

    /// Returns the context of an object's message.
    fn object_context(&self, call: &'static str, envelope: &Envelope) -> Result<MessageContext> {
        self.context(call, envelope, (TypeTag::Object, 1))
    }
}
