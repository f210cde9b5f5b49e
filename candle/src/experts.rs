//! A mixture of experts that are spread over the ranks.

use candle_core::{DType, Module, Result, Tensor};
use collectives::Communicator;

use crate::error::failed;
use crate::exchange::Exchange;
use crate::messages::{TYPES, code_of};
use crate::routing::Routing;
use crate::share::expect_same_part;

/// A mixture of experts: each rank has some of the experts, and tokens travel to the experts that a router has chosen
/// for them. Each token's result is the weighted sum of the results of its experts.
///
/// Each rank passes its own tokens, whose number may differ between ranks. Experts are numbered in rank order: if every
/// rank has two experts, those of rank 1 have the numbers 2 and 3. Ranks may have different numbers of experts, or no
/// expert.
///
/// # Order
///
/// Repeated runs give the same bits, because two orders are fixed. Each expert runs once, on all its tokens, which are
/// sorted by rank, and then by the order in which their rank has passed them. The results of one token are added in the
/// order in which the router has chosen the experts. If one rank has all experts, and passes the tokens of all ranks in
/// rank order, it computes the same bits.
///
/// # Gradients
///
/// If candle tracks the tokens for a backward pass, gradients flow to tokens, weights and experts. The tokens must then
/// be tracked on every rank, and every rank must run the backward pass. If the tokens are not tracked, the experts get
/// no gradients.
///
/// # Cost
///
/// One [`all_gather`](Communicator::all_gather) of a number for each expert, and two
/// [all-to-alls](Communicator::all_to_all_v_into) of the chosen rows, to the experts and back. The backward pass makes
/// two all-to-alls. The ids are read from the device.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_nn::{Activation, func};
/// use collectives_candle::{ExpertParallel, run_local};
///
/// let outputs = run_local(2, |comm| {
///     let number = comm.rank() as f64; // expert 0 adds 10, and expert 1 adds 20
///     let expert = func(move |tokens| tokens.affine(1.0, 10.0 * (number + 1.0)));
///     let layer = ExpertParallel::new(comm, vec![expert])?;
///     let tokens = Tensor::new(&[[1.0_f32], [2.0]], &Device::Cpu)?;
///     let ids = Tensor::new(&[[0_u32, 1], [1, 0]], &Device::Cpu)?;
///     let weights = Tensor::new(&[[0.5_f32, 0.5], [1.0, 0.0]], &Device::Cpu)?;
///     layer.forward(&tokens, &ids, &weights)?.to_vec2::<f32>()
/// })?;
/// assert_eq!(outputs, [[[16.0], [22.0]]; 2]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ExpertParallel<M> {
    comm: Communicator,
    experts: Vec<M>,
    /// The number of experts of each rank.
    held: Vec<usize>,
    capacity: Option<usize>,
}

impl<M: Module> ExpertParallel<M> {
    /// Creates the layer from this rank's experts. An expert takes a tensor of shape `[tokens, width]`, with at least
    /// one token, and returns a tensor of the same shape and type. Collective.
    ///
    /// # Errors
    ///
    /// Fails if no rank has an expert, if the ranks together have more than 1,048,576 experts, or if
    /// [`Communicator::all_gather`] fails.
    pub fn new(comm: &Communicator, experts: Vec<M>) -> Result<Self> {
        let mut held = vec![0_u64; comm.world_size()];
        comm.all_gather_into(&(experts.len() as u64), &mut held).map_err(failed)?;
        match held.iter().try_fold(0_u64, |sum, count| sum.checked_add(*count)) {
            Some(0) => candle_core::bail!("ExpertParallel::new: no rank has an expert; at least one rank needs one"),
            Some(1..=MAX_EXPERTS) => {}
            _ => candle_core::bail!("ExpertParallel::new: the ranks have {held:?} experts; at most {MAX_EXPERTS} are possible"),
        }
        let held = held.into_iter().map(|count| count as usize).collect();
        Ok(Self { comm: comm.clone(), experts, held, capacity: None })
    }

    /// Limits the number of rows that each expert takes in one pass, counted over all ranks. Each choice of an expert for a token
    /// is one row. Each expert takes rows in rank order, and the rows of one rank in the order of its tokens. It drops
    /// the rows beyond the limit: they add nothing to the results of their tokens. Every rank must set the same
    /// capacity.
    #[must_use]
    pub fn capacity(mut self, rows: usize) -> Self {
        self.capacity = Some(rows);
        self
    }

    /// Returns this rank's experts.
    #[must_use]
    pub fn experts(&self) -> &[M] {
        &self.experts
    }

