//! The progress of long work: a bar on a terminal, and a line every ten seconds elsewhere.

use std::io::{self, IsTerminal};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::output::say;

/// The time between two lines.
const BETWEEN_LINES: Duration = Duration::from_secs(10);
/// What a row costs beside its bytes, in bytes: small rows take about the same time.
const COST_OF_ROW: u64 = 256 << 10;

/// Shows how much of a list of rows is done, and how long the rest will take.
pub(crate) struct Progress {
    bar: ProgressBar,
    /// What the lines say, if there is no terminal.
    lines: Option<Arc<Lines>>,
}

struct Lines {
    state: Mutex<State>,
    /// Signalled when the work is over.
    over: Condvar,
}

/// How much is done.
#[derive(Debug, Clone, Default)]
struct State {
    rows: u64,
    /// The number of all rows; `None` if the work has no end.
    all_rows: Option<u64>,
    cost: u64,
    all_cost: u64,
    what: String,
    is_over: bool,
}

impl Progress {
    /// Starts with a list of rows, each with its bytes, that is measured `cycles` times; 0: without an end.
    pub(crate) fn begin(bytes: impl Iterator<Item = usize>, cycles: usize) -> Self {
        let (rows, cost) = bytes.fold((0_u64, 0_u64), |(rows, cost), bytes| (rows + 1, cost.saturating_add(cost_of(bytes))));
        let all_cost = cost.saturating_mul(cycles as u64);
        let all_rows = (cycles > 0).then(|| rows.saturating_mul(cycles as u64));
        if io::stderr().is_terminal() {
            return Self { bar: bar(all_rows.map(|_| all_cost)), lines: None };
        }
        let state = State { all_rows, all_cost, ..State::default() };
        Self { bar: ProgressBar::hidden(), lines: lines(state) }
    }

    /// Names the row that is being measured.
    pub(crate) fn working_on(&self, what: &str) {
        self.bar.set_message(what.to_owned());
        if let Some(lines) = &self.lines {
            what.clone_into(&mut lines.locked().what);
        }
    }

    /// Counts a row as done.
    pub(crate) fn done(&self, bytes: usize) {
        self.bar.inc(cost_of(bytes));
        if let Some(lines) = &self.lines {
            let mut state = lines.locked();
            state.rows += 1;
            state.cost = state.cost.saturating_add(cost_of(bytes));
        }
    }

    /// Hides the bar while other text is printed.
    pub(crate) fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }

    /// Returns the bar, for a thread that ends the run.
    pub(crate) fn bar(&self) -> ProgressBar {
        self.bar.clone()
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(lines) = &self.lines {
            lines.locked().is_over = true;
            lines.over.notify_all();
        }
    }
}

impl Lines {
    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prints a line at each interval, until the work is over.
    fn print(&self) {
        let began = Instant::now();
        let mut state = self.locked();
        loop {
            (state, _) = self.over.wait_timeout_while(state, BETWEEN_LINES, |state| !state.is_over).unwrap_or_else(PoisonError::into_inner);
            if state.is_over {
                return;
            }
            let line = state.line(began.elapsed());
            drop(state);
            say(&line);
            state = self.locked();
        }
    }
}

impl State {
    /// Describes what is done after some time, and how long the rest will take at this rate.
    fn line(&self, elapsed: Duration) -> String {
        let Self { rows, all_rows, cost, all_cost, what, .. } = self;
        let passed = elapsed.as_secs();
        let of = all_rows.map_or(String::new(), |all| format!(" of {all}"));
        let rest = all_cost.saturating_sub(*cost) as f64;
        let left = match all_rows {
            Some(_) if *cost > 0 => format!(", about {:.0} s left", (elapsed.as_secs_f64() * rest / *cost as f64).ceil()),
            _ => String::new(),
        };
        let what = if what.is_empty() { String::new() } else { format!(", now {what}") };
        format!("{rows}{of} rows after {passed} s{left}{what}")
    }
}

/// Returns what a row of this size costs.
fn cost_of(bytes: usize) -> u64 {
    COST_OF_ROW.saturating_add(bytes as u64)
}

/// Returns a bar on standard error; without an end, a spinner.
fn bar(all_cost: Option<u64>) -> ProgressBar {
    let Some(all_cost) = all_cost else { return ProgressBar::new_spinner() };
    let style = ProgressStyle::with_template("{elapsed_precise} {bar:32} {percent:>3} %, {eta} left  {wide_msg}");
    ProgressBar::new(all_cost).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Starts the thread that prints lines. Without a thread, no lines are printed.
fn lines(state: State) -> Option<Arc<Lines>> {
    let lines = Arc::new(Lines { state: Mutex::new(state), over: Condvar::new() });
    let printer = Arc::clone(&lines);
    let named = thread::Builder::new().name("progress".to_owned());
    named.spawn(move || printer.print()).ok().map(|_| lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_is_done_and_what_is_left() {
        let state =
            State { rows: 3, all_rows: Some(10), cost: 3000, all_cost: 12_000, what: "all_reduce 4 MiB".to_owned(), is_over: false };
        assert_eq!(state.line(Duration::from_secs(20)), "3 of 10 rows after 20 s, about 60 s left, now all_reduce 4 MiB");
        assert_eq!(
            State { cost: 0, rows: 0, ..state.clone() }.line(Duration::from_secs(10)),
            "0 of 10 rows after 10 s, now all_reduce 4 MiB"
        );
        assert_eq!(State { all_rows: None, ..state.clone() }.line(Duration::from_secs(10)), "3 rows after 10 s, now all_reduce 4 MiB");
        // More than was expected is not negative.
        assert!(State { cost: 20_000, ..state }.line(Duration::from_secs(10)).contains("about 0 s left"));
    }

    #[test]
    fn large_rows_are_a_larger_part() {
        let progress = Progress::begin([8, 128 << 20].into_iter(), 2);
        progress.working_on("a row");
        progress.done(8);
        if let Some(lines) = &progress.lines {
            let state = lines.locked().clone();
            assert_eq!((state.rows, state.all_rows, state.cost), (1, Some(4), COST_OF_ROW + 8));
            assert!(state.cost * 500 < state.all_cost, "{state:?}");
        }
        let printer = progress.lines.clone();
        drop(progress);
        assert!(printer.is_none_or(|lines| lines.locked().is_over));
        assert_eq!(cost_of(usize::MAX), u64::MAX);
    }
}
