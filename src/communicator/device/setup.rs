//! The start of a device backend. The ranks exchange facts about their devices and libraries, and agree whether these
//! suffice. Only then do they connect through NCCL. So if one rank lacks something, every rank learns what it is.

use std::collections::BTreeMap;
use std::sync::Arc;

use cudarc::driver::CudaContext;
use nccl_sys::{Version, ncclUniqueId};

use crate::base::deadline::Deadline;
use crate::base::tuning::bootstrap::RANKS_PER_ROOT;
use crate::base::tuning::device::AGREEMENT_WAIT;
use crate::communicator::Communicator;
use crate::communicator::work::message::INTERNAL_TAG;
use crate::config::device_environment;
use crate::device::{self, CommonDevice, FamilySet, Gpu, NcclComm, NcclCommunicator, Setup};
use crate::error::{Error, Peer, Result};

/// The choice of the GPU that a rank uses.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub enum DeviceChoice {
    /// The device with the rank's number among the ranks of its host: the first rank takes device 0, the second rank
    /// takes device 1, and so on. If a process sees fewer devices than there are ranks on the host, the device numbers
    /// start again at 0. For example, if the launcher makes only one device visible to each process, every rank takes
    /// device 0 of its process.
    #[default]
    Local,
    /// The device with this number.
    Ordinal(usize),
    /// The device of this context. The context must be the device's primary context, which `CudaContext::new` of cudarc
    /// returns.
    Context(Arc<CudaContext>),
}

/// Returns how many GPUs this process sees.
///
/// # Errors
///
/// `NoDevice`, with the reason, if there is no usable driver.
pub fn device_count() -> Result<usize> {
    device::count().map_err(|reason| Error::NoDevice { call: "device_count".to_owned(), reason })
}

/// The device that the builder asked for.
#[derive(Debug, Clone)]
pub(in crate::communicator) struct DeviceRequest {
    pub(in crate::communicator) choice: DeviceChoice,
    /// Whether a communicator without a device backend is an error.
    pub(in crate::communicator) required: bool,
}

/// The first NCCL that allows several ranks on one device.
const SHARED_DEVICES: Version = Version::new(2, 30, 3);

/// The most characters of the driver's reason for refusing kernels that a rank sends to the others.
const LONGEST_REFUSAL: usize = 512;

/// The facts that a rank sends to the others.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DeviceFacts {
    uuid: [u8; 16],
    version: i32,
    /// The device's compute capability.
    capability: (u8, u8),
    /// The device's number in its process.
    ordinal: u16,
    /// The scratch memory that the rank would allocate, in bytes. All ranks must have the same, because slabs must be
    /// equal.
    scratch_bytes: u64,
    may_share: bool,
    /// Whether the NVLink switch can add for this device.
    has_multicast: bool,
    /// The families of this crate's kernels that the driver has loaded.
    families: FamilySet,
    pci: String,
    /// The identity by which NCCL takes ranks to share a host; empty if none is set.
    host_id: String,
    /// Why the driver has refused a family; empty if it has refused none.
    refusal: String,
}

impl DeviceFacts {
    /// Encodes the facts, or the reason why there are none. The first byte distinguishes the two.
    fn to_bytes(said: &OrReason<Self>) -> Vec<u8> {
        match said {
            Err(reason) => [&[0], reason.as_bytes()].concat(),
            Ok(facts) => {
                let (major, minor) = facts.capability;
                let numbers = [
                    &facts.version.to_le_bytes()[..],
                    &facts.ordinal.to_le_bytes(),
                    &facts.scratch_bytes.to_le_bytes(),
                    &[major, minor, u8::from(facts.may_share), u8::from(facts.has_multicast), facts.families.bits()],
                ]
                .concat();
                let texts = [&*facts.pci, &facts.host_id, &facts.refusal].join("\n");
                [&[1][..], &facts.uuid, &numbers, texts.as_bytes()].concat()
            }
        }
    }

