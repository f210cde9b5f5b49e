//! The cliques of this process, and the socket through which ranks of other processes reach them.

#![expect(unsafe_code, reason = "device memory is read and written by its address")]

use crate::abi::{Kind, UniqueId};
use crate::clique::{Clique, Departure, Notify};
use crate::fault::{Fault, Outcome};
use crate::operation::{Fold, Operation, Region, Signature, Verb};
use crate::report::{lock, report};
use crate::wire::{Frame, Parser, receive};
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Mutex, OnceLock};

/// The first words of frames to a hub.
pub(crate) mod request {
    pub(crate) const SIT: u64 = 0;
    pub(crate) const CONFER: u64 = 1;
    pub(crate) const RUN: u64 = 2;
    pub(crate) const RESUME: u64 = 3;
    pub(crate) const LEAVE: u64 = 4;
    pub(crate) const HALT: u64 = 5;
    pub(crate) const CONNECT: u64 = 6;
}

/// The first words of frames from a hub.
pub(crate) mod answer {
    pub(crate) const DONE: u64 = 0;
    pub(crate) const FAILED: u64 = 1;
    pub(crate) const BROKEN: u64 = 2;
    /// The process exits normally: a peer that still needs it has lost it, the others can ignore that.
    pub(crate) const GOODBYE: u64 = 3;
}

const MAGIC: &[u8; 8] = b"simNCCL1";

/// The location of a clique: the process that holds it, and the name it has there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Identifies the process: its number and random bytes.
    pub(crate) hub: [u8; 16],
    pub(crate) name: String,
}

impl Place {
    /// Reads the place in a unique id.
    pub(crate) fn of(id: &UniqueId) -> Outcome<Place> {
        let words = id.internal.as_chunks::<8>().0;
        if words[0] != *MAGIC {
            return Err(Fault::argument("this is no unique id of this library: its bytes were changed on the way, or never set"));
        }
        let mut hub = [0; 16];
        hub.copy_from_slice(&id.internal[8..24]);
        Ok(Place { hub, name: format!("id {}", u64::from_le_bytes(words[3])) })
    }

    /// Returns the address of the hub's socket.
    pub(crate) fn address(&self) -> std::io::Result<SocketAddr> {
        let name: String = self.hub.iter().map(|byte| format!("{byte:02x}")).collect();
        SocketAddr::from_abstract_name(format!("simulated-nccl-{name}"))
    }
}

struct Hub {
    name: [u8; 16],
    cliques: Mutex<HashMap<String, Arc<Clique>>>,
    /// Names of cliques that have ended. A unique id serves one communicator.
    spent: Mutex<HashSet<String>>,
    issued: Mutex<u64>,
    callers: Mutex<Vec<Arc<Mutex<UnixStream>>>>,
}

static HUB: OnceLock<Hub> = OnceLock::new();

fn hub() -> &'static Hub {
    HUB.get_or_init(|| {
        let mut name = [0; 16];
        name[..8].copy_from_slice(&u64::from(std::process::id()).to_le_bytes());
        name[8..].copy_from_slice(&RandomState::new().hash_one("simulated NCCL").to_le_bytes());
        Hub { name, cliques: Mutex::default(), spent: Mutex::default(), issued: Mutex::default(), callers: Mutex::default() }
    })
}

/// Makes a unique id. The first one opens this process's socket.
pub(crate) fn issue() -> Outcome<UniqueId> {
    static DOOR: OnceLock<Result<(), String>> = OnceLock::new();
    let open = || open_door().map_err(|error| error.to_string());
    DOOR.get_or_init(open).clone().map_err(|error| Fault::new(crate::abi::Code::SYSTEM_ERROR, error))?;
    let hub = hub();
    let mut issued = lock(&hub.issued);
    *issued += 1;
    let mut id = UniqueId { internal: [0; 128] };
    id.internal[..8].copy_from_slice(MAGIC);
    id.internal[8..24].copy_from_slice(&hub.name);
    id.internal[24..32].copy_from_slice(&issued.to_le_bytes());
    Ok(id)
}

