//! A network whose backward pass returns each layer's gradients as soon as they are computed.

use anyhow::Context as _;
use burn::tensor::{Device, Int, Tensor, TensorData, activation};
use training_common::uniform;

/// Fully connected layers with tanh between them.
pub struct Network {
    layers: Vec<Layer>,
    device: Device,
}

struct Layer {
    /// Inputs × outputs.
    weight: Tensor<2>,
    bias: Tensor<1>,
}

impl Layer {
    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        input.matmul(self.weight.clone()) + self.bias.clone().unsqueeze()
    }
}

/// Creates a parameter, for which the backward pass computes a gradient.
fn leaf<const D: usize>(values: Vec<f32>, shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), device).require_grad()
}

/// Returns a random weight, row by row, which depends on the seed.
pub(crate) fn initial_weight(seed: u64, inputs: usize, outputs: usize) -> Vec<f32> {
    let bound = (6.0 / (inputs + outputs) as f32).sqrt();
    uniform(seed, bound, inputs * outputs)
}

/// Returns the mean loss of the samples, from the scores of their classes.
pub(crate) fn mean_loss(scores: Tensor<2>, classes: Tensor<2, Int>) -> Tensor<1> {
    -activation::log_softmax(scores, 1).gather(1, classes).mean()
}

/// Returns the tensor's elements, row by row. They are not copied if no other tensor shares the memory.
pub(crate) fn elements<const D: usize>(tensor: Tensor<D>) -> anyhow::Result<Vec<f32>> {
    tensor.into_data().try_into_vec().map_err(|error| anyhow::anyhow!("a parameter is not f32: {error:?}"))
}

impl Network {
    /// Creates a network with random weights, which depend on the seed.
    #[must_use]
    pub fn new(sizes: &[(usize, usize)], seed: u64, device: &Device) -> Self {
        let device = device.clone().autodiff();
        let layer = |(index, &(inputs, outputs)): (usize, &(usize, usize))| {
            let weight = initial_weight(seed + index as u64, inputs, outputs);
            Layer { weight: leaf(weight, [inputs, outputs], &device), bias: leaf(vec![0.0; outputs], [outputs], &device) }
        };
        Self { layers: sizes.iter().enumerate().map(layer).collect(), device }
    }

    /// Returns the parameters: weight, bias, weight, bias …
    ///
    /// # Errors
    ///
    /// A parameter is not `f32`.
    pub fn parameters(&self) -> anyhow::Result<Vec<Vec<f32>>> {
        let of_layer = |layer: &Layer| [elements(layer.weight.clone()), elements(layer.bias.clone())];
        self.layers.iter().flat_map(of_layer).collect()
    }

    /// Changes the values of a parameter with `change`.
    ///
    /// # Errors
    ///
    /// The errors of `change`.
    pub fn change(&mut self, number: usize, change: impl FnOnce(&mut [f32]) -> anyhow::Result<()>) -> anyhow::Result<()> {
        let layer = self.layers.get_mut(number / 2).context("the network has no such parameter")?;
        if number.is_multiple_of(2) {
            changed(&mut layer.weight, &self.device, change)
        } else {
            changed(&mut layer.bias, &self.device, change)
        }
    }

    /// Runs one step and returns its loss. `ready` gets each parameter's number and gradient before the gradients of
    /// earlier layers are computed.
    ///
    /// burn computes all gradients of a graph in one call, so each layer is its own graph. Its backward pass ends with
    /// the gradient of its input, which starts the backward pass of the layer before it.
    ///
    /// # Errors
    ///
    /// The errors of `ready`.
    pub fn step(
        &self,
        points: Vec<f32>,
        classes: Vec<u32>,
        mut ready: impl FnMut(usize, Vec<f32>) -> anyhow::Result<()>,
    ) -> anyhow::Result<f32> {
        let samples = classes.len();
        let classes = Tensor::<2, Int>::from_data(TensorData::new(classes, [samples, 1]), &self.device);
        let mut input = Tensor::<2>::from_data(TensorData::new(points, [samples, 2]), &self.device);
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        for (index, layer) in self.layers.iter().enumerate() {
            inputs.push(input.detach().require_grad());
            let output = layer.forward(inputs[index].clone());
            let output = if index + 1 < self.layers.len() { output.tanh() } else { output };
            input = output.clone();
            outputs.push(output);
        }
        let scores = outputs.pop().context("the network has no layers")?;
        let loss = mean_loss(scores, classes);
        let mut end = loss.clone();
        for (index, layer) in self.layers.iter().enumerate().rev() {
            let mut gradients = end.backward();
            let bias = layer.bias.grad_remove(&mut gradients).context("a bias has no gradient")?;
            ready(2 * index + 1, elements(bias)?)?;
            let weight = layer.weight.grad_remove(&mut gradients).context("a weight has no gradient")?;
            ready(2 * index, elements(weight)?)?;
            let slope = inputs[index].grad_remove(&mut gradients);
            if let (Some(output), Some(slope)) = (outputs.pop(), slope) {
                end = (output * Tensor::from_inner(slope)).sum();
            }
        }
        elements(loss).map(|loss| loss[0])
    }
}

fn changed<const D: usize>(
    parameter: &mut Tensor<D>,
    device: &Device,
    change: impl FnOnce(&mut [f32]) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let shape = parameter.dims();
    let mut values = elements(std::mem::replace(parameter, Tensor::empty([0; D], device)))?;
    change(&mut values)?;
    *parameter = leaf(values, shape, device);
    Ok(())
}
