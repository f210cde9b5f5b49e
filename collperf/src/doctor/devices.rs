//! Checks the GPUs and NCCL.

#![expect(unsafe_code, reason = "queries of the driver that have no safe form")]

use std::env;
use std::ffi::c_int;
use std::path::Path;

use cudarc::driver::sys;
use nccl_sys::{Library, LoadError};

use super::finding::Finding;
use crate::gpus;

/// The most devices whose pairs are checked.
const MOST_DEVICES: usize = 64;

/// Checks the devices and NCCL.
pub(super) fn look() -> Vec<Finding> {
    let mut findings = Vec::new();
    let devices = gpus::count();
    findings.push(match &devices {
        Ok(count) => Finding::good("driver", format!("{}, {count} device{}", driver_version(), if *count == 1 { "" } else { "s" })),
        Err(reason) => Finding::note(
            "driver",
            reason,
            "for GPUs: install NVIDIA's driver, and give containers access to the devices (docker run --gpus all). Without GPUs, \
             collectives run in host memory",
        ),
    });
    findings.push(match nccl() {
        Ok(library) => Finding::good("NCCL", format!("{}, {}", library.version(), library.path())),
        Err(error) => Finding::note(
            "NCCL",
            // The rest is advice, which is given below.
            error.to_string().split(". Install").next().unwrap_or_default(),
            "for GPUs: apt install libnccl2, or pip install nvidia-nccl-cu12. With pip, also set COLLECTIVES_NCCL_LIBRARY to the path \
             of libnccl.so.2",
        ),
    });
    match devices.unwrap_or(0).min(MOST_DEVICES) {
        0 | 1 => {}
        count => findings.extend([peer_access(count), nvlink(count)]),
    }
    findings
}

/// Loads the NCCL that a communicator would open.
fn nccl() -> Result<&'static Library, LoadError> {
    match env::var_os("COLLECTIVES_NCCL_LIBRARY").filter(|file| !file.is_empty()) {
        // SAFETY: the user who sets this process's variables vouches for the file, as when a communicator opens it.
        Some(file) => unsafe { Library::open_file(Path::new(&file)) },
        None => Library::open(),
    }
}

fn driver_version() -> String {
    let mut version = 0;
    // SAFETY: the driver is loaded, since devices were counted, and writes one number.
    let status = unsafe { sys::cuDriverGetVersion(&mut version) };
    match status {
        sys::CUresult::CUDA_SUCCESS => format!("CUDA {}.{}", version / 1000, version % 1000 / 10),
        status => format!("version unknown ({status:?})"),
    }
}

/// Returns all pairs of `count` devices.
fn pairs(count: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..count).flat_map(move |one| (0..count).filter(move |other| *other != one).map(move |other| (one, other)))
}

/// Lists the first few pairs.
fn listed(pairs: &[(usize, usize)]) -> String {
    let few: Vec<String> = pairs.iter().take(4).map(|(one, other)| format!("{one} to {other}")).collect();
    format!("{}{}", few.join(", "), if pairs.len() > few.len() { ", …" } else { "" })
}

fn peer_access(count: usize) -> Finding {
    let can = |one: usize, other: usize| {
        let mut can: c_int = 0;
        // SAFETY: the driver is loaded and initialised, and writes one number; devices go by their ordinals.
        let status = unsafe { sys::cuDeviceCanAccessPeer(&mut can, one as c_int, other as c_int) };
        status == sys::CUresult::CUDA_SUCCESS && can != 0
    };
    let without: Vec<(usize, usize)> = pairs(count).filter(|(one, other)| !can(*one, *other)).collect();
    if without.is_empty() {
        return Finding::good("peer access", "between all devices");
    }
    let found = format!("not from {} ({} of {} pairs)", listed(&without), without.len(), count * (count - 1));
    Finding::note(
        "peer access",
        found,
        "turn off ACS on the PCI bridges, and turn off the IOMMU (or its virtualisation); otherwise NCCL copies through host memory",
    )
}

/// Detects NVLink by atomics on another device's memory, which NVLink supports and the PCI bus does not.
fn nvlink(count: usize) -> Finding {
    type Ask = unsafe extern "C" fn(*mut c_int, sys::CUdevice_P2PAttribute, sys::CUdevice, sys::CUdevice) -> sys::CUresult;
    // SAFETY: the driver is loaded; the function has had this form since CUDA 8.
    let Ok(ask) = (unsafe { sys::culib().get::<Ask>(b"cuDeviceGetP2PAttribute\0") }) else {
        return Finding::note("NVLink", "not known: this driver has no query for NVLink", "run nvidia-smi nvlink --status");
    };
    let is_linked = |one: usize, other: usize| {
        let mut has = 0;
        let attribute = sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
        // SAFETY: it writes one number; devices go by their ordinals.
        let status = unsafe { ask(&mut has, attribute, one as c_int, other as c_int) };
        status == sys::CUresult::CUDA_SUCCESS && has != 0
    };
    let without: Vec<(usize, usize)> = pairs(count).filter(|(one, other)| !is_linked(*one, *other)).collect();
    match without.len() {
        0 => Finding::good("NVLink", "between all devices: every pair supports native atomics"),
        missing => {
            let found = format!("no native atomics from {} ({missing} of {} pairs)", listed(&without), count * (count - 1));
            Finding::note(
                "NVLink",
                found,
                "if the machine has NVLink: run nvidia-smi nvlink --status; a machine with NVSwitch needs the service nvidia-fabricmanager",
            )
        }
    }
}
