//! What the integration tests share: ranks as threads, ranks as processes, and a plain oracle.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part of it")]

pub mod cases;
pub mod oracle;
pub mod ranks;
