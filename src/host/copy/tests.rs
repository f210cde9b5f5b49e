//! Every length around a line and a block, at every alignment that matters, with margins that nobody may touch.

use super::{copy, copy_streaming};

const MARGIN: usize = 128;
const LENGTHS: &[usize] =
    if cfg!(miri) { &[1, 191] } else { &[0, 1, 3, 15, 16, 31, 32, 63, 64, 65, 127, 129, 191, 256, 1000, 4095, 4097, 8192 + 5, 70_000] };
const STARTS: [usize; 7] = [0, 1, 8, 31, 32, 63, 64];

/// Bytes in which a shift by any small distance shows.
fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| (index % 251) as u8 ^ (index / 251) as u8).collect()
}

/// Calls `write` with a destination of `length` bytes that begins `start` bytes past a line, and checks what became of it.
fn check(length: usize, start: usize, expected: &[u8], what: &str, write: impl FnOnce(*mut u8)) {
    let mut room = vec![0xa5_u8; length + start + 3 * MARGIN];
    let begin = room.as_ptr().align_offset(64) + MARGIN / 2 + start;
    write(room[begin..].as_mut_ptr());
    let (before, rest) = room.split_at(begin);
    let (got, after) = rest.split_at(length);
    assert!(got == expected, "{what}: {length} bytes at {start} differ");
    assert!(before.iter().chain(after).all(|byte| *byte == 0xa5), "{what}: {length} bytes at {start}: written outside");
}

#[test]
fn every_copy_writes_its_bytes_and_no_others() {
    let source = pattern(LENGTHS[LENGTHS.len() - 1] + 64);
    for &length in LENGTHS {
        for from in STARTS {
            let expected = &source[from..from + length];
            let from = expected.as_ptr();
            for start in STARTS {
                // SAFETY: the source covers `length` bytes, and so does the destination, which is another vector.
                check(length, start, expected, "copy", |to| unsafe { copy(from, to, length) });
                // SAFETY: the same source, and a vector of this case's own.
                check(length, start, expected, "copy_streaming", |to| unsafe { copy_streaming(from, to, length) });
            }
        }
    }
}

#[test]
fn a_destination_may_be_the_source() {
    let mut bytes = pattern(10_000);
    let here = bytes.as_mut_ptr();
    // SAFETY: the same 10,000 bytes twice.
    unsafe {
        copy(here, here, 10_000);
        copy_streaming(here, here, 10_000);
    }
    assert!(bytes == pattern(10_000));
}
