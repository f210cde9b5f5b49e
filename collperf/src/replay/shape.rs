//! A call as it is replayed: what it does, and the sizes of its buffers.

use collectives::{Collective, DType, ReduceOp};
use serde::{Deserialize, Serialize};

use super::recording::{Call, Counts, Element, Kind};

/// All that a rank needs to make a call. Many calls of a job have the same shape.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Shape {
    pub(super) group: usize,
    pub(super) kind: Kind,
    /// The names of the op and of the element type.
    op: Option<String>,
    dtype: String,
    pub(super) root: usize,
    pub(super) peer: usize,
    pub(super) tag: u64,
    pub(super) amount: Amount,
}

/// How many elements each rank has.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) enum Amount {
    /// The same number for all: of each block, of the whole vector, or of the message.
    Equal(usize),
    /// One for each rank.
    Blocks(Vec<usize>),
    /// Those that this rank sends to each rank, and receives from each rank.
    Pairs { send: Vec<usize>, receive: Vec<usize> },
}

impl Amount {
    pub(super) fn blocks(&self) -> &[usize] {
        if let Amount::Blocks(blocks) = self { blocks } else { &[] }
    }
}

/// The highest bit of a tag, which marks the library's own messages, and the bit that takes its place in a replay.
const INTERNAL_TAG: u64 = 1 << 63;
const REPLAYED_TAG: u64 = 1 << 62;

/// Changes that a replay makes to a call.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Changes {
    /// A sum took the place of an op whose function is not in the record.
    pub(super) op: bool,
    /// Bytes took the place of elements of another type.
    pub(super) element: bool,
    /// The library's own messages got another tag.
    pub(super) tag: bool,
}

impl Shape {
    /// Makes the shapes of one collective for all its ranks, in the order of `calls`.
    pub(super) fn of_collective(calls: &[&Call]) -> Result<Vec<(Self, Changes)>, String> {
        let amounts = amounts(calls)?;
        calls.iter().zip(amounts).map(|(call, amount)| Self::new(call, amount)).collect()
    }

    /// Makes the shape of one end of a message.
    pub(super) fn of_message(call: &Call) -> Result<(Self, Changes), String> {
        Self::new(call, Amount::Equal(usize::try_from(call.count).map_err(|_| too_large(call))?))
    }

    fn new(call: &Call, amount: Amount) -> Result<(Self, Changes), String> {
        let (dtype, factor) = element(call)?;
        let amount = amount.times(factor).ok_or_else(|| too_large(call))?;
        let recorded = call.op.as_ref().and_then(|name| ReduceOp::ALL.into_iter().find(|op| op.name() == name));
        let reduces = call.kind.data().is_some_and(Collective::reduces);
        let op = recorded.filter(|op| op.check(dtype).is_ok()).unwrap_or(ReduceOp::Sum);
        let is_internal = call.tag & INTERNAL_TAG != 0;
        let changes = Changes { op: reduces && Some(op) != recorded, element: dtype.name() != call.element, tag: is_internal };
        let shape = Self {
            group: call.group,
            kind: call.kind,
            op: reduces.then(|| op.name().to_owned()),
            dtype: dtype.name().to_owned(),
            root: call.root.unwrap_or(0),
            peer: call.peer.unwrap_or(0),
            tag: if is_internal { call.tag & !INTERNAL_TAG | REPLAYED_TAG } else { call.tag },
            amount,
        };
        Ok((shape, changes))
    }

    pub(super) fn op(&self) -> ReduceOp {
        self.op.as_ref().and_then(|name| name.parse().ok()).unwrap_or(ReduceOp::Sum)
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype.parse().unwrap_or(DType::U8)
    }

    /// Returns the count that a report of this call contains; `None` if reports do not contain it.
    pub(super) fn count(&self) -> Option<u64> {
        match (&self.amount, self.kind.data()) {
            (_, Some(Collective::Barrier)) => Some(0),
            (Amount::Equal(count), _) => Some(*count as u64),
            _ => None,
        }
    }

