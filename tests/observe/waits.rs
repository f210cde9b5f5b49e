//! Waits from inside a call, from callbacks and from the end of a thread. If only this thread could end the wait, or
//! only a later call behind the one it is in, the wait is refused. Nothing waits forever.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::{Future, IntoFuture};
use std::io::Write;
use std::net::TcpStream;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use collectives::{
    Communicator, CustomOp, Error, ReduceOp, Result, Work,
    store::{MemoryStore, Store, TcpStoreServer},
};

use super::common::meeting::wait_until;
use super::common::ranks::{Meeting, Wiring, alone_in_a_process, communicators, communicators_with, each, patience, threads};
use super::common::tasks::block_on;
use super::listener::Listener;
use super::{WANTED, quiet_panics, within};

const WIRINGS: [Wiring; 2] = [Wiring::Shm, Wiring::Tcp];

/// Returns an op that adds. The first time it also runs an action of the test.
fn op(action: impl FnOnce() + Send + 'static) -> CustomOp<u32> {
    let action = Mutex::new(Some(action));
    CustomOp::new("adds", move |sums: &mut [u32], others: &[u32]| {
        let action = action.lock().unwrap().take();
        action.into_iter().for_each(|action| action());
        sums.iter_mut().zip(others).for_each(|(sum, other)| *sum += other);
    })
}

fn is_refused(error: &Error) -> bool {
    let text = error.to_string();
    matches!(error, Error::InvalidArgument { .. }) && ["within a call", "this wait would never end"].iter().any(|part| text.contains(part))
}

#[cfg(feature = "serde")]
mod objects {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::*;

    thread_local! {
        static COMM: RefCell<Option<Communicator>> = const { RefCell::new(None) };
        static STARTED: RefCell<Vec<Work<Vec<u32>>>> = const { RefCell::new(Vec::new()) };
    }

    /// A value that starts a call and closes the communicator when it is serialised and when it is deserialised.
    struct Closes;

    fn start_and_close() {
        let comm = COMM.with_borrow(|comm| comm.clone()).unwrap();
        STARTED.with_borrow_mut(|started| started.push(comm.start_all_reduce(vec![1_u32; 4], ReduceOp::Sum).unwrap()));
        assert!(is_refused(&comm.close().unwrap_err()));
    }

    impl Serialize for Closes {
        fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
            start_and_close();
            serializer.serialize_u8(1)
        }
    }

    impl<'de> Deserialize<'de> for Closes {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
            start_and_close();
            u8::deserialize(deserializer).map(|_| Closes)
        }
    }

    #[test]
    fn a_value_that_closes_the_communicator_where_it_is_serialised_is_refused() {
        for wiring in WIRINGS {
            within(&format!("{wiring:?}"), move || {
                each(communicators(wiring, 2), |comm| {
                    COMM.set(Some(comm.clone()));
                    assert_eq!(comm.all_gather_object(&Closes).unwrap().len(), 2);
                    comm.broadcast_object((comm.rank() == 0).then_some(&Closes), 0).unwrap();
                    COMM.set(None);
                    // The gather serialises once and deserialises twice. The broadcast adds one on each rank, and one
                    // more on the root.
                    let extra = comm.rank();
                    (0..extra).for_each(|_| drop(comm.start_all_reduce(vec![1_u32; 4], ReduceOp::Sum).unwrap()));
                    let started = STARTED.take();
                    assert_eq!(started.len(), 5 - comm.rank());
                    for work in started.into_iter().take(4) {
                        assert_eq!(work.wait().unwrap(), [2; 4]);
                    }
                });
            });
        }
    }
}

