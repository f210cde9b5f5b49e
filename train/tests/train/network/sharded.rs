//! The network with its layers as units that are sharded over ranks (ZeRO-2 and 3), over all ranks or over the ranks of
//! each copy.

use collectives::{Communicator, Result};
use collectives_train::{Float, FullySharded, Parameter, Unit};

use super::{
    Host, LAYERS, Layer, Part, Place, Sample, Training, WIDTHS, backward, descend, forward, loss_slope, narrow, samples, start, widen,
};
use crate::common::oracle::Predict;

pub(crate) fn units<T: Float>() -> Vec<Unit> {
    let unit = |(index, pair): (usize, &[usize])| {
        let parameters = vec![Parameter::new::<T>("weight", &[pair[1], pair[0]]), Parameter::new::<T>("bias", &[pair[1]])];
        Unit::new(format!("layer {index}"), parameters)
    };
    WIDTHS.windows(2).enumerate().map(unit).collect()
}

/// Gives a model its initial values, by broadcast or from values that every rank has.
pub(crate) fn load<M: Float + Predict>(model: &mut FullySharded, comm: &Communicator, seed: u64) -> Result<()> {
    load_in::<M, _>(&Host, model, comm, seed)
}

pub(super) fn load_in<M: Float + Predict, P: Place>(place: &P, model: &mut FullySharded, comm: &Communicator, seed: u64) -> Result<()> {
    for (unit, layer) in start(seed).iter().enumerate() {
        for (parameter, values) in layer.iter().enumerate() {
            let mut values: Vec<M> = narrow(values);
            let root = unit % comm.world_size();
            if parameter == 1 {
                model.load(unit, parameter, &place.put(&values))?;
                continue;
            }
            if comm.rank() != root {
                values.fill(M::from_f64(7.0));
            }
            model.broadcast(unit, parameter, &mut place.put(&values), root)?;
        }
    }
    Ok(())
}

/// Copies a gathered layer.
fn layer<G: Float + Predict, P: Place>(place: &P, model: &FullySharded, unit: usize) -> Result<Layer> {
    let lens = [WIDTHS[unit] * WIDTHS[unit + 1], WIDTHS[unit + 1]];
    let mut values = lens.map(|len| place.put(&vec![G::default(); len]));
    values.iter_mut().enumerate().try_for_each(|(parameter, values)| model.copy_to(unit, parameter, values))?;
    Ok(values.map(|values| widen(&place.get(&values))))
}

/// Gathers a layer, copies it, and releases it.
pub(crate) fn used<G: Float + Predict, P: Place>(place: &P, model: &mut FullySharded, unit: usize) -> Result<Layer> {
    model.gather(unit)?;
    let layer = layer::<G, P>(place, model, unit)?;
    model.release(unit).map(|()| layer)
}

/// Runs forward and backward with these samples of a loss over `count` samples; units are gathered as `G`s. Calls
/// `between` before every collective.
pub(crate) fn pass<G: Float + Predict, P: Place>(
    place: &P,
    model: &mut FullySharded,
    (samples, count): (&[Sample], usize),
    mut between: impl FnMut(),
) -> Result<()> {
    let mut states: Vec<Vec<Vec<f64>>> = samples.iter().map(|(input, _)| vec![input.clone()]).collect();
    for unit in 0..LAYERS {
        between();
        let layer = used::<G, P>(place, model, unit)?;
        states.iter_mut().for_each(|states| states.push(forward(&layer, &states[unit], unit + 1 == LAYERS)));
    }
    let mut slopes: Vec<_> = states.iter().zip(samples).map(|(states, (_, target))| loss_slope(&states[LAYERS], *target, count)).collect();
    for unit in (0..LAYERS).rev() {
        between();
        let layer = used::<G, P>(place, model, unit)?;
        let mut sums = layer.each_ref().map(|values| vec![0.0; values.len()]);
        for (states, slope) in states.iter().zip(&mut slopes) {
            *slope = backward(&layer, &states[unit], &states[unit + 1], slope, unit + 1 == LAYERS, &mut sums);
        }
        between();
        model.reduce_gradients(unit, &sums.map(|sums| place.put(&narrow::<G>(&sums))))?;
    }
    Ok(())
}

/// Trains with parameters of `M`s, gathered as `G`s. Calls `look` with the model when it uses the most memory.
pub(crate) fn train<M: Float + Predict, G: Float + Predict>(
    model: &mut FullySharded,
    training: Training,
    look: impl FnMut(&FullySharded),
) -> Result<Vec<Layer>> {
    let part = Part::of(model.communicator());
    train_in::<M, G, _>(&Host, model, (training, part), None, look)
}

/// Does the same in any memory, with this part of the samples. Shards are reduced over `copies` too.
pub(super) fn train_in<M: Float + Predict, G: Float + Predict, P: Place>(
    place: &P,
    model: &mut FullySharded,
    (training, part): (Training, Part),
    copies: Option<&Communicator>,
    mut look: impl FnMut(&FullySharded),
) -> Result<Vec<Layer>> {
    for step in 0..training.steps {
        for number in 0..training.passes {
            let own = samples(training, step, number, part);
            pass::<G, P>(place, model, (&own, own.len() * training.passes), || ())?;
            look(model);
            if number + 1 < training.passes {
                model.end_backward()?;
            }
        }
        let mut reduced = model.reduce()?;
        copies.map_or(Ok(()), |copies| reduced.reduce_over(copies))?;
        if let Some(limit) = training.limit {
            let norm = reduced.clip_norm(limit)?;
            let clipped = reduced.norm()?;
            assert!((clipped - norm.min(limit)).abs() <= 1e-6 * limit, "a norm of {norm}, clipped to {clipped}");
        }
        reduced.update(|shard| place.change::<M>(shard, descend))?;
        look(model);
    }
    (0..LAYERS).map(|unit| model.gather(unit).and_then(|()| layer::<G, P>(place, model, unit))).collect()
}