    fn from_bytes(bytes: &[u8]) -> OrReason<Self> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match bytes {
            [0, reason @ ..] => Err(text(reason)),
            [1, rest @ ..] => Self::parse(rest).ok_or_else(|| "the start-up data of the rank cannot be decoded".to_owned()),
            _ => Err("the start-up data of the rank cannot be decoded".to_owned()),
        }
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (uuid, rest) = bytes.split_first_chunk()?;
        let (version, rest) = rest.split_first_chunk()?;
        let (ordinal, rest) = rest.split_first_chunk()?;
        let (scratch_bytes, rest) = rest.split_first_chunk()?;
        let ([major, minor, may_share, has_multicast, families], rest) = rest.split_first_chunk()?;
        // The last text may have several lines.
        let (pci, rest) = std::str::from_utf8(rest).ok()?.split_once('\n')?;
        let (host_id, refusal) = rest.split_once('\n')?;
        Some(Self {
            uuid: *uuid,
            version: i32::from_le_bytes(*version),
            capability: (*major, *minor),
            ordinal: u16::from_le_bytes(*ordinal),
            scratch_bytes: u64::from_le_bytes(*scratch_bytes),
            may_share: *may_share != 0,
            has_multicast: *has_multicast != 0,
            families: FamilySet::from_bits(*families),
            pci: pci.to_owned(),
            host_id: host_id.to_owned(),
            refusal: refusal.to_owned(),
        })
    }
}

/// Returns the reason why these ranks cannot have a device backend together, if there is one. Every rank gets the same
/// result.
fn objection(all: &[DeviceFacts], peers: &[Peer]) -> Option<String> {
    let first = all.first()?;
    if let Some(other) = all.iter().position(|facts| facts.version != first.version) {
        let [mine, theirs] = [first, &all[other]].map(|facts| Version::from_code(facts.version));
        let reason = format!("{} has NCCL {mine} and {} has NCCL {theirs}", peers[0], peers[other]);
        return Some(format!("{reason}: all ranks need the same NCCL version; choose the library with Config::nccl_library"));
    }
    let mut seen = BTreeMap::new();
    for (rank, facts) in all.iter().enumerate() {
        let Some(other) = seen.insert(facts.uuid, rank) else { continue };
        if !shares(&all[other], facts) {
            let reason = format!("{} and {} are both on GPU {}", peers[other], peers[rank], facts.pci);
            return Some(format!(
                "{reason}: give each rank its own GPU, or use NCCL {SHARED_DEVICES} or later and set NCCL_MULTI_RANK_GPU_ENABLE=1 for all ranks"
            ));
        }
    }
    parts_of_one(all, peers)
}

/// Refuses ranks on two parts of one GPU (MIG) if NCCL takes them for one device, because it compares PCI addresses.
fn parts_of_one(all: &[DeviceFacts], peers: &[Peer]) -> Option<String> {
    if all.first().is_none_or(|facts| Version::from_code(facts.version) >= SHARED_DEVICES) {
        return None;
    }
    let mut seen = BTreeMap::new();
    for (rank, facts) in all.iter().enumerate() {
        if let Some(other) = seen.insert((&peers[rank].host, &facts.host_id, &facts.pci), rank) {
            return Some(format!(
                "{} and {} are on parts of one GPU, {}, which NCCL before {SHARED_DEVICES} takes for one device: give each rank a whole GPU, \
                 or use a newer NCCL",
                peers[other], peers[rank], facts.pci
            ));
        }
    }
    None
}

/// Returns the facts of all ranks if they suffice for a device backend; otherwise the reason why not.
fn judged(said: &[Vec<u8>], peers: &[Peer]) -> OrReason<Vec<DeviceFacts>> {
    let facts = peers.iter().zip(said).map(|(peer, bytes)| DeviceFacts::from_bytes(bytes).map_err(|reason| format!("{peer}: {reason}")));
    let facts = facts.collect::<OrReason<Vec<_>>>()?;
    objection(&facts, peers).map_or(Ok(facts), Err)
}

