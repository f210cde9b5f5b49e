//! Streams of the caller's, graphs, and errors.
