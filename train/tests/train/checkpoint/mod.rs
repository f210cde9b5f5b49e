//! Checkpoints: saved and loaded by any numbers of ranks and compared with plain copies; whole after every kill; and
//! invalid files.

mod background;
mod corrupt;
mod folders;
mod foreign;
mod killed_training;
mod kills;
mod names;
mod round_trips;
mod signals;
pub(crate) mod tensors;
mod training;
mod trouble;
