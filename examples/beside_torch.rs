//! A rank that shares an NCCL communicator with ranks of torch.distributed: `benches/gpu/beside-torch` starts both.
//!
//! `beside_torch HOST PORT RANK WORLD_SIZE`: HOST and PORT are the address of the store of a
//! `torch.distributed.init_process_group("nccl", store=…)`. Rank 0 must be a PyTorch rank. It creates the unique id
//! when its process group is created with a `device_id`. Both sides need the same NCCL (`COLLECTIVES_NCCL_LIBRARY`).

#![expect(unsafe_code, reason = "raw calls take addresses")]

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use collectives::{
    Config, DType, ReduceOp,
    nccl::{NcclCommunicator, RawBuffer, RawCall, UniqueId},
    store::{Store, TcpStore},
};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};

/// The keys under which ProcessGroupNCCL stores the id of its first communicator: `GROUP//DEVICE//COMMUNICATOR`,
/// followed by a name since 2.12.
const KEYS: [&str; 2] = ["0//cuda//0/nccl_storekey_0", "0//cuda//0"];
const LIMIT: Duration = Duration::from_secs(40);

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [host, port, rank, world_size] = &words[..] else {
        return Err("usage: beside_torch HOST PORT RANK WORLD_SIZE".into());
    };
    let (rank, world_size) = (rank.parse::<usize>()?, world_size.parse::<usize>()?);
    let store = TcpStore::connect(host, port.parse()?, LIMIT)?;
    let id = unique_id(&store)?;
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let mut config = Config::default();
    config.timeout = LIMIT;
    let comm = NcclCommunicator::create(&context, &[id], rank, world_size, &config)?;
    println!("rank {rank} of {world_size} is in");

    let sum = reduced(&comm, &stream, rank)?;
    let expected: Vec<i64> = (0..1000).map(|index| (0..world_size as i64).map(|rank| rank * 1000 + index).sum()).collect();
    assert_eq!(sum, expected, "the sum over all ranks");
    for root in 0..world_size {
        assert_eq!(broadcast(&comm, &stream, rank, root)?, vec![root as i64 + 7; 100], "the broadcast of rank {root}");
    }
    println!("rank {rank}: sum and broadcasts are right");
    Ok(comm.close()?)
}

/// Returns the id that rank 0 has put into the store.
fn unique_id(store: &TcpStore) -> Result<UniqueId, Box<dyn Error>> {
    let began = Instant::now();
    let key = loop {
        if let Some(key) = KEYS.into_iter().find(|key| store.get(key, Duration::ZERO).is_ok()) {
            break key;
        }
        if began.elapsed() > LIMIT {
            return Err(format!("no unique id under any of {KEYS:?} for {LIMIT:?}: is PyTorch's rank 0 up, with a device_id?").into());
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let bytes = store.get(key, LIMIT)?;
    Ok(UniqueId::from_bytes(bytes.try_into().map_err(|bytes: Vec<u8>| format!("{key} has {} bytes instead of 128", bytes.len()))?))
}

fn reduced(comm: &NcclCommunicator, stream: &Arc<CudaStream>, rank: usize) -> Result<Vec<i64>, Box<dyn Error>> {
    let values: Vec<i64> = (0..1000).map(|index| rank as i64 * 1000 + index).collect();
    call(comm, stream, &stream.clone_htod(&values)?, RawCall::AllReduce(ReduceOp::Sum))
}

fn broadcast(comm: &NcclCommunicator, stream: &Arc<CudaStream>, rank: usize, root: usize) -> Result<Vec<i64>, Box<dyn Error>> {
    call(comm, stream, &stream.clone_htod(&[rank as i64 + 7; 100])?, RawCall::Broadcast(root))
}

/// Makes a call in place and returns the resulting values.
fn call(comm: &NcclCommunicator, stream: &Arc<CudaStream>, slice: &CudaSlice<i64>, call: RawCall) -> Result<Vec<i64>, Box<dyn Error>> {
    let buffer = RawBuffer { address: slice.device_ptr(stream).0, count: slice.len(), dtype: DType::I64 };
    // SAFETY: the slice is alive, and used on this stream alone, until the stream is synchronized below.
    unsafe { comm.call(call, buffer, buffer, stream) }?;
    let values = stream.clone_dtoh(slice)?;
    stream.synchronize()?;
    Ok(values)
}
