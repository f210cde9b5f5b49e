//! An attacker between two ranks, who forwards their bytes, records them, and changes them on the way.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use collectives::Result;
use collectives::store::{MemoryStore, Store};

/// The change of the bytes in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// One bit of the byte at this position.
    Flip,
    /// A segment does not arrive.
    Drop,
    /// A segment arrives twice.
    Repeat,
    /// A segment and the one behind it change places.
    Swap,
    /// Other bytes arrive before a segment.
    Inject,
    /// A segment and all that follows do not arrive, and the connection is closed.
    Close,
}

impl Change {
    pub(crate) const ALL: [Self; 6] = [Self::Flip, Self::Drop, Self::Repeat, Self::Swap, Self::Inject, Self::Close];
}

/// A change of every connection, `at` bytes from the beginning of one direction, in a segment of `length` bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attack {
    pub(crate) change: Change,
    pub(crate) to_listener: bool,
    pub(crate) at: usize,
    pub(crate) length: usize,
}

/// The bytes that one connection has carried: to the listener, and back.
pub(crate) type Carried = [Vec<u8>; 2];

/// The state that all lines share.
#[derive(Debug, Default)]
struct Shared {
    attack: Option<Attack>,
    fired: AtomicBool,
    ended: AtomicBool,
    carried: Mutex<Vec<Carried>>,
}

/// A store that replaces the addresses of ranks with those of lines in this process.
#[derive(Debug)]
pub(crate) struct Between {
    store: MemoryStore,
    shared: Arc<Shared>,
    lines: Mutex<Vec<(SocketAddr, SocketAddr)>>,
}

impl Between {
    pub(crate) fn new(attack: Option<Attack>) -> Self {
        Self { store: MemoryStore::new(), shared: Arc::new(Shared { attack, ..Shared::default() }), lines: Mutex::default() }
    }

    /// Creates a line to a single listener. Returns the address to connect to.
    pub(crate) fn before(target: SocketAddr, attack: Attack) -> (SocketAddr, Self) {
        let between = Self::new(Some(attack));
        (between.line(target), between)
    }

    /// Whether anything was changed.
    pub(crate) fn has_fired(&self) -> bool {
        self.shared.fired.load(Ordering::SeqCst)
    }

    /// Returns the bytes that every connection has carried so far.
    pub(crate) fn carried(&self) -> Vec<Carried> {
        self.shared.carried.lock().unwrap().clone()
    }

    /// Returns the addresses on which the ranks listen.
    pub(crate) fn listeners(&self) -> Vec<SocketAddr> {
        self.lines.lock().unwrap().iter().map(|(_, target)| *target).collect()
    }

    /// Returns a value in which a rank's address, if it has one, is replaced with that of a line.
    fn redirected(&self, value: &[u8]) -> Vec<u8> {
        let mut value = value.to_vec();
        let found = value.windows(7).position(|window| window[..5] == [4, 127, 0, 0, 1]).filter(|_| value.len() < 16);
        if let Some(at) = found {
            let port = u16::from_be_bytes([value[at + 5], value[at + 6]]);
            let line = self.line(SocketAddr::from(([127, 0, 0, 1], port)));
            value[at + 5..at + 7].copy_from_slice(&line.port().to_be_bytes());
        }
        value
    }

    /// Creates a line to `target` and returns its address.
    fn line(&self, target: SocketAddr) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::clone(&self.shared);
        thread::spawn(move || carry_all(&listener, target, &shared));
        self.lines.lock().unwrap().push((address, target));
        address
    }
}

impl Drop for Between {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        for (line, _) in self.lines.lock().unwrap().iter() {
            // The thread of the line waits for a connection.
            let _ = TcpStream::connect(line);
        }
    }
}

