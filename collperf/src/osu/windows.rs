//! `osu_bw`, `osu_bibw` and `osu_mbw_mr`: bandwidth of windows of messages that are under way together.

use std::time::Instant;

use clap::{Parser, ValueEnum};
use collectives::{Communicator, Envelope};

use super::amounts::OF_BANDWIDTH;
use super::columns::{Cell, Columns};
use super::payload::{Name, buffer};
use super::session::{Figures, Session, are, nanoseconds};
use super::{Common, Lasting};
use crate::failure::Failure;
use crate::job;
use crate::machine::available_memory;
use crate::sizes::human;
use crate::tails::Histogram;

/// Measures the bandwidth of messages, as OSU's osu_bw, osu_bibw and osu_mbw_mr do.
///
/// osu_bw: rank 0 sends a window of messages at once (in one group), and rank 1 acknowledges the window with one short
/// message. osu_bibw: both ranks send a window at the same time. osu_mbw_mr: with 2N ranks, rank r sends windows to rank
/// r + N, and the table shows the bandwidth and the messages per second of all N pairs together.
///
/// Bandwidths are in MB/s: 10^6 bytes per second. By default, sizes go from 1 B to 4 MiB. Up to 8 KiB there are 10
/// untimed and 100 timed windows, and above 8 KiB 2 and 20, as in OSU's benchmarks.
///
/// Intel's Uniband and Biband, and perftest's ib_send_bw, measure the same.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "collperf osu_bw",
    bin_name = "collperf {osu_bw | osu_bibw | osu_mbw_mr}",
    max_term_width = 110,
    args_override_self = true
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    lasting: Lasting,
    /// Messages of a window
    #[arg(short = 'W', long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=8192))]
    window_size: u16,
    /// The buffers of a window's receives. single: all receives of a window use one buffer, one after the other;
    /// multiple: each has its own buffer, and all are posted together. osu_bibw always has multiple
    #[arg(short = 'b', long, value_enum, default_value_t = Buffers::Single)]
    buffer_num: Buffers,
}

/// The buffers of a window's receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Buffers {
    /// One
    Single,
    /// One for each message
    Multiple,
}

/// The three benchmarks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    OneWay,
    BothWays,
    ManyPairs,
}

/// The smallest and the largest size by default.
const SIZES: (usize, usize) = (1, 4 << 20);
/// The tag of acknowledgements.
const ACKNOWLEDGED: u64 = 1;

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::OneWay => "osu_bw",
            Kind::BothWays => "osu_bibw",
            Kind::ManyPairs => "osu_mbw_mr",
        }
    }

    /// Refuses a number of ranks that does not make pairs.
    fn check_ranks(self, ranks: usize) -> Result<(), Failure> {
        let name = self.name();
        match self {
            Kind::OneWay | Kind::BothWays if ranks != 2 => {
                Err(Failure::usage(format!("{name}: exactly 2 ranks are needed, but there {}; give -g 2, or use osu_mbw_mr", are(ranks))))
            }
            Kind::ManyPairs if ranks < 2 || ranks % 2 == 1 => {
                Err(Failure::usage(format!("{name}: pairs need an even number of ranks, but there {}; give -g {}", are(ranks), ranks + 1)))
            }
            _ => Ok(()),
        }
    }
}

/// Measures every size; rank 0 prints the table.
pub(crate) fn run(kind: Kind, arguments: &Arguments) -> Result<u8, Failure> {
    let common = &arguments.common;
    common.job.ranks_to_start().map_or(Ok(()), |ranks| kind.check_ranks(ranks))?;
    job::run(&common.job, |comm| {
        kind.check_ranks(comm.world_size())?;
        let mut session = Session::begin(comm, common, kind.name(), OF_BANDWIDTH)?.lasting(arguments.lasting.duration);
        let names: &[&str] = if kind == Kind::ManyPairs { &["MB/s", "Messages/s"] } else { &["Bandwidth (MB/s)"] };
        let columns = Columns::new(names).with(&common.percentiles, "BW(MB/s)", common.is_checked);
        let sizes = session.sizes(SIZES.0, SIZES.1)?;
        let mut windows = Windows::new(comm, kind, arguments, sizes.last().copied().unwrap_or(0))?;
        if kind == Kind::ManyPairs {
            session.print(&format!("# [ pairs: {} ] [ window size: {} ]\n", windows.pairs(), arguments.window_size))?;
        }
        session.header("u8", &columns)?;
        for bytes in sizes {
            if let Some(code) = windows.size(&session, &columns, bytes)? {
                return Ok(code);
            }
        }
        Ok(0)
    })
}

