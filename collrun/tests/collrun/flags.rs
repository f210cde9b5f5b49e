//! The guide's tables of torchrun's flags and variables and of mpirun's flags, row by row: supported ones must run, and
//! refused ones must fail with the documented error. torchrun's own command lines are tested too.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::common::hosts::skip;
use crate::common::ports::free_port;
use crate::common::programs::program;

/// torchrun's flags, of PyTorch 2.15.
const FLAGS: &str = "-h --help --nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --standalone --max-restarts \
    --monitor-interval --start-method --event-log-handler --role -m --module --no-python --run-path --log-dir -r --redirects -t --tee \
    --log-line-prefix-template --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --node-rank --master-addr \
    --master-port --local-addr --logs-specs --numa-binding --signals-to-handle --shutdown-timeout --virtual-local-rank --print-completion";

/// The variables that torchrun reads: those of argparse, and the others in torch/distributed/elastic, launcher and
/// run.py.
const VARIABLES: &str = "NNODES NPROC_PER_NODE RDZV_BACKEND RDZV_ENDPOINT RDZV_ID RDZV_CONF STANDALONE MAX_RESTARTS MONITOR_INTERVAL START_METHOD \
    EVENT_LOG_HANDLER ROLE MODULE NO_PYTHON RUN_PATH LOG_DIR REDIRECTS TEE LOG_LINE_PREFIX_TEMPLATE LOCAL_RANKS_FILTER \
    DUPLICATE_STDOUT_FILTERS DUPLICATE_STDERR_FILTERS NODE_RANK MASTER_ADDR MASTER_PORT LOCAL_ADDR SIGNALS_TO_HANDLE SHUTDOWN_TIMEOUT \
    VIRTUAL_LOCAL_RANK";
const OTHER_VARIABLES: &str = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE TORCH_ELASTIC_SHUTDOWN_TIMEOUT TORCHELASTIC_ERROR_FILE \
    TORCHELASTIC_SIGNALS_TO_HANDLE TORCHELASTIC_ENABLE_FILE_TIMER TORCHELASTIC_TIMER_FILE TORCHELASTIC_HEALTH_CHECK_PORT \
    TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT TORCH_ELASTIC_WORKER_IDENTICAL TORCH_DISABLE_SHARE_RDZV_TCP_STORE PYTHON_EXEC LOGLEVEL USE_LIBUV";

/// A row of the guide's table.
struct Entry {
    names: Vec<String>,
    here: String,
    value: Option<String>,
}

