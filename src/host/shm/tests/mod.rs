//! Tests of the whole: ranks as threads, and as processes.

mod agreement;
mod correctness;
mod processes;
mod windows;

use std::time::Duration;

use super::{CallContext, Group};
use crate::call::{Call, Kind};
use crate::deadline::Deadline;
use crate::element::{DType, TypeTag};
use crate::host::exchange::local::exchanges;
use crate::host::health::Health;

/// How long a test may take that is not stuck; longer where the thread sanitizer looks on.
const PATIENCE: Duration = Duration::from_secs(if cfg!(one_mapping) { 600 } else { 60 });

/// A small generator of numbers that look random (xorshift).
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number less than `end`; 0 where that is 0.
    pub(super) fn below(&mut self, end: usize) -> usize {
        if end == 0 { 0 } else { (self.next() >> 11) as usize % end }
    }
}

/// A call of some kind; what it moves is the test's matter.
fn call(kind: Kind, sequence: u64) -> Call {
    Call { kind, op: 0, element: TypeTag::Scalar(DType::U8), count: 0, root: None, counts_hash: 0, sequence }
}

/// What one rank of a test needs beside its group.
struct Rank {
    index: usize,
    size: usize,
    group: Group,
    health: Health,
    deadline: Deadline,
    sequence: u64,
}

impl Rank {
    /// Makes the next call, of a kind, on the group.
    fn make<T>(&mut self, kind: Kind, run: impl FnOnce(&mut Group, &CallContext<'_>) -> T) -> T {
        self.sequence += 1;
        let call = call(kind, self.sequence);
        run(
            &mut self.group,
            &CallContext { call: &call, deadline: &self.deadline, health: &self.health, recorder: &crate::flight::Flight::default() },
        )
    }
}

/// Runs `body` on `size` ranks, each a thread, and gives back what each said.
fn on_threads<T: Send>(size: usize, body: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let members: Vec<usize> = (0..size).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = exchanges(size)
            .into_iter()
            .enumerate()
            .map(|(index, mut exchange)| {
                let (members, body) = (&members, &body);
                scope.spawn(move || {
                    let deadline = Deadline::after(PATIENCE);
                    let group = Group::connect(&mut exchange, members, index, size, None, &deadline).unwrap();
                    body(Rank { index, size, group, health: Health::default(), deadline, sequence: 0 })
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
