//! The host plane: ordinary memory, and calls that have ended when they return.

use std::convert::Infallible;
use std::time::Instant;

use collectives::{Error, Result};

use super::buffer::Buffer;
use super::plane::{Memory, Plane};
use crate::failure::Failure;
use crate::inputs::Sample;
use crate::layout::{Origin, Run};

/// The host plane.
pub(super) struct Host;

impl Plane for Host {
    type Memory<'p, T: Sample> = Buffer<T>;
    type Mark = Instant;
    type Graph = Infallible;

    const PERIOD: usize = usize::MAX;

    fn buffers<T: Sample>(&self, length: usize, unalign: usize) -> std::result::Result<[Buffer<T>; 2], Failure> {
        Ok([Buffer::new(length, unalign)?, Buffer::new(length, unalign)?])
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
        Err(Error::Unsupported { what: "a graph of calls".to_owned(), reason: "the host plane has no CUDA graphs".to_owned() })
    }

    fn launch(&self, graph: &Infallible) -> Result<()> {
        match *graph {}
    }
}

impl<T: Sample> Memory<T> for Buffer<T> {
    type Part<'a> = &'a [T];
    type PartMut<'a> = &'a mut [T];

    fn part(&self, length: usize) -> &[T] {
        &self.elements()[..length]
    }

    fn part_mut(&mut self, length: usize) -> &mut [T] {
        &mut self.elements_mut()[..length]
    }

    fn clear(&mut self) -> Result<()> {
        self.elements_mut().fill(T::default());
        Ok(())
    }

    fn write(&mut self, runs: &[Run], value: impl Fn(Origin, usize) -> T) -> Result<()> {
        for run in runs {
            for (offset, element) in self.elements_mut()[run.start..run.start + run.length].iter_mut().enumerate() {
                *element = value(run.origin, offset);
            }
        }
        Ok(())
    }

    fn compare(&self, runs: &[Run], value: impl Fn(Origin, usize) -> T, mut wrong: impl FnMut(usize, String, T)) -> Result<()> {
        for run in runs {
            for (offset, found) in self.elements()[run.start..run.start + run.length].iter().enumerate() {
                let right = value(run.origin, offset);
                if found.bits() != right.bits() {
                    wrong(run.start + offset, format!("{found:?}"), right);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_told() {
        let [mut buffer, _] = Host.buffers::<u16>(10, 0).unwrap();
        let runs = [
            Run { start: 1, length: 3, origin: Origin::Folded { start: 0 } },
            Run { start: 5, length: 2, origin: Origin::Of { rank: 1, start: 7 } },
        ];
        let value = |origin, offset| match origin {
            Origin::Folded { .. } => 100 + offset as u16,
            Origin::Of { .. } => 200 + offset as u16,
        };
        buffer.write(&runs, value).unwrap();
        assert_eq!(buffer.elements(), [0, 100, 101, 102, 0, 200, 201, 0, 0, 0]);
        buffer.elements_mut()[6] = 9;
        buffer.elements_mut()[8] = 9;
        let mut told = vec![];
        buffer.compare(&runs, value, |index, found, right| told.push((index, found, right))).unwrap();
        assert_eq!(told, [(6, "9".to_owned(), 201)]);
        buffer.clear().unwrap();
        assert_eq!(buffer.part(10), [0; 10]);
    }
}
