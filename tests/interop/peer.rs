//! Foreign programs, which end with the test that started them.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::common::programs;

/// Longer than anything here takes unless it hangs: a busy machine needs ten seconds to start a Python with PyTorch.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// Returns the reason for skipping a test that needs a part of what tests/interop/setup installs. Panics if
/// `COLLECTIVES_INTEROP_REQUIRE` names that part.
pub(crate) fn absent<T>(part: &str, why: String) -> Result<T, String> {
    let required = std::env::var("COLLECTIVES_INTEROP_REQUIRE").unwrap_or_default();
    assert!(!required.split_whitespace().any(|name| name == part), "COLLECTIVES_INTEROP_REQUIRE names {part}, but: {why}");
    Err(why)
}

/// Variables that launchers of an outer job set. The launchers under test must not see them.
const OF_OUTER_JOBS: [&str; 6] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];
/// Prefixes of other such variables.
const PREFIXES_OF_OUTER_JOBS: [&str; 7] = ["TORCHELASTIC_", "SLURM_", "SLURMD_", "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL"];

/// A Python that has PyTorch.
pub(crate) struct Python(PathBuf);

impl Python {
    /// Finds the Python that `COLLECTIVES_INTEROP_PYTHON` names, or the one that tests/interop/setup installed.
    pub(crate) fn find() -> Result<Self, String> {
        if let Some(program) = std::env::var_os("COLLECTIVES_INTEROP_PYTHON").map(PathBuf::from) {
            return if program.exists() { Ok(Self(program)) } else { absent("torch", format!("there is no {}", program.display())) };
        }
        let made = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/interop");
        // An interrupted installation leaves only the interpreter.
        if !made.join(format!(".complete-{}", version())).exists() {
            return absent("torch", format!("no PyTorch {} in {} (tests/interop/setup installs it)", version(), made.display()));
        }
        Ok(Self(made.join("bin/python")))
    }

    /// Whether its CUDA libraries are the stand-ins of no_device.c.
    pub(crate) fn has_stand_ins(&self) -> bool {
        let found = Command::new(&self.0).args(["-c", "import importlib.util as u; print(u.find_spec('torch').origin)"]).output().unwrap();
        let module = PathBuf::from(String::from_utf8_lossy(&found.stdout).trim());
        module.with_file_name("lib").join("libno_device.so").exists()
    }

    pub(crate) fn program(&self) -> &Path {
        &self.0
    }

    /// Returns the command for a script in this folder.
    pub(crate) fn script(&self, name: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.0);
        command.args(["-W", "ignore"]).arg(script(name)).args(arguments);
        command
    }

    /// Returns the command for PyTorch's own launcher.
    pub(crate) fn torchrun<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Command {
        let mut command = Command::new(&self.0);
        command.args(["-W", "ignore", "-m", "torch.distributed.run"]).args(arguments).env("OMP_NUM_THREADS", "1");
        command
    }
}

/// Returns the version that tests/interop/setup installs.
fn version() -> &'static str {
    include_str!("setup").lines().find_map(|line| line.strip_prefix("version=")).unwrap()
}

/// Whether launchers set this variable for their ranks.
fn is_of_an_outer_job(name: &OsStr) -> bool {
    let is = |name: &str| OF_OUTER_JOBS.contains(&name) || PREFIXES_OF_OUTER_JOBS.iter().any(|prefix| name.starts_with(prefix));
    name.to_str().is_some_and(is)
}

/// Returns the path of a script.
pub(crate) fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop").join(name)
}

/// Returns the path of a built example.
pub(crate) fn example(name: &str) -> PathBuf {
    programs::example(name).unwrap()
}

/// A running program in its own process group. Dropping this value kills it.
pub(crate) struct Peer {
    what: String,
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    errors: Option<JoinHandle<String>>,
    printed: String,
}

impl Peer {
    /// Starts a program and reads its output from the beginning.
    pub(crate) fn start(command: &mut Command) -> Self {
        Self::start_with(command, Stdio::piped())
    }

    /// Starts a program that reads no input. MPICH's launcher fails now and then if its input ends while its ranks do.
    pub(crate) fn start_without_input(command: &mut Command) -> Self {
        Self::start_with(command, Stdio::null())
    }

    fn start_with(command: &mut Command, input: Stdio) -> Self {
        let what = format!("{command:?}");
        for (name, _) in std::env::vars_os() {
            if is_of_an_outer_job(&name) && !command.get_envs().any(|(set, _)| set == name) {
                command.env_remove(name);
            }
        }
        let streams = command.stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = streams.spawn().unwrap_or_else(|error| panic!("{what}: {error}"));
        let (sender, lines) = channel();
        let out = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let mut err = child.stderr.take().unwrap();
        let errors = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            drop(err.read_to_end(&mut bytes));
            String::from_utf8_lossy(&bytes).into_owned()
        });
        let input = child.stdin.take();
        Self { what, child, input, lines, errors: Some(errors), printed: String::new() }
    }

    /// Waits for the next line that begins with `word` and returns the rest of it.
    pub(crate) fn expect(&mut self, word: &str) -> String {
        let deadline = Instant::now() + LONG;
        while let Ok(line) = self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            self.printed.push_str(&format!("{line}\n"));
            if let Some(rest) = line.strip_prefix(word) {
                return rest.trim().to_owned();
            }
        }
        self.kill();
        let errors = self.errors();
        panic!("{} did not print {word:?}:\n{}\n{errors}", self.what, self.printed);
    }

    /// Writes a line to the program and waits for the answer that begins with `word`.
    pub(crate) fn ask(&mut self, line: &str, word: &str) -> String {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
        self.expect(word)
    }

    /// Kills the program without giving it time to clean up.
    pub(crate) fn kill(&mut self) {
        if let Some(group) = Pid::from_raw(self.child.id().cast_signed()) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        drop(self.child.wait());
    }

    /// Returns what the program wrote to standard error, once it has ended.
    fn errors(&mut self) -> String {
        self.errors.take().map(|errors| errors.join().unwrap()).unwrap_or_default()
    }

    /// Waits until the program ends. Returns whether it succeeded, its output and its errors.
    pub(crate) fn end(mut self) -> (bool, String, String) {
        drop(self.input.take());
        let deadline = Instant::now() + LONG;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => self.printed.push_str(&format!("{line}\n")),
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                    self.kill();
                    let errors = self.errors();
                    panic!("{} does not end:\n{}\n{errors}", self.what, self.printed);
                }
            }
        }
        let status = self.child.wait().unwrap();
        let errors = self.errors();
        (status.success(), std::mem::take(&mut self.printed), errors)
    }

    /// Waits until the program ends, which must be successful, and returns its output.
    #[track_caller]
    pub(crate) fn finish(self) -> String {
        let what = self.what.clone();
        let (success, printed, errors) = self.end();
        assert!(success, "{what} failed:\n{printed}\n{errors}");
        printed
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
    }
}
