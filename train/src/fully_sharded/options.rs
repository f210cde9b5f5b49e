//! The caller's choice of units, types and sharding.

use crate::layout::is_float;
use crate::parameter::Parameter;
use collectives::DType;
use collectives::ReduceOp;
use collectives::{Error, Result};

/// Parameters that are gathered together, for example the parameters of a layer. The gradients of these parameters are
/// also reduced together. All parameters of a unit must have the same type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// The unit's name, for errors and checkpoints. In a checkpoint, the full name of a parameter is the unit's name, a
    /// dot and the parameter's name. Full names must be unique.
    pub name: String,
    /// The unit's parameters. The flat buffer of the unit contains the parameters in this order.
    pub parameters: Vec<Parameter>,
}

impl Unit {
    /// Creates a unit of these parameters.
    #[must_use]
    pub fn new(name: impl Into<String>, parameters: Vec<Parameter>) -> Self {
        Self { name: name.into(), parameters }
    }
}

/// How long gathered parameters are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ShardingStrategy {
    /// Until you [release](super::FullySharded::release) them. Parameters, gradients and the optimiser's state are
    /// sharded. This is ZeRO stage 3, and torch's `FULL_SHARD`.
    #[default]
    FullShard,
    /// Until the next update. Gradients and the optimiser's state are sharded, and the backward pass uses the
    /// parameters that the forward pass gathered. This is ZeRO stage 2, and torch's `SHARD_GRAD_OP`.
    ShardGradOp,
}

/// Options that set how units are gathered, and how their gradients are reduced. Every rank must use the same options,
/// except for the weight of a `PreMulSum`.
#[derive(Debug, Clone, PartialEq)]
pub struct FullyShardedOptions {
    /// How long gathered parameters are kept. Default: `FullShard`.
    pub strategy: ShardingStrategy,
    /// The type in which parameters are gathered and used, and in which gradients are passed: `F32`, `F64`, `F16` or
    /// `Bf16`. The shards keep the type of the parameters. `None` means the type of the parameters. Default: `None`.
    pub gather_type: Option<DType>,
    /// The type in which gradients are reduced. The reduced gradients are added to the shard in the type of the
    /// parameters. `None` means the type of the gradients that you pass to
    /// [`reduce_gradients`](super::FullySharded::reduce_gradients). Default: `None`.
    pub reduce_type: Option<DType>,
    /// How the ranks' gradients are combined: `Avg`, `Sum`, or `PreMulSum` with this rank's weight. Default: `Avg`.
    pub op: ReduceOp,
    /// The number of units that [`gather`](super::FullySharded::gather) starts to gather in addition to the unit that
    /// you pass to it. When a reduction starts, at most this number of earlier reductions may still run. Default: 1.
    pub prefetch: usize,
}

impl Default for FullyShardedOptions {
    fn default() -> Self {
        let (strategy, op) = (ShardingStrategy::default(), ReduceOp::Avg);
        Self { strategy, gather_type: None, reduce_type: None, op, prefetch: 1 }
    }
}

impl FullyShardedOptions {
    /// Refuses types that parameters and gradients cannot have.
    pub(super) fn check(&self) -> Result<()> {
        match [self.gather_type, self.reduce_type].into_iter().flatten().find(|dtype| !is_float(*dtype)) {
            Some(other) => Err(Error::argument("train", format!("the gather or reduce type is {other}; it must be f32, f64, f16 or bf16"))),
            None => Ok(()),
        }
    }

    /// Describes what all ranks must agree on, in words.
    pub(super) fn in_words(&self) -> String {
        let Self { strategy, gather_type, reduce_type, op, prefetch } = self;
        let named = |dtype: &Option<DType>| dtype.map_or("None", DType::name);
        let (gather, reduce) = (named(gather_type), named(reduce_type));
        format!("strategy {strategy:?}, gather_type {gather}, reduce_type {reduce}, op {op}, prefetch {prefetch}")
    }

    /// Returns the number of buffers of whole units for gathers, and for reductions.
    pub(super) fn most_buffers(&self) -> (usize, usize) {
        let ahead = self.prefetch.saturating_add(1);
        match self.strategy {
            ShardingStrategy::FullShard => (ahead, ahead),
            ShardingStrategy::ShardGradOp => (usize::MAX, ahead),
        }
    }
}
