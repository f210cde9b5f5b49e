//! A launcher's place in the job, as one word of the command line with which another launcher starts it.

use std::fmt;
use std::str::FromStr;

use crate::place::Place;

/// A host's place, and its name on the host from which the job was started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Control {
    pub(crate) node: u16,
    pub(crate) nodes: u16,
    /// The address of the first host, at which the ranks meet.
    pub(crate) address: String,
    pub(crate) port: u16,
    /// The ranks of this host, if the list of hosts gives them.
    pub(crate) ranks: Option<u16>,
    pub(crate) name: String,
}

impl Control {
    pub(crate) fn place(&self) -> Place {
        match self.nodes {
            1 => Place::Alone { address: None, port: None },
            _ => Place::Among { node: self.node, address: self.address.clone(), port: self.port },
        }
    }
}

/// Joins the fields with commas, which neither addresses nor names of hosts contain.
impl fmt::Display for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, nodes, address, port, ranks, name } = self;
        write!(f, "{node},{nodes},{address},{port},{},{name}", ranks.unwrap_or(0))
    }
}

impl FromStr for Control {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let malformed = || format!("{text:?} does not describe the place of a host in a job");
        let [node, nodes, address, port, ranks, name] = text.split(',').collect::<Vec<_>>()[..] else { return Err(malformed()) };
        let number = |text: &str| text.parse::<u16>().map_err(|_| malformed());
        let (node, nodes, port, ranks) = (number(node)?, number(nodes)?, number(port)?, number(ranks)?);
        if node >= nodes {
            return Err(malformed());
        }
        Ok(Self { node, nodes, address: address.to_owned(), port, ranks: (ranks > 0).then_some(ranks), name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_as_they_were_written() {
        for ranks in [None, Some(4)] {
            let place = Control { node: 1, nodes: 3, address: "fe80::1".into(), port: 29500, ranks, name: "me@a".into() };
            assert_eq!(place.to_string().parse(), Ok(place));
        }
        for wrong in ["", "1,2,a,3,0", "3,3,a,1,0,a", "x,3,a,1,0,a", "0,1,a,65536,0,a", "0,1,a,1,0,a,b"] {
            assert!(wrong.parse::<Control>().is_err(), "{wrong}");
        }
    }
}
