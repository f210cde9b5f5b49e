//! The JSON document of `collperf ps`: what was found on one host or, after a merge, on several.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::process::State;
use crate::hang::Record;
use crate::input_file;

/// The value of `format`, and the newest supported version.
const FORMAT: &str = "collectives ps";
const VERSION: u32 = 1;
/// The same of a rank's answer.
pub(super) const STATUS_FORMAT: &str = "collectives status";
pub(super) const STATUS_VERSION: u64 = 1;
/// The most bytes of documents on standard input.
const MOST: u64 = 256 << 20;

/// The document. Readers skip keys that they do not know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Document {
    format: String,
    version: u32,
    pub(super) time_ns: u64,
    /// The hosts that were asked.
    pub(super) hosts: Vec<String>,
    /// What could not be asked or read, and why.
    #[serde(default)]
    pub(super) errors: Vec<String>,
    pub(super) processes: Vec<Process>,
    /// The processes of ranks that other ranks name, and that were not found among `processes`.
    #[serde(default)]
    pub(super) absent: Vec<Absent>,
    /// What NCCL's own service says.
    #[serde(default)]
    pub(super) nccl_ras: Vec<Ras>,
}

/// A process that has a socket.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Process {
    pub(super) host_name: String,
    pub(super) pid: u32,
    pub(super) user: Option<u32>,
    /// The program's name, as the kernel has it.
    pub(super) program: String,
    pub(super) state: State,
    /// The process's answer.
    pub(super) status: Option<Value>,
    /// Why there is no answer.
    pub(super) error: Option<String>,
}

/// A process without a socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Absent {
    pub(super) host_name: String,
    pub(super) pid: u32,
    pub(super) state: State,
}

/// The answer of NCCL's own service for reliability, availability and serviceability.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ras {
    pub(super) host_name: String,
    pub(super) address: String,
    pub(super) text: Option<String>,
    /// Why there is no answer.
    pub(super) error: Option<String>,
}

impl Process {
    /// Returns the flight records of the process's communicators. Those that cannot be read are left out.
    pub(super) fn records(&self) -> impl Iterator<Item = Record> + '_ {
        let records = self.status.iter().filter_map(|status| status["records"].as_array()).flatten();
        records.filter_map(|record| serde_json::from_value::<Record>(record.clone()).ok()?.checked().ok())
    }

    /// Whether the process knows itself by the number that this host uses for it. If not, it is in another PID namespace.
    pub(super) fn has_the_number_of_its_host(&self) -> bool {
        self.status.as_ref().is_some_and(|status| status["pid"] == self.pid)
    }
}

impl Document {
    /// Returns the document of some hosts.
    pub(super) fn new(time_ns: u64, hosts: Vec<String>, processes: Vec<Process>, absent: Vec<Absent>) -> Self {
        Self { format: FORMAT.to_owned(), version: VERSION, time_ns, hosts, errors: Vec::new(), processes, absent, nccl_ras: Vec::new() }
    }

    /// Adds what another document contains.
    pub(super) fn add(&mut self, other: Self) {
        self.time_ns = self.time_ns.max(other.time_ns);
        self.hosts.extend(other.hosts);
        self.errors.extend(other.errors);
        self.processes.extend(other.processes);
        self.absent.extend(other.absent);
        self.nccl_ras.extend(other.nccl_ras);
        // On a host with several network namespaces, one document may have what the other lacks.
        let found: BTreeSet<(&str, u32)> = self.processes.iter().map(|process| (&*process.host_name, process.pid)).collect();
        self.absent.retain(|absent| !found.contains(&(&*absent.host_name, absent.pid)));
    }

    /// Reads the documents in a text, one after another.
    pub(super) fn read_all(text: &[u8]) -> Result<Vec<Self>, String> {
        let read = |document: serde_json::Result<Self>| match document {
            Err(error) => Err(format!("not what collperf ps --json prints: {error}")),
            Ok(document) if document.format != FORMAT => Err(format!("its format is {:?}, not {FORMAT:?}", document.format)),
            Ok(document) if document.version > VERSION => {
                Err(format!("its format has version {}; this collperf reads versions up to {VERSION}", document.version))
            }
            Ok(document) => Ok(document),
        };
        let documents: Vec<Self> = serde_json::Deserializer::from_slice(text).into_iter().map(read).collect::<Result<_, _>>()?;
        if documents.is_empty() { Err("it is empty".to_owned()) } else { Ok(documents) }
    }

    /// Reads the documents in a file, or from standard input if the path is `-`.
    pub(super) fn read_file(path: &Path) -> Result<Vec<Self>, String> {
        let read = || match path.to_str() {
            Some("-") => {
                let mut text = Vec::new();
                std::io::stdin().lock().take(MOST).read_to_end(&mut text).map(|_| text)
            }
            _ => input_file::read(path),
        };
        let documents = read().map_err(|error| error.to_string()).and_then(|text| Self::read_all(&text));
        documents.map_err(|error| format!("{}: {error}", path.display()))
    }
}
