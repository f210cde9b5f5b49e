//! The folder of all checkpoints. Names, publishes and removes the folders of checkpoints in it.
//!
//! A checkpoint is created under a temporary name, which begins with a dot. A rename publishes it, and replaces an
//! older checkpoint of the same step. Before a checkpoint is removed, it is renamed too. So if processes are killed,
//! every checkpoint is still complete. Folders with temporary names may remain, and the next save removes them. That
//! save renames them first, for two reasons. If another save runs at the same time, which is not allowed, the other
//! save then fails at its rename. And no folder has a checkpoint's name while files in it are removed.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use super::file::{failed, malformed, read_all, sync_folder, write_new};
use super::index::{self, digits};
use collectives::{Error, Result};

/// The file of rank 0 that other ranks must see, in the folder of an unfinished checkpoint.
const MARKER: &str = "marker";
/// Parts of the names of unfinished folders, and of those being removed.
const UNFINISHED: &str = ".partial-";
const GOING: &str = ".deleted-";
/// Part of the name of a checkpoint that is being replaced, if the file system cannot exchange two names.
const REPLACED: &str = ".replaced-";
/// The number of characters of a mark.
pub(super) const MARK_LENGTH: usize = 16;

/// Returns the folder that a path names. An empty path, such as the parent of a plain file name, is the working
/// directory.
pub(super) fn named(directory: &Path) -> &Path {
    if directory.as_os_str().is_empty() { Path::new(".") } else { directory }
}

/// Returns the name of a step's checkpoint.
pub(super) fn name(step: u64) -> String {
    format!("step-{step:08}")
}

/// Returns the step of a checkpoint with this name.
fn step(folder: &str) -> Option<u64> {
    let step = folder.strip_prefix("step-")?.parse().ok()?;
    (name(step) == folder).then_some(step)
}

/// Returns the names in a folder; none if the folder does not exist.
fn names(directory: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed("listing", directory)(error)),
    };
    // Names that are not UTF-8 are not ours.
    let names = entries.map(|entry| entry.map(|entry| entry.file_name().into_string().ok()));
    let names: io::Result<Vec<_>> = names.collect();
    Ok(names.map_err(failed("listing", directory))?.into_iter().flatten().collect())
}

/// Returns the steps of all checkpoints, the latest last.
pub(super) fn steps(directory: &Path) -> Result<Vec<u64>> {
    let mut steps: Vec<u64> = names(directory)?.iter().filter_map(|name| step(name)).collect();
    steps.sort_unstable();
    Ok(steps)
}

/// An unfinished checkpoint: the name of its folder, and the contents of rank 0's marker.
#[derive(Debug, Clone)]
pub(super) struct Unfinished {
    pub(super) folder: String,
    pub(super) mark: String,
}

impl Unfinished {
    /// Names the checkpoint of a step, as rank 0 marked it.
    pub(super) fn of(step: u64, mark: String) -> Self {
        Self { folder: format!(".{}{UNFINISHED}{mark}", name(step)), mark }
    }

    /// Creates the folder of a step. The step must be later than all others, or the latest one, whose checkpoint is
    /// then replaced. Removes what earlier saves have left. For rank 0.
    pub(super) fn begin(directory: &Path, step: u64) -> Result<Self> {
        create_all(directory)?;
        remove_leftovers(directory)?;
        let latest = steps(directory)?.last().copied();
        if let Some(latest) = latest.filter(|latest| *latest >= step && !is_replaceable(directory, *latest, step)) {
            let reason = format!(
                "step {step} is not after {}, which is in {directory:?}: remove later checkpoints, or save a later step",
                name(latest)
            );
            return Err(Error::argument("commit", reason));
        }
        let unfinished = Self::of(step, random()?);
        let path = directory.join(&unfinished.folder);
        fs::create_dir(&path).map_err(failed("creating", &path))?;
        let marked = unfinished.mark(&path).and_then(|()| sync_folder(directory));
        marked.inspect_err(|_| unfinished.discard(directory)).map(|()| unfinished.clone())
    }

    /// Writes the file that other ranks must see.
    fn mark(&self, path: &Path) -> Result<()> {
        write_new::<&[u8]>(&path.join(MARKER), self.mark.as_bytes(), [])?;
        sync_folder(path)
    }

