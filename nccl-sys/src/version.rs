//! Versions of NCCL.

use std::ffi::c_int;
use std::fmt;

/// A version of NCCL, such as 2.28.9. Later versions compare as greater.
///
/// NCCL packs a version into one integer, [`code`](Self::code). For releases up to 2.8, the integer is 1000 × major +
/// 100 × minor + patch. For example, 2.8.4 is 2804. For later releases, the integer is 10000 × major + 100 × minor +
/// patch. For example, 2.9.6 is 20906.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(c_int);

impl Version {
    /// Creates the version `major.minor.patch`. `minor` and `patch` are below 100 in all NCCL releases.
    pub const fn new(major: u16, minor: u8, patch: u8) -> Self {
        let (major, minor, patch) = (major as c_int, minor as c_int, patch as c_int);
        let old = major <= 2 && minor <= 8;
        Self(if old { major * 1000 } else { major * 10000 } + minor * 100 + patch)
    }

    /// Creates a version from NCCL's single number, as in [`NCCL_VERSION_CODE`](crate::NCCL_VERSION_CODE) and the
    /// result of `ncclGetVersion`.
    pub const fn from_code(code: c_int) -> Self {
        Self(code)
    }

    /// Returns NCCL's single number for this version.
    pub const fn code(self) -> c_int {
        self.0
    }

    /// Returns the major version: the first number.
    pub const fn major(self) -> c_int {
        if self.0 < 10000 { self.0 / 1000 } else { self.0 / 10000 }
    }

    /// Returns the minor version: the second number.
    pub const fn minor(self) -> c_int {
        if self.0 < 10000 { self.0 / 100 % 10 } else { self.0 / 100 % 100 }
    }

    /// Returns the patch: the third number.
    pub const fn patch(self) -> c_int {
        self.0 % 100
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major(), self.minor(), self.patch())
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Version({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_encodings_are_read_and_written() {
        for (code, text) in [(1300, "1.3.0"), (2305, "2.3.5"), (2804, "2.8.4"), (20906, "2.9.6"), (21803, "2.18.3"), (22809, "2.28.9")] {
            let version = Version::from_code(code);
            assert_eq!(version.to_string(), text);
            let again = Version::new(version.major() as u16, version.minor() as u8, version.patch() as u8);
            assert_eq!((again, again.code()), (version, code));
        }
    }

    #[test]
    fn later_versions_are_greater_across_the_change_of_encoding() {
        let ordered = [(1, 3, 4), (2, 3, 5), (2, 8, 3), (2, 8, 4), (2, 9, 6), (2, 10, 3), (2, 28, 9), (2, 29, 2), (3, 0, 0)];
        assert!(ordered.map(|(major, minor, patch)| Version::new(major, minor, patch)).is_sorted_by(|a, b| a < b));
    }
}
