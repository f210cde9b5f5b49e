//! What listeners are told of messages: after the lock was let go, since they may want it themselves.

use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use super::super::keep::Kept;
use super::super::work::State;
use super::request::Request;
use super::{Desk, Inner};
use crate::error::Error;
use crate::flight::FlightPlane;
use crate::observe::Lane;

/// What listeners are told of.
pub(super) enum News {
    /// A background message is over. Its buffer is freed with this where the message failed, or nobody holds its `Work` any more: how a
    /// buffer is freed is the program's as well.
    Over { request: Request, elapsed: Duration, failed: Option<(Error, Box<dyn Kept>)>, state: Arc<State> },
    /// A message takes long.
    Stalled { request: Request, elapsed: Duration },
}

impl News {
    /// Of a message that is late.
    pub(super) fn stalled(request: &Request) -> Self {
        Self::Stalled { request: request.clone(), elapsed: request.deadline.elapsed() }
    }
}

/// The engine, locked. When it is let go, first the lock is, and then listeners are told the news.
pub(super) struct Held<'a> {
    inner: MutexGuard<'a, Inner>,
    /// Dropped after the lock.
    telling: Telling<'a>,
}

impl<'a> Held<'a> {
    #[inline]
    pub(super) fn new(desk: &'a Desk, inner: MutexGuard<'a, Inner>) -> Self {
        Self { inner, telling: Telling { desk, news: Vec::new() } }
    }
}

impl Deref for Held<'_> {
    type Target = Inner;

    #[inline]
    fn deref(&self) -> &Inner {
        &self.inner
    }
}

impl DerefMut for Held<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Inner {
        &mut self.inner
    }
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.inner.news.is_empty() {
            self.telling.news = std::mem::take(&mut self.inner.news);
        }
    }
}

/// Tells the news when it is dropped.
struct Telling<'a> {
    desk: &'a Desk,
    news: Vec<News>,
}

impl Drop for Telling<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.news.is_empty() {
            self.desk.tell(std::mem::take(&mut self.news));
        }
    }
}

impl Desk {
    /// Tells those who listen. What they do ends nothing here, and a panic of theirs ends neither the caller nor the message thread.
    #[cold]
    fn tell(&self, news: Vec<News>) {
        for news in news {
            if catch_unwind(AssertUnwindSafe(|| self.tell_one(news))).is_err() {
                let told = || tracing::error!(rank = self.rank, "a listener or a buffer panicked; its message is on standard error");
                drop(catch_unwind(AssertUnwindSafe(told)));
            }
        }
    }

    fn tell_one(&self, news: News) {
        match news {
            News::Over { request, elapsed, failed, state } => {
                if let Some(watch) = self.health.watch() {
                    let report = watch.message(&request.message(), FlightPlane::Host, request.bytes);
                    watch.ended(report, elapsed, failed.as_ref().map(|(error, _)| error), Lane::Background);
                }
                if let Some((error, _)) = &failed {
                    self.health.flight().after_error(error);
                }
                drop((failed, state));
            }
            News::Stalled { request, elapsed } => self.warn(&request, elapsed),
        }
    }

    /// Warns of a message that does not end.
    #[cold]
    fn warn(&self, request: &Request, elapsed: Duration) {
        let missing: Vec<u32> = match request.terms.peer {
            Some(peer) => vec![peer as u32],
            None => (0..self.peers.len()).filter(|peer| *peer != self.rank).map(|peer| peer as u32).collect(),
        };
        self.health.flight().warn(&request.doing(), elapsed, request.deadline.limit(), &missing);
    }
}
