//! The guide's table of torchrun's flags, row by row: what it says is served runs, and what it says is refused is, with those words. And
//! torchrun's own command lines.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// torchrun's flags, of PyTorch 2.15.
const FLAGS: &str = "-h --help --nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --standalone --max-restarts \
    --monitor-interval --start-method --event-log-handler --role -m --module --no-python --run-path --log-dir -r --redirects -t --tee \
    --log-line-prefix-template --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --node-rank --master-addr \
    --master-port --local-addr --logs-specs --numa-binding --signals-to-handle --shutdown-timeout --virtual-local-rank --print-completion";

/// A row of the guide's table.
struct Entry {
    names: Vec<String>,
    here: String,
    value: Option<String>,
}

/// What stands between backquotes.
fn quoted(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

fn entries() -> Vec<Entry> {
    let guide = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src/from-torchrun.md")).unwrap();
    let (_, table) = guide.split_once("| torchrun |").unwrap();
    let lines = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let entry = |line: &str| {
        let cells: Vec<_> = line.split('|').collect();
        let [_, names, _, here, value, _] = cells[..] else { panic!("not four cells: {line}") };
        Entry { names: quoted(names), here: here.trim().to_owned(), value: quoted(value).pop() }
    };
    lines.map(entry).collect()
}

/// A job of a program that python3 and a shell run alike, with one more flag.
fn run(folder: &Path, name: &str, value: Option<&str>) -> Output {
    std::fs::write(folder.join("nothing.py"), "").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
    command.current_dir(folder).env("TMPDIR", folder).stdin(Stdio::null());
    command.arg(name).args(value);
    match &*name.replace('_', "-") {
        "-m" | "--module" => command.arg("nothing"),
        "--run-path" => command.arg(folder.join("nothing.py")),
        _ => command.arg("true"),
    };
    command.output().unwrap()
}

#[test]
fn every_flag_is_in_the_table() {
    let mut names: Vec<String> = entries().into_iter().flat_map(|entry| entry.names).collect();
    let mut expected: Vec<&str> = FLAGS.split_whitespace().collect();
    names.sort();
    expected.sort_unstable();
    assert_eq!(names, expected);
}

#[test]
fn every_row_of_the_table_is_true() {
    let has_python = Command::new("python3").arg("--version").output().is_ok();
    for entry in entries() {
        let both = entry.names.iter().flat_map(|name| [name.clone(), name.replacen("--", "++", 1).replace('-', "_").replace("++", "--")]);
        let mut names: Vec<String> = both.map(|name| if name.starts_with('_') { name.replacen('_', "-", 1) } else { name }).collect();
        names.dedup();
        for name in names {
            if !has_python && ["-m", "--module", "--run-path", "--run_path"].contains(&&*name) {
                println!("skipped: {name}: there is no python3");
                continue;
            }
            let folder = tempfile::tempdir().unwrap();
            let output = run(folder.path(), &name, entry.value.as_deref());
            let said = String::from_utf8_lossy(&output.stderr).split_whitespace().collect::<Vec<_>>().join(" ");
            if let Some((_, refused)) = entry.here.split_once("refused: ") {
                let words = &quoted(refused)[0];
                assert!(output.status.code() == Some(2) && said.contains(words), "{name} should be refused: {output:?}");
            } else {
                assert!(entry.here.starts_with("served"), "{name}: {}", entry.here);
                let is_quiet = said.is_empty() || said.starts_with("collrun: the ranks' files are in ");
                assert!(output.status.success() && is_quiet, "{name} should be served: {output:?}");
            }
        }
    }
}

/// The command lines of torchrun's documentation, with collrun for torchrun and values for what is left open there.
#[test]
fn their_command_lines_run() {
    if Command::new("python3").arg("--version").output().is_err() {
        return println!("skipped: there is no python3");
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("script.py"), "import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:])\n")
        .unwrap();
    let run = |line: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_collrun"));
        command.args(line.split_whitespace()).current_dir(folder.path()).stdin(Stdio::null()).output().unwrap()
    };
    let lines = [
        // One host; several jobs on one host; as many restarts as are borne.
        "--standalone --nnodes=1 --nproc-per-node=3 script.py --arg1 1",
        "--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --nnodes=1 --nproc-per-node=3 script.py --arg1 1",
        "--nnodes=1 --nproc-per-node=3 --max-restarts=3 --rdzv-id=17 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 script.py --arg1 1",
    ];
    for line in lines {
        let output = run(line);
        let mut printed: Vec<String> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
        printed.sort();
        assert_eq!(printed, [0, 1, 2].map(|rank| format!("[{rank}] {rank} 3 --arg1 1")), "{line}: {output:?}");
    }
    // The elastic one.
    let output =
        run("--nnodes=1:4 --nproc-per-node=3 --max-restarts=3 --rdzv-id=17 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 script.py");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("give --nnodes 4"), "{output:?}");
}