    /// Returns the weighted sums of the experts' results, a tensor of the same shape as `tokens`. `tokens` has the
    /// shape `[tokens, width]`. `ids` has the shape `[tokens, choices]` and contains the numbers of the experts that
    /// each token has chosen. `weights` has the shape of `ids` and the type of `tokens`. A rank may have no tokens.
    ///
    /// # Errors
    ///
    /// In the following cases, every rank gets an error, and no tokens are exchanged:
    ///
    /// - On a rank, the arguments do not have the shapes and types described above, or an id is not the number of an
    ///   expert.
    /// - The ranks' tokens differ in type, in width, or in whether they are tracked.
    /// - The ranks' capacities differ.
    ///
    /// Also fails if a collective, an expert or candle fails. If an expert fails on one rank, the other ranks wait
    /// until that rank drops its communicator, or until their timeouts pass.
    pub fn forward(&self, tokens: &Tensor, ids: &Tensor, weights: &Tensor) -> Result<Tensor> {
        self.forward_on(&self.comm, tokens, ids, weights)
    }

    /// Computes what [`forward`](Self::forward) computes, but makes its calls on another communicator, in which this
    /// rank has the same number: see [`RowParallelLinear::forward_on`](crate::RowParallelLinear::forward_on).
    ///
    /// # Errors
    ///
    /// The errors of [`forward`](Self::forward). Also fails if this rank's number or the world size in `comm`
    /// differs from that in the layer's own communicator.
    pub fn forward_on(&self, comm: &Communicator, tokens: &Tensor, ids: &Tensor, weights: &Tensor) -> Result<Tensor> {
        expect_same_part(&self.comm, comm)?;
        let experts = self.held.iter().sum();
        let choices = choices(experts, tokens, ids, weights);
        let (choices, counts) = agree(comm, tokens, choices, experts, self.capacity)?;
        let counts: Vec<&[usize]> = counts.chunks(experts).collect();
        let routing = Routing::new(comm.rank(), &self.held, &counts, &choices, self.capacity);
        let each = ids.dim(1)?;
        let rows = select(tokens, routing.sent.iter().map(|assignment| assignment / each))?;
        let exchange = |send: &[usize], receive: &[usize]| Exchange { comm: comm.clone(), send: send.to_vec(), receive: receive.to_vec() };
        let received = exchange(&routing.send, &routing.receive).apply(&rows, &rows)?;
        let results = self.run(&received, &routing.rows)?;
        let results = if tokens.track_op() { results } else { results.detach() };
        let returned = exchange(&routing.receive, &routing.send).apply(&results, &received)?;
        combine(&returned, &routing.sent, weights)
    }

    /// Runs this rank's experts, each on its rows. Returns the results in the order of the rows.
    fn run(&self, received: &Tensor, rows: &[Vec<usize>]) -> Result<Tensor> {
        let mut results = Vec::new();
        for (number, (expert, rows)) in self.experts.iter().zip(rows).enumerate().filter(|(_, (_, rows))| !rows.is_empty()) {
            let input = select(received, rows.iter().copied())?;
            let result = expert.forward(&input)?;
            if result.shape() != input.shape() || result.dtype() != input.dtype() {
                candle_core::bail!(
                    "expert {number} of this rank returned {:?} {:?} for {:?} {:?}; an expert must keep the shape and the type",
                    result.dtype(),
                    result.shape(),
                    input.dtype(),
                    input.shape()
                );
            }
            results.push(result);
        }
        if results.is_empty() {
            return Ok(received.clone()); // no rows
        }
        let order = rows.concat();
        let mut place = vec![0; order.len()];
        order.iter().enumerate().for_each(|(at, row)| place[*row] = at);
        select(&Tensor::cat(&results, 0)?, place)
    }
}

/// Returns the given rows of a matrix.
fn select(matrix: &Tensor, rows: impl IntoIterator<Item = usize>) -> Result<Tensor> {
    let rows: Vec<i64> = rows.into_iter().map(|row| row as i64).collect();
    matrix.contiguous()?.index_select(&Tensor::new(rows, matrix.device())?, 0)
}

/// Returns the weighted sum of each token's results. `sent` names the assignment of each returned row. The results of
/// other assignments are zero.
fn combine(returned: &Tensor, sent: &[usize], weights: &Tensor) -> Result<Tensor> {
    let ((tokens, each), (_, width)) = (weights.dims2()?, returned.dims2()?);
    let mut row = vec![sent.len(); tokens * each];
    sent.iter().enumerate().for_each(|(at, assignment)| row[*assignment] = at);
    let rows = if sent.len() == row.len() {
        returned.clone()
    } else {
        Tensor::cat(&[returned, &Tensor::zeros((1, width), returned.dtype(), returned.device())?], 0)?
    };
    let results = select(&rows, row)?.reshape((tokens, each, width))?.broadcast_mul(&weights.unsqueeze(2)?)?;
    // One after the other, so that the order of the sum does not depend on the device.
    (1..each).try_fold(results.narrow(1, 0, 1)?.squeeze(1)?, |sum, choice| sum + results.narrow(1, choice, 1)?.squeeze(1)?)
}

