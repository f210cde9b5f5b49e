//! One bucket: its buffer, its hook, this rank's share of its parameters, and a trait that erases its element type.

use std::any::Any;
use std::ops::Range;

use half::{bf16, f16};

use super::flat::{Flat, Pending, Place};
use super::hook::{AllReduce, Hook, Progress, ReduceScatter};
use super::host::Squares;
use super::layout::BucketLayout;
use super::parameter::Float;
use collectives::Buffer as _;
use collectives::Communicator;
use collectives::DType;
use collectives::ReduceOp;
use collectives::interop::Memory;
use collectives::{Error, Result};

/// The part of a bucket's averaged gradients that a rank has at the end of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// All averaged gradients of the bucket.
    Whole,
    /// Only the rank's share of the averaged gradients. The rank also keeps its share of the parameters.
    Shares,
}

impl Ending {
    /// Returns the number of which a bucket's length must be a multiple.
    pub(super) fn multiple(self, comm: &Communicator) -> usize {
        match self {
            Self::Whole => 1,
            Self::Shares => comm.world_size(),
        }
    }
}

/// Returns the range of this rank's share of a bucket. Shares have the same length and are in rank order.
pub(super) fn own_range(comm: &Communicator, layout: &BucketLayout) -> Range<usize> {
    range_of(comm, layout, comm.rank())
}

/// Returns the range of the share of an existing rank.
pub(super) fn range_of(comm: &Communicator, layout: &BucketLayout, rank: usize) -> Range<usize> {
    let len = layout.len / comm.world_size();
    rank * len..(rank + 1) * len
}

/// A bucket whose elements are `T`.
pub(super) struct Bucket<T: Float> {
    pub(super) layout: BucketLayout,
    hook: Box<dyn Hook<T>>,
    /// Its gradients, unless a hook has them.
    flat: Option<Flat<T>>,
    /// The bucket's own buffer, while a given buffer replaces it.
    own: Option<Flat<T>>,
    /// This rank's share of the parameters, if a step ends in shares.
    share: Option<Flat<T>>,
    /// The buffer, while all ranks' shares are being gathered into it.
    gathering: Pending<Flat<T>>,
}

/// The data lent to an optimiser: this rank's share of the parameters, and all gradients, of which `range` is this
/// rank's share. Both are `Flat`s of the bucket's type.
pub(super) struct Lent<'a> {
    pub(super) layout: &'a BucketLayout,
    pub(super) range: Range<usize>,
    pub(super) parameters: &'a mut dyn Any,
    pub(super) gradients: &'a dyn Any,
}

/// A bucket of any type.
pub(super) trait AnyBucket: Send + Any {
    fn layout(&self) -> &BucketLayout;

    /// Allocates the buffer of the bucket's gradients. In host memory, this call is collective: if one rank fails, all
    /// fail. On a device, this call is local.
    fn allocate(&mut self, comm: &Communicator, place: &Place) -> Result<()>;

    /// Overwrites one gradient with zeros.
    fn clear(&mut self, slot: usize) -> Result<()>;

    /// Passes the gradients to the bucket's hook.
    fn start(&mut self, comm: &Communicator) -> Result<()>;

    /// Advances the hook. Returns whether the hook is done.
    fn advance(&mut self, comm: &Communicator) -> Result<bool>;

    /// Adds the squares of the elements in `range` to `sums`.
    fn add_squares(&self, range: Range<usize>, sums: &mut Squares) -> Result<()>;

    /// Multiplies the elements in `range` by `factor`.
    fn scale(&mut self, range: Range<usize>, factor: f64) -> Result<()>;

    /// Lends the bucket's data to an optimiser.
    fn lend(&mut self, comm: &Communicator) -> Result<Lent<'_>>;

    /// Starts to gather all ranks' shares of the parameters into the buffer of the gradients.
    fn gather(&mut self, comm: &Communicator) -> Result<()>;

    /// Waits until the shares are gathered.
    fn gathered(&mut self) -> Result<()>;
}

/// Creates a bucket with the layout's element type, and without a buffer for its gradients. Local.
pub(super) fn of_its_type(
    comm: &Communicator,
    layout: BucketLayout,
    place: &Place,
    op: ReduceOp,
    ending: Ending,
) -> Result<Box<dyn AnyBucket>> {
    match layout.dtype {
        DType::F64 => Bucket::<f64>::boxed(comm, layout, place, op, ending),
        DType::F16 => Bucket::<f16>::boxed(comm, layout, place, op, ending),
        DType::Bf16 => Bucket::<bf16>::boxed(comm, layout, place, op, ending),
        // The plan accepts no other type.
        _ => Bucket::<f32>::boxed(comm, layout, place, op, ending),
    }
}

/// Returns the error for a bucket that has no gradients, because its hook lost them in a failed call.
fn lost() -> Error {
    Error::argument("train", "an earlier step failed, and its gradients are lost")
}

/// Returns the error for a bucket with [`Ending::Whole`], for which the rank keeps no share of the parameters.
fn whole() -> Error {
    Error::argument("train", "this rank keeps no share of the parameters")
}

impl<T: Float> Bucket<T> {
    /// Creates a bucket with the plain hook. With [`Ending::Shares`], the bucket also has this rank's share of the
    /// parameters, which starts as zeros.
    fn boxed(comm: &Communicator, layout: BucketLayout, place: &Place, op: ReduceOp, ending: Ending) -> Result<Box<dyn AnyBucket>> {
        place.check(comm)?;
        let (hook, share): (Box<dyn Hook<T>>, _) = match ending {
            Ending::Whole => (Box::new(AllReduce::new(op)), None),
            Ending::Shares => {
                let share = Flat::unshared(place, own_range(comm, &layout).len())?;
                (Box::new(ReduceScatter::new(op)), Some(share))
            }
        };
        Ok(Box::new(Self { layout, hook, flat: None, own: None, share, gathering: Pending::Idle }))
    }

