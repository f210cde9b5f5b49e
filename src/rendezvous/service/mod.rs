//! The logic of a store's server: reads requests from clients' bytes, answers them, and keeps track of clients whose
//! waits have not ended. No sockets, no clock.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::limits::MESSAGE_BYTES;
use super::protocol::{NOT_READY, READY, RequestDecoder, STOP_WAITING, StoreRequest, WAIT_CANCELED, push_bytes, query};
use super::table::{Key, Refusal, Table};
use crate::authentication::record::Records;
use crate::authentication::{self, AuthenticationError, Purpose, Reason, Responder, Secret};
use crate::base::tuning::service::{SEALED_BYTES, UNREAD_BYTES, UNSENT_BYTES};

/// A number that identifies a client.
pub(super) type ClientId = u64;

/// What a client waits for.
#[derive(Debug)]
enum Parked {
    /// Keys that did not exist when it asked, and have not been set since.
    Keys(HashSet<Key>),
    /// A barrier.
    Barrier(Key),
}

/// One client.
#[derive(Debug, Default)]
struct Session {
    /// The proof that must come first, while it is incomplete.
    proving: Option<Responder>,
    /// Encrypts the client's bytes, if the connection is encrypted.
    records: Option<Records>,
    requests: RequestDecoder,
    answers: Vec<u8>,
    /// Bytes to send before the answers: records of earlier answers, and replies of a proof.
    sealed: Vec<u8>,
    validated: bool,
    parked: Option<Parked>,
    /// The queue whose value ended this client's wait. That value is this client's to take.
    woken: Option<Key>,
    /// Why nothing more is read from this client.
    refused: Option<String>,
}

impl Session {
    /// Stops reading from the client, and sends it the reason.
    fn refuse_unauthenticated(&mut self, error: &AuthenticationError) {
        self.sealed.extend(error.to_reply());
        self.refused = Some(format!("no proof of the job's secret: {error}"));
    }

    /// Returns the number of unsent bytes.
    fn owed(&self) -> usize {
        self.answers.len() + self.sealed.len()
    }

    /// Takes in requests, and decrypts them if the connection is encrypted.
    fn take_in(&mut self, bytes: &[u8]) {
        let Some(records) = &mut self.records else { return self.requests.push(bytes) };
        let mut plain = Vec::new();
        let opened = records.open(bytes, &mut plain);
        self.requests.push(&plain);
        if let Err(error) = opened {
            self.refused = Some(error.to_string());
        }
    }

    /// Encrypts some of the answers, unless other bytes must be sent first.
    fn seal(&mut self) {
        let Some(records) = self.records.as_mut().filter(|_| self.sealed.is_empty() && !self.answers.is_empty()) else { return };
        let count = self.answers.len().min(SEALED_BYTES);
        if let Err(error) = records.seal(&self.answers[..count], &mut self.sealed) {
            self.sealed.clear();
            self.refused = Some(error.to_string());
        }
        self.answers.drain(..count);
    }
}

/// A store and its clients.
#[derive(Debug, Default)]
pub(super) struct Service {
    /// The secret that clients must know.
    secret: Option<Secret>,
    table: Table,
    sessions: HashMap<ClientId, Session>,
    /// The clients that wait for a key, the longest waiting first.
    waiting: HashMap<Key, Vec<ClientId>>,
    /// The clients that wait at a barrier.
    barriers: HashMap<Key, Vec<ClientId>>,
    /// Clients whose wait has ended, so that their next requests can be read.
    resumed: Vec<ClientId>,
    /// Clients that have received answers since the last [`Service::take_answered`].
    answered: Vec<ClientId>,
    /// The number of requests served, greetings included.
    served: Arc<AtomicU64>,
}

