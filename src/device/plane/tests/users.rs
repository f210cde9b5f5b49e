//! Ops of the caller's own.
