//! How many heads an attention layer has, in the whole model and on one rank.

use candle_core::Result;
use candle_nn::var_builder::Shard;
use collectives::Communicator;

/// The numbers of heads of an attention layer, and the width of each head. Keys and values may have fewer heads than
/// queries. Then several consecutive query heads share a head of the keys and values. Each head of the keys and values
/// is shared by the same number of query heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionHeads {
    /// The number of heads of the queries.
    pub query: usize,
    /// The number of heads of the keys, and also of the values.
    pub key_value: usize,
    /// The width of a head.
    pub width: usize,
}

impl AttentionHeads {
    /// Returns how many heads each rank has: an equal share of the query heads, and the heads of keys and values that
    /// these query heads use. If there are fewer heads of keys and values than ranks, each rank has one head of the
    /// keys and one of the values, and several ranks have the same heads.
    ///
    /// ```
    /// use collectives_candle::{AttentionHeads, run_local};
    ///
    /// let heads = AttentionHeads { query: 32, key_value: 2, width: 128 };
    /// let own = run_local(4, |comm| heads.of_rank(comm))?;
    /// assert_eq!(own, [AttentionHeads { query: 8, key_value: 1, width: 128 }; 4]); // of keys, ranks 0 and 1 have the same head
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Fails in these cases:
    ///
    /// - The query heads cannot be split equally between the ranks, or between the heads of keys and values.
    /// - The number of heads of keys and values is neither a multiple nor a divisor of the number of ranks.
    pub fn of_rank(self, comm: &Communicator) -> Result<Self> {
        let (Self { query, key_value, .. }, ranks) = (self, comm.world_size());
        if query == 0 || key_value == 0 || !query.is_multiple_of(key_value) {
            candle_core::bail!("{query} query heads cannot be split equally between {key_value} heads of keys and values");
        }
        if !query.is_multiple_of(ranks) {
            candle_core::bail!("{query} query heads cannot be split equally between {ranks} ranks");
        }
        if !key_value.is_multiple_of(ranks) && !ranks.is_multiple_of(key_value) {
            candle_core::bail!(
                "{key_value} heads of keys and values do not fit {ranks} ranks: one of the two numbers must be a multiple of the other"
            );
        }
        Ok(Self { query: query / ranks, key_value: (key_value / ranks).max(1), ..self })
    }

    /// Returns this rank's part of the keys, or of the values, in a file.
    pub(crate) fn key_value_shard(self, comm: &Communicator) -> Shard {
        let ranks = comm.world_size();
        let parts = self.key_value.min(ranks);
        Shard { dim: 0, rank: comm.rank() * parts / ranks, world_size: parts }
    }
}
