//! Tests against vectors computed elsewhere, and against every attack on a proof that needs no secret.

use std::os::unix::fs::PermissionsExt;

use super::frame::{CHALLENGE, FRAME_BYTES, PLAIN, PROOF, REFUSED, reply, split};
use super::initiator::Stage;
use super::*;
use crate::error::Error;

const CONTEXT: &[u8] = b"what it is about";

fn secret(seed: u8) -> Secret {
    Secret::new(vec![seed; 32]).unwrap()
}

fn initiator(seed: u8) -> Initiator {
    Initiator::new(&secret(seed), Purpose::Link, CONTEXT).unwrap()
}

fn responder(seed: u8) -> Responder {
    Responder::new(&secret(seed), Purpose::Link, CONTEXT.len())
}

fn nonce(initiator: &Initiator) -> Word {
    match initiator.stage() {
        Stage::Hmac { nonce, .. } => *nonce,
        _ => panic!("no HMAC"),
    }
}

/// Returns the responder's answer to complete bytes.
fn answer(responder: &mut Responder, bytes: &[u8]) -> Vec<u8> {
    responder.receive(bytes).unwrap().unwrap()
}

/// Returns the initiator's tag for a challenge.
fn tag(initiator: &mut Initiator, challenge: &[u8]) -> Word {
    match initiator.receive(challenge) {
        Ok(Step::Send(tag)) => tag,
        other => panic!("{other:?}"),
    }
}

/// Returns all that the two ends of an honest connection send, in order.
fn transcript(initiator: &mut Initiator, responder: &mut Responder) -> [Vec<u8>; 4] {
    let opening = initiator.opening();
    let challenge = answer(responder, &opening);
    let tag = tag(initiator, &challenge);
    let proof = answer(responder, &tag);
    assert_eq!(initiator.receive(&proof), Ok(Step::Done));
    assert_eq!(responder.proven(), Some(CONTEXT));
    [opening, challenge, tag.to_vec(), proof]
}