    /// Returns the bytes that rank `me` of `size` has as source, and as destination; `None` if they are too many.
    pub(super) fn bytes(&self, me: usize, size: usize) -> Option<(usize, usize)> {
        use Collective::{
            AllGather, AllGatherV, AllReduce, AllToAll, AllToAllV, Barrier, Broadcast, Gather, GatherV, Reduce, ReduceScatter,
            ReduceScatterV, Scatter, ScatterV,
        };
        let sum = |list: &[usize]| list.iter().try_fold(0_usize, |total, count| total.checked_add(*count));
        let of_root = |count: usize| if self.root == me { count } else { 0 };
        let (source, destination) = match &self.amount {
            Amount::Equal(count) => {
                let all = count.checked_mul(size)?;
                match self.kind.data() {
                    Some(Barrier) => (0, 0),
                    None if self.kind == Kind::SEND => (*count, 0),
                    None | Some(AllReduce | Broadcast | Reduce) => (0, *count),
                    Some(AllGather) => (*count, all),
                    Some(ReduceScatter) => (all, *count),
                    Some(Gather) => (*count, of_root(all)),
                    Some(Scatter) => (of_root(all), *count),
                    Some(AllToAll) => (all, all),
                    Some(_) => return None,
                }
            }
            Amount::Blocks(blocks) => {
                let (mine, all) = (*blocks.get(me)?, sum(blocks)?);
                match self.kind.data() {
                    Some(AllGatherV) => (mine, all),
                    Some(ReduceScatterV) => (all, mine),
                    Some(GatherV) => (mine, of_root(all)),
                    Some(ScatterV) => (of_root(all), mine),
                    _ => return None,
                }
            }
            Amount::Pairs { send, receive } if self.kind.data() == Some(AllToAllV) => (sum(send)?, sum(receive)?),
            Amount::Pairs { .. } => return None,
        };
        let size = self.dtype().size_bytes();
        source.checked_mul(size).zip(destination.checked_mul(size)).filter(|(one, other)| one.checked_add(*other).is_some())
    }
}

/// Returns the type in which a call's elements are replayed, and how many of them are one of the call's.
fn element(call: &Call) -> Result<(DType, usize), String> {
    match Element::named(&call.element) {
        Some(Element::Scalar(dtype)) => Ok((dtype, 1)),
        Some(Element::Bytes(size)) => Ok((DType::U8, usize::try_from(size).map_err(|_| too_large(call))?)),
        None => Err(format!("{}: the element type {:?} is not known", call.in_words(), call.element)),
    }
}

impl Amount {
    fn times(self, factor: usize) -> Option<Self> {
        let all = |list: Vec<usize>| list.into_iter().map(|count| count.checked_mul(factor)).collect::<Option<Vec<_>>>();
        Some(match self {
            Amount::Equal(count) => Amount::Equal(count.checked_mul(factor)?),
            Amount::Blocks(blocks) => Amount::Blocks(all(blocks)?),
            Amount::Pairs { send, receive } => Amount::Pairs { send: all(send)?, receive: all(receive)? },
        })
    }
}

fn too_large(call: &Call) -> String {
    format!("{}: the call is too large for this machine", call.in_words())
}

