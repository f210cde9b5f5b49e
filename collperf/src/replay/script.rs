//! The steps of each rank in a replay.

use std::collections::HashMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::recording::{Call, Recording};
use super::shape::{Changes, Shape};

/// The steps of one rank, which rank 0 sends to it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Script {
    /// The ranks of each communicator. All ranks have the same list, which is sent once.
    #[serde(skip)]
    pub(super) groups: Arc<Vec<Vec<usize>>>,
    pub(super) shapes: Vec<Shape>,
    pub(super) steps: Vec<Step>,
}

/// One call, and what comes before it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Step {
    /// The number of its shape.
    #[serde(rename = "s")]
    pub(super) shape: usize,
    /// The time that passed since the calls before it.
    #[serde(rename = "g", default, skip_serializing_if = "is_zero")]
    pub(super) gap_ns: u64,
    /// Whether it runs in the background: as in the record, or because the next call began before its end.
    #[serde(rename = "b", default, skip_serializing_if = "is_false")]
    pub(super) is_background: bool,
    /// The background calls that must have ended first.
    #[serde(rename = "w", default, skip_serializing_if = "Vec::is_empty")]
    pub(super) after: Vec<usize>,
    /// Whether the program probably computed until those ended. If a long pause follows, it probably waited for them.
    #[serde(rename = "c", default, skip_serializing_if = "is_false")]
    pub(super) computes: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(is: &bool) -> bool {
    !*is
}

/// Returns the script of each rank, and the changes that the scripts make to the calls.
pub(super) fn write(recording: &Recording) -> Result<(Vec<Script>, Changes), String> {
    let groups: Arc<Vec<Vec<usize>>> = Arc::new(recording.groups.iter().map(|group| group.members.clone()).collect());
    let mut changes = Changes::default();
    let shapes = shapes(recording, &mut changes)?;
    let scripts = recording.ranks.iter().zip(shapes).map(|(calls, Shapes { list, of_calls, .. })| {
        let mut script = Script { groups: Arc::clone(&groups), shapes: list, steps: steps(calls) };
        script.steps.iter_mut().zip(of_calls).for_each(|(step, shape)| step.shape = shape);
        script
    });
    Ok((scripts.collect(), changes))
}

/// The shapes of a rank's calls. Each is kept once, because it may be as long as the job has ranks.
struct Shapes {
    list: Vec<Shape>,
    numbers: HashMap<Shape, usize>,
    /// The number of each call's shape.
    of_calls: Vec<usize>,
}

impl Shapes {
    fn new(calls: usize) -> Self {
        Self { list: Vec::new(), numbers: HashMap::new(), of_calls: vec![0; calls] }
    }

    fn keep(&mut self, place: usize, shape: Shape) {
        self.of_calls[place] = *self.numbers.entry(shape).or_insert_with_key(|shape| {
            self.list.push(shape.clone());
            self.list.len() - 1
        });
    }
}

/// Returns the shapes of the calls of every rank.
fn shapes(recording: &Recording, changes: &mut Changes) -> Result<Vec<Shapes>, String> {
    let mut shapes: Vec<Shapes> = recording.ranks.iter().map(|calls| Shapes::new(calls.len())).collect();
    let mut keep = |(shape, made): (Shape, Changes), rank: usize, place: usize| {
        *changes = Changes { op: changes.op | made.op, element: changes.element | made.element, tag: changes.tag | made.tag };
        shapes[rank].keep(place, shape);
    };
    let mut collectives: Vec<Vec<Vec<usize>>> = recording.groups.iter().map(|group| vec![Vec::new(); group.members.len()]).collect();
    for ((rank, calls), places) in recording.ranks.iter().enumerate().zip(recording.memberships()) {
        for (place, call) in calls.iter().enumerate() {
            match (call.kind.is_message(), places.get(&call.group)) {
                (true, _) => keep(Shape::of_message(call)?, rank, place),
                (false, Some(me)) => collectives[call.group][*me].push(place),
                (false, None) => return Err(format!("rank {rank} made a call on a communicator to which it does not belong")),
            }
        }
    }
    for (group, lists) in recording.groups.iter().zip(&collectives) {
        for number in 0..lists.first().map_or(0, Vec::len) {
            let places: Vec<(usize, usize)> = group.members.iter().zip(lists).map(|(member, list)| (*member, list[number])).collect();
            let calls: Vec<&Call> = places.iter().map(|(member, place)| &recording.ranks[*member][*place]).collect();
            for ((member, place), made) in places.iter().zip(Shape::of_collective(&calls)?) {
                keep(made, *member, *place);
            }
        }
    }
    Ok(shapes)
}

