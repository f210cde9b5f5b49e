//! The bytes that one access reaches, among 16 that are aligned.

/// Up to 16 bytes that do not cross a multiple of 16. Values stand at their places among the 16 bytes of the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    /// The address of the 16 bytes.
    pub(crate) line: u64,
    first: u32,
    pub(crate) bytes: u32,
}

impl Window {
    /// `bytes` is 1 to 16, and `address` is a multiple of it.
    pub(crate) fn new(address: u64, bytes: u32) -> Self {
        Self { line: address & !15, first: (address & 15) as u32, bytes }
    }

    pub(crate) fn address(self) -> u64 {
        self.line + u64::from(self.first)
    }

    pub(crate) fn mask(self) -> u128 {
        (u128::MAX >> (128 - 8 * self.bytes)) << (8 * self.first)
    }

    pub(crate) fn overlaps(self, other: Self) -> bool {
        self.line == other.line && self.mask() & other.mask() != 0
    }

    /// Moves a value to its place in the line.
    pub(crate) fn place(self, value: u128) -> u128 {
        (value << (8 * self.first)) & self.mask()
    }

    /// Takes the value from its place in the line.
    pub(crate) fn take(self, line: u128) -> u128 {
        (line & self.mask()) >> (8 * self.first)
    }

    /// Replaces the bytes of this window in a line.
    pub(crate) fn replace(self, line: u128, by: u128) -> u128 {
        line & !self.mask() | by & self.mask()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_stand_at_their_places() {
        let (all, upper, last) = (Window::new(0x1000, 16), Window::new(0x1008, 8), Window::new(0x100f, 1));
        assert_eq!((all.mask(), upper.mask(), last.mask()), (u128::MAX, u128::MAX << 64, 0xff << 120));
        assert_eq!((upper.line, upper.address(), last.address()), (0x1000, 0x1008, 0x100f));
        assert!(all.overlaps(last) && upper.overlaps(last) && !upper.overlaps(Window::new(0x1000, 8)));
        assert!(!all.overlaps(Window::new(0x1010, 16)));
        assert_eq!(upper.take(upper.place(77)), 77);
        assert_eq!(last.replace(u128::MAX, 0), u128::MAX >> 8);
    }
}
