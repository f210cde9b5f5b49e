//! Rendezvous URLs: `env://`, `tcp://` and `file://`.

use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::config::PortRange;
use crate::error::{Error, Result};

/// The port of a `tcp://` URL without one, and of a launcher that names none.
pub(crate) const DEFAULT_PORT: u16 = 29500;

/// The place where ranks meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Method {
    /// The store that the launcher's variables name.
    Env,
    /// A store that rank 0 serves.
    Tcp {
        /// A name or an address, IPv6 without brackets.
        host: String,
        /// The port.
        port: u16,
    },
    /// A file that all ranks can access.
    File {
        /// Its absolute path.
        path: PathBuf,
    },
}

/// A parsed URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rendezvous {
    /// The place where ranks meet.
    pub(crate) method: Method,
    /// This process's rank, if the URL gives it.
    pub(crate) rank: Option<usize>,
    /// The number of ranks, if the URL gives it.
    pub(crate) world_size: Option<usize>,
    /// How long to wait for the other ranks, if the URL gives it.
    pub(crate) timeout: Option<Duration>,
    /// The ports at which this process may serve a store whose port is not given. A URL cannot give them.
    pub(crate) ports: Option<PortRange>,
}

impl Rendezvous {
    /// Returns the rendezvous of `env://`, by the launcher's variables.
    pub(crate) fn env() -> Self {
        Self { method: Method::Env, rank: None, world_size: None, timeout: None, ports: None }
    }
}

impl FromStr for Rendezvous {
    type Err = Error;

    fn from_str(url: &str) -> Result<Self> {
        let wrong = |reason: String| Error::config(format!("rendezvous URL {url:?}"), reason);
        let (scheme, rest) = url
            .split_once("://")
            .ok_or_else(|| wrong("expected env://, tcp://host:port?rank=R&world_size=N or file:///path?rank=R&world_size=N".to_owned()))?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let method = match scheme {
            "env" => env(place),
            "tcp" => tcp(place),
            "file" => file(place),
            other => Err(format!("unknown scheme {other:?}; expected env, tcp or file")),
        };
        let mut rendezvous = Self { method: method.map_err(&wrong)?, ..Self::env() };
        query.split('&').filter(|part| !part.is_empty()).try_for_each(|part| rendezvous.parameter(part)).map_err(&wrong)?;
        rendezvous.check().map_err(&wrong)?;
        Ok(rendezvous)
    }
}

impl Rendezvous {
    /// Parses one `name=value` of the query.
    fn parameter(&mut self, part: &str) -> std::result::Result<(), String> {
        let (name, value) = part.split_once('=').ok_or_else(|| format!("parameter {part:?} has no value"))?;
        match name {
            "rank" => once(&mut self.rank, name, number(name, value)?),
            "world_size" => once(&mut self.world_size, name, number(name, value)?),
            "timeout" => once(&mut self.timeout, name, seconds(value)?),
            _ => Err(format!("unknown parameter {name:?}; expected rank, world_size or timeout")),
        }
    }

    /// Checks the parts of the URL against each other.
    fn check(&self) -> std::result::Result<(), String> {
        // A rank outside the world is refused later, when the others can be notified: see the exchange over the
        // store.
        if self.world_size == Some(0) { Err("world_size=0, but a job has at least one rank".to_owned()) } else { Ok(()) }
    }
}

/// Parses the rest of `env://`, which must be empty.
fn env(place: &str) -> std::result::Result<Method, String> {
    if place.is_empty() { Ok(Method::Env) } else { Err(format!("unexpected {place:?} after env://")) }
}

/// Parses `host:port`, `host`, or either with IPv6 in brackets.
fn tcp(place: &str) -> std::result::Result<Method, String> {
    let place = place.strip_suffix('/').unwrap_or(place);
    let (host, port) = match place.strip_prefix('[') {
        Some(rest) => {
            let (address, behind) = rest.split_once(']').ok_or_else(|| format!("{place:?} has no closing bracket"))?;
            if !is_ipv6(address) {
                return Err(format!("{address:?} in brackets is not an IPv6 address"));
            }
            let port = match behind.strip_prefix(':') {
                Some(port) => Some(port),
                None if behind.is_empty() => None,
                None => return Err(format!("{behind:?} follows the bracket, but a colon and a port are expected")),
            };
            (address, port)
        }
        None if place.matches(':').count() > 1 => return Err(format!("{place:?}: write an IPv6 address in brackets, as [::1]:29500")),
        None => place.split_once(':').map_or((place, None), |(host, port)| (host, Some(port))),
    };
    if !is_host(host) {
        return Err(format!("{host:?} is not a host name"));
    }
    let port = port.map_or(Ok(DEFAULT_PORT), |port| self::port(port).ok_or_else(|| format!("{port:?} is not a port from 0 to 65535")))?;
    Ok(Method::Tcp { host: host.to_owned(), port })
}

/// Whether a text can be a host's name or address.
pub(super) fn is_host(text: &str) -> bool {
    !text.is_empty() && !text.contains(|letter: char| letter.is_whitespace() || "/@#".contains(letter))
}

/// Whether a text is an IPv6 address, optionally followed by a percent sign and an interface name.
fn is_ipv6(text: &str) -> bool {
    let (address, zone) = text.split_once('%').map_or((text, None), |(address, zone)| (address, Some(zone)));
    address.parse::<Ipv6Addr>().is_ok() && zone != Some("")
}

