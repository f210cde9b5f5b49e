//! The simulated GPU.
