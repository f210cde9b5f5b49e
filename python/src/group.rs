//! A group of ranks with the operations of PyTorch's process group, each as a blocking or a background call.
//!
//! An operation with an `owner` is a background call: it keeps the owner until it has ended, and returns its [`Work`].
//! Without an owner, an operation is a blocking call on the calling thread, which is faster.

#![expect(unsafe_code, reason = "Python passes addresses of tensors")]

use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use collectives::store::Store;
use collectives::{Communicator, Config, Envelope, Error, ReduceOp, Result};
use pyo3::prelude::*;

use crate::buffer::{Buffer, Tensor};
use crate::error::{exception, raise};
use crate::interrupt::interruptible;
use crate::store::TorchStore;
use crate::work::Work;

/// A group of ranks.
#[pyclass(frozen, module = "collectives_torch._core")]
pub(crate) struct Group {
    /// `None` after an abort or a shutdown.
    comm: Mutex<Option<Communicator>>,
    /// The number of calls that have begun and not ended.
    under_way: Arc<AtomicUsize>,
}

/// How long a shutdown lets running calls end by themselves, and how often it checks.
const LAST_CALLS: Duration = Duration::from_millis(50);
const LOOK: Duration = Duration::from_millis(1);

/// A guard that counts a call as running until it is dropped.
pub(crate) struct UnderWay(Arc<AtomicUsize>);

impl UnderWay {
    fn begin(calls: &Arc<AtomicUsize>) -> Self {
        calls.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(calls))
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// An op's index in [`ReduceOp::ALL`], and the factor of `PreMulSum`.
#[derive(Debug, Clone, Copy, FromPyObject)]
struct Op(u8, f64);

impl Op {
    fn reduction(self) -> Result<ReduceOp> {
        match (ReduceOp::ALL.get(usize::from(self.0)), self.1) {
            (Some(ReduceOp::PreMulSum(_)), factor) => Ok(ReduceOp::PreMulSum(factor)),
            (Some(op), _) => Ok(*op),
            (None, _) => Err(Error::InvalidArgument { call: "reduction", reason: format!("there is no op with the number {}", self.0) }),
        }
    }
}

/// Converts seconds to a duration, at most `Duration::MAX`.
fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}

/// Returns the memory of a tensor that a call uses.
fn buffer(tensor: Tensor) -> Result<Buffer> {
    // SAFETY: Python passes the memory of a contiguous tensor. Its caller holds the tensor during a blocking call, and
    // the owner holds it during a background call. PyTorch requires programs not to use it meanwhile.
    unsafe { tensor.buffer() }
}

type Started<B> = Result<collectives::Work<B>>;

impl Group {
    /// Returns the communicator with this timeout.
    fn with_timeout(&self, seconds: f64) -> Result<Communicator> {
        let (comm, timeout) = (self.comm.lock().unwrap_or_else(PoisonError::into_inner), duration(seconds));
        let comm = comm.as_ref().ok_or_else(|| Error::Closed { call: "a call of torch.distributed".to_owned() })?;
        Ok(if timeout == comm.timeout() { comm.clone() } else { comm.with_timeout(timeout) })
    }

