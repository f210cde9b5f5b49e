//! Tests of the handshake and its records: against other implementations of the primitives, and against every attack
//! that needs no secret.

use snow::resolvers::{CryptoResolver, DefaultResolver};
use snow::{Builder, HandshakeState};

use super::frame::FRAME_BYTES;
use super::noise::{HANDSHAKE_BYTES, Handshake, MESSAGE_BYTES, TAG_BYTES};
use super::record::{self, CONTENT_BYTES, Records};
use super::*;
use crate::base::random::Random;

const CONTEXT: &[u8] = b"what it is about";

fn secret(seed: u8) -> Secret {
    Secret::new(vec![seed; 32]).unwrap().encrypting().unwrap()
}

fn initiator(seed: u8) -> Initiator {
    Initiator::new(&secret(seed), Purpose::Link, CONTEXT).unwrap()
}

fn responder(seed: u8) -> Responder {
    Responder::new(&secret(seed), Purpose::Link, CONTEXT.len())
}

fn answer(responder: &mut Responder, bytes: &[u8]) -> Vec<u8> {
    responder.receive(bytes).unwrap().unwrap()
}

/// Gives the initiator a reply, as much at a time as it asks for, and returns its result.
fn hear(initiator: &mut Initiator, reply: &[u8]) -> Result<Step, AuthenticationError> {
    let (now, rest) = reply.split_at(initiator.wants().min(reply.len()));
    match initiator.receive(now)? {
        Step::Listen if !rest.is_empty() => hear(initiator, rest),
        step => Ok(step),
    }
}

fn tag(initiator: &mut Initiator, challenge: &[u8]) -> Word {
    match hear(initiator, challenge) {
        Ok(Step::Send(tag)) => tag,
        other => panic!("{other:?}"),
    }
}

/// Returns the keys of both ends of an honest connection, and all that they sent for them.
fn connected(mut initiator: Initiator, mut responder: Responder) -> (Cipher, Cipher, [Vec<u8>; 4]) {
    let opening = initiator.opening();
    let challenge = answer(&mut responder, &opening);
    let tag = tag(&mut initiator, &challenge);
    let proof = answer(&mut responder, &tag);
    assert_eq!(initiator.receive(&proof), Ok(Step::Done));
    assert_eq!(responder.proven(), Some(CONTEXT));
    let keys = (initiator.into_cipher().unwrap(), responder.take_cipher().unwrap());
    (keys.0, keys.1, [opening, challenge, tag.to_vec(), proof])
}

fn ciphers() -> (Cipher, Cipher) {
    let (near, far, _) = connected(initiator(1), responder(1));
    (near, far)
}