/// Whether NCCL allows two ranks on one device.
fn shares(one: &DeviceFacts, other: &DeviceFacts) -> bool {
    let enabled = one.may_share && other.may_share && Version::from_code(one.version) >= SHARED_DEVICES;
    // Ranks that claim different hosts communicate over the network; NCCL does not compare their devices.
    enabled || one.host_id != other.host_id
}

/// Whether NCCL may add in the NVLink switch. All ranks must be on one host, both by NCCL's identities and by ours,
/// and the switch must support all their devices.
fn on_one_switch(all: &[DeviceFacts], peers: &[Peer]) -> bool {
    let host = |(peer, facts): (&Peer, &DeviceFacts)| (peer.host.clone(), facts.host_id.clone());
    let first = peers.iter().zip(all).next().map(host);
    peers.iter().zip(all).all(|both| both.1.has_multicast && Some(host(both)) == first)
}

/// Returns the properties that the devices of all ranks share.
fn common(all: &[DeviceFacts], peers: &[Peer]) -> CommonDevice {
    let least_capability = all.iter().map(|facts| facts.capability).min().map_or((0, 0), |(major, minor)| (major.into(), minor.into()));
    let families = all.iter().fold(FamilySet::ALL, |families, facts| families.and(facts.families));
    let refusal = peers.iter().zip(all).find(|(_, facts)| !facts.refusal.is_empty());
    let refusal = refusal.map(|(peer, facts)| format!("{peer}: {}", facts.refusal));
    CommonDevice { least_capability, has_switch: on_one_switch(all, peers), families, refusal }
}

/// A value, or why there is none. The ranks agree on this result, and a reason is not an error of the host backend.
type OrReason<T> = std::result::Result<T, String>;

/// The tag of the notification that a rank cannot start. It is sent at most once in the life of a communicator, and
/// never received.
pub(super) const NO_START_TAG: u64 = INTERNAL_TAG | 1 << 61 | 1 << 60;

/// What a rank's failure to start says about the cause. If several ranks fail, the first of these counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Cause {
    /// The rank itself could not start.
    Own,
    /// Another rank was lost while this one talked to it.
    Lost,
    /// The deadline passed while this rank waited for another rank.
    Late,
    /// Another rank has reported its own failure.
    Told,
}

/// Why a rank has not started.
#[derive(Debug, PartialEq, Eq)]
struct NoStart {
    cause: Cause,
    reason: String,
}

type StartedOrNot<T> = std::result::Result<T, NoStart>;

impl NoStart {
    /// Makes a reason that this rank itself caused.
    fn own(reason: String) -> Self {
        Self { cause: Cause::Own, reason }
    }

    fn of(error: &Error) -> Self {
        const REMOTE: u32 = nccl_sys::ncclResult_t::ncclRemoteError.0;
        let cause = match error {
            Error::Aborted { .. } => Cause::Told,
            Error::Timeout { .. } => Cause::Late,
            Error::PeerLost { .. } => Cause::Lost,
            Error::Nccl { code, .. } if *code == REMOTE => Cause::Lost,
            _ => Cause::Own,
        };
        Self { cause, reason: error.to_string() }
    }

    fn to_bytes(&self) -> Vec<u8> {
        [&[self.cause as u8][..], self.reason.as_bytes()].concat()
    }
}

/// Returns the rank that made all others fail, and its reason. Each rank has sent nothing, or the reason why it has not
/// started.
fn first_reason(said: &[Vec<u8>]) -> Option<(usize, String)> {
    let reasons = said.iter().enumerate().filter_map(|(rank, said)| said.split_first().map(|(cause, reason)| (*cause, rank, reason)));
    reasons.min().map(|(_, rank, reason)| (rank, String::from_utf8_lossy(reason).into_owned()))
}

