//! Finds which limit prevented a process, a thread or a file from being created, and says what to do about it.

use std::io;
use std::path::Path;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Describes a system error. If a limit caused the error, names the limit.
pub fn explained(error: &io::Error) -> String {
    match hint(error) {
        Some(hint) => format!("{error}: {hint}"),
        None => error.to_string(),
    }
}

/// Returns the limit that caused an error, and what to do about it; `None` if no limit caused the error.
pub fn hint(error: &io::Error) -> Option<String> {
    match Errno::from_io_error(error)? {
        Errno::AGAIN => Some(of_processes()),
        Errno::MFILE => Some(of_files()),
        _ => None,
    }
}

fn of_processes() -> String {
    let group = pids_max().map(|(path, most)| format!("{path} is {most}"));
    let user = getrlimit(Resource::Nproc).current.map(|most| format!("RLIMIT_NPROC (ulimit -u) is {most}"));
    let memory = getrlimit(Resource::As).current.map(|most| format!("RLIMIT_AS (ulimit -v) is {most} bytes"));
    let limits: Vec<String> = memory.into_iter().chain(group).chain(user).collect();
    let limits = if limits.is_empty() { "memory, or the kernel's threads-max or pid_max".to_owned() } else { limits.join(", ") };
    format!(
        "no more processes and threads can be created here ({limits}). Each rank needs a process, its own threads, and up to three \
         threads of its launcher. Raise the limit that is too low (for a container: --pids-limit, podPidsLimit), or start fewer ranks"
    )
}

fn of_files() -> String {
    let most = getrlimit(Resource::Nofile).current.map_or_else(|| "high".to_owned(), |most| most.to_string());
    format!(
        "RLIMIT_NOFILE (ulimit -n) is {most}, but the launcher needs two to four open files for each rank. Raise the limit, or \
         start fewer ranks"
    )
}

/// Returns the lowest process limit of this process's control groups, and the file that contains it.
fn pids_max() -> Option<(String, u64)> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    groups.lines().filter_map(folder).flat_map(|(base, path)| limits(base, &path)).min_by_key(|(_, most)| *most)
}

/// Returns the folder of process limits that a line of `/proc/self/cgroup` names, if any.
fn folder(line: &str) -> Option<(&'static str, String)> {
    let mut words = line.splitn(3, ':').skip(1);
    let (controllers, path) = (words.next()?, words.next()?.to_owned());
    match controllers {
        "" => Some(("/sys/fs/cgroup", path)),
        names if names.split(',').any(|name| name == "pids") => Some(("/sys/fs/cgroup/pids", path)),
        _ => None,
    }
}

/// Returns the limits of a group and of its ancestors. A container may see only its own limit, at the top.
fn limits(base: &'static str, path: &str) -> Vec<(String, u64)> {
    let around = Path::new(path).ancestors();
    let files = around.map(|group| format!("{base}{}/pids.max", group.to_string_lossy().trim_end_matches('/')));
    files.filter_map(|file| Some((file.clone(), std::fs::read_to_string(&file).ok()?.trim().parse().ok()?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_limits_name_them() {
        let again = explained(&Errno::AGAIN.into());
        assert!(again.contains("processes and threads") && again.contains("fewer ranks"), "{again}");
        let files = explained(&Errno::MFILE.into());
        assert!(files.contains("RLIMIT_NOFILE (ulimit -n) is "), "{files}");
        let absent = io::Error::from(Errno::NOENT);
        assert_eq!(explained(&absent), absent.to_string());
    }

    #[test]
    fn groups_of_both_versions_are_found() {
        assert_eq!(folder("8:pids:/a/b"), Some(("/sys/fs/cgroup/pids", "/a/b".to_owned())));
        assert_eq!(folder("4:cpu,pids:/"), Some(("/sys/fs/cgroup/pids", "/".to_owned())));
        assert_eq!(folder("0::/user.slice"), Some(("/sys/fs/cgroup", "/user.slice".to_owned())));
        assert_eq!([folder("1:cpu:/"), folder(""), folder("x")], [None, None, None]);
    }
}
