//! A rank's connection to its clique: direct calls if the clique is in this process, a socket if it is in another.

#![expect(unsafe_code, reason = "device memory is read and written by its address")]

use crate::abi::Code;
use crate::clique::{Clique, Departure, Notify, Stopped};
use crate::connection::Direction;
use crate::control;
use crate::exchange::fill;
use crate::fault::{Fault, Outcome};
use crate::hub::{self, Place, answer, request};
use crate::operation::Operation;
use crate::report::lock;
use crate::wire::{Frame, Parser, receive};
use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

#[derive(Clone)]
pub(crate) struct Link {
    pub(crate) place: Place,
    pub(crate) rank: usize,
    way: Way,
}

#[derive(Clone)]
enum Way {
    Here(Arc<Clique>),
    Away(Arc<Remote>),
}

struct Remote {
    socket: UnixStream,
    writer: Mutex<()>,
    notify: Notify,
    state: Mutex<RemoteState>,
    changed: Condvar,
}

#[derive(Default)]
struct RemoteState {
    issued: u64,
    /// The open requests, each with its answer once it has arrived.
    asked: HashMap<u64, Option<Outcome<Vec<Vec<u8>>>>>,
    revoked: bool,
    left: bool,
    /// Whether the abort flags are raised.
    halted: bool,
    /// Whether the process that holds the clique is lost.
    lost: bool,
    /// Whether that process announced its end, which matters only to ranks that still need it.
    goodbye: bool,
}

impl Link {
    /// Takes a rank's place in a clique, without waiting for the others.
    pub(crate) fn open(place: Place, rank: usize, size: usize, notify: Notify) -> Outcome<Link> {
        if hub::is_here(&place) {
            let clique = hub::sit(&place.name, rank, size, notify)?;
            return Ok(Link { place, rank, way: Way::Here(clique) });
        }
        let connect = || UnixStream::connect_addr(&place.address()?);
        let gone = |error| Fault::remote(format!("rank {rank} cannot reach the process that made the unique id: {error}"));
        let socket = connect().map_err(gone)?;
        let hello = Frame::default().number(request::SIT).bytes(place.name.as_bytes()).number(size as u64).number(rank as u64);
        hello.send(&socket).map_err(gone)?;
        let frame = receive(&socket).map_err(gone)?;
        if let Some((_, Err(fault))) = parse_answer(&frame) {
            return Err(fault);
        }
        let remote = Arc::new(Remote { socket, writer: Mutex::new(()), notify, state: Mutex::default(), changed: Condvar::new() });
        let listener = remote.clone();
        std::thread::spawn(move || listener.listen());
        Ok(Link { place, rank, way: Way::Away(remote) })
    }

    /// Sends `words` to all `participants` and waits for the words of each.
    pub(crate) fn confer(&self, participants: &[usize], name: &str, words: Vec<u8>) -> Outcome<Vec<Vec<u8>>> {
        match &self.way {
            Way::Here(clique) => clique.confer(self.rank, participants, name, words),
            Way::Away(remote) => {
                let put =
                    |frame: Frame| frame.bytes(name.as_bytes()).list(participants, |frame, &peer| frame.number(peer as u64)).bytes(&words);
                let ticket = remote.ask(request::CONFER, put);
                remote.answer(ticket)
            }
        }
    }

    /// Connects this rank to others; see [`Clique::connect`].
    pub(crate) fn connect(&self, directions: &[Direction]) -> Outcome<()> {
        match &self.way {
            Way::Here(clique) => clique.connect(self.rank, directions),
            Way::Away(remote) => {
                let put = |frame: Frame| frame.list(directions, |frame, &(from, to)| frame.number(from as u64).number(to as u64));
                let ticket = remote.ask(request::CONNECT, put);
                remote.answer(ticket).map(drop)
            }
        }
    }

    /// Runs the operations of one launch; see [`Clique::run`].
    ///
    /// # Safety
    /// All regions must be live memory until this returns, and no other thread may access them.
    pub(crate) unsafe fn run(&self, operations: &[Operation]) -> Result<(), Stopped> {
        match &self.way {
            Way::Here(clique) => clique.run(self.rank, operations),
            Way::Away(remote) => {
                // SAFETY: promised by the caller.
                let put = |frame: Frame| frame.list(operations, |frame, operation| unsafe { hub::put_operation(frame, operation) });
                let ticket = remote.ask(request::RUN, put);
                let outputs = remote.wait(ticket, |state| state.left || state.halted || state.revoked)?.map_err(|_| Stopped)?;
                for (operation, output) in operations.iter().zip(&outputs) {
                    // SAFETY: promised by the caller; the output is this function's own memory.
                    unsafe { fill(operation.output, output) };
                }
                Ok(())
            }
        }
    }

