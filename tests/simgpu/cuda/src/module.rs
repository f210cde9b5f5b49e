//! Modules and kernels.

use crate::job::Span;
use crate::run::Failure;
use crate::state::{Handle, State};

pub(crate) struct Module {
    pub(crate) context: Handle,
}

pub(crate) struct Function {
    pub(crate) context: Handle,
}

pub(crate) enum Launch {}

#[derive(Default)]
pub(crate) struct Sight {}

impl Sight {
    pub(crate) fn of(_state: &State, _context: Handle, _number: u64) -> Sight {
        Sight {}
    }
}

pub(crate) fn run(launch: &Launch, _sight: &Sight) -> Result<Vec<Span>, Failure> {
    match *launch {}
}
