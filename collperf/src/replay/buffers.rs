//! Memory for the calls of a replay, all zeros, so that no sum grows without bound.

use std::collections::HashMap;

use super::script::Script;
use super::shape::Shape;
use crate::failure::Failure;
use crate::machine::available_memory;
use crate::sizes::human;

/// The smallest allocation. The system's allocators align blocks of this size for every element type.
const LEAST: usize = 64;

/// The buffers of a call.
pub(super) struct Buffers<B> {
    pub(super) source: B,
    pub(super) destination: B,
}

/// The buffers of blocking calls, which use them one after the other.
pub(super) struct Arena {
    source: Vec<u8>,
    destination: Vec<u8>,
}

/// Returns zeros whose pages exist, so that no call waits for the system to make them.
pub(super) fn touched(length: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length.max(LEAST));
    bytes.resize(length, 0);
    bytes
}

impl Arena {
    /// Makes buffers for the blocking calls of a script. `ranks_here` share this host's memory, which must also suffice
    /// for the background calls.
    pub(super) fn new(script: &Script, rank: usize, ranks_here: usize) -> Result<Self, Failure> {
        let Need { source, destination, background } = Need::of(script, rank)?;
        let need = source.saturating_add(destination).saturating_add(background).saturating_mul(ranks_here);
        if let Some(free) = available_memory().filter(|free| need > *free) {
            let reason = format!("this host's {ranks_here} ranks need {}, but it has only {} free", human(need), human(free));
            let calls = match background {
                0 => "the largest call of the record".to_owned(),
                _ => format!("the largest calls of the record that run at the same time, {} of them in the background", human(background)),
            };
            return Err(Failure::unsupported(format!("{calls}: {reason}; use more hosts")));
        }
        Ok(Self { source: touched(source), destination: touched(destination) })
    }

    /// Returns the buffers of a call.
    pub(super) fn of(&mut self, (source, destination): (usize, usize)) -> Buffers<&mut [u8]> {
        Buffers { source: &mut self.source[..source], destination: &mut self.destination[..destination] }
    }
}

/// The bytes of a rank's buffers.
#[derive(Debug, PartialEq, Eq)]
struct Need {
    /// Of the largest blocking call.
    source: usize,
    destination: usize,
    /// Of the background calls that hold most together, between their start and the wait for them.
    background: usize,
}

impl Need {
    fn of(script: &Script, rank: usize) -> Result<Self, Failure> {
        let sizes = script.shapes.iter().map(|shape| bytes(script, shape, rank)).collect::<Result<Vec<_>, _>>()?;
        let mut need = Self { source: 0, destination: 0, background: 0 };
        let (mut open, mut held) = (HashMap::new(), 0_usize);
        for (place, step) in script.steps.iter().enumerate() {
            let done = step.after.iter().filter_map(|earlier| open.remove(earlier));
            held = done.fold(held, usize::saturating_sub);
            let (source, destination) = sizes[step.shape];
            if step.is_background {
                // Both are kept at least as long as an allocation, so that many small calls count, too.
                let size = source.max(LEAST).saturating_add(destination.max(LEAST)).min(usize::MAX - held);
                held += size;
                open.insert(place, size);
                need.background = held.max(need.background);
            } else {
                (need.source, need.destination) = (source.max(need.source), destination.max(need.destination));
            }
        }
        Ok(need)
    }
}

/// Returns the bytes of a call's buffers on a rank.
pub(super) fn bytes(script: &Script, shape: &Shape, rank: usize) -> Result<(usize, usize), Failure> {
    let members = &script.groups[shape.group];
    let me = members.iter().position(|member| *member == rank);
    let bytes = me.and_then(|me| shape.bytes(me, members.len()));
    bytes.ok_or_else(|| {
        Failure::unsupported(format!("{} with {:?} elements: the call is too large for this machine", shape.kind, shape.amount))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::recording::{Call, Kind};
    use crate::replay::script::Step;

    fn script(counts: &[u64], steps: Vec<Step>) -> Script {
        let shape = |count: &u64| {
            let call = Call { count: *count, op: Some("sum".to_owned()), ..Call::new(0, Kind::named("all_reduce").unwrap()) };
            Shape::of_collective(&[&call]).unwrap().remove(0).0
        };
        Script { groups: vec![vec![0]].into(), shapes: counts.iter().map(shape).collect(), steps }
    }

    fn background(shape: usize, after: &[usize]) -> Step {
        Step { shape, is_background: true, after: after.to_vec(), ..Step::default() }
    }

    #[test]
    fn background_calls_count_from_their_start_to_the_wait_for_them() {
        let steps = vec![
            background(0, &[]),
            background(1, &[]),
            Step { shape: 2, after: vec![0], ..Step::default() },
            background(0, &[]),
            background(0, &[1, 3]),
            background(0, &[]),
        ];
        let need = Need::of(&script(&[1000, 500, 70], steps), 0).unwrap();
        // An all-reduce has one buffer; the other one has the smallest size. The last two calls hold most.
        assert_eq!(need, Need { source: 0, destination: 70, background: 2000 + 2 * LEAST });
        assert_eq!(Need::of(&script(&[], Vec::new()), 0).unwrap(), Need { source: 0, destination: 0, background: 0 });
    }

    #[test]
    fn background_calls_that_do_not_fit_together_are_refused() {
        let free = available_memory().unwrap() as u64;
        let steps = |count: usize| vec![background(0, &[]); count];
        assert!(Arena::new(&script(&[free / 8], steps(2)), 0, 1).is_ok());
        let refused = |count: u64, steps: Vec<Step>| Arena::new(&script(&[count], steps), 0, 1).map(drop).unwrap_err().message;
        for (count, steps) in [(free / 8, steps(60)), (u64::MAX / 4, steps(9))] {
            let error = refused(count, steps);
            assert!(error.contains("the largest calls of the record that run at the same time, "), "{error}");
        }
        let error = refused(free * 2, vec![Step::default()]);
        assert!(error.contains("the largest call of the record: this host's 1 ranks need"), "{error}");
    }
}