/// Returns a rank's steps, without their shapes.
fn steps(calls: &[Call]) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::with_capacity(calls.len());
    // The background calls that have not been waited for, with their ends, and the moment at which the last step was over.
    let mut open: Vec<(u64, usize)> = Vec::new();
    let longest = |done: &[(u64, usize)]| done.iter().filter_map(|(_, place)| calls[*place].duration_ns).max();
    let mut over: Option<u64> = None;
    for (place, call) in calls.iter().enumerate() {
        let start = call.start_ns;
        let ended = |(end, _): &(u64, usize)| start.is_none_or(|start| *end <= start);
        let (done, rest): (Vec<_>, Vec<_>) = open.into_iter().partition(ended);
        open = rest;
        over = done.iter().map(|(end, _)| *end).chain(over).max();
        let next = calls.get(place + 1).and_then(|next| next.start_ns);
        let is_background = call.is_background || call.end_ns().zip(next).is_some_and(|(end, next)| end > next);
        let gap_ns = start.zip(over).map_or(0, |(start, over)| start.saturating_sub(over));
        let computes = longest(&done).is_some_and(|duration_ns| gap_ns < duration_ns);
        steps.push(Step { shape: 0, gap_ns, is_background, after: done.into_iter().map(|(_, place)| place).collect(), computes });
        let last = if is_background { start } else { call.end_ns() };
        over = last.max(over);
        if let Some(end) = call.end_ns().filter(|_| is_background) {
            open.push((end, place));
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::recording::Kind;

    fn call(start_ns: u64, duration_ns: u64) -> Call {
        Call { start_ns: Some(start_ns), duration_ns: Some(duration_ns), ..Call::new(0, Kind::named("barrier").unwrap()) }
    }

    fn told(calls: &[Call]) -> Vec<(u64, bool, Vec<usize>)> {
        steps(calls).into_iter().map(|step| (step.gap_ns, step.is_background, step.after)).collect()
    }

    #[test]
    fn calls_that_overlap_run_in_the_background_until_they_ended() {
        let none = Vec::new;
        assert_eq!(told(&[call(10, 5), call(20, 5), call(25, 1)]), [(0, false, none()), (5, false, none()), (0, false, none())]);
        // The first overlaps the second and the third, and ends 2 ns before the fourth.
        let calls = [call(10, 30), call(15, 5), call(22, 3), call(42, 1)];
        assert_eq!(told(&calls), [(0, true, none()), (5, false, none()), (2, false, none()), (2, false, vec![0])]);
    }

    #[test]
    fn calls_with_the_same_shape_share_it() {
        use crate::replay::recording::{Group, Origin};
        let send = |count: u64| Call { count, peer: Some(0), ..Call::new(0, Kind::SEND) };
        let calls = vec![send(3), call(0, 1), send(4), send(3), call(2, 1)];
        let groups = vec![Group { name: "world".to_owned(), members: vec![0] }];
        let recording = Recording { origin: Origin::Trace, groups, ranks: vec![calls.clone()], is_cut: false, notes: Vec::new() };
        let script = write(&recording).unwrap().0.remove(0);
        assert_eq!(script.shapes.len(), 3);
        let kinds: Vec<Kind> = script.steps.iter().map(|step| script.shapes[step.shape].kind).collect();
        assert_eq!(kinds, calls.iter().map(|call| call.kind).collect::<Vec<_>>());
        assert!(script.steps[0].shape == script.steps[3].shape && script.steps[0].shape != script.steps[2].shape);
    }

    #[test]
    fn calls_without_times_follow_each_other() {
        let untimed = Call { start_ns: None, duration_ns: None, ..call(0, 0) };
        assert_eq!(told(&[untimed.clone(), call(7, 2), untimed]), vec![(0, false, vec![]); 3]);
        assert!(steps(&[]).is_empty());
    }
}
