//! A caller may replace the slice of a buffer. A slice of another device or of another length must be refused at every
//! use.

use std::sync::Arc;

use collectives::{Communicator, Error, Result, bf16};
use collectives_train::{DataParallel, Flat, Hook, Options, Parameter, Progress};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};

use crate::common::cases::Memory as _;
use crate::gpu::ranks;

/// Returns a stream of the other rank's device. Not the default stream: cudarc would free its slices on the default
/// stream of the current device.
fn elsewhere(comm: &Communicator) -> Arc<CudaStream> {
    CudaContext::new(1 - comm.device().unwrap().ordinal()).unwrap().new_stream().unwrap()
}

fn zeros(stream: &Arc<CudaStream>, len: usize) -> CudaSlice<f32> {
    stream.alloc_zeros(len).unwrap()
}

fn assert_elsewhere(result: Result<()>) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains("or in different contexts"), "{error}");
}

#[test]
fn elements_are_converted_on_the_device_of_their_stream_alone() {
    ranks(2, |comm, memory| {
        let there = elsewhere(comm);
        let flat = || Flat::from(zeros(&memory.stream, 5));
        let (mut good, mut swapped) = (flat(), flat());
        drop(std::mem::replace(swapped.device_mut().unwrap(), zeros(&there, 5)));
        let mut narrow = Flat::<bf16>::on_device(comm, &memory.stream, 5).unwrap();
        assert_elsewhere(swapped.convert_from(&narrow, 1.0));
        assert_elsewhere(narrow.convert_from(&swapped, 1.0));
        assert_elsewhere(good.convert_from(&Flat::from(zeros(&there, 5)), 1.0));
        drop(std::mem::replace(good.device_mut().unwrap(), zeros(&memory.stream, 3)));
        let error = good.convert_from(&narrow, 1.0).unwrap_err().to_string();
        assert!(error.contains("5 elements were passed for a buffer of 3"), "{error}");
        let mut last = flat();
        drop(std::mem::replace(last.device_mut().unwrap(), zeros(&memory.stream, 5)));
        last.convert_from(&narrow, 1.0).unwrap();
        assert_eq!(memory.get(last.device().unwrap()), [0.0; 5]);
    });
}

/// A hook whose gradients end on another device: in the flat that it was given, or in its own.
struct Moving {
    there: Arc<CudaStream>,
    is_swapped: bool,
    gradients: Option<Flat<f32>>,
}

impl Hook<f32> for Moving {
    fn start(&mut self, _comm: &Communicator, gradients: Flat<f32>) -> Result<()> {
        self.gradients = Some(gradients);
        Ok(())
    }

    fn advance(&mut self, _comm: &Communicator) -> Result<Progress<f32>> {
        let mut gradients = self.gradients.take().unwrap();
        let moved = zeros(&self.there, gradients.device().unwrap().len());
        if !self.is_swapped {
            return Ok(Progress::Done(Flat::from(moved)));
        }
        *gradients.device_mut().unwrap() = moved;
        Ok(Progress::Done(gradients))
    }
}

#[test]
fn gradients_that_a_hook_leaves_on_another_device_are_refused_where_they_are_used() {
    for is_swapped in [true, false] {
        ranks(2, |comm, memory| {
            let parameters = vec![Parameter::new::<f32>("a", &[5]), Parameter::new::<f64>("b", &[3])];
            let mut model = DataParallel::on_device(comm, &memory.stream, parameters, Options::default()).unwrap();
            let hook = || Moving { there: elsewhere(comm), is_swapped, gradients: None };
            model.set_hooks::<f32>(|_| Ok(Box::new(hook()))).unwrap();
            model.ready(0, &zeros(&memory.stream, 5)).unwrap();
            model.ready(1, &memory.put(&[3.0_f64; 3])).unwrap();
            let mut averaged = model.finish().unwrap();
            // One norm over both buckets.
            assert_elsewhere(averaged.norm().map(drop));
            assert_elsewhere(averaged.clip_norm(1.0).map(drop));
            assert_elsewhere(averaged.copy_to(0, &mut zeros(&memory.stream, 5)));
            let mut kept = memory.put(&[0.0_f64; 3]);
            averaged.copy_to(1, &mut kept).unwrap();
            assert_eq!(memory.get(&kept), [3.0; 3]);
            assert_elsewhere(model.ready(0, &zeros(&memory.stream, 5)));
        });
    }
}
