//! Compresses the gradient of a matrix: two thin matrices, whose product approximates the gradient, are sent instead.

use std::ops::Range;

use super::agreement::{Listed, agree};
use super::flat::{Flat, Pending, not_started};
use super::hook::{AllReduce, Hook, Progress, weight};
use super::layout::{BucketLayout, Slot};
use super::matrix::{add_product, all_finite, orthonormalise, times, transposed_times};
use super::parameter::Float;
use crate::random::Random;
use collectives::Communicator;
use collectives::ReduceOp;
use collectives::{Error, Result};

/// Options that set how [`PowerSgd`] compresses gradients. Every rank must use the same options.
#[derive(Debug, Clone, PartialEq)]
pub struct PowerSgdOptions {
    /// The number of columns of the thin matrices P and Q. This number is the matrix rank of the approximation.
    /// Default: 1.
    pub rank: usize,
    /// Whether to keep the error of the compression, and add it to the next step's gradient. Default: yes.
    pub error_feedback: bool,
    /// Whether each step begins with the thin matrix Q of the previous step, so that the approximation improves from
    /// step to step. Default: yes.
    pub warm_start: bool,
    /// The number of steps with uncompressed gradients at the start of training. Gradients change fast in these steps.
    /// Default: 1000.
    pub start_step: u64,
    /// A matrix is compressed only if it becomes smaller by at least this factor. Default: 2.
    pub min_compression_rate: f64,
    /// The seed of the random numbers in the first thin matrices. Default: 0.
    pub seed: u64,
}

impl Default for PowerSgdOptions {
    fn default() -> Self {
        Self { rank: 1, error_feedback: true, warm_start: true, start_step: 1000, min_compression_rate: 2.0, seed: 0 }
    }
}

/// A hook that sends low-rank approximations of gradients (PowerSGD: Vogels, Karimireddy, Jaggi 2019).
///
/// A gradient with two or more dimensions is treated as a matrix M. The first dimension gives the rows of M, and all
/// other dimensions together give the columns. The thin matrix Q comes from the previous step. The thin matrix P is the
/// mean of all ranks' M·Q, with orthonormalised columns. The new Q is the mean of all ranks' Mᵀ·P. Every rank then
/// computes P·Qᵀ. If P and Q have `r` columns, a rank sends `r·(rows + columns)` numbers instead of `rows·columns`.
/// Vectors, and matrices that are too small to benefit, are not compressed. The hook sends them together with P. All
/// numbers are computed in `f32`.
///
/// If the matrix rank of the mean gradient is at most `r`, and the previous step computed its Q from the same gradient,
/// P·Qᵀ equals the mean gradient, except for rounding. If the matrix rank is larger, P·Qᵀ leaves out a part of the mean
/// gradient, and the error feedback adds this part to later steps.
///
/// If an element of a matrix is infinite or NaN on one rank, or becomes infinite or NaN during the step, the whole
/// matrix is NaN on every rank in that step. So a loss scaler can detect a scale that is too large. If the matrix is
/// NaN, the hook discards the error that it kept from earlier steps, and draws a new Q, so that later steps are
/// correct.
///
/// This hook supports only buckets in host memory. On a device, the hook's first step returns `Unsupported`.
///
/// For each bucket, this hook uses this additional memory:
///
/// - 4 bytes for each element of the gradients,
/// - 4 bytes for each element of the thin matrices,
/// - during a step, 4 bytes for each element of the largest compressed matrix.
///
/// ```
/// # use collectives::{Communicator, ReduceOp};
/// # use collectives_train::{DataParallel, Options, Parameter, PowerSgd, PowerSgdOptions};
/// Communicator::run_local(2, |comm| {
///     let mut model = DataParallel::new(comm, vec![Parameter::new::<f32>("weight", &[20, 30])], Options::default())?;
///     let options = PowerSgdOptions { start_step: 0, ..PowerSgdOptions::default() };
///     model.set_hooks::<f32>(|layout| Ok(Box::new(PowerSgd::<f32>::new(comm, layout, ReduceOp::Avg, options.clone())?)))?;
///     model.ready(0, &[1.0 + comm.rank() as f32; 600])?; // a matrix of rank 1
///     assert!((model.finish()?.gradient::<f32>(0)?[17] - 1.5).abs() < 1e-5);
///     Ok(())
/// })?;
/// # Ok::<(), collectives::Error>(())
/// ```
#[doc(alias = "powerSGD_hook")]
#[derive(Debug)]
pub struct PowerSgd<T: Float> {
    options: PowerSgdOptions,
    op: ReduceOp,
    step: u64,
    matrices: Vec<Matrix>,
    /// The uncompressed elements, in the bucket.
    others: Vec<Range<usize>>,
    /// M of every matrix. Between steps, the error that is kept for the next step.
    memory: Vec<f32>,
    /// Every P, then the uncompressed elements.
    left: Option<Flat<f32>>,
    /// Every Q.
    right: Option<Flat<f32>>,
    gradients: Option<Flat<T>>,
    stage: Stage,
    /// The hook for steps before `start_step`.
    plain: AllReduce<T>,
}

