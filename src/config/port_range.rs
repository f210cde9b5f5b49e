//! A range of ports for a rank's listeners.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::random::Random;
use crate::error::{Error, Result};

/// The ports on which a rank may listen; see [`Config::port_range`](crate::Config::port_range).
///
/// ```
/// use collectives::{Config, network::PortRange};
///
/// let mut config = Config::default();
/// config.port_range = Some(PortRange::new(41_000, 41_099)?);
/// assert_eq!(config.port_range, Some("41000:41099".parse()?));
/// # Ok::<(), collectives::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PortRange {
    low: u16,
    high: u16,
}

/// The error of a listener for which a range has no free port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("all ports from {} to {} are in use at {at}", range.low, range.high)]
struct Exhausted {
    range: PortRange,
    at: IpAddr,
}

impl PortRange {
    /// Returns the range from `low` to `high`. It contains both.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if `low` is 0 or larger than `high`.
    pub fn new(low: u16, high: u16) -> Result<Self> {
        if low == 0 || low > high {
            let reason = "expected LOW:HIGH, two ports from 1 to 65535 of which the first is not larger than the second";
            return Err(Error::config(format!("port range {low}:{high}"), reason));
        }
        Ok(Self { low, high })
    }

    /// Returns the first port.
    #[must_use]
    pub fn low(self) -> u16 {
        self.low
    }

    /// Returns the last port.
    #[must_use]
    pub fn high(self) -> u16 {
        self.high
    }

    /// Calls `listen` with `address`, or, if there is a range, with this address and one port of the range after the
    /// other, until a port is free. Begins at a random port, so that ranks of one host seldom try the same ports.
    pub(crate) fn listen<T>(
        range: Option<Self>,
        address: SocketAddr,
        mut listen: impl FnMut(SocketAddr) -> io::Result<T>,
    ) -> io::Result<T> {
        let Some(range) = range else { return listen(address) };
        let count = usize::from(range.high - range.low) + 1;
        let first = Random(seed()).below(count);
        for number in 0..count {
            let mut address = address;
            address.set_port(range.low + ((first + number) % count) as u16);
            match listen(address) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                outcome => return outcome,
            }
        }
        Err(io::Error::new(io::ErrorKind::AddrInUse, Exhausted { range, at: address.ip() }))
    }

    /// Returns the error of a rank that could not listen while it was `doing` something.
    pub(crate) fn error(doing: impl Into<String>, error: io::Error) -> Error {
        let exhausted = error.get_ref().and_then(|inner| inner.downcast_ref::<Exhausted>()).copied();
        exhausted.map_or_else(|| Error::io(doing, error), |exhausted| exhausted.to_error())
    }

    /// Returns the error that a listener failed with if a range had no free port for it.
    pub(crate) fn exhausted(error: &io::Error) -> Option<Error> {
        error.get_ref()?.downcast_ref::<Exhausted>().map(|exhausted| exhausted.to_error())
    }
}

impl Exhausted {
    fn to_error(self) -> Error {
        let needs = "a rank needs one port for the job, and one for each of its communicators that uses TCP";
        let what = format!("COLLECTIVES_PORT_RANGE={} (or Config::port_range)", self.range);
        Error::config(what, format!("{self}; {needs}: choose a larger range, or end the programs that use these ports"))
    }
}

/// Returns a different number at each call, and in each process.
fn seed() -> u64 {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    u64::from(std::process::id()) << 32 | CALLS.fetch_add(1, Ordering::Relaxed)
}

impl FromStr for PortRange {
    type Err = Error;

    /// Parses `LOW:HIGH`.
    fn from_str(text: &str) -> Result<Self> {
        let ports = text.split_once(':').and_then(|(low, high)| Some((low.trim().parse().ok()?, high.trim().parse().ok()?)));
        ports.map_or_else(
            || Err(Error::config(format!("port range {text:?}"), "expected LOW:HIGH, two ports from 1 to 65535, such as 41000:41099")),
            |(low, high)| Self::new(low, high),
        )
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.low, self.high)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails says where")]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

    #[test]
    fn a_range_is_two_ports() {
        let range: PortRange = "41000:41099".parse().unwrap();
        assert_eq!((range.low(), range.high(), range.to_string().as_str()), (41_000, 41_099, "41000:41099"));
        assert_eq!("1:65535".parse::<PortRange>().unwrap(), PortRange::new(1, 65_535).unwrap());
        assert_eq!("7:7".parse::<PortRange>().unwrap().high(), 7);
        for wrong in ["", ":", "1", "1:", ":2", "0:5", "5:4", "1:65536", "-1:3", "1-3", "1:2:3", "a:b", "1,2"] {
            let error = wrong.parse::<PortRange>().unwrap_err().to_string();
            assert!(error.contains("LOW:HIGH"), "{wrong}: {error}");
        }
    }

    #[test]
    fn every_port_is_tried_once_until_one_is_free() {
        let range = Some(PortRange::new(65_530, 65_535).unwrap());
        let in_use = || io::Error::from(io::ErrorKind::AddrInUse);
        let mut tried = Vec::new();
        let error = PortRange::listen(range, ADDRESS, |address| -> io::Result<()> {
            tried.push(address.port());
            Err(in_use())
        });
        let error = error.unwrap_err();
        assert_eq!(tried.len(), 6);
        assert_eq!(tried.into_iter().collect::<BTreeSet<_>>(), (65_530..=65_535).collect());
        assert!(PortRange::exhausted(&error).is_some());
        let said = PortRange::error("listening", error).to_string();
        assert!(said.contains("COLLECTIVES_PORT_RANGE=65530:65535") && said.contains("in use at 127.0.0.1"), "{said}");
        let only = PortRange::listen(range, ADDRESS, |address| if address.port() == 65_533 { Ok(address) } else { Err(in_use()) });
        assert_eq!(only.unwrap().port(), 65_533);
    }

    #[test]
    fn other_errors_end_the_search_and_stay_as_they_are() {
        let range = Some(PortRange::new(80, 90).unwrap());
        let mut count = 0;
        let denied = PortRange::listen(range, ADDRESS, |_| -> io::Result<()> {
            count += 1;
            Err(io::Error::from_raw_os_error(libc::EACCES))
        });
        let denied = denied.unwrap_err();
        assert!(count == 1 && PortRange::exhausted(&denied).is_none());
        assert!(matches!(PortRange::error("listening", denied), Error::Io { .. }));
        // Without a range, the system chooses, and a port in use is an ordinary error.
        let error = PortRange::listen(None, ADDRESS, |address| -> io::Result<()> {
            assert_eq!(address.port(), 0);
            Err(in_use())
        });
        assert!(PortRange::exhausted(&error.unwrap_err()).is_none());

        fn in_use() -> io::Error {
            io::ErrorKind::AddrInUse.into()
        }
    }
}
