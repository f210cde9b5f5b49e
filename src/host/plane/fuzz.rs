//! What must hold whatever a rank tells of itself.

use super::facts::HostFacts;

/// Any bytes as a rank's facts: an error that names the rank, or facts that survive the exchange.
pub fn facts(data: &[u8]) {
    match HostFacts::from_bytes(3, data) {
        Ok(facts) => {
            let again = HostFacts::from_bytes(3, &facts.to_bytes()).expect("encoded again");
            assert_eq!(again, facts);
            assert!((0..data.len().min(36)).all(|short| HostFacts::from_bytes(3, &data[..short]).is_err()), "in part");
        }
        Err(error) => assert!(error.to_string().contains("rank 3"), "{error}"),
    }
}

/// An input to begin with.
pub(in crate::host) fn seed() -> Vec<u8> {
    HostFacts {
        nonce: [7; 16],
        tag: None,
        pid: 12,
        settings: "transport Auto".into(),
        identity: String::new(),
        host: "h\u{f6}st".into(),
        recovery_listener: String::new(),
    }
    .to_bytes()
}
