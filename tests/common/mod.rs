//! Code that the integration tests share: ranks as threads, ranks as processes, and a plain oracle.

#![allow(dead_code, unused_imports, unused_macros, unreachable_pub, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

pub mod cases;
pub mod forms;
pub mod hosts;
pub mod limit;
pub mod meeting;
pub mod oracle;
pub mod ports;
pub mod programs;
pub mod random;
pub mod ranks;
pub mod tasks;
pub mod typed;
