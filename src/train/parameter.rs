//! What a model's parameters are called and look like, and that all ranks say the same of them.

use std::fmt;

use sha2::{Digest, Sha256};

use super::float::Float;
use crate::communicator::Communicator;
use crate::element::DType;
use crate::error::{Error, Result};

/// A parameter of the model: what a gradient is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Its name, for errors; need not be unique.
    pub name: String,
    /// Its dimensions; no dimensions for a single number.
    pub shape: Vec<usize>,
    /// The type of its gradient's elements: `f32`, `f64`, `f16` or `bf16`.
    pub dtype: DType,
}

impl Parameter {
    /// A parameter whose gradient has elements of type `T`.
    #[must_use]
    pub fn new<T: Float>(name: impl Into<String>, shape: &[usize]) -> Self {
        Self { name: name.into(), shape: shape.to_vec(), dtype: T::ELEMENT_TYPE }
    }

    /// How many elements it has; `None` where that is more than an address space holds.
    pub(super) fn len(&self) -> Option<usize> {
        let len = self.shape.iter().try_fold(1_usize, |len, side| len.checked_mul(*side))?;
        len.checked_mul(self.dtype.size_bytes()).filter(|bytes| *bytes <= isize::MAX as usize).map(|_| len)
    }
}

impl fmt::Display for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} ({}{:?})", self.name, self.dtype, self.shape)
    }
}

/// Refuses ranks that differ in `what` they make, say on the host or on a device, in their parameters, or in `settings` (what else decides
/// which calls are made, in words). Collective.
pub(super) fn agree(comm: &Communicator, what: &str, parameters: &[Parameter], settings: &str) -> Result<()> {
    if comm.world_size() == 1 {
        return Ok(());
    }
    let mine = lines(what, parameters, settings);
    let digest: [u8; 32] = Sha256::digest(mine.as_bytes()).into();
    let mut all = vec![([0; 32], 0).into_plain(); comm.world_size()];
    comm.all_gather_into(&[(digest, mine.len() as u64).into_plain()], &mut all)?;
    let Some(other) = all.iter().position(|theirs| *theirs != all[0]) else { return Ok(()) };
    let told = |rank: usize| {
        let mut text = if comm.rank() == rank { mine.clone().into_bytes() } else { vec![0; length(&all[rank])] };
        comm.broadcast(&mut text, rank).map(|()| String::from_utf8_lossy(&text).into_owned())
    };
    let (first, second) = (told(0)?, told(other)?);
    let (first_call, second_call) = first_difference(&first, &second);
    Err(Error::Mismatch { first: comm.peers()[0].clone(), first_call, second: comm.peers()[other].clone(), second_call })
}

/// A digest and a length as they travel.
trait IntoPlain {
    fn into_plain(self) -> [u8; 40];
}

impl IntoPlain for ([u8; 32], u64) {
    fn into_plain(self) -> [u8; 40] {
        let mut plain = [0; 40];
        plain[..32].copy_from_slice(&self.0);
        plain[32..].copy_from_slice(&self.1.to_le_bytes());
        plain
    }
}

/// The length in it.
fn length(plain: &[u8; 40]) -> usize {
    plain[32..].iter().rev().fold(0, |length, byte| length << 8 | usize::from(*byte))
}

/// One line for what is made, one for the settings and one for each parameter; debug forms hold no line ends.
fn lines(what: &str, parameters: &[Parameter], settings: &str) -> String {
    let mut text = format!("{what}\n{settings}\n");
    parameters.iter().enumerate().for_each(|(index, parameter)| text += &format!("parameter {index} {parameter}\n"));
    text
}

/// What each made, and the first of the other lines that differ, in words.
fn first_difference(first: &str, second: &str) -> (String, String) {
    let ((first_what, first), (second_what, second)) = (split(first), split(second));
    let (first, second) = match first == second {
        true => (split(first).0.to_owned(), split(second).0.to_owned()),
        false => first_different_line(first, second),
    };
    (format!("{first_what} with {first}"), format!("{second_what} with {second}"))
}

/// The first line, and the others.
fn split(text: &str) -> (&str, &str) {
    text.split_once('\n').unwrap_or((text, ""))
}

fn first_different_line(first: &str, second: &str) -> (String, String) {
    let count = |text: &str| text.lines().count() - 1;
    let mut pairs = first.lines().zip(second.lines());
    match pairs.find(|(a, b)| a != b) {
        Some((a, b)) => (a.to_owned(), b.to_owned()),
        None => {
            let longer = if first.len() > second.len() { first } else { second };
            let surplus = longer.lines().nth(count(first).min(count(second)) + 1).unwrap_or_default();
            let said = |text: &str| match text == longer {
                true => format!("{} parameters, of which the other has not {surplus}", count(text)),
                false => format!("{} parameters", count(text)),
            };
            (said(first), said(second))
        }
    }
}
