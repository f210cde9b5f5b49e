//! Checks what the system reports about itself. A fact that it does not report is shown as not known, and is a note
//! rather than a fault.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};

use super::finding::Finding;
use crate::machine::Load;
use crate::sizes::human;

/// A sufficient limit of file descriptors: a rank needs one for each peer on another host.
const ENOUGH_DESCRIPTORS: u64 = 4096;
const LEAST_DESCRIPTORS: u64 = 256;
/// Bytes of /dev/shm that NCCL's ranks on one host need.
const ENOUGH_SHM: u64 = 1 << 30;
/// The MTU that a fast link should have, and the megabits per second from which a link counts as fast.
const LARGE_MTU: u64 = 9000;
const FAST_LINK: u64 = 10_000;

/// The number of ranks that should each have a core.
const RANKS: usize = 2;

/// Checks a system whose files are below `root`.
pub(super) fn look(root: &Path) -> Vec<Finding> {
    let text = |path: &str| fs::read_to_string(root.join(path)).map(|text| text.trim().to_owned()).ok();
    let has_infiniband = fs::read_dir(root.join("sys/class/infiniband")).is_ok_and(|mut entries| entries.next().is_some());
    let mut findings = vec![
        cores(text("sys/fs/cgroup/cpu.max").as_deref()),
        load((root == Path::new("/")).then(Load::here).flatten()),
        memory(text("proc/meminfo").as_deref(), text("sys/fs/cgroup/memory.max").as_deref()),
        descriptors(limit(Resource::Nofile)),
        locked_memory(limit(Resource::Memlock), has_infiniband),
        shared_memory(&root.join("dev/shm")),
        huge_pages(text("sys/kernel/mm/transparent_hugepage/shmem_enabled").as_deref()),
        identity(text("proc/sys/kernel/random/boot_id").as_deref()),
        congestion_control(
            text("proc/sys/net/ipv4/tcp_congestion_control").as_deref(),
            text("proc/sys/net/ipv4/tcp_available_congestion_control").as_deref(),
        ),
    ];
    findings.extend(links(&root.join("sys/class/net")));
    findings
}

/// Returns a soft limit; `u64::MAX` if there is none.
fn limit(resource: Resource) -> u64 {
    getrlimit(resource).current.unwrap_or(u64::MAX)
}

fn cores(quota: Option<&str>) -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let allowed = quota.and_then(|quota| {
        let (most, period) = quota.split_once(' ')?;
        Some(most.parse::<f64>().ok()? / period.parse::<f64>().ok()?)
    });
    match allowed {
        Some(allowed) if allowed < cores as f64 => Finding::note(
            "processors",
            format!("{cores}, but the container may use only {allowed:.1}"),
            "give the container as many processors as it sees: one throttled rank delays all others",
        ),
        _ => Finding::judged(
            "processors",
            cores,
            cores > 1,
            "ranks take turns on one processor; use a machine with a processor for each rank",
        ),
    }
}

fn load(load: Option<Load>) -> Finding {
    match load {
        None => Finding::note("load", "not known: /proc/stat does not show how busy the cores are", "mount /proc"),
        Some(load) => match load.note(RANKS) {
            Some(note) => Finding::note("load", note, "measure while no other programs are running; `top` lists the running ones"),
            None => Finding::good("load", format!("{:.1} of {} cores busy", load.busy, load.cores)),
        },
    }
}

fn memory(meminfo: Option<&str>, limit: Option<&str>) -> Finding {
    let kilobytes = |line: &str| line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse::<usize>().ok();
    let Some(free) = meminfo.and_then(|text| text.lines().find_map(kilobytes)).map(|kilobytes| kilobytes.saturating_mul(1024)) else {
        return Finding::note("memory", "not known: /proc/meminfo does not show the available memory", "mount /proc");
    };
    match limit.and_then(|limit| limit.parse::<usize>().ok()) {
        Some(limit) if limit < free => Finding::note(
            "memory",
            format!("{} free, but the container may use only {}", human(free), human(limit)),
            "the ranks' shared memory counts against the container's limit, so leave room for it",
        ),
        _ => Finding::good("memory", format!("{} free", human(free))),
    }
}

fn descriptors(limit: u64) -> Finding {
    let advice = "ulimit -n 65536: a rank needs two open files for each peer on another host, and rank 0 needs one more for each rank";
    let found = if limit == u64::MAX { "unlimited".to_owned() } else { limit.to_string() };
    match limit {
        ..LEAST_DESCRIPTORS => Finding::bad("open files (ulimit -n)", found, advice),
        _ => Finding::judged("open files (ulimit -n)", found, limit >= ENOUGH_DESCRIPTORS, advice),
    }
}

