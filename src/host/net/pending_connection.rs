//! Whoever has connected, until it has said who it is.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use super::hello::{Hello, Membership, NoHello, Refusal};
use crate::proof::{self, Purpose, Responder, Secret, Unproven};

/// A connection that has not said hello, or not all of it.
#[derive(Debug)]
pub(super) struct PendingConnection {
    pub(super) stream: TcpStream,
    pub(super) from: SocketAddr,
    pub(super) since: Instant,
    /// The proof in place of a hello, where there is a secret.
    proving: Option<Responder>,
    /// What it began with.
    heard: [u8; Hello::BYTES],
    heard_bytes: usize,
}

/// What has become of an unproven connection.
pub(super) enum Verdict {
    /// It has not said all yet.
    Undecided,
    /// It closed the connection, or the connection broke.
    Gone,
    /// What it said is no hello.
    Junk(String),
    /// It has not proven that it knows the secret, or offers a proof where there is none.
    Unproven(Unproven),
    /// It said hello and will not be taken.
    Refused(Refusal),
    /// It said hello and may come in.
    Welcome(Hello),
}

impl PendingConnection {
    /// One that has just come, and has to prove itself where there is a secret.
    pub(super) fn new(stream: TcpStream, from: SocketAddr, secret: Option<&Secret>, since: Instant) -> Self {
        let proving = secret.map(|secret| Responder::new(secret, Purpose::Link, Hello::BYTES));
        Self { stream, from, since, proving, heard: [0; Hello::BYTES], heard_bytes: 0 }
    }

    /// What it began with.
    pub(super) fn began(&self) -> &[u8] {
        &self.heard[..self.heard_bytes]
    }

    /// Whether it has to prove itself, and has not done so yet.
    pub(super) fn is_proving(&self) -> bool {
        self.proving.is_some()
    }

    /// Reads what there is and judges it.
    pub(super) fn listen(&mut self, me: &Membership) -> Verdict {
        if let Some(responder) = self.proving.take() {
            return self.listen_for_proof(responder, me);
        }
        while self.heard_bytes < Hello::BYTES {
            match self.stream.read(&mut self.heard[self.heard_bytes..]) {
                Ok(0) => return Verdict::Gone,
                Ok(read) => self.heard_bytes += read,
                Err(error) if is_not_yet(&error) => break,
                Err(_) => return Verdict::Gone,
            }
        }
        let heard = &self.heard[..self.heard_bytes];
        if proof::is_opening(heard) { Verdict::Unproven(Unproven::Found(proof::Reason::NoSecret)) } else { judge(heard, me) }
    }

    /// Has the other end prove that it knows the secret, and then judges the hello that was part of it.
    fn listen_for_proof(&mut self, mut responder: Responder, me: &Membership) -> Verdict {
        loop {
            let mut bytes = [0; 128];
            let read = match self.stream.read(&mut bytes) {
                Ok(0) => return Verdict::Gone,
                Ok(read) => read,
                Err(error) if is_not_yet(&error) => break,
                Err(_) => return Verdict::Gone,
            };
            let kept = read.min(self.heard.len() - self.heard_bytes);
            self.heard[self.heard_bytes..self.heard_bytes + kept].copy_from_slice(&bytes[..kept]);
            self.heard_bytes += kept;
            match responder.receive(&bytes[..read]) {
                // A reply fits into an empty send buffer.
                Ok(Some(reply)) if !matches!(self.stream.write(&reply), Ok(sent) if sent == reply.len()) => return Verdict::Gone,
                Ok(_) => {}
                Err(unproven) => return Verdict::Unproven(unproven),
            }
            if let Some(hello) = responder.proven() {
                return judge(hello, me);
            }
        }
        self.proving = Some(responder);
        Verdict::Undecided
    }

    /// Reads what is left of a few words: bytes that nobody has read would take the words of a refusal with them.
    pub(super) fn drain(&self) {
        let _ = (&self.stream).read(&mut [0; 256]);
    }
}

/// What becomes of an unproven connection that has said so much.
fn judge(heard: &[u8], me: &Membership) -> Verdict {
    match Hello::decode(heard) {
        Ok(None) => Verdict::Undecided,
        Ok(Some(hello)) => match hello.check(me) {
            Ok(()) => Verdict::Welcome(hello),
            Err(refusal) => Verdict::Refused(refusal),
        },
        Err(NoHello::Junk(what)) => Verdict::Junk(what),
        Err(NoHello::Refused(refusal)) => Verdict::Refused(refusal),
    }
}

/// Whether it is worth trying again later.
pub(super) fn is_not_yet(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
