//! Forwards a host's output to the host on which the job was started.

use std::io::{self, Read};
use std::os::fd::AsFd;

use collectives_launch::{Failure, Stream, Writer, carry};

/// The byte before a failure that a launcher reports to the one that started it, on standard error.
pub(crate) const FAILURE: u8 = 0x1e;
/// The most bytes of a line that are held back because it could be a failure. Failures are shorter.
const LONGEST_FAILURE: usize = 1 << 20;

/// Called with each failure that is reported.
pub(crate) type Listener = Box<dyn Fn(Failure) + Send>;

/// Forwards a host's output to one of our streams; a failure that its launcher reports goes to a listener.
pub(crate) struct Carrier {
    writer: Writer,
    listener: Option<Listener>,
    /// The beginning of a line that may be a failure.
    held: Vec<u8>,
    is_inside: bool,
}

impl Carrier {
    /// Creates a carrier. The host's launcher has already put a prefix before each line; `continued` stands before the
    /// rest of a line that another host has interrupted.
    pub(crate) fn new(stream: Stream, continued: &str, listener: Option<Listener>) -> Self {
        Self { writer: Writer::new(stream, "", continued), listener, held: vec![], is_inside: false }
    }

    /// Forwards everything until the end.
    pub(crate) fn carry(mut self, pipe: impl Read + AsFd) {
        let carried = carry(pipe, |text| self.take(text));
        // An error means that the output is not read any more.
        let _ = carried.and_then(|()| self.let_go()).and_then(|()| self.writer.end());
    }

    fn take(&mut self, text: &[u8]) -> io::Result<()> {
        if self.held.is_empty() && !text.contains(&FAILURE) {
            self.is_inside = !text.ends_with(b"\n");
            return self.writer.write(text);
        }
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            let may_be_one = self.listener.is_some() && !self.is_inside && line.starts_with(&[FAILURE]);
            self.is_inside = !line.ends_with(b"\n");
            if !may_be_one && self.held.is_empty() {
                self.writer.write(line)?;
                continue;
            }
            self.held.extend_from_slice(line);
            if !self.is_inside || self.held.len() > LONGEST_FAILURE {
                self.let_go()?;
            }
        }
        Ok(())
    }

    /// Reports the failure that was held back, or writes the text if it is not one.
    fn let_go(&mut self) -> io::Result<()> {
        let held = std::mem::take(&mut self.held);
        match self.listener.as_ref().zip(held.strip_prefix(&[FAILURE]).and_then(Failure::from_json)) {
            Some((hear, failure)) => hear(failure),
            None if held.is_empty() => {}
            None => self.writer.write(&held)?,
        }
        Ok(())
    }
}