/// Parses `/path`: a file of this host or of a shared file system. The path is used as written.
fn file(place: &str) -> std::result::Result<Method, String> {
    let path = place.strip_prefix("localhost").filter(|path| path.starts_with('/')).unwrap_or(place);
    if !path.starts_with('/') {
        return Err(format!("{place:?} is not an absolute path; write file:///path"));
    }
    if path.ends_with('/') || path.contains('\0') {
        return Err(format!("{path:?} is not the path of a file"));
    }
    Ok(Method::File { path: PathBuf::from(path) })
}

/// Parses a port of decimal digits.
pub(super) fn port(text: &str) -> Option<u16> {
    digits(text)?.parse().ok()
}

/// Returns the text if it is all decimal digits. The number parser alone would accept a sign.
pub(super) fn digits(text: &str) -> Option<&str> {
    (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())).then_some(text)
}

/// Parses a rank or a number of ranks.
fn number(name: &str, value: &str) -> std::result::Result<usize, String> {
    digits(value).and_then(|value| value.parse().ok()).ok_or_else(|| format!("{name}={value:?} is not a whole number"))
}

/// Parses a positive number of seconds, with or without a fraction.
fn seconds(value: &str) -> std::result::Result<Duration, String> {
    let seconds = value.parse().ok().filter(|&seconds: &f64| seconds > 0.0).and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.filter(|seconds| !seconds.is_zero()).ok_or_else(|| format!("timeout={value:?} is not a positive number of seconds"))
}

/// Fills a slot that may be filled once.
fn once<T>(slot: &mut Option<T>, name: &str, value: T) -> std::result::Result<(), String> {
    if slot.replace(value).is_some() { Err(format!("{name} is given twice")) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> Method {
        Method::Tcp { host: host.to_owned(), port }
    }

    #[test]
    fn each_scheme_is_read() {
        let parse = |url: &str| url.parse::<Rendezvous>().unwrap();
        assert_eq!(parse("env://"), Rendezvous::env());
        assert_eq!(parse("env://?rank=1&world_size=2"), Rendezvous { rank: Some(1), world_size: Some(2), ..Rendezvous::env() });
        let full = parse("tcp://node-1.example:1234?rank=3&world_size=4&timeout=2.5");
        assert_eq!(full.method, tcp("node-1.example", 1234));
        assert_eq!((full.rank, full.world_size, full.timeout), (Some(3), Some(4), Some(Duration::from_millis(2500))));
        assert_eq!(parse("tcp://10.0.0.1").method, tcp("10.0.0.1", 29500));
        assert_eq!(parse("tcp://10.0.0.1:0/?rank=0").method, tcp("10.0.0.1", 0));
        assert_eq!(parse("tcp://[::1]:99").method, tcp("::1", 99));
        assert_eq!(parse("tcp://[fe80::1%eth0]").method, tcp("fe80::1%eth0", 29500));
        assert_eq!(parse("file:///tmp/a b?world_size=1&rank=0").method, Method::File { path: "/tmp/a b".into() });
        assert_eq!(parse("file://localhost/x").method, Method::File { path: "/x".into() });
    }

    #[test]
    fn what_is_wrong_is_quoted() {
        let cases = [
            ("", "expected env://"),
            ("localhost:29500", "expected env://"),
            ("http://a:1", "\"http\""),
            ("env://host", "\"host\""),
            ("tcp://", "\"\" is not a host"),
            ("tcp://:5", "\"\" is not a host"),
            ("tcp://a b:5", "\"a b\""),
            ("tcp://u@h:5", "\"u@h\""),
            ("tcp://h:", "\"\" is not a port"),
            ("tcp://h:+5", "\"+5\""),
            ("tcp://h:65536", "\"65536\""),
            ("tcp://h:http", "\"http\""),
            ("tcp://::1:29500", "brackets"),
            ("tcp://[::1:29500", "closing bracket"),
            ("tcp://[::g]:1", "\"::g\""),
            ("tcp://[::1]29500", "\"29500\""),
            ("tcp://[::1%]:1", "\"::1%\""),
            ("tcp://h?rank", "\"rank\" has no value"),
            ("tcp://h?rank=-1", "rank=\"-1\""),
            ("tcp://h?rank=+1", "rank=\"+1\""),
            ("tcp://h?rank=99999999999999999999999", "rank=\"9999"),
            ("tcp://h?world_size=x", "world_size=\"x\""),
            ("tcp://h?world_size=0", "world_size=0"),
            ("tcp://h?rank=1&rank=1", "twice"),
            ("tcp://h?ranks=1", "\"ranks\""),
            ("tcp://h?timeout=0", "timeout=\"0\""),
            ("tcp://h?timeout=NaN", "timeout=\"NaN\""),
            ("tcp://h?timeout=inf", "timeout=\"inf\""),
            ("tcp://h?timeout=1e300", "timeout=\"1e300\""),
            ("file://relative/path", "\"relative/path\""),
            ("file://", "not an absolute path"),
            ("file:///", "not the path of a file"),
        ];
        for (url, quoted) in cases {
            let error = url.parse::<Rendezvous>().unwrap_err();
            assert!(matches!(error, Error::Config { .. }), "{url}: {error:?}");
            assert!(error.to_string().contains(quoted), "{url}: {error}");
        }
    }
}
