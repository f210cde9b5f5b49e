//! A unit as one operation in candle's graph. The graph contains the unit's input and output, but neither its
//! parameters nor the values between its layers. The backward pass gathers the parameters again, and repeats the
//! forward pass.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, CustomOp1 as _, CustomOp2, Layout, Result, Shape, Storage, Tensor};

use super::Shared;
use crate::function::{Function, Step};

/// One forward pass of a unit.
pub(super) struct UnitPass {
    pub(super) model: Arc<Shared>,
    pub(super) unit: usize,
    /// The number of updates before this pass.
    pub(super) updates: u64,
    /// The output, until it is in the graph.
    pub(super) output: Mutex<Option<Tensor>>,
}

impl CustomOp2 for UnitPass {
    fn name(&self) -> &'static str {
        "unit of a sharded model"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let output = self.output.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(output) = output else { candle_core::bail!("{}: its output is in the graph already", self.name()) };
        let (storage, layout) = output.storage_and_layout();
        match &*storage {
            Storage::Cpu(storage) => {
                Function { comm: self.model.comm.clone(), forward: Step::Identity, backward: None }.cpu_fwd(storage, layout)
            }
            _ => candle_core::bail!("{}: the output is on {:?}; it must be in host memory", self.name(), output.device()),
        }
    }

    fn bwd(&self, input: &Tensor, _root: &Tensor, _output: &Tensor, slope: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((self.model.backward(self.unit, self.updates, input, slope)?, None))
    }
}
