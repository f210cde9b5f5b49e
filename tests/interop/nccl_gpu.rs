//! One communicator of NCCL's with a rank of Python and a rank of Rust. Needs a GPU (`COLLECTIVES_TEST_GPU=real`) and a Python whose
//! PyTorch finds it (`COLLECTIVES_INTEROP_PYTHON`).

#![expect(unsafe_code, reason = "a raw call takes addresses")]

use std::process::Command;

use collectives::{Config, DType, NcclCommunicator, RawBuffer, RawCall, ReduceOp, Store, TcpStore, TcpStoreServer, UniqueId};
use cudarc::driver::{CudaContext, DevicePtr, DevicePtrMut};

use crate::common::ranks;
use crate::peer::{LONG, Peer};
use crate::{python, skip};

const NAME: &str = "nccl_gpu::one_communicator_has_a_rank_of_python_and_one_of_rust";
/// The NCCL that PyTorch has loaded: ranks of one communicator need the same release.
const LIBRARY: &str = "import glob, os, torch, nvidia.nccl as n; assert torch.cuda.is_available(); \
                       print(torch.cuda.device_count(), glob.glob(os.path.join(list(n.__path__)[0], 'lib', 'libnccl.so*'))[0])";

#[test]
fn one_communicator_has_a_rank_of_python_and_one_of_rust() {
    if ranks::is_rank_of(NAME) {
        return rust_rank();
    }
    let python = python!();
    if std::env::var("COLLECTIVES_TEST_GPU").as_deref() != Ok("real") {
        skip!("no GPU here (COLLECTIVES_TEST_GPU=real takes those that are there)");
    }
    let found = Command::new(python.program()).args(["-W", "ignore", "-c", LIBRARY]).output().unwrap();
    let found = String::from_utf8_lossy(&found.stdout).into_owned();
    let Some((devices, library)) = found.trim().split_once(' ') else { skip!("this Python's PyTorch finds no GPU, or no NCCL") };
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().port();
    // Two ranks may share a device where NCCL takes them for ranks of two hosts.
    let mut first = python.script("nccl.py", &["nccl", "store", &port.to_string(), "0", "2"]);
    let first = Peer::start(first.env("NCCL_HOSTID", "python").env("NCCL_SOCKET_IFNAME", "lo"));
    let device = if devices == "1" { "0" } else { "1" };
    let variables = [("NCCL_HOSTID", "rust"), ("NCCL_SOCKET_IFNAME", "lo"), ("COLLECTIVES_NCCL_LIBRARY", library), ("DEVICE", device)];
    let second = ranks::spawn_rank(NAME, 1, 2, port, &variables.map(|(name, value)| (name, value.to_owned())));
    let second = second.wait_with_output().unwrap();
    assert!(second.status.success(), "{}\n{}", String::from_utf8_lossy(&second.stdout), String::from_utf8_lossy(&second.stderr));
    let printed = first.finish();
    assert!(printed.contains("the sum is right"), "{printed}");
}

/// Rank 1 of the two.
fn rust_rank() {
    let variable = |name: &str| std::env::var(name).unwrap();
    let store = TcpStore::connect("127.0.0.1", variable("MASTER_PORT").parse().unwrap(), LONG).unwrap();
    let id = UniqueId::from_bytes(store.get("0//cuda//0/nccl_storekey_0", LONG).unwrap().try_into().unwrap());
    let context = CudaContext::new(variable("DEVICE").parse().unwrap()).unwrap();
    let mut config = Config::default();
    config.nccl_library = Some(variable("COLLECTIVES_NCCL_LIBRARY").into());
    config.timeout = LONG;
    let comm = NcclCommunicator::create(&context, &[id], 1, 2, &config).unwrap();
    let stream = context.new_stream().unwrap();
    let source = stream.clone_htod(&vec![2.0_f32; 1000]).unwrap();
    let mut sum = stream.alloc_zeros::<f32>(1000).unwrap();
    {
        let (source, _reading) = source.device_ptr(&stream);
        let (sum, _writing) = sum.device_ptr_mut(&stream);
        let buffer = |address| RawBuffer { address, count: 1000, dtype: DType::F32 };
        // SAFETY: both slices are 1000 floats of this device, lie apart, and outlive the stream's work, which is waited for below.
        unsafe { comm.call(RawCall::AllReduce(ReduceOp::Sum), buffer(source), buffer(sum), &stream).unwrap() };
    }
    stream.synchronize().unwrap();
    assert_eq!(stream.clone_dtoh(&sum).unwrap(), vec![5.0; 1000]);
    store.set("rust is done", b"").unwrap();
    comm.close().unwrap();
}
