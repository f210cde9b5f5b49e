//! Jobs started on other hosts from here. A script replaces ssh: it starts its command in another folder, with an empty
//! environment, as a remote shell would. For tests with several hosts it uses network namespaces.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use crate::common::hosts::{Hosts, skip};
use crate::common::programs::program;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

/// A folder with a replacement for ssh, whose host names are `far` and `absent`.
struct Ssh {
    folder: tempfile::TempDir,
}

impl Ssh {
    /// Creates the script; `run` is a shell command that runs `$command` on `$host`.
    fn new(run: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ssh");
        let script = format!(
            "#!/bin/sh\nhost=$1; command=$2; here={}\n\
             if [ $host = absent ]; then echo \"ssh: connect to host absent port 22: No route to host\" >&2; exit 255; fi\n\
             cd /; {run}\n",
            folder.path().display()
        );
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        Self { folder }
    }

    /// Creates a script that executes the command in its own place.
    fn of_one_host() -> Self {
        Self::new("exec env -i PATH=\"$PATH\" sh -c \"$command\"")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns a `collrun` command with flags (split at blanks) and a shell script for every rank.
    fn collrun(&self, flags: &str, script: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
        command.arg("--ssh").arg(self.file("ssh")).args(flags.split_whitespace()).args(["--", "sh", "-c", script]);
        command.current_dir(self.folder.path()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn output(&self, flags: &str, script: &str) -> Output {
        self.collrun(flags, script).output().unwrap()
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns whether a process ends within some seconds.
fn ends(process: &rustix::fd::OwnedFd) -> bool {
    let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&limit)).unwrap() == 1
}

fn handle(pid: &str) -> rustix::fd::OwnedFd {
    pidfd_open(Pid::from_raw(pid.trim().parse().unwrap()).unwrap(), PidfdFlags::empty()).unwrap()
}

/// Starts a job that prints one line, and returns this line without its prefix.
fn started(mut command: Command) -> (Child, BufReader<ChildStdout>, String) {
    let mut job = command.spawn().unwrap();
    let mut lines = BufReader::new(job.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    let line = line.split_once("] ").map(|(_, text)| text.trim().to_owned()).unwrap_or_default();
    (job, lines, line)
}

#[test]
fn what_is_started_there_has_the_folder_the_words_and_the_variables() {
    let ssh = Ssh::of_one_host();
    let mut command =
        ssh.collrun("--hosts me@far --env A --env B=1=2 --nproc-per-node 2", "pwd; printf '%s\\n' \"$A|$B|$C|$COLLECTIVES_TIMEOUT|$*\"");
    command.args(["0", "a b", "it's", "\"$x\"", "*", "", "\\n", "`id`"]);
    let run = command.env("A", "x 'y\nz").env("C", "stays").env("COLLECTIVES_TIMEOUT", "7").output().unwrap();
    assert_eq!(run.status.code(), Some(0), "{run:?}");
    let folder = std::fs::canonicalize(ssh.folder.path()).unwrap();
    let text = String::from_utf8(run.stdout).unwrap();
    for rank in 0..2 {
        let of_rank: Vec<_> = text.lines().filter_map(|line| line.strip_prefix(&format!("[far {rank}] "))).collect();
        assert_eq!(of_rank, [&*folder.to_string_lossy(), "x 'y", "z|1=2||7|a b it's \"$x\" *  \\n `id`"], "{text}");
    }
}

#[test]
fn what_is_of_one_host_stays_there() {
    let ssh = Ssh::of_one_host();
    let mut command = ssh.collrun("--hosts far", "echo \"<$COLLECTIVES_LISTEN_ADDRESS$COLLECTIVES_HOST_IDENTITY>\"");
    let run = command.env("COLLECTIVES_LISTEN_ADDRESS", "10.0.0.1").env("COLLECTIVES_HOST_IDENTITY", "x").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&run.stdout), "[far 0] <>\n", "{run:?}");
}

#[test]
fn a_secret_is_on_no_command_line() {
    let ssh = Ssh::of_one_host();
    let run = ssh.output("--hosts far --secret", "tr '\\0' ' ' </proc/$PPID/cmdline; echo; echo $COLLECTIVES_SECRET");
    let text = String::from_utf8_lossy(&run.stdout).into_owned();
    let lines: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("[far 0] ")).collect();
    assert!(lines.len() == 2 && lines[1].len() == 64 && lines[0].contains("--controlled") && !lines[0].contains(lines[1]), "{run:?}");
}

#[test]
fn a_failure_there_is_told_last() {
    let ssh = Ssh::of_one_host();
    for flags in ["--hosts far", "--hosts far --no-prefix"] {
        let run =
            ssh.output(&format!("{flags} --nproc-per-node 2"), "test $RANK = 0 || { printf '\\036none\\n' >&2; exit 7; }; exec sleep 600");
        let text = said(&run);
        assert_eq!(run.status.code(), Some(7), "{run:?}");
        assert!(text.contains("\u{1e}none\n") && text.contains("collrun on far: rank 1 (pid "), "{text}");
        let last = text.lines().last().unwrap_or_default();
        assert!(last.starts_with("collrun: first failure: rank 1 (local rank 1) on ") && last.ends_with("exit code 7"), "{text}");
        assert_eq!(text.matches("first failure").count(), 1, "{text}");
    }
}

#[test]
fn ranks_there_are_started_anew_after_a_failure() {
    let ssh = Ssh::of_one_host();
    // Rank 0 of the first attempt is stopped; all ranks of the second one succeed.
    let script = "test $TORCHELASTIC_RESTART_COUNT = 0 || { echo again $RANK; exit 0; }; test $RANK = 0 || exit 7; exec sleep 600";
    let run = ssh.output("--hosts far --nproc-per-node 2 --max-restarts 1", script);
    let mut lines: Vec<_> = String::from_utf8_lossy(&run.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    assert!(run.status.success() && lines == ["[far 0] again 0", "[far 1] again 1"], "{run:?}");
    assert!(said(&run).contains("collrun on far: restarting all ranks, 1 of 1, after a failure: rank 1 "), "{run:?}");
    let run = ssh.output("--hosts far --nproc-per-node 2 --max-restarts 1", "exit 7");
    assert!(run.status.code() == Some(7) && said(&run).lines().last().unwrap_or_default().contains("first failure"), "{run:?}");
}

#[test]
fn torchrun_s_variables_go_along_and_those_of_the_host_do_not_count() {
    let script = "echo $WORLD_SIZE $TORCHELASTIC_MAX_RESTARTS $ROLE_NAME $PET_ROLE";
    let ssh = Ssh::new("exec env -i PATH=\"$PATH\" PET_NPROC_PER_NODE=3 PET_ROLE=there sh -c \"$command\"");
    let run = ssh.output("--hosts far", script);
    assert_eq!(String::from_utf8_lossy(&run.stdout), "[far 0] 1 0 default\n", "{run:?}");
    let run = ssh.collrun("--hosts far", script).env("PET_MAX_RESTARTS", "2").env("PET_ROLE", "here").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&run.stdout), "[far 0] 1 2 here here\n", "{run:?}");
    let run = ssh.collrun("--hosts far", script).env("PET_NNODES", "2").output().unwrap();
    assert!(run.status.code() == Some(2) && said(&run).contains("PET_NNODES=2 stands for --nnodes"), "{run:?}");
}

