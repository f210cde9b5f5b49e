//! The names of the variables that this crate reads, and a check for unknown variables with similar names.

use std::sync::Once;

use crate::base::event;
use crate::error::{Error, Result};

/// The prefix of all variables of this crate.
pub(super) const PREFIX: &str = "COLLECTIVES_";

/// The variables that are read, without [`PREFIX`]. Those for devices are included in every build.
pub(super) const KNOWN: [&str; 25] = [
    "ALGORITHM",
    "CHECK_DEVICE_CALLS",
    "CHECK_THREADS",
    "CONNECTIONS",
    "ENCRYPT",
    "FLIGHT_RECORDER",
    "FLIGHT_RECORDER_DIR",
    "HOST_IDENTITY",
    "JOIN",
    "JOIN_FILE",
    "LISTEN_ADDRESS",
    "METRICS",
    "NCCL_LIBRARY",
    "PORT_RANGE",
    "REPRODUCIBLE",
    "SECRET",
    "SECRET_FILE",
    "SILENCE_TIMEOUT",
    "SOCKET_IFNAME",
    "STALL_WARNING",
    "STATUS_SOCKET",
    "TIMEOUT",
    "TRACE",
    "TRANSPORT",
    "WAITING",
];

/// The beginnings of the names that this project's tests and scripts read, without [`PREFIX`].
const OF_TESTS: [&str; 8] = ["ELASTIC", "INTEROP_", "KERNELS", "LOOM", "NVCC", "RANK_OF_TORCH", "SHRINKS", "SOAK_"];

/// Refuses an unknown variable whose name looks like a known one, because its setting would be ignored. Reports other
/// unknown names once in each process: they may belong to the program.
pub(super) fn check(names: impl Iterator<Item = String>) -> Result<()> {
    static REPORTED: Once = Once::new();
    if let Some(line) = unknown(names)? {
        REPORTED.call_once(|| event::tell_aloud(Some(line.clone()), move || event::warn!("{line}")));
    }
    Ok(())
}

/// Returns a sentence about the unknown variables, if there are any, or an error about one that looks like a known one.
pub(super) fn unknown(names: impl Iterator<Item = String>) -> Result<Option<String>> {
    let mut unknown = Vec::new();
    for name in names {
        let Some(rest) = name.strip_prefix(PREFIX).filter(|rest| !KNOWN.contains(rest)) else { continue };
        if let Some(meant) = meant(rest) {
            return Err(Error::config(name.clone(), format!("not known; did you mean {PREFIX}{meant}? Rename the variable, or unset it")));
        }
        if !rest.starts_with("TEST_") && !OF_TESTS.iter().any(|own| rest.starts_with(own)) {
            unknown.push(name);
        }
    }
    unknown.sort_unstable();
    Ok((!unknown.is_empty()).then(|| {
        format!("these environment variables are ignored, because no setting of this crate has their names: {}", unknown.join(", "))
    }))
}

/// Returns the known name that `name` resembles: one that differs by a letter or two, or one that `name` continues.
fn meant(name: &str) -> Option<&'static str> {
    let edits = |known: &&&str| (edits(name, known), known.len().abs_diff(name.len()));
    let nearest = KNOWN.iter().min_by_key(edits).filter(|known| edits(known).0 <= if known.len() < 6 { 1 } else { 2 });
    let longer = || {
        KNOWN.iter().filter(|known| name.strip_prefix(**known).is_some_and(|rest| rest.starts_with('_'))).max_by_key(|known| known.len())
    };
    nearest.or_else(longer).copied()
}

/// Returns how many letters must be added, dropped, changed, or swapped with a neighbour to turn one text into the
/// other.
fn edits(one: &str, other: &str) -> usize {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    let mut rows = vec![(0..=other.len()).collect::<Vec<usize>>()];
    for (i, letter) in one.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, theirs) in other.iter().enumerate() {
            let changed = rows[i][j] + usize::from(letter != theirs);
            let swaps = i > 0 && j > 0 && one[i - 1] == *theirs && *letter == other[j - 1];
            let swapped = if swaps { rows[i - 1][j - 1] + 1 } else { usize::MAX };
            row.push(changed.min(rows[i][j + 1] + 1).min(row[j] + 1).min(swapped));
        }
        rows.push(row);
    }
    rows[one.len()][other.len()]
}