fn open_door() -> std::io::Result<()> {
    let listener = UnixListener::bind_addr(&Place { hub: hub().name, name: String::new() }.address()?)?;
    // SAFETY: the function may run at any time; it takes no lock that it would have to wait for.
    unsafe { libc::atexit(say_goodbye) };
    let serve = move || listener.incoming().flatten().for_each(|caller| drop(std::thread::spawn(move || attend(&caller))));
    std::thread::Builder::new().name("simulated-nccl-hub".into()).spawn(serve).map(drop)
}

extern "C" fn say_goodbye() {
    let Some(callers) = HUB.get().and_then(|hub| hub.callers.try_lock().ok()) else { return };
    for caller in callers.iter() {
        if let Ok(caller) = caller.try_lock() {
            let _ = Frame::default().number(answer::GOODBYE).send(&*caller);
        }
    }
}

/// Whether a place is in this process.
pub(crate) fn is_here(place: &Place) -> bool {
    HUB.get().is_some_and(|hub| hub.name == place.hub)
}

/// Registers a rank in a clique of this process; the first rank creates the clique.
pub(crate) fn sit(name: &str, rank: usize, size: usize, notify: Notify) -> Outcome<Arc<Clique>> {
    let hub = hub();
    if lock(&hub.spent).contains(name) {
        let text = format!("rank {rank} of {size} joins with a unique id whose communicator has been destroyed");
        report(text.as_str());
        return Err(Fault::usage(text));
    }
    let clique = lock(&hub.cliques).entry(name.to_owned()).or_insert_with(|| Arc::new(Clique::new(size))).clone();
    clique.sit(rank, size, notify)?;
    Ok(clique)
}

/// Gives up a rank's place in a clique of this process.
pub(crate) fn leave(name: &str, clique: &Clique, rank: usize, how: Departure) {
    if clique.leave(rank, how) {
        lock(&hub().cliques).remove(name);
        lock(&hub().spent).insert(name.to_owned());
    }
}

/// Represents a rank of another process.
fn attend(caller: &UnixStream) {
    let Ok(writer) = caller.try_clone() else { return };
    let writer = Arc::new(Mutex::new(writer));
    let Some((name, clique, rank)) = seat(caller, &writer) else { return };
    lock(&hub().callers).push(writer.clone());
    let mut how = Departure::Dead;
    while let Ok(frame) = receive(caller) {
        let mut parser = Parser(&frame);
        match parser.number() {
            Some(request::RESUME) => clique.resume(rank, parser.number() == Some(1)),
            Some(request::HALT) => clique.halt(rank),
            Some(request::LEAVE) => {
                how = if parser.number() == Some(0) { Departure::Aborted } else { Departure::Destroyed };
                break;
            }
            // These wait for others, so they must not delay later requests.
            Some(_) => {
                let (clique, writer) = (clique.clone(), writer.clone());
                std::thread::spawn(move || serve(&clique, rank, &frame, &writer));
            }
            None => break,
        }
    }
    leave(&name, &clique, rank, how);
    lock(&hub().callers).retain(|other| !Arc::ptr_eq(other, &writer));
    let _ = caller.shutdown(std::net::Shutdown::Both);
}

fn seat(caller: &UnixStream, writer: &Arc<Mutex<UnixStream>>) -> Option<(String, Arc<Clique>, usize)> {
    let frame = receive(caller).ok()?;
    let mut parser = Parser(&frame);
    let (request::SIT, name, size, rank) = (parser.number()?, parser.text()?, parser.size()?, parser.size()?) else { return None };
    let told = writer.clone();
    let notify = move |fault: &Fault| drop(put_fault(Frame::default().number(answer::BROKEN), fault).send(&*lock(&told)));
    let seated = sit(&name, rank, size, Box::new(notify));
    let blobs = seated.as_ref().map(|_| Vec::new()).map_err(Clone::clone);
    reply(writer, 0, blobs);
    seated.ok().map(|clique| (name, clique, rank))
}