#[test]
fn hosts_that_cannot_be_reached_are_named() {
    let ssh = Ssh::of_one_host();
    let run = ssh.output("--hosts absent", "true");
    let text = said(&run);
    assert_eq!(run.status.code(), Some(255), "{run:?}");
    assert!(
        text.contains(
            "No route to host\ncollrun: the connection to absent ended (exit status: 255): check that ssh can connect to the host"
        ),
        "{text}"
    );
    let run = ssh.output("--hosts far --remote-collrun /absent/collrun", "true");
    assert!(run.status.code() == Some(127) && said(&run).contains("/absent/collrun or the program is missing there"), "{run:?}");
    let run = ssh.output("--hosts far --ssh /absent/ssh", "true");
    assert!(run.status.code() == Some(127) && said(&run).contains("starting /absent/ssh for far"), "{run:?}");
    // A command that does not run what it is given.
    for nothing in ["true", "echo"] {
        let run = ssh.output(&format!("--hosts far --ssh {nothing}"), "true");
        let text = said(&run);
        assert!(run.status.code() == Some(1) && text.contains("on far with exit code 0, but collrun did not start there"), "{run:?}");
    }
    let run =
        Command::new(env!("CARGO_BIN_EXE_collrun")).arg("--ssh").arg(ssh.file("ssh")).args(["--hosts", "far", "/absent"]).output().unwrap();
    assert!(run.status.code() == Some(127) && said(&run).contains("collrun on far: \"/absent\": program not found"), "{run:?}");
}

