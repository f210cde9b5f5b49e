//! `collperf ps`, asked from outside about jobs that hang for several reasons.

use std::path::Path;
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::hosts::{Hosts, skip};
use crate::common::limit::Limit;
use crate::common::meeting::wait_until;
use crate::common::ranks::{free_port, is_rank_of, spawn_rank};
use collectives::{Communicator, ReduceOp};
use rustix::process::{Pid, Signal, kill_process};

/// The variable with the folder in which ranks and the test leave files for each other.
const FOLDER: &str = "COLLECTIVES_TEST_FOLDER";

/// The number of ranks on each host.
const RANKS: usize = 4;

/// Waits until there is a file of this name. The wait ends when the test kills the rank.
fn await_file(folder: &Path, name: &str) {
    while !folder.join(name).exists() {
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

/// Runs one rank, which is held up three times: rank 1 comes late to a call, rank 2 to another one, and the ranks use
/// two communicators in different orders.
fn rank() {
    let folder = std::env::var_os(FOLDER).map(std::path::PathBuf::from).unwrap();
    let comm = Communicator::from_env().unwrap();
    let other = comm.split(Some(0), 0).unwrap().unwrap();
    comm.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum).unwrap();
    if comm.rank() == 1 {
        await_file(&folder, "slow");
    }
    comm.all_reduce(&mut [1.0_f64; 2], ReduceOp::Min).unwrap();
    if comm.rank() == 2 {
        std::fs::write(folder.join("ready"), "").unwrap();
        await_file(&folder, "stopped");
    }
    comm.broadcast(&mut [1_u8; 7], 0).unwrap();
    if comm.rank().is_multiple_of(2) {
        drop(comm.barrier());
    }
    drop(other.all_reduce(&mut [1_u16], ReduceOp::Max));
    await_file(&folder, "never");
}

/// The time after which an answer has certainly hung. On an idle machine, an answer takes less than two seconds.
const LATE: Duration = Duration::from_secs(20);

/// Runs `collperf ps`, prints the time from its start to its end, and checks that it did not hang.
fn timed(ask: impl FnOnce() -> Output) -> Output {
    let began = Instant::now();
    let output = ask();
    let took = began.elapsed();
    println!("collperf ps answered after {:.3} s", took.as_secs_f64());
    assert!(took < LATE, "collperf ps took {took:?}");
    output
}

/// A job, and the way to ask where it is.
struct Job {
    ranks: Vec<Child>,
    _limits: Vec<Limit>,
    folder: tempfile::TempDir,
    ask: Box<dyn Fn() -> Command>,
}

impl Job {
    fn new(ranks: Vec<Child>, folder: tempfile::TempDir, ask: impl Fn() -> Command + 'static) -> Self {
        Self { _limits: ranks.iter().map(Limit::on).collect(), ranks, folder, ask: Box::new(ask) }
    }

    fn put(&self, file: &str) {
        std::fs::write(self.folder.path().join(file), "").unwrap();
    }

    fn signal(&self, rank: usize, signal: Signal) {
        kill_process(self.pid(rank), signal).unwrap();
    }

    fn pid(&self, rank: usize) -> Pid {
        Pid::from_child(&self.ranks[rank])
    }

    /// Returns the answer in JSON. Jobs of other tests are in it, too.
    fn answer(&self) -> Value {
        let output = timed(|| (self.ask)().arg("--json").output().unwrap());
        let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{text}\n{errors}");
        serde_json::from_str(&text).unwrap()
    }

    /// Whether a part of an answer concerns this job.
    fn has(&self, pid: &Value) -> bool {
        self.ranks.iter().any(|rank| *pid == rank.id())
    }

    /// Asks until the answer about this job's communicator `name`, with its cycles, contains all of these words.
    fn await_words(&self, name: &str, words: &[String]) -> Value {
        let (mut found, mut before) = (Value::Null, String::new());
        wait_until("collperf ps names the cause", || {
            let all = self.answer();
            let communicators = all["communicators"].as_array().unwrap();
            let own = communicators.iter().find(|of| of["name"] == name && self.has(&of["ranks"][0]["pid"]));
            let cycles = all["cycles"].as_array().unwrap().iter().map(ToString::to_string);
            let own_cycles: String =
                cycles.filter(|text| self.ranks.iter().any(|rank| text.contains(&format!("pid {})", rank.id())))).collect();
            found = own.cloned().unwrap_or_default();
            let said = format!("{}{own_cycles}", found["findings"]);
            if said != before {
                println!("{said}");
            }
            before.clone_from(&said);
            words.iter().all(|word| said.contains(word))
        });
        found
    }

    /// Holds the job up for each reason in turn, and checks that the reason is named.
    fn is_explained(&self) {
        let named = |rank: usize| format!("pid {})", self.ranks[rank].id());
        let late = ["rank 1 (host ", &named(1), "is behind: it has not reached all_reduce(min, f64, count 2) number"].map(str::to_owned);
        let world = self.await_words("world", &late);
        let call = &world["ranks"][0]["call"];
        assert!(call["text"].as_str().unwrap().starts_with("all_reduce(min, f64, count 2)") && call["state"] == "waits", "{world}");
        assert!(call["seconds"].as_f64().unwrap() >= 0.9 && world["ranks"][1]["call"]["state"] == "ended", "{world}");
        self.put("slow");

        await_file(self.folder.path(), "ready");
        self.signal(2, Signal::STOP);
        let stopped = ["rank 2 (host ", &named(2), ": stopped by a signal", " wait for it"].map(str::to_owned);
        let world = self.await_words("world", &stopped);
        assert_eq!((&world["ranks"][2]["process"], &world["ranks"][2]["call"]), (&"stopped".into(), &Value::Null));
        self.put("stopped");
        self.signal(2, Signal::CONT);

        let cycle =
            ["each rank waits for the next, and the last rank waits for the first", "in barrier number", "all_reduce(max, u16, count 1)"];
        self.await_words("world", &cycle.map(str::to_owned));
    }

    /// Kills a rank, and checks that the others' answers and its process together say that it is gone.
    fn death_is_explained(&mut self) {
        let pid = self.ranks[3].id();
        self.ranks[3].kill().unwrap();
        self.ranks[3].wait().unwrap();
        let world = self.await_words("world", &["rank 3 (host ".to_owned(), format!("pid {pid}): gone: there is no such process")]);
        assert_eq!((&world["ranks"][3]["process"], &world["ranks"][3]["call"]), (&"gone".into(), &Value::Null), "{world}");
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

fn ps() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_collperf"));
    command.arg("ps");
    command
}

#[test]
fn a_job_that_hangs_is_explained_from_outside() {
    const NAME: &str = "ps::a_job_that_hangs_is_explained_from_outside";
    if is_rank_of(NAME) {
        return rank();
    }
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let variables = [(FOLDER, folder.path().display().to_string())];
    let ranks = (0..RANKS).map(|rank| spawn_rank(NAME, rank, RANKS, port, &variables)).collect();
    let mut job = Job::new(ranks, folder, ps);
    job.is_explained();
    let text = ps().output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    let line = format!("{}  ", job.ranks[0].id());
    assert!(text.contains("communicator world") && text.lines().any(|text| text.contains(&line) && text.contains("waits")), "{text}");
    job.death_is_explained();
}

#[test]
fn ranks_on_two_hosts_are_explained_together() {
    const NAME: &str = "ps::ranks_on_two_hosts_are_explained_together";
    const NET: u8 = 61;
    if is_rank_of(NAME) {
        return rank();
    }
    let hosts = match Hosts::up(NET, 2) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    let folder = tempfile::tempdir().unwrap();
    let start = |rank: usize| {
        let mut command = hosts.command(rank / RANKS, std::env::current_exe().unwrap().to_str().unwrap());
        command.args([NAME, "--exact", "--nocapture", "--test-threads=1"]).env("COLLECTIVES_TEST_CHILD", NAME);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", (2 * RANKS).to_string()).env(FOLDER, folder.path());
        command.env("MASTER_ADDR", format!("10.99.{NET}.1")).env("MASTER_PORT", "29512").env("COLLECTIVES_TIMEOUT", "120");
        // All hosts have the same name and boot id here.
        command.env("COLLECTIVES_HOST_IDENTITY", format!("host {}", rank / RANKS)).spawn().unwrap()
    };
    let ranks: Vec<Child> = (0..2 * RANKS).map(start).collect();
    // In place of ssh.
    let ssh = folder.path().join("ssh");
    std::fs::write(&ssh, "#!/bin/sh\nexec ip netns exec \"$1\" sh -c \"$2\"\n").unwrap();
    std::fs::set_permissions(&ssh, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let names = [hosts.space(0), hosts.space(1)];
    let spaces = names.clone();
    let job = Job::new(ranks, folder, move || {
        let mut command = ps();
        command.arg("--hosts").arg(spaces.join(",")).arg("--ssh").arg(&ssh);
        command
    });
    job.is_explained();

    // The same from a file of each host. With one of them, the other host's ranks are said to be missing.
    let files: Vec<_> = names.iter().map(|name| job.folder.path().join(format!("{name}.json"))).collect();
    for (host, file) in files.iter().enumerate() {
        let said = hosts.command(host, env!("CARGO_BIN_EXE_collperf")).args(["ps", "--json"]).output().unwrap();
        std::fs::write(file, said.stdout).unwrap();
    }
    let merge = |files: &[std::path::PathBuf]| String::from_utf8(ps().arg("--merge").args(files).output().unwrap().stdout).unwrap();
    let (both, one) = (merge(&files), merge(&files[..1]));
    assert!(both.contains("each rank waits for the next") && !both.contains("no socket"), "{both}");
    assert!(one.contains("no socket") && one.contains("rank 7 (host "), "{one}");
}

#[test]
fn a_host_that_cannot_be_asked_is_named() {
    let asked = |arguments: &[&str]| -> Output { ps().args(arguments).output().unwrap() };
    for (arguments, said) in [
        (&["--hosts", "absent", "--ssh", "false"][..], "not asked: absent: collperf ended there with exit status: 1"),
        (&["--hosts=-oProxyCommand=x", "--ssh", "false"], "is not a host"),
        (&["--hosts", "absent", "--ssh", "/absent/ssh"], "absent: starting \"/absent/ssh\""),
        (&["--hosts", "absent", "--ssh", "echo"], "not what collperf ps --json prints"),
        (&["--merge", "/absent/file"], "not asked: /absent/file: No such file"),
        (&["--merge", "/dev/null"], "/dev/null"),
    ] {
        let output = asked(arguments);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.code() == Some(1) && text.contains(said), "{arguments:?}: {}\n{text}", output.status);
    }
    assert_eq!(asked(&["--timeout", "0"]).status.code(), Some(6));
}

#[test]
fn a_watch_asks_again_until_its_reader_is_gone() {
    use std::io::{BufRead, BufReader};
    use std::os::unix::process::ExitStatusExt;

    let mut watch = ps().args(["--json", "--watch", "0.01"]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let _limit = Limit::on(&watch);
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    let times: Vec<Value> = lines.by_ref().take(3).map(|line| serde_json::from_str::<Value>(&line).unwrap()["time_ns"].take()).collect();
    assert!(times[0].as_u64() < times[1].as_u64() && times[1].as_u64() < times[2].as_u64(), "{times:?}");
    drop(lines);
    assert_eq!(watch.wait().unwrap().signal(), Some(Signal::PIPE.as_raw()));
}

#[cfg(feature = "cuda")]
mod devices {
    use super::*;
    use crate::common::ranks::{alone_in_a_process, threads_with};
    use collectives::DeviceChoice;

    #[test]
    fn a_device_call_that_does_not_end_is_named() {
        if std::env::var("COLLECTIVES_TEST_GPU").as_deref() == Ok("real") {
            skip!("it steers the simulated GPU");
        }
        alone_in_a_process("ps::devices::a_device_call_that_does_not_end_is_named", || {
            let _alone = simgpu::alone();
            simgpu::install();
            let builder = |_| {
                let builder = Communicator::builder().configure(|config| config.timeout = Duration::from_secs(60));
                builder.require_device(DeviceChoice::Local)
            };
            threads_with(2, builder, |comm| {
                let device = comm.device().unwrap();
                let stream = device.stream();
                let mut buffer = stream.clone_htod(&[1_u32; 100]).unwrap();
                comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
                device.synchronize().unwrap();
                let held = (comm.rank() == 0).then(|| simgpu::Gate::close(stream.cu_stream().cast()));
                comm.all_reduce(&mut buffer, ReduceOp::Max).unwrap();
                if comm.rank() == 0 {
                    wait_until("the call is named", is_named);
                }
                drop(held);
                device.synchronize().unwrap();
                comm.barrier().unwrap();
            });
        });
    }

    /// Whether `collperf ps` says that the call on the devices of this process has not ended.
    fn is_named() -> bool {
        let output = timed(|| ps().arg("--json").output().unwrap());
        let all: Value = serde_json::from_slice(&output.stdout).unwrap();
        let own = all["communicators"].as_array().unwrap().iter().find(|of| of["ranks"][0]["pid"] == std::process::id());
        let said = own.map(|of| of["findings"].to_string()).unwrap_or_default();
        println!("{said}");
        let queued = "every rank has queued all_reduce(max, u32, count 100) number";
        let is_said = said.contains(queued) && said.contains("the call has not ended on the devices of rank");
        assert!(!is_said || own.unwrap()["ranks"][0]["call"]["backend"] == "device", "{all}");
        is_said
    }
}
