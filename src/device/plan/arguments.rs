//! What a kernel that folds is told.

/// What a fold reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FoldArguments {
    /// Where rank 0's input is.
    pub(crate) inputs: u64,
    /// How far apart inputs are, in bytes.
    pub(crate) stride: u64,
    /// Where this rank's own input is, and which one it is, if that is elsewhere.
    pub(crate) own: Option<(u64, u32)>,
    /// How many inputs there are.
    pub(crate) ranks: u32,
    /// Where the result goes: apart from all inputs, or exactly where this rank's own is.
    pub(crate) output: u64,
    /// How many elements; of bitwise ops, bytes.
    pub(crate) count: u64,
    /// What a mean divides by.
    pub(crate) divisor: u32,
}
