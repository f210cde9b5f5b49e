//! Asks other hosts: runs `collperf ps --json` there.

use std::io::Read;
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

/// A host that was asked.
struct Asked<'a> {
    host: &'a str,
    child: Child,
    output: Receiver<(Vec<u8>, String)>,
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
        let (sender, output) = channel();
        if let (Some(text), Some(messages)) = (child.stdout.take(), child.stderr.take()) {
            let read = move || {
                let (mut bytes, mut said) = (Vec::new(), Vec::new());
                // Messages are short, and fit into the pipe while the answer is read.
                let _ = text.take(MOST).read_to_end(&mut bytes);
                let _ = messages.take(MOST).read_to_end(&mut said);
                let _ = sender.send((bytes, String::from_utf8_lossy(&said).trim().to_owned()));
            };
            thread::Builder::new().name("host".to_owned()).spawn(read).map_err(failed)?;
        }
        Ok(Asked { host, child, output })
    }
}

impl Asked<'_> {
    fn answer(mut self, until: Instant) -> Result<Vec<Document>, String> {
        let Ok((text, messages)) = self.output.recv_timeout(until.saturating_duration_since(Instant::now())) else {
            return Err(format!("{}: no answer within {:.0} s", self.host, CONNECTING.as_secs_f64()));
        };
        let said = if messages.is_empty() { String::new() } else { format!(": {messages}") };
        match self.child.wait() {
            Ok(status) if status.success() => Document::read_all(&text).map_err(|error| format!("{}: {error}{said}", self.host)),
            Ok(status) => Err(format!("{}: collperf ended there with {status}{said}", self.host)),
            Err(error) => Err(format!("{}: {error}", self.host)),
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
