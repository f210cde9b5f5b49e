//! Drivers and environments that lack something: what still works, and what is refused in words.

use std::sync::Arc;

use collectives::{Communicator, CustomOp, DeviceChoice, Error, ReduceOp, store::MemoryStore};

use super::common::cases::Memory;
use super::common::ranks::{alone_in_a_process, communicators_with, each};
use super::gpu::{DeviceMemory, assert_nothing_found};

/// `CUDA_ERROR_JIT_COMPILER_NOT_FOUND`.
const NO_COMPILER: u32 = 221;
/// `CUDA_ERROR_UNSUPPORTED_PTX_VERSION`.
const NEWER_PTX: u32 = 222;

fn builder() -> collectives::Builder {
    Communicator::builder().require_device(DeviceChoice::Local)
}

#[test]
fn ops_of_nccl_work_if_one_driver_cannot_compile_the_kernels_of_others() {
    let _alone = simgpu::alone();
    simgpu::install();
    let store = MemoryStore::new();
    let rank = |rank: usize| {
        if rank == 1 {
            // The first image is that of the bitwise ops.
            simgpu::fail_call_of_this_thread("cuModuleLoadData", 1, NO_COMPILER);
        }
        let comm = builder().with_store(Arc::new(store.clone()), rank, 3).unwrap();
        let memory = DeviceMemory::of(&comm);
        let mut numbers = memory.put(&[1_u32 << rank; 100]);
        comm.all_reduce(&mut numbers, ReduceOp::Sum).unwrap();
        assert_eq!(memory.get(&numbers), [7; 100]);
        for started in [false, true] {
            let error = if started {
                comm.start_all_reduce(memory.put(&[1_u16; 10]), ReduceOp::BitXor).and_then(|work| work.wait().map(drop)).unwrap_err()
            } else {
                comm.all_reduce(&mut numbers, ReduceOp::BitXor).unwrap_err()
            };
            let text = error.to_string();
            assert!(error.is_unsupported() && text.contains("rank 1") && text.contains("\"bits\""), "{text}");
            assert!(text.contains("libnvidia-ptxjitcompiler.so.1"), "{text}");
        }
        // Received truth values need a kernel of the same image. Both ends refuse the message.
        let mut truth = memory.put(&[true; 4]);
        match rank {
            0 => assert!(comm.send(&truth, 2).unwrap_err().is_unsupported()),
            2 => assert!(comm.recv(&mut truth, 0).unwrap_err().is_unsupported()),
            _ => {}
        }
        // Means have another image.
        let mut means = memory.put(&[rank as i16 * 3; 9]);
        comm.all_reduce(&mut means, ReduceOp::Avg).unwrap();
        assert_eq!(memory.get(&means), [3; 9]);
        let explained = comm.device().unwrap().explain();
        assert!(explained.contains("without the kernels bits"), "{explained}");
        // A split of the ranks lacks the same kernels, even without the rank whose driver refused them.
        let part = comm.split(Some(u32::from(rank == 1)), 0).unwrap().unwrap();
        let refused = part.all_reduce(&mut numbers, ReduceOp::BitAnd);
        assert_eq!(refused.is_err(), rank != 1, "{refused:?}");
        drop((numbers, truth, means));
        part.close().unwrap();
        comm.close().unwrap();
    };
    std::thread::scope(|scope| (0..3).for_each(|number| drop(scope.spawn(move || rank(number)))));
    assert_nothing_found();
}

#[test]
fn an_expression_becomes_machine_code_if_the_driver_cannot_compile_its_ptx() {
    #[expect(unsafe_code, reason = "opens a library if there is one")]
    // SAFETY: nothing is called.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        super::common::hosts::skip!("no NVRTC library is found (put its folder on LD_LIBRARY_PATH)");
    }
    let _alone = simgpu::alone();
    simgpu::install();
    each(communicators_with(2, |_| builder()), |comm| {
        let memory = DeviceMemory::of(&comm);
        let mut numbers = memory.put(&[1.0_f32, 2.0]);
        simgpu::fail_call_of_this_thread("cuModuleLoadData", 1, NEWER_PTX);
        let error = comm.all_reduce(&mut numbers, CustomOp::on_device("larger", "a > b ? a : b")).unwrap_err();
        // The simulated driver loads no machine code, and says so.
        let text = error.to_string();
        assert!(text.contains("as machine code") && text.contains("the simulation runs PTX only"), "{text}");
        comm.all_reduce(&mut numbers, ReduceOp::Sum).unwrap();
        assert_eq!(memory.get(&numbers), [2.0, 4.0]);
        drop(numbers);
        comm.close().unwrap();
    });
    assert_eq!(simgpu::reports(), ["a module was not loaded: the image is machine code; the simulation runs PTX only"]);
}

#[test]
fn one_thread_for_several_devices_is_refused_if_launches_block() {
    alone_in_a_process("drivers::one_thread_for_several_devices_is_refused_if_launches_block", || {
        simgpu::install();
        let comms = communicators_with(2, |_| builder());
        #[expect(unsafe_code, reason = "sets a variable")]
        // SAFETY: this test is alone in its process, and no thread of it reads the environment meanwhile.
        unsafe {
            std::env::set_var("CUDA_LAUNCH_BLOCKING", "1");
        }
        let memories: Vec<_> = comms.iter().map(DeviceMemory::of).collect();
        let mut buffers: Vec<_> = memories.iter().map(|memory| memory.put(&[1_u32; 5])).collect();
        let all: Vec<&Communicator> = comms.iter().collect();
        let refused = Communicator::group_across(&all, |groups| {
            groups.iter_mut().zip(&mut buffers).try_for_each(|(group, buffer)| group.all_reduce(buffer, ReduceOp::Sum))
        });
        let Err(error @ Error::Unsupported { .. }) = refused else { panic!("{refused:?}") };
        assert!(error.to_string().contains("CUDA_LAUNCH_BLOCKING=1"), "{error}");
        drop((buffers, memories));
        // Each communicator with a thread of its own works.
        each(comms, |comm| {
            let memory = DeviceMemory::of(&comm);
            let mut buffer = memory.put(&[1_u32; 5]);
            comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            assert_eq!(memory.get(&buffer), [2; 5]);
        });
    });
}
