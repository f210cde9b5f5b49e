//! What a host prints, carried to where the job was started.

use std::io::{self, Read};
use std::os::fd::AsFd;

use collectives_launch::{Failure, Stream, Writer, carry};

/// Stands before a failure that a launcher tells the one that started it, on standard error.
pub(crate) const FAILURE: u8 = 0x1e;
/// Lines that could be failures are held back no longer than this; a failure is shorter.
const LONGEST_FAILURE: usize = 1 << 20;

/// Who hears of a failure that is told.
pub(crate) type Listener = Box<dyn Fn(Failure) + Send>;

/// Carries what a host prints to a stream of ours; a failure that its launcher tells there goes to a listener.
pub(crate) struct Carrier {
    writer: Writer,
    listener: Option<Listener>,
    /// The beginning of a line that may be a failure.
    held: Vec<u8>,
    is_inside: bool,
}

impl Carrier {
    /// The launcher there has put something before each line; `continued` stands before the rest of one that another host has interrupted.
    pub(crate) fn new(stream: Stream, continued: &str, listener: Option<Listener>) -> Self {
        Self { writer: Writer::new(stream, "", continued), listener, held: vec![], is_inside: false }
    }

    /// Carries all, to the end.
    pub(crate) fn carry(mut self, pipe: impl Read + AsFd) {
        let carried = carry(pipe, |text| self.take(text));
        // What nobody reads is nobody's loss.
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

    /// Tells the failure that was held back, or writes it where it is none.
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
