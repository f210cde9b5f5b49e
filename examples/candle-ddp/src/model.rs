//! A network whose backward pass returns each layer's gradients as soon as they are computed.

use candle_core::{Device, Result, Tensor, Var};
use training_common::uniform;

/// Returns a random weight of shape `(inputs, outputs)`, which depends on the seed.
pub(crate) fn initial_weight(seed: u64, (inputs, outputs): (usize, usize), device: &Device) -> Result<Tensor> {
    let bound = (6.0 / (inputs + outputs) as f32).sqrt();
    Tensor::from_vec(uniform(seed, bound, inputs * outputs), (inputs, outputs), device)
}

/// Fully connected layers with tanh between them.
pub struct Network {
    /// Weight (inputs × outputs) and bias of each layer.
    layers: Vec<(Var, Var)>,
}

impl Network {
    /// Creates a network with random weights, which depend on the seed.
    ///
    /// # Errors
    ///
    /// The errors of candle.
    pub fn new(sizes: &[(usize, usize)], seed: u64, device: &Device) -> Result<Self> {
        let layer = |(index, &(inputs, outputs)): (usize, &(usize, usize))| {
            let weight = Var::from_tensor(&initial_weight(seed + index as u64, (inputs, outputs), device)?)?;
            Ok((weight, Var::zeros(outputs, candle_core::DType::F32, device)?))
        };
        sizes.iter().enumerate().map(layer).collect::<Result<_>>().map(|layers| Self { layers })
    }

    /// Returns the parameters: weight, bias, weight, bias …
    pub fn parameters(&self) -> impl Iterator<Item = &Var> {
        self.layers.iter().flat_map(|(weight, bias)| [weight, bias])
    }

    /// Runs one step and returns its loss. `ready` gets each parameter's number and gradient before the gradients of
    /// earlier layers are computed.
    ///
    /// candle computes all gradients of a graph in one call, so each layer is its own graph. Its backward pass ends
    /// with the gradient of its input, which starts the backward pass of the layer before it.
    ///
    /// # Errors
    ///
    /// The errors of candle, and of `ready`.
    pub fn step(&self, points: &Tensor, classes: &Tensor, mut ready: impl FnMut(usize, Tensor) -> Result<()>) -> Result<f32> {
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        let mut input = points.clone();
        for (index, (weight, bias)) in self.layers.iter().enumerate() {
            inputs.push(Var::from_tensor(&input)?);
            let output = inputs[index].matmul(weight)?.broadcast_add(bias)?;
            let output = if index + 1 < self.layers.len() { output.tanh()? } else { output };
            input = output.detach();
            outputs.push(output);
        }
        let Some(scores) = outputs.pop() else { candle_core::bail!("the network has no layers") };
        let loss = candle_nn::loss::cross_entropy(&scores, classes)?;
        let mut end = loss.clone();
        for (index, (weight, bias)) in self.layers.iter().enumerate().rev() {
            let mut gradients = end.backward()?;
            for (number, parameter) in [(2 * index + 1, bias), (2 * index, weight)] {
                let gradient = gradients.remove(parameter);
                ready(number, gradient.ok_or_else(|| candle_core::Error::msg("a parameter has no gradient"))?)?;
            }
            if let (Some(output), Some(slope)) = (outputs.pop(), gradients.remove(&inputs[index])) {
                end = (output * slope)?.sum_all()?;
            }
        }
        loss.to_scalar()
    }
}