#[test]
fn a_call_that_is_awaited_within_the_op_that_it_is_behind_fails_at_once() {
    for wiring in WIRINGS {
        for starts in [false, true] {
            within(&format!("{wiring:?}, started: {starts}"), move || {
                threads(wiring, 2, |comm| {
                    let (inner, (said, errors)) = (comm.clone(), channel());
                    let op = op(move || {
                        let works = [inner.start_barrier().unwrap(), inner.start_barrier().unwrap()];
                        assert_eq!(Work::wait_any(&works, Duration::MAX), None);
                        let [awaited, waited] = works;
                        said.send(block_on(awaited.into_future()).0.unwrap_err()).unwrap();
                        said.send(waited.wait().unwrap_err()).unwrap();
                        said.send(inner.close().unwrap_err()).unwrap();
                    });
                    let x = vec![1_u32; 8];
                    let sum = if starts {
                        comm.start_all_reduce(x, op).unwrap().wait()
                    } else {
                        let mut x = x;
                        comm.all_reduce(&mut x, op).map(|()| x)
                    };
                    assert_eq!(sum.unwrap(), [2; 8]);
                    // Both ranks reduce here.
                    let errors: Vec<_> = errors.try_iter().collect();
                    assert!(errors.len() == 3 && errors.iter().all(is_refused), "{errors:?}");
                    // The calls that the op started come after the op's own.
                    let mut x = [1_u32];
                    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                    assert_eq!(x, [2]);
                });
            });
        }
    }
}

/// Starts a call that ends no earlier than `go` is dropped, so that its callbacks run on the worker's thread.
fn gated(comm: &Communicator) -> (std::sync::mpsc::Sender<()>, Work<Vec<u32>>) {
    let (go, gone) = channel::<()>();
    let op = op(move || {
        let _ = gone.recv_timeout(patience(20));
    });
    (go, comm.start_all_reduce(vec![1_u32; 8], op).unwrap())
}

#[test]
fn a_callback_that_awaits_what_its_own_thread_is_to_run_is_told_so() {
    for wiring in WIRINGS {
        within(&format!("{wiring:?}"), move || {
            threads(wiring, 2, |comm| {
                let (said, heard) = channel();
                let (go, first) = gated(comm);
                let works = [comm.start_barrier().unwrap(), comm.start_barrier().unwrap()];
                first.on_end(move || {
                    let any = Work::wait_any(&works, Duration::MAX);
                    let [awaited, waited] = works;
                    said.send((any, [block_on(awaited.into_future()).0, waited.wait()])).unwrap();
                });
                drop(go);
                let (any, ended) = heard.recv_timeout(patience(20)).unwrap();
                assert!(any.is_none() && ended.iter().all(|ended| ended.as_ref().is_err_and(is_refused)), "{any:?} {ended:?}");
                assert_eq!(first.wait().unwrap(), [2; 8]);
                comm.barrier().unwrap();
            });
        });
    }
}

#[test]
fn a_callback_that_awaits_a_message_on_the_thread_that_moves_them_is_told_so() {
    for wiring in WIRINGS {
        within(&format!("{wiring:?}"), move || {
            let heard_of_it = Meeting::new(2);
            threads(wiring, 2, |comm| {
                if comm.rank() == 1 {
                    comm.barrier().unwrap();
                    comm.send(&[1_u8], 0).unwrap();
                    heard_of_it.meet();
                    comm.send(&[2_u8], 0).unwrap();
                    return comm.send(&[3_u8], 0).unwrap();
                }
                let [first, second, third] = [(); 3].map(|()| comm.start_recv(vec![0_u8], 1).unwrap());
                let (said, heard) = channel();
                first.on_end(move || {
                    let works = [second];
                    let any = Work::wait_any(&works, Duration::MAX);
                    let [second] = works;
                    said.send((any, block_on(second.into_future()).0.unwrap_err())).unwrap();
                });
                comm.barrier().unwrap();
                // Only that thread moves messages here.
                let (any, error) = heard.recv_timeout(patience(20)).unwrap();
                assert!(any.is_none() && is_refused(&error), "{any:?}: {error}");
                heard_of_it.meet();
                assert_eq!(first.wait().unwrap().0, [1]);
                assert_eq!(third.wait().unwrap().0, [3]);
            });
        });
    }
}

