//! Collectives and links between the ranks of one host, in shared memory.
