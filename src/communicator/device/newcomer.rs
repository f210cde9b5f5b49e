//! Devices in an admission: a newcomer finds out whether it can have a device before it asks, and takes a device that no
//! other rank uses. The members have their devices already, and these need not follow from their ranks.

use super::setup::{DeviceChoice, DeviceRequest};
use crate::base::deadline::Deadline;
use crate::communicator::Communicator;
use crate::config::Config;
use crate::device;
use crate::error::Result;

/// What the ranks of an admission say of their devices: the id of a device, or nothing if the rank has not chosen yet.
type Id = Vec<u8>;

impl DeviceRequest {
    /// Checks whether this process can have a device backend, without opening the device. The error says why not.
    pub(in crate::communicator) fn check(&self, config: &Config) -> std::result::Result<(), String> {
        device::check_driver()?;
        match self.choice {
            DeviceChoice::Local => device::check_ordinal(0)?,
            DeviceChoice::Ordinal(ordinal) => device::check_ordinal(ordinal)?,
            DeviceChoice::Context(_) => {}
        }
        device::library(config.nccl_library.as_ref()).map(drop)
    }
}

impl Communicator {
    /// Makes the device backend of a communicator that an admission has made. [`DeviceChoice::Local`] takes a device of
    /// this host that no other rank has.
    ///
    /// # Errors
    ///
    /// `NoDevice` on every rank if the device backend cannot be made; the errors of the host backend.
    pub(in crate::communicator) fn connect_device_of_grown(&self, choice: &DeviceChoice, deadline: &Deadline) -> Result<()> {
        let own = match choice {
            DeviceChoice::Local => Id::new(),
            DeviceChoice::Ordinal(ordinal) => device::uuid(*ordinal).unwrap_or_default().to_vec(),
            DeviceChoice::Context(context) => device::uuid(context.ordinal()).unwrap_or_default().to_vec(),
        };
        let ids = self.exchange(&own, deadline)?;
        let free = matches!(choice, DeviceChoice::Local).then(|| self.free_device(&ids)).flatten();
        let choice = free.map_or_else(|| choice.clone(), DeviceChoice::Ordinal);
        self.connect_device(&DeviceRequest { choice, required: true }, deadline)
    }

    /// Returns a device that no rank has, if there is one. Several newcomers of a host take different devices.
    fn free_device(&self, ids: &[Id]) -> Option<usize> {
        let peers = self.peers();
        let is_before = |rank: &usize| ids[*rank].is_empty() && peers[*rank].host == peers[self.rank()].host;
        let before = (0..self.rank()).filter(is_before).count();
        let devices: Vec<_> = (0..device::count().ok()?).map(device::uuid).collect();
        free(&devices, ids).nth(before)
    }
}

/// Returns the numbers of the devices of this process that no rank has.
fn free(devices: &[Option<[u8; 16]>], ids: &[Id]) -> impl Iterator<Item = usize> {
    let is_free = |device: &Option<[u8; 16]>| device.is_some_and(|device| ids.iter().all(|id| *id != device));
    devices.iter().enumerate().filter(move |(_, device)| is_free(device)).map(|(ordinal, _)| ordinal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_a_rank_has_are_not_free() {
        let devices: Vec<Option<[u8; 16]>> = vec![Some([1; 16]), Some([2; 16]), None, Some([3; 16])];
        let free_of = |ids: &[Id]| free(&devices, ids).collect::<Vec<_>>();
        assert_eq!(free_of(&[]), [0, 1, 3]);
        assert_eq!(free_of(&[vec![2; 16], Id::new(), vec![9; 16]]), [0, 3]);
        assert_eq!(free_of(&[vec![1; 16], vec![2; 16], vec![3; 16]]), [0_usize; 0]);
        // Another release may send an id of another length.
        assert_eq!(free_of(&[vec![1; 15]]), [0, 1, 3]);
    }
}
