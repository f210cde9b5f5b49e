//! `tracing` subscribers, for the whole process and for one thread.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use collectives::{AbortHandle, Collective, Communicator, Envelope, ReduceOp, flight::Recorder};
use tracing::Level;

use super::common::ranks::{Meeting, Wiring, alone_in_a_process, communicators, communicators_with, each};
use super::listener::Listener;
use super::scenarios::{self, Given};
use super::{WANTED, quiet_panics, within};

/// Runs every scenario repeatedly. Each time the listener acts one call later, until it has acted at every call.
fn at_every_place(
    name: &'static str,
    given: impl Fn(&Communicator) + Send + Sync + 'static,
    act: impl Fn(usize) + Clone + Send + Sync + 'static,
) {
    alone_in_a_process(name, || {
        quiet_panics();
        let listener = Listener::new(Level::TRACE);
        tracing::subscriber::set_global_default(listener.clone()).unwrap();
        let given: &'static Given = Box::leak(Box::new(given));
        for wiring in [Wiring::Shm, Wiring::Tcp] {
            for (what, scenario) in scenarios::ALL {
                let mut at = 0;
                loop {
                    let act = act.clone();
                    listener.act(move |number, _| {
                        if number == at {
                            act(at)
                        }
                    });
                    within(&format!("{what} over {wiring:?}, call {at}"), move || scenario(wiring, given));
                    if listener.calls() <= at {
                        break;
                    }
                    at += 1;
                }
                println!("{what} over {wiring:?}: {at} places");
                assert!(at > 2, "{what} over {wiring:?}: {at} places");
            }
        }
    });
}

#[test]
fn a_subscriber_that_panics_anywhere_changes_nothing() {
    at_every_place("tracing_events::a_subscriber_that_panics_anywhere_changes_nothing", |_| {}, |_| std::panic::panic_any(WANTED));
}

/// As in a test harness, the subscriber panics at each event.
#[test]
fn a_subscriber_that_always_panics_changes_nothing() {
    alone_in_a_process("tracing_events::a_subscriber_that_always_panics_changes_nothing", || {
        quiet_panics();
        let listener = Listener::new(Level::TRACE);
        tracing::subscriber::set_global_default(listener.clone()).unwrap();
        for wiring in [Wiring::Shm, Wiring::Tcp] {
            for (what, scenario) in scenarios::ALL {
                listener.act(|_, _| std::panic::panic_any(WANTED));
                within(&format!("{what} over {wiring:?}"), move || scenario(wiring, &|_| {}));
                assert!(listener.calls() > 2);
            }
        }
    });
}

/// The flight recorders that background threads may read.
static RECORDERS: Mutex<Vec<Recorder>> = Mutex::new(Vec::new());

thread_local! {
    /// The communicator that the rank's own thread may use.
    static COMM: RefCell<Option<Reach>> = const { RefCell::new(None) };
}

/// A communicator that this thread created before the job. Its calls are separate from the job's.
type Reach = Rc<Vec<Communicator>>;

/// Does everything that any thread may do at any time and has a known result. Runs a job only now and then, since that
/// is slowest.
fn call_back(at: usize) {
    let recorders = std::mem::take(&mut *RECORDERS.lock().unwrap());
    for recorder in &recorders {
        let records = recorder.records();
        assert!(records.iter().all(|record| record.started_ns != Some(0)));
    }
    RECORDERS.lock().unwrap().extend(recorders);
    let folder = tempfile::tempdir().unwrap();
    collectives::flight::write_records(folder.path()).unwrap();
    if !at.is_multiple_of(9) {
        return;
    }
    // A separate job, on its own threads.
    let sums = Communicator::run_local(2, |comm| {
        let mut x = [comm.rank() as u32 + 1];
        comm.all_reduce(&mut x, ReduceOp::Sum)?;
        comm.send(&x, comm.rank())?;
        comm.recv(&mut x, comm.rank())?;
        Ok(x[0])
    });
    assert_eq!(sums.unwrap(), [3, 3]);
}

