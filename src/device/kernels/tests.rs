//! What is loaded, and when, on the simulated GPU.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use super::names::FAMILIES;
use super::*;
use crate::device::driver;

/// The kernels of a device, and how many images they are of.
fn loaded() -> (Arc<Kernels>, u64) {
    let before = modules();
    let kernels = Kernels::on(&driver::open(0).unwrap()).unwrap();
    (kernels, modules() - before)
}

fn modules() -> u64 {
    simgpu::counts().modules as u64
}

/// The simulation for a test alone.
fn alone() -> simgpu::Alone {
    simgpu::install();
    simgpu::alone()
}

#[test]
fn what_only_training_needs_is_loaded_once_when_somebody_trains() {
    let _alone = alone();
    let (kernels, images) = loaded();
    assert_eq!(images, FAMILIES.len() as u64);
    let before = modules();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            // Another communicator's on the same device are the same.
            scope.spawn(|| Kernels::on(&driver::open(0).unwrap()).unwrap().load_gradients().unwrap());
        }
    });
    assert_eq!(modules() - before, 1);
    kernels.load_gradients().unwrap();
    assert_eq!(modules() - before, 1);
    drop(kernels);
    assert_eq!(modules() + FAMILIES.len() as u64, before);
    assert_eq!(simgpu::reports(), [""; 0]);
}

#[test]
fn an_image_for_training_that_is_refused_is_named_and_can_be_loaded_later() {
    let _alone = alone();
    let (kernels, _) = loaded();
    // The second time the driver is asked for the words of its compiler.
    simgpu::fail_call_of_this_thread("cuModuleLoadData", 1, 200);
    let error = kernels.load_gradients().unwrap_err().to_string();
    assert!(error.contains("loading our kernels of the family \"train\" on device 0"), "{error}");
    kernels.load_gradients().unwrap();
}