#[test]
fn a_host_that_cannot_be_reached_stops_the_others() {
    let ssh = Ssh::of_one_host();
    let run = ssh.output("--hosts absent,far --master-addr 192.0.2.1", "exec sleep 600");
    assert_eq!(run.status.code(), Some(255), "{run:?}");
    assert!(said(&run).contains("stopping the others"), "{run:?}");
}

#[test]
fn words_that_contradict_each_other_are_refused() {
    let ssh = Ssh::of_one_host();
    std::fs::write(ssh.file("bad"), "far\na`id`\n").unwrap();
    for (flags, words) in [
        ("--hosts far --nnodes 2", "cannot be used with"),
        ("--hosts far --local-addr 10.0.0.1", "cannot be used with"),
        ("--hosts far:2 --nproc-per-node 2", "given twice"),
        ("--hosts far:2,near:3", "every host must have the same number of ranks"),
        ("--hosts=-oProxyCommand=x", "is not a host"),
        ("--hosts me@-oProxyCommand=id", "--hosts, entry 1: \"me@-oProxyCommand=id\" is not a host"),
        ("--hosts far,a$(id)", "--hosts, entry 2: \"a$(id)\" is not a host"),
        ("--hostfile bad", "--hostfile bad, line 2: \"a`id`\" is not a host"),
        ("--hosts far --env NOT_SET_ANYWHERE", "not set in this shell"),
        ("--hosts far --logs-specs x", "use --log-dir"),
        ("--hosts far --bind core --numa-binding node", "cannot be used with"),
        ("--hostfile absent", "absent"),
        ("--hosts localhost,far", "Give --master-addr"),
    ] {
        let run = ssh.output(flags, "exec sleep 600");
        assert!(run.status.code() == Some(2) && said(&run).contains(words), "{flags}: {run:?}");
    }
}

#[test]
fn signals_reach_the_ranks_there() {
    crate::interrupts::heed();
    let ssh = Ssh::of_one_host();
    for (signal, name) in [(Signal::INT, "INT"), (Signal::TERM, "TERM")] {
        let (job, mut lines, _) =
            started(ssh.collrun("--hosts far", &format!("trap 'echo heard; exit 3' {name}; echo $$; sleep 600 & wait")));
        kill_process(Pid::from_child(&job), signal).unwrap();
        let mut rest = String::new();
        lines.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "[far 0] heard\n");
        let run = job.wait_with_output().unwrap();
        assert_eq!(run.status.code(), Some(3), "{run:?}");
    }
}

#[test]
fn ranks_end_with_the_launcher_that_started_them_from_afar() {
    let ssh = Ssh::of_one_host();
    let (mut job, _, pid) = started(ssh.collrun("--hosts far", "echo $$; exec sleep 600"));
    let rank = handle(&pid);
    job.kill().unwrap();
    job.wait().unwrap();
    assert!(ends(&rank));
}

#[test]
fn what_ranks_there_have_started_ends_with_a_launcher_that_is_killed() {
    let ssh = Ssh::of_one_host();
    // A shell waits for its program, and prints the process that started it.
    let (job, _lines, pids) = started(ssh.collrun("--hosts far", "sleep 600 & echo $PPID $!; wait; echo done"));
    let (launcher, program) = pids.split_once(' ').unwrap();
    let program = handle(program);
    kill_process(Pid::from_raw(launcher.parse().unwrap()).unwrap(), Signal::KILL).unwrap();
    assert!(ends(&program), "a program that a rank had started outlived its launcher");
    let run = job.wait_with_output().unwrap();
    assert_eq!(run.status.code(), Some(137), "{run:?}");
}

