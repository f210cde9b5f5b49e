//! What a caller says of units, of types and of what is kept.

use crate::layout::is_float;
use crate::parameter::Parameter;
use collectives::DType;
use collectives::ReduceOp;
use collectives::{Error, Result};

/// Parameters that are gathered together, and whose gradients are reduced together: a layer, say. All are of one type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// Its name, for errors and checkpoints, where a dot and the parameter's name come behind it: those must be unique there.
    pub name: String,
    /// Its parameters. They lie one behind the other, in this order.
    pub parameters: Vec<Parameter>,
}

impl Unit {
    /// A unit of these parameters.
    #[must_use]
    pub fn new(name: impl Into<String>, parameters: Vec<Parameter>) -> Self {
        Self { name: name.into(), parameters }
    }
}

/// For how long gathered parameters are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ShardingStrategy {
    /// Until they are released: parameters, gradients and the optimiser's state are sharded. ZeRO stage 3; torch's `FULL_SHARD`.
    #[default]
    FullShard,
    /// Until the next update: gradients and the optimiser's state are sharded, and the backward pass uses the parameters that the forward
    /// pass gathered. ZeRO stage 2; torch's `SHARD_GRAD_OP`.
    ShardGradOp,
}

/// How units are gathered and their gradients reduced. Every rank must use the same, but for the weight of a `PreMulSum`.
#[derive(Debug, Clone, PartialEq)]
pub struct FullyShardedOptions {
    /// Default: `FullShard`.
    pub strategy: ShardingStrategy,
    /// The type in which parameters are gathered and used, and in which gradients are handed in: `F32`, `F64`, `F16` or `Bf16`. The shares keep
    /// the type of the parameters. `None`: that type. Default: `None`.
    pub gather_type: Option<DType>,
    /// The type in which gradients are reduced; they are added to the share in the type of the parameters. `None`: the type in which they
    /// are handed in. Default: `None`.
    pub reduce_type: Option<DType>,
    /// How the ranks' gradients become one: `Avg`, `Sum`, or `PreMulSum` with this rank's weight. Default: `Avg`.
    pub op: ReduceOp,
    /// How many units are gathered ahead of the one that is used, and how many reductions go on beside the next. Default: 1.
    pub prefetch: usize,
}

impl Default for FullyShardedOptions {
    fn default() -> Self {
        let (strategy, op) = (ShardingStrategy::default(), ReduceOp::Avg);
        Self { strategy, gather_type: None, reduce_type: None, op, prefetch: 1 }
    }
}

impl FullyShardedOptions {
    /// Refuses types that parameters and gradients do not have.
    pub(super) fn check(&self) -> Result<()> {
        match [self.gather_type, self.reduce_type].into_iter().flatten().find(|dtype| !is_float(*dtype)) {
            Some(other) => Err(Error::argument("train", format!("a gather or reduce type of {other}: it is f32, f64, f16 or bf16"))),
            None => Ok(()),
        }
    }

    /// What all ranks must agree on, in words.
    pub(super) fn in_words(&self) -> String {
        let Self { strategy, gather_type, reduce_type, op, prefetch } = self;
        let named = |dtype: &Option<DType>| dtype.map_or("as it is", DType::name);
        let (gather, reduce) = (named(gather_type), named(reduce_type));
        format!("strategy {strategy:?}, gather_type {gather}, reduce_type {reduce}, op {op}, prefetch {prefetch}")
    }

    /// How many buffers of whole units there are for gathers, and for reductions.
    pub(super) fn most_buffers(&self) -> (usize, usize) {
        let ahead = self.prefetch.saturating_add(1);
        match self.strategy {
            ShardingStrategy::FullShard => (ahead, ahead),
            ShardingStrategy::ShardGradOp => (usize::MAX, ahead),
        }
    }
}
