//! What the results are measured on, and a core of it for a rank.

use std::fs;
use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The facts of one host that a reader of results wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Machine {
    /// The processor's name.
    pub(crate) processor: String,
    /// Processors that this process may use.
    pub(crate) cores: usize,
    /// The kernel's name and release.
    pub(crate) kernel: String,
}

impl Machine {
    /// The machine this runs on.
    pub(crate) fn here() -> Self {
        let system = rustix::system::uname();
        let kernel = format!("{} {}", system.sysname().to_string_lossy(), system.release().to_string_lossy());
        let processor = processor(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
            .unwrap_or_else(|| format!("{} processor", system.machine().to_string_lossy()));
        Self { processor, cores: std::thread::available_parallelism().map_or(1, usize::from), kernel }
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
    timestamp(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()))
}

/// A number of seconds since 1970 as a date and a time of day.
fn timestamp(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years are counted from March of the year 0, so that a leap day is the last of its year; 400 years are 146097 days.
    let day = days + 719_468;
    let (era, day_of_era) = (day / 146_097, day % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Five months from March on are always 153 days.
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day_of_month:02} {:02}:{:02}:{:02}", second / 3600, second / 60 % 60, second % 60)
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
    use super::*;

    #[test]
    fn dates_are_right() {
        let cases = [
            (0, "1970-01-01 00:00:00"),
            (951_782_399, "2000-02-28 23:59:59"),
            (951_782_400, "2000-02-29 00:00:00"),
            (951_868_800, "2000-03-01 00:00:00"),
            (1_709_164_800, "2024-02-29 00:00:00"),
            (1_735_689_599, "2024-12-31 23:59:59"),
            (4_107_542_400, "2100-03-01 00:00:00"),
        ];
        for (seconds, text) in cases {
            assert_eq!(timestamp(seconds), text);
        }
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
