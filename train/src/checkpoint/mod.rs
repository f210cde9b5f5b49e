//! Checkpoints that reshard (feature `checkpoint`): saved by one number of ranks, loaded by any other.
//!
//! A checkpoint is a list of named tensors, each with an element type and a shape, and of strings from the program. A
//! rank passes the [`Piece`] of each tensor that it holds to [`Writer`], or that it wants to [`Checkpoint`]. It need
//! not know the other ranks' pieces. The state of an optimiser is more tensors. [`Writer::shares`] names those of a
//! [`ShardedOptimizer`](super::ShardedOptimizer), and the shares of a [`FullySharded`](super::FullySharded).
//!
//! # Files
//!
//! A run's folder has one folder for each checkpoint, such as `step-00000042`. In it every rank that writes has one
//! safetensors file, `rank-00003-of-00008.safetensors`, which other tools can read. A whole tensor has its own name
//! there, a flat range of it is called `name#start-end`, and a range of a dimension `name#dimension:start-end`.
//! `checkpoint.json` lists the pieces of every tensor and their files. Numbers are little-endian.
//!
//! # Atomicity
//!
//! A checkpoint is created in a folder whose name begins with a dot. When every file in it is written and synced, it
//! gets its name by one rename. So the latest checkpoint is complete whenever processes are killed, even all at once,
//! and whenever the power fails. This requires of the file system:
//!
//! - All ranks share it. A rank that does not see rank 0's files reports that, and so does rank 0 for the other ranks'
//!   files.
//! - A rename is atomic, and data for which `fsync` has returned survive a failure.
//! - A file that one host has written, closed and synced can be opened by others, as in NFS.
//!
//! One group of ranks at a time may save to a folder.
//!
//! # Limitations
//!
//! It does not compare copies that several ranks hold, nor store checksums of data. The caller copies device buffers to
//! the host. A piece is a range of one dimension or a flat range. A flat range of a range of columns is neither, and
//! must be saved as its own tensor.

#[cfg(target_endian = "big")]
compile_error!("the feature `checkpoint` writes numbers as they lie in memory, and its files are little-endian");

mod batches;
mod bytes;
mod contents;
mod directory;
mod file;
mod foreign;
#[cfg(feature = "__internals")]
pub mod fuzz;
mod header;
mod index;
mod json;
mod piece;
mod plan;
mod reader;
mod regular_file;
mod shares;
mod writer;

pub use piece::Piece;
pub use reader::Checkpoint;
pub use shares::Sharded;
pub use writer::Writer;