    /// Makes a call: a background call if there is an owner. If there is none, waits for the call without Python's
    /// lock.
    fn call<B: Send + 'static>(
        &self,
        py: Python<'_>,
        seconds: f64,
        owner: Option<Py<PyAny>>,
        block: impl FnOnce(&Communicator) -> Result<()> + Send,
        start: impl FnOnce(&Communicator) -> Started<B> + Send,
    ) -> PyResult<Option<Work>> {
        let Some(owner) = owner else {
            let blocking = || {
                let _under_way = UnderWay::begin(&self.under_way);
                let comm = self.with_timeout(seconds)?;
                interruptible(&comm, || block(&comm))
            };
            let outcome = py.detach(blocking);
            if outcome.is_err() {
                // Ctrl-C may have ended the call. Then this raises `KeyboardInterrupt`.
                py.check_signals()?;
            }
            return raise(py, outcome).map(|()| None);
        };
        self.start(py, seconds, owner, start).map(Some)
    }

    /// Starts a background call, which keeps `owner` until it has ended. A refused call has not begun and uses no
    /// memory.
    fn start<B: Send + 'static>(
        &self,
        py: Python<'_>,
        seconds: f64,
        owner: Py<PyAny>,
        start: impl FnOnce(&Communicator) -> Started<B> + Send,
    ) -> PyResult<Work> {
        let under_way = UnderWay::begin(&self.under_way);
        let started = py.detach(|| start(&self.with_timeout(seconds)?)).map_err(|error| exception(py, &error))?;
        Ok(Work::new(started.erased(), owner, under_way))
    }

    /// Removes the communicator, so that later calls fail.
    fn take(&self) -> Option<Communicator> {
        self.comm.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl Group {
    /// Connects to the other ranks through a store. The other ranks reach this rank at `address`, or on the loopback
    /// interface if `address` is `None`.
    #[new]
    fn new(py: Python<'_>, store: Py<PyAny>, rank: usize, size: usize, seconds: f64, address: Option<IpAddr>) -> PyResult<Self> {
        let store: Arc<dyn Store> = Arc::new(TorchStore::new(store));
        let made = py.detach(|| {
            let mut config = Config::default();
            config.timeout = duration(seconds);
            config.listen_address = address;
            Communicator::builder().config(config).with_store(store, rank, size)
        });
        raise(py, made).map(|comm| Self { comm: Mutex::new(Some(comm)), under_way: Arc::default() })
    }

    fn all_reduce(&self, py: Python<'_>, tensor: Tensor, op: Op, seconds: f64, owner: Option<Py<PyAny>>) -> PyResult<Option<Work>> {
        let block = |comm: &Communicator| comm.all_reduce(&mut buffer(tensor)?, op.reduction()?);
        self.call(py, seconds, owner, block, |comm| comm.start_all_reduce(buffer(tensor)?, op.reduction()?))
    }

    fn reduce(
        &self,
        py: Python<'_>,
        tensor: Tensor,
        root: usize,
        op: Op,
        seconds: f64,
        owner: Option<Py<PyAny>>,
    ) -> PyResult<Option<Work>> {
        let block = |comm: &Communicator| comm.reduce(&mut buffer(tensor)?, root, op.reduction()?);
        self.call(py, seconds, owner, block, |comm| comm.start_reduce(buffer(tensor)?, root, op.reduction()?))
    }

    fn broadcast(&self, py: Python<'_>, tensor: Tensor, root: usize, seconds: f64, owner: Option<Py<PyAny>>) -> PyResult<Option<Work>> {
        let block = |comm: &Communicator| comm.broadcast(&mut buffer(tensor)?, root);
        self.call(py, seconds, owner, block, |comm| comm.start_broadcast(buffer(tensor)?, root))
    }

    /// Without a source, this rank's part is already at its place in the destination.
    fn all_gather(
        &self,
        py: Python<'_>,
        source: Option<Tensor>,
        destination: Tensor,
        seconds: f64,
        owner: Option<Py<PyAny>>,
    ) -> PyResult<Option<Work>> {
        let Some(source) = source else {
            let block = |comm: &Communicator| comm.all_gather(&mut buffer(destination)?);
            return self.call(py, seconds, owner, block, |comm| comm.start_all_gather(buffer(destination)?));
        };
        let block = |comm: &Communicator| comm.all_gather_into(&buffer(source)?, &mut buffer(destination)?);
        self.call(py, seconds, owner, block, |comm| comm.start_all_gather_into(buffer(source)?, buffer(destination)?))
    }

    /// With counts, rank `i` gets `counts[i]` elements. Without counts, every rank gets equally many.
    #[expect(clippy::too_many_arguments, reason = "Python passes them by position")]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        source: Tensor,
        destination: Tensor,
        counts: Option<Vec<usize>>,
        op: Op,
        seconds: f64,
        owner: Option<Py<PyAny>>,
    ) -> PyResult<Option<Work>> {
        if let Some(counts) = counts {
            let block =
                |comm: &Communicator| comm.reduce_scatter_v_into(&buffer(source)?, &mut buffer(destination)?, &counts, op.reduction()?);
            let start =
                |comm: &Communicator| comm.start_reduce_scatter_v_into(buffer(source)?, buffer(destination)?, &counts, op.reduction()?);
            return self.call(py, seconds, owner, block, start);
        }
        let block = |comm: &Communicator| comm.reduce_scatter_into(&buffer(source)?, &mut buffer(destination)?, op.reduction()?);
        let start = |comm: &Communicator| comm.start_reduce_scatter_into(buffer(source)?, buffer(destination)?, op.reduction()?);
        self.call(py, seconds, owner, block, start)
    }

    fn gather(
        &self,
        py: Python<'_>,
        source: Tensor,
        destination: Option<Tensor>,
        root: usize,
        seconds: f64,
        owner: Option<Py<PyAny>>,
    ) -> PyResult<Option<Work>> {
        let there = || destination.map(buffer).transpose();
        let block = |comm: &Communicator| comm.gather_into(&buffer(source)?, there()?.as_mut(), root);
        self.call(py, seconds, owner, block, |comm| comm.start_gather_into(buffer(source)?, there()?, root))
    }

    fn scatter(
        &self,
        py: Python<'_>,
        source: Option<Tensor>,
        destination: Tensor,
        root: usize,
        seconds: f64,
        owner: Option<Py<PyAny>>,
    ) -> PyResult<Option<Work>> {
        let there = || source.map(buffer).transpose();
        let block = |comm: &Communicator| comm.scatter_into(there()?.as_ref(), &mut buffer(destination)?, root);
        self.call(py, seconds, owner, block, |comm| comm.start_scatter_into(there()?, buffer(destination)?, root))
    }

    /// Sends and receives the given number of elements for each rank.
    fn all_to_all(
        &self,
        py: Python<'_>,
        source: (Tensor, Vec<usize>),
        destination: (Tensor, Vec<usize>),
        seconds: f64,
        owner: Option<Py<PyAny>>,
    ) -> PyResult<Option<Work>> {
        let ((source, sent), (destination, received)) = (source, destination);
        let block = |comm: &Communicator| comm.all_to_all_v_into(&buffer(source)?, &sent, &mut buffer(destination)?, &received);
        let start = |comm: &Communicator| comm.start_all_to_all_v_into(buffer(source)?, &sent, buffer(destination)?, &received);
        self.call(py, seconds, owner, block, start)
    }

    fn barrier(&self, py: Python<'_>, seconds: f64, owner: Option<Py<PyAny>>) -> PyResult<Option<Work>> {
        self.call(py, seconds, owner, Communicator::barrier, Communicator::start_barrier)
    }

    /// Always a background call, because a message may wait for another call of the same thread.
    fn send(&self, py: Python<'_>, tensor: Tensor, to: usize, tag: u64, seconds: f64, owner: Py<PyAny>) -> PyResult<Work> {
        self.start(py, seconds, owner, |comm| comm.start_send(buffer(tensor)?, Envelope::rank(to).tag(tag)))
    }

    /// Receives from any rank if `from` is `None`.
    fn recv(&self, py: Python<'_>, tensor: Tensor, from: Option<usize>, tag: u64, seconds: f64, owner: Py<PyAny>) -> PyResult<Work> {
        let envelope = from.map_or_else(Envelope::any, Envelope::rank).tag(tag);
        self.start(py, seconds, owner, |comm| comm.start_recv(buffer(tensor)?, envelope))
    }

    /// Aborts all calls, here and on the other ranks.
    fn abort(&self, py: Python<'_>) {
        py.detach(|| drop(self.take().inspect(Communicator::abort)));
    }

    /// Leaves the group without waiting for other ranks: PyTorch requires programs to end all calls first. Calls that
    /// are still running fail, here and on the other ranks. Later calls of other ranks that need this rank fail there.
    fn shut_down(&self, py: Python<'_>) {
        py.detach(|| {
            let Some(comm) = self.take() else { return };
            let began = Instant::now();
            while self.under_way.load(Ordering::Acquire) > 0 {
                if began.elapsed() >= LAST_CALLS {
                    comm.abort();
                    break;
                }
                std::thread::sleep(LOOK);
            }
        });
    }
}
