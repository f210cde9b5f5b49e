//! Other NCCL releases and other GPUs, each in a separate process, since a library is never unloaded.

use collectives::{Communicator, DeviceChoice, F8E4M3, ReduceOp, bf16};
use simgpu::Configuration;

use super::gpu::{DeviceMemory, assert_nothing_found, steers_nccl};
use crate::common::cases::{everything_in, movements_in, reductions_in};
use crate::common::ranks::{alone_in_a_process, processes_with, threads_with};

fn ranks(world_size: usize, program: impl Fn(&Communicator, &DeviceMemory) + Sync) {
    let builder = |_: usize| Communicator::builder().require_device(DeviceChoice::Local);
    threads_with(world_size, builder, |comm| program(comm, &DeviceMemory::of(comm)));
    assert_nothing_found();
}

macro_rules! releases {
    ($($test:ident $code:literal;)*) => {$(
        #[test]
        fn $test() {
            steers_nccl!();
            alone_in_a_process(concat!("versions::", stringify!($test)), || {
                simgpu::nccl::install($code);
                ranks(3, |comm, memory| {
                    assert_eq!(comm.device().unwrap().nccl_version().replace('.', ""), stringify!($test).replace(|c: char| !c.is_ascii_digit(), ""));
                    everything_in(memory, comm, &[13], $code);
                    let half = comm.split(Some(comm.rank() as u32 % 2), 0).unwrap().unwrap();
                    reductions_in::<u16, _>(memory, &half, ReduceOp::Avg, 100, $code);
                });
                let native = simgpu::nccl::calls("ncclAlltoAll");
                assert_eq!(native > 0, $code >= 22803, "{native} native calls");
            });
        }
    )*};
}

releases! {
    everything_on_nccl_2_20_5 22005;
    everything_on_nccl_2_22_3 22203;
    everything_on_nccl_2_23_4 22304;
    everything_on_nccl_2_26_5 22605;
    everything_on_nccl_2_27_5 22705;
    everything_on_nccl_2_28_9 22809;
}

#[test]
fn one_rank_on_a_release_whose_mean_is_broken() {
    steers_nccl!();
    alone_in_a_process("versions::one_rank_on_a_release_whose_mean_is_broken", || {
        simgpu::nccl::install(22809);
        ranks(1, |comm, memory| {
            reductions_in::<f32, _>(memory, comm, ReduceOp::Avg, 1003, 1);
            reductions_in::<bf16, _>(memory, comm, ReduceOp::Avg, 1003, 2);
            reductions_in::<i8, _>(memory, comm, ReduceOp::Avg, 1003, 3);
        });
    });
}

#[cfg(feature = "encryption")]
fn encrypting() -> collectives::Builder {
    Communicator::builder().configure(|config| {
        config.secret = Some(collectives::Secret::new("the secret of a job on devices").unwrap());
        config.encrypt = true;
    })
}

#[cfg(feature = "encryption")]
#[test]
fn nccl_encrypts_with_a_key_of_the_secret() {
    steers_nccl!();
    alone_in_a_process("versions::nccl_encrypts_with_a_key_of_the_secret", || {
        simgpu::nccl::install(simgpu::nccl::NEWEST);
        threads_with(
            2,
            |_| encrypting().require_device(DeviceChoice::Local),
            |comm| {
                everything_in(&DeviceMemory::of(comm), comm, &[13], 5);
            },
        );
        // HMAC-SHA256 of "collectives nccl key 1\0", computed with Python's hmac module.
        assert_eq!(simgpu::nccl::encryption_key(), "0325359ec8998eb7618f02b790b35376892785efb5cf9e4829b05c272d740031");
        // A process has one key.
        let other = encrypting().configure(|config| config.secret = Some(collectives::Secret::new("another secret of a job").unwrap()));
        let error = other.require_device(DeviceChoice::Local).run_local(1, |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("another job's secret"), "{error}");
        assert_nothing_found();
    });
}

#[cfg(feature = "encryption")]
#[test]
fn a_release_that_cannot_encrypt_is_not_used_where_it_is_to() {
    steers_nccl!();
    alone_in_a_process("versions::a_release_that_cannot_encrypt_is_not_used_where_it_is_to", || {
        simgpu::nccl::install(22809);
        let error = encrypting().require_device(DeviceChoice::Local).run_local(2, |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("2.32.3 or later") && error.contains("COLLECTIVES_ENCRYPT"), "{error}");
        // The host backend is not affected.
        let sums = encrypting().run_local(2, |comm| {
            let mut sum = 1_u8;
            comm.all_reduce(&mut sum, ReduceOp::Sum).map(|()| sum)
        });
        assert_eq!(sums.unwrap(), [2, 2]);
    });
}

#[test]
fn a_release_that_is_too_old_is_named() {
    steers_nccl!();
    alone_in_a_process("versions::a_release_that_is_too_old_is_named", || {
        simgpu::nccl::install(21904);
        let why = Communicator::builder().device(DeviceChoice::Local).run_local(2, |comm| Ok(comm.why_no_device().unwrap())).unwrap();
        assert!(why.iter().all(|why| why.contains("2.19.4") && why.contains("2.20.5")), "{why:?}");
    });
}

#[test]
fn a_card_without_eight_bit_floats_folds_them_itself() {
    alone_in_a_process("versions::a_card_without_eight_bit_floats_folds_them_itself", || {
        simgpu::install_cuda_only();
        simgpu::configure(Configuration { capability: 70, ..Configuration::default() });
        simgpu::install();
        ranks(3, |comm, memory| {
            reductions_in::<F8E4M3, _>(memory, comm, ReduceOp::Sum, 500, 1);
            reductions_in::<F8E4M3, _>(memory, comm, ReduceOp::Max, 500, 2);
            reductions_in::<bf16, _>(memory, comm, ReduceOp::Avg, 500, 3);
            movements_in::<F8E4M3, _>(memory, comm, 500, 4);
        });
    });
}

#[test]
fn releases_that_differ_between_ranks_are_named() {
    steers_nccl!();
    let name = "versions::releases_that_differ_between_ranks_are_named";
    let builder = |rank: usize| {
        simgpu::nccl::install(if rank == 1 { 22809 } else { 23203 });
        Communicator::builder().device(DeviceChoice::Local)
    };
    processes_with(name, 2, builder, |comm| {
        let why = comm.why_no_device().unwrap();
        assert!(why.contains("NCCL 2.32.3") && why.contains("NCCL 2.28.9"), "{why}");
        Ok(())
    });
}
