//! Shares of a sharded model, as the pieces of its parameters.

use super::StateTransfer;
use crate::checkpoint::shares::{Part, Sharded, fitting, parts, parts_of, surplus};
use collectives::{Element, Result};

impl<'a> StateTransfer<'a> {
    /// Offers this rank's shares of a model's buckets or units, like
    /// [`Writer::shares`](crate::checkpoint::Writer::shares). `model` is the model from which `state` comes, with the
    /// old number of ranks.
    ///
    /// This call returns no error. [`run`](Self::run) returns `InvalidArgument` in these cases:
    ///
    /// - The number of slices is not the number of shares.
    /// - A slice is not as long as its share.
    /// - Two parameters would have the same name.
    pub fn offer_shares<T: Element>(&mut self, prefix: &str, model: &impl Sharded, state: impl IntoIterator<Item = &'a [T]>) -> &mut Self {
        self.offer_parts(prefix, parts("StateTransfer::offer_shares", prefix, model), state)
    }

    /// Offers a copy of the shares of another rank of `model`. `rank` is the number of that rank. The other arguments
    /// are those of [`offer_shares`](Self::offer_shares). If a rank of a sharded model is lost, its shares are lost
    /// too, unless another rank has such a copy. Each rank can, for example, keep a copy of the shares of the next
    /// rank, and renew it after each step with [`Communicator::send_recv`](collectives::Communicator::send_recv). If
    /// both ranks are alive, both may offer the shares, but the copy must then equal the original.
    ///
    /// This call returns no error. [`run`](Self::run) returns `InvalidArgument` in the cases that `offer_shares` lists,
    /// and if `model` has no such rank.
    pub fn offer_shares_of<T: Element>(
        &mut self,
        prefix: &str,
        model: &impl Sharded,
        rank: usize,
        state: impl IntoIterator<Item = &'a [T]>,
    ) -> &mut Self {
        self.offer_parts(prefix, parts_of("StateTransfer::offer_shares_of", prefix, model, rank), state)
    }

    fn offer_parts<T: Element>(
        &mut self,
        prefix: &str,
        of_buckets: Result<Vec<(Vec<Part<'_>>, usize)>>,
        state: impl IntoIterator<Item = &'a [T]>,
    ) -> &mut Self {
        const CALL: &str = "StateTransfer::offer_shares";
        let mut state = state.into_iter();
        let of_buckets = of_buckets.unwrap_or_else(|error| {
            self.refuse(error);
            Vec::new()
        });
        let count = of_buckets.len();
        for (bucket, (parts, len)) in of_buckets.into_iter().enumerate() {
            match fitting(CALL, prefix, bucket, len, state.next(), |share| share.len()) {
                Ok(share) => parts.into_iter().filter(|part| !part.within.is_empty()).for_each(|Part { name, shape, piece, within }| {
                    self.offer(&name, shape, piece, &share[within]);
                }),
                Err(error) => self.refuse(error),
            }
        }
        if state.next().is_some() {
            self.refuse(surplus(CALL, prefix, count));
        }
        self
    }

    /// Asks for this rank's shares of a model's buckets or units, which were offered with
    /// [`offer_shares`](Self::offer_shares). `model` is the new model, with the new number of ranks.
    ///
    /// This call returns no error. [`run`](Self::run) returns `InvalidArgument` in the cases that `offer_shares` lists.
    pub fn want_shares<T: Element>(
        &mut self,
        prefix: &str,
        model: &impl Sharded,
        state: impl IntoIterator<Item = &'a mut [T]>,
    ) -> &mut Self {
        const CALL: &str = "StateTransfer::want_shares";
        let mut state = state.into_iter();
        let of_buckets = parts(CALL, prefix, model).unwrap_or_else(|error| {
            self.refuse(error);
            Vec::new()
        });
        let count = of_buckets.len();
        for (bucket, (parts, len)) in of_buckets.into_iter().enumerate() {
            match fitting(CALL, prefix, bucket, len, state.next(), |share| share.len()) {
                Ok(share) => self.want_parts(parts, share),
                Err(error) => self.refuse(error),
            }
        }
        if state.next().is_some() {
            self.refuse(surplus(CALL, prefix, count));
        }
        self
    }

    /// Asks for the parts of parameters in one share, which are in order there.
    fn want_parts<T: Element>(&mut self, parts: Vec<Part<'_>>, share: &'a mut [T]) {
        let (mut rest, mut reached) = (share, 0);
        for Part { name, shape, piece, within } in parts.into_iter().filter(|part| !part.within.is_empty()) {
            let (_, from_start) = rest.split_at_mut(within.start - reached);
            let (values, behind) = from_start.split_at_mut(within.len());
            self.want(&name, shape, piece, values);
            (rest, reached) = (behind, within.end);
        }
    }
}
