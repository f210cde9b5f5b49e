//! Checkpoints that reshard (feature `checkpoint`): saved by one number of ranks, loaded by any other.
//!
//! A checkpoint is a list of named tensors, each with an element type and a shape, and words of the program's. A rank says which [`Piece`]
//! of which tensor it holds, and what it wants, and knows nothing of the others' pieces: [`Writer`] and [`Checkpoint`]. The state of an
//! optimiser is more tensors; [`Writer::shares`] names those of a [`ShardedOptimizer`](super::ShardedOptimizer), and the
//! shares of a [`FullySharded`](super::FullySharded).
//!
//! # What is on the disk
//!
//! A run's folder has one folder for each checkpoint, `step-00000042`. In it every rank that has something to write has one safetensors
//! file, `rank-00003-of-00008.safetensors`, which other tools read. A tensor that is whole has its own name there, a range of it flattened
//! is called `name#start-end`, and a range of a dimension `name#dimension:start-end`. `checkpoint.json` says which pieces every tensor
//! consists of and where they lie. Numbers are little-endian.
//!
//! # What is atomic, and what that takes
//!
//! A checkpoint is made in a folder whose name begins with a dot. When every file in it is written and synced it gets its name, by one
//! rename. So the latest checkpoint is whole whenever a process is killed, also all at once, and whenever the power fails. Of the file
//! system this asks that:
//!
//! - all ranks share it: a rank that does not see what rank 0 wrote says so, and so does rank 0 of files that it does not see;
//! - a rename is atomic, and what `fsync` returned for outlasts a failure;
//! - a file that one host has written, closed and synced can be opened by others, as NFS has it.
//!
//! One group of ranks at a time may save to a folder.
//!
//! # What it does not do
//!
//! It does not compare what ranks hold alike, nor keep checksums of data. Buffers on a device are copied to the host by the caller. A piece
//! is a range of one dimension or a flat range: a flat range of a range of columns is neither, and is saved as a tensor of its own.

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
