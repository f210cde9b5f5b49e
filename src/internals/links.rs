//! Byte streams between two ranks, driven as hard as they go.

use std::io::{self, IoSlice};
use std::net::Ipv4Addr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::exchanging;
use crate::Result;
use crate::deadline::Deadline;
use crate::error::Error;
use crate::host::link::ByteLink;
use crate::host::net;
use crate::host::net::mesh::Mesh;
use crate::host::shm::{Channel, Group};

/// How long one frame, or opening a link, may take.
const LIMIT: Duration = Duration::from_secs(20);
/// Fruitless tries between two looks at the clock.
const TRIES: u32 = 1024;

/// One end of a link between two ranks.
pub struct Link {
    stream: Box<dyn ByteLink + Send>,
    /// Keeps the other end from taking this rank for gone.
    _group: Option<Mutex<Group>>,
}

impl Link {
    /// Both ends of a pair of rings in shared memory.
    ///
    /// # Errors
    ///
    /// Where the region cannot be made or mapped.
    pub fn rings() -> Result<Vec<Self>> {
        exchanging(2, |rank, exchange| {
            let mut group = Group::establish(exchange, &[0, 1], rank, 2, None, &Deadline::after(LIMIT))?;
            let link = group.link(1 - rank, Channel::PointToPoint).ok_or_else(|| Error::argument("link", "taken twice"))?;
            Ok(Self { stream: Box::new(link), _group: Some(Mutex::new(group)) })
        })
    }

    /// Both ends of a TCP connection over the loopback interface, opened and greeted as between hosts.
    ///
    /// # Errors
    ///
    /// Where a rank cannot listen or connect.
    pub fn tcp() -> Result<Vec<Self>> {
        let listen = Ipv4Addr::LOCALHOST.into();
        let meshes =
            exchanging(2, |rank, exchange| Mesh::establish(exchange, rank, 2, true, listen, [7; 16], 0, None, &Deadline::after(LIMIT)))?;
        let deadline = Deadline::after(LIMIT);
        let stopped = |stop: crate::host::abort_reason::Interrupted| stop.to_error("opening a link", &Deadline::after(LIMIT), &[]);
        let mut connector = meshes[0].connecting(net::Channel::PointToPoint, 1).map_err(stopped)?;
        let (mut near, mut far) = (None, None);
        while !deadline.has_passed() {
            if near.is_none() {
                near = connector.advance().map_err(|error| stopped(error.into()))?;
            }
            far = far.or_else(|| meshes[1].accepted(net::Channel::PointToPoint).pop());
            if let (Some(near), Some((_, far))) = (near.take_if(|_| far.is_some()), far.take()) {
                return Ok(vec![Self { stream: Box::new(near), _group: None }, Self { stream: Box::new(far), _group: None }]);
            }
            std::thread::yield_now();
        }
        Err(Error::Timeout { doing: "opening a link".to_owned(), elapsed: LIMIT, missing: Vec::new(), arrived: Vec::new() })
    }

    /// Writes a header and what it announces, all of it.
    ///
    /// # Errors
    ///
    /// Where the other end is gone or does not read.
    pub fn write(&mut self, header: &[u8], payload: &[u8]) -> io::Result<()> {
        let mut parts = [IoSlice::new(header), IoSlice::new(payload)];
        let mut parts = &mut parts[..];
        let mut left = header.len() + payload.len();
        while left > 0 {
            let written = patiently(|| self.stream.try_write(parts))?;
            IoSlice::advance_slices(&mut parts, written);
            left -= written;
        }
        Ok(())
    }

    /// Reads until `into` is full.
    ///
    /// # Errors
    ///
    /// Where the other end is gone or does not write.
    pub fn read(&mut self, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            let read = patiently(|| self.stream.try_read(into))?;
            into = &mut into[read..];
        }
        Ok(())
    }
}

/// Tries again until something moves, giving up the core now and then.
fn patiently(mut step: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    let mut began = None;
    loop {
        for _ in 0..TRIES {
            match step() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::hint::spin_loop(),
                other => return other,
            }
        }
        if began.get_or_insert_with(Instant::now).elapsed() > LIMIT {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::yield_now();
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("descriptor", &self.stream.descriptor()).finish_non_exhaustive()
    }
}
