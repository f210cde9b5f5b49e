//! Properties that must hold for any bytes at either end of an encrypted handshake, and in the records after it.

use super::noise::Cipher;
use super::record::{self, RECORD_BYTES, Records};
use super::{Initiator, Purpose, Responder, Secret, Step};

const CONTEXT: &[u8] = b"fuzz";
/// What an honest end sends, in this order.
const CONTENTS: [&[u8]; 4] = [b"one", b"two, which is longer", &[7; 200], b"four"];

fn secret() -> Secret {
    Secret::new(*b"the secret of the fuzz targets").and_then(Secret::encrypting).expect("a good secret, in a build that encrypts")
}

fn initiator() -> Initiator {
    Initiator::new(&secret(), Purpose::Link, CONTEXT).expect("random numbers")
}

fn responder() -> Responder {
    Responder::new(&secret(), Purpose::Link, CONTEXT.len())
}

/// Returns the keys of two honest ends.
pub(crate) fn connected() -> [Cipher; 2] {
    let (mut initiator, mut responder) = (initiator(), responder());
    let mut said = initiator.opening();
    loop {
        let reply = responder.receive(&said).expect("an honest opening").expect("a whole one");
        let mut left = &reply[..];
        said = loop {
            let (now, rest) = left.split_at(initiator.wants().min(left.len()));
            left = rest;
            match initiator.receive(now).expect("an honest reply") {
                Step::Listen => {}
                Step::Send(tag) => break tag.to_vec(),
                Step::Done => {
                    let keys = initiator.into_cipher().zip(responder.take_cipher()).expect("both are proven");
                    return [keys.0, keys.1];
                }
            }
        };
    }
}

/// Passes arbitrary bytes, in parts of any size, to one end of a handshake. Checks that this end does not accept them
/// as a proof. The first byte selects the end and the size of the parts.
pub fn handshake(data: &[u8]) {
    let Some((&kind, data)) = data.split_first() else { return };
    let step = usize::from(kind >> 2) + 1;
    if kind & 1 == 0 {
        let mut responder = responder();
        for part in data.chunks(step) {
            if responder.receive(part).is_err() {
                break;
            }
        }
        assert!(responder.proven().is_none() && responder.take_cipher().is_none(), "convinced without the secret");
        return;
    }
    // If the second bit is set, the bytes follow an honest challenge.
    let mut initiator = initiator();
    if kind & 2 != 0 {
        let reply = responder().receive(&initiator.opening()).ok().flatten().expect("an honest opening");
        let wanted = initiator.wants();
        let outcome = (initiator.receive(&reply[..wanted]), initiator.receive(&reply[wanted..]));
        assert!(matches!(outcome, (Ok(Step::Listen), Ok(Step::Send(_)))), "{outcome:?}");
    }
    let mut left = data;
    while !left.is_empty() {
        let (now, rest) = left.split_at(step.min(left.len()).min(initiator.wants()));
        left = rest;
        match initiator.receive(now) {
            Ok(step) => assert!(step == Step::Listen, "{step:?} without the secret"),
            Err(_) => return,
        }
    }
}

/// Opens records of an honest end that were changed as the input specifies, or arbitrary bytes instead of records.
/// Checks that the opened bytes are a prefix of the bytes that the honest end sent.
pub fn records(data: &[u8]) {
    let Some((&kind, data)) = data.split_first() else { return };
    let [mut near, far] = connected();
    let mut sealed = Vec::new();
    for content in CONTENTS {
        record::seal(&mut near, content, &mut sealed).expect("a few bytes");
    }
    if kind & 1 == 0 {
        sealed = data.to_vec();
    } else {
        data.chunks_exact(4).for_each(|edit| change(&mut sealed, edit));
    }
    let (mut far, mut plain) = (Records::new(far), Vec::new());
    let mut outcome = Ok(());
    for part in sealed.chunks(usize::from(kind) * 7 + 1) {
        outcome = far.open(part, &mut plain);
        if outcome.is_err() {
            break;
        }
        assert!(far.begun() < RECORD_BYTES, "{} bytes are kept", far.begun());
    }
    let sent = if kind & 1 == 0 { Vec::new() } else { CONTENTS.concat() };
    assert!(sent.starts_with(&plain), "{} bytes were opened that no peer sent", plain.len());
    if outcome.is_err() {
        let before = plain.len();
        assert!(far.open(&sealed, &mut plain).is_err() && plain.len() == before, "opened again after an error");
    }
}

/// Flips, drops, repeats or adds bytes. The edit is its kind, the place (2 bytes), and a number.
fn change(bytes: &mut Vec<u8>, edit: &[u8]) {
    let &[kind, high, low, number] = edit else { return };
    let at = usize::from(u16::from_be_bytes([high, low])) % (bytes.len() + 1);
    let end = (at + usize::from(number)).min(bytes.len());
    match kind % 4 {
        0 => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= number),
        1 => drop(bytes.drain(at..end)),
        2 if bytes.len() < 1 << 14 => {
            let again = bytes[at..end].to_vec();
            drop(bytes.splice(end..end, again));
        }
        _ if bytes.len() < 1 << 14 => bytes.insert(at, number),
        _ => {}
    }
}

/// Returns initial inputs: honest messages with zeros as keys, and changes of each kind.
pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let opening = [b"colprove\x01\x02\x04\x01".as_slice(), &[0; 32], CONTEXT, &[0; 16]].concat();
    let challenge = [b"colproof\x01\x01\0\x01".as_slice(), &[0; 48]].concat();
    let proof = [b"colproof\x01\x02\0\x01".as_slice(), &[0; 32]].concat();
    let with = |kind: u8, words: &[u8]| [&[kind], words].concat();
    vec![
        ("handshake", with(0xfc, &opening)),
        ("handshake", with(0, &opening)),
        ("handshake", with(0xfd, &challenge)),
        ("handshake", with(0xff, &proof)),
        ("records", with(1, &[])),
        ("records", with(3, &[0, 0, 30, 1, 2, 0, 0, 21, 1, 0, 40, 9])),
        ("records", with(0xff, &[3, 0, 0, 0, 2, 0, 21, 38])),
        ("records", with(0, &[&[0, 19][..], &[0; 19], &[0xff; 300]].concat())),
    ]
}
