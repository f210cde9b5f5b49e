//! What a communicator tells about its device, and what it lends of it.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};

use crate::communicator::Communicator;
use crate::deadline::Deadline;
use crate::device::{NcclCommunicator, cuda_error};
use crate::error::{Error, Result};

/// A communicator's device plane; see [`Communicator::device`].
///
/// ```no_run
/// # use collectives::{Communicator, DeviceChoice};
/// # fn main() -> collectives::Result<()> {
/// let comm = Communicator::builder().require_device(DeviceChoice::Local).from_env()?;
/// let device = comm.device().expect("it was required");
/// println!("rank {} has {} ({}), NCCL {}", comm.rank(), device.name(), device.pci_address(), device.nccl_version());
/// println!("{}", device.explain());
/// # comm.close()
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Device<'a> {
    comm: &'a Communicator,
    raw: &'a NcclCommunicator,
}

impl Communicator {
    /// The device plane, where this communicator has one: calls on device buffers need it.
    #[must_use]
    pub fn device(&self) -> Option<Device<'_>> {
        let raw = self.core.device.get()?.as_ref().ok()?;
        Some(Device { comm: self, raw })
    }

    /// Why there is no device plane, in words; `None` where there is one.
    #[must_use]
    pub fn why_no_device(&self) -> Option<String> {
        match self.plane("device") {
            Ok(_) => None,
            Err(Error::NoDevice { reason, .. }) => Some(reason),
            Err(error) => Some(error.to_string()),
        }
    }
}

impl<'a> Device<'a> {
    /// The device's number in this process.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.raw.plane().gpu().ordinal
    }

    /// The device's name, as the driver has it.
    #[must_use]
    pub fn name(&self) -> &'a str {
        &self.raw.plane().gpu().name
    }

    /// The device's address on its bus, as `0000:1b:00.0`.
    #[must_use]
    pub fn pci_address(&self) -> &'a str {
        &self.raw.plane().gpu().pci
    }

    /// The device's context, in which buffers for this communicator are allocated.
    #[must_use]
    pub fn context(&self) -> &'a Arc<CudaContext> {
        &self.raw.plane().gpu().context
    }

    /// The stream on which calls are queued where no other is named with [`Communicator::on`].
    #[must_use]
    pub fn stream(&self) -> &'a Arc<CudaStream> {
        self.raw.plane().stream()
    }

    /// The version of the loaded NCCL, as `2.28.9`.
    #[must_use]
    pub fn nccl_version(&self) -> String {
        self.raw.plane().comm().version().to_string()
    }

    /// The same communicator of NCCL's, for raw calls on addresses, memory and registrations.
    #[must_use]
    pub fn raw(&self) -> &'a NcclCommunicator {
        self.raw
    }

    /// What has gone wrong since, found by NCCL or by the watchdog: a lost peer, a call that did not end in time.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.raw.failure()
    }

    /// Waits until everything queued on [`Device::stream`] has ended, for at most the communicator's timeout. Where the limit passes,
    /// the communicator is aborted, so that the stream comes free.
    ///
    /// # Errors
    ///
    /// `Timeout`, and what NCCL or the driver met; `Unsupported` in a forked child.
    #[doc(alias = "cudaStreamSynchronize")]
    pub fn synchronize(&self) -> Result<()> {
        self.comm.refuse_forked("synchronize")?;
        self.raw.plane().synchronize(&Deadline::after(self.comm.timeout()))
    }

    /// Waits until everything queued on a stream of the caller's has ended, in the same way.
    pub(crate) fn wait_for(&self, stream: &CudaStream) -> Result<()> {
        let doing = || format!("waiting for a stream of device {}", self.ordinal());
        self.comm.refuse_forked("waiting for a stream")?;
        let event = stream.record_event(None).map_err(|error| cuda_error(doing(), error))?;
        self.raw.plane().comm().wait(&event, &Deadline::after(self.comm.timeout()))
    }

    /// Which algorithm each op and type takes, in words. For people; the text may change.
    #[must_use]
    pub fn explain(&self) -> String {
        self.raw.plane().explain()
    }
}
