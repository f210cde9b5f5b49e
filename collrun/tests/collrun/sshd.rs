//! Jobs started by the real ssh, with a real sshd on the loopback address. This test listens, like inetd, and starts an
//! sshd with its own keys for each connection. The machine's own sshd is not involved, and every connection can be
//! broken separately.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use crate::common::hosts::{run, skip};
use crate::common::programs::program;
use crate::peer::absent;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, kill_process_group, pidfd_open};

const SSHD: &str = "/usr/sbin/sshd";

/// An address to connect to, and the servers of its connections.
struct Sshd {
    folder: tempfile::TempDir,
    servers: Arc<Mutex<Vec<Child>>>,
}

impl Sshd {
    /// Starts one at which this user can log in, as `far`, or returns why that is impossible.
    fn up() -> Result<Self, String> {
        if !Path::new(SSHD).exists() {
            return absent("launchers", format!("there is no {SSHD} (tests/interop/setup installs it)"));
        }
        let made = Self::listening()?;
        let login = made.ssh().args(["far", "true"]).stdin(Stdio::null()).output();
        let login = login.map_err(|error| error.to_string()).or_else(|why| absent("launchers", format!("ssh: {why}")))?;
        match login.status.success() {
            true => Ok(made),
            false => absent("launchers", format!("sshd lets nobody in: {}", String::from_utf8_lossy(&login.stderr).trim())),
        }
    }

    fn listening() -> Result<Self, String> {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name).display().to_string();
        for key in ["host_key", "key"] {
            run("ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-f", &file(key)]).or_else(|why| absent("launchers", why))?;
        }
        let host_key = std::fs::read_to_string(file("host_key.pub")).unwrap();
        std::fs::write(file("known"), format!("far {host_key}")).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = format!(
            "HostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nPidFile none\nPrintMotd no\n",
            file("host_key"),
            file("key.pub")
        );
        std::fs::write(file("sshd_config"), server).unwrap();
        let client = format!(
            "Host far\nHostName 127.0.0.1\nPort {}\nHostKeyAlias far\nUserKnownHostsFile {}\nIdentityFile {}\nIdentitiesOnly yes\nBatchMode yes\n",
            listener.local_addr().unwrap().port(),
            file("known"),
            file("key")
        );
        std::fs::write(file("ssh_config"), client).unwrap();
        // As root it needs an empty folder, which its service creates at startup.
        let _ = std::fs::create_dir_all("/run/sshd");
        let servers = Arc::new(Mutex::new(Vec::new()));
        let (config, started) = (folder.path().join("sshd_config"), Arc::clone(&servers));
        // The thread ends with this process: it holds only the port.
        std::thread::spawn(move || {
            while let Ok((socket, _)) = listener.accept() {
                let ends = [socket.try_clone().unwrap(), socket].map(OwnedFd::from);
                let [input, output] = ends;
                let mut command = Command::new(SSHD);
                command.arg("-i").arg("-f").arg(&config).stdin(input).stdout(output).stderr(Stdio::null()).process_group(0);
                started.lock().unwrap().push(command.spawn().unwrap());
            }
        });
        Ok(Self { folder, servers })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn ssh(&self) -> Command {
        let mut command = Command::new("ssh");
        command.arg("-F").arg(self.file("ssh_config"));
        command
    }

    /// Returns a `collrun` command with flags (split at blanks) and a shell script for every rank.
    fn collrun(&self, flags: &str, script: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
        command.arg("--ssh").arg(format!("ssh -F {}", self.file("ssh_config").display())).args(["--hosts", "far"]);
        command.args(flags.split_whitespace()).args(["--", "sh", "-c", script]).current_dir(self.folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Breaks all connections: their servers are killed at once, but the processes that they have started are not.
    fn break_connections(&self) {
        for server in self.servers.lock().unwrap().iter_mut() {
            // A server that has ended is not reaped yet, so its process id is still its own.
            let _ = kill_process_group(Pid::from_child(server), Signal::KILL);
        }
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        self.break_connections();
        for server in self.servers.lock().unwrap().iter_mut() {
            let _ = server.wait();
        }
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn handle(pid: &str) -> OwnedFd {
    pidfd_open(Pid::from_raw(pid.trim().parse().unwrap()).unwrap(), PidfdFlags::empty()).unwrap()
}

/// Returns whether a process ends within a minute.
fn ends(process: &OwnedFd) -> bool {
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&limit)).unwrap() == 1
}

#[test]
fn words_variables_output_and_exit_code_come_through() {
    let sshd = match Sshd::up() {
        Ok(sshd) => sshd,
        Err(why) => skip!("{why}"),
    };
    let script = "pwd; printf '%s|' \"$A\" \"$@\"; echo; seq 20000; echo err $RANK >&2; test $RANK = 0 || exit 7; exec sleep 600";
    let mut command = sshd.collrun("--nproc-per-node 2 --env A", script);
    let run = command.args(["sh", "a b", "it's", "\"$x\"", "*", "`id`"]).env("A", "x 'y").output().unwrap();
    assert_eq!(run.status.code(), Some(7), "{}", said(&run));
    let text = String::from_utf8(run.stdout.clone()).unwrap();
    let of_rank: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("[far 1] ")).collect();
    let folder = std::fs::canonicalize(sshd.folder.path()).unwrap();
    assert_eq!((of_rank[0], of_rank[1]), (&*folder.to_string_lossy(), "x 'y|a b|it's|\"$x\"|*|`id`|"));
    assert_eq!(of_rank[2..], (1..=20000).map(|number| number.to_string()).collect::<Vec<_>>());
    let said = said(&run);
    assert!(said.contains("[far 1] err 1\n"), "{said}");
    let last = said.lines().last().unwrap();
    assert!(last.starts_with("collrun: first failure: rank 1 (local rank 1) on ") && last.ends_with("exit code 7"), "{said}");
}

