//! What a rank tells the others about itself before they can talk.

use crate::config::Config;
use crate::error::{Error, Peer, Result};
#[cfg(feature = "cuda")]
use crate::nccl_config::CheckDeviceCalls;
use crate::proof::{self, Secret};

/// The version of this exchange and of everything that follows it.
const VERSION: u32 = 2;

/// One rank's facts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HostFacts {
    /// Random; rank 0's becomes the communicator's.
    pub(super) nonce: [u8; 16],
    /// What shows that the rank knows the job's secret, if it has one. It finds mistakes; unproven connections are kept out by connections.
    pub(super) tag: Option<[u8; 32]>,
    pub(super) pid: u32,
    /// The settings that all ranks must share, in words.
    pub(super) settings: String,
    /// By what ranks of one host recognise each other.
    pub(super) identity: String,
    pub(super) host: String,
    /// Where it can be found should the communicator fail; empty where it cannot.
    pub(super) recovery_listener: String,
}

impl HostFacts {
    /// The settings that decide what is sent, in words that can be compared and read.
    pub(super) fn settings_of(config: &Config) -> String {
        let algorithm = config.algorithm.as_deref().unwrap_or("auto");
        let settings = format!("transport {:?}, reproducible {}, algorithm {algorithm}", config.transport, config.reproducible);
        // Ranks without a device plane say nothing of it, so the usual must go without saying.
        #[cfg(feature = "cuda")]
        if config.check_device_calls != CheckDeviceCalls::default() {
            return format!("{settings}, device calls compared {}", config.check_device_calls);
        }
        settings
    }

