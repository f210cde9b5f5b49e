//! What must hold whatever a host's leader says of its shared memory.

use std::io;
use std::time::Duration;

use super::delivery::{Goods, Undelivered};
use super::layout::{Layout, MAX_RANKS};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::host::bootstrap::Exchange;

/// Two ranks' blobs in each of two rounds.
struct Scripted<'a>(Vec<Vec<&'a [u8]>>);

impl Exchange for Scripted<'_> {
    fn all_gather(&mut self, _mine: &[u8], _deadline: &Deadline) -> Result<Vec<Vec<u8>>> {
        let round = if self.0.is_empty() { Vec::new() } else { self.0.remove(0) };
        Ok(round.into_iter().map(<[u8]>::to_vec).collect())
    }
}

/// Any bytes as the leader's word on where its region is to be had, and as its word on how that went: nobody gets anything, and is told why.
pub fn shared_memory_delivery(data: &[u8]) {
    let half = data.first().map_or(0, |length| usize::from(*length)).min(data.len().saturating_sub(1));
    let (blob, verdict) = data.get(1..).unwrap_or_default().split_at(half);
    // Sockets of others must not be found by chance.
    let blob = if let Some((&1, name)) = blob.split_first() { [b"\x01collectives-nobody-", name].concat() } else { blob.to_vec() };
    let mut exchange = Scripted(vec![vec![&blob, &[]], vec![verdict, &[]]]);
    let make = || -> io::Result<_> { Err(io::ErrorKind::Unsupported.into()) };
    let goods = Goods { name: "a region".to_owned(), make: &make, enter: &|_| Ok(()) };
    match goods.follow(&mut exchange, 0, &Deadline::after(Duration::from_millis(200))) {
        Ok(()) => panic!("a region was delivered by nobody"),
        Err(Undelivered::Here(error)) => assert!(error.to_string().contains("rank 0"), "{error}"),
        Err(Undelivered::There(rank, _)) => assert_eq!(rank, 0),
        Err(Undelivered::Exchange(error)) => panic!("the exchange did not fail: {error}"),
    }
}

/// Any number as a number of ranks: none, or a layout in which the last rank's parts lie within the region, in order.
pub fn shared_memory_layout(data: &[u8]) {
    for ranks in data.as_chunks::<2>().0.iter().map(|bytes| usize::from(u16::from_le_bytes(*bytes))) {
        let Some(layout) = Layout::new(ranks) else {
            assert!(ranks == 0 || ranks > MAX_RANKS);
            continue;
        };
        let last = ranks - 1;
        let starts = [layout.member(0), layout.lane(0, 0), layout.slot(0, 0), layout.ring(0, 0, 0)];
        let ends = [layout.member(last), layout.lane(last, 1), layout.slot(last, 1) + layout.slot_bytes()];
        assert!(ends.iter().zip(&starts[1..]).all(|(end, start)| end <= start), "{ranks} ranks");
        assert!(layout.ring(last, last, 1) + layout.ring_bytes() <= layout.bytes && layout.ring_bytes().is_power_of_two());
    }
}
