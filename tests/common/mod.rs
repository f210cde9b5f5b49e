//! What the integration tests share: ranks as threads, ranks as processes, and a plain oracle.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test ends in a panic where something is wrong")]

pub mod cases;
pub mod oracle;
pub mod ranks;
