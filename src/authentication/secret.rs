//! The secret of a job.

use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use zeroize::Zeroizing;

use super::random;
use crate::base::regular_file;
use crate::error::{Error, Result};

/// The shortest secret, in bytes. A peer can test guesses against a recorded proof, so a password is not enough.
const FEWEST: usize = 16;
/// The longest secret, in bytes.
const MOST: usize = 1024;

/// A secret that only the processes of a job know.
///
/// If a job has a secret, both ends of every connection first prove to each other that they know it. This applies to
/// connections to the store, connections between ranks, and connections over which ranks of a host share memory. A peer
/// that does not know the secret is refused. Give the same secret to all ranks and to the process that serves their
/// store: through `COLLECTIVES_SECRET`, `COLLECTIVES_SECRET_FILE`, or [`Config::secret`](crate::Config::secret).
///
/// The bytes after the proof are encrypted only if you ask for it, with `COLLECTIVES_ENCRYPT=1`,
/// [`Config::encrypt`](crate::Config::encrypt), or [`Secret::encrypting`].
///
/// A secret has 16 to 1024 bytes, which should come from a source of random numbers: `openssl rand -hex 32`, or
/// [`Secret::random`]. A secret is never printed, and its memory is overwritten when the last clone is dropped.
///
/// ```
/// use collectives::Secret;
///
/// # fn main() -> collectives::Result<()> {
/// let secret = Secret::random()?;
/// assert_eq!(secret.expose().len(), 64);
/// assert_eq!(format!("{secret:?}"), "Secret(..)");
/// assert!(Secret::new("hunter2").is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Secret {
    bytes: Arc<Zeroizing<Vec<u8>>>,
    /// Whether connections with this secret are encrypted.
    encrypts: bool,
}

impl Secret {
    /// Creates a secret from these bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if there are fewer than 16 or more than 1024 bytes.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self> {
        let bytes = Zeroizing::new(bytes.into());
        if !(FEWEST..=MOST).contains(&bytes.len()) {
            let reason = format!("it has {} bytes, expected {FEWEST} to {MOST}; make one with `openssl rand -hex 32`", bytes.len());
            return Err(Error::config("the job's secret", reason));
        }
        Ok(Self { bytes: Arc::new(bytes), encrypts: false })
    }

    /// Creates a new secret: 256 random bits, as 64 hexadecimal digits.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the system provides no random numbers.
    pub fn random() -> Result<Self> {
        let bits = Zeroizing::new(random().map_err(|error| Error::io("making a secret", error))?);
        let digit = |value: u8| char::from_digit(value.into(), 16).map_or(0, |digit| digit as u8);
        Self::new(bits.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect::<Vec<u8>>())
    }

    /// Reads a secret from the file at `path`, without trailing line breaks. The file must belong to this user or to
    /// root, and no other user may have access to it.
    ///
    /// # Errors
    ///
    /// - [`Error::Config`] if other users have access to the file, if it belongs to another user, or if its content is
    ///   not a valid secret.
    /// - [`Error::Io`] if the file cannot be read.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let what = format!("the secret in {:?}", path.as_ref());
        let io = |error| Error::io(format!("reading {what}"), error);
        // Checks the opened file, not its name, which can refer to another file by then.
        let (file, facts) = regular_file::opened(path.as_ref(), File::options().read(true)).map_err(|error| match error.kind() {
            ErrorKind::InvalidData => Error::config(what.clone(), error.to_string()),
            _ => io(error),
        })?;
        if facts.mode() & 0o077 != 0 {
            return Err(Error::config(
                what,
                format!("other users have access to it (mode {:03o}); run chmod 600 on it", facts.mode() & 0o777),
            ));
        }
        if facts.uid() != 0 && !is_own(&file, facts.uid()) {
            return Err(Error::config(what, "it belongs to another user"));
        }
        // Capacity for all that is read, so that no reallocation leaves a copy in memory.
        let mut bytes = Zeroizing::new(Vec::with_capacity(MOST + 4));
        file.take(MOST as u64 + 3).read_to_end(&mut bytes).map_err(io)?;
        let end = bytes.iter().rposition(|byte| !matches!(byte, b'\r' | b'\n')).map_or(0, |last| last + 1);
        Self::new(&bytes[..end]).map_err(|error| match error {
            Error::Config { reason, .. } => Error::config(what, reason),
            other => other,
        })
    }

    /// Returns this secret with encryption switched on: the Noise protocol then encrypts the TCP connections that use
    /// this secret. No other party on the network can read the bytes, and the receiver detects bytes that were changed,
    /// dropped, repeated or added. Both ends must encrypt. If only one does, the two ends refuse each other.
    ///
    /// [`Config::encrypt`](crate::Config::encrypt) switches encryption on for a whole job. Use this method for your own
    /// stores: [`TcpStoreServer::bind_with_secret`](crate::store::TcpStoreServer::bind_with_secret) and
    /// [`TcpStore::connect_with_secret`](crate::store::TcpStore::connect_with_secret).
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if this crate was built without its feature `encryption`.
    pub fn encrypting(self) -> Result<Self> {
        if !super::noise::IS_HERE {
            let reason = "this build of the crate collectives lacks it; build with its feature `encryption`, or unset COLLECTIVES_ENCRYPT";
            return Err(Error::Unsupported { what: "encryption".to_owned(), reason: reason.to_owned() });
        }
        Ok(Self { encrypts: true, ..self })
    }

    /// Whether connections with this secret are encrypted.
    pub(crate) fn encrypts(&self) -> bool {
        self.encrypts
    }

    /// Returns the secret's bytes, to pass them to a process that must know the secret.
    #[must_use]
    pub fn expose(&self) -> &[u8] {
        &self.bytes
    }
}

/// Whether an open file of the user `owner` belongs to this user. In a user namespace, all unmapped users share one
/// number, possibly this user's too. But the system lets only a file's owner set `O_NOATIME`.
fn is_own(file: &File, owner: u32) -> bool {
    let flags = rustix::fs::fcntl_getfl(file);
    let is_granted = |flags| rustix::fs::fcntl_setfl(file, flags | rustix::fs::OFlags::NOATIME).is_ok();
    owner == rustix::process::geteuid().as_raw() && flags.is_ok_and(is_granted)
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}