#[test]
fn pressing_ctrl_c_twice_ends_deaf_ranks_there_at_once() {
    crate::interrupts::heed();
    let ssh = Ssh::of_one_host();
    let (mut job, _lines, _) = started(ssh.collrun("--hosts far --grace 3600", "trap '' INT; echo $$; while :; do sleep 0.01; done"));
    let process = handle(&job.id().to_string());
    let pause = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    while poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&pause)).unwrap() == 0 {
        kill_process(Pid::from_child(&job), Signal::INT).unwrap();
    }
    let mut said = String::new();
    job.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!((said.as_str(), job.wait().unwrap().code()), ("collrun: second request to end (SIGINT); killing all ranks\n", Some(130)));
}

#[test]
fn a_progress_bar_there_is_live_behind_its_rank() {
    let ssh = Ssh::of_one_host();
    let script = format!("printf '\r 10%%'; while [ ! -e {} ]; do sleep 0.01; done; printf '\r100%%\n'", ssh.file("seen").display());
    let mut job = ssh.collrun("--hosts far", &script).spawn().unwrap();
    let mut shown = job.stdout.take().unwrap();
    let mut first = [0; "\r[far 0]  10%".len()];
    shown.read_exact(&mut first).unwrap();
    std::fs::write(ssh.file("seen"), "").unwrap();
    let mut rest = String::new();
    shown.read_to_string(&mut rest).unwrap();
    assert_eq!((&first, rest.as_str()), (b"\r[far 0]  10%", "\r[far 0] 100%\n"));
    assert!(job.wait().unwrap().success());
}

#[test]
fn ranks_end_when_the_connection_breaks() {
    // A separate process carries the bytes, and the rest survives it.
    let ssh = Ssh::new("sh -c 'echo $$ >$0/carrier; exec cat' $here | setsid env -i PATH=\"$PATH\" sh -c \"$command\"");
    let (job, _lines, pid) = started(ssh.collrun("--hosts far", "echo $$; exec sleep 600"));
    let rank = handle(&pid);
    let carrier = std::fs::read_to_string(ssh.file("carrier")).unwrap();
    kill_process(Pid::from_raw(carrier.trim().parse().unwrap()).unwrap(), Signal::KILL).unwrap();
    assert!(ends(&rank));
    let run = job.wait_with_output().unwrap();
    assert_ne!(run.status.code(), Some(0), "{run:?}");
}

#[test]
fn connections_that_do_not_end_are_cut() {
    // It ignores all input and the request to end.
    let ssh = Ssh::new("trap '' TERM; echo $$ >&2; exec 0</dev/null; sleep 600 & wait; wait");
    let run = ssh.output("--hosts absent,far --grace 0 --master-addr 192.0.2.1", "true");
    let text = said(&run);
    assert!(run.status.code() == Some(255) && text.contains("far does not end; closing the connection"), "{run:?}");
}

/// Creates a replacement for ssh that reaches the hosts by their addresses.
fn to_hosts(hosts: &Hosts, net: u8) -> Ssh {
    let cases: String = (0..hosts.count).map(|host| format!("10.99.{net}.{}) space={};; ", host + 1, hosts.space(host))).collect();
    Ssh::new(&format!("case $host in {cases} esac; exec ip netns exec $space env -i PATH=\"$PATH\" sh -c \"$command\""))
}

/// Returns the processes that run on a host.
fn left_on(hosts: &Hosts, host: usize) -> String {
    let listed = Command::new("ip").args(["netns", "pids", &hosts.space(host)]).output().unwrap();
    String::from_utf8_lossy(&listed.stdout).into_owned()
}

