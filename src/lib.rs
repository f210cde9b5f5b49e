//! Collective communication for Rust.

mod call;
mod config;
mod deadline;
mod element;
mod error;
mod float8;
mod host;
mod op;
mod rendezvous;

pub use config::{Config, Transport};
pub use element::{DType, Data, Element, F8E4M3, F8E5M2};
pub use error::{Error, Peer, Result};
pub use half::{bf16, f16};
pub use op::{CustomOp, ReduceOp, Reduction};
pub use rendezvous::{FileStore, MemoryStore, PrefixStore, Store, TcpStore, TcpStoreServer};