impl Service {
    /// Returns the counter of requests served, greetings included. A request counts before it is answered.
    pub(super) fn served(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.served)
    }

    /// Creates an empty store. With a secret, clients must prove that they know it.
    pub(super) fn new(secret: Option<Secret>) -> Self {
        Self { secret, ..Self::default() }
    }

    /// Whether exactly one client is connected, and no client waits.
    #[cfg(feature = "__internals")]
    pub(super) fn serves_one_that_waits_for_nothing(&self) -> bool {
        self.waiting.is_empty() && self.barriers.is_empty() && self.resumed.is_empty() && self.sessions.len() == 1
    }

    /// Adds a client that has connected.
    pub(super) fn connect(&mut self, id: ClientId) {
        let proving = self.secret.as_ref().map(|secret| Responder::new(secret, Purpose::Store, 0));
        self.sessions.insert(id, Session { proving, ..Session::default() });
    }

    /// Takes in bytes from a client.
    pub(super) fn receive(&mut self, id: ClientId, bytes: &[u8]) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        match &mut session.proving {
            _ if session.refused.is_some() => {}
            Some(_) if bytes.is_empty() => {}
            Some(responder) => match responder.receive(bytes) {
                Ok(reply) => {
                    session.sealed.extend(reply.into_iter().flatten());
                    if responder.proven().is_some() {
                        session.records = responder.take_cipher().map(Records::new);
                        session.proving = None;
                    }
                }
                Err(unproven) => session.refuse_unauthenticated(&unproven),
            },
            None if authentication::is_opening(bytes) && !session.validated => {
                session.refuse_unauthenticated(&AuthenticationError::Found(Reason::NoSecret))
            }
            None => {
                session.take_in(bytes);
                self.proceed(id);
            }
        }
    }

    /// Sends the refusal `Busy` to a client that has not finished its proof; other clients would not understand it.
    pub(super) fn turn_away(&mut self, id: ClientId) {
        if let Some(session) = self.sessions.get_mut(&id).filter(|session| session.proving.is_some()) {
            session.sealed.extend(Reason::Busy.to_reply());
        }
    }

    /// Removes a client that has disconnected.
    pub(super) fn disconnect(&mut self, id: ClientId) {
        self.unpark(id);
        let woken = self.sessions.remove(&id).and_then(|session| session.woken);
        self.hand_on(woken);
        self.proceed_resumed();
    }

    /// Returns the clients that have received answers since the last call.
    pub(super) fn take_answered(&mut self) -> Vec<ClientId> {
        std::mem::take(&mut self.answered)
    }

    /// Returns the bytes that are yet to be sent to a client, or the first of them.
    pub(super) fn unsent(&mut self, id: ClientId) -> &[u8] {
        let Some(session) = self.sessions.get_mut(&id) else { return &[] };
        session.seal();
        if session.sealed.is_empty() { &session.answers } else { &session.sealed }
    }

    /// Removes `bytes` bytes of [`Service::unsent`] that have been sent, and continues with requests that waited for
    /// that.
    pub(super) fn sent(&mut self, id: ClientId, bytes: usize) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let unsent = if session.sealed.is_empty() { &mut session.answers } else { &mut session.sealed };
        unsent.drain(..bytes);
        if unsent.is_empty() {
            *unsent = Vec::new();
        }
        self.proceed(id);
    }

    /// Whether more should be read from a client.
    pub(super) fn wants_input(&self, id: ClientId) -> bool {
        self.sessions.get(&id).is_some_and(|session| {
            let full = session.parked.is_some() && session.requests.waiting() > UNREAD_BYTES;
            session.refused.is_none() && session.owed() <= UNSENT_BYTES && !full
        })
    }

    /// Whether a client has shown that it speaks the protocol.
    pub(super) fn is_validated(&self, id: ClientId) -> bool {
        self.sessions.get(&id).is_some_and(|session| session.validated)
    }

    /// Returns why a client is to be dropped, if it is.
    pub(super) fn refusal(&self, id: ClientId) -> Option<&str> {
        self.sessions.get(&id)?.refused.as_deref()
    }

    /// Reads on from this client, and from clients whose wait ends as a result.
    fn proceed(&mut self, id: ClientId) {
        self.read_requests(id);
        self.proceed_resumed();
    }

    /// Reads on from clients whose wait has ended.
    fn proceed_resumed(&mut self) {
        while let Some(id) = self.resumed.pop() {
            self.read_requests(id);
        }
    }

    /// Serves a client's complete requests, as far as limits and waits allow.
    fn read_requests(&mut self, id: ClientId) {
        while let Some(session) = self.sessions.get_mut(&id) {
            if session.refused.is_some() || session.owed() > UNSENT_BYTES {
                return;
            }
            // Answers follow the order of requests, so only the cancellation of a wait may overtake it.
            if session.parked.is_some() && session.requests.next_is(query::CANCEL_WAIT) != Some(true) {
                return;
            }
            // A client that begins otherwise is not read any further: a first request could be long.
            if !session.validated && session.requests.next_is(query::VALIDATE) == Some(false) {
                session.refused = Some("the first request is not VALIDATE".to_owned());
                return;
            }
            let outcome = match session.requests.next() {
                Ok(None) => return,
                Ok(Some(request)) => self.carry_out(id, request).map_err(|Refusal(reason)| reason),
                Err(malformed) => Err(malformed.0),
            };
            if let (Err(reason), Some(session)) = (outcome, self.sessions.get_mut(&id)) {
                session.refused = Some(reason);
            }
        }
    }

    /// Checks, counts and serves one request.
    fn carry_out(&mut self, id: ClientId, request: StoreRequest) -> Result<(), Refusal> {
        self.served.fetch_add(1, Ordering::Relaxed);
        let Some(session) = self.sessions.get_mut(&id) else { return Ok(()) };
        match (&request, session.validated) {
            (StoreRequest::Validate, false) => {
                session.validated = true;
                return Ok(());
            }
            (StoreRequest::Validate, true) => return Err(Refusal("a second VALIDATE".to_owned())),
            (_, false) => return Err(Refusal("the first request is not VALIDATE".to_owned())),
            (_, true) => {}
        }
        let woken = session.woken.take();
        let takes = matches!(&request, StoreRequest::QueuePop { key } if woken.as_ref() == Some(key));
        let outcome = self.dispatch(id, request);
        if !takes {
            self.hand_on(woken);
        }
        outcome
    }

    /// Serves a request.
    fn dispatch(&mut self, id: ClientId, request: StoreRequest) -> Result<(), Refusal> {
        match request {
            StoreRequest::Validate => {}
            StoreRequest::Set { key, value } => self.set(&key, value)?,
            StoreRequest::CompareSet { key, expected, desired } => {
                let value = self.table.compare_set(&key, expected, desired)?;
                self.wake(&key);
                self.answer(id, |answers| push_bytes(answers, &value));
            }
            StoreRequest::Get { key } => self.values(id, &[key])?,
            StoreRequest::MultiGet { keys } => self.values(id, &keys)?,
            StoreRequest::Add { key, delta } => {
                let sum = self.table.add(&key, delta)?;
                self.wake(&key);
                self.number(id, sum);
            }
            StoreRequest::Check { keys } => {
                let ready = keys.iter().all(|key| self.table.has(key));
                self.flag(id, if ready { READY } else { NOT_READY });
            }
            StoreRequest::Wait { keys } => self.wait(id, keys),
            StoreRequest::NumKeys => self.number(id, self.table.len() as i64),
            StoreRequest::DeleteKey { key } => {
                let deleted = self.table.delete(&key);
                self.number(id, i64::from(deleted));
            }
            StoreRequest::Append { key, value } => {
                self.table.append(&key, &value)?;
                self.wake(&key);
            }
            StoreRequest::MultiSet { pairs } => pairs.into_iter().try_for_each(|(key, value)| self.set(&key, value))?,
            StoreRequest::CancelWait => {
                self.unpark(id);
                self.flag(id, WAIT_CANCELED);
            }
            StoreRequest::Ping { nonce } => self.answer(id, |answers| answers.extend(nonce.to_le_bytes())),
            StoreRequest::QueuePush { key, value } => {
                self.table.push(&key, value)?;
                self.wake_one(&key);
            }
            StoreRequest::QueuePop { key } => self.pop(id, &key),
            StoreRequest::QueueLen { key } => self.number(id, self.table.queue_len(&key) as i64),
            StoreRequest::ListKeys => self.list_keys(id)?,
            StoreRequest::Barrier { key, world_size } => self.barrier(id, key, world_size)?,
        }
        Ok(())
    }

    /// Sets a key and wakes the clients that wait for it.
    fn set(&mut self, key: &[u8], value: Vec<u8>) -> Result<(), Refusal> {
        self.table.set(key, value)?;
        self.wake(key);
        Ok(())
    }

    /// Answers with the values of keys; an absent key counts as empty.
    fn values(&mut self, id: ClientId, keys: &[Key]) -> Result<(), Refusal> {
        let Some(session) = self.sessions.get_mut(&id) else { return Ok(()) };
        let values = keys.iter().map(|key| self.table.value(key).unwrap_or_default());
        check_answer(values.clone().map(<[u8]>::len))?;
        values.for_each(|value| push_bytes(&mut session.answers, value));
        self.answered.push(id);
        Ok(())
    }

    /// Answers with all keys.
    fn list_keys(&mut self, id: ClientId) -> Result<(), Refusal> {
        check_answer(self.table.keys().map(Vec::len))?;
        self.number(id, self.table.len() as i64);
        if let Some(session) = self.sessions.get_mut(&id) {
            self.table.keys().for_each(|key| push_bytes(&mut session.answers, key));
        }
        Ok(())
    }

    /// Answers with the first value of a queue, if there is one, and removes it.
    fn pop(&mut self, id: ClientId, key: &[u8]) {
        self.number(id, self.table.queue_len(key) as i64);
        if let Some(value) = self.table.pop(key) {
            self.answer(id, |answers| push_bytes(answers, &value));
        }
    }

    /// Answers at once if all keys exist, else parks the client.
    fn wait(&mut self, id: ClientId, keys: Vec<Key>) {
        let missing: HashSet<Key> = keys.into_iter().filter(|key| !self.table.has(key)).collect();
        if missing.is_empty() {
            return self.flag(id, STOP_WAITING);
        }
        for key in &missing {
            self.waiting.entry(key.clone()).or_default().push(id);
        }
        if let Some(session) = self.sessions.get_mut(&id) {
            session.parked = Some(Parked::Keys(missing));
        }
    }

    /// Counts a client at a barrier. Releases all clients if it was the last, else parks it.
    fn barrier(&mut self, id: ClientId, key: Key, world_size: i64) -> Result<(), Refusal> {
        let arrived = self.table.add(&key, 1)?;
        self.wake(&key);
        if arrived < world_size {
            self.barriers.entry(key.clone()).or_default().push(id);
            if let Some(session) = self.sessions.get_mut(&id) {
                session.parked = Some(Parked::Barrier(key));
            }
            return Ok(());
        }
        for other in self.barriers.remove(&key).unwrap_or_default() {
            self.release(other);
        }
        self.flag(id, STOP_WAITING);
        Ok(())
    }

    /// Releases the clients whose last missing key this was.
    fn wake(&mut self, key: &[u8]) {
        for id in self.waiting.remove(key).unwrap_or_default() {
            self.arrived(id, key);
        }
    }

    /// Releases one client whose last missing key this queue was, because only one client can take the value.
    fn wake_one(&mut self, key: &[u8]) {
        let Some(mut ids) = self.waiting.remove(key) else { return };
        let mut seen = 0;
        let woken = ids.iter().copied().find(|&id| {
            seen += 1;
            self.arrived(id, key)
        });
        ids.drain(..seen);
        if !ids.is_empty() {
            self.waiting.insert(key.to_vec(), ids);
        }
        if let Some(session) = woken.and_then(|id| self.sessions.get_mut(&id)) {
            session.woken = Some(key.to_vec());
        }
    }

    /// Notes, for a waiting client, that a key exists. Returns whether it was the last missing one.
    fn arrived(&mut self, id: ClientId, key: &[u8]) -> bool {
        let Some(Session { parked: Some(Parked::Keys(missing)), .. }) = self.sessions.get_mut(&id) else { return false };
        missing.remove(key);
        let last = missing.is_empty();
        if last {
            self.release(id);
        }
        last
    }

    /// Ends a client's wait with success.
    fn release(&mut self, id: ClientId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.parked = None;
            self.resumed.push(id);
            self.flag(id, STOP_WAITING);
        }
    }

    /// Removes a client's wait.
    fn unpark(&mut self, id: ClientId) {
        match self.sessions.get_mut(&id).and_then(|session| session.parked.take()) {
            Some(Parked::Keys(missing)) => missing.iter().for_each(|key| forget(&mut self.waiting, key, id)),
            Some(Parked::Barrier(key)) => forget(&mut self.barriers, &key, id),
            None => {}
        }
    }

    /// Wakes the next client for a queue's value that the woken client did not take.
    fn hand_on(&mut self, woken: Option<Key>) {
        if let Some(key) = woken.filter(|key| self.table.queue_len(key) > 0) {
            self.wake_one(&key);
        }
    }

    /// Appends to a client's answers.
    fn answer(&mut self, id: ClientId, write: impl FnOnce(&mut Vec<u8>)) {
        if let Some(session) = self.sessions.get_mut(&id) {
            write(&mut session.answers);
            self.answered.push(id);
        }
    }

    /// Answers with one byte.
    fn flag(&mut self, id: ClientId, flag: u8) {
        self.answer(id, |answers| answers.push(flag));
    }

    /// Answers with a number.
    fn number(&mut self, id: ClientId, number: i64) {
        self.answer(id, |answers| answers.extend(number.to_le_bytes()));
    }
}

/// Removes a client from a list of waiting clients.
fn forget(waiting: &mut HashMap<Key, Vec<ClientId>>, key: &[u8], id: ClientId) {
    let Some(ids) = waiting.get_mut(key) else { return };
    ids.retain(|&other| other != id);
    if ids.is_empty() {
        waiting.remove(key);
    }
}

/// Refuses an answer that would be too long.
fn check_answer(mut lengths: impl Iterator<Item = usize>) -> Result<(), Refusal> {
    let total = lengths.try_fold(8_usize, |total, length| total.checked_add(8 + length).filter(|&total| total <= MESSAGE_BYTES));
    total.map(drop).ok_or_else(|| Refusal(format!("an answer of more than {MESSAGE_BYTES} bytes")))
}
