//! The host that a process runs on: ranks of one host can share memory.

use std::hash::{BuildHasher, Hasher};
use std::os::linux::fs::MetadataExt;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;
use std::{fs, io};

use crate::authentication;
use crate::base::event;
use crate::base::fork::Process;

/// The beginning of the identity of a host that the system's files identify.
pub(crate) const FOUND_IDENTITY: &str = "boot=";

/// Returns a text that is equal in two processes only if they can pass each other a descriptor of shared memory over a
/// Unix socket with an abstract name. It contains what must be equal for that:
///
/// - The boot id: it identifies the kernel. No two hosts have the same, and a host has a new one after a restart.
/// - The network namespace: abstract socket names are looked up in it.
/// - The user namespace and the user: each end checks that the other is the same user, and user numbers are comparable
///   only within one namespace.
/// - Not the mount namespace: nothing is opened by path. Not the IPC namespace: it holds System V and POSIX objects,
///   and memory from `memfd_create` is neither. Not the PID namespace: a descriptor is passed over a connection, which
///   also shows a death, so no process is addressed by its number (nor may a number be part of a name that must be
///   unique).
///
/// If /proc does not provide this, the text is equal within this process only: its ranks share memory, and all others
/// use TCP.
///
/// # Errors
///
/// The system's error if descriptors or memory ran out: such an error gives no information about the host.
pub(crate) fn host_identity() -> io::Result<String> {
    identity_from("/proc").or_else(|error| {
        if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) {
            return Err(error);
        }
        crate::base::event::warn!(
            "the identity of this host cannot be read from /proc: {error}; only ranks of this process will share memory"
        );
        Ok(format!("process={:016x}", process_number()))
    })
}

/// Returns the name of this host, for error messages.
pub(crate) fn host_name() -> String {
    if cfg!(miri) {
        // Miri leaves most of that structure unwritten.
        return "miri".to_owned();
    }
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Returns [`host_identity`] as read from the procfs mounted at `proc`.
fn identity_from(proc: &str) -> io::Result<String> {
    let boot = fs::read_to_string(format!("{proc}/sys/kernel/random/boot_id"))?;
    let boot = boot.trim();
    // An all-zero or empty id would merge many hosts into one.
    if !boot.bytes().any(|byte| byte.is_ascii_hexdigit() && byte != b'0') {
        return Err(io::Error::other(format!("the boot id is {boot:?}")));
    }
    let namespace = |name: &str| -> io::Result<String> {
        let facts = fs::metadata(format!("{proc}/self/ns/{name}"))?;
        Ok(format!("{}:{}", facts.st_dev(), facts.st_ino()))
    };
    let user = rustix::process::geteuid().as_raw();
    Ok(format!("{FOUND_IDENTITY}{boot} net={} user={} uid={user}", namespace("net")?, namespace("user")?))
}

/// Returns a text that identifies this process, and that no other process has, on any host. A process number is not
/// enough: in two PID namespaces, two processes can have the same number.
pub(crate) fn process_token() -> io::Result<String> {
    static TOKEN: Mutex<Option<(Process, String)>> = Mutex::new(None);
    let fresh: String = authentication::random()?[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    // In a process that was forked while another thread held the lock, the lock stays held forever.
    for _ in 0..TOKEN_LOOKS {
        let Some(mut token) = event::try_lock(&TOKEN) else {
            std::thread::sleep(TOKEN_PAUSE);
            continue;
        };
        if let Some((process, known)) = &*token
            && !process.is_foreign()
        {
            return Ok(known.clone());
        }
        *token = Some((Process::this(), fresh.clone()));
        return Ok(fresh);
    }
    Err(io::Error::other("this process was forked while another thread created its token; fork earlier, or start a new process"))
}

/// How often the lock of the token is tried, and the pause in between. Its holder only copies a text.
const TOKEN_LOOKS: u32 = 1000;
const TOKEN_PAUSE: Duration = Duration::from_millis(1);

/// Returns a text that identifies the PID namespace of this process, within which process numbers are unique; empty if
/// unknown.
pub(crate) fn process_numbers() -> String {
    numbers_from("/proc").unwrap_or_default()
}

/// Returns a text that identifies the loopback interface of this process: equal texts mean the same one. The boot id
/// and a colon are its beginning. Empty if unknown.
pub(crate) fn loopback_interface() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let facts = fs::metadata("/proc/self/ns/net");
    boot.and_then(|boot| Ok(format!("{}:{}", boot.trim(), facts?.st_ino()))).unwrap_or_default()
}

/// Returns [`process_numbers`] as read from the procfs at `proc`, which may show a namespace other than this process's.
fn numbers_from(proc: &str) -> io::Result<String> {
    let boot = fs::read_to_string(format!("{proc}/sys/kernel/random/boot_id"))?;
    let facts = fs::metadata(format!("{proc}/self/ns/pid"))?;
    let shown = fs::read_link(format!("{proc}/self"))?;
    if shown.to_str() != Some(&std::process::id().to_string()) {
        return Err(io::Error::other("it shows the processes of another namespace"));
    }
    Ok(format!("{}:{}:{}", boot.trim(), facts.st_dev(), facts.st_ino()))
}

/// Returns a number that no other process has, the same at every call.
fn process_number() -> u64 {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    // The standard library seeds its hash maps from the system's random numbers.
    *NUMBER.get_or_init(|| std::hash::RandomState::new().build_hasher().finish())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails says where")]
mod tests {
    use super::*;

    #[test]
    fn the_same_within_a_process_and_its_children() {
        let here = host_identity().unwrap();
        assert_eq!(here, host_identity().unwrap());
        assert_eq!(here, std::thread::spawn(host_identity).join().unwrap().unwrap());
        assert!(here.starts_with("boot="), "{here}");
        let child = std::process::Command::new("stat").args(["-L", "-c", "%d:%i", "/proc/self/ns/net"]).output().unwrap();
        let namespace = String::from_utf8(child.stdout).unwrap();
        assert!(here.contains(&format!("net={} ", namespace.trim())), "{here} in a child {namespace}");
    }

    #[test]
    fn without_proc_only_this_process_is_this_host() {
        let empty = tempfile::tempdir().unwrap();
        assert!(identity_from(empty.path().to_str().unwrap()).is_err());
        assert_eq!(process_number(), process_number());
        assert_ne!(process_number(), 0);
    }

    #[test]
    fn a_boot_id_that_says_nothing_is_refused() {
        let proc = tempfile::tempdir().unwrap();
        let folder = proc.path().join("sys/kernel/random");
        fs::create_dir_all(&folder).unwrap();
        for nothing in ["", "\n", "00000000-0000-0000-0000-000000000000\n"] {
            fs::write(folder.join("boot_id"), nothing).unwrap();
            let error = identity_from(proc.path().to_str().unwrap()).unwrap_err().to_string();
            assert!(error.contains("boot id"), "{error}");
        }
    }

    #[test]
    fn a_process_is_told_from_others_by_more_than_its_number() {
        let own = process_token().unwrap();
        assert_eq!(own, std::thread::spawn(process_token).join().unwrap().unwrap());
        assert_eq!(own.len(), 32);
        assert!(!process_numbers().is_empty() && process_numbers() == process_numbers());
        assert!(numbers_from(tempfile::tempdir().unwrap().path().to_str().unwrap()).is_err());
    }

    #[test]
    fn the_host_has_a_name() {
        assert!(!host_name().is_empty());
    }
}
