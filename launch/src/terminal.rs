//! Standard output and standard error with several writers, no two of which share a line.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use rustix::fs::fstat;

/// One of this program's own streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Output,
    /// Standard error.
    Error,
}

impl Stream {
    fn put(self, bytes: &[u8]) -> io::Result<()> {
        let mut stream: Box<dyn Write> = match self {
            Self::Output => Box::new(io::stdout().lock()),
            Self::Error => Box::new(io::stderr().lock()),
        };
        stream.write_all(bytes)?;
        stream.flush()
    }

    /// Returns the current line of this stream. Both streams share one if they lead to the same terminal, pipe or file.
    fn line(self) -> MutexGuard<'static, Line> {
        static LINES: [Mutex<Line>; 2] = [const { Mutex::new(Line { writer: 0, place: Place::Start }) }; 2];
        static IS_ONE: LazyLock<bool> = LazyLock::new(|| {
            let file = |status: rustix::fs::Stat| (status.st_dev, status.st_ino);
            let [output, error] = [fstat(rustix::stdio::stdout()), fstat(rustix::stdio::stderr())].map(|status| status.map(file));
            output.is_ok() && output == error
        });
        let line = &LINES[usize::from(self == Self::Error && !*IS_ONE)];
        // A panic can only have left a wrong place in a line.
        line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The position in the last line at which the next byte is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// At the start of an empty line.
    Start,
    /// At the start of the line, after a carriage return. The next text replaces the line.
    Returned,
    /// After text.
    Inside,
}

/// The last line, and who wrote it.
#[derive(Debug)]
struct Line {
    writer: u64,
    place: Place,
}

/// One of several writers to a stream. Each writer may write parts of lines.
#[derive(Debug)]
pub struct Writer {
    stream: Stream,
    number: u64,
    prefix: String,
    continued: String,
    is_inside: bool,
}

impl Writer {
    /// Creates a writer whose lines begin with `prefix`. After an interruption by another writer, the rest of a line
    /// begins with `continued`.
    pub fn new(stream: Stream, prefix: &str, continued: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { stream, number, prefix: prefix.to_owned(), continued: continued.to_owned(), is_inside: false }
    }

    /// Writes text in one piece. If another writer's line is unfinished, ends that line first.
    ///
    /// # Errors
    ///
    /// If the stream cannot be written.
    pub fn write(&mut self, text: &[u8]) -> io::Result<()> {
        let mut line = self.stream.line();
        let bytes = self.placed(&mut line, text);
        self.stream.put(&bytes)
    }

    /// Ends the last line if this writer wrote that line and the line is unfinished.
    ///
    /// # Errors
    ///
    /// If the stream cannot be written.
    pub fn end(&mut self) -> io::Result<()> {
        let mut line = self.stream.line();
        if line.writer != self.number || line.place == Place::Start {
            return Ok(());
        }
        line.place = Place::Start;
        self.stream.put(b"\n")
    }

    /// Returns the bytes to write for a text, with prefixes and line ends.
    fn placed(&mut self, line: &mut Line, text: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(text.len() + self.prefix.len());
        if line.writer != self.number && line.place != Place::Start {
            bytes.push(b'\n');
            line.place = Place::Start;
        }
        line.writer = self.number;
        for piece in text.split_inclusive(|byte| ends_line(*byte)) {
            // The prefix follows the codes that clear the line, which would clear the prefix too.
            let codes = if line.place == Place::Inside { 0 } else { clearing_codes(piece) };
            let (codes, piece) = piece.split_at(codes);
            bytes.extend_from_slice(codes);
            if piece.is_empty() {
                continue;
            }
            let end = piece.last().copied().filter(|byte| ends_line(*byte));
            let is_empty = end.is_some() && piece.len() == 1;
            if match line.place {
                Place::Start => !is_empty || end == Some(b'\n'),
                Place::Returned => !is_empty,
                Place::Inside => false,
            } {
                bytes.extend_from_slice(if self.is_inside { &self.continued } else { &self.prefix }.as_bytes());
            }
            bytes.extend_from_slice(piece);
            line.place = match end {
                None => Place::Inside,
                Some(b'\n') => Place::Start,
                Some(_) if is_empty && line.place == Place::Start => Place::Start,
                Some(_) => Place::Returned,
            };
            self.is_inside = end.is_none();
        }
        bytes
    }
}

