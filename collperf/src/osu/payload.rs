//! The bytes of messages, and their check. A message's bytes depend on its sender, its number and their position, so a
//! message that is lost, repeated, cut or moved is noticed.

use crate::failure::Failure;

/// Names a message: its sender and its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Name {
    pub(super) sender: usize,
    pub(super) number: u64,
}

impl Name {
    /// Returns the byte at a position.
    fn byte(self, position: usize) -> u8 {
        let mixed = (position as u64).wrapping_add(self.number.wrapping_mul(0x9e37_79b9)).wrapping_add((self.sender as u64) << 40);
        (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
    }

    /// Writes the message.
    pub(super) fn write(self, message: &mut [u8]) {
        message.iter_mut().enumerate().for_each(|(position, byte)| *byte = self.byte(position));
    }

    /// Returns how many bytes of a received message are wrong.
    pub(super) fn wrong(self, message: &[u8]) -> u64 {
        message.iter().enumerate().filter(|(position, byte)| **byte != self.byte(*position)).count() as u64
    }
}

/// Returns a buffer of zeros, or an error if there is not enough memory.
pub(super) fn buffer<T: Clone + Default>(length: usize) -> Result<Vec<T>, Failure> {
    let mut buffer = Vec::new();
    let bytes = length.saturating_mul(size_of::<T>());
    buffer
        .try_reserve_exact(length)
        .map_err(|_| Failure::internal(format!("a buffer of {bytes} bytes: not enough memory; use a smaller -m or -W")))?;
    buffer.resize(length, T::default());
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_that_differ_are_noticed() {
        let name = Name { sender: 1, number: 5 };
        let mut message = vec![0; 1000];
        name.write(&mut message);
        assert_eq!(name.wrong(&message), 0);
        for other in [Name { sender: 0, ..name }, Name { number: 4, ..name }, Name { number: 6, ..name }] {
            assert!(other.wrong(&message) > 900, "{other:?}");
        }
        assert!(name.wrong(&message[1..]) > 900);
        message[999] ^= 1;
        assert_eq!(name.wrong(&message), 1);
        assert_eq!(name.wrong(&[]), 0);
    }

    #[test]
    fn what_is_too_large_is_an_error() {
        assert_eq!(buffer::<u8>(3).unwrap(), [0; 3]);
        assert!(buffer::<f32>(usize::MAX / 8).unwrap_err().message.contains("not enough memory"));
    }
}
