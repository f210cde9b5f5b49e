//! Several calls at once.
