//! The public face: checks every argument once, then hands a job to the plane where its buffer lives.
//!
//! `handle` has the type, and names only what lies below it: the state that threads share, the worker, the progress engine. Each other
//! file adds methods to the type, and is named by none of these.

mod arguments;
mod barrier;
mod bootstrap;
mod builder;
mod close;
mod collectives;
#[cfg(feature = "cuda")]
mod device;
mod flight;
#[cfg(all(feature = "internals", feature = "serde"))]
pub(crate) mod fuzz;
mod group;
mod hand_off;
mod handle;
mod join;
mod listeners;
mod message;
mod messages;
#[cfg(feature = "serde")]
mod object;
mod pinned;
mod prepare;
mod progress;
mod recovery;
mod run;
mod shared;
mod shrink;
mod split;
mod started;
mod state;
mod sync;
#[cfg(test)]
mod tests;
mod trace;
mod variable;
mod work;
mod worker;

pub use builder::Builder;
pub use close::AbortHandle;
#[cfg(feature = "cuda")]
pub use device::{Device, DeviceChoice, OnStream, device_count};
pub use flight::FlightRecorder;
pub use group::Group;
pub use handle::Communicator;
pub use message::Received;
pub use shared::SharedBuffer;
pub use work::{OwnedBuffer, Work};
