//! A barrier: everyone hears from everyone, and nothing else happens.

use super::Plan;
use super::builder::Builder;

/// A barrier by dissemination, in ceil(log2 n) rounds of messages without bytes: in round k everyone sends to the rank 2^k
/// further on. Also what plans start with whose data flow does not bring agreement.
pub(crate) fn barrier(n: usize, me: usize) -> Plan {
    Builder::agreed(n, me).finish()
}