fn hex(text: &str) -> Vec<u8> {
    text.as_bytes().chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// Test cases 1, 3 and 6 of RFC 4231, whose keys are long enough for a secret.
#[test]
fn the_hmac_is_that_of_rfc_4231() {
    let cases = [
        (vec![0x0b; 20], b"Hi There".to_vec(), "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
        (vec![0xaa; 20], vec![0xdd; 50], "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"),
        (
            vec![0xaa; 131],
            b"Test Using Larger Than Block-Size Key - Hash Key First".to_vec(),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
        ),
    ];
    for (key, data, expected) in cases {
        let secret = Secret::new(key).unwrap();
        assert_eq!(keyed(&secret, [&data]).finalize().into_bytes().to_vec(), hex(expected));
        let (head, tail) = data.split_at(data.len() / 2);
        assert_eq!(keyed(&secret, [head, tail]).finalize().into_bytes().to_vec(), hex(expected));
    }
}

/// Computed with Python's hmac module from the layout at the head of the module.
#[test]
fn what_is_proven_is_laid_out_as_documented() {
    let secret = Secret::new((0..32).collect::<Vec<u8>>()).unwrap();
    let proof = |side| mac(&secret, side, Purpose::Link, [&[0x11; 32], &[0x22; 32]], b"context").finalize().into_bytes().to_vec();
    assert_eq!(proof(Side::Initiator), hex("13446f5a94301288db19bd73405d3192c14d0722d96ae037b6c9bbea332a82ef"));
    assert_eq!(proof(Side::Responder), hex("eb08fa24e73bf8de48bd6717f468ee1b55046e0a1dc4f21a12d52b42e9c5a7df"));
    assert_eq!(vouch(&secret, b"words").to_vec(), hex("a2392a498804fdb7c474b17e381d3347f48c70a0fab6be4c0199ac6a56f83080"));
    assert!(is_vouched(&secret, b"words", &vouch(&secret, b"words")) && !is_vouched(&secret, b"word", &vouch(&secret, b"words")));
}

#[test]
fn two_who_know_the_secret_agree_however_the_bytes_come() {
    transcript(&mut initiator(1), &mut responder(1));
    let (mut initiator, mut responder) = (initiator(1), responder(1));
    let mut to_responder = initiator.opening();
    loop {
        let mut reply = None;
        for byte in &to_responder {
            assert_eq!(reply, None);
            reply = responder.receive(&[*byte]).unwrap();
        }
        let reply = reply.unwrap();
        assert_eq!(initiator.receive(&[]), Ok(Step::Listen));
        let steps: Vec<Step> = reply.iter().map(|byte| initiator.receive(&[*byte]).unwrap()).collect();
        assert!(steps[..steps.len() - 1].iter().all(|step| *step == Step::Listen));
        match steps.into_iter().next_back() {
            Some(Step::Send(tag)) => to_responder = tag.to_vec(),
            Some(Step::Done) => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(responder.proven(), Some(CONTEXT));
}

#[test]
fn another_secret_is_found_by_the_responder_first() {
    let (mut initiator, mut responder) = (initiator(1), responder(2));
    let challenge = answer(&mut responder, &initiator.opening());
    let refused = responder.receive(&tag(&mut initiator, &challenge)).unwrap_err();
    assert_eq!(refused, AuthenticationError::Found(Reason::Wrong));
    assert_eq!(responder.proven(), None);
    let told = initiator.receive(&refused.to_reply()).unwrap_err();
    assert_eq!(told, AuthenticationError::Refused(Reason::Wrong));
    assert!(told.to_string().contains("a different secret"), "{told}");
}

#[test]
fn a_responder_that_only_pretends_is_found_by_the_initiator() {
    let mut initiator = initiator(1);
    tag(&mut initiator, &reply(CHALLENGE, 0, &[9; 32]));
    assert_eq!(initiator.receive(&reply(PROOF, 0, &[9; 32])), Err(AuthenticationError::Found(Reason::Wrong)));
}

#[test]
fn a_recorded_connection_is_worth_nothing() {
    let [opening, challenge, tag_bytes, proof] = transcript(&mut initiator(1), &mut responder(1));
    let mut responder = responder(1);
    assert_ne!(answer(&mut responder, &opening), challenge, "nonces are drawn anew");
    assert_eq!(responder.receive(&tag_bytes), Err(AuthenticationError::Found(Reason::Wrong)));
    let mut initiator = initiator(1);
    assert_ne!(initiator.opening(), opening, "nonces are drawn anew");
    tag(&mut initiator, &challenge);
    assert_eq!(initiator.receive(&proof), Err(AuthenticationError::Found(Reason::Wrong)));
}

#[test]
fn nobody_is_taken_in_by_an_own_message_sent_back() {
    let mut initiator = initiator(1);
    assert!(matches!(initiator.receive(&initiator.opening()[..FRAME_BYTES]), Err(AuthenticationError::Junk(_))));
    // The tag in place of the proof.
    let mut initiator = self::initiator(1);
    let echo = reply(CHALLENGE, PLAIN, &nonce(&initiator));
    let own = tag(&mut initiator, &echo);
    assert_eq!(initiator.receive(&reply(PROOF, 0, &own)), Err(AuthenticationError::Found(Reason::Wrong)));
    let mut responder = responder(1);
    let challenge = answer(&mut responder, &initiator.opening());
    assert_eq!(responder.receive(&challenge[12..]), Err(AuthenticationError::Found(Reason::Wrong)));
    assert_eq!(self::responder(1).receive(&challenge), Err(AuthenticationError::Found(Reason::Wanted)));
}

#[test]
fn the_two_sides_cannot_be_swapped() {
    // Even with equal nonces and one secret, one side's proof is not the other's.
    let (mut initiator, mut responder) = (initiator(1), responder(1));
    let challenge = answer(&mut responder, &initiator.opening());
    tag(&mut initiator, &challenge);
    let (_, theirs) = split(challenge.first_chunk().unwrap());
    let swapped = initiator.mac(Side::Responder, &nonce(&initiator), &theirs).finalize().into_bytes();
    assert_eq!(responder.receive(&swapped), Err(AuthenticationError::Found(Reason::Wrong)));
}

#[test]
fn a_proof_for_one_thing_is_none_for_another() {
    let opening = |purpose, context: &[u8]| Initiator::new(&secret(1), purpose, context).unwrap().opening();
    for wrong in
        [opening(Purpose::Store, CONTEXT), opening(Purpose::Memory, CONTEXT), opening(Purpose::Link, b"short"), opening(Purpose::Link, b"")]
    {
        assert!(matches!(responder(1).receive(&wrong), Err(AuthenticationError::Junk(_))));
    }
    // A context changed on the way, which the responder takes for the initiator's until the tag.
    let (mut initiator, mut responder) = (initiator(1), responder(1));
    let mut opening = initiator.opening();
    *opening.last_mut().unwrap() ^= 1;
    let challenge = answer(&mut responder, &opening);
    assert_eq!(responder.receive(&tag(&mut initiator, &challenge)), Err(AuthenticationError::Found(Reason::Wrong)));
}

#[test]
fn truncated_messages_prove_nothing_and_trailing_bytes_are_refused() {
    let opening = initiator(1).opening();
    for length in 0..opening.len() {
        let mut responder = responder(1);
        assert_eq!(responder.receive(&opening[..length]), Ok(None), "{length} bytes");
        assert_eq!(responder.proven(), None);
    }
    let early = [&opening[..], &[0]].concat();
    assert!(matches!(responder(1).receive(&early), Err(AuthenticationError::Junk(_))));
    assert!(matches!(responder(1).receive(&[&opening[..], &[0; 1 << 20]].concat()), Err(AuthenticationError::Junk(_))));
    let (mut initiator, mut responder) = (initiator(1), responder(1));
    let challenge = answer(&mut responder, &initiator.opening());
    let tag = tag(&mut initiator, &challenge);
    assert!(matches!(responder.receive(&[&tag[..], &[0]].concat()), Err(AuthenticationError::Junk(_))));
    assert_eq!(responder.proven(), None);
    assert!(matches!(initiator.receive(&[0; FRAME_BYTES + 1]), Err(AuthenticationError::Junk(_))));
}

#[test]
fn every_changed_bit_is_noticed() {
    for bit in 0..8 * FRAME_BYTES {
        let (mut initiator, mut responder) = (initiator(1), responder(1));
        let challenge = answer(&mut responder, &initiator.opening());
        let mut proof = answer(&mut responder, &tag(&mut initiator, &challenge));
        proof[bit / 8] ^= 1 << (bit % 8);
        assert!(initiator.receive(&proof).is_err(), "bit {bit}");
    }
    for bit in 0..256 {
        let (mut initiator, mut responder) = (initiator(1), responder(1));
        let challenge = answer(&mut responder, &initiator.opening());
        let mut tag = tag(&mut initiator, &challenge);
        tag[bit / 8] ^= 1 << (bit % 8);
        assert!(responder.receive(&tag).is_err() && responder.proven().is_none(), "bit {bit}");
    }
}

#[test]
fn those_without_a_secret_are_told_so() {
    for words in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0, 0xce, 0xf7, 0x85, 0x3c], b"colhello"] {
        assert_eq!(responder(1).receive(words), Err(AuthenticationError::Found(Reason::Wanted)));
    }
    assert!(is_opening(&initiator(1).opening()) && !is_opening(b"colprov") && !is_opening(b"colhello"));
    let wanted = AuthenticationError::Found(Reason::Wanted).to_reply();
    assert!(is_reply([wanted[0], wanted[1], wanted[2], wanted[3]]) && !is_reply([0; 4]));
    for reason in Reason::KNOWN {
        assert_eq!(initiator(1).receive(&reason.to_reply()), Err(AuthenticationError::Refused(reason)));
    }
    let mut unknown = reply(REFUSED, PLAIN, &[0; 32]);
    unknown[10] = 77;
    assert_eq!(initiator(1).receive(&unknown), Err(AuthenticationError::Refused(Reason::Other(77))));
}

#[test]
fn secrets_are_neither_short_nor_shown() {
    for length in [0, 15, 1025] {
        let error = Secret::new(vec![b'x'; length]).unwrap_err().to_string();
        assert!(error.contains(&length.to_string()) && !error.contains("xxx"), "{error}");
    }
    let secret = Secret::new("correct horse battery").unwrap();
    let initiator = Initiator::new(&secret, Purpose::Store, &[]).unwrap();
    let responder = Responder::new(&secret, Purpose::Store, 0);
    let shown = format!("{secret:?} {initiator:?} {responder:?}");
    assert!(!shown.contains("horse") && !shown.contains("104"), "{shown}");
    assert_ne!(Secret::random().unwrap().expose(), Secret::random().unwrap().expose());
}

#[test]
fn a_secret_in_a_file_is_for_its_owner_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("secret");
    let put = |text: &[u8], mode| {
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        Secret::from_file(&path)
    };
    assert_eq!(put(b"0123456789abcdef\r\n", 0o600).unwrap().expose(), b"0123456789abcdef");
    assert_eq!(put(&[b'y'; 1024], 0o400).unwrap().expose(), [b'y'; 1024]);
    for mode in [0o604, 0o640, 0o644, 0o602, 0o660] {
        let error = put(b"0123456789abcdef", mode).unwrap_err();
        assert!(matches!(error, Error::Config { .. }) && error.to_string().contains("chmod 600"), "{mode:o}: {error}");
        assert!(!error.to_string().contains("0123"), "{error}");
    }
    assert!(put(b"short\n", 0o600).unwrap_err().to_string().contains("5 bytes"));
    assert!(put(&[b'y'; 4096], 0o600).is_err());
    assert!(matches!(Secret::from_file(folder.path()), Err(Error::Config { .. })));
    let pipe = folder.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    assert!(Secret::from_file(&pipe).unwrap_err().to_string().contains("a pipe"));
    assert!(matches!(Secret::from_file(folder.path().join("none")), Err(Error::Io { .. })));
}
