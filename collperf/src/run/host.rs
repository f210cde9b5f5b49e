//! The host backend: ordinary memory, and calls that have ended when they return.

use std::any::Any;
use std::cell::RefCell;
use std::convert::Infallible;
use std::ops::Range;
use std::time::Instant;

use collectives::{Communicator, Error, Result};

use super::backend::{Backend, Memory};
use super::buffer::Buffer;
use crate::failure::Failure;
use crate::inputs::Sample;
use crate::layout::Run;
use crate::settings::Register;

/// The largest row, in bytes, whose inputs are all made individually. The inputs of larger rows repeat, because making
/// all of them would take longer than measuring.
const MADE_BYTES: usize = 16 << 20;
/// The number of elements after which inputs repeat: a prime, so that data in another chunk's place is noticed.
const PERIOD: usize = (1 << 18) + 3;

/// The host backend.
pub(super) struct Host<'a> {
    comm: &'a Communicator,
    register: Register,
    /// The buffers that were used last: allocating memory takes longer than most of the work on it.
    kept: RefCell<Vec<Box<dyn Any>>>,
}

impl<'a> Host<'a> {
    pub(super) fn new(comm: &'a Communicator, register: Register) -> Self {
        Self { comm, register, kept: RefCell::default() }
    }

    /// Returns a buffer that was given back, or a new one.
    fn buffer<T: Sample>(&self, kept: Option<Box<dyn Any>>, length: usize, unalign: usize) -> std::result::Result<Kept<'_, T>, Failure> {
        let kept = kept.and_then(|kept| kept.downcast::<Buffer<T>>().ok()).map(|kept| *kept);
        let buffer = match kept.filter(|kept| kept.elements().len() >= length) {
            Some(buffer) => buffer,
            None if self.register == Register::Nothing => Buffer::new(length, unalign)?,
            None => Buffer::allocated(self.comm, length, unalign)?,
        };
        Ok(Kept { buffer: Some(buffer), kept: &self.kept })
    }
}

/// A buffer that is given back when it is dropped.
pub(super) struct Kept<'a, T: Sample> {
    /// The buffer; `None` once it is given back.
    buffer: Option<Buffer<T>>,
    kept: &'a RefCell<Vec<Box<dyn Any>>>,
}

impl<T: Sample> Kept<'_, T> {
    fn elements(&self) -> &[T] {
        self.buffer.as_ref().map_or(&[], Buffer::elements)
    }

    fn elements_mut(&mut self) -> &mut [T] {
        self.buffer.as_mut().map_or(&mut [], Buffer::elements_mut)
    }
}

impl<T: Sample> Drop for Kept<'_, T> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.kept.borrow_mut().push(Box::new(buffer));
        }
    }
}

impl Backend for Host<'_> {
    type Memory<'p, T: Sample>
        = Kept<'p, T>
    where
        Self: 'p;
    type Mark = Instant;
    type Graph = Infallible;

    fn period(bytes: usize) -> usize {
        if bytes <= MADE_BYTES { usize::MAX } else { PERIOD }
    }

    fn buffers<T: Sample>(&self, length: usize, unalign: usize) -> std::result::Result<[Kept<'_, T>; 2], Failure> {
        let mut kept = self.kept.take().into_iter();
        Ok([self.buffer(kept.next(), length, unalign)?, self.buffer(kept.next(), length, unalign)?])
    }

    fn finish(&self) -> Result<()> {
        Ok(())
    }

    fn mark(&self) -> Result<Instant> {
        Ok(Instant::now())
    }

    fn between(&self, from: &Instant, to: &Instant) -> Result<f64> {
        Ok(to.duration_since(*from).as_secs_f64() * 1e6)
    }

    fn memory_use(&self) -> Result<[u64; 3]> {
        Ok([0; 3])
    }

    fn capture(&self, _queue: &mut dyn FnMut() -> Result<()>) -> Result<Infallible> {
        Err(Error::Unsupported { what: "a graph of calls".to_owned(), reason: "the host backend has no CUDA graphs".to_owned() })
    }

    fn launch(&self, graph: &Infallible) -> Result<()> {
        match *graph {}
    }
}