fn locked_memory(limit: u64, has_infiniband: bool) -> Finding {
    let subject = "memlock (ulimit -l)";
    let found = if limit == u64::MAX { "unlimited".to_owned() } else { human(limit as usize) };
    if limit == u64::MAX || !has_infiniband {
        let why = if has_infiniband { "" } else { "; the limit matters only with InfiniBand, and this machine has none" };
        return Finding::good(subject, format!("{found}{why}"));
    }
    let advice = "set ulimit -l unlimited, or LimitMEMLOCK=infinity in the systemd unit: \
                  NCCL must lock the memory that it registers with InfiniBand";
    Finding::note(subject, found, advice)
}

fn shared_memory(path: &Path) -> Finding {
    match rustix::fs::statvfs(path) {
        Ok(facts) => {
            let free = facts.f_bavail.saturating_mul(facts.f_frsize);
            let advice = "docker run --shm-size=2g (on Kubernetes: an emptyDir of medium Memory). NCCL keeps its buffers in \
                          /dev/shm, but the host backend does not need /dev/shm";
            Finding::judged("/dev/shm", format!("{} free", human(free as usize)), free >= ENOUGH_SHM, advice)
        }
        Err(error) => Finding::note(
            "/dev/shm",
            error,
            "mount a tmpfs there: NCCL keeps its buffers in /dev/shm, but the host backend does not need /dev/shm",
        ),
    }
}

fn huge_pages(shmem: Option<&str>) -> Finding {
    let chosen = shmem.and_then(|text| text.split('[').nth(1)?.split(']').next());
    let advice = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled; then buffers from `alloc` use huge pages";
    match chosen {
        Some(chosen) => {
            Finding::judged("huge pages (shared)", chosen, ["advise", "always", "within_size", "force"].contains(&chosen), advice)
        }
        None => Finding::note(
            "huge pages (shared)",
            "the kernel has none",
            "use a kernel with transparent huge pages; without them, buffers from `alloc` are slower",
        ),
    }
}

/// Checks how the library recognizes ranks on the same host.
fn identity(boot: Option<&str>) -> Finding {
    match boot {
        Some(_) => Finding::good("identity of the host", "known"),
        None => Finding::note(
            "identity of the host",
            "not known",
            "mount /proc; otherwise ranks in different processes of this host communicate over TCP",
        ),
    }
}

/// Says how connections to other hosts are paced.
fn congestion_control(chosen: Option<&str>, available: Option<&str>) -> Finding {
    let subject = "congestion control";
    let Some(chosen) = chosen else {
        return Finding::note(subject, "not known: /proc/sys/net/ipv4 does not show it", "mount /proc");
    };
    let inside =
        ["cubic", "reno"].into_iter().find(|name| available.is_none_or(|list| list.split_whitespace().any(|known| known == *name)));
    match inside {
        Some(inside) if inside != chosen => {
            Finding::good(subject, format!("{chosen} between hosts; {inside} between ranks of one host, which share no network"))
        }
        Some(_) => Finding::good(subject, chosen),
        None => Finding::note(
            subject,
            format!("{chosen}, also between ranks of one host that use TCP"),
            "modprobe tcp_cubic: ranks choose cubic or reno inside a host, and bbr, for example, paces itself to half the speed there",
        ),
    }
}

/// Checks every interface that is up, except loopback.
fn links(folder: &Path) -> Vec<Finding> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder).map(|entries| entries.flatten().map(|entry| entry.path()).collect()).unwrap_or_default();
    paths.sort();
    let findings: Vec<Finding> = paths.iter().filter_map(|path| link(path)).collect();
    if findings.is_empty() {
        return vec![Finding::note("network", "only the loopback interface is up", "for jobs on several hosts: bring an interface up")];
    }
    findings
}