/// Forwards every connection to its target.
fn carry_all(listener: &TcpListener, target: SocketAddr, shared: &Arc<Shared>) {
    for client in listener.incoming() {
        let Ok(client) = client else { continue };
        if shared.ended.load(Ordering::SeqCst) {
            return;
        }
        let Ok(server) = TcpStream::connect(target) else { continue };
        let number = {
            let mut carried = shared.carried.lock().unwrap();
            carried.push(Carried::default());
            carried.len() - 1
        };
        for to_listener in [true, false] {
            let (from, to) = if to_listener { (&client, &server) } else { (&server, &client) };
            from.set_nodelay(true).unwrap();
            let (from, to, shared) = (from.try_clone().unwrap(), to.try_clone().unwrap(), Arc::clone(shared));
            thread::spawn(move || carry(from, to, number, to_listener, &shared));
        }
    }
}

/// Forwards the bytes of one direction.
fn carry(mut from: TcpStream, mut to: TcpStream, number: usize, to_listener: bool, shared: &Shared) {
    let attack = shared.attack.filter(|attack| attack.to_listener == to_listener);
    let (mut bytes, mut seen, mut kept) = (vec![0; 64 << 10], 0, Vec::new());
    while let Ok(read @ 1..) = from.read(&mut bytes) {
        let bytes = &bytes[..read];
        shared.carried.lock().unwrap()[number][usize::from(!to_listener)].extend_from_slice(bytes);
        let changed = attack.map_or_else(|| bytes.to_vec(), |attack| change(attack, bytes, seen, &mut kept, shared));
        let is_cut = attack.is_some_and(|attack| attack.change == Change::Close && seen + read > attack.at);
        seen += read;
        if to.write_all(&changed).is_err() || is_cut {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    if attack.is_some_and(|attack| attack.change == Change::Close) {
        let _ = (to.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both));
    }
}

/// Returns what arrives in place of `bytes`, which begin `seen` bytes into their direction.
fn change(attack: Attack, bytes: &[u8], seen: usize, kept: &mut Vec<u8>, shared: &Shared) -> Vec<u8> {
    let Attack { change, at, length, .. } = attack;
    let mut changed = Vec::with_capacity(bytes.len());
    for (index, byte) in bytes.iter().copied().enumerate() {
        let place = seen + index;
        let is_in_segment = (at..at + length).contains(&place);
        if is_in_segment {
            shared.fired.store(true, Ordering::SeqCst);
        }
        match change {
            Change::Flip if place == at => changed.push(byte ^ 1 << (at % 8)),
            Change::Drop if is_in_segment => {}
            Change::Close if place >= at => {}
            Change::Repeat => {
                changed.push(byte);
                kept.extend(is_in_segment.then_some(byte));
                if place + 1 == at + length {
                    changed.append(kept);
                }
            }
            Change::Swap if is_in_segment => kept.push(byte),
            Change::Swap if place + 1 == at + 2 * length => {
                // Two equal bytes that change places would be no change.
                changed.push(if *kept == [byte] { byte ^ 1 } else { byte });
                changed.append(kept);
            }
            Change::Inject if place == at => {
                changed.extend((0..length).map(|index| (index * 31 + at) as u8));
                changed.push(byte);
            }
            _ => changed.push(byte),
        }
    }
    changed
}

impl Store for Between {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(key, &self.redirected(value))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.store.get(key, timeout)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.store.add(key, delta)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.store.compare_set(key, expected, desired)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.store.wait(keys, timeout)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.store.check(keys)
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        self.store.delete_key(key)
    }

    fn num_keys(&self) -> Result<i64> {
        self.store.num_keys()
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.append(key, value)
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.store.multi_get(keys, timeout)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let values: Vec<Vec<u8>> = pairs.iter().map(|(_, value)| self.redirected(value)).collect();
        let pairs: Vec<(&str, &[u8])> = pairs.iter().zip(&values).map(|((key, _), value)| (*key, value.as_slice())).collect();
        self.store.multi_set(&pairs)
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.queue_push(key, value)
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.store.queue_pop(key, timeout)
    }

    fn queue_len(&self, key: &str) -> Result<i64> {
        self.store.queue_len(key)
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        self.store.list_keys()
    }
}
