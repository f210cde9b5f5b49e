//! Invariants for anything that a host's leader reports about its shared memory.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::layout::{CURSORS_BYTES, MAX_RANKS, RegionLayout};
use super::ring_end::{End, Peeked};
use super::shared_file::{ShareError, SharedFile};
use crate::base::deadline::Deadline;
use crate::error::Result;
use crate::host::copy::copy;
use crate::host::exchange::Exchange;
use crate::host::link::Head;

/// Two ranks' blobs in each of two rounds.
struct Scripted<'a>(Vec<Vec<&'a [u8]>>);

impl Exchange for Scripted<'_> {
    fn all_gather(&mut self, _mine: &[u8], _deadline: &Deadline) -> Result<Vec<Vec<u8>>> {
        let round = if self.0.is_empty() { Vec::new() } else { self.0.remove(0) };
        Ok(round.into_iter().map(<[u8]>::to_vec).collect())
    }
}

/// Interprets arbitrary bytes as the leader's two reports: the first says where its region can be found, and the second
/// gives the outcome. No rank gets anything, and each error gives the reason.
pub fn shared_memory_file(data: &[u8]) {
    let half = data.first().map_or(0, |length| usize::from(*length)).min(data.len().saturating_sub(1));
    let (blob, verdict) = data.get(1..).unwrap_or_default().split_at(half);
    // Sockets of other processes must not be found by chance.
    let blob = match blob.split_first() {
        Some((&2, rest)) if rest.len() > 32 => [b"\x02", &rest[..32], b"collectives-nobody-", &rest[32..]].concat(),
        _ => blob.to_vec(),
    };
    let mut exchange = Scripted(vec![vec![&blob, &[]], vec![verdict, &[]]]);
    let make = || -> io::Result<_> { Err(io::ErrorKind::Unsupported.into()) };
    let shared_file = SharedFile {
        name: "a region".to_owned(),
        make: &make,
        enter: &|_| Ok(()),
        #[cfg(miri)]
        enter_numbered: &|_| Ok(()),
        secret: None,
    };
    match shared_file.share(&mut exchange, false, 0, &Deadline::after(Duration::from_millis(200))) {
        Ok(()) => panic!("a region was delivered, and no rank had one"),
        Err(ShareError::Here(error)) => assert!(error.to_string().contains("rank 0"), "{error}"),
        Err(ShareError::There(rank, _)) => assert_eq!(rank, 0),
        Err(ShareError::Exchange(error)) => panic!("the exchange did not fail: {error}"),
    }
}

/// Makes layouts for arbitrary numbers of ranks. Each number is refused, or the last rank's parts lie within the region,
/// in order.
pub fn shared_memory_layout(data: &[u8]) {
    for ranks in data.as_chunks::<2>().0.iter().map(|bytes| usize::from(u16::from_le_bytes(*bytes))) {
        let Some(layout) = RegionLayout::new(ranks) else {
            assert!(ranks == 0 || ranks > MAX_RANKS);
            continue;
        };
        let last = ranks - 1;
        let starts = [layout.member(0), layout.mailbox(0, 0), layout.slot_ring(0), layout.ring(0, 0, 0)];
        let ends = [layout.member(last), layout.mailbox(last, 1), layout.slot_ring(last) + layout.slot_ring_bytes()];
        assert!(ends.iter().zip(&starts[1..]).all(|(end, start)| end <= start), "{ranks} ranks");
        assert!(layout.ring(last, last, 1) + layout.ring_bytes() <= layout.bytes && layout.ring_bytes().is_power_of_two());
    }
}

/// The size of the smallest ring that is tried.
const RING_BYTES: usize = 64;
/// The words around it.
const GUARD: u64 = 0xa5a5_a5a5_a5a5_a5a5;
/// Two lines, aligned as the ring's own.
#[repr(C, align(128))]
struct Lines([AtomicU64; 16]);