fn link(path: &Path) -> Option<Finding> {
    let text = |name: &str| fs::read_to_string(path.join(name)).map(|text| text.trim().to_owned()).ok();
    let name = path.file_name()?.to_string_lossy().into_owned();
    // Some kinds of interface report "unknown" although they work.
    let is_up = text("operstate").is_some_and(|state| state == "up" || state == "unknown");
    if name == "lo" || !is_up {
        return None;
    }
    let mtu: u64 = text("mtu")?.parse().ok()?;
    // Virtual interfaces have no speed, or report -1.
    let speed = text("speed").and_then(|speed| speed.parse::<u64>().ok());
    let found = speed.map_or_else(|| format!("mtu {mtu}"), |speed| format!("mtu {mtu}, {speed} Mbit/s"));
    let is_enough = mtu >= LARGE_MTU || speed.is_none_or(|speed| speed < FAST_LINK);
    let advice = format!("ip link set {name} mtu 9000, if all switches between the hosts allow it");
    Some(Finding::judged(&format!("network {name}"), found, is_enough, &advice))
}

#[cfg(test)]
mod tests {
    use super::super::finding::State;
    use super::*;

    #[test]
    fn a_machine_that_says_nothing_is_looked_at() {
        let nothing = tempfile::tempdir().unwrap();
        let findings = look(nothing.path());
        assert_eq!(findings.len(), 10);
        assert!(
            findings.iter().all(|finding| finding.state != State::Bad && (finding.state == State::Good || !finding.advice.is_empty())),
            "{findings:?}"
        );
        assert_eq!(look(Path::new("/")).iter().filter(|finding| finding.subject == "memory").count(), 1);
    }

    #[test]
    fn limits_are_judged() {
        for (limit, state) in [(0, State::Bad), (255, State::Bad), (1024, State::Note), (65_536, State::Good), (u64::MAX, State::Good)] {
            assert_eq!(descriptors(limit).state, state, "{limit}");
        }
        assert_eq!(locked_memory(64 << 10, true).state, State::Note);
        assert_eq!(locked_memory(64 << 10, false).state, State::Good);
        assert_eq!(locked_memory(u64::MAX, true).found, "unlimited");
    }

    #[test]
    fn files_of_the_system_are_understood() {
        assert_eq!(huge_pages(Some("always within_size [advise] never deny force")).state, State::Good);
        assert_eq!(huge_pages(Some("always within_size advise [never] deny force")).found, "never");
        assert_eq!(huge_pages(Some("nonsense")).state, State::Note);
        assert_eq!(cores(Some("max 100000")).state, cores(None).state);
        assert!(cores(Some("50000 100000")).found.contains("may use only 0.5"));
        let with = |busy| load(Some(Load { busy, cores: 2 }));
        assert_eq!((with(1.1).state, with(0.1).state), (State::Note, State::Good));
        assert!(with(1.1).found.contains("other programs keep 1.1 of 2 cores busy"));
        assert!(memory(Some("MemAvailable: 2048 kB"), Some("1048576")).found.contains("2 MiB free, but the container may use only 1 MiB"));
        assert_eq!(memory(Some("MemAvailable: 99999999999999999999 kB"), None).state, State::Note);
    }

    #[test]
    fn the_congestion_control_inside_a_host_is_named_if_it_is_another_one() {
        let finding = congestion_control(Some("bbr"), Some("reno bbr cubic"));
        assert!(finding.state == State::Good && finding.found.starts_with("bbr between hosts; cubic between ranks"), "{finding}");
        assert_eq!(congestion_control(Some("cubic"), Some("reno cubic")).found, "cubic");
        assert!(congestion_control(Some("bbr"), Some("reno bbr")).found.contains("reno between ranks"));
        assert_eq!(congestion_control(Some("bbr"), Some("bbr")).state, State::Note);
        assert!(congestion_control(Some("bbr"), None).found.contains("cubic between ranks"));
        assert_eq!(congestion_control(None, None).state, State::Note);
    }

    #[test]
    fn links_are_judged_by_speed_and_mtu() {
        let folder = tempfile::tempdir().unwrap();
        for (name, state, mtu, speed) in [
            ("lo", "unknown", "65536", ""),
            ("eth0", "up", "1500", "100000"),
            ("eth1", "up", "9000", "100000"),
            ("eth2", "up", "1500", "-1"),
            ("eth3", "down", "1500", ""),
        ] {
            fs::create_dir(folder.path().join(name)).unwrap();
            for (file, value) in [("operstate", state), ("mtu", mtu), ("speed", speed)] {
                fs::write(folder.path().join(name).join(file), value).unwrap();
            }
        }
        let states: Vec<_> = links(folder.path()).into_iter().map(|finding| (finding.subject, finding.state)).collect();
        let expected = [("network eth0", State::Note), ("network eth1", State::Good), ("network eth2", State::Good)];
        assert_eq!(states, expected.map(|(name, state)| (name.to_owned(), state)));
    }
}