/// A rank's windows, and what it found wrong.
struct Windows<'a> {
    comm: &'a Communicator,
    kind: Kind,
    window: usize,
    /// Whether this rank sends windows and takes the time.
    leads: bool,
    peer: usize,
    sent: Vec<u8>,
    /// The blocks of the receives; one if a window's receives share it.
    received: Vec<u8>,
    blocks: usize,
    wrong: u64,
}

impl<'a> Windows<'a> {
    fn new(comm: &'a Communicator, kind: Kind, arguments: &Arguments, most: usize) -> Result<Self, Failure> {
        let (half, rank) = (comm.world_size() / 2, comm.rank());
        let window = usize::from(arguments.window_size);
        let leads = rank < half;
        let peer = if leads { rank + half } else { rank - half };
        let is_single = arguments.buffer_num == Buffers::Single && kind != Kind::BothWays;
        let blocks = if is_single { 1 } else { window };
        // Only ranks that receive windows need all blocks.
        let needed = most.saturating_mul(if leads && kind != Kind::BothWays { 1 } else { blocks }).max(1);
        let all = most.saturating_add(needed).saturating_mul(comm.local_world_size());
        if let Some(available) = available_memory().filter(|available| all > *available) {
            let (all, available) = (human(all), human(available));
            return Err(Failure::usage(format!(
                "the ranks of this host need {all} of memory, but only {available} are free; give a smaller -m or -W"
            )));
        }
        Ok(Self { comm, kind, window, leads, peer, sent: buffer(most)?, received: buffer(needed)?, blocks, wrong: 0 })
    }

    fn pairs(&self) -> usize {
        self.comm.world_size() / 2
    }

    /// Measures a size and prints its line; returns an exit code if data was wrong.
    fn size(&mut self, session: &Session<'_>, columns: &Columns, bytes: usize) -> Result<Option<u8>, Failure> {
        let times = self.measure(session, bytes)?;
        let (wrong, code) = session.wrong(bytes, self.wrong)?;
        // As in OSU's benchmark: the mean time of the ranks that send.
        let mut mean = [if self.leads { times.mean_us() } else { 0.0 }];
        self.comm.all_reduce(&mut mean[..], collectives::ReduceOp::Sum)?;
        let mean_us = mean[0] / self.pairs() as f64;
        let directions = if self.kind == Kind::BothWays { 2 } else { self.pairs() };
        let messages = (directions * self.window) as f64;
        let rate = |time_us: f64| if time_us > 0.0 { messages / time_us * 1e6 } else { 0.0 };
        let bandwidth = |time_us: f64| rate(time_us) * bytes as f64 / 1e6;
        let mut cells = vec![Cell::Number(bandwidth(mean_us))];
        cells.extend((self.kind == Kind::ManyPairs).then(|| Cell::Number(rate(mean_us))));
        let tail = |percent: f64| bandwidth(times.percentile_us(percent));
        session.line(columns, Figures { bytes, cells, times: &times, parts: 1.0, tail: &tail, wrong })?;
        Ok(code)
    }

    /// Returns the times of the windows of a size.
    fn measure(&mut self, session: &Session<'_>, bytes: usize) -> Result<Histogram, Failure> {
        let (amount, is_checked) = (session.amount(bytes), session.common.is_checked);
        self.checked(bytes, 0)?;
        self.comm.barrier()?;
        for _ in 0..amount.warmup {
            self.timed(bytes)?;
        }
        let mut times = Histogram::default();
        let began = Instant::now();
        loop {
            for number in 1..=u64::from(amount.iterations) {
                times.add(if is_checked { self.checked(bytes, number)? } else { self.timed(bytes)? });
            }
            if !session.goes_on(began)? {
                return Ok(times);
            }
        }
    }

