//! The machine on which results are measured.

use std::fs;
use std::thread;
use std::time::Duration;

use jiff::Timestamp;
use rustix::thread::{CpuSet, sched_getaffinity};

/// The facts of one host that readers of results need.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Machine {
    /// The processor's name.
    pub(crate) processor: String,
    /// All cores of the machine, usable or not.
    pub(crate) cores: usize,
    /// How many of them a container may use at a time, if not all.
    pub(crate) allowed: Option<usize>,
    /// The kernel's name and release.
    pub(crate) kernel: String,
    /// The load that other processes put on it, if the kernel reports it.
    pub(crate) load: Option<Load>,
}

/// The load that other processes put on a machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Load {
    /// How many of the cores that this process may run on were busy with other processes.
    pub(crate) busy: f64,
    /// The number of cores that this process may run on.
    pub(crate) cores: usize,
}

/// The least load that counts: some process always runs.
const LEAST_LOAD: f64 = 0.5;
/// How long the kernel's counters are observed. Their resolution is a hundredth of a second.
const WATCHED: Duration = Duration::from_millis(50);

impl Load {
    /// Measures this machine's load now, on the cores that the calling thread may run on. Sleeps meanwhile; the other
    /// ranks should sleep too.
    pub(crate) fn here() -> Option<Self> {
        let mine = sched_getaffinity(None).ok()?;
        let look = || Some((fs::read_to_string("/proc/stat").ok()?, own_ticks()));
        let (before, own_before) = look()?;
        thread::sleep(WATCHED);
        let (after, own_after) = look()?;
        Self::between(&before, &after, own_after.saturating_sub(own_before), |core| core < CpuSet::MAX_CPU && mine.is_set(core))
    }

    /// Computes the load from the kernel's counters before and after; `own` ticks are this process's.
    fn between(before: &str, after: &str, own: u64, is_mine: impl Fn(usize) -> bool) -> Option<Self> {
        let (before, after) = (cores(before), cores(after));
        let (mut cores, mut busy, mut ticks) = (0, 0.0, 0);
        for (core, after) in after.into_iter().filter(|(core, _)| is_mine(*core)) {
            // A core that was switched on meanwhile has done no work yet.
            let before = before.iter().find(|(other, _)| *other == core).map_or(after, |(_, before)| *before);
            // On some kernels the counters decrease a little.
            let [working, idle] = [0, 1].map(|which| after[which].saturating_sub(before[which]));
            cores += 1;
            ticks += working + idle;
            busy += working as f64 / (working + idle).max(1) as f64;
        }
        let own = if ticks == 0 { 0.0 } else { own as f64 * cores as f64 / ticks as f64 };
        (cores > 0).then_some(Self { busy: (busy - own).max(0.0), cores })
    }

    /// Returns a note if this many ranks would not have the cores to themselves.
    pub(crate) fn note(&self, ranks: usize) -> Option<String> {
        let Self { busy, cores } = self;
        let is_busy = *busy >= LEAST_LOAD && busy + ranks as f64 > *cores as f64;
        is_busy.then(|| format!("other programs keep {busy:.1} of {cores} cores busy, so times will be too high"))
    }
}

/// Returns, for each core that is switched on, its number, its busy ticks and its idle ticks.
fn cores(stat: &str) -> Vec<(usize, [u64; 2])> {
    let core = |line: &str| {
        let mut words = line.strip_prefix("cpu")?.split(' ');
        let number = words.next()?.parse().ok()?;
        // User, nice, system, idle, waiting for a disk, two kinds of interrupts, stolen; guests are included in the
        // first two.
        let ticks: Vec<u64> = words.filter_map(|word| word.parse().ok()).take(8).collect();
        let idle = ticks.get(3)?.saturating_add(*ticks.get(4).unwrap_or(&0));
        Some((number, [ticks.iter().sum::<u64>().saturating_sub(idle), idle]))
    };
    stat.lines().filter_map(core).collect()
}

/// Returns the ticks that all threads of this process have used.
fn own_ticks() -> u64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name, in parentheses, may contain blanks.
    let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
    after.split_whitespace().skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum()
}