/// The call in progress.
#[derive(Debug, Default)]
enum Stage {
    #[default]
    Idle,
    Plain,
    Left(Pending<Flat<f32>>),
    Right(Pending<Flat<f32>>),
}

/// One compressed matrix: its place in the bucket and in the memory, and its factors' places in their buffers.
#[derive(Debug)]
struct Matrix {
    columns: usize,
    bucket: Range<usize>,
    memory: Range<usize>,
    left: Range<usize>,
    right: Range<usize>,
}

impl<T: Float> PowerSgd<T> {
    /// Creates the hook for one bucket. Collective.
    ///
    /// # Errors
    ///
    /// - `Mismatch` if two ranks pass different options.
    /// - `InvalidArgument` if [`PowerSgdOptions::rank`] is 0.
    /// - `Unsupported` if the op is not `Avg`, `Sum` or `PreMulSum`.
    /// - The errors of [`Communicator::alloc`].
    pub fn new(comm: &Communicator, layout: &BucketLayout, op: ReduceOp, options: PowerSgdOptions) -> Result<Self> {
        // With different seeds, for example, the ranks' thin matrices would not match, and no other check would detect
        // that.
        agree(comm, "PowerSgd::new", &Listed::default(), &format!("{options:?}"))?;
        weight(op, comm.world_size())?;
        if options.rank == 0 {
            return Err(Error::argument("PowerSgd::new", "the matrix rank of the approximation is 0; it must be 1 or more"));
        }
        let (mut matrices, mut others): (Vec<Matrix>, Vec<_>) = Default::default();
        for slot in &layout.slots {
            match compressed(slot, &options, matrices.last()) {
                Some(matrix) => matrices.push(matrix),
                None => others.push(slot.range.clone()),
            }
        }
        let ends = matrices.last().map_or((0, 0, 0), |last| (last.memory.end, last.left.end, last.right.end));
        let left = Flat::new(comm, ends.1 + others.iter().map(Range::len).sum::<usize>())?;
        let right = Flat::new(comm, ends.2)?;
        Ok(Self {
            options,
            op,
            step: 0,
            matrices,
            others,
            memory: vec![0.0; ends.0],
            left: Some(left),
            right: Some(right),
            gradients: None,
            stage: Stage::Idle,
            plain: AllReduce::new(op),
        })
    }

    /// Prepares every Q: makes it orthonormal, and draws new numbers for columns of zeros.
    fn prepare(&self, right: &mut [f32]) {
        for (index, matrix) in self.matrices.iter().enumerate() {
            let right = &mut right[matrix.right.clone()];
            if !self.options.warm_start || !all_finite(right) {
                right.fill(0.0);
            }
            orthonormalise(right, matrix.columns);
            let mut drawn = Random(self.options.seed ^ self.step.rotate_left(40) ^ (index as u64).rotate_left(20));
            for column in right.chunks_exact_mut(matrix.columns) {
                if column.iter().all(|x| *x == 0.0) {
                    column.iter_mut().for_each(|x| *x = drawn.unit());
                }
            }
            orthonormalise(right, matrix.columns);
        }
    }

    /// Computes M ← M + gradient and P ← M·Q, and appends the uncompressed elements.
    fn compress_left(&mut self, gradients: &[T], right: &[f32], left: &mut [f32]) {
        for matrix in &self.matrices {
            let memory = &mut self.memory[matrix.memory.clone()];
            if !self.options.error_feedback {
                memory.fill(0.0);
            }
            memory.iter_mut().zip(&gradients[matrix.bucket.clone()]).for_each(|(sum, x)| *sum += x.to_f32());
            times(memory, matrix.columns, &right[matrix.right.clone()], &mut left[matrix.left.clone()]);
        }
        let mut at = self.matrices.last().map_or(0, |last| last.left.end);
        for range in &self.others {
            T::widen(&gradients[range.clone()], &mut left[at..at + range.len()]);
            at += range.len();
        }
    }

