//! Everyone gets its own block of the fold of everyone's vector.

use super::builder::alone;
use super::direct::direct;
use super::ring::{Sink, ring};
use super::{Algorithm, Blocks, Plan};

/// A plan for `reduce_scatter` with these blocks.
///
/// - `Ring`: operands in the ring's order. Scratch: ten segments.
/// - `Direct`: one fold of all operands in rank order. Scratch: `2 * (n - 1)` segments.
pub(crate) fn reduce_scatter(algorithm: Algorithm, n: usize, me: usize, blocks: Blocks<'_>, element: usize, segment: usize) -> Plan {
    if n == 1 {
        return alone(blocks.len(me));
    }
    // Elements without bytes cut nothing.
    let element = element.max(1);
    let shares = blocks.parts(n);
    match algorithm {
        Algorithm::Direct => direct(n, me, &shares, element, segment, Sink::Own),
        _ => ring(n, me, &shares, element, segment, Sink::Own),
    }
}
