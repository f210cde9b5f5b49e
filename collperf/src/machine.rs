//! What the results are measured on, and a core of it for a rank.

use std::fs;
use std::io;

use jiff::Timestamp;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The facts of one host that a reader of results wants.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Machine {
    /// The processor's name.
    pub(crate) processor: String,
    /// Processors that this process may use.
    pub(crate) cores: usize,
    /// The kernel's name and release.
    pub(crate) kernel: String,
    /// What it had to do when that was asked, where the kernel says.
    pub(crate) load: Option<Load>,
}

/// How busy a machine is.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Load {
    /// The load average of the last minute: how many cores were wanted.
    pub(crate) average: f64,
    /// Threads that want a core now, the one that asks among them.
    running: usize,
    /// Cores that are there, whoever may use them: the load is the whole machine's, too.
    pub(crate) cores: usize,
}

/// The least load that counts: something always runs.
const LEAST_LOAD: f64 = 0.5;

impl Load {
    /// That of this machine.
    pub(crate) fn here() -> Option<Self> {
        Self::read(&fs::read_to_string("/proc/loadavg").ok()?, &fs::read_to_string("/proc/stat").ok()?)
    }

    /// Of what the kernel says.
    pub(crate) fn read(average: &str, stat: &str) -> Option<Self> {
        let words: Vec<&str> = average.split_whitespace().collect();
        let running = words.get(3)?.split_once('/')?.0.parse().ok()?;
        let is_core = |line: &&str| line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|char: char| char.is_ascii_digit()));
        let cores = stat.lines().filter(is_core).count();
        let average = words.first()?.parse::<f64>().ok().filter(|average| average.is_finite())?;
        (cores > 0).then_some(Self { average, running, cores })
    }

    /// That so many ranks would not have the cores for themselves. The average has the minute before in it, perhaps a run like this one; so
    /// something else must want a core now, too.
    pub(crate) fn note(&self, ranks: usize) -> Option<String> {
        let Self { average, running, cores } = self;
        let is_busy = *average >= LEAST_LOAD && average + ranks as f64 > *cores as f64 && *running > ranks;
        is_busy.then(|| format!("{average:.1} of {cores} cores are busy: times will be too high"))
    }
}

impl Machine {
    /// The machine this runs on.
    pub(crate) fn here() -> Self {
        let system = rustix::system::uname();
        let kernel = format!("{} {}", system.sysname().to_string_lossy(), system.release().to_string_lossy());
        let processor = processor(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
            .unwrap_or_else(|| format!("{} processor", system.machine().to_string_lossy()));
        Self { processor, cores: std::thread::available_parallelism().map_or(1, usize::from), kernel, load: Load::here() }
    }
}

/// The processor's name in the kernel's description; on some architectures there is none.
fn processor(description: &str) -> Option<String> {
    let line = description.lines().find(|line| line.starts_with("model name"))?;
    let name = line.split_once(':')?.1.split_whitespace().collect::<Vec<_>>().join(" ");
    (!name.is_empty()).then_some(name)
}

/// Memory that can be had without pushing anything else out, in bytes; `None` where the kernel does not say.
pub(crate) fn available_memory() -> Option<usize> {
    available(&fs::read_to_string("/proc/meminfo").ok()?)
}

fn available(description: &str) -> Option<usize> {
    let line = description.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

/// The time of day in UTC, as `2026-01-02 03:04:05`.
pub(crate) fn now() -> String {
    Timestamp::now().strftime("%Y-%m-%d %H:%M:%S").to_string()
}

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
    use std::process::Command;

    use super::*;

    #[test]
    fn dates_have_the_form_of_nccl_tests() {
        let shape: String = now().chars().map(|char| if char.is_ascii_digit() { '0' } else { char }).collect();
        assert_eq!(shape, "0000-00-00 00:00:00");
        // The program `date` is another oracle; it may see the next second.
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

    #[test]
    fn a_machine_is_busy_where_others_want_the_cores_of_ranks() {
        let stat = "cpu  1 2 3\ncpu0 1 2 3\ncpu1 1 2 3\nintr 5\ncpus 7\n";
        let note = |average: &str, ranks| Load::read(average, stat).unwrap().note(ranks);
        assert_eq!(note("3.14 2.00 1.00 5/120 99\n", 2).unwrap(), "3.1 of 2 cores are busy: times will be too high");
        assert_eq!(note("0.30 2.00 1.00 5/120 99\n", 2), None, "something always runs");
        assert_eq!(note("1.90 2.00 1.00 2/120 99\n", 2), None, "what made the load has ended");
        assert!(note("0.90 2.00 1.00 3/120 99\n", 2).is_some());
        let many = (0..64).map(|core| format!("cpu{core} 1\n")).collect::<String>();
        assert_eq!(Load::read("20.0 2.00 1.00 30/120 99", &many).unwrap().note(8), None, "there are cores for all");
        for (average, stat) in [("", stat), ("x 2 3 4/5 6", stat), ("1 2 3 4 6", stat), ("nan 2 3 4/5 6", stat), ("1 2 3 4/5 6", "cpu 1\n")]
        {
            assert_eq!(Load::read(average, stat), None, "{average}");
        }
        assert!(Load::here().is_none_or(|load| load.cores > 0 && load.running > 0));
    }

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
