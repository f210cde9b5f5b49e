//! What must hold whatever the clients of a store send.

use super::{ClientId, Service};
use crate::rendezvous::protocol::{MAGIC, query};

/// The client that behaves.
const WITNESS: ClientId = 9;
/// How many others there are.
const CLIENTS: ClientId = 3;

/// What several clients send, in parts: each a byte for the client, one for the length, and as many bytes. The answers do not depend
/// on how a part is split, a client that is refused stays so, and one that behaves is served to the end.
pub fn store_service(data: &[u8]) {
    let mut whole = run(data, usize::MAX);
    let mut split = run(data, 1);
    if data.contains(&query::LIST_KEYS) {
        // Keys come in no order.
        whole.iter_mut().chain(&mut split).for_each(|(answers, _)| answers.sort_unstable());
    }
    assert_eq!(whole, split, "byte by byte");
}

/// What each client has been answered, and why it was refused.
type Told = Vec<(Vec<u8>, Option<String>)>;

fn run(mut data: &[u8], step: usize) -> Told {
    let mut service = Service::default();
    let mut told: Told = vec![Default::default(); CLIENTS as usize];
    service.connect(WITNESS);
    service.receive(WITNESS, &validate());
    for id in 0..CLIENTS {
        service.connect(id);
        service.receive(id, &validate());
    }
    while let Some(([client, length], rest)) = data.split_first_chunk() {
        let (bytes, rest) = rest.split_at(rest.len().min(usize::from(*length)));
        data = rest;
        let id = ClientId::from(*client) % CLIENTS;
        bytes.chunks(step.min(bytes.len().max(1))).for_each(|part| service.receive(id, part));
        // The longest numbers of clients hang up.
        if *client >= 0xf0 {
            collect(&mut service, &mut told);
            service.disconnect(id);
            service.connect(id);
            service.receive(id, &validate());
        }
        collect(&mut service, &mut told);
    }
    check_witness(&mut service);
    (0..CLIENTS).for_each(|id| service.disconnect(id));
    assert!(service.waiting.is_empty() && service.barriers.is_empty() && service.resumed.is_empty() && service.sessions.len() == 1);
    check_witness(&mut service);
    told
}

/// Takes the answers; a client that was refused is no longer read from.
fn collect(service: &mut Service, told: &mut Told) {
    for (id, (answers, refusal)) in (0..).zip(told) {
        while !service.unsent(id).is_empty() {
            answers.extend_from_slice(service.unsent(id));
            service.sent(id, service.unsent(id).len());
        }
        if let Some(reason) = service.refusal(id) {
            assert!(!service.wants_input(id) && !reason.is_empty());
            *refusal = Some(reason.to_owned());
        }
    }
}

/// That the client that behaves is answered.
fn check_witness(service: &mut Service) {
    service.receive(WITNESS, &[&[query::PING][..], &7_u32.to_le_bytes()].concat());
    assert_eq!(service.unsent(WITNESS), 7_u32.to_le_bytes());
    service.sent(WITNESS, 4);
    assert!(service.wants_input(WITNESS));
}

fn validate() -> Vec<u8> {
    [&[query::VALIDATE][..], &MAGIC.to_le_bytes()].concat()
}
