//! Any serialisable value as a message between two ranks (feature `serde`): postcard on the wire, one message for each object, bounded.
//!
//! An object's message has an element type of its own. So it can be told from a buffer's under the same tag, and a receive of the other kind
//! fails instead of taking it. The receive makes its memory when a message has met it, so no size travels ahead.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::call::element::TypeTag;
use crate::communicator::Communicator;
use crate::communicator::work::message::{Envelope, MessageContext, Received};
use crate::error::Result;

/// # Objects as messages (feature `serde`)
///
/// A value goes from one rank to another as [`send`](Self::send) and [`recv`](Self::recv) move buffers: to a rank, from one or any, under a
/// tag, within a time of its own. Each object is one message: two threads that receive objects from one source under one tag get whole ones,
/// in no particular order. Objects and buffers of one source and tag are one sequence: a `recv` that meets an object, or a `recv_object` that
/// meets a buffer, fails with `Message`, as other types that differ do, and uses the message up.
///
/// Cost: encoding by `postcard`, a message of so many bytes, and decoding; up to 64 KiB it is on its way when the send returns. Objects
/// travel over the host backend, also where there are devices. Nothing that is received is ever run.
///
/// In the background: on a thread of the program's, with a clone.
impl Communicator {
    /// Sends a value to a rank, for its [`recv_object`](Self::recv_object).
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
    /// Those common to messages. `InvalidArgument` where the value cannot be serialised: nothing is sent then, and its receiver waits on.
    /// `Message` where it has more than 64 KiB and the receiver cannot take it; of less only the receiver is told.
    #[doc(alias("send_object_list", "MPI_Send"))]
    pub fn send_object<T: Serialize + ?Sized>(&self, value: &T, to: impl Into<Envelope>) -> Result<()> {
        let to = to.into();
        let context = self.object_context("send_object", &to)?;
        Self::destination("send_object", &to)?;
        let bytes = Self::encode("send_object", value)?;
        self.core.shared.progress.send_object(&context, &bytes, to.timeout.unwrap_or_else(|| self.timeout()))
    }

    /// Receives a value from a rank, or from whichever rank sends one first; with who sent it, and as `count` its size in bytes.
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
    /// Those common to messages; `Message`, naming the sender, where the object is larger than
    /// [`Config::object_limit_bytes`](crate::Config::object_limit_bytes) of this rank, before memory is made for it; `Protocol`, naming the
    /// sender, where the bytes are not a `T`. Each uses the message up, and the communicator lives on.
    #[doc(alias("recv_object_list", "MPI_Recv"))]
    pub fn recv_object<T: DeserializeOwned>(&self, from: impl Into<Envelope>) -> Result<(T, Received)> {
        let from = from.into();
        let context = self.object_context("recv_object", &from)?;
        let most = self.config().object_limit_bytes;
        let limit = from.timeout.unwrap_or_else(|| self.timeout());
        let (received, bytes) = self.core.shared.progress.receive_object(&context, most, limit)?;
        self.decode(received.source, &bytes).map(|value| (value, received))
    }

    /// The terms of an object's message.
    fn object_context(&self, call: &'static str, envelope: &Envelope) -> Result<MessageContext> {
        self.context(call, envelope, (TypeTag::Object, 1))
    }
}
