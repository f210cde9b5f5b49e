//! Finds the network interfaces of this host, and chooses the address at which a rank listens.

#![expect(unsafe_code, reason = "the C library's list of addresses has no safe wrapper")]

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

use crate::config::{Config, Interfaces};
use crate::error::{Error, Result};

/// An interface of this host, as far as this process sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Interface {
    name: String,
    is_up: bool,
    addresses: Vec<IpAddr>,
}

/// Returns the address on which this rank listens for its peers: the one that `config` names, or else one of the
/// interfaces that `config` selects, or else `from`, by which this rank reaches the job's store, or else the loopback
/// interface's.
///
/// # Errors
///
/// - `Config` if no interface fits, or if the address that `config` names is not one of theirs.
/// - `Io` if the system does not list its interfaces.
pub(crate) fn listen_address(config: &Config, from: Option<IpAddr>) -> Result<IpAddr> {
    let Some(interfaces) = &config.interfaces else {
        return Ok(config.listen_address.or(from).unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)));
    };
    let there = list().map_err(|error| Error::io("listing the network interfaces of this host", error))?;
    match config.listen_address {
        Some(address) => check(interfaces, &there, address),
        None => choose(interfaces, &there, from).ok_or_else(|| no_interface(interfaces, &there)),
    }
}

/// Names the setting in errors.
fn setting(interfaces: &Interfaces) -> String {
    format!("COLLECTIVES_SOCKET_IFNAME={interfaces} (or Config::interfaces)")
}

/// Returns `address` if it belongs to one of the interfaces.
fn check(interfaces: &Interfaces, there: &[Interface], address: IpAddr) -> Result<IpAddr> {
    let owner = there.iter().find(|interface| interface.addresses.contains(&address));
    if owner.is_some_and(|owner| interfaces.place(&owner.name).is_some()) {
        return Ok(address);
    }
    let reason = format!(
        "it does not select the interface of the listen address {address} (COLLECTIVES_LISTEN_ADDRESS or Config::listen_address); set \
         only one of the two. This host has {}",
        in_words(there)
    );
    Err(Error::config(setting(interfaces), reason))
}

/// Returns the best address of the interfaces that are up: of the first name in the list; not loopback; `from`; of the
/// same family as `from`, or else IPv4; not link-local; as the system lists them.
fn choose(interfaces: &Interfaces, there: &[Interface], from: Option<IpAddr>) -> Option<IpAddr> {
    let wants_v4 = from.is_none_or(|from| from.is_ipv4());
    let up = there.iter().filter(|interface| interface.is_up);
    let places = up.filter_map(|interface| Some((interfaces.place(&interface.name)?, interface)));
    let addresses = places.flat_map(|(place, interface)| interface.addresses.iter().map(move |address| (place, *address)));
    let rank = |(place, address): &(usize, IpAddr)| {
        let is_local = matches!(address, IpAddr::V6(address) if address.is_unicast_link_local());
        (*place, address.is_loopback(), Some(*address) != from, address.is_ipv4() != wants_v4, is_local)
    };
    addresses.min_by_key(rank).map(|(_, address)| address)
}

/// Returns the error for a list that selects no interface with an address.
fn no_interface(interfaces: &Interfaces, there: &[Interface]) -> Error {
    let reason = format!("it selects no interface that is up and has an address; this host has {}", in_words(there));
    Error::config(setting(interfaces), reason)
}

/// Lists interfaces with their addresses.
fn in_words(there: &[Interface]) -> String {
    let words = |interface: &Interface| {
        let mut about: Vec<String> = interface.addresses.iter().map(IpAddr::to_string).collect();
        if about.is_empty() {
            about.push("no address".to_owned());
        }
        if !interface.is_up {
            about.push("down".to_owned());
        }
        format!("{} ({})", interface.name, about.join(", "))
    };
    if there.is_empty() { "no interfaces".to_owned() } else { there.iter().map(words).collect::<Vec<_>>().join(", ") }
}

/// A list of the C library, which is freed when this value is dropped.
struct Entries(*mut libc::ifaddrs);

impl Drop for Entries {
    fn drop(&mut self) {
        // SAFETY: the list came from `getifaddrs`, and no reference into it is left: `list` copies everything.
        unsafe { libc::freeifaddrs(self.0) };
    }
}

/// Returns the interfaces of this network namespace.
fn list() -> io::Result<Vec<Interface>> {
    let mut first = ptr::null_mut();
    // SAFETY: the call writes one pointer.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let entries = Entries(first);
    let mut interfaces: Vec<Interface> = Vec::new();
    let mut next = entries.0;
    // SAFETY: each pointer is null or leads to an entry of the list, which lives as long as `entries`.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: the name of an entry is a C string, which lives as long as the list.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        let at = interfaces.iter().position(|interface| interface.name == name).unwrap_or_else(|| {
            let is_up = entry.ifa_flags & libc::IFF_UP as libc::c_uint != 0;
            interfaces.push(Interface { name, is_up, addresses: Vec::new() });
            interfaces.len() - 1
        });
        interfaces[at].addresses.extend(address(entry.ifa_addr));
    }
    Ok(interfaces)
}