/// Returns the texts between backquotes.
fn quoted(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Returns the rows of the table whose first column has this title.
fn entries(head: &str) -> Vec<Entry> {
    let guide = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src/from-torchrun.md")).unwrap();
    let (_, table) = guide.split_once(&format!("\n| {head} |")).unwrap();
    let lines = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let entry = |line: &str| {
        let cells: Vec<_> = line.split('|').collect();
        let [_, names, _, here, value, _] = cells[..] else { panic!("not four cells: {line}") };
        Entry { names: quoted(names), here: here.trim().to_owned(), value: quoted(value).pop() }
    };
    lines.map(entry).collect()
}

/// Runs a job, with one more flag or variable, of a program that is valid both for python3 and for a shell.
fn run(folder: &Path, name: &str, value: Option<&str>) -> Output {
    std::fs::write(folder.join("nothing.py"), "").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
    command.current_dir(folder).env("TMPDIR", folder).stdin(Stdio::null());
    match name.starts_with('-') {
        true => command.arg(name).args(value),
        false => command.env(name, value.unwrap()),
    };
    match &*name.replace('_', "-") {
        "-m" | "--module" | "PET-MODULE" => command.arg("nothing"),
        "--run-path" | "PET-RUN-PATH" | "PYTHON-EXEC" => command.arg(folder.join("nothing.py")),
        _ => command.arg("true"),
    };
    command.output().unwrap()
}

/// Returns whether a row needs Python, which may not be installed.
fn needs_python(name: &str) -> bool {
    ["-m", "--module", "--run-path", "--run_path", "PET_MODULE", "PET_RUN_PATH", "PYTHON_EXEC"].contains(&name)
}

/// Tests one row, by one of its names.
fn holds(entry: &Entry, name: &str) {
    let folder = tempfile::tempdir().unwrap();
    let output = run(folder.path(), name, entry.value.as_deref());
    let said = String::from_utf8_lossy(&output.stderr).split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some((_, refused)) = entry.here.split_once("refused: ") {
        let words = &quoted(refused)[0];
        let names_it = name.starts_with('-') || said.contains(name);
        assert!(output.status.code() == Some(2) && said.contains(words) && names_it, "{name} should be refused: {output:?}");
    } else {
        assert!(entry.here.starts_with("served"), "{name}: {}", entry.here);
        let is_quiet = said.is_empty() || said.starts_with("collrun: the ranks' files are in ");
        assert!(output.status.success() && is_quiet, "{name} should be served: {output:?}");
    }
}

#[test]
fn every_flag_and_variable_is_in_a_table() {
    let prefixed = VARIABLES.split_whitespace().map(|name| format!("PET_{name}"));
    let variables = prefixed.chain(OTHER_VARIABLES.split_whitespace().map(str::to_owned)).collect();
    for (head, mut expected) in [("torchrun", FLAGS.split_whitespace().map(str::to_owned).collect::<Vec<_>>()), ("variable", variables)] {
        let mut names: Vec<String> = entries(head).into_iter().flat_map(|entry| entry.names).collect();
        names.sort();
        expected.sort_unstable();
        assert_eq!(names, expected);
    }
}

#[test]
fn every_row_of_the_table_is_true() {
    let has_python = Command::new("python3").arg("--version").output().is_ok();
    for entry in ["torchrun", "variable", "mpirun"].into_iter().flat_map(entries) {
        let both = entry.names.iter().flat_map(|name| match name.strip_prefix("--") {
            Some(words) => vec![name.clone(), format!("--{}", words.replace('-', "_"))],
            None => vec![name.clone()],
        });
        let mut names: Vec<String> = both.collect();
        names.dedup();
        for name in names {
            match needs_python(&name) && !has_python {
                true => println!("skipped: {name}: there is no python3"),
                false => holds(&entry, &name),
            }
        }
    }
}

#[test]
fn mpirun_s_command_lines_run_on_one_host() {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("inner");
    std::fs::create_dir(&inner).unwrap();
    let run = |flags: &str, variables: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
        command.args(flags.split_whitespace()).args(["sh", "-c", "echo $WORLD_SIZE; pwd"]).envs(variables.iter().copied());
        command.current_dir(folder.path()).stdin(Stdio::null()).output().unwrap()
    };
    let inner = std::fs::canonicalize(inner).unwrap();
    for flags in ["-np 1 -wdir inner", "-n 1 --chdir inner", "--nproc-per-node 3 --np 1 --wdir inner"] {
        let output = run(flags, &[("PET_NPROC_PER_NODE", "5")]);
        assert_eq!(String::from_utf8_lossy(&output.stdout), format!("[0] 1\n[0] {}\n", inner.display()), "{flags}: {output:?}");
    }
    for (flags, words) in [
        ("-np 4 --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --master-port 7", "-n 4: mpirun counts the ranks of all hosts together"),
        ("-np 4 --hosts a,b", "-n 4: mpirun counts the ranks of all hosts together"),
        ("-n 2 --hosts a:2", "given twice"),
        ("-n 2 -wdir absent", "--wdir absent: there is no such folder on this host"),
        ("-host a,b", "give --hosts a,b"),
    ] {
        let output = run(flags, &[]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(words) && said.lines().count() == 1, "{flags}: {output:?}");
    }
}

/// As in mpirun, a program's path is relative to the folder in which it starts.
#[test]
fn a_program_is_looked_for_where_it_starts() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    std::fs::copy("/bin/true", &program).unwrap();
    let run = |folder: &Path, program: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
        command.args(["-n", "2", "--wdir"]).arg(folder).arg(program).current_dir("/").stdin(Stdio::null()).output().unwrap()
    };
    assert!(run(folder.path(), "./program").status.success());
    assert_eq!(run(Path::new("/"), "./program").status.code(), Some(127));
}

