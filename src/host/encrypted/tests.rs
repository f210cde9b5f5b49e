//! Tests of two ends over a stream that accepts and delivers a few bytes at a time, or changes them.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use super::*;
use crate::authentication::{Initiator, Purpose, Responder, Secret, Step};
use crate::base::random::Random;

/// The bytes on their way in one direction.
type Pipe = Rc<RefCell<VecDeque<u8>>>;

/// One end of two pipes. The one that it writes to holds at most `room` bytes.
struct Piped {
    to: Pipe,
    from: Pipe,
    room: usize,
    random: Random,
}

impl ByteLink for Piped {
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut to = self.to.borrow_mut();
        let most = (self.room - to.len()).min(1 + self.random.below(self.room));
        let bytes: Vec<u8> = parts.iter().flat_map(|part| part.iter().copied()).take(most).collect();
        to.extend(&bytes);
        if bytes.is_empty() { Err(ErrorKind::WouldBlock.into()) } else { Ok(bytes.len()) }
    }

    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut from = self.from.borrow_mut();
        let count = from.len().min(into.len()).min(1 + self.random.below(200_000));
        from.drain(..count).zip(into).for_each(|(byte, into)| *into = byte);
        if count == 0 { Err(ErrorKind::WouldBlock.into()) } else { Ok(count) }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

fn ciphers() -> [Cipher; 2] {
    let secret = Secret::new([3; 32]).unwrap().encrypting().unwrap();
    let mut initiator = Initiator::new(&secret, Purpose::Link, b"test").unwrap();
    let mut responder = Responder::new(&secret, Purpose::Link, 4);
    let mut said = initiator.opening();
    loop {
        let reply = responder.receive(&said).unwrap().unwrap();
        let (head, tail) = reply.split_at(44);
        let mut step = initiator.receive(head).unwrap();
        if step == Step::Listen {
            step = initiator.receive(tail).unwrap();
        }
        match step {
            Step::Send(tag) => said = tag.to_vec(),
            Step::Done => return [initiator.into_cipher().unwrap(), responder.take_cipher().unwrap()],
            Step::Listen => panic!("half a reply"),
        }
    }
}

/// Creates two ends, and the pipe from the first to the second.
fn pair(room: usize, seed: u64) -> (EncryptedLink<Piped>, EncryptedLink<Piped>, Pipe) {
    let [there, back] = [Pipe::default(), Pipe::default()];
    let [near, far] = ciphers();
    let end = |to: &Pipe, from: &Pipe, seed| Piped { to: Rc::clone(to), from: Rc::clone(from), room, random: Random(seed) };
    (EncryptedLink::new(end(&there, &back, seed), near), EncryptedLink::new(end(&back, &there, seed + 1), far), there)
}

fn moved(outcome: io::Result<usize>) -> usize {
    match outcome {
        Ok(count) => {
            assert!(count > 0, "nothing is WouldBlock");
            count
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
            0
        }
    }
}

/// A caller with messages, each a head and a payload, several of which it offers in one write. It sometimes replaces
/// the next one if nothing of it was accepted, like a caller with something more urgent to send.
struct Caller {
    random: Random,
    queue: VecDeque<[Vec<u8>; 2]>,
    /// How many bytes of the first were accepted.
    taken: usize,
    /// All bytes that were accepted.
    said: Vec<u8>,
}

impl Caller {
    fn message(&mut self) -> [Vec<u8>; 2] {
        let head = 2 + self.random.below(60);
        let payload = match self.random.below(8) {
            0 => 0,
            1..5 => self.random.below(300),
            5..7 => self.random.below(3 * CONTENT_BYTES),
            _ => CONTENT_BYTES - head + self.random.below(3),
        };
        [self.random.bytes(head), self.random.bytes(payload)]
    }

    fn write(&mut self, link: &mut impl ByteLink) {
        if self.taken == 0 && !self.queue.is_empty() && self.random.below(3) == 0 {
            self.queue[0] = self.message();
        }
        if self.taken == 0 || self.random.below(2) == 0 {
            while self.queue.len() < 1 + self.random.below(6) {
                let message = self.message();
                self.queue.push_back(message);
            }
        }
        let mut skip = self.taken;
        let mut parts = Vec::new();
        for part in self.queue.iter().flatten() {
            let from = skip.min(part.len());
            skip -= from;
            parts.push(IoSlice::new(&part[from..]));
        }
        let mut count = moved(link.try_write(&parts));
        while count > 0 {
            let message = self.queue[0].concat();
            let now = count.min(message.len() - self.taken);
            self.said.extend(&message[self.taken..self.taken + now]);
            self.taken += now;
            count -= now;
            if self.taken == message.len() {
                self.queue.pop_front();
                self.taken = 0;
            }
        }
    }
}

