//! The kernels of training, apart from those that every plane has.

use super::module::{Function, Module};
use super::names::{self, DIVIDED, TRAINING, TYPES};
use crate::Result;
use crate::device::driver::Gpu;

/// The kernels that are loaded when somebody trains.
#[derive(Debug)]
pub(super) struct Gradients {
    pub(super) squares: [Function; TYPES],
    pub(super) total: Function,
    /// By the types from which and to which they convert.
    pub(super) convert: [[Function; TYPES]; TYPES],
    /// What the functions above belong to.
    _module: Module,
}

impl Gradients {
    pub(super) fn load(gpu: &Gpu) -> Result<Self> {
        let module = TRAINING.load(gpu)?;
        let find = |(_, name): (&str, String)| module.function(&name);
        let (mut squares, mut convert) = ([Function::NONE; TYPES], [[Function::NONE; TYPES]; TYPES]);
        for dtype in DIVIDED {
            squares[dtype as usize] = find(names::squares(dtype))?;
            for to in DIVIDED {
                convert[dtype as usize][to as usize] = find(names::convert(dtype, to))?;
            }
        }
        Ok(Self { squares, total: module.function("add_partials")?, convert, _module: module })
    }
}