fn on_hosts(ssh: &Ssh, flags: &str, program: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
    command.arg("--ssh").arg(ssh.file("ssh")).args(flags.split_whitespace()).arg("--").arg(program).args(arguments);
    command.current_dir(ssh.folder.path()).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn one_command_runs_a_job_on_three_hosts() {
    let collperf = match program("collperf") {
        Ok(collperf) => collperf,
        Err(why) => skip!("{why}"),
    };
    let hosts = match Hosts::up(4, 3) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    let ssh = to_hosts(&hosts, 4);
    std::fs::write(ssh.file("hosts"), "10.99.4.1 slots=2\n10.99.4.2 slots=2 # the second\n\n10.99.4.3:2\n").unwrap();
    let sizes = ["all_reduce", "-b", "8", "-e", "64K", "-f", "64", "-n", "2", "-w", "1"];
    for flags in ["--hostfile hosts --secret", "--hosts 10.99.4.1,10.99.4.2,10.99.4.3 --nproc-per-node 2 --max-restarts 1"] {
        let run = on_hosts(&ssh, flags, &collperf, &sizes);
        let text = String::from_utf8_lossy(&run.stdout);
        assert!(run.status.success() && text.contains("[10.99.4.1 0] ") && text.contains("Out of bounds values : 0 OK"), "{run:?}");
    }
    let script = "test $RANK != 3 || exit 9; exec sleep 600";
    let run = on_hosts(&ssh, "--hostfile hosts", Path::new("sh"), &["-c", script]);
    let last = said(&run).lines().last().unwrap_or_default().to_owned();
    assert_eq!(run.status.code(), Some(9), "{run:?}");
    assert!(last.starts_with("collrun: first failure: rank 3 (local rank 1)") && last.ends_with("exit code 9"), "{run:?}");
    // A failure on one host restarts the ranks of all hosts.
    let script = "test $TORCHELASTIC_RESTART_COUNT = 0 || { echo again $RANK; exit 0; }; test $RANK != 3 || exit 9; exec sleep 600";
    let run = on_hosts(&ssh, "--hostfile hosts --max-restarts 1", Path::new("sh"), &["-c", script]);
    assert_eq!((run.status.code(), String::from_utf8_lossy(&run.stdout).matches("] again ").count()), (Some(0), 6), "{run:?}");
    for host in 0..3 {
        assert_eq!(left_on(&hosts, host), "", "host {host}");
    }
}

#[test]
fn a_host_whose_connection_breaks_ends_the_job_everywhere() {
    let hosts = match Hosts::up(5, 2) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    let ssh = to_hosts(&hosts, 5);
    let (job, lines, _) = started(ssh.collrun("--hosts 10.99.5.1,10.99.5.2", "echo $RANK; exec sleep 600"));
    // Both are running; then the launcher of the second host is killed, as if its host were lost.
    let second = lines.lines().next().unwrap().unwrap();
    assert!(second.starts_with("[10.99.5."), "{second}");
    let launcher = left_on(&hosts, 1).lines().find_map(|pid| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&words).contains("--controlled").then(|| pid.to_owned())
    });
    kill_process(Pid::from_raw(launcher.unwrap().parse().unwrap()).unwrap(), Signal::KILL).unwrap();
    let run = job.wait_with_output().unwrap();
    assert!(run.status.code() == Some(137) && said(&run).contains("collrun on 10.99.5.2 ended"), "{run:?}");
    assert_eq!((left_on(&hosts, 0), left_on(&hosts, 1)), (String::new(), String::new()));
}

#[test]
fn a_host_that_was_done_too_early_is_named_beside_the_failure() {
    let hosts = match Hosts::up(6, 2) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    let ssh = to_hosts(&hosts, 6);
    // The second host's rank has ended; the first host's rank fails after the launcher there is gone.
    let script = format!(
        "if [ $RANK = 1 ]; then echo $PPID >{0}.new; mv {0}.new {0}; exit; fi; while [ ! -e {0} ]; do sleep 0.01; done; \
         while kill -0 $(cat {0}) 2>/dev/null; do sleep 0.01; done; exit 3",
        ssh.file("launcher").display()
    );
    let run = ssh.output("--hosts 10.99.6.1,10.99.6.2", &script);
    let text = said(&run);
    assert_eq!(run.status.code(), Some(3), "{run:?}");
    assert!(text.ends_with(": exit code 3\ncollrun: all ranks of 10.99.6.2 had ended with exit code 0 before this failure\n"), "{text}");
}