/// Returns each rank's amount. If a record does not contain the counts of a call whose blocks may differ, they are made
/// from the sizes of the ranks' buffers.
fn amounts(calls: &[&Call]) -> Result<Vec<Amount>, String> {
    let Some(call) = calls.first() else { return Ok(Vec::new()) };
    let in_elements = |call: &Call| -> Result<usize, String> {
        let size = match Element::named(&call.element) {
            Some(Element::Scalar(dtype)) => dtype.size_bytes() as u64,
            Some(Element::Bytes(size)) => size.max(1),
            None => 1,
        };
        usize::try_from(call.bytes.unwrap_or(0) / size).map_err(|_| too_large(call))
    };
    let held = calls.iter().map(|call| in_elements(call)).collect::<Result<Vec<_>, _>>()?;
    let total = usize::try_from(call.count).map_err(|_| too_large(call))?;
    let root = call.root.unwrap_or(0);
    let size = calls.len();
    Ok(match call.kind.data() {
        Some(Collective::AllGatherV) if call.kind == Kind::ALL_GATHER_LIST => vec![Amount::Blocks(even(held[0], size)); size],
        Some(Collective::AllGatherV | Collective::ReduceScatterV) => {
            let known = calls.iter().find_map(|call| if let Some(Counts::Blocks(list)) = &call.counts { Some(list) } else { None });
            let known: Option<Vec<usize>> = known.and_then(|list| list.iter().map(|count| usize::try_from(*count).ok()).collect());
            vec![Amount::Blocks(known.filter(|list| list.len() == size).unwrap_or_else(|| even(total, size))); size]
        }
        Some(Collective::GatherV | Collective::ScatterV) => {
            let others: usize = (0..size).filter(|rank| *rank != root).fold(0, |sum, rank| sum.saturating_add(held[rank]));
            let blocks = (0..size).map(|rank| if rank == root { held[root].saturating_sub(others) } else { held[rank] });
            vec![Amount::Blocks(blocks.collect()); size]
        }
        Some(Collective::AllToAllV) => pairs(calls).unwrap_or_else(|| even_pairs(&held)),
        _ => vec![Amount::Equal(total); size],
    })
}

/// Divides a count as evenly as possible.
fn even(total: usize, size: usize) -> Vec<usize> {
    (0..size).map(|rank| total / size + usize::from(rank < total % size)).collect()
}

/// Returns the counts of an all-to-all if all ranks recorded them and they fit together.
fn pairs(calls: &[&Call]) -> Option<Vec<Amount>> {
    let list = |list: &[u64]| list.iter().map(|count| usize::try_from(*count).ok()).collect::<Option<Vec<_>>>();
    let known = calls.iter().map(|call| match &call.counts {
        Some(Counts::Pairs { send, receive }) => list(send).zip(list(receive)),
        _ => None,
    });
    let known = known.collect::<Option<Vec<_>>>()?;
    let size = known.len();
    let is_whole = known.iter().all(|(send, receive)| send.len() == size && receive.len() == size);
    let fits = |one: usize, other: usize| known[one].0[other] == known[other].1[one];
    let all_fit = is_whole && (0..size).all(|one| (0..size).all(|other| fits(one, other)));
    all_fit.then(|| known.into_iter().map(|(send, receive)| Amount::Pairs { send, receive }).collect())
}

