//! Finds out whether this host has a given address, and on which interface.
//!
//! A link-local address (`fe80::…`) is meaningless without the interface, which each host numbers for itself. So ranks
//! exchange addresses without the number. A rank looks up the interface of its own address, and uses the same one for
//! its peers' addresses.

use std::fs;
use std::net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket};

/// Returns the socket address to listen on at this address of this host.
pub(crate) fn to_listen_on(ip: IpAddr) -> SocketAddr {
    seen_from(ip, SocketAddr::new(ip, 0))
}

/// Returns a peer's address in the form that a rank with the address `own` must use.
pub(crate) fn seen_from(own: IpAddr, peer: SocketAddr) -> SocketAddr {
    let SocketAddr::V6(address) = peer else { return peer };
    if !address.ip().is_unicast_link_local() {
        return peer;
    }
    let scope = match own {
        IpAddr::V6(own) if own.is_unicast_link_local() => scope_of(&own.octets()),
        _ => None,
    };
    SocketAddrV6::new(*address.ip(), address.port(), 0, scope.unwrap_or(0)).into()
}

/// Whether an address is one of this host. Nothing is sent: the system does not let a process bind another host's
/// address. (If `net.ipv4.ip_nonlocal_bind` is set, it does, and every address counts as this host's.)
pub(super) fn is_own(address: SocketAddr) -> bool {
    let mut address = address;
    address.set_port(0);
    address.ip().is_loopback() || UdpSocket::bind(address).is_ok()
}

/// Returns the number of the interface that has this address; of several, the first.
fn scope_of(ip: &[u8; 16]) -> Option<u32> {
    scope_in(&fs::read_to_string("/proc/net/if_inet6").ok()?, ip)
}

/// Looks up the same number in the kernel's table. Each line has the address, the interface and four more fields.
fn scope_in(table: &str, ip: &[u8; 16]) -> Option<u32> {
    let wanted: String = ip.iter().map(|byte| format!("{byte:02x}")).collect();
    let line = table.lines().find(|line| line.starts_with(&wanted))?;
    u32::from_str_radix(line.split_whitespace().nth(1)?, 16).ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails says where")]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_a_link_is_found_at_its_interface() {
        let table = "00000000000000000000000000000001 01 80 10 80       lo\n\
                     fe8000000000000000000000000000a1 1f 40 20 80     eth0\n";
        let ip = |text: &str| text.parse::<std::net::Ipv6Addr>().unwrap().octets();
        assert_eq!(scope_in(table, &ip("fe80::a1")), Some(31));
        assert_eq!([scope_in(table, &ip("fe80::a2")), scope_in("", &ip("fe80::a1")), scope_in("fe80", &ip("fe80::a1"))], [None; 3]);
    }

    #[test]
    fn other_addresses_need_no_interface() {
        for peer in ["10.0.0.1:7", "[fd00::1]:7", "[::1]:7"] {
            let peer = peer.parse().unwrap();
            assert_eq!(seen_from("fe80::1".parse().unwrap(), peer), peer);
        }
        // Another host's interface number is meaningless here.
        let peer = "[fe80::1%7]:9".parse().unwrap();
        assert_eq!(seen_from("10.0.0.1".parse().unwrap(), peer).to_string(), "[fe80::1]:9");
    }

    #[test]
    fn own_addresses_are_told_from_others() {
        assert!(is_own("127.0.0.1:9".parse().unwrap()) && is_own("127.3.2.1:9".parse().unwrap()));
        // This address is reserved for documentation: no host has it.
        let nonlocal = fs::read_to_string("/proc/sys/net/ipv4/ip_nonlocal_bind").unwrap_or_default();
        assert!(nonlocal.trim() == "1" || !is_own("192.0.2.1:9".parse().unwrap()));
    }
}