#[test]
fn variables_do_what_their_flags_do_and_give_way_to_them() {
    let folder = tempfile::tempdir().unwrap();
    let run = |flags: &str, variables: &[(&str, &str)], script: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
        command.args(flags.split_whitespace()).args(["sh", "-c", script]).envs(variables.iter().copied());
        command.current_dir(folder.path()).stdin(Stdio::null()).output().unwrap()
    };
    let two = [("PET_NPROC_PER_NODE", "2"), ("PET_LOG_LINE_PREFIX_TEMPLATE", "${rank}>"), ("PET_RDZV_ID", "mine")];
    let lines = |output: &Output| {
        let mut lines: Vec<String> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(lines(&run("", &two, "echo $WORLD_SIZE $TORCHELASTIC_RUN_ID")), ["0>2 mine", "1>2 mine"]);
    assert_eq!(lines(&run("--nproc-per-node 1 --rdzv-id flag", &two, "echo $WORLD_SIZE $TORCHELASTIC_RUN_ID")), ["0>1 flag"]);
    // An invalid variable that the command line overrides is ignored.
    assert!(run("--max-restarts 0", &[("PET_MAX_RESTARTS", "often")], "true").status.success());
    let output = run("", &[("PET_MAX_RESTARTS", "1")], "exit 3");
    assert!(
        output.status.code() == Some(3) && String::from_utf8_lossy(&output.stderr).contains("restarting all ranks, 1 of 1"),
        "{output:?}"
    );
    // The first failure is reported to the launcher above this one.
    let output = run("", &[("TORCHELASTIC_ERROR_FILE", "above.json")], "exit 5");
    let above = std::fs::read_to_string(folder.path().join("above.json")).unwrap();
    assert!(output.status.code() == Some(5) && above.contains("rank 0 (local rank 0)") && above.contains("exit code 5"), "{above}");
}

/// The variables that Kubeflow's trainer sets in the pods of a job, and a command line without a flag.
#[test]
fn a_job_on_two_hosts_is_told_by_variables_alone() {
    let port = free_port().to_string();
    let script = "echo $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT, host $GROUP_RANK";
    let launchers = ["0", "1"].map(|node| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
        command.args(["--", "sh", "-c", script]).env("PET_NNODES", "2").env("PET_NPROC_PER_NODE", "2").env("PET_NODE_RANK", node);
        command.env("PET_MASTER_ADDR", "127.0.0.1").env("PET_MASTER_PORT", &port).env("PET_RDZV_CONF", "join_timeout=60");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    let ended = launchers.map(|launcher| launcher.wait_with_output().unwrap());
    assert!(ended.iter().all(|output| output.status.success()), "{ended:?}");
    let mut lines: Vec<_> =
        ended.iter().flat_map(|output| String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect::<Vec<_>>()).collect();
    lines.sort();
    assert_eq!(lines, [0, 1, 2, 3].map(|rank| format!("[{rank}] {rank} of 4 at 127.0.0.1:{port}, host {}", rank / 2)));
}

/// Writes a Python script that prints its arguments, and then executes a program that does all-reduces from 8 bytes to
/// 1 KiB on a backend.
fn write_script(folder: &Path, collperf: &Path, backend: &str) {
    let script = format!(
        "import os, sys\nprint('called with', *sys.argv[1:], flush=True)\n\
         os.execv('{0}', ['{0}', 'all_reduce', '--backend', '{backend}', '-b', '8', '-e', '1K', '-f', '4', '-n', '2', '-w', '1'])\n",
        collperf.display()
    );
    std::fs::write(folder.join("script.py"), script).unwrap();
}

/// Returns the command lines of torchrun's documentation, with collrun instead of torchrun and values for its
/// placeholders: one host, several jobs on one host, and a job with restarts, whose line is also that of a job of
/// several hosts.
fn their_lines(port: u16) -> [String; 3] {
    [
        "--standalone --nnodes=1 --nproc-per-node=3 script.py --arg1 1".to_owned(),
        "--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --nnodes=1 --nproc-per-node=3 script.py --arg1 1".to_owned(),
        format!(
            "--nnodes=2 --nproc-per-node=3 --max-restarts=3 --rdzv-id=17 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} script.py --arg1 1"
        ),
    ]
}

/// Runs them, with these variables; every rank does a collective on a backend.
fn run_their_lines(backend: &str, variables: &[(&str, OsString)]) -> Result<(), String> {
    Command::new("python3").arg("--version").output().map_err(|_| "there is no python3".to_owned())?;
    let collperf = program("collperf")?;
    let folder = tempfile::tempdir().unwrap();
    write_script(folder.path(), &collperf, backend);
    for line in their_lines(free_port()) {
        let hosts = if line.contains("--nnodes=2") { 2 } else { 1 };
        let start = || {
            let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
            command.args(line.split_whitespace()).env("PET_RDZV_CONF", "join_timeout=60").envs(variables.iter().cloned());
            command.current_dir(folder.path());
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let launchers: Vec<_> = (0..hosts).map(|_| start()).collect();
        let ended: Vec<Output> = launchers.into_iter().map(|launcher| launcher.wait_with_output().unwrap()).collect();
        assert!(ended.iter().all(|output| output.status.success()), "{line}: {ended:?}");
        let printed: String = ended.iter().map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).collect();
        assert_eq!(printed.matches("called with --arg1 1").count(), 3 * hosts, "{line}: {printed}");
        // Rank 0 has compared every element with the expected one.
        assert_eq!(printed.matches("# Out of bounds values : 0 OK").count(), 1, "{line}: {printed}");
        assert!(printed.contains(&format!("#  Rank {:2} ", 3 * hosts - 1)), "{line}: {printed}");
    }
    Ok(())
}

#[test]
fn their_command_lines_run_a_collective() {
    if let Err(why) = run_their_lines("host", &[]) {
        skip!("{why}");
    }
}

#[test]
fn their_command_lines_run_a_collective_on_devices() {
    if let Err(why) = run_their_lines("device", &simgpu::environment()) {
        skip!("{why}");
    }
}

#[test]
fn their_elastic_command_line_runs_at_a_port_that_other_hosts_know() {
    let line = "--nnodes=1:4 --nproc-per-node=3 --max-restarts=3 --rdzv-id=17 --rdzv-backend=c10d";
    let run = |port: u16| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
        command.args(line.split_whitespace()).arg(format!("--rdzv-endpoint=localhost:{port}"));
        command
            .args(["--rdzv-conf=last_call_timeout=0", "--no-prefix", "sh", "-c", "test $RANK != 2 || echo $WORLD_SIZE"])
            .output()
            .unwrap()
    };
    let refused = run(0);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && said.contains("other hosts cannot know which port"), "{refused:?}");
    let ran = run(free_port());
    assert!(ran.status.success() && ran.stdout == b"3\n", "{ran:?}");
}

