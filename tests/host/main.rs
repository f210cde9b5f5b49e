//! The public behaviour of the host backend: collectives, messages, objects, buffers, threads and records.

#![allow(clippy::unwrap_used, clippy::type_complexity, reason = "a test fails by panicking, and says what it needs where it needs it")]

#[path = "../common/allocations.rs"]
mod allocations;
#[path = "../common/mod.rs"]
mod common;

mod agreement;
mod algorithms;
mod articles;
mod awaiting;
mod background;
mod connections;
mod edges;
mod elements;
mod flight_recorder;
mod forms;
mod lanes;
#[cfg(not(one_mapping))]
mod lent_buffers;
mod many;
mod matrix;
mod mean;
mod membership;
mod messages;
#[cfg(feature = "cuda")]
mod no_device;
#[cfg(feature = "serde")]
mod object_messages;
#[cfg(feature = "serde")]
mod objects;
mod opposite_orders;
mod repeated_calls;
mod reproducible;
mod runtime_types;
mod shared_buffers;
mod sharing;
mod store_handle;
mod subgroups;
mod tagged_barrier;
