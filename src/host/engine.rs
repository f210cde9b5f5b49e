//! Runs a plan over links.