    pub(super) fn set_hook(&mut self, hook: Box<dyn Hook<T>>) {
        self.hook = hook;
    }

    pub(super) fn flat(&self) -> Result<&Flat<T>> {
        self.flat.as_ref().ok_or_else(lost)
    }

    fn flat_mut(&mut self) -> Result<&mut Flat<T>> {
        self.flat.as_mut().ok_or_else(lost)
    }

    /// Moves the buffer of the gradients out of the bucket, for a call that returns the buffer later.
    fn take_flat(&mut self) -> Result<Flat<T>> {
        self.flat.take().ok_or_else(lost)
    }

    /// Returns this rank's share of the parameters.
    pub(super) fn share_mut(&mut self) -> Result<&mut Flat<T>> {
        self.share.as_mut().ok_or_else(whole)
    }

    /// Returns the bucket's own buffer for this step's gradients. If a given buffer has replaced the bucket's own
    /// buffer, this function first puts the bucket's own buffer back.
    fn own_mut(&mut self) -> Result<&mut Flat<T>> {
        if self.own.is_some() {
            self.flat = self.own.take();
        }
        self.flat_mut()
    }

    /// Refuses memory that [`put`](Self::put) cannot reach.
    pub(super) fn check_put(&self, gradient: &Memory<'_, T>) -> Result<()> {
        self.own.as_ref().or(self.flat.as_ref()).ok_or_else(lost)?.check_put(gradient)
    }

    /// Copies a gradient of the right length into its slot, or adds it to the gradient that is already there.
    pub(super) fn put(&mut self, slot: usize, gradient: Memory<'_, T>, add: bool) -> Result<()> {
        let range = self.layout.slots[slot].range.clone();
        self.own_mut()?.put(range, gradient, 0, add)
    }

    /// Puts a gradient into its slot, like [`put`](Self::put). If the gradient is the whole bucket, the gradient's
    /// buffer replaces the bucket's buffer instead.
    pub(super) fn give(&mut self, slot: usize, gradient: Flat<T>, add: bool) -> Result<()> {
        let is_whole = self.layout.slots.len() == 1 && gradient.memory().len() == self.layout.len;
        let own = self.own_mut()?;
        if add || !is_whole || !own.can_be(&gradient) {
            return self.put(slot, gradient.memory(), add);
        }
        let given = own.replaced_by(gradient);
        self.own = self.flat.replace(given);
        Ok(())
    }

    /// Moves out the buffer that was given for a gradient, or returns a copy.
    pub(super) fn take(&mut self, slot: usize) -> Result<Flat<T>> {
        match self.own {
            Some(_) => self.take_flat(),
            None => self.flat()?.copied(self.layout.slots[slot].range.clone()),
        }
    }
}

impl<T: Float> AnyBucket for Bucket<T> {
    fn layout(&self) -> &BucketLayout {
        &self.layout
    }

    fn allocate(&mut self, comm: &Communicator, place: &Place) -> Result<()> {
        self.flat = Some(Flat::in_place(comm, place, self.layout.len)?);
        Ok(())
    }

    fn clear(&mut self, slot: usize) -> Result<()> {
        let range = self.layout.slots[slot].range.clone();
        self.own_mut()?.clear(range)
    }

    fn start(&mut self, comm: &Communicator) -> Result<()> {
        if self.layout.len == 0 {
            return Ok(());
        }
        let mut flat = self.take_flat()?;
        let end = self.layout.slots.last().map_or(0, |slot| slot.range.end);
        flat.clear(end..self.layout.len)?;
        self.hook.start(comm, flat)
    }

    fn advance(&mut self, comm: &Communicator) -> Result<bool> {
        if self.flat.is_some() {
            return Ok(true);
        }
        if let Progress::Done(flat) = self.hook.advance(comm)? {
            let (index, len, got) = (self.layout.index, self.layout.len, flat.memory().len());
            if got != len {
                let reason = format!("bucket {index} has {len} elements, but its hook returned a buffer of {got} elements");
                return Err(Error::argument("finish", reason));
            }
            self.flat = Some(flat);
        }
        Ok(self.flat.is_some())
    }

    fn add_squares(&self, range: Range<usize>, sums: &mut Squares) -> Result<()> {
        self.flat()?.add_squares(range, sums)
    }

    fn scale(&mut self, range: Range<usize>, factor: f64) -> Result<()> {
        self.flat_mut()?.scale(range, factor)
    }

    fn lend(&mut self, comm: &Communicator) -> Result<Lent<'_>> {
        let parameters = self.share.as_mut().ok_or_else(whole)?;
        let gradients = self.flat.as_ref().ok_or_else(lost)?;
        Ok(Lent { layout: &self.layout, range: own_range(comm, &self.layout), parameters, gradients })
    }

    fn gather(&mut self, comm: &Communicator) -> Result<()> {
        let mut flat = self.take_flat()?;
        flat.put(own_range(comm, &self.layout), self.share_mut()?.memory(), 0, false)?;
        self.gathering = flat.all_gather(comm)?;
        Ok(())
    }

    fn gathered(&mut self) -> Result<()> {
        self.flat = Some(self.gathering.wait()?);
        Ok(())
    }
}
