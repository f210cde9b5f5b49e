//! One bucket: its buffer, its hook, and a face that does not name its element type.

use std::any::Any;
use std::ops::Range;

use super::flat::Flat;
use super::float::Float;
use super::hook::{Hook, Progress};
use super::layout::BucketLayout;
use super::squares::Squares;
use crate::buffer::{Buffer as _, Memory};
use crate::communicator::Communicator;
use crate::error::{Error, Result};

/// A bucket whose elements are `T`.
pub(super) struct Bucket<T: Float> {
    pub(super) layout: BucketLayout,
    hook: Box<dyn Hook<T>>,
    /// Its gradients; a hook has them meanwhile.
    flat: Option<Flat<T>>,
    /// Its own buffer, while one that was given is in its place.
    own: Option<Flat<T>>,
}

/// A bucket of any type.
pub(super) trait AnyBucket: Any {
    fn layout(&self) -> &BucketLayout;

    /// Makes one gradient zeros.
    fn clear(&mut self, slot: usize) -> Result<()>;

    /// Hands the gradients to the hook.
    fn start(&mut self, comm: &Communicator) -> Result<()>;

    /// Moves the hook on; whether it is done.
    fn advance(&mut self, comm: &Communicator) -> Result<bool>;

    /// Adds up the squares of the elements in `range`.
    fn add_squares(&self, range: Range<usize>, sums: &mut Squares) -> Result<()>;

    /// Multiplies the elements in `range`.
    fn scale(&mut self, range: Range<usize>, factor: f64) -> Result<()>;
}

/// A bucket that has no gradients: its hook lost them with a call that failed.
fn lost() -> Error {
    Error::argument("train", "an earlier step failed, and its gradients are gone")
}

impl<T: Float> Bucket<T> {
    pub(super) fn new(layout: BucketLayout, flat: Flat<T>, hook: Box<dyn Hook<T>>) -> Self {
        Self { layout, hook, flat: Some(flat), own: None }
    }

    pub(super) fn set_hook(&mut self, hook: Box<dyn Hook<T>>) {
        self.hook = hook;
    }

    pub(super) fn flat(&self) -> Result<&Flat<T>> {
        self.flat.as_ref().ok_or_else(lost)
    }

    pub(super) fn flat_mut(&mut self) -> Result<&mut Flat<T>> {
        self.flat.as_mut().ok_or_else(lost)
    }

    /// Takes the buffer out, for a call that gives it back.
    pub(super) fn take_flat(&mut self) -> Result<Flat<T>> {
        self.flat.take().ok_or_else(lost)
    }

    pub(super) fn put_flat(&mut self, flat: Flat<T>) {
        self.flat = Some(flat);
    }

    /// Its own buffer, for this step's gradients.
    fn own_mut(&mut self) -> Result<&mut Flat<T>> {
        if self.own.is_some() {
            self.flat = self.own.take();
        }
        self.flat_mut()
    }

    /// Refuses what [`put`](Self::put) cannot reach.
    pub(super) fn check_put(&self, gradient: &Memory<'_, T>) -> Result<()> {
        self.own.as_ref().or(self.flat.as_ref()).ok_or_else(lost)?.check_put(gradient)
    }

    /// Puts a gradient of the right length into its slot, or adds it to what is there.
    pub(super) fn put(&mut self, slot: usize, gradient: Memory<'_, T>, add: bool) -> Result<()> {
        let range = self.layout.slots[slot].range.clone();
        self.own_mut()?.put(range, gradient, add)
    }

    /// As [`put`](Self::put); where the gradient is the whole bucket, its buffer becomes the bucket's.
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

    /// Moves a gradient out: the buffer that was given for it, or a copy.
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
                let reason = format!("the hook of bucket {index}, of {len} elements, gave a buffer of {got} back");
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
}
