//! The folds, compared with plain scalar code that is written differently.

#![expect(unsafe_code, reason = "the folds work on pointers")]
#![allow(clippy::unwrap_used, reason = "a test may")]

mod matrix;
mod methods;
mod oracle;
mod special;

use super::super::fold::Fold;
use super::Kernel;
use super::level::Level;
use crate::base::random::Random;
use crate::call::element::DType;
use crate::call::op::ReduceOp;

/// Returns the levels that this processor has.
fn levels() -> impl Iterator<Item = Level> {
    Level::ALL.iter().copied().filter(|level| level.is_available())
}

/// Returns the supported pairs; under Miri, some of them.
fn pairs() -> impl Iterator<Item = (ReduceOp, DType)> {
    ReduceOp::ALL
        .into_iter()
        .flat_map(|op| DType::ALL.into_iter().map(move |dtype| (op, dtype)))
        .filter(|(op, dtype)| op.check(*dtype).is_ok())
        .step_by(if cfg!(miri) { 7 } else { 1 })
}

/// Bytes at any element boundary, with a margin on both sides that must not be touched.
struct Buffer {
    words: Vec<u64>,
    start: usize,
    length: usize,
}

/// The content of the margins.
const MARGIN: u8 = 0xa5;

impl Buffer {
    /// Creates a buffer whose bytes start `start` bytes past a multiple of 8.
    fn new(bytes: &[u8], start: usize) -> Self {
        let mut buffer = Self { words: vec![0; (start + bytes.len()) / 8 + 3], start: start + 8, length: bytes.len() };
        buffer.all_mut().fill(MARGIN);
        let range = buffer.start..buffer.start + buffer.length;
        buffer.all_mut()[range].copy_from_slice(bytes);
        buffer
    }

    fn all_mut(&mut self) -> &mut [u8] {
        // SAFETY: the vector's own bytes, under its own borrow; any byte is valid in a `u64`.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.words.len() * 8) }
    }

    fn pointer(&mut self) -> *mut u8 {
        let start = self.start;
        self.all_mut()[start..].as_mut_ptr()
    }

    /// Returns the bytes after checking the margins.
    fn bytes(&mut self) -> &[u8] {
        let (start, end) = (self.start, self.start + self.length);
        let all = self.all_mut();
        assert!(all[..start].iter().chain(&all[end..]).all(|&byte| byte == MARGIN), "written outside the buffer");
        &all[start..end]
    }
}

/// Folds `inputs`, each in a buffer with a different start, into the one at `alias` or a separate buffer, and returns
/// the result. Checks that nothing else was written.
fn fold(kernel: &Kernel, inputs: &[&[u8]], alias: Option<usize>, last: bool) -> Vec<u8> {
    let element = kernel.element_bytes();
    let mut buffers: Vec<Buffer> = inputs.iter().enumerate().map(|(index, input)| Buffer::new(input, (index * 3 + 1) * element)).collect();
    let bytes = inputs[0].len();
    let mut apart = Buffer::new(&vec![0xee; bytes], 5 * element);
    let pointers: Vec<*const u8> = buffers.iter_mut().map(|buffer| buffer.pointer().cast_const()).collect();
    let into = alias.map_or_else(|| apart.pointer(), |index| pointers[index].cast_mut());
    // SAFETY: every buffer holds `bytes` bytes at a multiple of the element's size past a multiple of 8; the
    // destination is one of them or separate; the inputs are elements, and this is the only thread.
    unsafe { kernel.fold(into, &pointers, bytes, last) };
    for (index, buffer) in buffers.iter_mut().enumerate() {
        let now = buffer.bytes();
        assert!(alias == Some(index) || now == inputs[index], "input {index} was written to");
    }
    match alias {
        None => apart.bytes().to_vec(),
        Some(index) => buffers[index].bytes().to_vec(),
    }
}
