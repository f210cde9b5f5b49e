//! All buckets of a model. They record which gradients have arrived, which buckets were launched, and which errors
//! occurred.
//!
//! # Design
//!
//! `train/` averages gradients like torch's DistributedDataParallel, for any tensor crate: the core takes a gradient's
//! buffer and the parameter's number. `layout.rs` (pure) walks the parameters from the last to the first and fills
//! buckets, separately for each element type. The first bucket of a type is limited to 1 MiB, the others to 25 MiB. On
//! the host, a parameter of 256 KiB or more is alone in its bucket, so that its reduction starts as soon as its
//! gradient arrives. Buckets are numbered in the order in which the walk completes them.
//!
//! `buckets.rs` counts the gradients that have arrived. A full bucket is launched once all buckets with lower numbers
//! have been launched. So every rank starts the same calls in the same order, whatever order its gradients arrive in.
//! Each bucket has a `Hook`, which runs in stages. `start` is called when the bucket is launched. Then `advance` is
//! called for every bucket in turn until all are done, again in the same order on every rank. The plain hook starts one
//! all-reduce. Compression, PowerSGD and the reduce-scatter of a sharded optimiser are hooks as well. A hook owns its
//! bucket's buffer while its calls run.
//!
//! Ranks compare a digest of names, shapes, types and settings at the start, and exchange the lists only if the digests
//! differ. If a gradient never arrives on one rank, the others must not wait for ever. So the rank without the gradient
//! sends zeros. One more all-reduce, beside those of the buckets, then reports the missing gradient as an error on
//! every rank. This all-reduce takes the maximum of one number, which encodes a rank and a parameter. Another step can
//! still follow.
//!
//! If a gradient is given (`DataParallel::give`) and is alone in its bucket, its buffer replaces the bucket's
//! (`bucket.rs`). The bucket's own buffer is kept for steps that copy. For the same parameter, one rank may give its
//! gradient while another copies its own into the bucket: the call is the same whichever buffer is used.
//!
//! On the host, buckets come from `Communicator::alloc` and the calls run on the communicator's worker. On a device,
//! copies into buckets are queued on the caller's stream, and reductions on the communicator's stream. The buckets'
//! events order the work on the two streams, so no host thread waits. Other work on gradients (adding parts, scaling,
//! the conversions of `Compress`) is done by our kernels on the caller's stream, with the same bits as on the host. The
//! kernels are loaded when the first buckets are made, before any work is queued. For a norm, a sum is copied to the
//! host; the communicator's timeout limits the wait for it. A sharded optimiser lends device slices of its share to the
//! caller's kernels. PowerSGD has no kernels, so it supports only host memory.
//!
//! Element types are erased in one place: an `AnyBucket` is a `Bucket` of one of the four float types, with its hook
//! and, in a sharded optimiser, this rank's share of the parameters.
//!
//! In addition to the model and its gradients, a step needs at most N bytes of memory, where N is the size of all
//! gradients. `Compress` adds N/2 for `f32`. PowerSGD adds 4 B for each element of the gradients, 4·r·(rows + columns)
//! bytes for the factors of each matrix, and, during a step, 4 B for each element of the largest compressed matrix.
//! `ShardedOptimizer` on n ranks needs N + N/n, and the caller's state for N/n bytes of parameters.

use std::any::Any;
use std::ops::Range;

use super::agreement::{Listed, agree, everywhere};
use super::bucket::{AnyBucket, Bucket, Ending, of_its_type};
use super::flat::{Flat, Pending, Place};
use super::hook::{Hook, weight};
use super::host::Squares;
use super::layout::{BucketLayout, Missing, Options, plan};
use super::loss_scaler::LossScaler;
use super::parameter::{Float, Parameter, check_fit};
use super::step_health::StepHealth;
use collectives::Communicator;
use collectives::DType;
use collectives::ReduceOp;
use collectives::interop::Memory;
use collectives::{Buffer, BufferMut};
use collectives::{Error, Result};

/// The state of a parameter in this step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// No part of the parameter's gradient has arrived.
    Empty,
    /// A part of the parameter's gradient has arrived, and further parts will arrive.
    Accumulated,
    /// The whole gradient of the parameter has arrived.
    Ready,
}

