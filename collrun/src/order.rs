//! The order that a launcher sends to the launcher that it starts on another host: the folder, the command line and the
//! variables. The order is sent on standard input. None of it is on a command line, so no shell interprets it, and no
//! list of processes shows a secret.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use collectives_launch::Refused;

use crate::environment;

/// The beginning of an order. Its number changes with the format, so the order of another release is recognised.
const HEAD: &[u8] = b"collrun order 1";
/// The longest order: more than a command line and an environment can have together.
const LONGEST: usize = 16 << 20;

/// An order: the folder, the command line and the variables.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) folder: PathBuf,
    pub(crate) arguments: Vec<OsString>,
    pub(crate) variables: Vec<(OsString, OsString)>,
}

impl Order {
    /// Encodes the order as words. Each ends with a zero byte, which no word can contain.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let counts = [self.arguments.len(), self.variables.len()].map(|count| count.to_string());
        let mut words: Vec<&[u8]> = vec![HEAD, self.folder.as_os_str().as_bytes(), counts[0].as_bytes()];
        words.extend(self.arguments.iter().map(|argument| argument.as_bytes()));
        words.push(counts[1].as_bytes());
        words.extend(self.variables.iter().flat_map(|(name, value)| [name.as_bytes(), value.as_bytes()]));
        words.into_iter().flat_map(|word| word.iter().copied().chain([0])).collect()
    }

    /// Reads an order, and no byte beyond it.
    fn decode(mut byte: impl FnMut() -> io::Result<u8>) -> io::Result<Self> {
        let mut left = LONGEST;
        let mut word = || -> io::Result<Vec<u8>> {
            let mut word = Vec::new();
            loop {
                left = left.checked_sub(1).ok_or_else(|| malformed("too long"))?;
                match byte()? {
                    0 => return Ok(word),
                    byte => word.push(byte),
                }
            }
        };
        if word()? != HEAD {
            return Err(malformed("another release of collrun sent the order; install the same release on all hosts"));
        }
        let folder = PathBuf::from(OsString::from_vec(word()?));
        let count =
            |word: Vec<u8>| String::from_utf8(word).ok().and_then(|word| word.parse().ok()).ok_or_else(|| malformed("a number is missing"));
        let mut arguments = Vec::new();
        for _ in 0..count(word()?)? {
            arguments.push(OsString::from_vec(word()?));
        }
        let mut variables = Vec::new();
        for _ in 0..count(word()?)? {
            variables.push((OsString::from_vec(word()?), OsString::from_vec(word()?)));
        }
        Ok(Self { folder, arguments, variables })
    }
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the order on standard input is malformed: {what}"))
}

/// Reads one byte of standard input without a buffer: what follows the order is for another reader.
fn byte() -> io::Result<u8> {
    let mut byte = [0];
    loop {
        match rustix::io::read(rustix::stdio::stdin(), &mut byte) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => return Ok(byte[0]),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Replaces this process by the launcher that the order on standard input describes.
pub(crate) fn follow() -> Refused {
    let refused = |doing: &str, error: io::Error| Refused { message: format!("{doing}: {error}"), code: 1 };
    let order = match Order::decode(byte) {
        Ok(order) => order,
        Err(error) => return refused("reading the order to start ranks", error),
    };
    if let Err(error) = std::env::set_current_dir(&order.folder) {
        let folder = order.folder.display();
        return refused(&format!("every host needs the folder in which collrun was started, {folder}"), error);
    }
    let mut command = match std::env::current_exe() {
        Ok(own) => Command::new(own),
        Err(error) => return refused("finding collrun", error),
    };
    // Variables for launchers in this host's own environment do not come from the user.
    for name in environment::names() {
        command.env_remove(name);
    }
    refused("restarting collrun", command.args(&order.arguments).envs(order.variables).exec())
}

/// Variables that differ between hosts: a host's address and its identity.
const OF_A_HOST: [&str; 2] = ["COLLECTIVES_LISTEN_ADDRESS", "COLLECTIVES_HOST_IDENTITY"];

/// Returns the variables of an order: those of collectives and NCCL, torchrun's that the launcher there reads, and
/// those of `--env`.
pub(crate) fn variables(asked: &[String]) -> Result<Vec<(OsString, OsString)>, String> {
    let read: Vec<String> = environment::names().collect();
    let is_ours = |name: &OsStr| {
        let name = name.to_string_lossy();
        if read.iter().any(|other| *other == name) {
            return true;
        }
        let starts = ["COLLECTIVES_", "NCCL_"].iter().any(|prefix| name.starts_with(prefix));
        (starts && !OF_A_HOST.contains(&&*name)) || ["RUST_LOG", "RUST_BACKTRACE"].contains(&&*name)
    };
    let mut variables: Vec<_> = std::env::vars_os().filter(|(name, _)| is_ours(name)).collect();
    variables.extend(self::asked(asked)?);
    Ok(variables)
}

/// Returns the variables that `--env` names.
pub(crate) fn asked(words: &[String]) -> Result<Vec<(OsString, OsString)>, String> {
    let mut variables = Vec::new();
    for word in words {
        match word.split_once('=') {
            Some(("", _)) => return Err(format!("--env {word}: the name of the variable is missing")),
            Some((name, value)) => variables.push((name.into(), value.into())),
            None => match std::env::var_os(word) {
                Some(value) => variables.push((word.into(), value)),
                None => return Err(format!("--env {word}: the variable is not set in this shell; give --env {word}=VALUE")),
            },
        }
    }
    Ok(variables)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(bytes: &[u8]) -> (io::Result<Order>, usize) {
        let mut left = bytes.iter();
        let order = Order::decode(|| left.next().copied().ok_or_else(|| io::ErrorKind::UnexpectedEof.into()));
        (order, left.len())
    }

    fn order() -> Order {
        let arguments = ["a b", "'", "\"$x\"", "\n", "", "\\"].map(OsString::from);
        Order { folder: "/tmp/a b".into(), arguments: arguments.into(), variables: vec![("N".into(), "v=1\n2".into())] }
    }

    #[test]
    fn an_order_is_read_as_it_was_written_and_no_byte_more() {
        let mut bytes = order().encode();
        bytes.extend([15, 2]);
        let (found, left) = decoded(&bytes);
        assert_eq!((found.unwrap(), left), (order(), 2));
    }

    #[test]
    fn what_is_none_is_refused() {
        let bytes = order().encode();
        for length in 0..bytes.len() {
            assert!(decoded(&bytes[..length]).0.is_err(), "{length}");
        }
        assert!(decoded(b"collrun order 2\0/\x000\x000\0").0.is_err());
        assert!(decoded(b"collrun order 1\0/\0many\x000\0").0.is_err());
        assert!(decoded(b"collrun order 1\0/\x0099999999999999999999\x000\0").0.is_err());
        assert!(decoded(&vec![b'x'; LONGEST + 1]).0.is_err());
    }

    #[test]
    fn variables_that_are_asked_for_go_along() {
        let found = variables(&["A_B=1=2".to_owned()]).unwrap();
        assert_eq!(found.last().unwrap(), &("A_B".into(), "1=2".into()));
        assert!(variables(&["=1".to_owned()]).is_err() && variables(&["NOT_SET_ANYWHERE".to_owned()]).is_err());
    }
}