/// Makes the counts of an all-to-all from the sizes of the ranks' buffers. Two ranks exchange a share of their mean.
fn even_pairs(held: &[usize]) -> Vec<Amount> {
    let size = held.len();
    let share = |from: usize, to: usize| {
        let both = held[from] / 2 + held[to] / 2 + (held[from] % 2 + held[to] % 2) / 2;
        both / size + usize::from((to + size - from) % size < both % size)
    };
    let of = |me: usize| Amount::Pairs {
        send: (0..size).map(|other| share(me, other)).collect(),
        receive: (0..size).map(|other| share(other, me)).collect(),
    };
    (0..size).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(kind: &str, bytes: u64) -> Call {
        Call { element: "f32".to_owned(), bytes: Some(bytes), root: Some(1), ..Call::new(0, Kind::named(kind).unwrap()) }
    }

    fn shapes(calls: &[Call]) -> Vec<Shape> {
        Shape::of_collective(&calls.iter().collect::<Vec<_>>()).unwrap().into_iter().map(|(shape, _)| shape).collect()
    }

    #[test]
    fn counts_that_a_record_lacks_come_from_the_buffers() {
        // Rank 1 gathers 2, 3 and 5 elements.
        let gather = shapes(&[call("gather_v", 8), call("gather_v", 40), call("gather_v", 20)]);
        assert_eq!(gather[0].amount, Amount::Blocks(vec![2, 3, 5]));
        assert_eq!((gather[0].bytes(0, 3), gather[1].bytes(1, 3)), (Some((8, 0)), Some((12, 40))));
        let lists = shapes(&[call("all_gather_list", 28), call("all_gather_list", 28)]);
        assert_eq!(lists[1].amount, Amount::Blocks(vec![4, 3]));
        // Each rank's buffers are as large as recorded, and the ends of each pair agree.
        for held in [[28, 28, 28], [0, 12, 400], [4, 4, 8]] {
            let all = shapes(&held.map(|bytes| call("all_to_all_v", bytes)));
            for (one, shape) in all.iter().enumerate() {
                let Amount::Pairs { send, .. } = &shape.amount else { panic!("{shape:?}") };
                for (other, count) in send.iter().enumerate() {
                    assert!(matches!(&all[other].amount, Amount::Pairs { receive, .. } if receive[one] == *count));
                }
            }
            if held[0] == held[1] {
                assert_eq!(all[0].bytes(0, 3).unwrap().0, held[0] as usize);
            }
        }
    }

    #[test]
    fn counts_that_a_record_holds_are_used_if_they_fit() {
        let with = |send: [u64; 2], receive: [u64; 2]| Call {
            counts: Some(Counts::Pairs { send: send.to_vec(), receive: receive.to_vec() }),
            ..call("all_to_all_v", 40)
        };
        let fitting = shapes(&[with([1, 2], [1, 7]), with([7, 3], [2, 3])]);
        assert_eq!(fitting[0].amount, Amount::Pairs { send: vec![1, 2], receive: vec![1, 7] });
        let wrong = shapes(&[with([1, 2], [1, 7]), with([8, 3], [2, 3])]);
        assert_eq!(wrong[0].amount, Amount::Pairs { send: vec![5, 5], receive: vec![5, 5] });
        let listed = Call { counts: Some(Counts::Blocks(vec![9, 1])), count: 10, ..call("all_gather_v", 40) };
        assert_eq!(shapes(&[listed.clone(), listed])[0].amount, Amount::Blocks(vec![9, 1]));
    }

    #[test]
    fn sizes_out_of_reach_are_errors() {
        let huge = Call { count: u64::MAX, element: "[f64; 99]".to_owned(), ..call("all_reduce", 0) };
        assert!(Shape::of_collective(&[&huge]).unwrap_err().contains("too large"));
        let large = Call { count: u64::MAX / 2, ..call("all_gather", 0) };
        assert_eq!(shapes(&[large.clone(), large])[0].bytes(0, 2), None);
        let odd = Call { element: "string".to_owned(), ..call("all_reduce", 0) };
        assert!(Shape::of_collective(&[&odd]).unwrap_err().contains("\"string\" is not known"));
    }

    #[test]
    fn a_sum_takes_the_place_of_ops_that_are_not_in_the_record() {
        let custom =
            Call { op: Some("custom op #5d3f21".to_owned()), element: "plain data of 12 B".to_owned(), count: 2, ..call("all_reduce", 0) };
        let (shape, changes) = Shape::of_collective(&[&custom]).unwrap().remove(0);
        assert_eq!((shape.op(), shape.dtype(), shape.bytes(0, 1)), (ReduceOp::Sum, DType::U8, Some((0, 24))));
        assert_eq!(changes, Changes { op: true, element: true, tag: false });
        let max = Call { op: Some("max".to_owned()), ..call("all_reduce", 0) };
        assert_eq!(Shape::of_collective(&[&max]).unwrap()[0].0.op(), ReduceOp::Max);
    }
}
