//! Tests with bytes written out by hand and split everywhere, and with random bytes.

use super::*;
use crate::base::random::Random;
use crate::rendezvous::limits::{KEY_BYTES, KEYS, MESSAGE_BYTES, VALUE_BYTES};

/// Encodes a length or count as eight bytes.
fn word(number: u64) -> Vec<u8> {
    number.to_le_bytes().to_vec()
}

/// Encodes a text with its length.
fn text(text: &str) -> Vec<u8> {
    [word(text.len() as u64), text.as_bytes().to_vec()].concat()
}

/// Returns every query with the bytes that PyTorch sends for it.
fn requests() -> Vec<(StoreRequest, Vec<u8>)> {
    let key = || b"/k".to_vec();
    let keys = || vec![b"/a".to_vec(), b"".to_vec()];
    let k = text("/k");
    let two_keys = [word(2), text("/a"), text("")].concat();
    let message = |code: u8, parts: &[&[u8]]| [&[code], parts.concat().as_slice()].concat();
    vec![
        (StoreRequest::Validate, vec![0, 0xce, 0xf7, 0x85, 0x3c]),
        (StoreRequest::Set { key: key(), value: b"val".to_vec() }, message(1, &[&k, &text("val")])),
        (StoreRequest::CompareSet { key: key(), expected: Vec::new(), desired: b"d".to_vec() }, message(2, &[&k, &text(""), &text("d")])),
        (StoreRequest::Get { key: key() }, message(3, &[&k])),
        (StoreRequest::Add { key: key(), delta: -2 }, message(4, &[&k, &[0xfe, 255, 255, 255, 255, 255, 255, 255]])),
        (StoreRequest::Check { keys: keys() }, message(5, &[&two_keys])),
        (StoreRequest::Wait { keys: keys() }, message(6, &[&two_keys])),
        (StoreRequest::Wait { keys: Vec::new() }, message(6, &[&word(0)])),
        (StoreRequest::NumKeys, vec![7]),
        (StoreRequest::DeleteKey { key: key() }, message(8, &[&k])),
        (StoreRequest::Append { key: key(), value: b"more".to_vec() }, message(9, &[&k, &text("more")])),
        (StoreRequest::MultiGet { keys: keys() }, message(10, &[&two_keys])),
        (
            StoreRequest::MultiSet { pairs: vec![(b"/a".to_vec(), b"1".to_vec()), (b"/b".to_vec(), Vec::new())] },
            message(11, &[&word(2), &text("/a"), &text("1"), &text("/b"), &text("")]),
        ),
        (StoreRequest::CancelWait, vec![12]),
        (StoreRequest::Ping { nonce: 0x0102_0304 }, vec![13, 4, 3, 2, 1]),
        (StoreRequest::QueuePush { key: key(), value: b"v".to_vec() }, message(14, &[&k, &text("v")])),
        (StoreRequest::QueuePop { key: key() }, message(15, &[&k])),
        (StoreRequest::QueueLen { key: key() }, message(16, &[&k])),
        (StoreRequest::ListKeys, vec![17]),
        (StoreRequest::Barrier { key: key(), world_size: 3 }, message(18, &[&k, &word(3)])),
    ]
}

/// Returns all requests decoded from `bytes`, pushed in pieces of `step`.
fn decode(bytes: &[u8], step: usize) -> Result<Vec<StoreRequest>, Malformed> {
    let mut decoder = RequestDecoder::default();
    let mut found = Vec::new();
    for piece in bytes.chunks(step) {
        decoder.push(piece);
        while let Some(request) = decoder.next()? {
            found.push(request);
        }
    }
    assert!(decoder.waiting() <= bytes.len());
    Ok(found)
}

#[test]
fn every_request_is_read_however_it_is_split() {
    for (request, bytes) in requests() {
        for step in 1..=bytes.len() {
            assert_eq!(decode(&bytes, step), Ok(vec![request.clone()]), "{bytes:?} by {step}");
        }
        // No request is complete before the last byte.
        assert_eq!(decode(&bytes[..bytes.len() - 1], bytes.len()), Ok(Vec::new()));
    }
}

#[test]
fn requests_may_follow_each_other_without_a_gap() {
    let (all, bytes): (Vec<StoreRequest>, Vec<Vec<u8>>) = requests().into_iter().unzip();
    let bytes = bytes.concat();
    for step in [1, 2, 3, 7, 64, bytes.len()] {
        assert_eq!(decode(&bytes, step), Ok(all.clone()), "by {step}");
    }
}

#[test]
fn the_encoder_writes_what_was_written_by_hand() {
    let expected = |code: u8| requests().into_iter().find(|(_, bytes)| bytes[0] == code).unwrap().1;
    assert_eq!(encode(query::SET, &[b"/k", b"val"], None), expected(query::SET));
    assert_eq!(encode(query::COMPARE_SET, &[b"/k", b"", b"d"], None), expected(query::COMPARE_SET));
    assert_eq!(encode(query::ADD, &[b"/k"], Some(-2)), expected(query::ADD));
    assert_eq!(encode_keys(query::WAIT, 2, [&b"/a"[..], b""].into_iter()), expected(query::WAIT));
    assert_eq!(encode_keys(query::MULTI_SET, 2, [&b"/a"[..], b"1", b"/b", b""].into_iter()), expected(query::MULTI_SET));
}

