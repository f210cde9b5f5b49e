//! The simulated devices and their properties.

use crate::code::{Code, Outcome};
use crate::interface::Configuration;

pub(crate) const NAME: &str = "Simulated GPU (not real)";
pub(crate) const MAX_THREADS: u32 = 1024;
pub(crate) const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65535, 65535];
pub(crate) const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];
pub(crate) const SHARED_BYTES: u32 = 48 << 10;
pub(crate) const SHARED_BYTES_OPT_IN: u32 = 227 << 10;
pub(crate) const THREADS_PER_MULTIPROCESSOR: u32 = 2048;
const ATTRIBUTES: u32 = 256;

/// The state of one device: its memory use and its streams.
#[derive(Debug, Default)]
pub(crate) struct Device {
    pub(crate) used: u64,
    /// A limit below its memory, if a test wants it to run out early.
    pub(crate) limit: Option<u64>,
    /// The number of streams ever made on it: they are named by this.
    pub(crate) streams: u64,
}

/// Returns the UUID. As for a real device, it is the same for every process of this host since it was started, and
/// different for every host and ordinal.
pub(crate) fn uuid(ordinal: usize) -> [u8; 16] {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    for byte in boot.bytes().chain((ordinal as u64).to_le_bytes()) {
        hash = (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
    }
    hash.to_be_bytes()
}

pub(crate) fn pci_bus_id(ordinal: usize) -> String {
    format!("0000:{:02x}:00.0", ordinal + 1)
}

/// Returns an attribute by its number in `CUdevice_attribute`. Attributes without a meaning here are 0.
pub(crate) fn attribute(configuration: &Configuration, ordinal: usize, number: u32) -> Outcome<i32> {
    if number == 0 || number > ATTRIBUTES {
        return Err(Code::INVALID_VALUE);
    }
    Ok(match number {
        1 => MAX_THREADS as i32,
        2..=4 => MAX_BLOCK[number as usize - 2] as i32,
        5..=7 => MAX_GRID[number as usize - 5] as i32,
        8 => SHARED_BYTES as i32,
        9 => 64 << 10,
        10 => 32,
        11 => i32::MAX,
        12 | 82 => 64 << 10,
        13 | 36 => 1_000_000,
        14 => 512,
        16 => configuration.multiprocessors as i32,
        33 => ordinal as i32 + 1,
        37 => 1024,
        38 => 1 << 20,
        39 => THREADS_PER_MULTIPROCESSOR as i32,
        40 => 2,
        75 => (configuration.capability / 10) as i32,
        76 => (configuration.capability % 10) as i32,
        81 => 228 << 10,
        97 => SHARED_BYTES_OPT_IN as i32,
        106 => 32,
        111 => 1 << 10,
        115 => i32::from(configuration.memory_pools != 0),
        // Capabilities: overlap, mapped host memory, concurrent kernels, one address space, priorities, caches,
        // managed memory, pre-emption, the same address for registered memory, cooperative launches, registration.
        15 | 19 | 31 | 41 | 78 | 79 | 80 | 83 | 89 | 90 | 91 | 95 | 99 => 1,
        _ => 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_told_apart_and_stay_the_same() {
        let all: Vec<_> = (0..16).map(uuid).collect();
        assert!((0..16).all(|at| all.iter().filter(|other| **other == all[at]).count() == 1));
        assert_eq!(uuid(3), all[3]);
        assert_eq!(pci_bus_id(9), "0000:0a:00.0");
    }
}
