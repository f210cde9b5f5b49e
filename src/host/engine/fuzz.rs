//! Properties that must hold whatever bytes a peer of a collective sends.

#![expect(unsafe_code, reason = "the engine works on raw memory")]

use std::time::Duration;

use super::wire::{self, FIRST_BYTES, Message};
use super::{CheckedPlan, Engine, Execution, Links, Memory};
use crate::base::deadline::Deadline;
use crate::call::element::{DType, TypeTag};
use crate::call::{Call, Collective};
use crate::flight::Flight;
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::bools::NormalisedBools;
use crate::host::health::Health;
use crate::host::link::script::Script;
use crate::host::plan::{Action, Plan, Space, Span, Step};

/// Bytes that this rank exchanges with each peer in each direction.
const PART: usize = 24;
/// The initial content of the destination.
const UNTOUCHED: u8 = 0xa5;

/// Checks that bytes parse as a message header only if the header is complete, and that the parsed header encodes to
/// the same bytes again.
pub fn engine_headers(data: &[u8]) {
    let mut rest = data;
    while let Ok(Some((message, used))) = wire::parse(rest) {
        let encoded = match message {
            Message::First { call, total, payload } => wire::encode_first(&call, total, payload).to_vec(),
            Message::Next { payload } => wire::encode_next(payload).to_vec(),
            Message::AbortReason(abort_reason) => wire::encode_abort_reason(&abort_reason).to_vec(),
            Message::Leave => wire::encode_leave().to_vec(),
        };
        assert_eq!(encoded, rest[..used]);
        assert!((0..used).all(|short| wire::parse(&rest[..short]) == Ok(None)), "{message:?} in part");
        rest = &rest[used..];
    }
}

/// Checks a run in which one of two peers sends any bytes. The first byte of `data` selects how the other bytes, which
/// the peer sends, are split.
///
/// - The run ends, and ends the same way however the bytes are split.
/// - If the run fails, the other peer receives the reason.
/// - Nothing is written to the destination before all ranks have agreed on the call.
/// - However the run ends, every `bool` in the destination is 0 or 1 afterwards.
pub fn engine_peer(data: &[u8]) {
    let Some((&jitter, bytes)) = data.split_first() else { return };
    let whole = run(bytes, 0);
    let split = run(bytes, u64::from(jitter) + 1);
    assert_eq!(whole, split, "in parts");
}

/// The links to ranks 1 and 2.
struct Peers([Option<Script>; 2]);

impl Links for Peers {
    type Link = Script;

    fn link(&mut self, rank: usize) -> Result<&mut Script, Interrupted> {
        self.0[rank - 1].as_mut().ok_or_else(|| AbortReason::Lost { rank: rank as u32, by: 0 }.into())
    }

    fn for_each_open(&mut self, visit: &mut dyn FnMut(usize, &mut Script)) {
        (1..).zip(&mut self.0).for_each(|(rank, link)| {
            if let Some(link) = link {
                visit(rank, link);
            }
        });
    }

    fn drop_link(&mut self, rank: usize) {
        self.0[rank - 1] = None;
    }
}

/// Returns a plan that agrees with both peers and then exchanges a part with each.
fn plan() -> Plan {
    let span = |space, offset, len| Span { space, offset, len };
    let mut steps = Vec::new();
    for peer in [1, 2] {
        steps.push(Step { action: Action::Send { to: peer, from: span(Space::Source, 0, 0) }, after: vec![] });
        steps.push(Step { action: Action::Receive { from: peer, into: span(Space::Destination, 0, 0) }, after: vec![] });
    }
    for (peer, at) in [(1, 0), (2, PART)] {
        steps.push(Step { action: Action::Send { to: peer, from: span(Space::Source, 0, PART) }, after: vec![0, 1, 2, 3] });
        steps.push(Step { action: Action::Receive { from: peer, into: span(Space::Destination, at, PART) }, after: vec![0, 1, 2, 3] });
    }
    Plan { steps, scratch_bytes: 0 }
}

/// Returns the call of rank 0.
pub(in crate::host) fn call() -> Call {
    let element = TypeTag::Scalar(DType::Bool);
    Call { kind: Collective::AllToAllV, op: 0, element, count: 0, root: None, counts_hash: 0, sequence: 1 }
}

