//! A PyTorch store as a store of the crate: every call goes through the Python object.

use std::time::{Duration, Instant};

use collectives::store::Store;
use collectives::{Error, Result};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDelta};

/// Waits shorter than `SHORT` poll every `LOOK`.
const SHORT: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(2);

fn timed_out(doing: String, elapsed: Duration) -> Error {
    Error::Timeout { doing, elapsed, missing: Vec::new(), arrived: Vec::new(), meanwhile: Vec::new() }
}

/// Any PyTorch store.
pub(crate) struct TorchStore {
    store: Py<PyAny>,
}

impl TorchStore {
    pub(crate) fn new(store: Py<PyAny>) -> Self {
        Self { store }
    }

    /// Polls for keys until all exist or the timeout has passed.
    fn look_for(&self, keys: &[&str], timeout: Duration, began: Instant) -> Result<()> {
        while !self.check(keys)? {
            let left = timeout.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(timed_out(format!("waiting for {keys:?} in PyTorch's store"), began.elapsed()));
            }
            std::thread::sleep(left.min(LOOK));
        }
        Ok(())
    }

    /// Makes a call and converts an exception to an error.
    fn call<T>(&self, doing: &str, timeout: Option<Duration>, call: impl for<'py> Fn(&Bound<'py, PyAny>) -> PyResult<T>) -> Result<T> {
        let began = Instant::now();
        let outcome = Python::try_attach(|py| {
            let store = self.store.bind(py);
            call(store).map_err(|error| (error.value(py).to_string(), is_timeout(py, &error)))
        });
        match outcome {
            Some(Ok(value)) => Ok(value),
            Some(Err((_, true))) if timeout.is_some() => Err(timed_out(format!("{doing} in PyTorch's store"), began.elapsed())),
            Some(Err((words, _))) => Err(Error::Protocol { with: format!("PyTorch's store, {doing},"), reason: words }),
            None => Err(Error::Protocol { with: "PyTorch's store".to_owned(), reason: "the interpreter is ending".to_owned() }),
        }
    }
}

/// Whether a store's wait has timed out. The type of the exception alone does not tell.
fn is_timeout(py: Python<'_>, error: &PyErr) -> bool {
    let words = error.value(py).to_string().to_lowercase();
    words.contains("timeout") || words.contains("timed out")
}

fn delta(py: Python<'_>, time: Duration) -> PyResult<Bound<'_, PyDelta>> {
    // Stores read a time of zero as no timeout, and count in milliseconds.
    let millis = time.as_millis().clamp(1, i32::MAX as u128) as i64;
    let (seconds, rest) = (millis / 1000, millis % 1000);
    PyDelta::new(py, (seconds / 86_400) as i32, (seconds % 86_400) as i32, (rest * 1000) as i32, true)
}

fn number(answer: &Bound<'_, PyAny>) -> PyResult<i64> {
    answer.extract()
}

fn bytes(answer: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    answer.extract()
}

impl Store for TorchStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.call(&format!("setting {key:?}"), None, |store| store.call_method1("set", (key, PyBytes::new(store.py(), value))).map(drop))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.wait(&[key], timeout)?;
        self.call(&format!("getting {key:?}"), Some(timeout), |store| bytes(&store.call_method1("get", (key,))?))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.call(&format!("adding to {key:?}"), None, |store| number(&store.call_method1("add", (key, delta))?))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.call(&format!("comparing {key:?}"), None, |store| {
            let (expected, desired) = (PyBytes::new(store.py(), expected), PyBytes::new(store.py(), desired));
            bytes(&store.call_method1("compare_set", (key, expected, desired))?)
        })
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let began = Instant::now();
        // PyTorch's stores log every wait that ends without its keys, and short waits often do.
        if timeout < SHORT {
            return self.look_for(keys, timeout, began);
        }
        self.call(&format!("waiting for {keys:?}"), Some(timeout), |store| {
            store.call_method1("wait", (keys.to_vec(), delta(store.py(), timeout)?)).map(drop)
        })
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.call(&format!("looking for {keys:?}"), None, |store| store.call_method1("check", (keys.to_vec(),))?.extract())
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        self.call(&format!("deleting {key:?}"), None, |store| store.call_method1("delete_key", (key,))?.extract())
    }

    fn num_keys(&self) -> Result<i64> {
        self.call("counting keys", None, |store| number(&store.call_method0("num_keys")?))
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.call(&format!("appending to {key:?}"), None, |store| {
            store.call_method1("append", (key, PyBytes::new(store.py(), value))).map(drop)
        })
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.wait(keys, timeout)?;
        keys.iter().map(|key| self.get(key, timeout)).collect()
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        pairs.iter().try_for_each(|(key, value)| self.set(key, value))
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.call(&format!("pushing to the queue {key:?}"), None, |store| {
            store.call_method1("queue_push", (key, PyBytes::new(store.py(), value))).map(drop)
        })
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.wait(&[key], timeout)?;
        self.call(&format!("popping from the queue {key:?}"), Some(timeout), |store| bytes(&store.call_method1("queue_pop", (key,))?))
    }

    fn queue_len(&self, key: &str) -> Result<i64> {
        self.call(&format!("measuring the queue {key:?}"), None, |store| number(&store.call_method1("queue_len", (key,))?))
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        self.call("listing keys", None, |store| store.call_method0("list_keys")?.extract())
    }
}
