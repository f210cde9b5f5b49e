//! Forwards what ranks print: whole lines if they arrive at once, partial lines if not.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::process::{ChildStderr, ChildStdout, Stdio};
use std::str::FromStr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::terminal::{Stream, Writer, ends_line, say};

/// The longest part of a line that is held back, which bounds the launcher's memory.
const LONGEST_LINE: usize = 64 << 10;
/// How long the beginning of a line is held back; usually its end arrives at once.
const PARTIAL: Duration = Duration::from_millis(100);
/// How long to wait, once all ranks have ended, for output that a process they left behind still holds open.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How the ranks' output is shown on the terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Each line is shown with the job's prefix before it, on the stream to which the rank wrote the line.
    Prefixed,
    /// Output goes unchanged to the launcher's own streams. Exception: streams in [`Logs::tee`] are shown as with
    /// `Prefixed`.
    Inherited,
    /// The output of this host's first rank is shown as with `Inherited`. Of the other ranks, only standard error is
    /// shown, with the prefix before each line.
    FirstRank,
}

/// The chosen streams of each rank of a host: 0 for none, 1 for standard output, 2 for standard error, 3 for both. The
/// text `3` chooses both streams of all ranks. The text `0:1,1:2` chooses streams by local rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Streams {
    all: u8,
    of_rank: Vec<(usize, u8)>,
}

impl Streams {
    /// Returns a rank's streams: 1 for standard output, 2 for standard error, 3 for both.
    fn of(&self, local_rank: usize) -> u8 {
        self.of_rank.iter().find(|(rank, _)| *rank == local_rank).map_or(self.all, |(_, streams)| *streams)
    }

    /// Whether no stream is chosen.
    pub fn is_empty(&self) -> bool {
        self.all == 0 && self.of_rank.iter().all(|(_, streams)| *streams == 0)
    }
}

impl FromStr for Streams {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?}: expected 0 (none), 1 (stdout), 2 (stderr), 3 (both), or a list of these by local rank, as in 0:1,1:2");
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

/// Which output is written to files, and which is shown. In attempt A, the files of local rank R are `stdout.log` and
/// `stderr.log` in `FOLDER/attempt_A/R/`.
#[derive(Debug, Clone, Default)]
pub struct Logs {
    /// Streams that go to files, and not to the terminal.
    pub redirects: Streams,
    /// Streams that go to files and to the terminal.
    pub tee: Streams,
    /// The local ranks whose output is shown; all if `None`.
    pub shown: Option<Vec<usize>>,
}

/// The destinations of one stream of a rank.
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

/// The streams of one rank: what its process gets, and the files to which pipes are copied.
pub(super) struct Ends {
    pub(super) stdout: Stdio,
    pub(super) stderr: Stdio,
    /// Files to which output from a pipe is copied.
    pub(super) copies: [Option<File>; 2],
}

impl Ends {
    /// Creates the requested files in the rank's folder, which must exist if there are any.
    pub(super) fn open(output: Output, logs: &Logs, local_rank: usize, folder: Option<&Path>) -> io::Result<Self> {
        let ways = [1, 2].map(|stream| logs.way(local_rank, stream));
        let [first, second] = [("stdout.log", ways[0]), ("stderr.log", ways[1])].map(|(name, way)| match folder.filter(|_| way.file) {
            Some(folder) => File::create(folder.join(name)).map(Some),
            None => Ok(None),
        });
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

/// The threads that forward the ranks' output.
pub(super) struct Forwarders {
    started: usize,
    done: Sender<io::Result<()>>,
    finished: Receiver<io::Result<()>>,
}

impl Default for Forwarders {
    fn default() -> Self {
        let (done, finished) = channel();
        Self { started: 0, done, finished }
    }
}

impl Forwarders {
    /// Forwards the output from a rank's pipes, with `prefix` before each line.
    pub(super) fn attach(&mut self, prefix: &str, copies: [Option<File>; 2], pipes: Pipes) -> io::Result<()> {
        let [to_stdout, to_stderr] = copies;
        if let Some(pipe) = pipes.0 {
            self.carry(Writer::new(Stream::Output, prefix, prefix), Copied { pipe, copy: to_stdout })?;
        }
        if let Some(pipe) = pipes.1 {
            self.carry(Writer::new(Stream::Error, prefix, prefix), Copied { pipe, copy: to_stderr })?;
        }
        Ok(())
    }

    fn carry(&mut self, mut writer: Writer, pipe: impl Pipe + Send + 'static) -> io::Result<()> {
        let done = self.done.clone();
        thread::Builder::new().name("output".into()).spawn(move || {
            // Dropping the pipe closes the rank's.
            let _ = done.send(forward(pipe, |text| writer.write(text)).and_then(|()| writer.end()));
        })?;
        self.started += 1;
        Ok(())
    }

    /// Waits until everything that ranks printed has been forwarded. Returns why some could not be, if this process still
    /// has a reader.
    pub(super) fn finish(self) -> Option<io::Error> {
        let (until, mut failed) = (Instant::now() + LAST_WORDS, None);
        for _ in 0..self.started {
            match self.finished.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Err(error)) if error.kind() != io::ErrorKind::BrokenPipe => failed = Some(error),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        failed
    }
}

/// The pipes into which a rank prints.
pub(super) type Pipes = (Option<ChildStdout>, Option<ChildStderr>);

/// A readable stream with a timed wait.
trait Pipe: Read {
    /// Whether input, or its end, arrives before `then`.
    fn comes_before(&self, then: Instant) -> bool;
}

/// A pipe whose content is also written to a file.
struct Copied<R> {
    pipe: R,
    copy: Option<File>,
}

impl<R: Read> Read for Copied<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.pipe.read(into)?;
        // If the file cannot be written, output is still shown.
        if let Some(error) = self.copy.as_mut().and_then(|file| file.write_all(&into[..read]).err()) {
            let path = self.copy.take().and_then(|file| std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok());
            say("log files", &format!("{} ends here: {error}", path.unwrap_or_default().display()));
        }
        Ok(read)
    }
}