/// Returns the world size for a count of ranks, or the error.
fn world_size(count: &str, variables: &[(&str, OsString)]) -> Result<usize, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
    command.args([
        "--nproc-per-node",
        count,
        "--local-ranks-filter",
        "0",
        "--no-prefix",
        "sh",
        "-c",
        "test $RANK != 0 || echo $WORLD_SIZE",
    ]);
    let output = command.envs(variables.iter().cloned()).stdin(Stdio::null()).output().unwrap();
    match output.status.code() {
        Some(0) => Ok(String::from_utf8_lossy(&output.stdout).trim().parse().unwrap()),
        code => Err(format!("{code:?}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

/// Returns the number of processors that this process may use, from the kernel's list, such as `0-3,8`.
fn processors() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_owned();
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        last.parse::<usize>().unwrap() - first.parse::<usize>().unwrap() + 1
    };
    list.split(',').map(range).sum()
}

#[test]
fn ranks_are_counted_by_what_the_host_has() {
    // There is a rank for each processor that the process may use, unless a container gives it less processor time.
    let cpu = world_size("cpu", &[]).unwrap();
    assert!(cpu >= 1 && cpu <= processors(), "{cpu} of {}", processors());
    let (gpus, simulated) = (simgpu::environment(), simgpu::Configuration::default().devices as usize);
    assert_eq!((world_size("gpu", &gpus), world_size("auto", &gpus), world_size("cpu", &gpus)), (Ok(simulated), Ok(simulated), Ok(cpu)));
    assert_eq!(world_size("5", &gpus), Ok(5));
    if Path::new("/dev/nvidiactl").exists() {
        return println!("skipped in part: this machine has GPUs");
    }
    assert_eq!(world_size("auto", &[]), Ok(cpu));
    let error = world_size("gpu", &[]).unwrap_err();
    assert!(error.starts_with("Some(2): collrun: --nproc-per-node gpu: ") && error.lines().count() == 1, "{error}");
    let error = world_size("xpu", &[]).unwrap_err();
    assert!(error.contains("gpu, cpu, auto, or a number from 1 to 4096"), "{error}");
}