/// Returns the result of a run in which rank 1 sends `bytes` and rank 2 sends a correct stream.
fn run(bytes: &[u8], jitter: u64) -> Result<(), AbortReason> {
    let right = [&wire::encode_first(&call().to_bytes(), PART as u64, 0)[..], &wire::encode_next(PART), &[2; PART]].concat();
    // The filler after the bytes begins no message, so every run ends. The run of a correct peer ends before the
    // filler.
    let mut links = Peers([Some(Script::new(bytes, Some(0xee), jitter)), Some(Script::new(&right, Some(0xee), jitter))]);
    let (source, mut destination) = ([7_u8; PART], [UNTOUCHED; 2 * PART]);
    let (deadline, health) = (Deadline::after(Duration::from_secs(10)), Health::default());
    let into = destination.as_mut_ptr();
    // SAFETY: the array outlives the value, and nothing else uses it while the value is dropped. So does a call with
    // its own destination.
    let normalised = unsafe { NormalisedBools::new(call().element, into, 2 * PART) };
    // SAFETY: both arrays live until the run is over, and nothing is folded.
    let memory = unsafe { Memory::new(source.as_ptr(), PART, into, 2 * PART, None) };
    let request = Execution {
        plan: &CheckedPlan::new(plan()),
        participants: &[0, 1, 2],
        memory,
        call: &call(),
        fold: None,
        deadline: &deadline,
        health: &health,
        recorder: &Flight::default(),
        interrupted: &mut || None,
    };
    let result = Engine::new(0, 3, false).run(request, &mut links).map_err(|stop| stop.abort_reason);
    assert!(!deadline.has_passed());
    let agrees = bytes.starts_with(&right[..FIRST_BYTES]);
    assert!(agrees || destination == [UNTOUCHED; 2 * PART], "written before all ranks agreed");
    match &result {
        Ok(()) => assert!(agrees && destination[PART..] == [2; PART] && destination[..PART] == peers_part(bytes)),
        Err(abort_reason) => assert_eq!(health.abort_reason(), Some(abort_reason)),
    }
    let expected = destination.map(|byte| u8::from(byte != 0));
    drop(normalised);
    assert_eq!(destination, expected, "what the caller sees as truth values");
    check_told(links.0[1].as_ref().map_or(&[], |link| &link.taken), result.as_ref().err());
    result
}

/// Returns the payload that a correct peer has sent, without the message headers.
fn peers_part(bytes: &[u8]) -> Vec<u8> {
    let (mut rest, mut part) = (bytes, Vec::new());
    // The filler completes a payload that was cut short.
    while part.len() < PART
        && let Ok(Some((message, used))) = wire::parse(rest)
    {
        let (payload, behind) = rest[used..].split_at((rest.len() - used).min(message.payload()));
        part.extend(payload);
        part.resize(part.len() + message.payload() - payload.len(), 0xee);
        rest = behind;
    }
    part
}

/// Checks that rank 2 received whole messages only, and that the last of them is the reason why the run ended.
fn check_told(taken: &[u8], why: Option<&AbortReason>) {
    let (mut rest, mut last) = (taken, None);
    while !rest.is_empty() {
        let (message, used) = wire::parse(rest).expect("a rank sends messages").expect("whole ones");
        assert!(used + message.payload() <= rest.len(), "{message:?} is cut short");
        rest = &rest[used + message.payload()..];
        last = Some(message);
    }
    if let Some(why) = why {
        assert_eq!(last, Some(Message::AbortReason(*why)), "what was sent to the other peer");
    }
}

/// Returns the initial inputs.
pub(in crate::host) fn seeds(abort_reasons: &[AbortReason]) -> Vec<(&'static str, Vec<u8>)> {
    let first = |total, payload| wire::encode_first(&call().to_bytes(), total, payload).to_vec();
    let part = vec![1; PART];
    let (next, half) = (wire::encode_next(PART).to_vec(), wire::encode_next(PART / 2).to_vec());
    let mut streams = vec![
        [first(PART as u64, 0), next.clone(), part.clone()].concat(),
        [first(PART as u64, 0), half.clone(), part[..PART / 2].to_vec(), half, part[..PART / 2].to_vec()].concat(),
        [first(PART as u64, 0), wire::encode_leave().to_vec()].concat(),
        [first(2 * PART as u64, 0), next.clone()].concat(),
        [next, part].concat(),
    ];
    streams.extend(
        abort_reasons.iter().map(|abort_reason| [first(PART as u64, 0), wire::encode_abort_reason(abort_reason).to_vec()].concat()),
    );
    let headers = streams[0][..FIRST_BYTES + wire::HEADER_BYTES].to_vec();
    let whole = abort_reasons.iter().map(|abort_reason| wire::encode_abort_reason(abort_reason).to_vec()).collect::<Vec<_>>().concat();
    let mut seeds = vec![("engine_headers", headers), ("engine_headers", [whole, wire::encode_leave().to_vec()].concat())];
    seeds.extend(streams.into_iter().map(|stream| ("engine_peer", [vec![5], stream].concat())));
    seeds
}
