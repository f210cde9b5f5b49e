//! Limits the number and the age of connections that have not completed their proof, and chooses which of them are
//! dropped to make room for new ones.
//!
//! All listeners share this policy: a store's server, a rank's listener, and the server that passes on shared memory.
//! No sockets and no clock: the caller supplies the time and the function that accepts.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use crate::base::tuning::admission::{BATCH, Limits, PATIENCE, REPORTED, STARVED};

/// The unproven connections of one listener.
#[derive(Debug)]
pub(crate) struct Admission<C> {
    limits: Limits,
    /// The unproven connections, oldest first.
    unproven: VecDeque<Waiting<C>>,
    /// The end of the pause in which nothing is accepted.
    resting: Option<Instant>,
    /// Whether the caller polls the listener.
    watched: bool,
    refused: u64,
    /// Since when the system has lacked a descriptor or memory for a new connection while no unproven connection
    /// could be dropped, and the error.
    starving: Option<(Instant, io::Error)>,
    /// The last time at which a connection could not be accepted for lack of resources.
    lacked: Option<Instant>,
}

/// An unproven connection.
#[derive(Debug)]
pub(crate) struct Waiting<C> {
    pub(crate) connection: C,
    since: Instant,
}

impl<C> Waiting<C> {
    fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }
}