#[test]
fn two_who_know_the_secret_agree_however_the_bytes_come() {
    let (_, _, sent) = connected(initiator(1), responder(1));
    assert_eq!(sent.map(|bytes| bytes.len()), [60 + CONTEXT.len(), 60, 32, 44]);
    let (mut initiator, mut responder) = (initiator(1), responder(1));
    let mut to_responder = initiator.opening();
    loop {
        let replies: Vec<_> = to_responder.iter().map(|byte| responder.receive(&[*byte]).unwrap()).collect();
        assert!(replies[..replies.len() - 1].iter().all(Option::is_none));
        let mut steps = Vec::new();
        for byte in replies.into_iter().next_back().unwrap().unwrap() {
            assert!(initiator.wants() > 0);
            steps.push(initiator.receive(&[byte]).unwrap());
        }
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
fn another_secret_is_found_by_the_responder_first_and_told_in_the_usual_words() {
    let (mut initiator, mut responder) = (initiator(1), responder(2));
    let refused = responder.receive(&initiator.opening()).unwrap_err();
    assert_eq!((&refused, responder.proven()), (&AuthenticationError::Found(Reason::Wrong), None));
    let told = initiator.receive(&refused.to_reply()).unwrap_err();
    assert_eq!(told, AuthenticationError::Refused(Reason::Wrong));
    assert!(told.to_string().contains("a different secret"), "{told}");
    // A responder that only pretends to know the secret.
    let (mut initiator, mut pretender) = (self::initiator(1), self::responder(2));
    let other = answer(&mut pretender, &self::initiator(2).opening());
    assert_eq!(hear(&mut initiator, &other), Err(AuthenticationError::Found(Reason::Wrong)));
}

#[test]
fn one_that_encrypts_and_one_that_does_not_refuse_each_other_and_say_so() {
    let plain = Secret::new(vec![1; 32]).unwrap();
    let mut encrypted = initiator(1);
    let refused = Responder::new(&plain, Purpose::Link, CONTEXT.len()).receive(&encrypted.opening()).unwrap_err();
    assert_eq!(refused, AuthenticationError::Found(Reason::Encrypted));
    let told = encrypted.receive(&refused.to_reply()).unwrap_err().to_string();
    assert!(told.contains("it does not encrypt its connections") && told.contains("COLLECTIVES_ENCRYPT=1"), "{told}");

    let mut unencrypted = Initiator::new(&plain, Purpose::Link, CONTEXT).unwrap();
    let refused = responder(1).receive(&unencrypted.opening()).unwrap_err();
    assert_eq!(refused, AuthenticationError::Found(Reason::Plain));
    let told = unencrypted.receive(&refused.to_reply()).unwrap_err().to_string();
    assert!(told.contains("it encrypts its connections") && told.contains("COLLECTIVES_ENCRYPT=1"), "{told}");
    for reason in Reason::KNOWN {
        assert_eq!(initiator(1).receive(&reason.to_reply()), Err(AuthenticationError::Refused(reason)));
    }
}

#[test]
fn memory_of_a_host_is_handed_over_as_ever() {
    let mut initiator = Initiator::new(&secret(1), Purpose::Memory, CONTEXT).unwrap();
    let mut responder = Responder::new(&secret(1), Purpose::Memory, CONTEXT.len());
    let challenge = answer(&mut responder, &initiator.opening());
    assert_eq!(challenge.len(), FRAME_BYTES);
    let tag = tag(&mut initiator, &challenge);
    assert_eq!(initiator.receive(&answer(&mut responder, &tag)), Ok(Step::Done));
    assert!(initiator.into_cipher().is_none() && responder.take_cipher().is_none());
}

#[test]
fn a_recorded_connection_is_worth_nothing() {
    let (_, _, [opening, challenge, tag_bytes, proof]) = connected(initiator(1), responder(1));
    let mut responder = responder(1);
    assert_ne!(answer(&mut responder, &opening), challenge, "keys are made anew");
    assert_eq!(responder.receive(&tag_bytes), Err(AuthenticationError::Found(Reason::Wrong)));
    assert!(responder.proven().is_none() && responder.take_cipher().is_none());
    let mut initiator = initiator(1);
    assert_ne!(initiator.opening(), opening, "keys are made anew");
    assert_eq!(hear(&mut initiator, &challenge), Err(AuthenticationError::Found(Reason::Wrong)));
    assert!(initiator.receive(&proof).is_err());
}

#[test]
fn every_changed_bit_of_a_handshake_is_noticed_by_whoever_hears_it() {
    let opening_bits = 8 * initiator(1).opening().len();
    for bit in 0..opening_bits {
        let mut opening = initiator(1).opening();
        opening[bit / 8] ^= 1 << (bit % 8);
        assert!(responder(1).receive(&opening).is_err(), "bit {bit} of the opening");
    }
    for bit in 0..8 * 60 {
        let mut initiator = initiator(1);
        let mut challenge = answer(&mut responder(1), &initiator.opening());
        challenge[bit / 8] ^= 1 << (bit % 8);
        assert!(hear(&mut initiator, &challenge).is_err(), "bit {bit} of the challenge");
    }
    for bit in 0..8 * 32 {
        let (mut initiator, mut responder) = (initiator(1), responder(1));
        let challenge = answer(&mut responder, &initiator.opening());
        let mut tag = tag(&mut initiator, &challenge);
        tag[bit / 8] ^= 1 << (bit % 8);
        assert!(responder.receive(&tag).is_err() && responder.take_cipher().is_none(), "bit {bit} of the tag");
    }
    for bit in 0..8 * 44 {
        let (mut initiator, mut responder) = (initiator(1), responder(1));
        let challenge = answer(&mut responder, &initiator.opening());
        let tag = tag(&mut initiator, &challenge);
        let mut proof = answer(&mut responder, &tag);
        proof[bit / 8] ^= 1 << (bit % 8);
        assert!(initiator.receive(&proof).is_err() && initiator.into_cipher().is_none(), "bit {bit} of the proof");
    }
}

#[test]
fn a_handshake_for_one_thing_is_none_for_another() {
    for wrong in [(Purpose::Store, CONTEXT), (Purpose::Link, b"what it is abouT")] {
        let opening = Initiator::new(&secret(1), wrong.0, wrong.1).unwrap().opening();
        let mut relabelled = initiator(1).opening();
        // The other opening's keys under this one's header and context.
        relabelled[12..44].copy_from_slice(&opening[12..44]);
        let end = relabelled.len() - TAG_BYTES;
        relabelled[end..].copy_from_slice(&opening[opening.len() - TAG_BYTES..]);
        assert_eq!(responder(1).receive(&relabelled), Err(AuthenticationError::Found(Reason::Wrong)));
    }
}

#[test]
fn truncated_messages_prove_nothing_and_trailing_bytes_are_refused() {
    let opening = initiator(1).opening();
    for length in 0..opening.len() {
        let mut responder = responder(1);
        assert_eq!(responder.receive(&opening[..length]), Ok(None), "{length} bytes");
    }
    for more in [1, 1 << 20] {
        assert!(matches!(responder(1).receive(&[&opening[..], &vec![0; more]].concat()), Err(AuthenticationError::Junk(_))));
    }
    assert!(matches!(initiator(1).receive(&[0; 61]), Err(AuthenticationError::Junk(_))));
}

/// The other end of a handshake, with the primitives of RustCrypto and dalek.
fn others(key: &Word, prologue: &[u8], begins: bool) -> HandshakeState {
    struct Others(DefaultResolver);
    impl CryptoResolver for Others {
        fn resolve_rng(&self) -> Option<Box<dyn snow::types::Random>> {
            self.0.resolve_rng()
        }
        fn resolve_dh(&self, choice: &snow::params::DHChoice) -> Option<Box<dyn snow::types::Dh>> {
            self.0.resolve_dh(choice)
        }
        fn resolve_hash(&self, choice: &snow::params::HashChoice) -> Option<Box<dyn snow::types::Hash>> {
            self.0.resolve_hash(choice)
        }
        fn resolve_cipher(&self, choice: &snow::params::CipherChoice) -> Option<Box<dyn snow::types::Cipher>> {
            self.0.resolve_cipher(choice)
        }
    }
    let pattern = "Noise_NNpsk0_25519_AESGCM_SHA256".parse().unwrap();
    let builder = Builder::with_resolver(pattern, Box::new(Others(DefaultResolver))).psk(0, key).unwrap().prologue(prologue).unwrap();
    if begins { builder.build_initiator().unwrap() } else { builder.build_responder().unwrap() }
}

#[test]
fn the_protocol_is_that_of_other_implementations() {
    let (key, prologue) = ([7; 32], b"what both say");
    for is_ours_first in [true, false] {
        let mut theirs = others(&key, prologue, !is_ours_first);
        let mut message = [0; HANDSHAKE_BYTES];
        let mut ours = if is_ours_first {
            let (handshake, first) = Handshake::begin(&key, prologue).unwrap();
            theirs.read_message(&first, &mut [0; 64]).unwrap();
            assert_eq!(theirs.write_message(&[], &mut message).unwrap(), HANDSHAKE_BYTES);
            handshake.finish(&message).unwrap()
        } else {
            assert_eq!(theirs.write_message(&[], &mut message).unwrap(), HANDSHAKE_BYTES);
            let (cipher, answer) = Handshake::answer(&key, prologue, &message).unwrap();
            theirs.read_message(&answer, &mut [0; 64]).unwrap();
            cipher
        };
        let mut theirs = theirs.into_transport_mode().unwrap();
        let (mut sealed, mut plain) = (vec![0; MESSAGE_BYTES], vec![0; MESSAGE_BYTES]);
        // Past the first change of keys, in both directions.
        for number in 0..(1 << 16) + 20_u32 {
            let content = number.to_le_bytes();
            let length = content.len() + TAG_BYTES;
            if number == 1 << 16 {
                theirs.rekey_outgoing();
                theirs.rekey_incoming();
            }
            ours.seal(&content, &mut sealed[..length]).unwrap();
            assert_eq!(theirs.read_message(&sealed[..length], &mut plain).unwrap(), content.len());
            assert_eq!(plain[..content.len()], content);
            assert_eq!(theirs.write_message(&content, &mut sealed).unwrap(), length);
            assert_eq!(ours.open(&sealed[..length], &mut plain).unwrap(), content.len());
            assert_eq!(plain[..content.len()], content);
        }
    }
}

#[test]
fn what_is_sealed_is_opened_however_it_is_cut() {
    let (mut near, far) = ciphers();
    let mut far = Records::new(far);
    let mut random = Random(5);
    for length in [0, 1, 2, 15, 16, 17, 1000, CONTENT_BYTES - 1, CONTENT_BYTES, CONTENT_BYTES + 1, 3 * CONTENT_BYTES + 7] {
        let content: Vec<u8> = (0..length).map(|_| random.below(256) as u8).collect();
        let (mut sealed, mut plain) = (Vec::new(), Vec::new());
        record::seal(&mut near, &content, &mut sealed).unwrap();
        assert_eq!(sealed.len(), length + length.div_ceil(CONTENT_BYTES) * (2 + TAG_BYTES));
        let mut left = &sealed[..];
        while !left.is_empty() {
            let (part, rest) = left.split_at(left.len().min(1 + random.below(9000)));
            far.open(part, &mut plain).unwrap();
            left = rest;
        }
        assert!(plain == content, "{length} bytes");
    }
}

/// Opens all bytes at once. Returns what was authenticated before an error, and whether there was one.
fn opened(cipher: Cipher, bytes: &[u8]) -> (Vec<u8>, bool) {
    let mut records = Records::new(cipher);
    let mut plain = Vec::new();
    let outcome = records.open(bytes, &mut plain);
    if outcome.is_err() {
        let before = plain.clone();
        assert!(records.open(&[0; 100], &mut plain).is_err(), "broken once, broken for ever");
        assert_eq!(plain, before);
    }
    (plain, outcome.is_err())
}

#[test]
fn records_that_were_changed_dropped_repeated_swapped_or_sent_back_are_not_opened() {
    let contents = [&b"the first"[..], b"the second", b"the third"];
    let prepare = || {
        let (mut near, far) = ciphers();
        let sealed = contents.map(|content| {
            let mut sealed = Vec::new();
            record::seal(&mut near, content, &mut sealed).unwrap();
            sealed
        });
        (near, far, sealed)
    };
    let (_, far, sealed) = prepare();
    assert_eq!(opened(far, &sealed.concat()), (contents.concat(), false));
    for bit in 0..8 * prepare().2.concat().len() {
        let (_, far, sealed) = prepare();
        let mut bytes = sealed.concat();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let (plain, is_error) = opened(far, &bytes);
        // A length that increased waits for bytes that do not come, and opens nothing meanwhile.
        let is_length =
            [0, 1].iter().any(|at| [0, sealed[0].len(), sealed[0].len() + sealed[1].len()].contains(&(bit / 8).wrapping_sub(*at)));
        assert!(is_error || is_length, "bit {bit}");
        assert!(contents.concat().starts_with(&plain) && plain.len() < contents.concat().len(), "bit {bit}");
    }
    for order in [&[1, 2][..], &[0, 2], &[0, 0, 1], &[1, 0, 2], &[0, 2, 1], &[2]] {
        let (_, far, sealed) = prepare();
        let bytes: Vec<u8> = order.iter().flat_map(|at| sealed[*at].clone()).collect();
        let (plain, is_error) = opened(far, &bytes);
        assert!(is_error && contents.concat().starts_with(&plain), "{order:?}");
    }
    let (near, _, sealed) = prepare();
    assert_eq!(opened(near, &sealed.concat()), (Vec::new(), true), "sent back to their sender");
    let (_, other, _) = prepare();
    assert_eq!(opened(other, &sealed.concat()), (Vec::new(), true), "of another connection");
    for empty in [&[0, 0][..], &[0, 16]] {
        assert_eq!(opened(prepare().1, empty), (Vec::new(), true), "records without content");
    }
}

#[test]
fn nothing_that_was_not_authenticated_is_left_in_the_readers_memory() {
    let (mut near, mut far) = ciphers();
    let mut sealed = [0; 40];
    near.seal(b"24 bytes that are secret", &mut sealed).unwrap();
    sealed[39] ^= 1;
    let mut into = [9; 64];
    assert!(far.open(&sealed, &mut into).is_none());
    assert!(into[..40].iter().all(|byte| *byte == 0 || *byte == 9), "{into:?}");
}