/// The device and the library that this rank has found.
struct Found {
    gpu: Gpu,
    library: &'static nccl_sys::Library,
    own: CommonDevice,
}

impl Communicator {
    /// Makes the device backend, or stores the reason why there is none.
    ///
    /// # Errors
    ///
    /// `NoDevice` on every rank if a device backend is required and cannot be made; the errors of the host backend.
    pub(in crate::communicator) fn connect_device(&self, request: &DeviceRequest, deadline: &Deadline) -> Result<()> {
        let found = self.find_device(&request.choice);
        let backend = self.agree_and_connect(found, deadline)?;
        self.keep_device(backend, request.required)
    }

    /// Gathers what every rank sends, in rank order. A rank that is stopped holds up the others only for as long as the
    /// start of the devices may take, not for as long as a call.
    pub(super) fn exchange(&self, mine: &[u8], deadline: &Deadline) -> Result<Vec<Vec<u8>>> {
        let limit = self.timeout().min(deadline.remaining().max(AGREEMENT_WAIT));
        self.with_timeout(limit).all_gather_blobs(mine)
    }

    /// Stores the outcome of an attempt.
    fn keep_device(&self, backend: OrReason<NcclCommunicator>, required: bool) -> Result<()> {
        if let Err(reason) = &backend {
            crate::base::event::info!(rank = self.rank(), reason, "no device backend");
            if required {
                return Err(Error::NoDevice { call: "making a communicator".to_owned(), reason: reason.clone() });
            }
        }
        if let Ok(device) = &backend {
            device.backend().comm().record_in(&self.core.shared.recorder);
        }
        let _ = self.core.device.set(backend);
        Ok(())
    }

    /// Returns the device that this rank would use, and the library.
    fn find_device(&self, choice: &DeviceChoice) -> OrReason<Found> {
        device::check_driver()?;
        let gpu = match choice {
            DeviceChoice::Local => match device::count()? {
                0 => Err("the driver finds no device".to_owned()),
                count => device::open(self.local_rank() % count),
            },
            DeviceChoice::Ordinal(ordinal) => device::open(*ordinal),
            DeviceChoice::Context(context) => device::of(context),
        }?;
        let library = device::library(self.config().nccl_library.as_ref())?;
        if let Some(secret) = self.config().secret.as_ref().filter(|_| self.config().encrypt) {
            device::encrypt(library, secret)?;
        }
        let own = CommonDevice::of(&gpu);
        Ok(Found { gpu, library, own })
    }

    /// Returns what this rank sends to the others.
    fn device_facts(&self, found: &OrReason<Found>) -> OrReason<DeviceFacts> {
        let environment = device_environment();
        found.as_ref().map_err(String::clone).map(|Found { gpu, library, own }| DeviceFacts {
            uuid: gpu.uuid,
            version: library.version().code(),
            capability: (gpu.capability.0 as u8, gpu.capability.1 as u8),
            ordinal: gpu.ordinal as u16,
            scratch_bytes: self.config().device_scratch_bytes as u64,
            may_share: environment.multi_rank_gpu,
            has_multicast: device::has_multicast(gpu),
            families: own.families,
            pci: gpu.pci.clone(),
            host_id: environment.host_id.unwrap_or_default(),
            refusal: own.refusal.clone().unwrap_or_default().chars().take(LONGEST_REFUSAL).collect(),
        })
    }

