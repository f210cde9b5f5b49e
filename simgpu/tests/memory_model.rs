//! The memory model of kernels. A process reads its variable once, so each test starts itself again.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "half of cudarc is unsafe")]

use std::process::{Command, Output};
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DevicePtr, LaunchConfig, PushKernelArg, sys};
use cudarc::nvrtc::Ptx;

const VARIABLE: &str = "SIMGPU_MEMORY_MODEL";

/// All threads store into the other device's memory, one of them raises a flag there, and waits for its own. They do so
/// many times, in two halves. Wrong data are counted in word 16.
const EXCHANGE: &str = "
.version 8.0
.target sm_70
.address_size 64
.visible .entry exchange(.param .u64 own, .param .u64 other)
{
    .reg .pred %p<5>;
    .reg .b32 %r<10>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [own];
    ld.param.u64 %rd2, [other];
    mov.u32 %r1, %tid.x;
    mov.u32 %r5, 0;
    mov.u32 %r9, 0;
    setp.ne.u32 %p1, %r1, 0;
AGAIN:
    add.s32 %r5, %r5, 1;
    and.b32 %r6, %r5, 1;
    shl.b32 %r6, %r6, 8;
    mad.lo.u32 %r6, %r1, 4, %r6;
    cvt.u64.u32 %rd3, %r6;
    add.s64 %rd4, %rd2, %rd3;
    add.s64 %rd3, %rd1, %rd3;
    add.s32 %r7, %r5, %r1;
    st.global.u32 [%rd4+256], %r7;
    bar.sync 0;
    @%p1 bra WAIT;
    RELEASE
    st.relaxed.sys.global.u32 [%rd2], %r5;
POLL:
    ld.relaxed.sys.global.u32 %r3, [%rd1];
    setp.lt.u32 %p2, %r3, %r5;
    @%p2 bra POLL;
    ACQUIRE
WAIT:
    bar.sync 0;
    ld.global.u32 %r4, [%rd3+256];
    setp.ne.u32 %p4, %r4, %r7;
    @%p4 add.s32 %r9, %r9, 1;
    bar.sync 0;
    setp.lt.u32 %p3, %r5, 40;
    @%p3 bra AGAIN;
    red.global.add.u32 [%rd1+64], %r9;
    ret;
}
";

/// Runs the exchange on two devices, and returns how many words were wrong.
fn exchange(release: &str, acquire: &str) -> u32 {
    let devices: [(Arc<CudaContext>, Arc<CudaStream>); 2] = [0, 1].map(|device| {
        let context = CudaContext::new(device).unwrap();
        // SAFETY: the streams are waited for below.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().unwrap();
        (context, stream)
    });
    for own in [0, 1] {
        devices[own].0.bind_to_thread().unwrap();
        // SAFETY: both contexts live.
        unsafe { sys::cuCtxEnablePeerAccess(devices[1 - own].0.cu_ctx(), 0) }.result().unwrap();
    }
    let memory = [0, 1].map(|own| devices[own].1.alloc_zeros::<u32>(256).unwrap());
    devices.iter().for_each(|(context, _)| context.synchronize().unwrap());
    let at = [0, 1].map(|own| memory[own].device_ptr(&devices[own].1).0);
    let text = EXCHANGE.replace("RELEASE", release).replace("ACQUIRE", acquire);
    let functions = [0, 1].map(|own| {
        let module = devices[own].0.load_module(Ptx::from_src(text.clone())).unwrap();
        module.load_function("exchange").unwrap()
    });
    for own in [0, 1] {
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the kernel stays inside both buffers.
        unsafe { devices[own].1.launch_builder(&functions[own]).arg(&at[own]).arg(&at[1 - own]).launch(config) }.unwrap();
    }
    devices.iter().for_each(|(context, _)| context.synchronize().unwrap());
    (0..2).map(|own| devices[own].1.clone_dtoh(&memory[own]).unwrap()[16]).sum()
}

/// Runs a test in a process of its own, with a value of the variable and two fences.
fn again(test: &str, value: &str, fences: [&str; 2]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).env(VARIABLE, value).env("RELEASE", fences[0]).env("ACQUIRE", fences[1]);
    command.output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn devices_that_exchange_need_their_fences() {
    if let Ok(release) = std::env::var("RELEASE") {
        let _alone = simgpu::alone();
        println!("wrong words: {}.", exchange(&release, &std::env::var("ACQUIRE").unwrap()));
        return;
    }
    let fence = "fence.acq_rel.sys;";
    let right = |seed: u64, fences| {
        let output = again("devices_that_exchange_need_their_fences", &seed.to_string(), fences);
        assert!(output.status.success() && said(&output).contains("wrong words: "), "{}", said(&output));
        said(&output).contains("wrong words: 0.")
    };
    assert!((0..10).all(|seed| right(seed, [fence, fence])));
    for fences in [[fence, ""], ["", fence], ["fence.acq_rel.gpu;", fence], [fence, "fence.acq_rel.gpu;"]] {
        // 10 seeds suffice on an idle machine. A busy one may run one device long after the other.
        assert!(!(0..100).all(|seed| right(seed, fences)), "{fences:?}");
    }
}

#[test]
fn a_wrong_seed_is_refused() {
    if std::env::var_os("RELEASE").is_some() {
        let _alone = simgpu::alone();
        let code = CudaContext::new(0).err().map(|error| error.0);
        assert_eq!(code, Some(sys::CUresult::CUDA_ERROR_INVALID_VALUE));
        return;
    }
    for wrong in ["", "on", "-1", "0x10"] {
        let output = again("a_wrong_seed_is_refused", wrong, [""; 2]);
        let text = said(&output);
        assert!(output.status.success() && text.contains(&format!("{VARIABLE} is {wrong:?}: set it to a seed")), "{text}");
    }
}