/// A task that is polled on the thread that wakes it, as some executors do.
struct Inline {
    task: Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>,
    is_woken: AtomicBool,
}

impl Inline {
    fn run(task: impl Future<Output = ()> + Send + 'static) {
        Arc::new(Self { task: Mutex::new(Some(Box::pin(task))), is_woken: AtomicBool::new(false) }).wake();
    }
}

impl Wake for Inline {
    fn wake(self: Arc<Self>) {
        self.is_woken.store(true, Ordering::SeqCst);
        // The thread that holds the task looks again.
        while let Ok(mut task) = self.task.try_lock() {
            if !self.is_woken.swap(false, Ordering::SeqCst) {
                return;
            }
            let waker = Waker::from(Arc::clone(&self));
            if task.as_mut().is_some_and(|task| task.as_mut().poll(&mut Context::from_waker(&waker)).is_ready()) {
                *task = None;
            }
        }
    }
}

#[test]
fn an_executor_that_polls_a_task_where_it_is_woken_awaits_one_call_after_the_other() {
    for wiring in WIRINGS {
        within(&format!("{wiring:?}"), move || {
            threads(wiring, 2, |comm| {
                let other = 1 - comm.rank();
                let (go, first) = gated(comm);
                let second = comm.start_all_reduce(vec![2_u8], ReduceOp::Sum).unwrap();
                let receive = comm.start_recv(vec![0_u8], other).unwrap();
                let third = comm.start_all_reduce(vec![3_u8], ReduceOp::Sum).unwrap();
                let (said, heard) = channel();
                Inline::run(async move {
                    let sums = (first.await, second.await, receive.await, third.await);
                    said.send(sums).unwrap();
                });
                drop(go);
                comm.send(&[7_u8], other).unwrap();
                let (first, second, received, third) = heard.recv_timeout(patience(20)).unwrap();
                assert_eq!((first.unwrap()[0], second.unwrap(), received.unwrap().0, third.unwrap()), (2, vec![4], vec![7], vec![6]));
            });
        });
    }
}

/// A deadlock that this crate cannot detect: an op waits for another thread, which waits for a call behind the op's.
#[test]
fn a_started_call_whose_turn_does_not_come_ends_by_its_deadline() {
    for wiring in WIRINGS {
        within(&format!("{wiring:?}"), move || {
            let comms = communicators_with(2, |rank| wiring.builder(rank).configure(|config| config.timeout = Duration::from_millis(300)));
            each(comms, |comm| {
                let (inner, (said, heard)) = (comm.clone(), channel());
                let op = op(move || {
                    let work = inner.start_all_reduce(vec![1_u8], ReduceOp::Sum).unwrap();
                    let waiting = std::thread::spawn(move || work.wait());
                    said.send(waiting.join().unwrap().unwrap_err()).unwrap();
                });
                // The other ranks' deadlines may pass while the op waits.
                let _ = comm.all_reduce(&mut [1_u32; 8], &op);
                let error = heard.recv().unwrap().to_string();
                assert!(error.contains("all_reduce, which has not begun: waiting for its turn behind"), "{error}");
                // The started call keeps its place in the order of calls, so no later one may take it.
                assert!(comm.all_reduce(&mut [1_u32], ReduceOp::Sum).unwrap_err().is_poisoned());
            });
        });
    }
}

