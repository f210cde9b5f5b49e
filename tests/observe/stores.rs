//! Stores that the program implements.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use collectives::{
    Communicator, ReduceOp, Result,
    store::{MemoryStore, Store},
};

use super::common::ranks::{Wiring, alone_in_a_process, patience};
use super::{WANTED, quiet_panics, within};

/// The action of a store call. It receives the number of the call.
type Action = Arc<dyn Fn(usize) + Send + Sync>;

/// A store in memory that runs an action of the test at each call and keeps every value it receives.
#[derive(Clone)]
struct Watched {
    inner: MemoryStore,
    calls: Arc<AtomicUsize>,
    action: Action,
    values: Arc<Mutex<Vec<(String, usize)>>>,
}

impl Watched {
    fn new(inner: MemoryStore, action: impl Fn(usize) + Send + Sync + 'static) -> Self {
        Self { inner, calls: Arc::default(), action: Arc::new(action), values: Arc::default() }
    }

    fn called(&self) -> &MemoryStore {
        (self.action)(self.calls.fetch_add(1, Ordering::SeqCst));
        &self.inner
    }

    fn given(&self, key: &str, value: &[u8]) -> &MemoryStore {
        self.values.lock().unwrap().push((key.to_owned(), value.len()));
        self.called()
    }
}

impl Store for Watched {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.given(key, value).set(key, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.called().get(key, timeout)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.called().add(key, delta)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.given(key, desired).compare_set(key, expected, desired)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.called().wait(keys, timeout)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.called().check(keys)
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        self.called().delete_key(key)
    }

    fn num_keys(&self) -> Result<i64> {
        self.called().num_keys()
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.given(key, value).append(key, value)
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.called().multi_get(keys, timeout)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        for (key, value) in pairs {
            self.given(key, value);
        }
        self.inner.multi_set(pairs)
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.given(key, value).queue_push(key, value)
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.called().queue_pop(key, timeout)
    }

    fn queue_len(&self, key: &str) -> Result<i64> {
        self.called().queue_len(key)
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        self.called().list_keys()
    }
}

/// Starts two ranks with a store each, reduces and splits. Returns each rank's outcome, `None` if it panicked.
fn start(wiring: Wiring, stores: [Watched; 2], limit: Duration) -> Vec<Option<Result<u32>>> {
    let rank = |(rank, store): (usize, Watched)| {
        let comm = wiring.builder(rank).configure(|config| config.timeout = limit).with_store(Arc::new(store), rank, 2)?;
        let mut x = [rank as u32 + 1];
        comm.all_reduce(&mut x, ReduceOp::Sum)?;
        let child = comm.split(Some(0), rank as i64)?;
        child.map(|child| child.all_reduce(&mut x, ReduceOp::Sum)).transpose()?;
        Ok(x[0])
    };
    std::thread::scope(|scope| {
        let start = |own| scope.spawn(move || catch_unwind(AssertUnwindSafe(|| rank(own))).ok());
        let ranks: Vec<_> = stores.into_iter().enumerate().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn a_store_that_panics_at_any_call_fails_the_start_and_no_later_one() {
    alone_in_a_process("stores::a_store_that_panics_at_any_call_fails_the_start_and_no_later_one", || {
        quiet_panics();
        for wiring in [Wiring::Shm, Wiring::Tcp] {
            let mut at = 0;
            loop {
                let memory = MemoryStore::new();
                let panics = Watched::new(memory.clone(), move |call| {
                    if call == at {
                        std::panic::panic_any(WANTED);
                    }
                });
                let (calls, own) = (Arc::clone(&panics.calls), [panics, Watched::new(memory, |_| {})]);
                let ended = within(&format!("{wiring:?}, call {at}"), move || start(wiring, own, patience(1)));
                if calls.load(Ordering::SeqCst) <= at {
                    assert!(ended.iter().all(|ended| matches!(ended, Some(Ok(6)))), "{ended:?}");
                    break;
                }
                assert!(ended[0].is_none() && !matches!(ended[1], None | Some(Ok(_))), "{wiring:?}, call {at}: {ended:?}");
                at += 1;
            }
            assert!(at > 4, "{wiring:?}: {at} calls");
        }
    });
}

#[test]
fn a_store_may_run_jobs_at_any_call() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        let job = |_| {
            let sums = Communicator::run_local(2, |comm| {
                let mut x = [1_u8];
                comm.all_reduce(&mut x, ReduceOp::Sum).map(|()| x[0])
            });
            assert_eq!(sums.unwrap(), [2, 2]);
        };
        let memory = MemoryStore::new();
        let own = [Watched::new(memory.clone(), job), Watched::new(memory, |_| {})];
        let ended = within("jobs within a store", move || start(wiring, own, patience(20)));
        assert!(ended.iter().all(|ended| matches!(ended, Some(Ok(6)))), "{ended:?}");
    }
}

/// PyTorch's server without libuv takes 200 ms for an answer with an empty value. (The values of shrinks are checked in
/// their model.)
#[test]
fn no_value_is_ever_empty() {
    for wiring in Wiring::ALL {
        let memory = MemoryStore::new();
        let own = [(); 2].map(|()| Watched::new(memory.clone(), |_| {}));
        let values = own.clone().map(|store| store.values);
        let ended = start(wiring, own, patience(20));
        assert!(ended.iter().all(|ended| matches!(ended, Some(Ok(6)))), "{ended:?}");
        for values in values {
            let values = values.lock().unwrap();
            assert!(values.len() > 3 && values.iter().all(|(_, bytes)| *bytes > 0), "{wiring:?}: {values:?}");
        }
    }
}
