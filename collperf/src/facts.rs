//! The ranks of a run, and their hardware.

use collectives::Peer;

use crate::launch;
use crate::machine::Machine;
use crate::settings::{Register, Settings};

/// The ranks of a run, and where they are.
#[derive(Debug, Clone)]
pub(crate) struct RunFacts {
    pub(crate) ranks: Vec<RankFacts>,
    pub(crate) on: On,
    pub(crate) machine: Machine,
    /// `None` if it is not known.
    pub(crate) bound: Option<Bound>,
    /// Whether TCP connections are encrypted.
    pub(crate) is_encrypted: bool,
    /// When the run began, in UTC.
    pub(crate) start_time: String,
}

/// The processors to which ranks are bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bound {
    /// The kind of binding on rank 0's host, as a word of `--bind`.
    pub(crate) to: String,
    /// Why that host binds no ranks, unless the command line asked for that.
    pub(crate) why_none: Option<String>,
    /// The processors that each rank may run on, as the kernel lists them.
    pub(crate) processors: Vec<String>,
}

/// A note that readers of results need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Note {
    pub(crate) text: String,
    /// Whether it makes the figures less reliable.
    pub(crate) is_warning: bool,
}

/// The backend that is measured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum On {
    /// Host memory. With `--backend auto`, `why` is the reason why there is no device.
    Host { why: Option<String> },
    /// Device memory. `nccl` is NCCL's version number, such as 22809.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "there are no devices in such a build"))]
    Device { nccl: u32 },
}

/// One rank.
#[derive(Debug, Clone)]
pub(crate) struct RankFacts {
    pub(crate) peer: Peer,
    /// The colour of the group that it runs in.
    pub(crate) group: u32,
    /// Its local rank.
    pub(crate) local_rank: usize,
    /// The name of its host's processor.
    pub(crate) processor: String,
    /// The device of its buffers, if they are in device memory.
    pub(crate) gpu: Option<Gpu>,
}

/// A rank's device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Gpu {
    /// Its number in the rank's process.
    pub(crate) ordinal: usize,
    /// Its address on the PCI bus, such as `0000:1b:00`.
    pub(crate) bus: String,
    pub(crate) name: String,
}

impl RunFacts {
    /// Returns the number of hosts.
    pub(crate) fn hosts(&self) -> usize {
        self.ranks.iter().filter(|rank| rank.local_rank == 0).count()
    }

    /// Returns the notes for readers of the figures, which all forms of output contain.
    pub(crate) fn notes(&self) -> Vec<Note> {
        let too = if self.on.is_device() { ", including those of NCCL" } else { "" };
        let encrypted = self.is_encrypted.then(|| format!("Links between hosts are encrypted{too}"));
        let load = self.load_note();
        let fell_back = match &self.on {
            On::Host { why: Some(why) } => Some(format!("Measured on the host backend, because there is no device backend: {why}")),
            On::Host { why: None } | On::Device { .. } => None,
        };
        let notes = [(self.binding_note(), false), (encrypted, false), (load, true), (fell_back, false)];
        notes.into_iter().filter_map(|(text, is_warning)| Some(Note { text: text?, is_warning })).collect()
    }

    /// Describes what ranks are bound to.
    fn binding_note(&self) -> Option<String> {
        let Bound { to, why_none, processors } = self.bound.as_ref()?;
        Some(format!("bound to: {}", launch::told(to, why_none.as_deref(), 0, processors)))
    }

    /// Returns a note if rank 0's host is busy with other work.
    pub(crate) fn load_note(&self) -> Option<String> {
        let here = self.ranks.first().map(|first| &first.peer.host);
        let ranks_here = self.ranks.iter().filter(|rank| Some(&rank.peer.host) == here).count();
        let Machine { load, allowed, .. } = &self.machine;
        load.as_ref()?.note(allowed.map_or(ranks_here, |allowed| allowed.min(ranks_here)))
    }

    /// Returns ranks of an imaginary host.
    #[cfg(test)]
    pub(crate) fn example(ranks: usize) -> Self {
        let machine = Machine { processor: "Abacus 9".to_owned(), cores: 4, allowed: None, kernel: "Linux 6.1".to_owned(), load: None };
        let rank = |rank| RankFacts {
            peer: Peer { rank, host: "desk".to_owned(), pid: 100 + rank as u32 },
            group: 0,
            local_rank: rank,
            processor: machine.processor.clone(),
            gpu: None,
        };
        let start_time = "2026-01-02 03:04:05".to_owned();
        Self {
            ranks: (0..ranks).map(rank).collect(),
            on: On::Host { why: None },
            machine: machine.clone(),
            bound: None,
            is_encrypted: false,
            start_time,
        }
    }

    /// Returns ranks of an imaginary host, each with a device.
    #[cfg(all(test, feature = "cuda"))]
    pub(crate) fn example_on_devices(ranks: usize) -> Self {
        let mut facts = Self { on: On::Device { nccl: 22809 }, ..Self::example(ranks) };
        for (ordinal, rank) in facts.ranks.iter_mut().enumerate() {
            rank.gpu = Gpu::from_words(&format!("{ordinal} 0000:{ordinal:02x}:00.0 Soroban 2 GPU"));
        }
        facts
    }
}

impl On {
    /// Returns the name in JSON.
    pub(crate) fn name(&self) -> &'static str {
        if self.is_device() { "device" } else { "host" }
    }

    pub(crate) fn is_device(&self) -> bool {
        matches!(self, On::Device { .. })
    }

    /// Returns how ranks reach each other, as named in CSV, JSON and plots.
    pub(crate) fn links(&self, settings: &Settings) -> &'static str {
        match settings.device.register {
            _ if self.is_device() => "nccl",
            Register::Nothing => settings.transport.name(),
            Register::Local | Register::Window => settings.transport.name_of_allocated(),
        }
    }

    /// Returns the version of the loaded NCCL, 0 if none is loaded.
    pub(crate) fn library(&self) -> u32 {
        match self {
            On::Host { .. } => 0,
            On::Device { nccl } => *nccl,
        }
    }

    /// Returns the version of NCCL whose interface was compiled in, 0 if it is not used.
    pub(crate) fn headers(&self) -> u32 {
        match self {
            On::Host { .. } => 0,
            #[cfg(feature = "cuda")]
            On::Device { .. } => nccl_sys::NCCL_VERSION_CODE.unsigned_abs(),
            #[cfg(not(feature = "cuda"))]
            On::Device { .. } => 0,
        }
    }
}

impl Gpu {
    /// Reads a number, an address on the bus, and a name.
    pub(crate) fn from_words(words: &str) -> Option<Self> {
        let (ordinal, rest) = words.split_once(' ')?;
        let (bus, name) = rest.split_once(' ')?;
        // nccl-tests omits the function, which is always 0.
        let bus = bus.strip_suffix(".0").unwrap_or(bus);
        Some(Self { ordinal: ordinal.parse().ok()?, bus: bus.to_owned(), name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_read_as_it_is_told() {
        let gpu = Gpu::from_words("3 0000:1b:00.0 NVIDIA H200").unwrap();
        assert_eq!(gpu, Gpu { ordinal: 3, bus: "0000:1b:00".to_owned(), name: "NVIDIA H200".to_owned() });
        assert_eq!(Gpu::from_words(""), None);
        assert_eq!(Gpu::from_words("x 0000:1b:00.0 y"), None);
    }
}