/// Runs any sequence of writes and reads of any lengths on the two ends of a ring. Between them, words are stored in
/// the places of the cursors, as by a faulty peer. Until the first such word, bytes come out as they went in. Each end
/// reports impossible cursors, and nothing beside the ring is touched.
pub fn shared_memory_ring(data: &[u8]) {
    let lines: Vec<Lines> = (0..2 + CURSORS_BYTES / 128 + 1).map(|_| Lines(std::array::from_fn(|_| AtomicU64::new(GUARD)))).collect();
    let ring = &lines[1..];
    let words = || ring.iter().flat_map(|lines| &lines.0);
    words().take((CURSORS_BYTES + RING_BYTES) / 8).for_each(|word| word.store(0, Ordering::Relaxed));
    let start = ring.as_ptr().cast_mut().cast::<u8>();
    let (mut writer, mut reader) = (End::new(start, RING_BYTES), End::new(start, RING_BYTES));
    let (mut expected, mut is_broken, mut next) = (VecDeque::<u8>::new(), false, 0_u8);
    for &[action, length] in data.as_chunks::<2>().0 {
        let length = usize::from(length);
        match action % 8 {
            0..=1 => {
                let bytes: Vec<u8> = (0..length).map(|at| next.wrapping_add(at as u8)).collect();
                let (head, tail) = bytes.split_at(length / 3);
                let written = writer.write(&[IoSlice::new(head), IoSlice::new(tail)], length);
                let written = written.unwrap_or_else(|error| assert_broken(is_broken, &error));
                assert!(written <= length && written <= RING_BYTES);
                expected.extend(&bytes[..written]);
                next = next.wrapping_add(written as u8);
            }
            2 => {
                let bytes: Vec<u8> = (0..length.max(1)).map(|at| next.wrapping_add(at as u8)).collect();
                if writer
                    .write_frame(&head_of(&bytes), &bytes[bytes.len().min(8)..])
                    .unwrap_or_else(|error| assert_broken(is_broken, &error) > 0)
                {
                    expected.extend(&bytes);
                    next = next.wrapping_add(bytes.len() as u8);
                }
            }
            3 => match reader.peek_frame(0) {
                Ok(Peeked::Frame(head)) => {
                    let mut into = vec![0; head.bytes];
                    reader.take_frame(0, &mut into);
                    assert!(is_broken || expected.drain(..head.bytes).eq(into.iter().copied()));
                    // For longer frames it may be the beginning of the last write.
                    let begin = head.bytes.min(Head::BYTES);
                    assert!(is_broken || head.bytes > 62 || head.words.map(u64::to_ne_bytes).as_flattened()[..begin] == into[..begin]);
                }
                Ok(Peeked::Nothing | Peeked::Other) => {}
                Err(error) => drop(assert_broken(is_broken, &error)),
            },
            4..=5 => {
                let mut into = vec![0; length];
                let read = reader.read(&mut into, copy).unwrap_or_else(|error| assert_broken(is_broken, &error));
                assert!(read <= length && (is_broken || expected.drain(..read).eq(into[..read].iter().copied())));
            }
            _ => {
                is_broken = true;
                // A cursor near its former value, or any value; or the copy beside the writer's cursor.
                let word = [0, 1, 2, CURSORS_BYTES / 16][usize::from(action >> 3) % 4];
                let value = words().nth(word).map_or(0, |word| word.load(Ordering::Relaxed));
                let value = if action >= 128 { value.wrapping_add(length as u64).wrapping_sub(128) } else { value ^ 1 << (length % 64) };
                words().nth(word).into_iter().for_each(|word| word.store(value, Ordering::Relaxed));
            }
        }
    }
    let guards = lines[0].0.iter().chain(words().skip((CURSORS_BYTES + RING_BYTES) / 8));
    assert!(guards.map(|word| word.load(Ordering::Relaxed)).all(|word| word == GUARD), "written beside the ring");
}

/// Returns the beginning of the bytes.
fn head_of(bytes: &[u8]) -> Head {
    let mut words = [[0; 8]; Head::WORDS];
    let begin = bytes.len().min(Head::BYTES);
    words.as_flattened_mut()[..begin].copy_from_slice(&bytes[..begin]);
    Head { words: words.map(u64::from_ne_bytes), bytes: bytes.len() }
}

/// Returns 0 bytes, if an end has detected that its peer is faulty.
fn assert_broken(is_broken: bool, error: &io::Error) -> usize {
    assert!(is_broken && error.kind() == io::ErrorKind::InvalidData, "{error}");
    0
}
