//! What ranks print, put together line by line.

use std::io::{self, Read, Write};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// A line longer than this is cut: no rank can make the launcher hold more.
const LONGEST_LINE: usize = 64 << 10;
/// How long to wait, once all ranks have ended, for output that something they left behind still holds open.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Where the ranks' output goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Each line behind `[rank] `, on the stream it was written to.
    Prefixed,
    /// As it comes, to the launcher's own streams.
    Inherited,
    /// Rank 0's to the launcher's own streams; the others' to standard error, each line behind `[rank] `.
    FirstRank,
}

impl Output {
    /// The two output streams of the rank with this number on this host.
    pub(super) fn streams(self, local_rank: usize) -> (Stdio, Stdio) {
        match self {
            Self::FirstRank if local_rank == 0 => (Stdio::inherit(), Stdio::inherit()),
            Self::Inherited => (Stdio::inherit(), Stdio::inherit()),
            Self::FirstRank => (Stdio::null(), Stdio::piped()),
            Self::Prefixed => (Stdio::piped(), Stdio::piped()),
        }
    }
}

/// The threads that carry the ranks' output.
pub(super) struct Forwarders {
    started: usize,
    done: Sender<()>,
    finished: Receiver<()>,
}

impl Default for Forwarders {
    fn default() -> Self {
        let (done, finished) = channel();
        Self { started: 0, done, finished }
    }
}

impl Forwarders {
    /// Carries what this rank prints, as far as it was given pipes.
    pub(super) fn attach(&mut self, rank: usize, child: &mut Child) {
        if let Some(pipe) = child.stdout.take() {
            self.carry(rank, pipe, io::stdout);
        }
        if let Some(pipe) = child.stderr.take() {
            self.carry(rank, pipe, io::stderr);
        }
    }

    fn carry<W: Write + 'static>(&mut self, rank: usize, pipe: impl Read + Send + 'static, stream: fn() -> W) {
        let done = self.done.clone();
        self.started += 1;
        thread::spawn(move || {
            // When our own stream is closed there is nobody to tell; dropping the pipe tells the rank.
            let _ = forward(&format!("[{rank}] "), pipe, |bytes| {
                let mut stream = stream();
                stream.write_all(bytes)?;
                stream.flush()
            });
            let _ = done.send(());
        });
    }

    /// Waits until all that ranks printed has been carried.
    pub(super) fn finish(self) {
        let until = Instant::now() + LAST_WORDS;
        for _ in 0..self.started {
            if self.finished.recv_timeout(until.saturating_duration_since(Instant::now())).is_err() {
                return;
            }
        }
    }
}

/// Carries everything from `pipe`, each line behind `prefix`, several lines at a time but none in pieces.
fn forward(prefix: &str, mut pipe: impl Read, mut write: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut pending: Vec<u8> = Vec::new();
    let mut chunk = [0; 16 << 10];
    loop {
        let read = match pipe.read(&mut chunk) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        pending.extend_from_slice(&chunk[..read]);
        let ended = read == 0;
        let ready = match pending.iter().rposition(|byte| *byte == b'\n') {
            _ if ended || pending.len() >= LONGEST_LINE => pending.len(),
            Some(newline) => newline + 1,
            None => continue,
        };
        if ready > 0 {
            write(&prefixed(prefix, &pending[..ready]))?;
            pending.drain(..ready);
        }
        if ended {
            return Ok(());
        }
    }
}

/// The lines, each behind the prefix and each ended.
fn prefixed(prefix: &str, lines: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(lines.len() + prefix.len());
    for line in lines.split_inclusive(|byte| *byte == b'\n') {
        text.extend_from_slice(prefix.as_bytes());
        text.extend_from_slice(line);
    }
    if text.last() != Some(&b'\n') {
        text.push(b'\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hands out its pieces one read at a time.
    struct Pieces(Vec<Vec<u8>>);

    impl Read for Pieces {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            if self.0.is_empty() {
                return Ok(0);
            }
            let piece = self.0.remove(0);
            into[..piece.len()].copy_from_slice(&piece);
            Ok(piece.len())
        }
    }

    fn forwarded(pieces: &[&[u8]]) -> (Vec<u8>, usize) {
        let (mut text, mut writes) = (Vec::new(), 0);
        let pieces = Pieces(pieces.iter().map(|piece| piece.to_vec()).collect());
        forward("[3] ", pieces, |bytes| {
            writes += 1;
            text.extend_from_slice(bytes);
            Ok(())
        })
        .unwrap();
        (text, writes)
    }

    #[test]
    fn every_line_has_its_rank() {
        let (text, writes) = forwarded(&[b"a\nb\nc", b"d\n", b"\n", b"last"]);
        assert_eq!(String::from_utf8(text).unwrap(), "[3] a\n[3] b\n[3] cd\n[3] \n[3] last\n");
        assert_eq!(writes, 4, "lines that came together stay together");
    }

    #[test]
    fn nothing_printed_prints_nothing() {
        assert_eq!(forwarded(&[]), (vec![], 0));
    }

    #[test]
    fn bytes_that_are_no_text_pass() {
        assert_eq!(forwarded(&[b"\xff\x00\n"]).0, b"[3] \xff\x00\n");
    }

    #[test]
    fn endless_lines_are_cut() {
        let piece = vec![b'x'; 16 << 10];
        let pieces: Vec<&[u8]> = vec![&piece; 9];
        let (text, _) = forwarded(&pieces);
        let lines: Vec<_> = text.split(|byte| *byte == b'\n').map(<[u8]>::len).collect();
        assert_eq!(lines, [LONGEST_LINE + 4, LONGEST_LINE + 4, (16 << 10) + 4, 0]);
    }

    #[test]
    fn a_closed_stream_ends_it() {
        let error = forward("", Pieces(vec![b"a\n".to_vec(), b"b\n".to_vec()]), |_| Err(io::ErrorKind::BrokenPipe.into()));
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
