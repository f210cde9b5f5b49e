//! Device memory that several processes map. Each test starts itself again.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "the runtime is C")]

mod runtime_common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use runtime_common::*;

const BYTES: usize = 10_000;
const INVALID_HANDLE: u32 = 400;

impl MemoryHandle {
    fn digits(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn from_digits(digits: &str) -> MemoryHandle {
        MemoryHandle(std::array::from_fn(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap()))
    }
}

fn export(start: u64) -> MemoryHandle {
    let mut handle = MemoryHandle([0; 64]);
    assert_eq!(cudaIpcGetMemHandle(&raw mut handle, start), 0);
    handle
}

fn open(handle: MemoryHandle) -> Result<u64, u32> {
    let mut place = 0;
    match cudaIpcOpenMemHandle(&raw mut place, handle, 1) {
        0 => Ok(place),
        code => Err(code),
    }
}

/// Another process that runs the same test, and communicates by lines.
struct Other {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Other {
    fn start(test: &str) -> Other {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([test, "--exact", "--nocapture"]).env("OTHER", "1").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (to, from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Other { child, to, from }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.to, "{line}").unwrap();
    }

    /// Returns its answer.
    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.from.read_line(&mut line).unwrap(), 0, "the other process ended");
            if let Some((_, answer)) = line.trim_end().split_once("answer ") {
                return answer.to_owned();
            }
        }
    }

    fn end(mut self) {
        drop(self.to);
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A child process that ends with the test, whatever the result.
struct Killed(Child);

/// Executes the lines of the other side until there are no more. Returns false in the process that started the test.
fn obey() -> bool {
    if std::env::var_os("OTHER").is_none() {
        return false;
    }
    simgpu::install_cuda_only();
    let (mut mapped, mut owned) = (0, 0);
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (verb, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = match verb {
            "device" => cudaSetDevice(rest.parse().unwrap()).to_string(),
            "own" => {
                owned = memory(BYTES, rest.parse().unwrap());
                export(owned).digits()
            }
            "open" => match open(MemoryHandle::from_digits(rest)) {
                Ok(place) => {
                    let again = mapped != 0 && place == mapped;
                    mapped = place;
                    if again { "again".into() } else { "opened".into() }
                }
                Err(code) => code.to_string(),
            },
            "read" => {
                let bytes = read(if mapped != 0 { mapped } else { owned }, BYTES);
                if bytes.iter().all(|byte| *byte == bytes[0]) { bytes[0].to_string() } else { "mixed".into() }
            }
            "fill" => cudaMemset(mapped, rest.parse().unwrap(), BYTES).to_string() + &cudaDeviceSynchronize().to_string(),
            "beyond" => cudaMemset(mapped, 0, BYTES + 1).to_string(),
            "close" => cudaIpcCloseMemHandle(mapped).to_string(),
            _ => panic!("{line:?}"),
        };
        println!("answer {answer}");
    }
    no_reports();
    true
}

#[test]
fn memory_is_shared_and_lives_on_where_it_is_mapped() {
    if obey() {
        return;
    }
    let _alone = simgpu::alone();
    let start = memory(BYTES, 7);
    let handle = export(start + 5000);
    assert_eq!(open(handle), Err(201), "a process has its own memory at its own addresses");
    let mut other = Other::start("memory_is_shared_and_lives_on_where_it_is_mapped");
    let mut ask = |line: &str| {
        other.say(line);
        other.hear()
    };
    // On another device than the owner's: opening enables the access.
    assert_eq!(ask("device 3"), "0");
    assert_eq!(ask(&format!("open {}", handle.digits())), "opened");
    assert_eq!((ask("read").as_str(), ask("beyond").as_str(), ask("fill 9").as_str()), ("7", "1", "00"));
    assert_eq!(read(start, BYTES), [9; BYTES]);
    assert_eq!(ask(&format!("open {}", handle.digits())), "again");
    assert_eq!(cudaFree(start), 0);
    assert_eq!(ask("read"), "9", "what is mapped stays whole when its owner frees it");
    assert_eq!((ask("close").as_str(), ask("read").as_str(), ask("close").as_str(), ask("close").as_str()), ("0", "9", "0", "1"));
    assert_eq!(ask(&format!("open {}", handle.digits())), INVALID_HANDLE.to_string());
    let mut forged = handle;
    forged.0[0] ^= 1;
    assert_eq!(ask(&format!("open {}", forged.digits())), "1");
    other.end();
    let mut gone = MemoryHandle([0; 64]);
    assert_eq!((cudaIpcGetMemHandle(&raw mut gone, start), cudaIpcCloseMemHandle(start)), (1, 1));
    no_reports();
}

/// Returns the number of mapped pages of unnamed files.
fn maps() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|line| line.contains("memfd:simgpu")).count()
}

fn shared_names() -> Vec<String> {
    let names = std::fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains("simgpu")).collect()
}

#[test]
fn nothing_is_left_of_a_process_that_is_killed() {
    if obey() {
        return;
    }
    let _alone = simgpu::alone();
    assert_eq!(cudaSetDevice(0), 0);
    let mapped_before = maps();
    let mut other = Other::start("nothing_is_left_of_a_process_that_is_killed");
    other.say("own 4");
    let handle = MemoryHandle::from_digits(&other.hear());
    let place = open(handle).unwrap();
    assert_eq!(cudaMemset(place, 6, BYTES), 0);
    assert_eq!(cudaDeviceSynchronize(), 0);
    other.say("read");
    assert_eq!(other.hear(), "6");
    let mut owner = Killed(other.child);
    owner.0.kill().unwrap();
    owner.0.wait().unwrap();
    assert_eq!(read(place, BYTES), [6; BYTES], "what is mapped stays whole when its owner dies");
    // Opened before, so the count is incremented; it takes as many closes.
    assert_eq!(open(handle), Ok(place));
    assert_eq!((cudaIpcCloseMemHandle(place), maps()), (0, mapped_before + 1));
    assert_eq!((cudaIpcCloseMemHandle(place), maps()), (0, mapped_before));
    assert_eq!(open(handle), Err(INVALID_HANDLE));
    assert_eq!(shared_names(), [""; 0]);
    no_reports();
}