    /// Continues after a halt. A rank that is revoked may confer and nothing else.
    pub(crate) fn resume(&self, revoked: bool) {
        match &self.way {
            Way::Here(clique) => clique.resume(self.rank, revoked),
            Way::Away(remote) => {
                {
                    let mut state = lock(&remote.state);
                    (state.halted, state.revoked) = (false, revoked);
                }
                remote.send(&Frame::default().number(request::RESUME).number(revoked.into()));
            }
        }
    }

    /// Stops this rank's work and its waits for others; the place is kept.
    pub(crate) fn halt(&self) {
        match &self.way {
            Way::Here(clique) => clique.halt(self.rank),
            Way::Away(remote) => {
                lock(&remote.state).halted = true;
                remote.changed.notify_all();
                remote.send(&Frame::default().number(request::HALT));
            }
        }
    }

    /// Gives up this rank's place and stops its work.
    pub(crate) fn leave(&self, how: Departure) {
        match &self.way {
            Way::Here(clique) => {
                // This process may end next, and other processes have to get the results of the clique.
                if how == Departure::Destroyed {
                    clique.errands.wait();
                }
                hub::leave(&self.place.name, clique, self.rank, how);
            }
            Way::Away(remote) => {
                lock(&remote.state).left = true;
                remote.changed.notify_all();
                if how == Departure::Dead {
                    let _ = remote.socket.shutdown(std::net::Shutdown::Both);
                } else {
                    remote.send(&Frame::default().number(request::LEAVE).number(how as u64));
                }
            }
        }
    }
}

fn parse_answer(frame: &[u8]) -> Option<(u64, Outcome<Vec<Vec<u8>>>)> {
    let mut parser = Parser(frame);
    match parser.number()? {
        answer::DONE => Some((parser.number()?, Ok(parser.list(|parser| parser.bytes().map(<[u8]>::to_vec))?))),
        answer::FAILED => Some((parser.number()?, Err(hub::take_fault(&mut parser)?))),
        _ => None,
    }
}

impl Remote {
    fn send(&self, frame: &Frame) {
        let _turn = lock(&self.writer);
        // If the hub is lost, the receiving thread reports it.
        let _ = frame.send(&self.socket);
    }

    fn ask(&self, kind: u64, put: impl FnOnce(Frame) -> Frame) -> u64 {
        let ticket = {
            let mut state = lock(&self.state);
            state.issued += 1;
            let ticket = state.issued;
            state.asked.insert(ticket, None);
            if state.lost && !state.left && !control::deaths_are_silent() {
                drop(state);
                (self.notify)(&lost());
            }
            ticket
        };
        self.send(&put(Frame::default().number(kind).number(ticket)));
        ticket
    }

    /// Waits for an answer until `stop` returns true.
    fn wait(&self, ticket: u64, stop: impl Fn(&RemoteState) -> bool) -> Result<Outcome<Vec<Vec<u8>>>, Stopped> {
        let mut state = lock(&self.state);
        loop {
            if let Some(Some(_)) = state.asked.get(&ticket) {
                return state.asked.remove(&ticket).flatten().ok_or(Stopped);
            }
            if stop(&state) {
                state.asked.remove(&ticket);
                return Err(Stopped);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns the ranks' answers to each other, unless this rank is aborted or the process that holds the clique is
    /// lost.
    fn answer(&self, ticket: u64) -> Outcome<Vec<Vec<u8>>> {
        let is_over = |state: &RemoteState| state.left || state.halted || state.lost && !control::deaths_are_silent();
        self.wait(ticket, is_over).unwrap_or_else(|Stopped| {
            let ours = lock(&self.state).halted || lock(&self.state).left;
            Err(if ours { Fault::new(Code::INTERNAL_ERROR, "the communicator was aborted") } else { lost() })
        })
    }

    fn listen(&self) {
        while let Ok(frame) = receive(&self.socket) {
            if let Some((ticket, outcome)) = parse_answer(&frame) {
                if let Some(answer) = lock(&self.state).asked.get_mut(&ticket) {
                    *answer = Some(outcome);
                }
                self.changed.notify_all();
                continue;
            }
            let mut parser = Parser(&frame);
            match parser.number() {
                Some(answer::GOODBYE) => lock(&self.state).goodbye = true,
                Some(answer::BROKEN) => hub::take_fault(&mut parser).iter().for_each(|fault| (self.notify)(fault)),
                _ => break,
            }
        }
        let told = {
            let mut state = lock(&self.state);
            state.lost = true;
            state.left || (state.goodbye && state.asked.values().all(Option::is_some))
        };
        self.changed.notify_all();
        if !told && !control::deaths_are_silent() {
            (self.notify)(&lost());
        }
    }
}

fn lost() -> Fault {
    Fault::remote("the process that made the unique id is gone")
}