impl<C> Admission<C> {
    /// Creates an admission without connections.
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, unproven: VecDeque::new(), resting: None, watched: true, refused: 0, starving: None, lacked: None }
    }

    /// Returns the error that prevents all connections, if the cause is this process's limits. No resources can be
    /// freed then, since there are no unproven connections to drop.
    pub(crate) fn starved(&self, now: Instant) -> Option<&io::Error> {
        self.starving.as_ref().filter(|(since, _)| now.saturating_duration_since(*since) >= STARVED).map(|(_, error)| error)
    }

    /// Whether a connection could not be accepted at `now` for lack of resources.
    pub(crate) fn lacks(&self, now: Instant) -> bool {
        self.lacked == Some(now) && self.starved(now).is_some()
    }

    /// Records whether the last connection could be accepted.
    fn remember(&mut self, now: Instant, lack: Option<io::Error>) {
        self.lacked = lack.is_some().then_some(now);
        self.starving = match (self.starving.take(), lack.filter(|_| self.unproven.is_empty())) {
            (_, None) => None,
            (Some(starving), Some(_)) => Some(starving),
            (None, Some(error)) => Some((now, error)),
        };
    }

    /// Whether accepting is paused. While it is, the caller must not poll the listener.
    pub(crate) fn is_resting(&self) -> bool {
        self.resting.is_some()
    }

    /// Returns whether to poll the listener from now on, if that has changed since the last call.
    pub(crate) fn watch_change(&mut self) -> Option<bool> {
        let watched = !self.is_resting();
        (std::mem::replace(&mut self.watched, watched) != watched).then_some(watched)
    }

    fn rests_at(&self, now: Instant) -> bool {
        self.resting.is_some_and(|until| now < until)
    }

    /// If all slots are taken, removes the oldest connections that have exceeded the grace period. Their peers may
    /// connect again.
    pub(crate) fn make_room(&mut self, now: Instant) -> Vec<C> {
        if self.unproven.len() < self.limits.most || self.rests_at(now) {
            return Vec::new();
        }
        let grace = self.limits.grace;
        let late = self.unproven.iter().take(BATCH).take_while(|waiting| waiting.age(now) > grace).count();
        self.unproven.drain(..late).map(|waiting| waiting.connection).collect()
    }

    /// Accepts pending connections as far as there are free slots; none during a pause. Pauses if all slots are taken,
    /// or if the system lacks a descriptor or memory. Without the pause, the connections that stay in the queue would
    /// end every wait at once.
    pub(crate) fn accept<S>(&mut self, now: Instant, mut accept: impl FnMut() -> io::Result<S>) -> Vec<S> {
        let mut accepted = Vec::new();
        if self.rests_at(now) {
            return accepted;
        }
        let room = self.limits.most.saturating_sub(self.unproven.len());
        self.resting = (room == 0).then(|| now + self.limits.rest);
        let mut lack = None;
        for _ in 0..room.min(BATCH) {
            match accept() {
                Ok(stream) => accepted.push(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The connection broke before it was accepted, or a signal arrived: the next one may succeed.
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(error) => {
                    let pause = self.limits.rest;
                    crate::base::event::warn!(%error, ?pause, unproven = self.unproven.len(), "connections cannot be accepted for now");
                    self.resting = Some(now + pause);
                    lack = Some(error).filter(|_| accepted.is_empty());
                    break;
                }
            }
        }
        self.remember(now, lack);
        accepted
    }

    /// Adds a connection that has proven nothing.
    pub(crate) fn add(&mut self, connection: C, now: Instant) {
        self.unproven.push_back(Waiting { connection, since: now });
    }

    /// Removes all connections, oldest first, to read from them. The caller returns those with an incomplete proof by
    /// [`Admission::put_back`].
    pub(crate) fn take(&mut self) -> VecDeque<Waiting<C>> {
        std::mem::take(&mut self.unproven)
    }

    /// Adds a connection back, after those added back before.
    pub(crate) fn put_back(&mut self, waiting: Waiting<C>) {
        self.unproven.push_back(waiting);
    }

    /// Removes the connections for which `is_unproven` returns `false`.
    pub(crate) fn retain(&mut self, mut is_unproven: impl FnMut(&C) -> bool) {
        self.unproven.retain(|waiting| is_unproven(&waiting.connection));
    }

    /// Removes the connections that have exceeded their time, and returns them.
    pub(crate) fn overdue(&mut self, now: Instant) -> Vec<C> {
        let late = self.unproven.iter().take_while(|waiting| waiting.age(now) >= PATIENCE).count();
        self.unproven.drain(..late).map(|waiting| waiting.connection).collect()
    }

    /// Returns how long the caller may wait if nothing arrives: until the pause or the oldest connection's time ends.
    /// `None` means without limit.
    pub(crate) fn patience(&self, now: Instant) -> Option<Duration> {
        let rest = self.resting.map(|until| until.saturating_duration_since(now));
        let oldest = self.unproven.front().map(|oldest| PATIENCE.saturating_sub(oldest.age(now)));
        [rest, oldest].into_iter().flatten().min()
    }

    /// Counts a refused connection. Returns its number if it should be reported: the more refusals, the fewer
    /// reports.
    pub(crate) fn refuse(&mut self) -> Option<u64> {
        self.refused += 1;
        (self.refused <= REPORTED || self.refused.is_power_of_two()).then_some(self.refused)
    }

    /// Returns the unproven connections, oldest first.
    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = &C> {
        self.unproven.iter().map(|waiting| &waiting.connection)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { most: 100, grace: Duration::from_millis(100), rest: Duration::from_millis(50) };

    /// Accepts connections with these numbers, in order.
    fn accepting(numbers: std::ops::Range<u32>) -> impl FnMut() -> io::Result<u32> {
        let mut numbers = numbers;
        move || numbers.next().ok_or_else(|| ErrorKind::WouldBlock.into())
    }

    /// Creates an admission with a hundred connections, numbered from 0, that came at `now`.
    fn full(now: Instant) -> Admission<u32> {
        let mut admission = Admission::new(LIMITS);
        for numbers in [0..BATCH as u32, BATCH as u32..200] {
            for connection in admission.accept(now, accepting(numbers)) {
                admission.add(connection, now);
            }
        }
        assert_eq!(admission.iter().copied().collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
        admission
    }

    #[test]
    fn no_more_come_in_than_there_is_room_for() {
        let now = Instant::now();
        let mut admission = full(now);
        assert!(!admission.is_resting());
        assert!(admission.make_room(now + LIMITS.grace).is_empty(), "each is left alone for a moment");
        assert!(admission.accept(now, || -> io::Result<u32> { panic!("there is no room") }).is_empty());
        assert!(admission.is_resting());
        assert_eq!(admission.patience(now), Some(LIMITS.rest));
    }

    #[test]
    fn the_oldest_make_room_and_a_rest_ends() {
        let now = Instant::now();
        let mut admission = full(now);
        admission.accept(now, accepting(0..0));
        assert_eq!((admission.watch_change(), admission.watch_change()), (Some(false), None));
        let later = now + LIMITS.grace + Duration::from_millis(1);
        assert_eq!(admission.make_room(later), (0..BATCH as u32).collect::<Vec<_>>());
        assert!(admission.make_room(later).is_empty(), "there is room now");
        let accepted = admission.accept(later, accepting(200..210));
        assert_eq!(accepted, (200..210).collect::<Vec<_>>());
        assert_eq!((admission.watch_change(), admission.watch_change()), (Some(true), None));
    }

    #[test]
    fn a_flood_takes_turns_with_those_who_are_there() {
        let mut admission = Admission::<u32>::new(Limits { most: 1000, ..LIMITS });
        let now = Instant::now();
        assert_eq!(admission.accept(now, accepting(0..1000)).len(), BATCH);
        assert!(!admission.is_resting() && admission.patience(now).is_none());
    }

    #[test]
    fn a_broken_connection_hides_no_other_and_a_lack_of_descriptors_makes_a_rest() {
        let now = Instant::now();
        let mut admission = Admission::<u32>::new(LIMITS);
        let mut outcomes = vec![Err(libc::EMFILE), Ok(2), Err(libc::ECONNABORTED), Err(libc::EINTR), Ok(1)];
        let mut accept = || outcomes.pop().unwrap_or(Ok(3)).map_err(io::Error::from_raw_os_error);
        assert_eq!(admission.accept(now, &mut accept), [1, 2]);
        assert!(admission.is_resting());
        assert!(admission.accept(now + LIMITS.rest / 2, &mut accept).is_empty());
        assert_eq!(admission.accept(now + LIMITS.rest, &mut accept).len(), BATCH);
        assert!(!admission.is_resting());
    }

    #[test]
    fn a_lack_that_lasts_though_no_connection_is_unproven_is_our_own() {
        let begun = Instant::now();
        let lack = || -> io::Result<u32> { Err(io::Error::from_raw_os_error(libc::EMFILE)) };
        let mut admission = Admission::<u32>::new(LIMITS);
        admission.accept(begun, lack);
        assert!(admission.starved(begun + STARVED / 2).is_none(), "it may pass");
        admission.accept(begun + STARVED / 2, lack);
        assert_eq!(admission.starved(begun + STARVED).unwrap().raw_os_error(), Some(libc::EMFILE));
        assert!(!admission.lacks(begun + STARVED), "who comes now may be let in");
        admission.accept(begun + STARVED, lack);
        assert!(admission.lacks(begun + STARVED) && !admission.lacks(begun + STARVED * 2));
        // The lack has passed.
        assert_eq!(admission.accept(begun + STARVED * 2, accepting(0..1)), [0]);
        assert!(admission.starved(begun + STARVED * 9).is_none());
    }

    #[test]
    fn a_flood_that_takes_all_descriptors_is_no_lack_of_our_own() {
        let begun = Instant::now();
        let lack = || -> io::Result<u32> { Err(io::Error::from_raw_os_error(libc::EMFILE)) };
        let mut admission = Admission::<u32>::new(LIMITS);
        admission.add(1, begun);
        admission.accept(begun, lack);
        admission.accept(begun + STARVED, lack);
        assert!(admission.starved(begun + STARVED * 2).is_none());
        assert_eq!(admission.overdue(begun + PATIENCE), [1]);
        admission.accept(begun + PATIENCE, lack);
        assert!(admission.starved(begun + PATIENCE).is_none() && admission.starved(begun + PATIENCE + STARVED).is_some());
    }

    #[test]
    fn each_has_its_time_and_keeps_it_when_it_was_listened_to() {
        let now = Instant::now();
        let mut admission = Admission::new(LIMITS);
        let second = Duration::from_secs(1);
        (0..3).for_each(|number| admission.add(number, now + second * number));
        for waiting in admission.take() {
            if waiting.connection != 1 {
                admission.put_back(waiting);
            }
        }
        assert_eq!(admission.patience(now + second), Some(PATIENCE - second));
        assert!(admission.overdue(now + PATIENCE - Duration::from_millis(1)).is_empty());
        assert_eq!(admission.overdue(now + PATIENCE + second), [0]);
        assert_eq!(admission.patience(now + PATIENCE + second), Some(second));
        admission.retain(|number| *number != 2);
        assert_eq!(admission.patience(now + PATIENCE + second), None);
    }

    #[test]
    fn a_flood_of_refusals_is_reported_ever_more_rarely() {
        let mut admission = Admission::<()>::new(LIMITS);
        let reported: Vec<u64> = (0..100).filter_map(|_| admission.refuse()).collect();
        assert_eq!(reported, (1..=16).chain([32, 64]).collect::<Vec<_>>());
    }
}
