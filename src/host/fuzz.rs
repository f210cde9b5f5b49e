//! Invariants for any bytes from peers: fingerprints, abort reasons, algorithms, and a link that sends given bytes.

use super::abort_reason::{AbortReason, Interrupted};
use crate::base::deadline::Deadline;
use crate::call::Call;
use crate::call::algorithm::AlgorithmRanges;

pub use super::backend::fuzz::facts;
#[cfg(feature = "encryption")]
pub use super::encrypted::fuzz::encrypted_link;
pub use super::engine::fuzz::{engine_headers, engine_peer};
pub use super::net::fuzz::{acceptor, greetings};
pub use super::point_to_point::fuzz::{message_frames, message_peer};
pub use super::shm::fuzz::{shared_memory_file, shared_memory_layout, shared_memory_ring};

/// Decodes any bytes as a call's fingerprint and as an abort reason. Bytes that decode must encode to the same bytes
/// and have a description.
pub fn fingerprints(data: &[u8]) {
    for bytes in data.windows(Call::FINGERPRINT_BYTES).step_by(16).filter_map(<[u8]>::first_chunk) {
        if let Some(call) = Call::from_bytes(bytes) {
            assert_eq!(call.to_bytes(), *bytes, "{call}");
            assert_eq!(Call::from_fingerprint(call.fingerprint()), Some(call));
        }
    }
    for bytes in data.windows(AbortReason::BYTES).step_by(16).filter_map(<[u8]>::first_chunk) {
        if let Some(abort_reason) = AbortReason::from_bytes(bytes) {
            assert_eq!(abort_reason.to_bytes(), *bytes, "{abort_reason:?}");
            let (deadline, seen) = (Deadline::after(std::time::Duration::ZERO), Interrupted::from(abort_reason).seen_by(0, [1, 2]));
            for error in [abort_reason.to_error("a call", &deadline, 0, &[]), seen.to_error("a call", &deadline, 0, &[])] {
                assert!(!error.to_string().is_empty());
            }
        }
    }
}

/// Parses any text as a choice of algorithms. A text that parses must print as text with the same meaning.
pub fn algorithms(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    match text.parse::<AlgorithmRanges>() {
        Ok(ranges) => {
            let written = ranges.to_string();
            assert_eq!(written.parse::<AlgorithmRanges>().as_ref().ok(), Some(&ranges), "{written:?} of {text:?}");
            assert_eq!(written.parse::<AlgorithmRanges>().map(|again| again.to_string()).ok(), Some(written));
        }
        Err(error) => assert!(error.to_string().contains("algorithm"), "{error}"),
    }
}

/// Returns seed inputs: valid data from peers.
pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let call = super::engine::fuzz::call();
    let call = Call { root: Some(3), op: 1, ..call };
    let abort_reasons = [
        AbortReason::Mismatch { first: (1, call), second: (2, Call { count: 4, ..call }) },
        AbortReason::TimedOut { waiting: 1, missing: 2 },
        AbortReason::Garbled { rank: 1, header: 0x0102_0304_0506_0708 },
        AbortReason::Lost { rank: 7, by: 2 },
        AbortReason::Silent { rank: 5, by: 0, seconds: 60 },
    ];
    let mut seeds: Vec<(&'static str, Vec<u8>)> = vec![("fingerprints", call.to_bytes().to_vec())];
    seeds.extend(abort_reasons.iter().map(|abort_reason| ("fingerprints", abort_reason.to_bytes().to_vec())));
    let rules = ["doubling:0-16K,ring:16K-", "chain:1-3, scatter_gather:1m-2G,binomial:1025-,direct:0-1"];
    seeds.extend(rules.map(|rules| ("algorithms", rules.as_bytes().to_vec())));
    seeds.extend(super::engine::fuzz::seeds(&abort_reasons));
    seeds.extend(super::point_to_point::fuzz::seeds(&abort_reasons));
    seeds.extend(super::net::fuzz::seeds());
    #[cfg(feature = "encryption")]
    seeds.extend(super::encrypted::fuzz::seeds());
    seeds.push(("facts", super::backend::fuzz::seed()));
    seeds.push(("shared_memory_file", b"\x05\x01name".to_vec()));
    seeds.push(("shared_memory_file", b"\x05\0nameno memory".to_vec()));
    seeds.push(("shared_memory_ring", (0..200_u8).flat_map(|at| [at % 6, at]).collect()));
    seeds.push(("shared_memory_ring", [0, 40, 3, 40, 1, 64, 3, 30, 2, 50, 3, 90, 6, 7, 0, 9, 3, 9].to_vec()));
    seeds.push(("shared_memory_layout", (0..40).chain([255, 256, 1024, 1025]).flat_map(|ranks: u16| ranks.to_le_bytes()).collect()));
    seeds
}