/// A parameter, its place, and its state.
struct Entry {
    parameter: Parameter,
    bucket: usize,
    slot: usize,
    stage: Stage,
    /// Whether the last step's gradient was moved out.
    taken: bool,
}

/// The buckets of a model on one rank.
pub(super) struct Buckets {
    comm: Communicator,
    entries: Vec<Entry>,
    buckets: Vec<Box<dyn AnyBucket>>,
    /// The number of gradients that each bucket still waits for.
    waiting: Vec<usize>,
    /// The next bucket to launch. The order is the same on every rank, whatever order the buckets are filled in.
    next: usize,
    options: Options,
    place: Place,
    ending: Ending,
    health: StepHealth,
}

impl Buckets {
    /// Makes buckets for these parameters, in this place. Collective.
    pub(super) fn new(
        comm: &Communicator,
        what: &'static str,
        parameters: Vec<Parameter>,
        options: &Options,
        place: &Place,
        ending: Ending,
    ) -> Result<Self> {
        let usable = weight(options.op, comm.world_size());
        let layouts = plan(&parameters, options.caps(place), ending.multiple(comm));
        agree(comm, what, &Listed::parameters(&parameters), &options.in_words(place))?;
        // These checks have the same outcome on every rank.
        usable?;
        let layouts = layouts?;
        let mut entries: Vec<_> =
            parameters.into_iter().map(|parameter| Entry { parameter, bucket: 0, slot: 0, stage: Stage::Empty, taken: false }).collect();
        for layout in &layouts {
            for (slot, place) in layout.slots.iter().enumerate() {
                entries[place.parameter].bucket = layout.index;
                entries[place.parameter].slot = slot;
            }
        }
        let made = layouts.into_iter().map(|layout| of_its_type(comm, layout, place, options.op, ending)).collect();
        // Local allocations come first, because they may fail on one rank only. Shared buffers are then made
        // collectively, by all ranks.
        let mut buckets: Vec<_> = everywhere(comm, what, made)?;
        let allocated = buckets.iter_mut().try_for_each(|bucket| bucket.allocate(comm, place));
        everywhere(comm, what, allocated)?;
        let waiting = buckets.iter().map(|bucket| bucket.layout().slots.len()).collect();
        let (comm, options, place, health) = (comm.clone(), options.clone(), place.clone(), StepHealth::default());
        Ok(Self { comm, entries, buckets, waiting, next: 0, options, place, ending, health })
    }

    /// Makes buckets for the same parameters, with the same options and in the same place, over the ranks of another
    /// communicator. Ranks that make buckets with [`new`](Self::new) pass the same `what`. Collective over `comm`.
    pub(super) fn resized(&self, comm: &Communicator, what: &'static str) -> Result<Self> {
        let parameters = self.entries.iter().map(|entry| entry.parameter.clone()).collect();
        Self::new(comm, what, parameters, &self.options, &self.place, self.ending)
    }

    pub(super) fn place_of_memory(&self) -> &Place {
        &self.place
    }

    pub(super) fn comm(&self) -> &Communicator {
        &self.comm
    }

    pub(super) fn layouts(&self) -> impl ExactSizeIterator<Item = &BucketLayout> {
        self.buckets.iter().map(|bucket| bucket.layout())
    }

