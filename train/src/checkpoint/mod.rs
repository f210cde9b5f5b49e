//! Saves checkpoints with one number of ranks and loads them with any other (feature `checkpoint`).
//!
//! A checkpoint consists of named tensors, each with an element type and a shape, and of strings that the program
//! stores. To save, a rank passes to [`Writer`] the [`Piece`] that it holds of each tensor. To load, a rank passes to
//! [`Checkpoint`] the piece that it wants. No rank needs to know the other ranks' pieces. The state of an optimiser is
//! saved as tensors too. [`Writer::shares`] names the tensors of a [`ShardedOptimizer`](super::ShardedOptimizer) or a
//! [`FullySharded`](super::FullySharded).
//!
//! [`Writer::commit`] returns when the checkpoint is saved. [`Saver::save`] copies the values and returns, and a thread
//! saves the copies.
//!
//! # Files
//!
//! A run's folder has one folder for each checkpoint, such as `step-00000042`. Every rank that writes puts one
//! safetensors file into this folder, such as `rank-00003-of-00008.safetensors`. Other tools can read this file. In the
//! file, a whole tensor has its own name. A flat range of a tensor is called `name#start-end`, and a range of a
//! dimension `name#dimension:start-end`. `checkpoint.json` lists the pieces of every tensor and their files. Numbers
//! are little-endian.
//!
//! # Atomicity
//!
//! A checkpoint is created in a folder whose name begins with a dot. When every file in it is written and synced, the
//! folder gets its final name by one rename. So the latest checkpoint is always complete, even if all processes are
//! killed at once or the power fails. The file system must meet these requirements:
//!
//! - All ranks share it. A rank that does not see rank 0's files reports an error, and so does rank 0 if it does not
//!   see another rank's file.
//! - A rename is atomic, and data for which `fsync` has returned survive a failure.
//! - A file that one host has written, closed and synced can be opened by others, as in NFS.
//!
//! One group of ranks at a time may save to a folder.
//!
//! # Limitations
//!
//! This module does not compare copies that several ranks hold, and stores no checksums of the data. The caller copies
//! device buffers to the host ([`Writer::tensor_with`]). A piece is a range of one dimension or a flat range. A flat
//! range of a range of columns is neither, and must be saved as a separate tensor.

#[cfg(target_endian = "big")]
compile_error!("the feature `checkpoint` supports only little-endian processors: it writes numbers in the byte order of memory");

mod batches;
mod contents;
mod directory;
mod file;
mod foreign;
#[cfg(feature = "__internals")]
pub mod fuzz;
mod header;
mod index;
mod json;
pub(crate) mod piece;
pub(crate) mod plan;
mod publication;
mod reader;
mod regular_file;
mod saver;
pub(crate) mod shares;
mod values;
mod writer;

use crate::bytes;

pub use piece::Piece;
pub use reader::Checkpoint;
pub use saver::Saver;
pub use shares::Sharded;
pub use writer::Writer;
