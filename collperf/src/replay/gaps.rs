//! The parts of a job that its record does not contain.

use collectives::Collective;

use super::recording::{Origin, Recording};
use super::shape::Changes;

/// Lists what a record does not contain, and what the replay does in its place.
pub(super) fn not_recorded(recording: &Recording, changes: Changes) -> Vec<String> {
    let calls = || recording.ranks.iter().flatten();
    let has = |data: &[Collective]| calls().any(|call| call.kind.data().is_some_and(|kind| data.contains(&kind)));
    let mut list = vec![
        "the contents of buffers: zeros are sent".to_owned(),
        "whether a call had one buffer or two: all_reduce, reduce and broadcast have one, other collectives have two".to_owned(),
    ];
    let mut add = |is_so: bool, what: &str| list.extend(is_so.then(|| what.to_owned()));
    let is_torch = recording.origin == Origin::PyTorch;
    let lacks_counts = calls().any(|call| call.kind.has_counts() && call.counts.is_none());
    add(calls().any(|call| call.kind.is_many()), "the sizes of the buffers of a call on several buffers: one buffer has them all");
    add(
        lacks_counts && recording.origin == Origin::FlightRecord,
        "the counts of gather_v, scatter_v, all_to_all_v and all_gather_list: 0 elements are moved",
    );
    add(
        lacks_counts && recording.origin != Origin::FlightRecord,
        "the counts per rank of calls with unequal counts: they are made from the sizes of the ranks' buffers",
    );
    add(is_torch && has(&[Collective::AllReduce, Collective::Reduce, Collective::ReduceScatter]), "the op: sum");
    add(is_torch && has(&[Collective::Broadcast, Collective::Reduce]), "the roots of broadcast and reduce: rank 0");
    add(is_torch && calls().any(|call| call.kind.is_message()), "the tags of messages: 0");
    add(!is_torch && changes.op, "the functions of custom ops: sum");
    add(is_torch && changes.op, "ops that fit all element types: sum");
    add(changes.element, "element types other than numbers and bool: bytes");
    add(changes.tag, "what the library's own messages are for: they have another tag, from 2^62 on");
    let in_background = calls().any(|call| call.is_background);
    add(in_background, "when background calls were started and waited for: the program waits before its next call");
    add(is_torch, "exact times: PyTorch polls, unless TORCH_NCCL_ENABLE_TIMING is set");
    add(true, "the computation of the program: ranks do other work as long (--gaps keep), sleep (--gaps sleep), or continue (--gaps none)");
    let untimed = calls().filter(|call| call.start_ns.is_none() || call.duration_ns.is_none()).count();
    if untimed > 0 {
        list.push(format!("the times of {untimed} of {} calls: calls without a start follow the call before them", calls().count()));
        if recording.origin == Origin::FlightRecord && recording.groups.len() > 1 {
            list.push("the order of such calls on different communicators: it is the same on all ranks".to_owned());
        }
    }
    list
}