    /// Returns the buckets, regardless of their types.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Box<dyn AnyBucket>> {
        self.buckets.iter_mut()
    }

    /// Returns the bucket and slot of an existing parameter.
    pub(super) fn place(&self, parameter: usize) -> (usize, usize) {
        (self.entries[parameter].bucket, self.entries[parameter].slot)
    }

    pub(super) fn parameter(&self, index: usize) -> Option<&Parameter> {
        self.entries.get(index).map(|entry| &entry.parameter)
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Gives every bucket of `T`s a hook from `make`. If one hook cannot be made, none is replaced.
    pub(super) fn set_hooks<T: Float>(&mut self, mut make: impl FnMut(&BucketLayout) -> Result<Box<dyn Hook<T>>>) -> Result<()> {
        self.health.check("set_hooks")?;
        if let Some(index) = self.entries.iter().position(|entry| entry.stage != Stage::Empty) {
            let parameter = &self.entries[index].parameter;
            let reason = "was given in this step: set hooks before the first gradient of a step, or after finish";
            return Err(Error::argument("set_hooks", format!("a gradient of parameter {index} {parameter} {reason}")));
        }
        let of_type = self.buckets.iter_mut().filter_map(|bucket| (&mut **bucket as &mut dyn Any).downcast_mut::<Bucket<T>>());
        let made = of_type.map(|bucket| make(&bucket.layout).map(|hook| (bucket, hook)));
        made.collect::<Result<Vec<_>>>()?.into_iter().for_each(|(bucket, hook)| bucket.set_hook(hook));
        Ok(())
    }

    /// Runs a part of a step. If it fails or panics, no step can follow.
    pub(super) fn go_on<R>(&mut self, work: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        self.health.enter();
        let result = work(self);
        self.health.leave(result)
    }

    /// Checks that a buffer of `T`s of this length can hold parameter `index`.
    pub(super) fn fitting<T: collectives::Data>(&self, call: &'static str, index: usize, len: usize) -> Result<()> {
        let parameter = self.known(call, index)?;
        let whose = format_args!("parameter {index} {parameter}");
        check_fit::<T>(call, whose, (parameter.dtype, parameter.len()), len)
    }

    fn known(&self, call: &'static str, index: usize) -> Result<&Parameter> {
        let count = self.entries.len();
        self.parameter(index).ok_or_else(|| {
            Error::argument(call, format!("there is no parameter {index}: the model has {count} parameters, numbered from 0"))
        })
    }

    /// Takes a part of parameter `index`'s gradient. If `last` is true, this is the last part, and the buckets that are
    /// then complete are launched.
    pub(super) fn take<T: Float>(&mut self, call: &'static str, index: usize, gradient: Memory<'_, T>, last: bool) -> Result<()> {
        self.check_take(call, index, &gradient)?;
        let Entry { bucket, slot, stage, .. } = self.entries[index];
        self.typed_mut::<T>(bucket)?.put(slot, gradient, stage == Stage::Accumulated)?;
        if !last {
            self.entries[index].stage = Stage::Accumulated;
            return Ok(());
        }
        self.now_ready(index);
        self.go_on(Self::launch_full)
    }

    /// Takes the last part of a gradient, like [`take`](Self::take). If the gradient fills the whole bucket, the
    /// gradient's buffer replaces the bucket's buffer.
    pub(super) fn give<T: Float>(&mut self, call: &'static str, index: usize, gradient: Flat<T>) -> Result<()> {
        self.check_take(call, index, &gradient.memory())?;
        let Entry { bucket, slot, stage, .. } = self.entries[index];
        self.typed_mut::<T>(bucket)?.give(slot, gradient, stage == Stage::Accumulated)?;
        self.now_ready(index);
        self.go_on(Self::launch_full)
    }

    /// Returns the errors of [`take`](Self::take), without taking anything.
    fn check_take<T: Float>(&self, call: &'static str, index: usize, gradient: &Memory<'_, T>) -> Result<()> {
        self.health.check(call)?;
        self.fitting::<T>(call, index, gradient.len())?;
        let Entry { ref parameter, bucket, stage, .. } = self.entries[index];
        if stage == Stage::Ready {
            let reason = "its gradient was already given in this step; call accumulate before ready, and finish before the next step";
            return Err(Error::argument(call, format!("parameter {index} {parameter}: {reason}")));
        }
        self.typed::<T>(bucket)?.check_put(gradient)
    }

    /// Takes every parameter's gradient, the last parameter's first. If one gradient is refused, takes none.
    pub(super) fn take_all<B: BufferMut<Element: Float>>(&mut self, call: &'static str, gradients: &[B]) -> Result<()> {
        let (count, given) = (self.len(), gradients.len());
        if given != count {
            return Err(Error::argument(call, format!("{given} gradients were passed for {count} parameters")));
        }
        gradients.iter().enumerate().try_for_each(|(index, gradient)| self.check_take(call, index, &gradient.memory()))?;
        let mut from_last = gradients.iter().enumerate().rev();
        let taken = from_last.try_for_each(|(index, gradient)| self.take(call, index, gradient.memory(), true));
        self.health.keep(taken)
    }

    fn now_ready(&mut self, index: usize) {
        let entry = &mut self.entries[index];
        entry.stage = Stage::Ready;
        self.waiting[entry.bucket] -= 1;
    }

    /// Launches the buckets that are full and whose predecessors have been launched.
    fn launch_full(&mut self) -> Result<()> {
        while self.next < self.buckets.len() && self.waiting[self.next] == 0 {
            self.buckets[self.next].start(&self.comm)?;
            self.next += 1;
        }
        Ok(())
    }

    /// Ends the step: launches every bucket and waits for it. An absent gradient counts as zeros, plus what was
    /// accumulated. Collective. If a gradient never arrived on one rank, every rank gets the error, and another step
    /// can follow.
    pub(super) fn finish(&mut self, call: &'static str) -> Result<()> {
        self.health.check(call)?;
        let absent = self.go_on(Self::finish_all)?;
        self.waiting = self.buckets.iter().map(|bucket| bucket.layout().slots.len()).collect();
        self.next = 0;
        self.entries.iter_mut().for_each(|entry| (entry.stage, entry.taken) = (Stage::Empty, false));
        let Some((rank, index)) = absent else { return Ok(()) };
        let who = &self.comm.peers()[rank];
        let parameter = self.known(call, index)?;
        let reason = "if that is intended, set Options::missing to Missing::Zeros";
        Err(Error::argument(call, format!("{who} gave no gradient for parameter {index} {parameter} in this step; {reason}")))
    }

    /// Does the part of [`finish`](Self::finish) that ends all steps if it fails. Returns a rank that had no gradient
    /// for a parameter, and that parameter.
    fn finish_all(&mut self) -> Result<Option<(usize, usize)>> {
        let absent = self.fill_up()?;
        self.launch_full()?;
        let told = match self.options.missing {
            Missing::Zeros => None,
            Missing::Refused => Some(self.tell(absent)?),
        };
        let mut open: Vec<usize> = (0..self.buckets.len()).collect();
        while !open.is_empty() {
            let mut still = Vec::new();
            for index in open {
                if !self.buckets[index].advance(&self.comm)? {
                    still.push(index);
                }
            }
            open = still;
        }
        #[cfg(feature = "cuda")]
        if let Some(failure) = self.comm.device().and_then(|device| device.failure()) {
            return Err(failure);
        }
        match told {
            Some(mut told) => told.wait().map(|[worst]| absent_of(worst)),
            None => Ok(None),
        }
    }

    /// Makes every parameter ready, with zeros for absent gradients. Returns the first of the parameters that were not
    /// ready.
    fn fill_up(&mut self) -> Result<Option<usize>> {
        let absent: Vec<usize> = (0..self.entries.len()).filter(|index| self.entries[*index].stage != Stage::Ready).collect();
        for index in &absent {
            let Entry { bucket, slot, stage, .. } = self.entries[*index];
            if stage == Stage::Empty {
                self.buckets[bucket].clear(slot)?;
            }
            self.now_ready(*index);
        }
        Ok(absent.first().copied())
    }

    /// Starts to report a parameter that got no gradient on this rank to every rank. The largest number wins, so all
    /// ranks get the same number.
    fn tell(&self, absent: Option<usize>) -> Result<Pending<[u64; 1]>> {
        let number = absent.map_or(0, |index| (self.comm.rank() as u64 + 1) << 32 | index as u64);
        match self.comm.world_size() {
            1 => Ok(Pending::Ended([number])),
            _ => self.comm.start_all_reduce([number], ReduceOp::Max).map(Pending::Going),
        }
    }

    /// Returns a bucket, whose elements must be `T`s.
    pub(super) fn typed<T: Float>(&self, bucket: usize) -> Result<&Bucket<T>> {
        (&*self.buckets[bucket] as &dyn Any).downcast_ref().ok_or_else(|| other_type(bucket, T::ELEMENT_TYPE))
    }

    pub(super) fn typed_mut<T: Float>(&mut self, bucket: usize) -> Result<&mut Bucket<T>> {
        (&mut *self.buckets[bucket] as &mut dyn Any).downcast_mut().ok_or_else(|| other_type(bucket, T::ELEMENT_TYPE))
    }

    /// Returns the sum of the squares of a part of each bucket.
    pub(super) fn sum_of_squares(&self, part: impl Fn(&BucketLayout) -> Range<usize>) -> Result<f64> {
        let mut sums = Squares::default();
        self.buckets.iter().try_for_each(|bucket| bucket.add_squares(part(bucket.layout()), &mut sums))?;
        sums.total(&self.comm)
    }

    /// Returns the first parameter whose gradient has an infinite or NaN sum of squares.
    pub(super) fn first_not_finite(&self) -> Result<Option<usize>> {
        if self.sum_of_squares(|layout| 0..layout.len)?.is_finite() {
            return Ok(None);
        }
        for (index, Entry { bucket, slot, .. }) in self.entries.iter().enumerate() {
            let (bucket, mut sum) = (&self.buckets[*bucket], Squares::default());
            bucket.add_squares(bucket.layout().slots[*slot].range.clone(), &mut sum)?;
            if !sum.total(&self.comm)?.is_finite() {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }

    /// Multiplies a part of each bucket.
    pub(super) fn scale(&mut self, part: impl Fn(&BucketLayout) -> Range<usize>, factor: f64) -> Result<()> {
        self.buckets.iter_mut().try_for_each(|bucket| {
            let range = part(bucket.layout());
            bucket.scale(range, factor)
        })
    }

    /// Divides a part of each bucket by a loss's scale, and has the scaler record overflows.
    pub(super) fn unscale(&mut self, part: impl Fn(&BucketLayout) -> Range<usize>, scaler: &mut LossScaler) -> Result<()> {
        self.scale(&part, scaler.inverse())?;
        scaler.note(self.sum_of_squares(part)?.is_finite());
        Ok(())
    }

    /// Refuses a gradient that was moved out after the last step.
    fn check_there(&self, call: &'static str, index: usize) -> Result<()> {
        match &self.entries[index] {
            Entry { parameter, taken: true, .. } => {
                Err(Error::argument(call, format!("parameter {index} {parameter}: its gradient was taken")))
            }
            _ => Ok(()),
        }
    }

    /// Refuses an operation on all gradients if one was moved out.
    pub(super) fn check_all_there(&self, call: &'static str) -> Result<()> {
        (0..self.len()).try_for_each(|index| self.check_there(call, index))
    }

    /// Moves parameter `index`'s gradient out.
    pub(super) fn move_out<T: Float>(&mut self, call: &'static str, index: usize) -> Result<Flat<T>> {
        self.slot::<T>(call, index)?;
        let Entry { bucket, slot, .. } = self.entries[index];
        let gradient = self.typed_mut::<T>(bucket)?.take(slot)?;
        self.entries[index].taken = true;
        Ok(gradient)
    }

    /// Returns the buffer and the range of parameter `index`'s slot.
    pub(super) fn slot<T: Float>(&self, call: &'static str, index: usize) -> Result<(&Flat<T>, Range<usize>)> {
        let parameter = self.known(call, index)?;
        self.fitting::<T>(call, index, parameter.len().unwrap_or_default())?;
        self.check_there(call, index)?;
        let Entry { bucket, slot, .. } = self.entries[index];
        let bucket = self.typed::<T>(bucket)?;
        Ok((bucket.flat()?, bucket.layout.slots[slot].range.clone()))
    }

    /// Copies the contents of parameter `index`'s slot to `destination`.
    pub(super) fn copy_to<B>(&self, call: &'static str, index: usize, destination: &mut B) -> Result<()>
    where
        B: BufferMut<Element: Float> + ?Sized,
    {
        let destination = destination.memory_mut();
        self.fitting::<B::Element>(call, index, destination.len())?;
        let (flat, range) = self.slot::<B::Element>(call, index)?;
        flat.copy_to(range, destination)
    }

    /// Copies the root's parameter to every rank, in place. Collective.
    pub(super) fn broadcast<B: BufferMut + ?Sized>(&self, index: usize, values: &mut B, root: usize) -> Result<()> {
        self.fitting::<B::Element>("broadcast", index, Buffer::memory(values).len())?;
        // A single rank needs no device backend.
        if self.comm.world_size() == 1 && root == 0 { Ok(()) } else { self.comm.broadcast(values, root) }
    }
}

/// Returns the rank and the parameter that [`Buckets::tell`] encoded in a number.
fn absent_of(number: u64) -> Option<(usize, usize)> {
    let rank = (number >> 32).checked_sub(1)?;
    Some((rank as usize, (number & u64::from(u32::MAX)) as usize))
}

fn other_type(bucket: usize, asked: DType) -> Error {
    Error::argument("train", format!("bucket {bucket} does not hold elements of {asked}"))
}