    /// Makes a window, and returns its nanoseconds.
    fn timed(&mut self, bytes: usize) -> collectives::Result<u64> {
        if self.kind == Kind::ManyPairs {
            // As in OSU's benchmark: all pairs begin together.
            self.comm.barrier()?;
        }
        let began = Instant::now();
        match (self.kind, self.leads) {
            (Kind::BothWays, _) => self.exchange(bytes)?,
            (_, true) => self.send(bytes)?,
            (_, false) => self.receive(bytes)?,
        }
        Ok(nanoseconds(began.elapsed()))
    }

    /// Makes a window whose data is checked. All its messages are the same, as in OSU's benchmark.
    fn checked(&mut self, bytes: usize, number: u64) -> collectives::Result<u64> {
        Name { sender: self.comm.rank(), number }.write(&mut self.sent[..bytes]);
        self.received.fill(0);
        self.comm.barrier()?;
        let time = self.timed(bytes)?;
        let name = Name { sender: self.peer, number };
        if bytes > 0 && (!self.leads || self.kind == Kind::BothWays) {
            self.wrong += self.received.chunks_exact(bytes).take(self.blocks).map(|block| name.wrong(block)).sum::<u64>();
        }
        Ok(time)
    }

    /// Sends a window, and waits until it is acknowledged.
    fn send(&mut self, bytes: usize) -> collectives::Result<()> {
        let (sent, peer) = (&self.sent[..bytes], self.peer);
        self.comm.group(|group| (0..self.window).try_for_each(|_| group.send(sent, peer)))?;
        self.comm.recv(&mut [0_u8][..], Envelope::rank(peer).tag(ACKNOWLEDGED)).map(drop)
    }

    /// Receives a window, and acknowledges it.
    fn receive(&mut self, bytes: usize) -> collectives::Result<()> {
        let (peer, window) = (self.peer, self.window);
        if self.blocks == 1 {
            let block = &mut self.received[..bytes];
            (0..window).try_for_each(|_| self.comm.recv(&mut *block, peer).map(drop))?;
        } else {
            let mut blocks = blocks_of(&mut self.received, bytes, window);
            self.comm.group(|group| blocks.iter_mut().try_for_each(|block| group.recv(&mut **block, peer)))?;
        }
        self.comm.send(&[1_u8][..], Envelope::rank(peer).tag(ACKNOWLEDGED))
    }

    /// Sends a window and receives one at the same time.
    fn exchange(&mut self, bytes: usize) -> collectives::Result<()> {
        let (sent, peer, window) = (&self.sent[..bytes], self.peer, self.window);
        let mut blocks = blocks_of(&mut self.received, bytes, window);
        let exchanged = self.comm.group(|group| {
            blocks.iter_mut().try_for_each(|block| group.recv(&mut **block, peer))?;
            (0..window).try_for_each(|_| group.send(sent, peer))
        });
        exchanged.map(drop)
    }
}

/// Returns the first blocks of this size. Blocks of no bytes are empty slices.
fn blocks_of(buffer: &mut [u8], bytes: usize, count: usize) -> Vec<&mut [u8]> {
    if bytes == 0 { (0..count).map(|_| &mut [][..]).collect() } else { buffer.chunks_exact_mut(bytes).take(count).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_ranks_that_make_no_pairs_are_refused() {
        for (kind, ranks) in [(Kind::OneWay, 2), (Kind::BothWays, 2), (Kind::ManyPairs, 2), (Kind::ManyPairs, 8)] {
            assert!(kind.check_ranks(ranks).is_ok());
        }
        for (kind, ranks, words) in [
            (Kind::OneWay, 1, "osu_bw: exactly 2 ranks are needed, but there is 1; "),
            (Kind::BothWays, 4, "osu_bibw: exactly 2 ranks are needed, but there are 4; "),
            (Kind::ManyPairs, 1, "osu_mbw_mr: pairs need an even number of ranks, but there is 1; give -g 2"),
            (Kind::ManyPairs, 3, "but there are 3; give -g 4"),
        ] {
            let failure = kind.check_ranks(ranks).unwrap_err();
            assert!(failure.code == 6 && failure.message.contains(words), "{}", failure.message);
        }
    }

    #[test]
    fn blocks_are_apart() {
        let mut buffer = [0_u8; 10];
        for (bytes, count) in [(3, 3), (5, 2), (0, 7), (10, 1)] {
            let blocks = blocks_of(&mut buffer, bytes, count);
            assert!(blocks.len() == count && blocks.iter().all(|block| block.len() == bytes), "{bytes} {count}");
        }
    }
}