/// Returns the IP address that a socket address holds, if it holds one.
fn address(socket_address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the callers pass null, or the address of an entry of the list, which begins with its family.
    let family = unsafe { socket_address.as_ref() }?.sa_family;
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: an address of this family has this form. It may lie unaligned.
            let address = unsafe { socket_address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let address = unsafe { socket_address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(address.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails says where")]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn host() -> Vec<Interface> {
        let interface = |name: &str, is_up, addresses: &[&str]| Interface {
            name: name.to_owned(),
            is_up,
            addresses: addresses.iter().map(|address| ip(address)).collect(),
        };
        vec![
            interface("lo", true, &["127.0.0.1", "::1"]),
            interface("eth0", true, &["10.0.0.7", "fe80::7", "fd00::7"]),
            interface("eth1", true, &["10.1.0.7", "10.2.0.7"]),
            interface("eth2", false, &["10.3.0.7"]),
            interface("tun0", true, &[]),
        ]
    }

    #[test]
    fn the_first_name_that_fits_decides_and_then_the_address_towards_the_store() {
        let chosen = |text: &str, from: Option<&str>| choose(&text.parse().unwrap(), &host(), from.map(ip)).map(|ip| ip.to_string());
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(chosen("eth", None), some("10.0.0.7"));
        assert_eq!(chosen("eth", Some("10.2.0.7")), some("10.2.0.7"));
        assert_eq!(chosen("eth0,eth1", Some("10.2.0.7")), some("10.0.0.7"));
        assert_eq!(chosen("eth1,eth0", None), some("10.1.0.7"));
        assert_eq!(chosen("=eth", None), None);
        assert_eq!(chosen("eth0", Some("fd00::9")), some("fd00::7"));
        assert_eq!(chosen("eth1", Some("fd00::9")), some("10.1.0.7"));
        assert_eq!(chosen("^eth0", Some("127.0.0.1")), some("10.1.0.7"));
        assert_eq!(chosen("^eth", Some("10.0.0.7")), some("127.0.0.1"));
        assert_eq!(chosen("lo", Some("10.0.0.7")), some("127.0.0.1"));
        assert_eq!([chosen("eth2", None), chosen("tun", None), chosen("ib", None)], [None, None, None]);
    }

    #[test]
    fn errors_list_what_there_is() {
        let ib = "ib0".parse().unwrap();
        let said = no_interface(&ib, &host()).to_string();
        for words in ["COLLECTIVES_SOCKET_IFNAME=ib0", "lo (127.0.0.1, ::1)", "eth2 (10.3.0.7, down)", "tun0 (no address)"] {
            assert!(said.contains(words), "{said}");
        }
        assert!(no_interface(&ib, &[]).to_string().contains("no interfaces"));
        let eth = "eth".parse().unwrap();
        assert_eq!(check(&eth, &host(), ip("10.2.0.7")).unwrap(), ip("10.2.0.7"));
        for address in ["127.0.0.1", "10.9.0.1"] {
            let error = check(&eth, &host(), ip(address)).unwrap_err();
            assert!(matches!(error, Error::Config { .. }) && error.to_string().contains(address), "{error}");
        }
    }

    #[test]
    fn this_host_has_a_loopback_interface() {
        let there = list().unwrap();
        let loopback = there.iter().find(|interface| interface.name == "lo").unwrap();
        assert!(loopback.is_up && loopback.addresses.contains(&ip("127.0.0.1")), "{there:?}");
        let config = Config { interfaces: Some("=lo".parse().unwrap()), ..Config::default() };
        assert_eq!(listen_address(&config, Some(ip("10.99.0.1"))).unwrap(), ip("127.0.0.1"));
        let config = Config { interfaces: Some("nothing-such".parse().unwrap()), ..config };
        assert!(matches!(listen_address(&config, None).unwrap_err(), Error::Config { .. }));
    }

    #[test]
    fn without_names_the_address_is_the_given_one_or_the_one_towards_the_store() {
        let config = Config::default();
        assert_eq!(listen_address(&config, None).unwrap(), ip("127.0.0.1"));
        assert_eq!(listen_address(&config, Some(ip("10.0.0.1"))).unwrap(), ip("10.0.0.1"));
        let config = Config { listen_address: Some(ip("10.0.0.2")), ..config };
        assert_eq!(listen_address(&config, Some(ip("10.0.0.1"))).unwrap(), ip("10.0.0.2"));
    }
}
