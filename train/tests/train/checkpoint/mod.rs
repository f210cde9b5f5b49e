//! Checkpoints: saved and loaded by any numbers of ranks, against plain copies; whole after every kill; and files that are not what they
//! should be.

mod corrupt;
mod folders;
mod foreign;
mod killed_training;
mod kills;
mod names;
mod round_trips;
mod tensors;
mod training;
mod trouble;