#[test]
fn lengths_beyond_the_limits_are_refused_before_their_bytes_come() {
    let refused = |parts: &[&[u8]]| decode(&parts.concat(), usize::MAX).is_err();
    let waits = |parts: &[&[u8]]| decode(&parts.concat(), usize::MAX) == Ok(Vec::new());
    assert!(waits(&[&[3], &word(KEY_BYTES as u64)]));
    assert!(refused(&[&[3], &word(KEY_BYTES as u64 + 1)]));
    assert!(refused(&[&[3], &word(u64::MAX)]));
    assert!(waits(&[&[1], &text("k"), &word(VALUE_BYTES as u64)]));
    assert!(refused(&[&[1], &text("k"), &word(VALUE_BYTES as u64 + 1)]));
    assert!(waits(&[&[6], &word(KEYS as u64)]));
    assert!(refused(&[&[6], &word(KEYS as u64 + 1)]));
    assert!(refused(&[&[11], &word(u64::MAX)]));
    assert!(refused(&[&[19]]) && refused(&[&[255]]));
    assert!(refused(&[&[0, 1, 2, 3, 4]]));
}

#[test]
fn a_request_of_many_long_values_is_refused_as_a_whole() {
    let mut decoder = RequestDecoder::default();
    decoder.push(&[&[query::MULTI_SET][..], &word(100)].concat());
    let pair = [text("k"), word(VALUE_BYTES as u64), vec![0; VALUE_BYTES]].concat();
    let mut pushed = 0;
    let refusal = loop {
        match decoder.next() {
            Ok(None) => decoder.push(&pair),
            Ok(Some(request)) => panic!("{request:?}"),
            Err(refusal) => break refusal,
        }
        pushed += pair.len();
    };
    assert!(pushed <= MESSAGE_BYTES + 2 * pair.len(), "{pushed}: {refusal:?}");
}

#[test]
fn random_bytes_never_panic() {
    let valid: Vec<Vec<u8>> = requests().into_iter().map(|(_, bytes)| bytes).collect();
    for seed in 0..if cfg!(miri) { 50 } else { 20_000 } {
        let mut random = Random(seed);
        let mut bytes = match seed % 3 {
            0 => (0..random.below(80)).map(|_| random.next() as u8).collect(),
            // Small numbers make lengths and codes that get further.
            1 => (0..random.below(80)).map(|_| if random.below(3) == 0 { random.below(20) as u8 } else { 0 }).collect(),
            _ => (0..3).flat_map(|_| valid[random.below(valid.len())].clone()).collect::<Vec<u8>>(),
        };
        for _ in 0..random.below(4) {
            if !bytes.is_empty() {
                let index = random.below(bytes.len());
                bytes[index] = random.next() as u8;
            }
        }
        let steps = [1, 1 + random.below(9), usize::MAX];
        let outcomes = steps.map(|step| decode(&bytes, step));
        assert!(outcomes[0] == outcomes[1] && outcomes[1] == outcomes[2], "seed {seed}: {bytes:?}");
        for expect in [Expect::Flag, Expect::Nonce, Expect::Number, Expect::Values(random.below(4)), Expect::Popped, Expect::Keys] {
            let mut decoder = ReplyDecoder::new(expect);
            let whole = decoder.push(&bytes);
            let mut decoder = ReplyDecoder::new(expect);
            let outcome = bytes.iter().map(|byte| decoder.push(&[*byte])).find(|outcome| *outcome != Ok(None));
            let same = match (&whole, &outcome) {
                (Ok(Some((reply, _))), Some(Ok(Some((other, _))))) => reply == other,
                (Ok(None), None) => true,
                // An answer without values is complete before its first byte.
                (Ok(Some(_)), None) => bytes.is_empty(),
                (whole, outcome) => outcome.as_ref() == Some(whole),
            };
            assert!(same, "seed {seed}, {expect:?}: {whole:?} and {outcome:?} of {bytes:?}");
        }
    }
}

#[test]
fn every_reply_is_read_however_it_is_split() {
    let cases = [
        (Expect::Flag, Reply::Flag(1), vec![1]),
        (Expect::Nonce, Reply::Nonce(0x0102_0304), vec![4, 3, 2, 1]),
        (Expect::Number, Reply::Number(-1), vec![255; 8]),
        (Expect::Values(2), Reply::Values(vec![b"one".to_vec(), Vec::new()]), [text("one"), text("")].concat()),
        (Expect::Popped, Reply::Popped(None), word(0)),
        (Expect::Popped, Reply::Popped(Some(b"v".to_vec())), [word(7), text("v")].concat()),
        (Expect::Keys, Reply::Keys(vec![b"/a".to_vec(), b"init/".to_vec()]), [word(2), text("/a"), text("init/")].concat()),
    ];
    for (expect, reply, bytes) in cases {
        let mut decoder = ReplyDecoder::new(expect);
        for byte in &bytes[..bytes.len() - 1] {
            assert_eq!(decoder.push(&[*byte]), Ok(None), "{expect:?}");
        }
        assert_eq!(decoder.push(&[*bytes.last().unwrap(), 42, 43]), Ok(Some((reply, vec![42, 43]))));
    }
    for number in [-1_i64, i64::MIN, i64::MAX] {
        assert!(ReplyDecoder::new(Expect::Keys).push(&number.to_le_bytes()).is_err());
    }
    assert!(ReplyDecoder::new(Expect::Values(1)).push(&word(u64::MAX)).is_err());
}
