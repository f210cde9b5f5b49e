//! A `tracing` subscriber that runs an action of the test each time it is called.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The action of a call. It receives the number of earlier calls, and the event's message or the kind of call.
pub(crate) type Action = Arc<dyn Fn(usize, &str) + Send + Sync>;

#[derive(Default)]
struct Plan {
    calls: usize,
    action: Option<Action>,
}

/// A subscriber whose action can be replaced.
#[derive(Clone)]
pub(crate) struct Listener {
    most: Level,
    plan: Arc<Mutex<Plan>>,
    spans: Arc<AtomicU64>,
}

thread_local! {
    /// Whether an action is running. The events that it causes are ignored.
    static ACTING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

struct Acting;

impl Drop for Acting {
    fn drop(&mut self) {
        ACTING.set(false);
    }
}

impl Listener {
    /// Creates a listener for events up to this level.
    pub(crate) fn new(most: Level) -> Self {
        Self { most, plan: Arc::default(), spans: Arc::default() }
    }

    /// Sets the action and restarts the count.
    pub(crate) fn act(&self, action: impl Fn(usize, &str) + Send + Sync + 'static) {
        *self.plan.lock().unwrap() = Plan { calls: 0, action: Some(Arc::new(action)) };
    }

    /// Returns the number of calls since then.
    pub(crate) fn calls(&self) -> usize {
        self.plan.lock().unwrap().calls
    }

    fn called(&self, what: &str) {
        if ACTING.get() {
            return;
        }
        let (number, action) = {
            let mut plan = self.plan.lock().unwrap();
            plan.calls += 1;
            (plan.calls - 1, plan.action.clone())
        };
        if let Some(action) = action {
            ACTING.set(true);
            let _acting = Acting;
            action(number, what);
        }
    }
}

struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.most && metadata.target().starts_with("collectives")
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.most.into())
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        self.called("a span begins");
        Id::from_u64(self.spans.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut message = Message(String::new());
        event.record(&mut message);
        self.called(&message.0);
    }

    fn enter(&self, _: &Id) {
        self.called("a span is entered");
    }

    fn exit(&self, _: &Id) {
        self.called("a span is left");
    }

    fn try_close(&self, _: Id) -> bool {
        self.called("a span ends");
        true
    }
}
