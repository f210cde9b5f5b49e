//! Hosts that lack something: writable folders, processes, or files.

use std::path::PathBuf;

use super::*;

/// A folder in which no user can create anything, not even root.
const NOWHERE: &str = "/proc";

#[test]
fn without_a_folder_for_error_files_a_job_starts_and_has_them_elsewhere() {
    let script = "test -d $(dirname $TORCHELASTIC_ERROR_FILE) && echo $TORCHELASTIC_ERROR_FILE";
    let run = collrun("--nproc-per-node 2", script).env("TMPDIR", NOWHERE).output().unwrap();
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    if said.contains("nor in /dev/shm") {
        return println!("skipped: /dev/shm cannot be written");
    }
    let lines = sorted_lines(&run.stdout);
    assert!(run.status.success() && lines.len() == 2 && lines[1].starts_with("[1] /dev/shm/collrun-"), "{run:?}");
    assert!(said.lines().count() == 1 && said.contains("no folder can be created in /proc (") && said.contains("TMPDIR"), "{said}");
    let folder = PathBuf::from(lines[0].strip_prefix("[0] ").unwrap());
    assert!(!folder.exists(), "what is made elsewhere is removed as well");
}

#[test]
fn without_any_folder_for_error_files_a_job_starts_and_failures_are_told() {
    // As in a container with a read-only file system; an outer launcher has named an error file.
    let spaces = ["--mount", "sh", "-c", "mount -t tmpfs -o ro none /dev/shm && exec \"$@\"", "sh"];
    let job = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(spaces).args([env!("CARGO_BIN_EXE_collrun"), "--nproc-per-node", "2", "--", "sh", "-c", script]);
        command.env("TMPDIR", NOWHERE).env("TORCHELASTIC_ERROR_FILE", "/proc/above").stdin(Stdio::null()).output()
    };
    match Command::new("unshare").args(spaces).arg("true").output() {
        Ok(tried) if tried.status.success() => {}
        tried => return println!("skipped: /dev/shm cannot be made read-only: {tried:?}"),
    }
    let run = job("echo \"<$TORCHELASTIC_ERROR_FILE>\"").unwrap();
    assert_eq!((run.status.code(), sorted_lines(&run.stdout)), (Some(0), vec!["[0] <>".to_owned(), "[1] <>".to_owned()]), "{run:?}");
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(said.lines().count() == 1 && said.contains("ranks have no error files"), "{said}");
    let run = job("test $RANK = 0 || exit 7; exec sleep 600").unwrap();
    let last = String::from_utf8_lossy(&run.stderr).lines().last().unwrap_or_default().to_owned();
    assert!(run.status.code() == Some(7) && last.contains("first failure: rank 1 ") && last.ends_with("exit code 7"), "{run:?}");
}

/// A control group with a limited number of processes and threads. It is removed when this is dropped.
struct Group(PathBuf);

impl Group {
    fn new() -> Result<Self, String> {
        // Version 1, or else version 2.
        let parent = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"].into_iter().map(PathBuf::from).find(|path| path.exists());
        let path = parent.ok_or("there are no control groups")?.join(format!("collrun-test-{}", std::process::id()));
        std::fs::create_dir(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let group = Self(path);
        group.limit(100).map_err(|error| format!("no limit of processes: {error}"))?;
        Ok(group)
    }

    fn limit(&self, most: usize) -> std::io::Result<()> {
        std::fs::write(self.0.join("pids.max"), most.to_string())
    }

    /// Runs a job of three ranks in the group.
    fn run(&self) -> Output {
        let join = format!("echo $$ >{}/cgroup.procs && exec \"$@\"", self.0.display());
        let job = ["--nproc-per-node", "3", "--", "true"];
        Command::new("sh").args(["-c", &join, "sh", env!("CARGO_BIN_EXE_collrun")]).args(job).stdin(Stdio::null()).output().unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Checks that a job either succeeds or reports the limit that prevented that. Returns whether it succeeded.
fn succeeds_or_says(run: &Output, limit: &str, remedy: &str) -> bool {
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(!said.contains("panicked"), "{said}");
    assert!(run.status.success() || (said.contains(limit) && said.contains(remedy)), "{run:?}");
    run.status.success()
}

#[test]
fn a_job_that_may_make_too_few_processes_says_so() {
    let group = match Group::new() {
        Ok(group) => group,
        Err(why) => return println!("skipped: {why}"),
    };
    let succeeded: Vec<bool> = (1..=20)
        .map(|most| {
            group.limit(most).unwrap();
            succeeds_or_says(&group.run(), &format!("pids.max is {most}"), "Raise the limit")
        })
        .collect();
    assert!(!succeeded[2] && succeeded[19], "{succeeded:?}");
}

#[test]
fn a_job_that_may_open_too_few_files_says_so() {
    let run = |most: usize| {
        let limited = format!("ulimit -n {most} && exec \"$@\"");
        let job = ["--nproc-per-node", "3", "--", "true"];
        Command::new("sh").args(["-c", &limited, "sh", env!("CARGO_BIN_EXE_collrun")]).args(job).stdin(Stdio::null()).output().unwrap()
    };
    let succeeded: Vec<bool> =
        (6..=30).map(|most| succeeds_or_says(&run(most), &format!("(ulimit -n) is {most}"), "Raise the limit")).collect();
    assert!(!succeeded[0] && succeeded[24], "{succeeded:?}");
}