#[test]
fn a_subscriber_may_ask_for_records_and_run_jobs_anywhere() {
    static FAILED: AtomicUsize = AtomicUsize::new(0);
    at_every_place(
        "tracing_events::a_subscriber_may_ask_for_records_and_run_jobs_anywhere",
        |comm| {
            let mut recorders = RECORDERS.lock().unwrap();
            let old = recorders.len().saturating_sub(1);
            recorders.drain(..old);
            recorders.push(comm.flight_recorder());
        },
        |at| {
            // A panic here would be mistaken for a listener's.
            FAILED.fetch_add(1, Ordering::SeqCst);
            call_back(at);
            FAILED.fetch_sub(1, Ordering::SeqCst);
        },
    );
    assert_eq!(FAILED.load(Ordering::SeqCst), 0);
}

/// Aborts both communicators of a job from any event. Calls may fail, and all of them end.
#[test]
fn a_subscriber_may_abort_anywhere() {
    static HANDLES: Mutex<Vec<AbortHandle>> = Mutex::new(Vec::new());
    alone_in_a_process("tracing_events::a_subscriber_may_abort_anywhere", || {
        let listener = Listener::new(Level::TRACE);
        tracing::subscriber::set_global_default(listener.clone()).unwrap();
        for wiring in [Wiring::Shm, Wiring::Tcp] {
            let mut at = 0;
            loop {
                listener.act(move |number, _| {
                    if number == at {
                        let handles = HANDLES.lock().unwrap().clone();
                        handles.iter().for_each(AbortHandle::abort);
                    }
                });
                within(&format!("aborted at call {at} over {wiring:?}"), move || aborted(wiring));
                if listener.calls() <= at {
                    break;
                }
                at += 1;
            }
            println!("{wiring:?}: {at} places");
            assert!(at > 10, "{wiring:?}: {at} places");
        }
        fn aborted(wiring: Wiring) {
            HANDLES.lock().unwrap().clear();
            let comms = communicators(wiring, 2);
            HANDLES.lock().unwrap().extend(comms.iter().map(Communicator::abort_handle));
            let connected = Meeting::new(2);
            each(comms, |comm| {
                let other = 1 - comm.rank();
                let mut x = [comm.rank() as u32 + 1; 100];
                let sum = comm.all_reduce(&mut x, ReduceOp::Sum);
                assert!(sum.is_err() || x == [3; 100]);
                connected.meet();
                let receive = comm.start_recv(vec![9_u32; 5000], other);
                if comm.rank() == 0 {
                    scenarios::probe();
                }
                let sent = comm.send(&vec![comm.rank() as u32; 5000], other);
                if let Ok((got, _)) = receive.and_then(|receive| receive.wait()) {
                    assert_eq!(got, vec![other as u32; 5000]);
                }
                assert!(sent.is_ok() || comm.barrier().is_err());
                let started = comm.start_all_reduce(vec![1_u32; 10], ReduceOp::Sum);
                if let Ok(sum) = started.and_then(|work| work.wait()) {
                    assert_eq!(sum, [2; 10]);
                }
            });
        }
    });
}

/// Calls the communicator that an event reports on, on the same thread and from inside its call.
#[test]
fn a_subscriber_that_calls_the_same_communicator_gets_an_answer_or_an_error() {
    alone_in_a_process("tracing_events::a_subscriber_that_calls_the_same_communicator_gets_an_answer_or_an_error", || {
        let listener = Listener::new(Level::TRACE);
        tracing::subscriber::set_global_default(listener.clone()).unwrap();
        for wiring in [Wiring::Shm, Wiring::Tcp] {
            let mut at = 0;
            loop {
                listener.act(move |number, _| {
                    if number == at {
                        COMM.with_borrow(|own| own.as_ref().map(Rc::clone)).into_iter().for_each(|own| call_same(&own[0]));
                    }
                });
                within(&format!("called at {at} over {wiring:?}"), move || on_threads_own(wiring));
                if listener.calls() <= at {
                    break;
                }
                at += 1;
            }
            assert!(at > 10, "{wiring:?}: {at} places");
        }
        fn call_same(comm: &Communicator) {
            let limit = comm.timeout();
            comm.set_timeout(Duration::from_millis(5));
            let error = comm.recv(&mut [0_u8], Envelope::rank(1 - comm.rank()).tag(77)).unwrap_err();
            assert!(error.is_timeout() || error.is_poisoned(), "{error}");
            comm.set_timeout(limit);
            assert!(!comm.explain().is_empty() && comm.start_recv(vec![0_u8], Envelope::rank(1 - comm.rank()).tag(78)).is_ok());
        }
        fn on_threads_own(wiring: Wiring) {
            let connected = Meeting::new(2);
            each(communicators(wiring, 2), |comm| {
                let own: Reach = Rc::new(vec![comm]);
                COMM.set(Some(Rc::clone(&own)));
                let (comm, other) = (&own[0], 1 - own[0].rank());
                let mut x = [comm.rank() as u32 + 1; 100];
                comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                assert_eq!(x, [3; 100]);
                connected.meet();
                if comm.rank() == 0 {
                    scenarios::probe();
                    comm.send(&[1_u8; 3], other).unwrap();
                } else {
                    let mut y = [0_u8; 3];
                    comm.recv(&mut y, other).unwrap();
                    assert_eq!(y, [1; 3]);
                }
                comm.barrier().unwrap();
                COMM.set(None);
            });
        }
    });
}

