//! Names of network interfaces, in the syntax of `NCCL_SOCKET_IFNAME`.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// The network interfaces on which a rank may listen; see [`Config::interfaces`](crate::Config::interfaces).
///
/// The text is a list of names, separated by commas, as in `NCCL_SOCKET_IFNAME`:
///
/// | text | interfaces |
/// | --- | --- |
/// | `eth0,ib` | those whose names begin with `eth0` or `ib` |
/// | `=eth0,eth1` | those whose names are `eth0` or `eth1` |
/// | `^docker,lo` | those whose names begin neither with `docker` nor with `lo` |
/// | `^=docker0` | all except `docker0` |
///
/// ```
/// use collectives::{Config, network::Interfaces};
///
/// let mut config = Config::default();
/// config.interfaces = Some("=eth1,eth0".parse()?);
/// assert!("eth0,^lo".parse::<Interfaces>().is_err()); // a sign stands before the first name, and applies to all names
/// # Ok::<(), collectives::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Interfaces {
    names: Vec<String>,
    /// Whether the interfaces with these names are excluded.
    excluded: bool,
    /// Whether names must be equal. Otherwise, an interface's name must begin with one of `names`.
    exact: bool,
}

/// The most bytes of an interface's name that Linux allows.
const LONGEST_NAME: usize = 15;

impl Interfaces {
    /// Returns the index of the first name in the list that fits; `None` if this interface is not selected. If the list
    /// excludes names, all other interfaces have the same index.
    pub(crate) fn place(&self, interface: &str) -> Option<usize> {
        let fits = |name: &String| if self.exact { interface == name } else { interface.starts_with(name.as_str()) };
        let found = self.names.iter().position(fits);
        if self.excluded { found.is_none().then_some(0) } else { found }
    }
}

impl FromStr for Interfaces {
    type Err = Error;

    /// Parses a list of names, with `^`, `=` or `^=` before the first.
    fn from_str(text: &str) -> Result<Self> {
        let rest = text.trim();
        let (excluded, rest) = rest.strip_prefix('^').map_or((false, rest), |rest| (true, rest));
        let (exact, rest) = rest.strip_prefix('=').map_or((false, rest), |rest| (true, rest));
        let names: Vec<String> = rest.split(',').map(|name| name.trim().to_owned()).collect();
        let wrong = |name: &String| {
            let is_odd = |letter: char| letter.is_whitespace() || ['^', '=', '/'].contains(&letter);
            name.is_empty() || name.len() > LONGEST_NAME || name.chars().any(is_odd)
        };
        match names.iter().find(|name| wrong(name)) {
            None => Ok(Self { names, excluded, exact }),
            Some(name) => {
                let reason = format!(
                    "{name:?} is not the name of a network interface; expected names or beginnings of names, separated by commas. \
                     Before the first, ^ excludes the interfaces with these names, and = requires whole names; write ^= for both"
                );
                Err(Error::config(format!("interfaces {text:?}"), reason))
            }
        }
    }
}

impl fmt::Display for Interfaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let signs = if self.excluded { "^" } else { "" };
        write!(f, "{signs}{}{}", if self.exact { "=" } else { "" }, self.names.join(","))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails says where")]
mod tests {
    use super::*;

    /// Returns the places of interfaces.
    fn places(text: &str) -> Vec<Option<usize>> {
        let interfaces: Interfaces = text.parse().unwrap();
        assert_eq!(interfaces.to_string().parse::<Interfaces>().unwrap(), interfaces);
        ["lo", "eth0", "eth01", "eth1", "docker0", "ib0"].map(|name| interfaces.place(name)).to_vec()
    }

    #[test]
    fn lists_select_by_beginnings_or_whole_names() {
        let none = None;
        assert_eq!(places("eth"), [none, Some(0), Some(0), Some(0), none, none]);
        assert_eq!(places("ib, eth0"), [none, Some(1), Some(1), none, none, Some(0)]);
        assert_eq!(places("=eth0"), [none, Some(0), none, none, none, none]);
        assert_eq!(places("=eth1,eth0,ib"), [none, Some(1), none, Some(0), none, none]);
        assert_eq!(places("^docker,lo"), [none, Some(0), Some(0), Some(0), none, Some(0)]);
        assert_eq!(places("^=eth0"), [Some(0), none, Some(0), Some(0), Some(0), Some(0)]);
    }

    #[test]
    fn other_texts_are_refused() {
        for wrong in ["", " ", "^", "=", "^=", ",", "eth0,", "eth0,,ib", "eth0,^lo", "=^eth0", "eth0 eth1", "a/b", "sixteen-letters-"] {
            let error = wrong.parse::<Interfaces>().unwrap_err().to_string();
            assert!(error.contains("separated by commas"), "{wrong}: {error}");
        }
    }
}