    /// Agrees with the others, and starts NCCL. The outer error is one of the host backend.
    fn agree_and_connect(&self, found: OrReason<Found>, deadline: &Deadline) -> Result<OrReason<NcclCommunicator>> {
        let said = self.exchange(&DeviceFacts::to_bytes(&self.device_facts(&found)), deadline)?;
        let facts = match judged(&said, self.peers()) {
            Ok(facts) => facts,
            Err(reason) => return Ok(Err(reason)),
        };
        let mut config = self.config().clone();
        config.device_scratch_bytes = facts.iter().map(|facts| facts.scratch_bytes).min().map_or(0, |bytes| bytes as usize);
        let Ok(found) = found else { return Ok(Err("this rank has no device".to_owned())) };
        let shared = device::share_pool(&found.gpu, &self.neighbours(&facts));
        let shared =
            shared.map_err(|error| device::cuda_error("giving other devices of this process access to a device's memory pool", error));
        let made = match self.unique_ids(found.library, shared, deadline)? {
            Ok(ids) => {
                let end_notice = self.end_notice();
                let setup = Setup {
                    library: found.library,
                    gpu: &found.gpu,
                    ids: &ids,
                    rank: self.rank(),
                    world_size: self.world_size(),
                    config: &self.config().nccl,
                    deadline,
                    liveness_probe: Some(&self.liveness_probe()),
                    end_notice: end_notice.as_ref(),
                };
                let around = |comm| NcclCommunicator::around(found.gpu.clone(), comm, &config, common(&facts, self.peers()));
                self.tell_failure(NcclComm::create(setup).and_then(around), deadline)
            }
            Err(reason) => Err(NoStart::own(reason)),
        };
        self.agreed(made, deadline)
    }

    /// Notifies the other ranks at once that this one cannot start, if it is the cause: NCCL would make them wait for
    /// it. They look for the message while they wait ([`LivenessProbe`](device::LivenessProbe)) and never receive it.
    /// The reasons are exchanged afterwards.
    fn tell_failure<T>(&self, made: Result<T>, deadline: &Deadline) -> StartedOrNot<T> {
        let error = match made {
            Ok(made) => return Ok(made),
            Err(error) => error,
        };
        // In these cases another rank has notified this one, or the deadline has passed, on all ranks.
        if !matches!(error, Error::Aborted { .. } | Error::Timeout { .. }) {
            let limit = deadline.remaining().max(AGREEMENT_WAIT);
            for other in (0..self.world_size()).filter(|rank| *rank != self.rank()) {
                // A rank that cannot be reached waits for its own deadline.
                let _ = self.post_internal_send(other, NO_START_TAG, vec![1], limit);
            }
        }
        let mut failed = NoStart::of(&error);
        if failed.cause != Cause::Own {
            failed.reason.push_str(&self.network_advice().unwrap_or_default());
        }
        Err(failed)
    }

    /// Returns advice for ranks of several hosts that have waited for each other: NCCL may have chosen a network
    /// interface that other hosts cannot reach.
    fn network_advice(&self) -> Option<String> {
        let own = &self.peers()[self.rank()].host;
        if self.peers().iter().all(|peer| peer.host == *own) || device_environment().chooses_interface {
            return None;
        }
        let listener = self.with_backend(|backend| backend.recovery_listeners().get(self.rank()).copied().flatten()).ok().flatten();
        let reached =
            listener.map_or_else(String::new, |address| format!("; the host backend uses the interface with the address {}", address.ip()));
        Some(format!(
            ". NCCL chooses a network interface by itself: if the other hosts cannot reach it, name another interface in \
             NCCL_SOCKET_IFNAME on every rank{reached}"
        ))
    }

    /// Returns the devices of the other ranks that are threads of this process.
    fn neighbours(&self, facts: &[DeviceFacts]) -> Vec<usize> {
        let own = usize::from(facts[self.rank()].ordinal);
        let same_process = self.with_backend(|backend| backend.same_process().to_vec()).unwrap_or_default();
        let here = facts.iter().zip(same_process).filter(|(_, is_here)| *is_here);
        here.map(|(facts, _)| usize::from(facts.ordinal)).filter(|ordinal| *ordinal != own).collect()
    }

