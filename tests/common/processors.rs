//! The processors that this process may run on, as the kernel reports them: for tests of programs that bind ranks.

use std::collections::BTreeSet;
use std::fs;

use rustix::thread::{CpuSet, sched_setaffinity};

/// A set of processors.
pub type Processors = BTreeSet<usize>;

/// Parses a kernel list such as `0-3,8`.
pub fn read_list(list: &str) -> Processors {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        first.parse::<usize>().unwrap()..=last.parse().unwrap()
    };
    list.trim().split(',').flat_map(range).collect()
}

/// Returns the processors that a process or thread may run on, according to its `status` file.
pub fn allowed(status: &str) -> Processors {
    let text = fs::read_to_string(status).unwrap();
    read_list(text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap())
}

/// Returns the processors that the calling thread may run on.
pub fn allowed_here() -> Processors {
    allowed("/proc/thread-self/status")
}

/// Returns the number of cores of these processors. Each processor counts as a core if the kernel lists no siblings.
pub fn core_count(processors: &Processors) -> usize {
    let siblings = |processor: &usize| {
        let list = fs::read_to_string(format!("/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"));
        list.unwrap_or_else(|_| processor.to_string()).trim().to_owned()
    };
    processors.iter().map(siblings).collect::<BTreeSet<_>>().len()
}

/// Runs a function on a thread that is bound to the first of its processors, as by `taskset`. Also returns that
/// processor.
pub fn on_one_processor<R: Send>(run: impl FnOnce() -> R + Send) -> (usize, R) {
    std::thread::scope(|scope| {
        let bound = scope.spawn(|| {
            let first = *allowed_here().first().unwrap();
            let mut one = CpuSet::new();
            one.set(first);
            sched_setaffinity(None, &one).unwrap();
            (first, run())
        });
        bound.join().unwrap()
    })
}
