//! The contents of the images; and, on the simulated GPU, what is loaded, and when.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;

const WEIGH: &[&str] = &["u64", "u64", "f64"];
const CONVERT: &[&str] = &["u64", "u64", "u64", "f64"];
const SUM: &[&str] = &["u64", "u64", "u64"];

/// Returns every entry that is looked up, with its parameters.
fn expected() -> Vec<(String, &'static [&'static str])> {
    let mut entries = vec![("add_partials".to_owned(), SUM)];
    for from in TYPES {
        entries.push((format!("accumulate_{from}"), SUM));
        entries.push((format!("weigh_{from}"), WEIGH));
        entries.push((format!("squares_{from}"), SUM));
        entries.extend(TYPES.map(|to| (format!("convert_{from}_{to}"), CONVERT)));
    }
    entries.sort();
    entries
}

/// Returns the entries of an image and the types of their parameters.
fn entries(image: &str) -> Vec<(String, Vec<&str>)> {
    let parts = image.split(".visible .entry ").skip(1);
    let mut entries: Vec<_> = parts
        .map(|part| {
            let (name, rest) = part.split_once('(').unwrap();
            let (parameters, _) = rest.split_once(')').unwrap();
            let types = parameters.split(".param .").skip(1).map(|parameter| parameter.split(' ').next().unwrap());
            (name.to_owned(), types.collect())
        })
        .collect();
    entries.sort();
    entries
}

#[test]
fn the_images_have_every_entry_with_the_parameters_that_we_pass_and_no_other() {
    for capability in [(7, 0), (8, 0)] {
        let wanted: Vec<_> = expected().into_iter().map(|(name, types)| (name, types.to_vec())).collect();
        assert_eq!(entries(image(capability)), wanted, "{capability:?}");
    }
}

#[test]
fn a_device_gets_the_newest_image_that_it_can_run() {
    for (capability, target) in [((7, 0), "sm_70"), ((7, 5), "sm_70"), ((8, 0), "sm_80"), ((9, 0), "sm_80"), ((12, 1), "sm_80")] {
        let image = image(capability);
        assert!(image.contains(&format!(".target {target}\n")), "{capability:?}");
        assert!(image.contains(".version 8.0\n") && !image.contains('\0'));
    }
}

#[cfg(simgpu)]
fn modules() -> u64 {
    simgpu::counts().modules as u64
}

/// Reserves the simulation for this test, and returns one of its devices.
#[cfg(simgpu)]
fn alone() -> (simgpu::Alone, Arc<CudaContext>) {
    simgpu::install();
    (simgpu::alone(), CudaContext::new(0).unwrap())
}

#[cfg(simgpu)]
#[test]
fn what_training_needs_is_loaded_once_for_all_who_train_on_a_device() {
    let (_alone, context) = alone();
    let before = modules();
    let kernels = Kernels::on(&context).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            // Another context object of the same device gets the same kernels.
            scope.spawn(|| drop(Kernels::on(&CudaContext::new(0).unwrap()).unwrap()));
        }
    });
    assert_eq!(modules() - before, 1);
    drop(kernels);
    assert_eq!(modules(), before);
    assert_eq!(simgpu::reports(), [""; 0]);
}

#[cfg(simgpu)]
#[test]
fn an_image_for_training_that_is_refused_is_named_and_can_be_loaded_later() {
    let (_alone, context) = alone();
    simgpu::fail_call_of_this_thread("cuModuleLoadData", 1, 200);
    let error = Kernels::on(&context).unwrap_err().to_string();
    assert!(error.contains("loading kernels of the family \"train\" on device 0"), "{error}");
    Kernels::on(&context).unwrap();
}
