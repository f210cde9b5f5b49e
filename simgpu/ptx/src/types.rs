//! Types and state spaces, with their PTX names.

/// The type of an instruction, a register or a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Type {
    /// Untyped bits, with their number.
    B(u32),
    /// Unsigned, its width in bits.
    U(u32),
    /// Signed, its width in bits.
    S(u32),
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
    E4m3x2,
    E5m2x2,
    Pred,
}

impl Type {
    /// Returns the type that a suffix names.
    pub(crate) fn named(suffix: &str) -> Option<Self> {
        Some(match suffix {
            "pred" => Self::Pred,
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::Bf16,
            "bf16x2" => Self::Bf16x2,
            "f32" => Self::F32,
            "f64" => Self::F64,
            "e4m3x2" => Self::E4m3x2,
            "e5m2x2" => Self::E5m2x2,
            _ => {
                let bits = match suffix.get(1..)? {
                    "8" => 8,
                    "16" => 16,
                    "32" => 32,
                    "64" => 64,
                    _ => return None,
                };
                match suffix.as_bytes()[0] {
                    b'b' => Self::B(bits),
                    b'u' => Self::U(bits),
                    b's' => Self::S(bits),
                    _ => return None,
                }
            }
        })
    }

    pub(crate) fn bits(self) -> u32 {
        match self {
            Self::B(bits) | Self::U(bits) | Self::S(bits) => bits,
            Self::F16 | Self::Bf16 | Self::E4m3x2 | Self::E5m2x2 => 16,
            Self::F16x2 | Self::Bf16x2 | Self::F32 => 32,
            Self::F64 => 64,
            Self::Pred => 1,
        }
    }

    pub(crate) fn bytes(self) -> usize {
        self.bits().div_ceil(8) as usize
    }

    /// Whether this is an integer or bits, not a float or a predicate.
    pub(crate) fn is_integer(self) -> bool {
        matches!(self, Self::B(_) | Self::U(_) | Self::S(_))
    }

    pub(crate) fn is_signed(self) -> bool {
        matches!(self, Self::S(_))
    }
}

/// The start of the addresses of functions.
pub(crate) const FUNCTIONS: u64 = 0x7c00_0000_0000_0000;

/// The memory space of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Space {
    Generic,
    Global,
    Const,
    Shared,
    Local,
    Param,
}

impl Space {
    /// Returns the space that a suffix names; in a cluster, only the block's own shared memory (`shared::cta`).
    pub(crate) fn named(suffix: &str) -> Option<Self> {
        Some(match suffix {
            "global" => Self::Global,
            "const" => Self::Const,
            "shared" | "shared::cta" => Self::Shared,
            "local" => Self::Local,
            "param" | "param::entry" | "param::func" => Self::Param,
            _ => return None,
        })
    }

    /// Returns the value to add to an offset in this space for a generic address.
    pub(crate) fn window(self) -> u64 {
        match self {
            Self::Generic | Self::Global | Self::Const => 0,
            Self::Shared => 0x7f00_0000_0000_0000,
            Self::Local => 0x7e00_0000_0000_0000,
            Self::Param => 0x7d00_0000_0000_0000,
        }
    }

    /// Returns the space of a generic address, and the address within it.
    pub(crate) fn of_generic(address: u64) -> (Self, u64) {
        let space = match address >> 56 {
            0x7f => Self::Shared,
            0x7e => Self::Local,
            0x7d => Self::Param,
            _ => return (Self::Global, address),
        };
        (space, address - space.window())
    }
}
