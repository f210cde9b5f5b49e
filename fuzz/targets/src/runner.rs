//! Tries targets with known inputs and mutations of them, for a given time, on any toolchain.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use crate::{Mutator, Target};

/// The wall-clock time after which an input is considered to hang.
const HANG: Duration = Duration::from_secs(30);

/// An input for which a property does not hold.
#[derive(Debug)]
pub struct Found {
    pub target: &'static str,
    pub file: PathBuf,
    pub what: String,
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (target, file) = (self.target, self.file.display());
        write!(f, "{target}: {}\nagain: cargo run --release -p fuzz-targets -- --target {target} --input {file}", self.what)
    }
}

/// Returns the folder of a target's known inputs in the repository.
pub fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus").join(target)
}

/// Returns a target's known inputs, sorted by file name.
///
/// # Errors
///
/// They cannot be read.
pub fn known(target: &str) -> io::Result<Vec<Vec<u8>>> {
    let mut paths: Vec<PathBuf> = fs::read_dir(corpus(target))?.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<_>>()?;
    paths.sort();
    paths.iter().map(fs::read).collect()
}

/// Tries all known inputs of a target, and then mutations of them until `time` has passed.
///
/// Returns the number of inputs tried, or the one for which a property did not hold. That input is then in a file in
/// `folder`. An input that does not end causes the process to exit.
///
/// # Errors
///
/// Known inputs cannot be read, or a file cannot be written.
pub fn run(target: &'static Target, time: Duration, seed: u64, folder: &Path) -> io::Result<Result<u64, Found>> {
    let known = known(target.name)?;
    let mut bench = Bench::new(target, folder)?;
    for input in &known {
        if let Err(what) = bench.attempt(input)? {
            return bench.keep(input, what).map(Err);
        }
    }
    let (began, mut mutator) = (Instant::now(), Mutator::new(seed));
    while began.elapsed() < time {
        let input = mutator.input(&known);
        if let Err(what) = bench.attempt(&input)? {
            return bench.keep(&input, what).map(Err);
        }
    }
    fs::remove_file(&bench.path)?;
    Ok(Ok(bench.tried.load(Ordering::Relaxed)))
}

/// A target being tried. The current input is in a file, where it can be found if the process dies.
struct Bench {
    target: &'static Target,
    path: PathBuf,
    file: File,
    tried: Arc<AtomicU64>,
    /// Stops the watching thread when it is dropped.
    _watched: Sender<()>,
}

impl Bench {
    fn new(target: &'static Target, folder: &Path) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let path = folder.join(format!("{}-at-work-{}", target.name, std::process::id()));
        let (file, tried) = (File::create(&path)?, Arc::new(AtomicU64::new(0)));
        let (watched, ended) = mpsc::channel();
        let (count, shown) = (Arc::clone(&tried), path.clone());
        std::thread::spawn(move || {
            let mut last = u64::MAX;
            while ended.recv_timeout(HANG) == Err(RecvTimeoutError::Timeout) {
                let now = count.load(Ordering::Relaxed);
                if now == last {
                    eprintln!("{}: the input in {} does not end", target.name, shown.display());
                    std::process::exit(1);
                }
                last = now;
            }
        });
        Ok(Self { target, path, file, tried, _watched: watched })
    }

    /// Tries one input; returns a description of a property that did not hold.
    fn attempt(&mut self, input: &[u8]) -> io::Result<Result<(), String>> {
        self.file.write_all_at(input, 0)?;
        self.file.set_len(input.len() as u64)?;
        let outcome = catch_unwind(AssertUnwindSafe(|| self.target.check(input)));
        self.tried.fetch_add(1, Ordering::Relaxed);
        Ok(outcome.map_err(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            text.unwrap_or("a panic without words").to_owned()
        }))
    }

    /// Renames the current file to a permanent name.
    fn keep(&self, input: &[u8], what: String) -> io::Result<Found> {
        let mut hasher = DefaultHasher::new();
        input.hash(&mut hasher);
        let file = self.path.with_file_name(format!("{}-{:016x}", self.target.name, hasher.finish()));
        fs::rename(&self.path, &file)?;
        Ok(Found { target: self.target.name, file, what })
    }
}
