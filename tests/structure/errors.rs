//! What errors print: each fact once, in `{}`, in `{:?}`, and in chains of errors.

use std::error::Error as _;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use collectives::{Error, Peer};

/// Returns one error of each variant, with the variant's name. All their texts differ.
fn every_variant() -> Vec<(&'static str, Error)> {
    let peer = |rank: usize| Peer { rank, host: format!("host{rank}"), pid: 4000 + rank as u32 };
    let [doing, what, with, call] = ["doing this", "that part", "the other end", "this call"].map(str::to_owned);
    let (reason, text, elapsed) = ("for a reason".to_owned(), "its own words".to_owned(), Duration::from_millis(1500));
    let inner = io::Error::other(Error::Protocol { with: with.clone(), reason: "words of an inner error".to_owned() });
    let io = Error::Io { doing: doing.clone(), error: Arc::new(inner) };
    let (first_call, second_call) = ("all_reduce".to_owned(), "barrier".to_owned());
    vec![
        ("InvalidArgument", Error::InvalidArgument { call: "method", reason: reason.clone() }),
        ("OpPanicked", Error::OpPanicked { call: "all_reduce" }),
        ("Unordered", Error::Unordered { call: "all_reduce" }),
        ("Config", Error::Config { what: what.clone(), reason: reason.clone() }),
        ("Unsupported", Error::Unsupported { what, reason: reason.clone() }),
        ("Mismatch", Error::Mismatch { first: peer(0), first_call, second: peer(1), second_call }),
        ("Message", Error::Message { doing: doing.clone(), reason: reason.clone() }),
        (
            "Timeout",
            Error::Timeout {
                doing: doing.clone(),
                elapsed,
                missing: vec![peer(1)],
                arrived: vec![peer(0)],
                meanwhile: vec!["a call of another".to_owned()],
            },
        ),
        ("PeerLost", Error::PeerLost { doing: doing.clone(), peer: peer(1), elapsed, reason: reason.clone() }),
        ("Closed", Error::Closed { call: call.clone() }),
        ("Conflict", Error::Conflict { reason: reason.clone() }),
        ("LeftBehind", Error::LeftBehind { doing: doing.clone(), rank: 2, reason: reason.clone() }),
        ("Poisoned", Error::Poisoned { call: call.clone(), cause: Arc::new(io.clone()) }),
        ("Aborted", Error::Aborted { doing: doing.clone(), by: peer(3) }),
        ("Protocol", Error::Protocol { with: with.clone(), reason: reason.clone() }),
        ("Unauthorized", Error::Unauthorized { with, reason: reason.clone() }),
        ("NoDevice", Error::NoDevice { call, reason }),
        ("Nccl", Error::Nccl { doing: doing.clone(), code: 5, name: "ncclInvalidUsage", text: text.clone() }),
        ("Cuda", Error::Cuda { doing, code: 700, text }),
        ("Io", io),
    ]
}

#[test]
fn every_variant_is_looked_at() {
    let source = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/error.rs")).unwrap();
    let body = source.split("pub enum Error {").nth(1).unwrap().split("\n}\n").next().unwrap();
    let variant = |line: &str| {
        line.strip_prefix("    ")?.strip_suffix(" {").filter(|name| name.chars().all(char::is_alphanumeric)).map(str::to_owned)
    };
    let variants: Vec<String> = body.lines().filter_map(variant).collect();
    let known: Vec<&str> = every_variant().iter().map(|(name, _)| *name).collect();
    assert_eq!(variants, known);
}

#[test]
fn a_chain_of_errors_says_nothing_twice() {
    for (name, error) in every_variant() {
        let mut sentences = vec![error.to_string()];
        let mut source = error.source();
        while let Some(inner) = source {
            sentences.push(inner.to_string());
            source = inner.source();
        }
        for pair in sentences.windows(2) {
            assert!(!pair[0].contains(&pair[1]), "{name}: {sentences:?}");
        }
        // `?` from `main` prints only this sentence, so it must contain all that the error knows.
        let sentence = format!("{error:?}");
        assert_eq!(sentence, sentences[0]);
        let parts = ["for a reason", "its own words", "words of an inner error", "all_reduce", "host1", "host3", "closed"];
        assert_eq!(parts.iter().filter(|part| sentence.matches(**part).count() == 1).count().min(1), 1, "{name}: {sentence}");
        assert!(parts.iter().all(|part| sentence.matches(part).count() <= 1), "{name}: {sentence}");
    }
}

#[test]
fn the_systems_own_error_is_there_for_whoever_asks() {
    let error = collectives::store::FileStore::open("/no/such/folder/store", None, Duration::from_secs(1)).unwrap_err();
    let Error::Io { error: system, .. } = &error else { panic!("{error}") };
    assert_eq!(system.kind(), io::ErrorKind::NotFound);
    assert_eq!(error.to_string().matches(&system.to_string()).count(), 1, "{error}");
    assert!(error.source().is_none());
}