impl<R: Read + AsFd> Pipe for Copied<R> {
    fn comes_before(&self, then: Instant) -> bool {
        let left = then.saturating_duration_since(Instant::now());
        // At most a fraction of a second.
        let limit = Timespec::try_from(left).unwrap_or_default();
        // If polling fails, the next read returns the error.
        !left.is_zero() && poll(&mut [PollFd::new(&self.pipe, PollFlags::IN)], Some(&limit)) != Ok(0)
    }
}

/// Forwards everything from `pipe` to `take`, several whole lines at a time. A line is forwarded in pieces if its end
/// does not arrive within 100 ms, or if at least 64 KiB of output wait to be forwarded.
///
/// # Errors
///
/// If `pipe` cannot be read, or if `take` returns an error.
pub fn carry(pipe: impl Read + AsFd, take: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    forward(Copied { pipe, copy: None }, take)
}

/// Forwards everything from `pipe`, several whole lines at a time. A line is forwarded in pieces if its end does not
/// arrive within [`PARTIAL`], or if at least [`LONGEST_LINE`] bytes wait to be forwarded.
fn forward(mut pipe: impl Pipe, mut take: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut pending: Vec<u8> = Vec::new();
    let mut chunk = [0; 16 << 10];
    let mut held_since = Instant::now();
    loop {
        if !pending.is_empty() && !pipe.comes_before(held_since + PARTIAL) {
            take(&pending)?;
            pending.clear();
        }
        let read = match pipe.read(&mut chunk) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if pending.is_empty() {
            held_since = Instant::now();
        }
        pending.extend_from_slice(&chunk[..read]);
        let whole = pending.iter().rposition(|byte| ends_line(*byte)).map_or(0, |end| end + 1);
        let ready = if read == 0 || pending.len() >= LONGEST_LINE { pending.len() } else { whole };
        if ready > 0 {
            take(&pending[..ready])?;
            pending.drain(..ready);
            held_since = Instant::now();
        }
        if read == 0 {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns one piece for each read. An empty piece means that nothing arrives for a while.
    struct Pieces(Vec<Vec<u8>>);

    impl Read for Pieces {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let Some(place) = self.0.iter().position(|piece| !piece.is_empty()) else { return Ok(0) };
            let piece = self.0.drain(..=place).next_back().unwrap();
            into[..piece.len()].copy_from_slice(&piece);
            Ok(piece.len())
        }
    }

    impl Pipe for Pieces {
        fn comes_before(&self, _: Instant) -> bool {
            self.0.first().is_none_or(|piece| !piece.is_empty())
        }
    }

    fn forwarded(pieces: &[&str]) -> Vec<String> {
        let mut taken = Vec::new();
        let pieces = Pieces(pieces.iter().map(|piece| piece.as_bytes().to_vec()).collect());
        forward(pieces, |bytes| {
            taken.push(String::from_utf8(bytes.to_vec()).unwrap());
            Ok(())
        })
        .unwrap();
        taken
    }

    #[test]
    fn lines_are_carried_whole_and_together() {
        assert_eq!(forwarded(&["a\nb\nc", "d\n", "\n", "last"]), ["a\nb\n", "cd\n", "\n", "last"]);
        assert_eq!(forwarded(&[]), [""; 0]);
    }

    #[test]
    fn a_line_whose_end_does_not_come_is_carried_without_it() {
        assert_eq!(forwarded(&["load", "ing", "", " done\n"]), ["loading", " done\n"]);
        assert_eq!(forwarded(&["10%\r", "20%", "", "\r", "30%"]), ["10%\r", "20%", "\r", "30%"]);
    }

    #[test]
    fn endless_lines_are_not_held_back() {
        let piece = "x".repeat(16 << 10);
        let lengths: Vec<_> = forwarded(&[&*piece; 9]).iter().map(String::len).collect();
        assert_eq!(lengths, [LONGEST_LINE, LONGEST_LINE, 16 << 10]);
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
        let error = forward(Pieces(vec![b"a\n".to_vec(), b"b\n".to_vec()]), |_| Err(io::ErrorKind::BrokenPipe.into()));
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