    /// Checks that this rank sees what rank 0 wrote.
    pub(super) fn check(&self, directory: &Path) -> Result<()> {
        // The mark came from another process, and becomes part of a path here.
        if !self.mark.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(Error::Protocol {
                with: "rank 0".to_owned(),
                reason: format!("{:?} is not a valid mark of an unfinished checkpoint", self.mark),
            });
        }
        let path = directory.join(&self.folder).join(MARKER);
        let what_then = "give every rank the same folder, on a file system that all ranks share";
        match read_all(&path, self.mark.len() as u64) {
            Ok(seen) if seen == self.mark.as_bytes() => Ok(()),
            Ok(_) => Err(malformed(&path, format!("the file does not contain the mark that rank 0 wrote: {what_then}"))),
            Err(error) => {
                let reason = format!("rank 0's file cannot be seen here ({error}): {what_then}");
                Err(Error::io(format!("saving in {directory:?}"), io::Error::new(ErrorKind::NotFound, reason)))
            }
        }
    }

    /// Gives the folder its name, which publishes the checkpoint. For rank 0, when all files are written.
    pub(super) fn finish(&self, directory: &Path, step: u64) -> Result<()> {
        let (from, to) = (directory.join(&self.folder), directory.join(name(step)));
        let marker = from.join(MARKER);
        fs::remove_file(&marker).map_err(failed("removing", &marker))?;
        sync_folder(&from)?;
        let replaced = publish(directory, &self.folder, &name(step))?;
        // A checkpoint that may not survive a power failure must not appear to be saved.
        sync_folder(directory).inspect_err(|_| take_back(&from, &to, replaced.as_ref().map(|old| directory.join(old)).as_deref()))?;
        if let Some(old) = replaced
            && let Err(error) = remove(directory, &old, &format!(".{}", name(step)))
        {
            crate::event::warn!(path = %directory.join(old).display(), %error, "a checkpoint that was replaced could not be removed");
        }
        Ok(())
    }

    /// Removes what was written, as far as possible. For rank 0, after a failure.
    pub(super) fn discard(&self, directory: &Path) {
        let path = directory.join(&self.folder);
        if let Err(error) = fs::remove_dir_all(&path)
            && error.kind() != ErrorKind::NotFound
        {
            crate::event::warn!(path = %path.display(), %error, "an unfinished checkpoint could not be removed");
        }
    }
}

/// Returns whether the latest checkpoint has this step and is really a checkpoint. Anything else with that name must
/// not be replaced.
fn is_replaceable(directory: &Path, latest: u64, step: u64) -> bool {
    let is_checkpoint = || {
        let json = read_all(&directory.join(name(step)).join(index::NAME), index::LONGEST).ok()?;
        index::parse(&json).ok()?.step
    };
    latest == step && is_checkpoint() == Some(step)
}

/// Gives a folder its name, and returns the new name of the checkpoint that had that name before.
fn publish(directory: &Path, folder: &str, step: &str) -> Result<Option<String>> {
    let (from, to) = (directory.join(folder), directory.join(step));
    let naming = failed("publishing the checkpoint as", &to);
    if !to.exists() {
        return fs::rename(&from, &to).map_err(naming).map(|()| None);
    }
    // If the file system can exchange two names, the step has a checkpoint at every moment.
    match exchange(&from, &to) {
        Ok(()) => return Ok(Some(folder.to_owned())),
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
        Err(error) => return Err(naming(error.into())),
    }
    let old = format!(".{step}{REPLACED}{}", random()?);
    fs::rename(&to, directory.join(&old)).map_err(&naming)?;
    fs::rename(&from, &to).inspect_err(|_| drop(fs::rename(directory.join(&old), &to))).map_err(naming)?;
    Ok(Some(old))
}

fn exchange(one: &Path, other: &Path) -> rustix::io::Result<()> {
    renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)
}

/// Undoes [`publish`], as far as possible.
fn take_back(from: &Path, to: &Path, replaced: Option<&Path>) {
    match replaced {
        Some(old) if old == from => drop(exchange(from, to)),
        _ => drop(fs::rename(to, from)),
    }
    if let Some(old) = replaced.filter(|old| *old != from) {
        drop(fs::rename(old, to));
    }
}

