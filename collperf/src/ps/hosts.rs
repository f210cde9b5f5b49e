//! Asks other hosts: runs `collperf ps --json` there.

use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::document::Document;

/// The time that a connection may take, in addition to the questions.
const CONNECTING: Duration = Duration::from_secs(10);
/// The most bytes of an answer, and of a message.
const MOST: u64 = 256 << 20;

/// How often a command that has closed its output is asked whether it has ended.
const ENDED_EVERY: Duration = Duration::from_millis(5);
/// How long the messages of a command that has ended are waited for. Another process may hold their pipe.
const MESSAGES: Duration = Duration::from_millis(200);

/// A host that was asked.
struct Asked<'a> {
    host: &'a str,
    child: Child,
    text: Receiver<Vec<u8>>,
    messages: Receiver<Vec<u8>>,
    /// How long all may take.
    limit: Duration,
}

/// The way in which other hosts are asked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Way<'a> {
    /// The command that runs a command on another host.
    pub(super) ssh: &'a str,
    /// The path of collperf there.
    pub(super) collperf: &'a Path,
    /// The time that a rank's answer may take.
    pub(super) limit: Duration,
}

/// Asks all hosts at once, and returns their documents, or why there is none.
pub(super) fn ask_all(hosts: &[String], way: Way<'_>) -> Vec<Result<Vec<Document>, String>> {
    let until = Instant::now() + way.limit + CONNECTING;
    let asked: Vec<_> = hosts.iter().map(|host| way.ask(host)).collect();
    asked.into_iter().map(|asked| asked?.answer(until)).collect()
}

impl Way<'_> {
    fn ask<'a>(&self, host: &'a str) -> Result<Asked<'a>, String> {
        if !is_host(host) {
            return Err(format!(
                "{host:?} is not a host: expected letters (A-Z, a-z), digits and the characters @ . _ : % -, and no - at its beginning"
            ));
        }
        let mut words = self.ssh.split_whitespace();
        let mut command = Command::new(words.next().unwrap_or("ssh"));
        let collperf = format!("'{}'", self.collperf.to_string_lossy().replace('\'', r"'\''"));
        command.args(words).arg(host).arg(format!("{collperf} ps --json --timeout {}", self.limit.as_secs_f64()));
        let failed = |error| format!("{host}: starting {:?}: {error}", self.ssh);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(failed)?;
        let (text, messages) = (child.stdout.take(), child.stderr.take());
        let mut asked = Asked { host, child, text: channel().1, messages: channel().1, limit: self.limit + CONNECTING };
        asked.text = all_of(text).map_err(failed)?;
        asked.messages = all_of(messages).map_err(failed)?;
        Ok(asked)
    }
}

/// Reads a stream to its end in a thread of its own.
fn all_of(stream: Option<impl Read + Send + 'static>) -> io::Result<Receiver<Vec<u8>>> {
    let (sender, bytes) = channel();
    let read = move || {
        let mut all = Vec::new();
        let _ = stream.map(|stream| stream.take(MOST).read_to_end(&mut all));
        let _ = sender.send(all);
    };
    thread::Builder::new().name("host".to_owned()).spawn(read)?;
    Ok(bytes)
}

impl Asked<'_> {
    fn answer(mut self, until: Instant) -> Result<Vec<Document>, String> {
        let left = || until.saturating_duration_since(Instant::now());
        let late = || format!("{}: no answer within {:.0} s", self.host, self.limit.as_secs_f64());
        let text = self.text.recv_timeout(left()).map_err(|_| late())?;
        let ended = loop {
            match self.child.try_wait() {
                Ok(None) if left().is_zero() => return Err(late()),
                Ok(None) => thread::sleep(ENDED_EVERY),
                Ok(Some(status)) => break status,
                Err(error) => return Err(format!("{}: {error}", self.host)),
            }
        };
        let messages = self.messages.recv_timeout(left().min(MESSAGES)).unwrap_or_default();
        let messages = String::from_utf8_lossy(&messages);
        let said = if messages.trim().is_empty() { String::new() } else { format!(": {}", messages.trim()) };
        if ended.success() {
            Document::read_all(&text).map_err(|error| format!("{}: {error}{said}", self.host))
        } else {
            Err(format!("{}: collperf ended there with {ended}{said}", self.host))
        }
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        // Both fail if it has ended, as it should have.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a text can be a host, and has no meaning to a shell or to ssh's flags.
fn is_host(text: &str) -> bool {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "@._:%-".contains(letter);
    !text.is_empty() && !text.starts_with('-') && text.chars().all(is_plain)
}