impl Machine {
    /// Describes this machine. Takes a moment; must be called before ranks are bound to cores.
    pub(crate) fn here() -> Self {
        let system = rustix::system::uname();
        let kernel = format!("{} {}", system.sysname().to_string_lossy(), system.release().to_string_lossy());
        let processor = processor(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
            .unwrap_or_else(|| format!("{} processor", system.machine().to_string_lossy()));
        let usable = thread::available_parallelism().map_or(1, usize::from);
        let there = cores(&fs::read_to_string("/proc/stat").unwrap_or_default()).len();
        // A launcher's binding also leaves each rank fewer cores, but does not limit all ranks together.
        let bound = sched_getaffinity(None).map_or(usable, |mine| mine.count() as usize);
        let allowed = (usable < bound).then_some(usable);
        Self { processor, cores: there.max(usable), allowed, kernel, load: Load::here() }
    }

    /// Describes its cores.
    pub(crate) fn told_cores(&self) -> String {
        let plural = if self.cores == 1 { "" } else { "s" };
        let of = self.allowed.map_or(String::new(), |allowed| format!("{allowed} of "));
        format!("{of}{} core{plural}", self.cores)
    }
}

/// Finds the processor's name in the kernel's description, which has none on some architectures.
fn processor(description: &str) -> Option<String> {
    let line = description.lines().find(|line| line.starts_with("model name"))?;
    let name = line.split_once(':')?.1.split_whitespace().collect::<Vec<_>>().join(" ");
    (!name.is_empty()).then_some(name)
}

/// Returns the bytes of memory that are available without evicting anything; `None` if the kernel does not report it.
pub(crate) fn available_memory() -> Option<usize> {
    available(&fs::read_to_string("/proc/meminfo").ok()?)
}

fn available(description: &str) -> Option<usize> {
    let line = description.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

/// Returns the time in UTC, as `2026-01-02 03:04:05`.
pub(crate) fn now() -> String {
    Timestamp::now().strftime("%Y-%m-%d %H:%M:%S").to_string()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::launch::{Asked, Binding, Width};

    #[test]
    fn dates_have_the_form_of_nccl_tests() {
        let shape: String = now().chars().map(|char| if char.is_ascii_digit() { '0' } else { char }).collect();
        assert_eq!(shape, "0000-00-00 00:00:00");
        // The program `date` is an independent oracle; it may already see the next second.
        let date = || String::from_utf8(Command::new("date").args(["-u", "+%F %T"]).output().unwrap().stdout).unwrap().trim().to_owned();
        let (before, found, after) = (date(), now(), date());
        assert!(before <= found && found <= after, "{before} {found} {after}");
    }

    #[test]
    fn the_kernel_is_understood() {
        let description = "processor\t: 0\nmodel name\t:  A  CPU @ 2GHz \nmodel name\t: other\n";
        assert_eq!(processor(description).as_deref(), Some("A CPU @ 2GHz"));
        assert_eq!(processor("Hardware : none"), None);
        assert_eq!(available("MemTotal: 5 kB\nMemAvailable:   123 kB\n"), Some(123 << 10));
        assert_eq!(available("MemAvailable: x kB"), None);
    }

    /// Formats the kernel's counters for cores with these busy and idle ticks.
    fn stat(cores: &[(usize, u64, u64)]) -> String {
        let line = |(core, busy, idle): &(usize, u64, u64)| format!("cpu{core} {busy} 0 0 {idle} 0 0 0 0 7 0\n");
        format!("cpu  1 2 3\n{}intr 5\ncpus 7\n", cores.iter().map(line).collect::<String>())
    }

    #[test]
    fn what_others_do_now_is_seen() {
        let load = |after: &[(usize, u64, u64)], own| Load::between(&stat(&[(0, 9, 90), (1, 9, 90)]), &stat(after), own, |_| true).unwrap();
        assert_eq!(load(&[(0, 14, 90), (1, 11, 93)], 0), Load { busy: 1.4, cores: 2 });
        assert_eq!(load(&[(0, 14, 90), (1, 14, 90)], 5), Load { busy: 1.0, cores: 2 }, "own work does not count");
        assert_eq!(load(&[(0, 9, 95), (1, 9, 95)], 3), Load { busy: 0.0, cores: 2 });
        assert_eq!(load(&[(0, 9, 90), (1, 9, 90)], 0), Load { busy: 0.0, cores: 2 }, "a clock that stands still");
        assert_eq!(load(&[(1, 14, 90)], 0), Load { busy: 1.0, cores: 1 }, "a core was switched off");
        assert_eq!(load(&[(0, 9, 95), (1, 9, 95), (2, 500, 0)], 0), Load { busy: 0.0, cores: 3 }, "one was switched on");
        assert_eq!(load(&[(0, 14, 80), (1, 9, 95)], 0), Load { busy: 1.0, cores: 2 }, "counters may go back");
        let (before, after) = (stat(&[(0, 0, 0), (1, 0, 0), (63, 0, 0)]), stat(&[(0, 5, 0), (1, 0, 5), (63, 5, 0)]));
        assert_eq!(Load::between(&before, &after, 0, |core| core < 2), Some(Load { busy: 1.0, cores: 2 }), "of the cores that it may use");
        assert_eq!(Load::between("", "cpu 1 2 3 4\ncpux 1\n", 0, |_| true), None);
    }

    #[test]
    fn never_more_than_all_cores_are_busy() {
        let mut random = crate::random::Random(20_261_126);
        for case in 0..2000 {
            let count = 1 + random.below(9);
            let mut draw = || (0..count).map(|core| (core, random.next() % 90, random.next() % 90)).collect::<Vec<_>>();
            let (before, after) = (draw(), draw());
            let load = Load::between(&stat(&before), &stat(&after), case % 7, |_| true).unwrap();
            assert!((0.0..=count as f64).contains(&load.busy) && load.cores == count, "{before:?} {after:?}: {load:?}");
        }
        let here = Load::here();
        assert!(here.is_none_or(|load| load.cores > 0 && load.busy <= load.cores as f64), "{here:?}");
    }

    #[test]
    fn a_machine_is_busy_where_others_want_the_cores_of_ranks() {
        let note = |busy, cores, ranks| Load { busy, cores }.note(ranks);
        assert_eq!(note(1.42, 2, 2).unwrap(), "other programs keep 1.4 of 2 cores busy, so times will be too high");
        assert_eq!(note(0.3, 2, 2), None, "something always runs");
        assert_eq!(note(20.0, 64, 8), None, "there are cores for all");
        assert!(note(60.0, 64, 8).is_some());
    }

    #[test]
    fn cores_are_the_machines_also_for_a_rank_that_is_bound() {
        let machine = Machine::here();
        let bound = std::thread::spawn(|| {
            Binding::here(Asked::CoresInTurns, Width::One, 1).unwrap().apply(0).unwrap();
            Machine::here()
        });
        let bound = bound.join().unwrap();
        assert_eq!((machine.cores, machine.told_cores()), (bound.cores, bound.told_cores()));
        let limited = Machine { cores: 64, allowed: Some(2), ..machine };
        assert_eq!(limited.told_cores(), "2 of 64 cores");
    }
}
