//! `osu_latency`: half the time of a round trip, with blocking sends and receives.

use std::time::Instant;

use clap::Parser;
use collectives::Communicator;

use super::amounts::OF_LATENCY;
use super::columns::{Cell, Columns};
use super::payload::{Name, buffer};
use super::session::{Figures, Session, are, nanoseconds};
use super::{Common, Lasting};
use crate::failure::Failure;
use crate::job;
use crate::tails::Histogram;

/// Measures the latency of messages, as OSU's osu_latency does.
///
/// Rank 0 sends a message, and rank 1 answers with a message of the same size. The latency is half the time of this
/// round trip, averaged over all iterations. Sends and receives are blocking. The table has OSU's columns. By default,
/// sizes go from 1 B to 4 MiB. Up to 8 KiB there are 100 untimed and 10000 timed iterations, and above 8 KiB 10 and
/// 1000, as in OSU's benchmarks.
///
/// Intel's PingPong and perftest's ib_send_lat measure the same.
#[derive(Debug, Clone, Parser)]
#[command(name = "collperf osu_latency", bin_name = "collperf osu_latency", max_term_width = 110, args_override_self = true)]
pub(crate) struct Arguments {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    lasting: Lasting,
}

const NAME: &str = "osu_latency";
/// The smallest and the largest size by default.
const SIZES: (usize, usize) = (1, 4 << 20);

/// Measures every size; rank 0 prints the table.
pub(crate) fn run(arguments: &Arguments) -> Result<u8, Failure> {
    let common = &arguments.common;
    common.job.ranks_to_start().map_or(Ok(()), check_ranks)?;
    job::run(&common.job, |comm| {
        check_ranks(comm.world_size())?;
        let mut session = Session::begin(comm, common, NAME, OF_LATENCY)?.lasting(arguments.lasting.duration);
        let columns = Columns::new(&["Avg Latency(us)"]).with(&common.percentiles, "Lat(us)", common.is_checked);
        session.header("u8", &columns)?;
        let sizes = session.sizes(SIZES.0, SIZES.1)?;
        let most = sizes.last().copied().unwrap_or(0);
        let mut exchange = Exchange { comm, sent: buffer(most)?, received: buffer(most)?, wrong: 0 };
        for bytes in sizes {
            let times = exchange.measure(&session, bytes)?;
            let (wrong, code) = session.wrong(bytes, exchange.wrong)?;
            let tail = |percent: f64| times.percentile_us(percent) / 2.0;
            let cells = vec![Cell::Number(times.mean_us() / 2.0)];
            session.line(&columns, Figures { bytes, cells, times: &times, parts: 2.0, tail: &tail, wrong })?;
            if let Some(code) = code {
                return Ok(code);
            }
        }
        Ok(0)
    })
}

fn check_ranks(ranks: usize) -> Result<(), Failure> {
    if ranks == 2 {
        return Ok(());
    }
    Err(Failure::usage(format!("{NAME}: exactly 2 ranks are needed, but there {}; give -g 2", are(ranks))))
}

/// The two buffers of a rank, and what it found wrong.
struct Exchange<'a> {
    comm: &'a Communicator,
    sent: Vec<u8>,
    received: Vec<u8>,
    wrong: u64,
}

impl Exchange<'_> {
    /// Returns the times of the round trips of a size.
    fn measure(&mut self, session: &Session<'_>, bytes: usize) -> Result<Histogram, Failure> {
        let (amount, is_checked) = (session.amount(bytes), session.common.is_checked);
        self.checked(bytes, 0)?;
        self.comm.barrier()?;
        (0..amount.warmup).try_for_each(|_| self.round_trip(bytes))?;
        let mut times = Histogram::default();
        let began = Instant::now();
        loop {
            for number in 1..=u64::from(amount.iterations) {
                let time = if is_checked { self.checked(bytes, number)? } else { self.timed(bytes)? };
                times.add(time);
            }
            if !session.goes_on(began)? {
                return Ok(times);
            }
        }
    }

    /// Makes a round trip, and returns its nanoseconds.
    fn timed(&mut self, bytes: usize) -> collectives::Result<u64> {
        let began = Instant::now();
        self.round_trip(bytes)?;
        Ok(nanoseconds(began.elapsed()))
    }

    /// Makes a round trip whose data is checked.
    fn checked(&mut self, bytes: usize, number: u64) -> collectives::Result<u64> {
        let rank = self.comm.rank();
        Name { sender: rank, number }.write(&mut self.sent[..bytes]);
        self.received[..bytes].fill(0);
        self.comm.barrier()?;
        let time = self.timed(bytes)?;
        self.wrong += Name { sender: 1 - rank, number }.wrong(&self.received[..bytes]);
        Ok(time)
    }

    fn round_trip(&mut self, bytes: usize) -> collectives::Result<()> {
        let (sent, received) = (&self.sent[..bytes], &mut self.received[..bytes]);
        if self.comm.rank() == 0 {
            self.comm.send(sent, 1)?;
            self.comm.recv(received, 1).map(drop)
        } else {
            self.comm.recv(received, 0)?;
            self.comm.send(sent, 0)
        }
    }
}