#[test]
fn a_collective_runs_there() {
    let collperf = match program("collperf") {
        Ok(collperf) => collperf,
        Err(why) => skip!("{why}"),
    };
    let sshd = match Sshd::up() {
        Ok(sshd) => sshd,
        Err(why) => skip!("{why}"),
    };
    let script = format!("exec {} all_reduce --backend host -b 8 -e 64K -f 64 -n 2 -w 1", collperf.display());
    let run = sshd.collrun("--nproc-per-node 3 --secret", &script).output().unwrap();
    assert!(run.status.success() && String::from_utf8_lossy(&run.stdout).contains("# Out of bounds values : 0 OK"), "{run:?}");
}

#[test]
fn signals_are_passed_on() {
    crate::interrupts::heed();
    let sshd = match Sshd::up() {
        Ok(sshd) => sshd,
        Err(why) => skip!("{why}"),
    };
    for (signal, name) in [(Signal::INT, "INT"), (Signal::TERM, "TERM")] {
        let mut job = sshd.collrun("", &format!("trap 'echo heard; exit 3' {name}; echo $$; sleep 600 & wait")).spawn().unwrap();
        let mut lines = BufReader::new(job.stdout.take().unwrap());
        lines.read_line(&mut String::new()).unwrap();
        kill_process(Pid::from_child(&job), signal).unwrap();
        let mut rest = String::new();
        lines.read_to_string(&mut rest).unwrap();
        let run = job.wait_with_output().unwrap();
        assert_eq!((rest.as_str(), run.status.code()), ("[far 0] heard\n", Some(3)), "{run:?}");
    }
}

#[test]
fn a_connection_that_is_killed_leaves_nothing_behind() {
    let sshd = match Sshd::up() {
        Ok(sshd) => sshd,
        Err(why) => skip!("{why}"),
    };
    let mut job = sshd.collrun("", "echo $PPID $$; exec sleep 600").spawn().unwrap();
    let mut line = String::new();
    BufReader::new(job.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let left: Vec<OwnedFd> = line.strip_prefix("[far 0] ").unwrap().split_whitespace().map(handle).collect();
    assert_eq!(left.len(), 2, "{line}");
    sshd.break_connections();
    assert!(left.iter().all(ends), "the launcher or its rank lives on without a connection");
    let run = job.wait_with_output().unwrap();
    assert!(run.status.code() == Some(255) && said(&run).contains("collrun: the connection to far ended"), "{run:?}");
}

#[test]
fn a_launcher_that_is_killed_leaves_nothing_behind() {
    let sshd = match Sshd::up() {
        Ok(sshd) => sshd,
        Err(why) => skip!("{why}"),
    };
    let mut job = sshd.collrun("", "echo $PPID $$; exec sleep 600").spawn().unwrap();
    let mut line = String::new();
    BufReader::new(job.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let left: Vec<OwnedFd> = line.strip_prefix("[far 0] ").unwrap().split_whitespace().map(handle).collect();
    job.kill().unwrap();
    job.wait().unwrap();
    assert!(left.iter().all(ends), "the launcher or its rank lives on without the one that started them");
}