#[test]
fn whatever_is_written_in_whatever_parts_comes_out_in_order() {
    for (room, seed) in [(1, 1), (7, 2), (64, 3), (1000, 4), (70_000, 5), (400_000, 6), (3, 7)] {
        println!("room for {room} bytes, seed {seed}");
        let (mut near, mut far, _) = pair(room, seed);
        let mut caller = Caller { random: Random(seed), queue: VecDeque::new(), taken: 0, said: Vec::new() };
        let mut random = Random(seed ^ 77);
        let mut heard = Vec::new();
        for _ in 0..if room < 100 { 300 } else { 3000 } {
            caller.write(&mut near);
            for _ in 0..random.below(4) {
                let mut into = vec![0; 1 + random.below(if room < 100 { 50 } else { 150_000 })];
                let count = moved(far.try_read(&mut into));
                heard.extend(&into[..count]);
                assert!(count < into.len() || count > 0);
            }
            assert!(heard.len() <= caller.said.len() + 1, "no byte before its time: {} of {}", heard.len(), caller.said.len());
        }
        // The message that was begun is finished. Then everything has arrived, although there are no more writes.
        while caller.taken > 0 {
            caller.queue.truncate(1);
            let left = caller.queue[0].concat()[caller.taken..].to_vec();
            let count = moved(near.try_write(&[IoSlice::new(&left)]));
            caller.said.extend(&left[..count]);
            caller.taken = if count == left.len() { 0 } else { caller.taken + count };
            drain(&mut far, &mut heard);
        }
        drain(&mut far, &mut heard);
        assert!(heard == caller.said, "{} bytes of {}", heard.len(), caller.said.len());
        assert!(heard.len() > 1000);
    }
}

/// Reads all there is.
fn drain(link: &mut EncryptedLink<Piped>, heard: &mut Vec<u8>) {
    let mut into = [0; 5000];
    loop {
        match moved(link.try_read(&mut into)) {
            0 => return,
            count => heard.extend(&into[..count]),
        }
    }
}

#[test]
fn a_read_leaves_nothing_behind_that_it_had_room_for() {
    let (mut near, mut far, _) = pair(1 << 20, 9);
    far.below.random = Random(1);
    for _ in 0..50 {
        assert_eq!(near.try_write(&[IoSlice::new(b"twelve bytes")]).unwrap(), 12);
    }
    let mut into = [0; 601];
    let (mut count, mut reads) = (0, 0);
    while count < 600 {
        count += far.try_read(&mut into[count..]).unwrap();
        reads += 1;
        assert!(count == 600 || count % 12 == 0, "whole records");
    }
    assert!(reads < 40, "{reads} reads");
    assert_eq!(moved(far.try_read(&mut into)), 0);
}

#[test]
fn what_is_changed_on_its_way_is_never_read() {
    let content = Random(1).bytes(300);
    for at in (0..2 * (2 + 300 + 16)).step_by(3) {
        let (mut near, mut far, pipe) = pair(1 << 20, 11);
        for _ in 0..2 {
            let mut sent = 0;
            while sent < content.len() {
                sent += moved(near.try_write(&[IoSlice::new(&content[sent..])]));
            }
        }
        pipe.borrow_mut()[at] ^= 1 << (at % 8);
        let mut heard = Vec::new();
        let error = loop {
            let mut into = [0; 77];
            match far.try_read(&mut into) {
                Ok(count) => heard.extend(&into[..count]),
                Err(error) => break error,
            }
        };
        let whole = [&content[..], &content].concat();
        assert!(whole.starts_with(&heard) && heard.len() < whole.len(), "byte {at}: {} bytes were read", heard.len());
        assert!(matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::WouldBlock), "byte {at}: {error}");
        if error.kind() == ErrorKind::InvalidData {
            assert_eq!(far.try_read(&mut [0; 9]).unwrap_err().kind(), ErrorKind::InvalidData, "for ever");
        }
    }
}

#[test]
fn nothing_of_the_content_is_on_the_line() {
    let (mut near, _, pipe) = pair(1 << 20, 13);
    let pattern = b"sixty-four bytes, which are looked for in all that is on the line";
    let content = pattern.repeat(1000);
    let mut sent = 0;
    while sent < content.len() {
        sent += moved(near.try_write(&[IoSlice::new(&content[sent..])]));
    }
    let line: Vec<u8> = pipe.borrow().iter().copied().collect();
    assert!(line.len() > content.len() && !line.windows(12).any(|window| window == &pattern[..12]));
}

#[test]
fn a_message_that_takes_the_place_of_one_that_was_begun_is_refused() {
    let (mut near, _, pipe) = pair(10, 15);
    assert!(near.try_write(&[IoSlice::new(&[7; 100])]).unwrap() == 99);
    pipe.borrow_mut().clear();
    let error = loop {
        match near.try_write(&[IoSlice::new(&[8; 100])]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => pipe.borrow_mut().clear(),
            other => break other.unwrap_err(),
        }
    };
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}

#[test]
fn writes_are_cut_where_no_message_is_left_begun_by_one_byte() {
    let slices = |lengths: &[usize]| lengths.iter().map(|length| vec![0; *length]).collect::<Vec<_>>();
    for (lengths, from, most, expected) in [
        (&[3, 4][..], 0, 9, 7),
        (&[3, 4], 0, 7, 7),
        (&[3, 4], 0, 6, 6),
        (&[3, 4], 0, 4, 3),
        (&[3, 4], 0, 5, 5),
        (&[3, 0, 4], 0, 4, 3),
        (&[3, 4], 1, 3, 2),
        (&[3, 4], 3, 2, 2),
        (&[3, 4], 4, 2, 2),
        (&[3, 1, 4], 0, 4, 4),
        (&[], 0, 5, 0),
        (&[3], 3, 5, 0),
    ] {
        let slices = slices(lengths);
        let parts: Vec<IoSlice<'_>> = slices.iter().map(|bytes| IoSlice::new(bytes)).collect();
        assert_eq!(cut(&parts, from, most), expected, "{lengths:?} from {from}, at most {most}");
    }
}
