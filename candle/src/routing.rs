//! Which rows each rank sends to which experts.

/// The rows that a rank sends and receives in one pass of a mixture of experts. An *assignment* is one choice of an
/// expert for a token. Its number is `token × choices of each token + choice`.
#[derive(Debug, PartialEq)]
pub(crate) struct Routing {
    /// The assignments of this rank for which it sends a row: ordered by expert, then by number.
    pub(crate) sent: Vec<usize>,
    /// How many rows this rank sends to each rank.
    pub(crate) send: Vec<usize>,
    /// How many rows each rank sends to this rank.
    pub(crate) receive: Vec<usize>,
    /// The received rows of each of this rank's experts, ordered by the sending rank, then by the assignment's number.
    pub(crate) rows: Vec<Vec<usize>>,
}

impl Routing {
    /// Computes the routing of a rank. `held` has the number of experts of each rank; experts are numbered in rank
    /// order. `counts` has, for each rank, the number of assignments for each expert. `choices` has the expert of each
    /// of this rank's assignments. If there is a capacity, each expert takes only its first assignments.
    pub(crate) fn new(rank: usize, held: &[usize], counts: &[&[usize]], choices: &[usize], capacity: Option<usize>) -> Self {
        let experts = held.iter().sum();
        let taken = taken(counts, experts, capacity);
        let mut by_expert = vec![Vec::new(); experts];
        for (assignment, expert) in choices.iter().enumerate() {
            if by_expert[*expert].len() < taken[rank][*expert] {
                by_expert[*expert].push(assignment);
            }
        }
        let first = |rank: usize| held[..rank].iter().sum::<usize>();
        let of_rank = |rank: usize| first(rank)..first(rank) + held[rank];
        let mut rows = vec![Vec::new(); held[rank]];
        let mut received = 0;
        for from in &taken {
            for (expert, count) in from[of_rank(rank)].iter().enumerate() {
                rows[expert].extend(received..received + count);
                received += count;
            }
        }
        Self {
            sent: by_expert.concat(),
            send: (0..held.len()).map(|to| taken[rank][of_rank(to)].iter().sum()).collect(),
            receive: taken.iter().map(|from| from[of_rank(rank)].iter().sum()).collect(),
            rows,
        }
    }
}

/// Returns how many assignments of each rank each expert takes: those of lower ranks first.
fn taken(counts: &[&[usize]], experts: usize, capacity: Option<usize>) -> Vec<Vec<usize>> {
    let mut room = vec![capacity.unwrap_or(usize::MAX); experts];
    let take = |(count, room): (&usize, &mut usize)| {
        let taken = (*count).min(*room);
        *room -= taken;
        taken
    };
    counts.iter().map(|counts| counts.iter().zip(&mut room).map(take).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_ordered_by_expert_and_then_by_rank_and_token() {
        // Rank 0 holds experts 0 and 1, rank 1 none, rank 2 expert 2.
        let (held, counts) = ([2, 0, 1], [&[1, 2, 1][..], &[0, 0, 0], &[2, 0, 2]]);
        let first = Routing::new(0, &held, &counts, &[1, 0, 2, 1], None);
        assert_eq!(first.sent, [1, 0, 3, 2]);
        assert_eq!((first.send, first.receive), (vec![3, 0, 1], vec![3, 0, 2]));
        assert_eq!(first.rows, [vec![0, 3, 4], vec![1, 2]]);
        let last = Routing::new(2, &held, &counts, &[2, 0, 0, 2], None);
        assert_eq!((last.sent, last.send, last.receive), (vec![1, 2, 0, 3], vec![2, 0, 2], vec![1, 0, 2]));
        assert_eq!(last.rows, [vec![0, 1, 2]]);
    }

    #[test]
    fn an_expert_beyond_its_capacity_drops_the_last_assignments_of_the_last_ranks() {
        let (held, counts) = ([1, 1], [&[3, 1][..], &[2, 2]]);
        let first = Routing::new(0, &held, &counts, &[0, 0, 1, 0], Some(2));
        assert_eq!((first.sent, first.send, first.receive), (vec![0, 1, 2], vec![2, 1], vec![2, 0]));
        let second = Routing::new(1, &held, &counts, &[1, 0, 0, 1], Some(2));
        assert_eq!((second.sent, second.send, second.receive), (vec![0], vec![0, 1], vec![1, 1]));
        assert_eq!(second.rows, [vec![0, 1]]);
    }
}
