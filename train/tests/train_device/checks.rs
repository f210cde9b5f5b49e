//! Checks of gradients and parameters in device memory.

use collectives::f16;
use collectives_train::{DataParallel, Options, Parameter, check_replicas};

use crate::common::cases::Memory as _;
use crate::gpu::ranks;

#[test]
fn a_mean_on_a_device_with_nan_is_refused_with_its_parameter() {
    for world_size in [1, 2] {
        ranks(world_size, |comm, memory| {
            let parameters =
                || vec![Parameter::new::<f32>("weight", &[65]), Parameter::new::<f16>("half", &[3]), Parameter::new::<f32>("bias", &[2])];
            let mut model = DataParallel::on_device(comm, &memory.stream, parameters(), Options::default()).unwrap();
            for (bad, name) in [(None, ""), (Some(0), "\"weight\""), (Some(1), "\"half\""), (Some(2), "\"bias\""), (None, "")] {
                let value = |index: usize| if comm.is_main() && bad == Some(index) { f32::NAN } else { 1.0 };
                model.ready(0, &memory.put(&[vec![1.0; 64], vec![value(0)]].concat())).unwrap();
                model.ready(1, &memory.put(&[f16::ONE, f16::from_f32(value(1)), f16::ONE])).unwrap();
                model.ready(2, &memory.put(&[value(2), 1.0])).unwrap();
                match model.finish().unwrap().check_finite() {
                    Ok(()) => assert_eq!(bad, None),
                    Err(error) => assert!(bad.is_some() && error.to_string().contains(name), "{error}"),
                }
            }
        });
    }
}

#[test]
fn replicas_in_device_memory_are_refused_and_the_other_ranks_are_told() {
    let errors = ranks(2, |comm, memory| {
        let (host, device) = ([1.0_f32; 4], memory.put(&[1.0_f32; 4]));
        let error = check_replicas(comm, [("weight", &device)]).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("copy the values to the host first"), "{error}");
        let error = match comm.is_main() {
            true => check_replicas(comm, [("weight", &host)]).unwrap_err(),
            false => check_replicas(comm, [("weight", &device)]).unwrap_err(),
        };
        check_replicas(comm, [("weight", &host)]).unwrap();
        error
    });
    assert!(errors[0].is_mismatch() && errors[0].to_string().contains("a parameter in device memory"), "{}", errors[0]);
    assert!(errors[1].is_unsupported() && errors[1].to_string().contains("parameter 0 \"weight\""), "{}", errors[1]);
}
