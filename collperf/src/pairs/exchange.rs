//! Measures between two ranks. One of them leads: it decides how often to repeat, and the other follows.

use std::time::{Duration, Instant};

use collectives::{Communicator, Result};

use crate::failure::Failure;

/// Round trips: the least and the largest number, and the time after which no more are made.
const LEAST_ROUND_TRIPS: usize = 20;
const MOST_ROUND_TRIPS: usize = 200;
const ROUND_TRIPS: Duration = Duration::from_millis(20);
/// The largest message with which the length of a stream is chosen: a link may be slow.
const PROBE_BYTES: usize = 64 << 10;
/// The most messages of a stream, and the most streams in a direction.
const MOST_MESSAGES: f64 = 100_000.0;
const MOST_STREAMS: usize = 4;

/// Measures one rank with other ranks, one after another.
pub(super) struct Exchange<'a> {
    comm: &'a Communicator,
    sent: Vec<u8>,
    received: Vec<u8>,
    stream: Duration,
}

impl<'a> Exchange<'a> {
    pub(super) fn new(comm: &'a Communicator, bytes: usize, stream: Duration) -> std::result::Result<Self, Failure> {
        let buffer = || {
            let mut buffer = Vec::new();
            buffer.try_reserve_exact(bytes).map_err(|_| Failure::internal(format!("-b {bytes}: not enough memory; use a smaller size")))?;
            buffer.resize(bytes, 1_u8);
            Ok::<_, Failure>(buffer)
        };
        Ok(Self { comm, sent: buffer()?, received: buffer()?, stream })
    }

    /// Measures the bandwidth to another rank in 10^6 bytes per second, and half a round trip in microseconds.
    pub(super) fn measure(&mut self, other: usize, leads: bool) -> Result<[f64; 2]> {
        let latency = if leads { self.ask(other)? } else { self.answer(other)? };
        let bandwidth = if leads {
            let bandwidth = self.send(other)?;
            self.receive(other)?;
            bandwidth
        } else {
            self.receive(other)?;
            self.send(other)?
        };
        Ok([bandwidth, latency])
    }

    /// Sends messages and waits for each answer. The last message gives the other rank the latency, which it has not
    /// measured.
    fn ask(&self, other: usize) -> Result<f64> {
        let began = Instant::now();
        let mut times = Vec::new();
        loop {
            let goes_on = times.len() < MOST_ROUND_TRIPS && (times.len() < LEAST_ROUND_TRIPS || began.elapsed() < ROUND_TRIPS);
            let sent = Instant::now();
            // A zero in the first place ends the exchange; the figure is then in the second.
            let half = if goes_on { 0.0 } else { median(&mut times) / 2.0 };
            self.comm.send(&[f64::from(u8::from(goes_on)), half], other)?;
            if !goes_on {
                return Ok(half);
            }
            self.comm.recv(&mut [0_u8][..], other)?;
            times.push(sent.elapsed().as_secs_f64() * 1e6);
        }
    }

    fn answer(&self, other: usize) -> Result<f64> {
        loop {
            let mut said = [0.0; 2];
            self.comm.recv(&mut said[..], other)?;
            if said[0] == 0.0 {
                return Ok(said[1]);
            }
            self.comm.send(&[0_u8][..], other)?;
        }
    }

    /// Sends streams of messages until one takes at least half of the requested time. The length of each is estimated
    /// from the rate of the one before.
    fn send(&self, other: usize) -> Result<f64> {
        let mut rate = self.stream_of(1, &self.sent[..self.probe()], other)?;
        for attempt in 1..=MOST_STREAMS {
            let messages = (self.stream.as_secs_f64() * rate / self.sent.len() as f64).clamp(1.0, MOST_MESSAGES);
            let began = Instant::now();
            rate = self.stream_of(messages as u64, &self.sent, other)?;
            if attempt == MOST_STREAMS || 2 * began.elapsed() > self.stream || messages >= MOST_MESSAGES {
                break;
            }
        }
        self.comm.send(&[0_u64][..], other)?;
        Ok(rate / 1e6)
    }

    /// Sends `messages` messages and waits for an answer; returns bytes per second.
    fn stream_of(&self, messages: u64, message: &[u8], other: usize) -> Result<f64> {
        self.comm.send(&[messages][..], other)?;
        let began = Instant::now();
        (0..messages).try_for_each(|_| self.comm.send(message, other))?;
        self.comm.recv(&mut [0_u8][..], other)?;
        Ok(messages as f64 * message.len() as f64 / began.elapsed().as_secs_f64().max(1e-9))
    }

    /// Receives the streams that [`Exchange::send`] sends: in all but the first, messages have the full length.
    fn receive(&mut self, other: usize) -> Result<()> {
        let mut length = self.probe();
        loop {
            let mut messages = [0_u64];
            self.comm.recv(&mut messages[..], other)?;
            if messages[0] == 0 {
                return Ok(());
            }
            for _ in 0..messages[0] {
                self.comm.recv(&mut self.received[..length], other)?;
            }
            self.comm.send(&[0_u8][..], other)?;
            length = self.received.len();
        }
    }

    /// Returns the length of the very first message.
    fn probe(&self) -> usize {
        self.sent.len().min(PROBE_BYTES)
    }
}

/// Returns the upper median; 0 if there are no times.
fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}