/// Regression test for a write into freed memory. In the middle of a receive, a subscriber panics at the warning about
/// an unknown connection.
#[test]
fn a_warning_of_a_stranger_does_not_cut_a_receive_off_from_its_buffer() {
    alone_in_a_process("tracing_events::a_warning_of_a_stranger_does_not_cut_a_receive_off_from_its_buffer", || {
        quiet_panics();
        let warned = Arc::new(AtomicUsize::new(0));
        let meeting = Meeting::new(2);
        each(communicators(Wiring::Tcp, 2), |comm| {
            let other = 1 - comm.rank();
            if comm.rank() == 1 {
                meeting.meet();
                meeting.meet();
                comm.send(&[4_u64; 2000], other).unwrap();
                comm.send(&[5_u64; 2000], other).unwrap();
                return;
            }
            meeting.meet();
            let listener = Listener::new(Level::WARN);
            let count = Arc::clone(&warned);
            listener.act(move |_, what| {
                if what.contains("dropped a connection") {
                    count.fetch_add(1, Ordering::SeqCst);
                    std::panic::panic_any(WANTED);
                }
            });
            let strangers = std::thread::spawn(scenarios::probe);
            tracing::subscriber::with_default(listener, || {
                // Each receive accepts the connections that arrive while it waits. The warning about them must not end
                // it.
                let limit = comm.timeout();
                comm.set_timeout(Duration::from_millis(20));
                while warned.load(Ordering::SeqCst) == 0 {
                    let mut buffer = vec![7_u64; 2000];
                    let error = comm.recv(&mut buffer, other).unwrap_err();
                    assert!(error.is_timeout() && buffer.iter().all(|word| *word == 7), "{error}");
                }
                comm.set_timeout(limit);
            });
            strangers.join().unwrap();
            meeting.meet();
            let mut buffer = vec![0_u64; 2000];
            for expected in [4, 5] {
                comm.recv(&mut buffer, other).unwrap();
                assert_eq!(buffer, vec![expected; 2000]);
            }
        });
        assert!(warned.load(Ordering::SeqCst) > 0);
    });
}

/// On a stall warning, the subscriber reads the flight recorder of that same call.
#[test]
fn a_subscriber_may_ask_for_the_records_of_the_call_that_it_is_warned_of() {
    within("records in a stall warning", || {
        let comms = communicators_with(2, |rank| Wiring::Shm.builder_with(rank, scenarios::impatient()));
        let asked = Meeting::new(2);
        each(comms, |comm| {
            if comm.rank() == 1 {
                // Meets once rank 0 has been warned of this rank.
                asked.meet();
                return comm.barrier().unwrap();
            }
            let (recorder, seen) = (comm.flight_recorder(), Arc::new(AtomicUsize::new(0)));
            let (asked, listener, count) = (&asked, Listener::new(Level::WARN), Arc::clone(&seen));
            let (told, wait) = std::sync::mpsc::channel();
            listener.act(move |_, what| {
                if what.contains("still waiting") {
                    let records = recorder.records();
                    count.store(records.iter().filter(|record| record.kind == Collective::Barrier).count(), Ordering::SeqCst);
                    told.send(()).unwrap();
                }
            });
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    wait.recv().unwrap();
                    asked.meet();
                });
                tracing::subscriber::with_default(listener, || comm.barrier().unwrap());
            });
            assert!(seen.load(Ordering::SeqCst) > 0);
        });
    });
}
