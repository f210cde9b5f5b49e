//! Decides which units to gather in advance: the next units in the forward pass, and later the next units in the
//! backward pass. Pure.

/// The direction through the units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Forward,
    Backward,
}

/// Records which units are used, and computes which come next. It turns backward at the last unit, and forward at the
/// first.
#[derive(Debug)]
pub(super) struct PrefetchOrder {
    units: usize,
    ahead: usize,
    direction: Direction,
    last: Option<usize>,
}

impl PrefetchOrder {
    /// Creates the order for `units` units, of which `ahead` are gathered ahead.
    pub(super) fn new(units: usize, ahead: usize) -> Self {
        Self { units, ahead, direction: Direction::Forward, last: None }
    }

    /// Records that a unit is used now, and returns the units that come next, in order.
    pub(super) fn after(&mut self, unit: usize) -> impl Iterator<Item = usize> + use<> {
        let goes_on = match self.last {
            Some(last) if unit < last => Direction::Backward,
            // The first unit again: the next of several forward passes.
            Some(last) if unit == last && unit > 0 => self.direction,
            _ => Direction::Forward,
        };
        // Nothing comes after the last unit: the backward pass begins with it.
        let is_last = unit + 1 >= self.units;
        self.direction = if is_last { Direction::Backward } else { goes_on };
        self.last = Some(unit);
        let (direction, units) = (self.direction, self.units);
        (1..=self.ahead.min(units)).map_while(move |distance| match direction {
            Direction::Forward => Some(unit + distance).filter(|next| *next < units),
            Direction::Backward => unit.checked_sub(distance),
        })
    }

    /// Begins a forward pass.
    pub(super) fn restart(&mut self) {
        (self.direction, self.last) = (Direction::Forward, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk(order: &mut PrefetchOrder, units: &[usize]) -> Vec<Vec<usize>> {
        units.iter().map(|unit| order.after(*unit).collect()).collect()
    }

    #[test]
    fn units_come_forward_and_then_backward() {
        let mut order = PrefetchOrder::new(4, 1);
        assert_eq!(walk(&mut order, &[0, 1, 2, 3]), [vec![1], vec![2], vec![3], vec![2]]);
        assert_eq!(walk(&mut order, &[3, 2, 1, 0]), [vec![2], vec![1], vec![0], vec![]]);
        assert_eq!(walk(&mut order, &[0, 1]), [vec![1], vec![2]], "a second pass");
        order.restart();
        assert_eq!(walk(&mut order, &[0]), [vec![1]]);
    }

    #[test]
    fn a_unit_that_is_used_twice_changes_no_direction() {
        let mut order = PrefetchOrder::new(4, 1);
        assert_eq!(walk(&mut order, &[0, 1, 1, 2, 3, 2, 2, 1, 1, 0]).concat(), [1, 2, 2, 3, 2, 1, 1, 0, 0]);
    }

    #[test]
    fn as_many_are_ahead_as_are_asked_for_and_there_are() {
        assert_eq!(walk(&mut PrefetchOrder::new(5, 3), &[0, 2, 4, 1]), [vec![1, 2, 3], vec![3, 4], vec![3, 2, 1], vec![0]]);
        assert_eq!(walk(&mut PrefetchOrder::new(3, 0), &[0, 1, 2, 1, 0]).concat(), Vec::<usize>::new());
        assert_eq!(walk(&mut PrefetchOrder::new(1, usize::MAX), &[0, 0]).concat(), Vec::<usize>::new());
    }
}
