//! Forwards a host's output to the host on which the job was started.

use std::io::{self, Read};
use std::os::fd::AsFd;

use collectives_launch::{Failure, Stream, Writer, carry};

/// The byte before a line that a launcher reports to the one that started it, on standard error.
pub(crate) const REPORT: u8 = 0x1e;
/// The report of a launcher that has read its order.
pub(crate) const STARTED: &[u8] = b"started";
/// The most bytes of a line that are held back because it could be a report. Reports are shorter.
const LONGEST_REPORT: usize = 1 << 20;

/// What a launcher reports.
pub(crate) enum Report {
    /// It has read its order.
    Started,
    /// A rank has failed.
    Failed(Failure),
}

impl Report {
    fn read(line: &[u8]) -> Option<Self> {
        let text = line.strip_prefix(&[REPORT])?;
        if text.trim_ascii_end() == STARTED { Some(Self::Started) } else { Failure::from_json(text).map(Self::Failed) }
    }
}

/// Called with each report.
pub(crate) type Listener = Box<dyn Fn(Report) + Send>;

/// Forwards a host's output to one of our streams; what its launcher reports goes to a listener.
pub(crate) struct Carrier {
    writer: Writer,
    listener: Option<Listener>,
    /// The beginning of a line that may be a report.
    held: Vec<u8>,
    is_inside: bool,
}

impl Carrier {
    /// Creates a carrier. The host's launcher has already put a prefix before each line; `continued` stands before the
    /// rest of a line that another host has interrupted.
    pub(crate) fn new(stream: Stream, continued: &str, listener: Option<Listener>) -> Self {
        Self { writer: Writer::new(stream, "", continued), listener, held: vec![], is_inside: false }
    }

    /// Forwards everything until the end, or until it cannot be written.
    pub(crate) fn carry(mut self, pipe: impl Read + AsFd) -> io::Result<()> {
        let carried = carry(pipe, |text| self.take(text));
        carried.and_then(|()| self.let_go()).and_then(|()| self.writer.end())
    }

    fn take(&mut self, text: &[u8]) -> io::Result<()> {
        if self.held.is_empty() && !text.contains(&REPORT) {
            self.is_inside = !text.ends_with(b"\n");
            return self.writer.write(text);
        }
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            let may_be_one = self.listener.is_some() && !self.is_inside && line.starts_with(&[REPORT]);
            self.is_inside = !line.ends_with(b"\n");
            if !may_be_one && self.held.is_empty() {
                self.writer.write(line)?;
                continue;
            }
            self.held.extend_from_slice(line);
            if !self.is_inside || self.held.len() > LONGEST_REPORT {
                self.let_go()?;
            }
        }
        Ok(())
    }

    /// Passes on the report that was held back, or writes the text if it is not one.
    fn let_go(&mut self) -> io::Result<()> {
        let held = std::mem::take(&mut self.held);
        match self.listener.as_ref().zip(Report::read(&held)) {
            Some((hear, report)) => hear(report),
            None if held.is_empty() => {}
            None => self.writer.write(&held)?,
        }
        Ok(())
    }
}
