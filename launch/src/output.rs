//! What ranks print, put together line by line.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Child, Stdio};
use std::str::FromStr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// A line longer than this is cut: no rank can make the launcher hold more.
const LONGEST_LINE: usize = 64 << 10;
/// How long to wait, once all ranks have ended, for output that something they left behind still holds open.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Where the ranks' output goes on the terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Each line behind the job's prefix, on the stream it was written to.
    Prefixed,
    /// As it comes, to the launcher's own streams.
    Inherited,
    /// Rank 0's to the launcher's own streams; the others' to standard error, each line behind the prefix.
    FirstRank,
}

/// Standard output, standard error, both or none, for each rank of a host: `3` for all, `0:1,1:2` by local rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Streams {
    all: u8,
    of_rank: Vec<(usize, u8)>,
}

impl Streams {
    /// Those of a rank: 1 for standard output, 2 for standard error, 3 for both.
    fn of(&self, local_rank: usize) -> u8 {
        self.of_rank.iter().find(|(rank, _)| *rank == local_rank).map_or(self.all, |(_, streams)| *streams)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.all == 0 && self.of_rank.iter().all(|(_, streams)| *streams == 0)
    }
}

impl FromStr for Streams {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is none of 0 (none), 1 (stdout), 2 (stderr), 3 (both), or a list of those by local rank, as 0:1,1:2");
        let streams = |text: &str| text.parse().ok().filter(|streams| *streams <= 3).ok_or_else(wrong);
        if !text.contains(':') {
            return Ok(Self { all: streams(text)?, of_rank: vec![] });
        }
        let pair = |pair: &str| {
            let (rank, text) = pair.split_once(':').ok_or_else(wrong)?;
            Ok((rank.parse().map_err(|_| wrong())?, streams(text)?))
        };
        Ok(Self { all: 0, of_rank: text.split(',').map(pair).collect::<Result<_, String>>()? })
    }
}

/// What of the ranks' output is written to files, `FOLDER/attempt_A/R/stdout.log` and `stderr.log` for local rank R, and what is shown.
#[derive(Debug, Clone, Default)]
pub struct Logs {
    /// Streams that go to files, and not to the terminal.
    pub redirects: Streams,
    /// Streams that go to both.
    pub tee: Streams,
    /// The local ranks whose output is shown; all where it is none.
    pub shown: Option<Vec<usize>>,
}

/// What becomes of one stream of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Way {
    file: bool,
    shown: bool,
}

impl Logs {
    fn way(&self, local_rank: usize, stream: u8) -> Way {
        let has = |streams: &Streams| streams.of(local_rank) & stream != 0;
        let shown = self.shown.as_ref().is_none_or(|ranks| ranks.contains(&local_rank));
        Way { file: has(&self.redirects) || has(&self.tee), shown: shown && (has(&self.tee) || !has(&self.redirects)) }
    }
}

/// The streams of one rank: what its process is given, and where the pipes among that lead.
pub(super) struct Ends {
    pub(super) stdout: Stdio,
    pub(super) stderr: Stdio,
    /// Files to which what comes through a pipe is copied.
    pub(super) copies: [Option<File>; 2],
}

impl Ends {
    /// Makes the files that are asked for, in the rank's folder.
    pub(super) fn open(output: Output, logs: &Logs, local_rank: usize, folder: &Path) -> io::Result<Self> {
        let ways = [1, 2].map(|stream| logs.way(local_rank, stream));
        let [first, second] = [("stdout.log", ways[0]), ("stderr.log", ways[1])]
            .map(|(name, way)| if way.file { File::create(folder.join(name)).map(Some) } else { Ok(None) });
        let (mut copies, mut streams) = ([first?, second?], [Stdio::piped(), Stdio::piped()]);
        let inherits = output == Output::Inherited || (output == Output::FirstRank && local_rank == 0);
        for stream in 0..2 {
            let is_hidden = output == Output::FirstRank && local_rank > 0 && stream == 0;
            streams[stream] = match (copies[stream].take(), ways[stream].shown && !is_hidden) {
                (None, true) if inherits => Stdio::inherit(),
                (None, false) => Stdio::null(),
                (Some(file), false) => file.into(),
                (copy, true) => {
                    copies[stream] = copy;
                    Stdio::piped()
                }
            };
        }
        let [stdout, stderr] = streams;
        Ok(Self { stdout, stderr, copies })
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
    /// Carries what this rank prints, as far as it was given pipes, each line behind `prefix`.
    pub(super) fn attach(&mut self, prefix: &str, copies: [Option<File>; 2], child: &mut Child) {
        let [to_stdout, to_stderr] = copies;
        if let Some(pipe) = child.stdout.take() {
            self.carry(prefix, Copied { pipe, copy: to_stdout }, io::stdout);
        }
        if let Some(pipe) = child.stderr.take() {
            self.carry(prefix, Copied { pipe, copy: to_stderr }, io::stderr);
        }
    }

    fn carry<W: Write + 'static>(&mut self, prefix: &str, pipe: impl Read + Send + 'static, stream: fn() -> W) {
        let (done, prefix) = (self.done.clone(), prefix.to_owned());
        self.started += 1;
        thread::spawn(move || {
            // When our own stream is closed there is nobody to tell; dropping the pipe tells the rank.
            let _ = forward(&prefix, pipe, |bytes| {
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

/// A pipe all of which is written to a file, too.
struct Copied<R> {
    pipe: R,
    copy: Option<File>,
}

impl<R: Read> Read for Copied<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.pipe.read(into)?;
        // A file that takes no more is no reason to lose what is shown.
        self.copy = self.copy.take().filter(|file| {
            let mut file = file;
            file.write_all(&into[..read]).is_ok()
        });
        Ok(read)
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
    fn streams_are_chosen_for_all_or_by_rank() {
        let of = |text: &str| [0, 1, 2].map(|rank| text.parse::<Streams>().unwrap().of(rank));
        assert_eq!((of("0"), of("3"), of("0:1,1:2")), ([0; 3], [3; 3], [1, 2, 0]));
        for wrong in ["", "4", "-1", "x", "0:4", "0:", ":1", "0:1,", "0-1"] {
            assert!(wrong.parse::<Streams>().unwrap_err().contains("0:1,1:2"), "{wrong}");
        }
    }

    #[test]
    fn what_is_redirected_is_not_shown_and_what_is_teed_is() {
        let logs = Logs { redirects: "3".parse().unwrap(), tee: "0:1".parse().unwrap(), shown: Some(vec![0]) };
        assert_eq!(logs.way(0, 1), Way { file: true, shown: true });
        assert_eq!(logs.way(0, 2), Way { file: true, shown: false });
        assert_eq!(Logs::default().way(7, 2), Way { file: false, shown: true });
        assert_eq!(Logs { shown: Some(vec![0]), ..Logs::default() }.way(1, 1), Way { file: false, shown: false });
    }

    #[test]
    fn a_closed_stream_ends_it() {
        let error = forward("", Pieces(vec![b"a\n".to_vec(), b"b\n".to_vec()]), |_| Err(io::ErrorKind::BrokenPipe.into()));
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