    /// Returns the ids of NCCL's bootstrap on every rank, made by evenly spread ranks; if a rank is not prepared, the
    /// reason.
    fn unique_ids(
        &self,
        library: &'static nccl_sys::Library,
        prepared: Result<()>,
        deadline: &Deadline,
    ) -> Result<OrReason<Vec<ncclUniqueId>>> {
        let world_size = self.world_size();
        let roots = if library.has("ncclCommInitRankScalable") { world_size.div_ceil(RANKS_PER_ROOT) } else { 1 };
        let is_root = (0..roots).any(|root| root * world_size / roots == self.rank());
        let made = prepared.and_then(|()| is_root.then(|| device::unique_id(library)).transpose());
        let blob = match made {
            Ok(None) => vec![1],
            Ok(Some(id)) => [&[1], &id.internal.map(|byte| byte as u8)[..]].concat(),
            Err(error) => [&[0], error.to_string().as_bytes()].concat(),
        };
        let mut ids = Vec::with_capacity(roots);
        for (peer, blob) in self.peers().iter().zip(self.exchange(&blob, deadline)?) {
            match &blob[..] {
                [1] => {}
                [0, reason @ ..] => return Ok(Err(format!("{peer}: {}", String::from_utf8_lossy(reason)))),
                [1, id @ ..] => match <[u8; size_of::<ncclUniqueId>()]>::try_from(id) {
                    Ok(bytes) => ids.push(ncclUniqueId { internal: bytes.map(|byte| byte as std::ffi::c_char) }),
                    Err(_) => return Ok(Err(format!("{peer} sent an NCCL id of a wrong length: {} B", id.len()))),
                },
                _ => return Ok(Err(format!("{peer} sent an NCCL id that cannot be decoded"))),
            }
        }
        Ok(Ok(ids))
    }

    /// Returns a backend on every rank, or a reason on every rank. The first reason counts; a reason that only follows
    /// from another counts less.
    fn agreed(&self, made: StartedOrNot<NcclCommunicator>, deadline: &Deadline) -> Result<OrReason<NcclCommunicator>> {
        let mine = made.as_ref().map_or_else(NoStart::to_bytes, |_| Vec::new());
        // Ranks whose time for NCCL has passed still receive the reason.
        let deadline = Deadline::after(deadline.remaining().max(AGREEMENT_WAIT));
        let said = self.exchange(&mine, &deadline)?;
        let failed = first_reason(&said).map(|(rank, reason)| (&self.peers()[rank], reason));
        match (made, failed) {
            (Ok(backend), None) => Ok(Ok(backend)),
            (made, failed) => {
                if let Ok(made) = made {
                    made.abort_handle().abort();
                }
                let reason = failed.map_or_else(String::new, |(peer, reason)| format!("{peer}: {reason}"));
                Ok(Err(reason))
            }
        }
    }

    /// Makes the device backend of a communicator of some of this one's ranks; all ranks of the new one take part. To
    /// NCCL it is an independent communicator, which stays usable whatever happens to this communicator's backend.
    pub(in crate::communicator) fn connect_split_device(&self, child: &Communicator, deadline: &Deadline) -> Result<()> {
        let device = match self.core.device.get() {
            Some(Ok(device)) => device,
            Some(Err(reason)) => {
                let _ = child.core.device.set(Err(reason.clone()));
                return Ok(());
            }
            None => return Ok(()),
        };
        let (backend, config) = (device.backend(), &self.config().nccl);
        let library = backend.comm().library();
        let made = child.unique_ids(library, Ok(()), deadline)?.map_err(NoStart::own).and_then(|ids| {
            let (gpu, rank, world_size) = (backend.gpu(), child.rank(), child.world_size());
            let (liveness_probe, end_notice) = (Some(&child.liveness_probe()), child.end_notice());
            let setup =
                Setup { library, gpu, ids: &ids, rank, world_size, config, deadline, liveness_probe, end_notice: end_notice.as_ref() };
            child.tell_failure(NcclComm::create(setup).and_then(|comm| device.descendant(comm)), deadline)
        });
        let backend = child.agreed(made, deadline)?;
        child.keep_device(backend, false)
    }