    /// Makes P orthonormal and computes Q ← Mᵀ·P, and M ← M − P·Qᵀ, which is this rank's error. If P is not finite,
    /// fills Q with NaN. So does every other rank, because all have the same P.
    fn compress_right(&mut self, left: &mut [f32], right: &mut [f32]) {
        for matrix in &self.matrices {
            let memory = &mut self.memory[matrix.memory.clone()];
            let (left, right) = (&mut left[matrix.left.clone()], &mut right[matrix.right.clone()]);
            if !all_finite(left) {
                right.fill(f32::NAN);
                continue;
            }
            orthonormalise(left, memory.len() / matrix.columns);
            transposed_times(memory, matrix.columns, left, right);
            if self.options.error_feedback {
                add_product(memory, matrix.columns, left, right, -1.0);
            }
        }
    }

    /// Computes P·Qᵀ in the bucket, and copies the uncompressed elements. If Q, which is the same on every rank, is not
    /// finite, the result is NaN, and no error is kept for later.
    fn decompress(&mut self, left: &[f32], right: &[f32], gradients: &mut [T]) {
        let mut product = Vec::new();
        for matrix in &self.matrices {
            product.clear();
            let (left, right) = (&left[matrix.left.clone()], &right[matrix.right.clone()]);
            if all_finite(right) {
                product.resize(matrix.bucket.len(), 0.0);
                add_product(&mut product, matrix.columns, left, right, 1.0);
            } else {
                product.resize(matrix.bucket.len(), f32::NAN);
                self.memory[matrix.memory.clone()].fill(0.0);
            }
            T::narrow(&product, &mut gradients[matrix.bucket.clone()]);
        }
        let mut at = self.matrices.last().map_or(0, |last| last.left.end);
        for range in &self.others {
            T::narrow(&left[at..at + range.len()], &mut gradients[range.clone()]);
            at += range.len();
        }
    }
}

/// Returns the matrix for a gradient, placed after the matrix `before` it; `None` if it is not compressed.
fn compressed(slot: &Slot, options: &PowerSgdOptions, before: Option<&Matrix>) -> Option<Matrix> {
    let [rows, _, ..] = slot.shape[..] else { return None };
    let columns = slot.range.len().checked_div(rows)?;
    let (left, right) = (rows.checked_mul(options.rank)?, columns.checked_mul(options.rank)?);
    if (slot.range.len() as f64) < (left as f64 + right as f64) * options.min_compression_rate || slot.range.is_empty() {
        return None;
    }
    let after = |end: Option<usize>, len: usize| end.unwrap_or(0)..end.unwrap_or(0) + len;
    Some(Matrix {
        columns,
        bucket: slot.range.clone(),
        memory: after(before.map(|matrix| matrix.memory.end), slot.range.len()),
        left: after(before.map(|matrix| matrix.left.end), left),
        right: after(before.map(|matrix| matrix.right.end), right),
    })
}

impl<T: Float> Hook<T> for PowerSgd<T> {
    fn start(&mut self, comm: &Communicator, gradients: Flat<T>) -> Result<()> {
        // This is checked in the first step already, not only after the uncompressed steps.
        gradients.host()?;
        self.step += 1;
        if self.step <= self.options.start_step || self.matrices.is_empty() {
            self.stage = Stage::Plain;
            return self.plain.start(comm, gradients);
        }
        let (mut left, mut right) = self.left.take().zip(self.right.take()).ok_or_else(not_started)?;
        self.prepare(right.host_mut()?);
        self.compress_left(gradients.host()?, right.host()?, left.host_mut()?);
        (self.gradients, self.right) = (Some(gradients), Some(right));
        self.stage = Stage::Left(left.all_reduce(comm, self.op)?);
        Ok(())
    }

    fn advance(&mut self, comm: &Communicator) -> Result<Progress<T>> {
        match std::mem::take(&mut self.stage) {
            Stage::Idle => Err(not_started()),
            Stage::Plain => self.plain.advance(comm),
            Stage::Left(mut pending) => {
                let mut left = pending.wait()?;
                let mut right = self.right.take().ok_or_else(not_started)?;
                self.compress_right(left.host_mut()?, right.host_mut()?);
                self.left = Some(left);
                self.stage = Stage::Right(right.all_reduce(comm, self.op)?);
                Ok(Progress::Started)
            }
            Stage::Right(mut pending) => {
                let right = pending.wait()?;
                let (left, mut gradients) = self.left.take().zip(self.gradients.take()).ok_or_else(not_started)?;
                self.decompress(left.host()?, right.host()?, gradients.host_mut()?);
                (self.left, self.right) = (Some(left), Some(right));
                Ok(Progress::Done(gradients))
            }
        }
    }
}