/// Checks this rank's arguments, and returns the chosen expert of each assignment.
fn choices(experts: usize, tokens: &Tensor, ids: &Tensor, weights: &Tensor) -> Result<Vec<usize>> {
    let ((count, _), (rows, each)) = (tokens.dims2()?, ids.dims2()?);
    code_of(tokens.dtype())?;
    if rows != count || each == 0 {
        candle_core::bail!(
            "{count} tokens need ids of shape [{count}, choices], with at least one choice, but the ids have shape {:?}",
            ids.shape()
        );
    }
    if weights.shape() != ids.shape() || weights.dtype() != tokens.dtype() {
        candle_core::bail!(
            "the weights are {:?} {:?}; expected the shape {:?} of the ids and the type {:?} of the tokens",
            weights.dtype(),
            weights.shape(),
            ids.shape(),
            tokens.dtype()
        );
    }
    if !ids.dtype().is_int() {
        candle_core::bail!("ids of experts must be integers, but they are {:?}", ids.dtype());
    }
    if !tokens.device().same_device(weights.device()) {
        candle_core::bail!("the tokens and the weights are on different devices; move the weights to the tokens' device");
    }
    let id = |(at, id): (usize, i64)| match usize::try_from(id) {
        Ok(id) if id < experts => Ok(id),
        _ => candle_core::bail!("token {} (from 0) has chosen expert {id}, but the experts are numbered 0 to {}", at / each, experts - 1),
    };
    ids.to_dtype(DType::I64)?.flatten_all()?.to_vec1()?.into_iter().enumerate().map(id).collect()
}

/// The most experts of all ranks together. So the numbers that ranks exchange take little memory.
const MAX_EXPERTS: u64 = 1 << 20;

/// The number of values that ranks exchange before the numbers of their choices.
const TERMS: usize = 5;

/// Tells all ranks how often each expert was chosen, and whether this rank's arguments are right. Returns this rank's
/// choices, and the numbers of all ranks, in rank order.
fn agree(
    comm: &Communicator,
    tokens: &Tensor,
    choices: Result<Vec<usize>>,
    experts: usize,
    capacity: Option<usize>,
) -> Result<(Vec<usize>, Vec<usize>)> {
    let mut own = vec![0_u64; TERMS + experts];
    if let Ok(choices) = &choices {
        let capacity = capacity.map_or(0, |capacity| (capacity as u64).saturating_add(1));
        own[..TERMS].copy_from_slice(&[1, code_of(tokens.dtype())?, tokens.dim(1)? as u64, tokens.track_op().into(), capacity]);
        choices.iter().for_each(|expert| own[TERMS + expert] += 1);
    }
    let mut all = vec![0; own.len() * comm.world_size()];
    comm.all_gather_into(&own, &mut all).map_err(failed)?;
    let choices = choices?;
    let ranks: Vec<&[u64]> = all.chunks(own.len()).collect();
    if let Some(rank) = ranks.iter().position(|terms| terms[0] == 0) {
        candle_core::bail!("ExpertParallel: the arguments of rank {rank} cannot be used; the error of rank {rank} says why");
    }
    if let Some(rank) = ranks.iter().position(|terms| terms[..TERMS] != ranks[0][..TERMS]) {
        candle_core::bail!("ExpertParallel: rank 0 passed {}, but rank {rank} passed {}", describe(ranks[0]), describe(ranks[rank]));
    }
    let counts: Vec<u64> = ranks.iter().flat_map(|terms| &terms[TERMS..]).copied().collect();
    let rows = counts.iter().try_fold(0_u64, |sum, count| sum.checked_add(*count));
    // The elements of a type have at most 8 bytes.
    if rows.and_then(|rows| rows.checked_mul(8 * ranks[0][2].max(1))).is_none_or(|bytes| bytes > isize::MAX as u64) {
        candle_core::bail!("ExpertParallel: the tokens of all ranks together are larger than the address space");
    }
    Ok((choices, counts.into_iter().map(|count| count as usize).collect()))
}

/// Describes what must be equal on all ranks.
fn describe(terms: &[u64]) -> String {
    let tracked = if terms[3] == 0 { "not tracked for gradients" } else { "tracked for gradients" };
    let capacity = terms[4].checked_sub(1).map_or("no capacity limit".to_owned(), |capacity| format!("a capacity of {capacity}"));
    let dtype = TYPES.get(terms[1] as usize).map_or("unknown", DType::as_str);
    format!("tokens of type {dtype} and width {}, {tracked}, with {capacity}", terms[2])
}
