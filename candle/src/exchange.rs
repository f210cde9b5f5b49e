//! An exchange of rows between all ranks, with a different number of rows for each pair of ranks.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use collectives::{Buffer, BufferMut, Communicator, Element};

use crate::memory::{Compute, compute, extent};

/// An exchange of rows. The backward pass returns the gradients of the rows to the ranks that sent the rows.
#[derive(Debug, Clone)]
pub(crate) struct Exchange {
    pub(crate) comm: Communicator,
    /// How many rows this rank sends to each rank. The rows are ordered by rank.
    pub(crate) send: Vec<usize>,
    /// How many rows each rank sends to this rank.
    pub(crate) receive: Vec<usize>,
}

impl Exchange {
    /// Exchanges the rows of a matrix. If candle tracks `reason` for a backward pass, the result is tracked too, even
    /// if the rows are not. So all ranks run the same backward pass.
    pub(crate) fn apply(self, rows: &Tensor, reason: &Tensor) -> Result<Tensor> {
        rows.contiguous()?.apply_op2(reason, self)
    }

    fn shape_behind(&self, rows: &Shape) -> Result<Shape> {
        let (_, width) = rows.dims2()?;
        Ok(Shape::from((self.receive.iter().sum::<usize>(), width)))
    }
}

/// An exchange of rows of a given width.
struct OfWidth<'a>(&'a Exchange, usize);

impl Compute for OfWidth<'_> {
    fn copied_from(&self, _: usize) -> Option<usize> {
        None
    }

    fn run<S, D>(&self, source: &S, destination: &mut D) -> collectives::Result<()>
    where
        S: Buffer<Element: Element> + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        let Self(Exchange { comm, send, receive }, width) = self;
        let elements = |rows: &[usize]| rows.iter().map(|rows| rows * width).collect::<Vec<_>>();
        comm.all_to_all_v_into(source, &elements(send), destination, &elements(receive))
    }
}

impl CustomOp2 for Exchange {
    fn name(&self) -> &'static str {
        "exchange of rows"
    }

    fn cpu_fwd(&self, rows: &CpuStorage, layout: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let (shape, (_, width)) = (self.shape_behind(layout.shape())?, layout.shape().dims2()?);
        Ok((compute(rows, extent(layout)?, shape.elem_count(), &OfWidth(self, width))?, shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        rows: &candle_core::CudaStorage,
        layout: &Layout,
        _: &candle_core::CudaStorage,
        _: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let (shape, (_, width)) = (self.shape_behind(layout.shape())?, layout.shape().dims2()?);
        Ok((crate::cuda::compute(rows, extent(layout)?, shape.elem_count(), &OfWidth(self, width))?, shape))
    }

    fn bwd(&self, _rows: &Tensor, reason: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let back = Self { comm: self.comm.clone(), send: self.receive.clone(), receive: self.send.clone() };
        Ok((Some(back.apply(gradient, gradient)?), Some(reason.zeros_like()?)))
    }
}