#[test]
fn callbacks_of_two_communicators_that_drop_each_others_last_handle_both_end() {
    for wiring in WIRINGS {
        within(&format!("{wiring:?}"), move || {
            each(communicators(wiring, 2), |first| {
                let second = first.duplicate().unwrap();
                let (ended, ends) = channel();
                let together = Arc::new(Meeting::new(2));
                let started = [gated(&first), gated(&second)];
                for ((_, work), other) in started.iter().zip([second.clone(), first.clone()]) {
                    let (together, ended) = (Arc::clone(&together), ended.clone());
                    work.on_end(move || {
                        together.meet();
                        drop(other);
                        ended.send(()).unwrap();
                    });
                }
                drop((first, second));
                let (gates, works): (Vec<_>, Vec<_>) = started.into_iter().unzip();
                // Now the callbacks have the last handles.
                drop(gates);
                for _ in 0..2 {
                    ends.recv_timeout(patience(4)).unwrap();
                }
                works.into_iter().for_each(|work| assert_eq!(work.wait().unwrap(), [2; 8]));
            });
        });
    }
}

#[test]
fn a_drop_does_not_wait_for_ever_for_an_op_and_for_callbacks_that_do_not_return() {
    within("the drop", || {
        let mut comms = communicators(Wiring::Tcp, 2);
        let (peer, comm) = (comms.remove(1), comms.remove(0));
        let (is_in, enters) = channel::<&str>();
        let stuck = |what: &'static str| {
            let is_in = is_in.clone();
            move || {
                is_in.send(what).unwrap();
                loop {
                    std::thread::park();
                }
            }
        };
        let receive = comm.start_recv(vec![0_u8], 1).unwrap();
        receive.on_end(stuck("a callback"));
        let (folds, moves) =
            (comm.start_all_reduce(vec![1_u32; 8], op(stuck("an op"))).unwrap(), peer.start_all_reduce(vec![1_u32; 8], op(|| ())));
        peer.send(&[1_u8], 0).unwrap();
        let mut stuck = [enters.recv().unwrap(), enters.recv().unwrap()];
        stuck.sort_unstable();
        assert_eq!(stuck, ["a callback", "an op"]);
        drop((comm, folds, receive));
        drop((peer, moves));
    });
}

#[test]
fn a_callback_of_a_message_may_close_the_communicator_and_drop_its_last_handle() {
    for wiring in WIRINGS {
        within(&format!("{wiring:?}"), move || {
            each(communicators(wiring, 2), |comm| {
                let other = 1 - comm.rank();
                let receive = comm.start_recv(vec![0_u8], other).unwrap();
                let (said, heard) = channel();
                let inner = comm.clone();
                receive.on_end(move || {
                    let closed = inner.close();
                    drop(inner);
                    said.send(closed).unwrap();
                });
                comm.barrier().unwrap();
                comm.send(&[7_u8], other).unwrap();
                drop(comm);
                heard.recv_timeout(patience(20)).unwrap().unwrap();
                assert_eq!(receive.wait().unwrap().0, [7]);
            });
        });
    }
}

#[test]
fn a_subscriber_that_drops_a_store_server_on_the_servers_own_thread_does_not_wait_for_it() {
    alone_in_a_process("waits::a_subscriber_that_drops_a_store_server_on_the_servers_own_thread_does_not_wait_for_it", || {
        let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr();
        let (kept, (said, heard)) = (Mutex::new(Some(server)), channel());
        let listener = Listener::new(tracing::Level::WARN);
        listener.act(move |_, what| {
            if what.contains("the store server drops a client") {
                drop(kept.lock().unwrap().take());
                said.send(()).unwrap();
            }
        });
        tracing::subscriber::set_global_default(listener).unwrap();
        let mut stranger = TcpStream::connect(address).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        heard.recv_timeout(patience(4)).unwrap();
        // The server ends nevertheless.
        wait_until("the server is gone", || TcpStream::connect(address).is_err());
    });
}

/// A store that runs an action of the test when it is dropped.
struct Last<F: Fn()>(MemoryStore, F);

impl<F: Fn()> Drop for Last<F> {
    fn drop(&mut self) {
        (self.1)();
    }
}

