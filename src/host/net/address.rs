//! What a rank tells the others about where it can be reached.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::hello::{REFUSAL_TEXT_BYTES, quote};

/// A rank's place, as it is exchanged at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Address {
    /// It does not listen: whoever wants a link to it is called by it, or has other means.
    None,
    /// It listens here.
    At(SocketAddr),
    /// It should have listened and could not, for this reason. Everyone is told, so that nobody waits for it.
    Failed(String),
}

impl Address {
    /// Nothing; or a kind (4, 6), the address and the port; or a zero and a text.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Self::None => {}
            Self::At(address) => {
                match address.ip() {
                    IpAddr::V4(ip) => {
                        bytes.push(4);
                        bytes.extend_from_slice(&ip.octets());
                    }
                    IpAddr::V6(ip) => {
                        bytes.push(6);
                        bytes.extend_from_slice(&ip.octets());
                    }
                }
                bytes.extend_from_slice(&address.port().to_be_bytes());
            }
            Self::Failed(reason) => {
                bytes.push(0);
                bytes.extend_from_slice(&reason.as_bytes()[..reason.len().min(REFUSAL_TEXT_BYTES)]);
            }
        }
        bytes
    }

    /// The reverse of [`Address::to_bytes`]; the error quotes what is wrong.
    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let address = match bytes {
            [] => return Ok(Self::None),
            [0, reason @ ..] if reason.len() <= REFUSAL_TEXT_BYTES => {
                return Ok(Self::Failed(String::from_utf8_lossy(reason).into_owned()));
            }
            &[4, a, b, c, d, high, low] => SocketAddr::from((Ipv4Addr::new(a, b, c, d), u16::from_be_bytes([high, low]))),
            [6, ip @ .., high, low] => match <[u8; 16]>::try_from(ip) {
                Ok(ip) => SocketAddr::from((Ipv6Addr::from(ip), u16::from_be_bytes([*high, *low]))),
                Err(_) => return Err(format!("an address of {} bytes: {}", bytes.len(), quote(bytes))),
            },
            other => return Err(format!("an address of {} bytes: {}", other.len(), quote(other))),
        };
        if address.port() == 0 || address.ip().is_unspecified() {
            return Err(format!("the address {address}, which nobody can connect to"));
        }
        Ok(Self::At(address))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails says where")]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_wire() {
        for address in [
            Address::None,
            Address::At("10.1.2.3:65535".parse().unwrap()),
            Address::At("[fd00::1:2]:258".parse().unwrap()),
            Address::Failed("no such address".to_owned()),
            Address::Failed(String::new()),
        ] {
            assert_eq!(Address::from_bytes(&address.to_bytes()), Ok(address));
        }
        let long = Address::Failed("x".repeat(1000));
        assert_eq!(Address::from_bytes(&long.to_bytes()), Ok(Address::Failed("x".repeat(REFUSAL_TEXT_BYTES))));
    }

    #[test]
    fn malformed_addresses_are_quoted() {
        for bytes in [&b"\x04abc"[..], b"\x06abc", b"\x06", b"\x05abcdef", &[4; 8], &[6; 20], &[0; 300]] {
            let text = Address::from_bytes(bytes).expect_err("malformed");
            assert!(text.contains(&quote(bytes)), "{text}");
        }
        assert!(Address::from_bytes(&[4, 0, 0, 0, 0, 1, 1]).is_err_and(|text| text.contains("0.0.0.0:257")));
        assert!(Address::from_bytes(&[4, 127, 0, 0, 1, 0, 0]).is_err_and(|text| text.contains("127.0.0.1:0")));
        assert!(Address::from_bytes(&[6; 19]).is_ok());
    }
}