fn serve(clique: &Clique, rank: usize, frame: &[u8], writer: &Mutex<UnixStream>) {
    let _errand = clique.errands.begin();
    let mut parser = Parser(frame);
    let (Some(kind), Some(ticket)) = (parser.number(), parser.number()) else { return };
    let blobs = match kind {
        request::CONFER => confer(clique, rank, &mut parser),
        request::CONNECT => connect(clique, rank, &mut parser),
        _ => run(clique, rank, &mut parser),
    };
    reply(writer, ticket, blobs.unwrap_or_else(|| Err(Fault::remote("a frame was cut short"))));
}

fn reply(writer: &Mutex<UnixStream>, ticket: u64, blobs: Outcome<Vec<Vec<u8>>>) {
    let frame = match blobs {
        Ok(blobs) => Frame::default().number(answer::DONE).number(ticket).list(&blobs, |frame, blob| frame.bytes(blob)),
        Err(fault) => put_fault(Frame::default().number(answer::FAILED).number(ticket), &fault),
    };
    // A caller that has ended needs no answer.
    let _ = frame.send(&*lock(writer));
}

fn confer(clique: &Clique, rank: usize, parser: &mut Parser<'_>) -> Option<Outcome<Vec<Vec<u8>>>> {
    let (name, participants, words) = (parser.text()?, parser.list(Parser::size)?, parser.bytes()?);
    Some(clique.confer(rank, &participants, &name, words.to_vec()))
}

fn connect(clique: &Clique, rank: usize, parser: &mut Parser<'_>) -> Option<Outcome<Vec<Vec<u8>>>> {
    let directions = parser.list(|parser| Some((parser.size()?, parser.size()?)))?;
    Some(clique.connect(rank, &directions).map(|()| Vec::new()))
}

fn run(clique: &Clique, rank: usize, parser: &mut Parser<'_>) -> Option<Outcome<Vec<Vec<u8>>>> {
    let parts = parser.list(take_operation)?;
    let mut outputs: Vec<Vec<u8>> = parts.iter().map(|(operation, _)| vec![0; operation.output.bytes]).collect();
    let place = |(operation, input): &(Operation, &[u8]), output: &mut Vec<u8>| Operation {
        input: Region { address: input.as_ptr() as usize, bytes: input.len() },
        output: Region { address: output.as_mut_ptr() as usize, bytes: output.len() },
        ..*operation
    };
    let operations: Vec<_> = parts.iter().zip(&mut outputs).map(|(part, output)| place(part, output)).collect();
    Some(match clique.run(rank, &operations) {
        Ok(()) => Ok(outputs),
        Err(_) => Err(Fault::remote("stopped")),
    })
}

/// Encodes an operation with the bytes it reads.
///
/// # Safety
/// Its input must be live memory that no thread writes to during the call.
pub(crate) unsafe fn put_operation(frame: Frame, operation: &Operation) -> Frame {
    let Signature { verb, count, kind, fold, root } = operation.signature;
    let numbers = [verb as u64, count as u64, kind as u64, fold as u64, root as u64, operation.scalar, operation.output.bytes as u64];
    // SAFETY: promised by the caller.
    let input = unsafe { crate::exchange::bytes(operation.input) };
    numbers.into_iter().fold(frame, Frame::number).bytes(input)
}

fn take_operation<'a>(parser: &mut Parser<'a>) -> Option<(Operation, &'a [u8])> {
    let verb = *Verb::ALL.get(parser.size()?)?;
    let count = parser.size()?;
    let kind = *Kind::ALL.get(parser.size()?)?;
    let fold = *Fold::ALL.get(parser.size()?)?;
    let root = parser.size()?;
    let scalar = parser.number()?;
    let output = Region { address: 0, bytes: parser.size()? };
    let signature = Signature { verb, count, kind, fold, root };
    Some((Operation { signature, input: Region::default(), output, scalar }, parser.bytes()?))
}

pub(crate) fn put_fault(frame: Frame, fault: &Fault) -> Frame {
    frame.number(fault.code.0 as u64).bytes(fault.text.as_bytes())
}

pub(crate) fn take_fault(parser: &mut Parser<'_>) -> Option<Fault> {
    Some(Fault::new(crate::abi::Code(parser.number()? as i32), parser.text()?))
}