/// Returns 64 random bits in hexadecimal digits.
pub(super) fn random() -> Result<String> {
    let mut random = [0; MARK_LENGTH / 2];
    // The kernel returns up to 256 bytes at once.
    getrandom(&mut random, GetRandomFlags::empty()).map_err(|error| Error::io("asking the system for random bits", error))?;
    Ok(digits(&random))
}

/// Creates a folder and its ancestors, and returns when their names are on the disk.
fn create_all(directory: &Path) -> Result<()> {
    let absent: Vec<&Path> = directory.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists()).collect();
    fs::create_dir_all(directory).map_err(failed("creating", directory))?;
    let above = |path: &Path| path.parent().filter(|path| !path.as_os_str().is_empty()).map_or_else(|| ".".into(), Path::to_owned);
    absent.into_iter().try_for_each(|path| sync_folder(&above(path)))
}

/// Removes the folders of unfinished saves and removals. A folder that cannot be removed is logged, and does not make
/// the save fail.
fn remove_leftovers(directory: &Path) -> Result<()> {
    let left = |name: &String| [UNFINISHED, GOING, REPLACED].iter().find_map(|part| Some(name.split_once(part)?.0.to_owned()));
    for name in names(directory)?.iter().filter(|name| name.starts_with(".step-")) {
        let Some(step) = left(name) else { continue };
        // The save that was to replace this checkpoint did not finish.
        let checkpoint = directory.join(step.trim_start_matches('.'));
        if name.contains(REPLACED) && !checkpoint.exists() && fs::rename(directory.join(name), checkpoint).is_ok() {
            continue;
        }
        if let Err(error) = remove(directory, name, &step) {
            crate::event::warn!(path = %directory.join(name).display(), %error, "the remains of an earlier save could not be removed");
        }
    }
    Ok(())
}

/// Removes all but the last `count` checkpoints. A checkpoint that cannot be removed is logged, and does not make the
/// save fail.
pub(super) fn keep_last(directory: &Path, count: usize) {
    let told = |error: &Error| crate::event::warn!(path = %directory.display(), %error, "an old checkpoint could not be removed");
    let steps = steps(directory).inspect_err(told).unwrap_or_default();
    for step in &steps[..steps.len().saturating_sub(count)] {
        let name = name(*step);
        remove(directory, &name, &format!(".{name}")).inspect_err(told).ok();
    }
}

