//! Binding a rank to a core.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Binds the calling thread, and what it starts from now on, to a core of its own: the `local_rank`-th that it may use, and
/// the first again after the last.
pub(crate) fn pin(local_rank: usize) -> io::Result<()> {
    let allowed = sched_getaffinity(None)?;
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect();
    let Some(core) = cores.get(local_rank % cores.len().max(1)) else { return Ok(()) };
    let mut one = CpuSet::new();
    one.set(*core);
    Ok(sched_setaffinity(None, &one)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_take_cores_in_turns() {
        std::thread::spawn(|| {
            let count = sched_getaffinity(None).unwrap().count() as usize;
            pin(count + 1).unwrap();
            let bound = sched_getaffinity(None).unwrap();
            assert_eq!(bound.count(), 1);
            pin(5).unwrap();
            assert_eq!(sched_getaffinity(None).unwrap(), bound, "one core is left to choose from");
        })
        .join()
        .unwrap();
    }
}
