//! Faults that tests plant: the n-th call of a function returns a code instead of being executed.

use std::thread::ThreadId;

use crate::code::{Code, Outcome};

#[derive(Debug)]
struct Planted {
    function: String,
    /// The number of calls until the one that fails, that one included.
    remaining: u64,
    code: Code,
    thread: Option<ThreadId>,
}

#[derive(Debug, Default)]
pub(crate) struct Faults(Vec<Planted>);

impl Faults {
    /// Makes the `nth` call of `function` from now on (1 is the next), by `thread` or by any thread, return `code`,
    /// once.
    pub(crate) fn plant(&mut self, function: String, nth: u64, code: Code, thread: Option<ThreadId>) {
        self.0.push(Planted { function, remaining: nth.max(1), code, thread });
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Counts a call. Returns an error if one was planted for it.
    pub(crate) fn call(&mut self, function: &str) -> Outcome {
        let thread = std::thread::current().id();
        let mut due = None;
        for (at, planted) in self.0.iter_mut().enumerate() {
            if planted.function == function && planted.thread.is_none_or(|only| only == thread) {
                planted.remaining -= 1;
                if planted.remaining == 0 && due.is_none() {
                    due = Some(at);
                }
                planted.remaining = planted.remaining.max(1);
            }
        }
        due.map_or(Ok(()), |at| Err(self.0.swap_remove(at).code))
    }
}
