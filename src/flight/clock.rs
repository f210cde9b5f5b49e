//! A clock that can be read quickly: the processor's counter if this counter runs at a constant speed, otherwise the
//! kernel's coarse clock. Ticks are converted to nanoseconds when records are read. The conversion uses two readings,
//! each of this clock and of the ordinary clock.

#![expect(unsafe_code, reason = "an instruction reads the processor's counter")]

use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The source of ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Clock {
    /// The processor's counter: the time-stamp counter or the virtual timer.
    Counter,
    /// The kernel's coarse clock, accurate to a few milliseconds.
    Coarse,
}

impl Clock {
    /// Returns the clock to use in this process.
    pub(super) fn choose() -> Self {
        Start::get().clock
    }

    /// Returns the current time in ticks.
    #[inline]
    pub(super) fn ticks(self) -> u64 {
        match self {
            Clock::Counter => counter(),
            Clock::Coarse => coarse(),
        }
    }
}

/// The chosen clock and the first reading of both clocks. Determined once per process, because querying the processor
/// can take long.
#[derive(Debug)]
struct Start {
    clock: Clock,
    ticks: u64,
    at: Instant,
}

impl Start {
    fn get() -> &'static Self {
        static START: OnceLock<Start> = OnceLock::new();
        START.get_or_init(|| {
            let clock = if has_even_counter() { Clock::Counter } else { Clock::Coarse };
            Self { clock, ticks: clock.ticks(), at: Instant::now() }
        })
    }
}

/// Whether the counter runs at a constant speed and is the same on every core.
#[cfg(target_arch = "x86_64")]
fn has_even_counter() -> bool {
    if cfg!(miri) {
        // Miri has no counter.
        return false;
    }
    use std::arch::x86_64::__cpuid;
    const POWER: u32 = 0x8000_0007;
    const INVARIANT: u32 = 1 << 8;
    #[allow(unused_unsafe, reason = "the function is unsafe in the oldest supported Rust")]
    // SAFETY: every x86-64 processor has the instruction, and it touches no memory.
    let ask = |leaf| unsafe { __cpuid(leaf) };
    ask(0x8000_0000).eax >= POWER && ask(POWER).edx & INVARIANT != 0
}

#[cfg(not(target_arch = "x86_64"))]
fn has_even_counter() -> bool {
    cfg!(target_arch = "aarch64")
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn counter() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, and it touches no memory.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(target_arch = "aarch64")]
#[inline]
fn counter() -> u64 {
    let ticks;
    // SAFETY: the instruction reads the virtual timer, which the architecture lets programs read, and touches no
    // memory.
    unsafe { std::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack, preserves_flags)) };
    ticks
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
#[inline]
fn counter() -> u64 {
    coarse()
}

fn coarse() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Returns the time since 1970.
pub(super) fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Converts ticks to time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timeline {
    first: u64,
    last: u64,
    /// The time from the first to the last reading.
    span: Duration,
    /// The time of the last reading since 1970.
    now: Duration,
}

impl Timeline {
    /// Reads both clocks a second time.
    pub(super) fn new() -> Self {
        let start = Start::get();
        let (last, span) = (start.clock.ticks(), start.at.elapsed());
        Self { first: start.ticks, last, span, now: since_1970() }
    }

    /// Returns the time of the last reading, in nanoseconds since 1970.
    pub(super) fn now(&self) -> u64 {
        u64::try_from(self.now.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns the time of `ticks` in nanoseconds since 1970; `None` for 0, which means that the clock was not read.
    pub(super) fn nanoseconds(&self, ticks: u64) -> Option<u64> {
        if ticks == 0 {
            return None;
        }
        let ticks = ticks.clamp(self.first, self.last.max(self.first));
        let (ago, all) = (u128::from(self.last.saturating_sub(ticks)), u128::from(self.last.saturating_sub(self.first).max(1)));
        let ago = ago * self.span.as_nanos() / all;
        u64::try_from(self.now.as_nanos().saturating_sub(ago)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_become_times_between_the_two_looks() {
        let line = Timeline { first: 1000, last: 3000, span: Duration::from_nanos(500), now: Duration::from_secs(7) };
        assert_eq!(line.nanoseconds(3000), Some(7_000_000_000));
        assert_eq!(line.nanoseconds(2000), Some(6_999_999_750));
        assert_eq!(line.nanoseconds(900), Some(6_999_999_500), "before the first look");
        assert_eq!(line.nanoseconds(0), None);
        let still = Timeline { first: 5, last: 5, span: Duration::ZERO, now: Duration::from_secs(1) };
        assert_eq!(still.nanoseconds(5), Some(1_000_000_000));
    }

    #[test]
    fn both_clocks_run_forward() {
        for clock in [Clock::choose(), Clock::Coarse] {
            let first = clock.ticks();
            assert!(first != 0 && clock.ticks() >= first, "{clock:?}");
        }
        let clock = Clock::choose();
        let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
        let ticks = clock.ticks();
        let at = Timeline::new().nanoseconds(ticks).unwrap();
        assert!(at.abs_diff(before) < 10_000_000_000, "{at} and {before}");
    }
}