/// Removes a folder. First renames it to a name that begins with `as_left`. So the remains of the folder are not a
/// checkpoint, and a process that still writes to it cannot turn it into one. If another process has already renamed or
/// removed the folder, nothing is done.
fn remove(directory: &Path, name: &str, as_left: &str) -> Result<()> {
    let (from, to): (PathBuf, PathBuf) = (directory.join(name), directory.join(format!("{as_left}{GOING}{}", random()?)));
    let unless_gone = |outcome: io::Result<()>| match outcome {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        outcome => outcome.map(|()| true).map_err(failed("removing", &from)),
    };
    if unless_gone(fs::rename(&from, &to))? {
        sync_folder(directory)?;
        unless_gone(fs::remove_dir_all(&to))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_are_given_to_checkpoints_are_taken_for_them() {
        for number in [0, 42, 99_999_999, 100_000_000, u64::MAX] {
            assert_eq!(step(&name(number)), Some(number));
        }
        for other in ["step-42", "step-000000042", "step-", "step--0000001", "step-+0000001", ".step-00000001", "step-99999999999999999999"]
        {
            assert_eq!(step(other), None, "{other}");
        }
    }

    /// Returns the names in a folder, in order.
    fn sorted(folder: &Path) -> Vec<String> {
        let mut seen = names(folder).unwrap();
        seen.sort();
        seen
    }

    #[test]
    fn what_cannot_be_removed_loses_its_name_and_harms_no_save() {
        let folder = tempfile::tempdir().unwrap();
        // They are not folders, so no process can remove them as folders.
        for name in [".step-00000001.partial-0", ".step-00000002.deleted-ff"] {
            fs::write(folder.path().join(name), "a file").unwrap();
        }
        fs::create_dir_all(folder.path().join(".step-00000003.partial-7/inside")).unwrap();
        for step in 4..6 {
            Unfinished::begin(folder.path(), step).unwrap().finish(folder.path(), step).unwrap();
            let seen = sorted(folder.path());
            assert_eq!(seen.len(), step as usize - 1, "{seen:?}");
            // They were renamed before they were removed.
            assert!(seen[0].starts_with(".step-00000001.deleted-") && seen[1].starts_with(".step-00000002.deleted-"), "{seen:?}");
        }
        assert_eq!(steps(folder.path()).unwrap(), [4, 5]);
    }

    #[test]
    fn an_old_checkpoint_that_cannot_be_removed_keeps_no_other() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(name(1)), "a file").unwrap();
        (2..6).for_each(|step| fs::create_dir_all(folder.path().join(name(step)).join("inside")).unwrap());
        keep_last(folder.path(), 2);
        let seen = sorted(folder.path());
        assert_eq!((steps(folder.path()).unwrap(), seen.len()), (vec![4, 5], 3), "{seen:?}");
        keep_last(folder.path(), 9);
        assert_eq!(steps(folder.path()).unwrap(), [4, 5]);
    }

    #[test]
    fn a_save_whose_folder_another_save_removes_fails_or_is_whole() {
        const FILES: usize = 60;
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path();
        for number in 0..40 {
            let unfinished = Unfinished::begin(directory, number).unwrap();
            let path = directory.join(&unfinished.folder);
            (0..FILES).for_each(|file| fs::write(path.join(format!("{file}")), "data").unwrap());
            let both = std::sync::Barrier::new(2);
            let finished = std::thread::scope(|scope| {
                scope.spawn(|| {
                    both.wait();
                    remove_leftovers(directory).unwrap();
                });
                both.wait();
                unfinished.finish(directory, number)
            });
            let published = directory.join(name(number));
            assert_eq!(finished.is_ok(), published.exists(), "{finished:?}");
            assert!(finished.is_err() || fs::read_dir(published).unwrap().count() == FILES, "step {number}");
        }
        remove_leftovers(directory).unwrap();
        assert_eq!(names(directory).unwrap().len(), steps(directory).unwrap().len(), "nothing else is left");
    }

    #[test]
    fn a_checkpoint_that_was_not_replaced_after_all_gets_its_name_back() {
        let folder = tempfile::tempdir().unwrap();
        for (name, file) in [(".step-00000003.replaced-ff", "whole"), ("step-00000004", "new"), (".step-00000004.replaced-00", "old")] {
            fs::create_dir_all(folder.path().join(name)).unwrap();
            fs::write(folder.path().join(name).join(file), "data").unwrap();
        }
        remove_leftovers(folder.path()).unwrap();
        assert_eq!(sorted(folder.path()), ["step-00000003", "step-00000004"]);
        assert!(folder.path().join("step-00000003/whole").exists() && folder.path().join("step-00000004/new").exists());
    }

    #[test]
    fn a_folder_that_replaces_another_can_give_the_name_back() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in [".step-00000003.partial-ff", "step-00000003"] {
            fs::create_dir_all(at(name)).unwrap();
            fs::write(at(name).join(name), "data").unwrap();
        }
        let replaced = publish(folder.path(), ".step-00000003.partial-ff", "step-00000003").unwrap().unwrap();
        assert!(at("step-00000003/.step-00000003.partial-ff").exists() && at(&replaced).join("step-00000003").exists());
        take_back(&at(".step-00000003.partial-ff"), &at("step-00000003"), Some(&at(&replaced)));
        assert!(at("step-00000003/step-00000003").exists());
        assert_eq!(sorted(folder.path()).len(), 2);
    }

    #[test]
    fn leftovers_go_and_what_others_put_there_stays() {
        let folder = tempfile::tempdir().unwrap();
        let others = [".step-notes", "step-00000003.old", "readme"];
        let left = [".step-00000001.partial-0", ".step-00000002.deleted-ff"];
        for name in others.iter().chain(&left) {
            fs::create_dir_all(folder.path().join(name).join("inside")).unwrap();
        }
        let unfinished = Unfinished::begin(folder.path(), 5).unwrap();
        let seen = sorted(folder.path());
        let mut expected: Vec<String> = others.iter().map(|name| (*name).to_owned()).chain([unfinished.folder.clone()]).collect();
        expected.sort();
        assert_eq!(seen, expected);
        unfinished.check(folder.path()).unwrap();
        unfinished.finish(folder.path(), 5).unwrap();
        assert_eq!(steps(folder.path()).unwrap(), [5]);
    }
}
