//! The events that `tracing` receives.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use collectives::{Communicator, Envelope, ReduceOp, store::MemoryStore};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use crate::common::ranks::Wiring;

type Fields = BTreeMap<&'static str, String>;

/// An event, with the fields of the span it was in.
#[derive(Debug, Clone)]
struct Seen {
    target: String,
    level: Level,
    fields: Fields,
    span: Option<(String, Fields)>,
}

#[derive(Debug, Clone)]
struct Capture {
    seen: Arc<Mutex<Vec<Seen>>>,
    most: Level,
}

struct Into<'a>(&'a mut Fields);

impl Visit for Into<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}").trim_matches('"').to_owned());
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Capture {
    fn enabled(&self, metadata: &tracing::Metadata<'_>, _: Context<'_, S>) -> bool {
        *metadata.level() <= self.most && metadata.target().starts_with("collectives")
    }

    fn max_level_hint(&self) -> Option<tracing::level_filters::LevelFilter> {
        Some(self.most.into())
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::new();
        attributes.record(&mut Into(&mut fields));
        context.span(id).unwrap().extensions_mut().insert(fields);
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::new();
        event.record(&mut Into(&mut fields));
        let span =
            context.event_span(event).map(|span| (span.name().to_owned(), span.extensions().get::<Fields>().cloned().unwrap_or_default()));
        let (target, level) = (event.metadata().target().to_owned(), *event.metadata().level());
        self.seen.lock().unwrap().push(Seen { target, level, fields, span });
    }
}

/// Returns the events that the threads of two ranks received up to this level, by rank.
fn heard(most: Level, program: impl Fn(Communicator) + Sync) -> [Vec<Seen>; 2] {
    let store = MemoryStore::new();
    let rank = |rank: usize| {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let subscriber = tracing_subscriber::registry().with(Capture { seen: Arc::clone(&seen), most });
        tracing::subscriber::with_default(subscriber, || {
            program(Wiring::Shm.builder(rank).with_store(Arc::new(store.clone()), rank, 2).unwrap());
        });
        seen.lock().unwrap().clone()
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| rank(1));
        [rank(0), other.join().unwrap()]
    })
}

fn fields(pairs: &[(&'static str, &str)]) -> Fields {
    pairs.iter().map(|(name, value)| (*name, (*value).to_owned())).collect()
}

/// Returns the events of calls, without those of the start.
fn calls(seen: &[Seen]) -> Vec<&Seen> {
    let ready = seen.iter().position(|event| event.fields.get("message").is_some_and(|message| message == "ready")).unwrap_or(0);
    seen[ready..].iter().filter(|event| event.target == "collectives::call").collect()
}

#[test]
fn a_call_is_a_span_and_its_end_an_event_with_what_a_person_looks_for() {
    let heard = heard(Level::TRACE, |comm| {
        comm.reduce(&mut [1.0f64; 3], 1, ReduceOp::Sum).unwrap();
        let other = 1 - comm.rank();
        if comm.rank() == 0 {
            comm.send(&[1u8; 5], Envelope::rank(other).tag(9)).unwrap();
        } else {
            comm.recv(&mut [0u8; 5], Envelope::rank(other).tag(9)).unwrap();
        }
    });
    for (rank, seen) in heard.iter().enumerate() {
        let calls = calls(seen);
        assert_eq!(calls.len(), 2, "{calls:?}");
        let of = rank.to_string();
        let common = [("communicator", "world"), ("rank", &of), ("world_size", "2"), ("backend", "host")];
        let sequence = calls[0].span.as_ref().unwrap().1["sequence"].clone();
        let reduce = [("kind", "reduce"), ("sequence", &sequence), ("op", "sum"), ("dtype", "f64"), ("count", "3"), ("bytes", "24")];
        let way = [("root", "1"), ("algorithm", "mailboxes")];
        assert_eq!(calls[0].span, Some(("call".to_owned(), fields(&[&common[..], &reduce, &way].concat()))));
        let other = (1 - rank).to_string();
        let kind = if rank == 0 { "send" } else { "recv" };
        let message = [("kind", kind), ("dtype", "u8"), ("count", "5"), ("bytes", "5"), ("peer", &other), ("tag", "9")];
        assert_eq!(calls[1].span, Some(("call".to_owned(), fields(&[&common[..], &message].concat()))));
        for call in calls {
            assert_eq!((call.level, &*call.fields["result"]), (Level::TRACE, "ok"));
            let number = |name: &str| call.fields[name].parse::<f64>().unwrap();
            assert!(number("elapsed_us") > 0.0 && number("bandwidth") > 0.0, "{call:?}");
        }
    }
}

#[test]
fn above_trace_only_failures_and_turning_points_are_heard() {
    let heard = heard(Level::DEBUG, |comm| {
        comm.barrier().unwrap();
        let child = comm.duplicate().unwrap();
        child.close().unwrap();
        let failed = if comm.rank() == 0 { comm.all_reduce(&mut [1u32; 2], ReduceOp::Sum) } else { comm.barrier() };
        failed.unwrap_err();
        comm.barrier().unwrap_err();
        comm.abort();
    });
    for (rank, seen) in heard.iter().enumerate() {
        let life: Vec<_> = seen.iter().filter(|event| event.target == "collectives::life").collect();
        let said: Vec<_> = life.iter().map(|event| (event.level, &*event.fields["message"], &*event.fields["communicator"])).collect();
        let expected = [
            (Level::INFO, "ready", "world"),
            (Level::DEBUG, "split", "world"),
            (Level::DEBUG, "closing", "world/0 from rank 0"),
            (Level::DEBUG, "dropped", "world/0 from rank 0"),
            (Level::DEBUG, "dropped", "world"),
        ];
        assert_eq!(said, expected);
        assert!(life.iter().all(|event| event.fields["rank"] == rank.to_string() && event.span.is_none()));
        assert!(life[0].fields["ready_ms"].parse::<f64>().unwrap() > 0.0 && life[0].fields["wiring"].contains("shared memory"));
        let failures: Vec<_> = calls(seen).iter().map(|event| (event.level, event.fields["result"].clone())).collect();
        assert_eq!(failures, [(Level::WARN, "mismatch".to_owned()), (Level::DEBUG, "poisoned".to_owned())]);
    }
}

/// Panics at every event once the flag is set.
struct Broken(Arc<AtomicBool>);

impl<S: Subscriber> Layer<S> for Broken {
    fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
        assert!(!self.0.load(Ordering::Relaxed), "a subscriber's own mistake");
    }
}

#[test]
fn a_subscriber_that_panics_holds_up_no_background_message() {
    let is_broken = Arc::new(AtomicBool::new(false));
    let subscriber = tracing_subscriber::registry().with(Broken(Arc::clone(&is_broken)));
    tracing::subscriber::with_default(subscriber, || {
        let comm = Communicator::local(1).unwrap().remove(0);
        let work = comm.start_recv(vec![0u8; 2], 0).unwrap();
        is_broken.store(true, Ordering::Relaxed);
        // The message thread or this thread ends it, whichever comes first, and sends the event.
        let sent = comm.start_send(vec![7u8; 2], 0).unwrap();
        sent.wait().unwrap();
        assert_eq!(work.wait().unwrap().0, [7, 7]);
        comm.set_timeout(Duration::from_millis(20));
        let work = comm.start_recv(vec![0u8; 2], 0).unwrap();
        assert!(work.wait().unwrap_err().is_timeout());
        is_broken.store(false, Ordering::Relaxed);
        comm.barrier().unwrap();
    });
}