/// Whether a byte ends a line, or returns to its beginning.
pub(super) fn ends_line(byte: u8) -> bool {
    matches!(byte, b'\n' | b'\r')
}

/// Returns the length of the codes at the beginning of a text that clear a terminal's line. Progress bars send them.
fn clearing_codes(text: &[u8]) -> usize {
    const CODES: [&[u8]; 4] = [b"\x1b[2K", b"\x1b[K", b"\x1b[0K", b"\x1b[1K"];
    let mut length = 0;
    while let Some(code) = CODES.into_iter().find(|code| text[length..].starts_with(code)) {
        length += code.len();
    }
    length
}

/// Writes a message to standard error, after the program's name. Writes it in one piece, because ranks also write to
/// standard error.
pub fn say(name: &str, text: &str) {
    // If standard error cannot be written, there is no other place to report it.
    let _ = Writer::new(Stream::Error, "", "").write(format!("{name}: {text}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the content of a stream after `pieces`: the index of each writer, and its text.
    fn written(writers: &mut [Writer], pieces: &[(usize, &str)]) -> String {
        let mut line = Line { writer: 0, place: Place::Start };
        let bytes: Vec<u8> = pieces.iter().flat_map(|(writer, text)| writers[*writer].placed(&mut line, text.as_bytes())).collect();
        String::from_utf8(bytes).unwrap()
    }

    fn ranks() -> [Writer; 2] {
        ["[0] ", "[1] "].map(|prefix| Writer::new(Stream::Output, prefix, prefix))
    }

    #[test]
    fn every_line_has_its_writer() {
        let pieces = [(0, "a\nb\n"), (1, "c\n\nd"), (1, "e\n"), (0, "f")];
        assert_eq!(written(&mut ranks(), &pieces), "[0] a\n[0] b\n[1] c\n[1] \n[1] de\n[0] f");
    }

    #[test]
    fn progress_goes_back_to_the_beginning_of_its_line() {
        let bar = [(0, "\r 10%"), (0, "\r 20%"), (0, "\r100%\n")];
        assert_eq!(written(&mut ranks(), &bar), "\r[0]  10%\r[0]  20%\r[0] 100%\n");
        assert_eq!(written(&mut ranks(), &[(0, "10%\r"), (0, "20%\r"), (0, "\n")]), "[0] 10%\r[0] 20%\r\n");
        assert_eq!(written(&mut ranks(), &[(0, "a\r\nb\r\n")]), "[0] a\r\n[0] b\r\n");
    }

    #[test]
    fn bars_that_clear_their_line_keep_its_rank() {
        // As indicatif draws, and then removes its bar.
        let bar = [(0, "\r\x1b[2K 10%"), (0, "\r\x1b[2K 20%"), (0, "\r\x1b[2K"), (0, "done\n")];
        assert_eq!(written(&mut ranks(), &bar), "\r\x1b[2K[0]  10%\r\x1b[2K[0]  20%\r\x1b[2K[0] done\n");
        // As tqdm removes its bar.
        let bar = [(0, "\r 50%|##"), (0, "\r       \r"), (1, "x\n")];
        assert_eq!(written(&mut ranks(), &bar), "\r[0]  50%|##\r[0]        \r\n[1] x\n");
    }

    #[test]
    fn nobody_writes_into_the_line_of_another() {
        let pieces = [(0, "load"), (1, "x\n"), (0, "ing"), (0, " done\n"), (1, "y\r"), (0, "z\n"), (1, "w\n")];
        assert_eq!(written(&mut ranks(), &pieces), "[0] load\n[1] x\n[0] ing done\n[1] y\r\n[0] z\n[1] w\n");
        let mut hosts = ["[a] ", "[b] "].map(|continued| Writer::new(Stream::Output, "", continued));
        let pieces = [(0, "[a 0] load"), (1, "[b 1] x\n"), (0, "ing\n[a 0] y\n")];
        assert_eq!(written(&mut hosts, &pieces), "[a 0] load\n[b 1] x\n[a] ing\n[a 0] y\n");
    }

    #[test]
    fn bytes_that_are_no_text_pass() {
        let mut line = Line { writer: 0, place: Place::Start };
        assert_eq!(ranks()[1].placed(&mut line, b"\xff\x00\n"), b"[1] \xff\x00\n");
    }
}
