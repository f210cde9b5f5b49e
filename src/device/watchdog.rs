//! One thread per process that notices calls that do not end, and aborts their communicators.