    /// Version, nonce, process, then the four texts, each behind its length, and the tag.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.nonce);
        bytes.extend(self.pid.to_le_bytes());
        for text in [&self.settings, &self.identity, &self.host, &self.recovery_listener] {
            bytes.extend((text.len() as u32).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
        bytes.extend(self.tag.iter().flatten());
        bytes
    }

    /// The reverse of [`HostFacts::to_bytes`].
    pub(super) fn from_bytes(rank: usize, bytes: &[u8]) -> Result<Self> {
        let malformed = |reason: String| Error::Protocol { with: Peer::unknown(rank).to_string(), reason };
        let short = || malformed(format!("{} B of facts about itself, cut short", bytes.len()));
        let (version, rest) = bytes.split_first_chunk::<4>().ok_or_else(short)?;
        if u32::from_le_bytes(*version) != VERSION {
            let theirs = u32::from_le_bytes(*version);
            return Err(malformed(format!(
                "it speaks version {theirs} of the protocol and this rank version {VERSION}: build all ranks alike"
            )));
        }
        let (nonce, rest) = rest.split_first_chunk::<16>().ok_or_else(short)?;
        let (pid, mut rest) = rest.split_first_chunk::<4>().ok_or_else(short)?;
        let mut text = || {
            let (length, tail) = rest.split_first_chunk::<4>()?;
            let (text, tail) = tail.split_at_checked(u32::from_le_bytes(*length) as usize)?;
            rest = tail;
            Some(String::from_utf8_lossy(text).into_owned())
        };
        let mut next = || text().ok_or_else(short);
        let (settings, identity, host, recovery_listener) = (next()?, next()?, next()?, next()?);
        let tag = match rest {
            [] => None,
            rest => Some(<[u8; 32]>::try_from(rest).map_err(|_| malformed(format!("{} B behind its facts", rest.len())))?),
        };
        Ok(Self { nonce: *nonce, tag, pid: u32::from_le_bytes(*pid), settings, identity, host, recovery_listener })
    }

    /// The tag of a rank.
    pub(super) fn vouch(secret: &Secret, rank: usize, nonce: &[u8; 16]) -> [u8; 32] {
        proof::vouch(secret, &Self::vouched(rank, nonce))
    }

    fn vouched(rank: usize, nonce: &[u8; 16]) -> Vec<u8> {
        [b"facts".as_slice(), &(rank as u64).to_le_bytes(), nonce].concat()
    }

    /// Refuses ranks with another secret, with none, or with one where this rank has none.
    pub(super) fn check_tags(all: &[HostFacts], secret: Option<&Secret>) -> Result<()> {
        for (rank, facts) in all.iter().enumerate() {
            let lacks = match (secret, &facts.tag) {
                (None, None) => continue,
                (Some(secret), Some(tag)) if proof::is_vouched(secret, &Self::vouched(rank, &facts.nonce), tag) => continue,
                (Some(_), Some(_)) => "it has another secret than this rank; set COLLECTIVES_SECRET (or Config::secret) alike",
                (Some(_), None) => {
                    "it has no secret, and this rank has one; set COLLECTIVES_SECRET (or Config::secret) for all ranks or none"
                }
                (None, Some(_)) => {
                    "it has a secret, and this rank has none; set COLLECTIVES_SECRET (or Config::secret) for all ranks or none"
                }
            };
            let with = Peer { rank, host: facts.host.clone(), pid: facts.pid }.to_string();
            return Err(Error::Unauthorized { with, reason: lacks.to_owned() });
        }
        Ok(())
    }

    /// Refuses settings that differ between ranks.
    pub(super) fn compare(all: &[HostFacts]) -> Result<()> {
        let differs = all.iter().position(|facts| facts.settings != all[0].settings);
        match differs {
            None => Ok(()),
            Some(other) => {
                let reason = format!("rank 0 has {}; and rank {other} has {}", all[0].settings, all[other].settings);
                Err(Error::Conflict { reason })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> HostFacts {
        HostFacts {
            nonce: [7; 16],
            tag: None,
            pid: 12,
            settings: "s".into(),
            identity: String::new(),
            host: "höst".into(),
            recovery_listener: "[::1]:9".into(),
        }
    }

    #[test]
    fn facts_survive_the_exchange() {
        assert_eq!(HostFacts::from_bytes(0, &example().to_bytes()).unwrap(), example());
    }

    #[test]
    fn facts_cut_short_or_of_another_version_are_refused() {
        let bytes = example().to_bytes();
        for length in (0..bytes.len()).chain([bytes.len() + 1, bytes.len() + 31, bytes.len() + 33]) {
            let bytes: Vec<u8> = bytes.iter().copied().chain([0; 33]).take(length).collect();
            assert!(HostFacts::from_bytes(3, &bytes).unwrap_err().to_string().contains("rank 3"));
        }
        let other = [&99_u32.to_le_bytes()[..], &bytes[4..]].concat();
        assert!(HostFacts::from_bytes(3, &other).unwrap_err().to_string().contains("version 99"));
    }

    #[test]
    fn whoever_has_another_secret_or_none_is_named() {
        let [ours, theirs] = [1, 2].map(|seed| Secret::new(vec![seed; 20]).unwrap());
        let with = |secret: Option<&Secret>, rank| {
            let tag = secret.map(|secret| HostFacts::vouch(secret, rank, &[7; 16]));
            HostFacts::from_bytes(rank, &HostFacts { tag, ..example() }.to_bytes()).unwrap()
        };
        let all = [with(Some(&ours), 0), with(Some(&ours), 1)];
        HostFacts::check_tags(&all, Some(&ours)).unwrap();
        HostFacts::check_tags(&[with(None, 0), with(None, 1)], None).unwrap();
        let error = |all: &[HostFacts], secret| HostFacts::check_tags(all, secret).unwrap_err();
        for (all, words) in [
            ([all[0].clone(), with(Some(&theirs), 1)], "another secret"),
            ([all[0].clone(), with(Some(&ours), 0)], "another secret"),
            ([all[0].clone(), with(None, 1)], "it has no secret"),
        ] {
            let error = error(&all, Some(&ours));
            assert!(error.is_unauthorized() && error.to_string().contains("rank 1 (host höst"), "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
        assert!(error(&all, None).to_string().contains("this rank has none"));
        assert!(error(&all, Some(&theirs)).to_string().contains("rank 0"));
    }

    #[test]
    fn different_settings_are_named() {
        let other = HostFacts { settings: "t".into(), ..example() };
        let error = HostFacts::compare(&[example(), example(), other]).unwrap_err().to_string();
        assert!(error.contains("rank 0 has s; and rank 2 has t"), "{error}");
    }
}