impl<F: Fn() + Send + Sync> Store for Last<F> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.set(key, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.0.get(key, timeout)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.0.add(key, delta)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.0.compare_set(key, expected, desired)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.0.wait(keys, timeout)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.0.check(keys)
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        self.0.delete_key(key)
    }

    fn num_keys(&self) -> Result<i64> {
        self.0.num_keys()
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.append(key, value)
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.0.multi_get(keys, timeout)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        self.0.multi_set(pairs)
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.queue_push(key, value)
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.0.queue_pop(key, timeout)
    }

    fn queue_len(&self, key: &str) -> Result<i64> {
        self.0.queue_len(key)
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        self.0.list_keys()
    }
}

#[test]
fn a_store_whose_drop_calls_back_and_panics_is_dropped_by_close_and_with_the_last_handle() {
    alone_in_a_process("waits::a_store_whose_drop_calls_back_and_panics_is_dropped_by_close_and_with_the_last_handle", || {
        quiet_panics();
        for closes in [true, false] {
            within(&format!("closes: {closes}"), move || {
                let (said, heard) = channel();
                let kept: Arc<Mutex<Option<Communicator>>> = Arc::default();
                let comm = Arc::clone(&kept);
                let store = Last(MemoryStore::new(), move || {
                    // Without holding the lock: the action runs again if this drops the last handle.
                    let comm = comm.lock().unwrap().clone();
                    said.send(comm.map(|comm| [comm.store().map(drop), comm.barrier(), comm.close()])).unwrap();
                    std::panic::panic_any(WANTED);
                });
                let builder = Communicator::builder().configure(|config| config.keep_store = true);
                let comm = builder.with_store(Arc::new(store), 0, 1).unwrap();
                if closes {
                    *kept.lock().unwrap() = Some(comm.clone());
                    comm.close().unwrap();
                    let refused = heard.try_recv().unwrap().unwrap();
                    assert!(refused.iter().all(|refused| refused.as_ref().is_err_and(Error::is_closed)), "{refused:?}");
                } else {
                    drop(comm);
                    assert!(heard.try_recv().unwrap().is_none());
                }
            });
        }
    });
}

thread_local! {
    static LATE: Late = const { Late(RefCell::new(VecDeque::new())) };
}

/// Calls communicators when its thread ends.
struct Late(RefCell<VecDeque<Communicator>>);

impl Drop for Late {
    fn drop(&mut self) {
        for comm in self.0.take() {
            let other = 1 - comm.rank();
            let (called, calls) = channel();
            let works = [
                comm.start_all_reduce(vec![1_u8; 4], ReduceOp::Sum).unwrap().erased(),
                comm.start_recv(vec![0_u8], other).unwrap().erased(),
            ];
            for work in &works {
                let called = called.clone();
                work.on_end(move || called.send(()).unwrap());
            }
            comm.send(&[1_u8], other).unwrap();
            assert!(Work::wait_any(&works, patience(20)).is_some());
            works.into_iter().for_each(|work| drop(work.wait().unwrap()));
            // A wait may return before the callbacks have run.
            (0..2).for_each(|_| calls.recv_timeout(patience(20)).unwrap());
            comm.barrier().unwrap();
            assert!(comm.with_timeout(Duration::from_millis(1)).recv(&mut [0_u8], other).unwrap_err().is_timeout());
            comm.close().unwrap();
        }
    }
}

#[test]
fn a_thread_that_ends_calls_and_waits_in_the_destructor_of_a_thread_local() {
    alone_in_a_process("waits::a_thread_that_ends_calls_and_waits_in_the_destructor_of_a_thread_local", || {
        for wiring in WIRINGS {
            within(&format!("{wiring:?}"), move || {
                each(communicators(wiring, 2), |comm| {
                    // Created before this crate's own thread locals, which are then destroyed first.
                    LATE.with(|late| late.0.borrow_mut().push_back(comm.clone()));
                    let works = [comm.start_all_reduce(vec![1_u8; 4], ReduceOp::Sum).unwrap()];
                    assert_eq!(Work::wait_any(&works, patience(20)), Some(0));
                });
            });
        }
    });
}