    /// Refuses to close while captured graphs contain calls: NCCL would wait for them.
    pub(in crate::communicator) fn refuse_live_graphs(&self) -> Result<()> {
        match self.core.device.get() {
            Some(Ok(device)) => device.backend().comm().refuse_live_graphs("close"),
            _ => Ok(()),
        }
    }

    /// Waits for the work that is queued on the device backend's own stream, and finalizes NCCL's communicator.
    pub(in crate::communicator) fn close_device(&self) -> Result<()> {
        let Some(Ok(device)) = self.core.device.get() else { return Ok(()) };
        let backend = device.backend();
        let deadline = Deadline::after(self.timeout());
        backend.synchronize(&deadline)?;
        backend.comm().finalize(&deadline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(device: u8) -> DeviceFacts {
        DeviceFacts {
            uuid: [device; 16],
            version: 23203,
            capability: (9, 0),
            ordinal: device.into(),
            scratch_bytes: 1 << 20,
            may_share: false,
            has_multicast: true,
            pci: format!("0000:{device:02x}:00.0"),
            host_id: String::new(),
            families: FamilySet::ALL,
            refusal: String::new(),
        }
    }

    fn judge(said: &[OrReason<DeviceFacts>]) -> Option<String> {
        let peers: Vec<Peer> = (0..said.len()).map(Peer::unknown).collect();
        let said: Vec<_> = said.iter().map(DeviceFacts::to_bytes).collect();
        judged(&said, &peers).err()
    }

    #[test]
    fn what_is_said_survives_the_wire() {
        let refused = DeviceFacts { families: FamilySet::SUM, refusal: "error 221\nno compiler".to_owned(), ..facts(4) };
        let willing = DeviceFacts { may_share: true, host_id: "a".to_owned(), ..facts(3) };
        for said in [Ok(willing), Ok(refused), Err("no driver".to_owned())] {
            assert_eq!(DeviceFacts::from_bytes(&DeviceFacts::to_bytes(&said)), said);
        }
        for nonsense in [&[][..], &[1], &[2, 3], &[1; 20]] {
            assert!(DeviceFacts::from_bytes(nonsense).is_err());
        }
    }

    #[test]
    fn every_objection_names_who_and_what_to_do() {
        assert_eq!(judge(&[Ok(facts(0)), Ok(facts(1))]), None);
        assert_eq!(judge(&[Ok(facts(0)), Err("no driver".into())]), Some("rank 1: no driver".to_owned()));
        let old = judge(&[Ok(facts(0)), Ok(DeviceFacts { version: 22809, ..facts(1) })]).unwrap();
        assert!(old.contains("rank 0 has NCCL 2.32.3") && old.contains("rank 1 has NCCL 2.28.9"), "{old}");
        let twice = judge(&[Ok(facts(0)), Ok(facts(1)), Ok(facts(0))]).unwrap();
        assert!(twice.contains("rank 0 and rank 2") && twice.contains("NCCL_MULTI_RANK_GPU_ENABLE=1"), "{twice}");
    }

    #[test]
    fn a_rank_that_could_not_start_counts_before_those_that_waited_for_it() {
        let peer = || Peer::unknown(2);
        let late = Error::Timeout {
            doing: "waiting".to_owned(),
            elapsed: std::time::Duration::ZERO,
            missing: Vec::new(),
            arrived: Vec::new(),
            meanwhile: Vec::new(),
        };
        let told = Error::Aborted { doing: "waiting".to_owned(), by: peer() };
        let lost = Error::Nccl { doing: "making".to_owned(), code: 6, name: "ncclRemoteError", text: String::new() };
        let own = |doing: &str| Error::Cuda { doing: doing.to_owned(), code: 2, text: "no memory".to_owned() };
        let said = |errors: &[Option<&Error>]| {
            let said: Vec<_> = errors.iter().map(|error| error.map_or_else(Vec::new, |error| NoStart::of(error).to_bytes())).collect();
            first_reason(&said)
        };
        assert_eq!(said(&[None, None]), None);
        let (second, third) = (own("allocating"), own("making a stream"));
        assert_eq!(said(&[Some(&late), Some(&told), Some(&second), Some(&lost), Some(&third)]), Some((2, second.to_string())));
        // A rank that only heard of the failure knows no cause.
        assert_eq!(said(&[Some(&told), Some(&lost)]), Some((1, lost.to_string())));
        assert_eq!(said(&[None, Some(&late), Some(&lost)]), Some((2, lost.to_string())));
        assert_eq!(said(&[Some(&told), Some(&late)]), Some((1, late.to_string())));
    }

    #[test]
    fn kernels_that_one_rank_lacks_are_missing_for_all() {
        let peers: Vec<Peer> = (0..3).map(Peer::unknown).collect();
        let refused = DeviceFacts { families: FamilySet::ALL.without(FamilySet::BITS), refusal: "no compiler".to_owned(), ..facts(1) };
        let other = DeviceFacts { families: FamilySet::ALL.without(FamilySet::SUM), refusal: "too old".to_owned(), ..facts(2) };
        let common = common(&[facts(0), refused, other], &peers);
        assert_eq!(common.families, FamilySet::ALL.without(FamilySet::BITS.or(FamilySet::SUM)));
        assert_eq!(common.refusal.as_deref(), Some("rank 1: no compiler"));
    }

    #[test]
    fn one_device_is_shared_where_nccl_allows_it() {
        let willing = DeviceFacts { may_share: true, ..facts(0) };
        assert_eq!(judge(&[Ok(willing.clone()), Ok(willing.clone())]), None);
        assert!(judge(&[Ok(willing.clone()), Ok(facts(0))]).is_some());
        let old = DeviceFacts { version: 22809, ..willing };
        assert!(judge(&[Ok(old.clone()), Ok(old.clone())]).is_some());
        assert_eq!(judge(&[Ok(old.clone()), Ok(DeviceFacts { host_id: "b".to_owned(), ..old })]), None);
    }

    #[test]
    fn parts_of_one_gpu_need_an_nccl_that_tells_them_apart() {
        let part = |uuid: u8, version| DeviceFacts { uuid: [uuid; 16], version, ..facts(0) };
        assert_eq!(judge(&[Ok(part(1, 23003)), Ok(part(2, 23003))]), None);
        let refused = judge(
            &[Ok(part(1, 22907)), Ok(facts(5)), Ok(part(2, 22907))].map(|said| said.map(|facts| DeviceFacts { version: 22907, ..facts })),
        );
        let refused = refused.unwrap();
        assert!(refused.contains("rank 0 and rank 2 are on parts of one GPU, 0000:00:00.0"), "{refused}");
        // Two hosts may use the same addresses.
        let elsewhere = DeviceFacts { host_id: "b".to_owned(), ..part(2, 22907) };
        assert_eq!(judge(&[Ok(part(1, 22907)), Ok(elsewhere)]), None);
    }

    #[test]
    fn the_switch_is_counted_on_where_all_ranks_are_on_one_host_and_have_it() {
        let mut peers: Vec<Peer> = (0..3).map(Peer::unknown).collect();
        let all = [facts(0), facts(1), facts(2)];
        assert!(on_one_switch(&all, &peers));
        assert!(!on_one_switch(&[facts(0), DeviceFacts { has_multicast: false, ..facts(1) }, facts(2)], &peers));
        assert!(!on_one_switch(&[facts(0), facts(1), DeviceFacts { host_id: "b".to_owned(), ..facts(2) }], &peers));
        peers[1].host = "another".to_owned();
        assert!(!on_one_switch(&all, &peers));
    }
}