impl<T: Sample> Memory<T> for Kept<'_, T> {
    type Part<'a>
        = &'a [T]
    where
        Self: 'a;
    type PartMut<'a>
        = &'a mut [T]
    where
        Self: 'a;

    fn part(&self, length: usize) -> &[T] {
        &self.elements()[..length]
    }

    fn part_mut(&mut self, length: usize) -> &mut [T] {
        &mut self.elements_mut()[..length]
    }

    fn apart(&mut self, read: Range<usize>, written: Range<usize>) -> (&[T], &mut [T]) {
        let elements = self.elements_mut();
        if read.end <= written.start {
            let (low, high) = elements.split_at_mut(written.start);
            (&low[read], &mut high[..written.end - written.start])
        } else {
            let (low, high) = elements.split_at_mut(read.start);
            (&high[..read.end - read.start], &mut low[written])
        }
    }

    const HAS_GROUPS: bool = false;

    fn parts_mut(&mut self, length: usize, _times: usize) -> Vec<&mut [T]> {
        vec![self.part_mut(length)]
    }

    fn copy_from(&mut self, from: &Self, length: usize, to: usize) -> Result<()> {
        self.elements_mut()[to..to + length].copy_from_slice(&from.elements()[..length]);
        Ok(())
    }

    fn clear(&mut self, length: usize) -> Result<()> {
        self.elements_mut()[..length].fill(T::default());
        Ok(())
    }

    fn write(&mut self, run: Run, values: &[T]) -> Result<()> {
        let elements = &mut self.elements_mut()[run.start..run.start + run.length];
        for again in elements.chunks_mut(values.len().max(1)) {
            again.copy_from_slice(&values[..again.len()]);
        }
        Ok(())
    }

    fn compare(&self, run: Run, values: &[T], mut wrong: impl FnMut(usize, String, T)) -> Result<()> {
        let elements = &self.elements()[run.start..run.start + run.length];
        for (part, again) in elements.chunks(values.len().max(1)).enumerate() {
            for (offset, (found, right)) in again.iter().zip(values).enumerate() {
                if found.bits() != right.bits() {
                    wrong(run.start + part * values.len() + offset, format!("{found:?}"), *right);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Origin;

    #[test]
    fn what_differs_is_told() {
        let comm = Communicator::local(1).unwrap().remove(0);
        let host = Host::new(&comm, Register::Nothing);
        let [mut buffer, _] = host.buffers::<u16>(10, 0).unwrap();
        let origin = Origin::Folded { start: 0 };
        let runs = [Run { start: 1, length: 5, origin }, Run { start: 7, length: 2, origin }];
        // Shorter than the run, and of the same length.
        let values: [&[u16]; 2] = [&[100, 101], &[200, 201]];
        buffer.write(runs[0], values[0]).unwrap();
        buffer.write(runs[1], values[1]).unwrap();
        assert_eq!(buffer.elements(), [0, 100, 101, 100, 101, 100, 0, 200, 201, 0]);
        for index in [4, 6, 8] {
            buffer.elements_mut()[index] = 9;
        }
        let mut told = vec![];
        for (run, values) in runs.into_iter().zip(values) {
            buffer.compare(run, values, |index, found, right| told.push((index, found, right))).unwrap();
        }
        assert_eq!(told, [(4, "9".to_owned(), 101), (8, "9".to_owned(), 201)]);
        buffer.clear(10).unwrap();
        assert_eq!(buffer.part(10), [0; 10]);
        buffer.write(Run { start: 3, length: 0, origin }, &[]).unwrap();
    }

    #[test]
    fn buffers_are_had_again() {
        let comm = Communicator::local(1).unwrap().remove(0);
        for register in [Register::Nothing, Register::Local] {
            let host = Host::new(&comm, register);
            let address = |length| host.buffers::<u64>(length, 1).unwrap().map(|buffer| buffer.part(1).as_ptr());
            let first = address(5000);
            assert_eq!(address(4000), first);
            assert_eq!(host.buffers::<u8>(9000, 1).unwrap()[0].part(9000).len(), 9000);
            assert_eq!(host.buffers::<u64>(9000, 1).unwrap()[1].part(9000), [0; 9000]);
        }
    }
}
