//! The socket on which a process answers `collperf ps`.

#![expect(unsafe_code, reason = "forks, and changes the user of one thread")]

use std::fs;
use std::io::Read;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

use collectives::{Communicator, ReduceOp};
use serde_json::Value;

use super::common::hosts::skip;
use super::common::limit::{PATIENCE, exit_status};
use super::common::ranks::{Wiring, alone_in_a_process, communicators, communicators_with, threads};

/// Returns the names of this process's listening sockets, as every process sees them.
fn sockets() -> Vec<String> {
    let own = format!("@collectives-status-{}-", std::process::id());
    let list = fs::read_to_string("/proc/net/unix").unwrap();
    let listening = list.lines().filter(|line| line.split_whitespace().nth(3) == Some("00010000"));
    listening
        .filter_map(|line| line.split_whitespace().nth(7))
        .filter(|name| name.starts_with(&own))
        .map(|name| name[1..].to_owned())
        .collect()
}

fn connect(name: &str) -> UnixStream {
    let connection = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    connection
}

/// Returns all that the process sends.
fn ask(name: &str) -> String {
    let mut text = String::new();
    connect(name).read_to_string(&mut text).unwrap();
    text
}

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Returns how many threads answer in this process.
fn answering_threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    tasks.filter(|task| fs::read_to_string(task.as_ref().unwrap().path().join("comm")).is_ok_and(|name| name == "status\n")).count()
}

#[test]
fn a_process_answers_on_one_socket_about_all_of_its_communicators() {
    alone_in_a_process("status::a_process_answers_on_one_socket_about_all_of_its_communicators", || {
        assert!(sockets().is_empty() && answering_threads() == 0, "a process without communicators has none");
        let quiet = |rank: usize| Wiring::Shm.builder(rank).configure(|config| config.status_socket = false);
        drop(communicators_with(2, quiet));
        assert!(sockets().is_empty() && answering_threads() == 0, "it is off");
        threads(Wiring::Dealt, 3, |comm| {
            let split = comm.split(Some(0), 0).unwrap().unwrap();
            split.all_reduce(&mut [1_u8], ReduceOp::Sum).unwrap();
            if comm.rank() == 0 {
                let names = sockets();
                assert_eq!(names.len(), 1, "{names:?}");
                let said = parse(&ask(&names[0]));
                assert_eq!(answering_threads(), 1);
                assert_eq!((&said["format"], &said["pid"]), (&"collectives status".into(), &std::process::id().into()));
                let records = said["records"].as_array().unwrap();
                let count = |name: &str| records.iter().filter(|record| record["pg_name"].as_str().unwrap().starts_with(name)).count();
                assert_eq!((records.len(), count("world"), count("world/")), (6, 6, 3), "{said}");
            }
            comm.barrier().unwrap();
        });
        // The answer is about what lives.
        let name = sockets().remove(0);
        assert_eq!(parse(&ask(&name))["records"], serde_json::json!([]));
        let others = communicators(Wiring::Shm, 2);
        assert_eq!((sockets(), answering_threads()), (vec![name.clone()], 1));
        // A program that asks and does not read delays others, and does not end the answers.
        let _silent = connect(&name);
        drop(connect(&name));
        assert_eq!(parse(&ask(&name))["records"].as_array().unwrap().len(), 2);
        drop(others);
    });
}

#[test]
fn a_forked_child_answers_for_itself() {
    alone_in_a_process("status::a_forked_child_answers_for_itself", || {
        let comms = communicators(Wiring::Shm, 1);
        comms[0].barrier().unwrap();
        // SAFETY: this process has no other thread that holds a lock of the allocator: one waits for connections, and
        // the rest wait for calls. The child exits without destructors.
        match unsafe { libc::fork() } {
            0 => {
                let is_right = Communicator::local(2).is_ok_and(|own| {
                    let names = sockets();
                    let said = names.first().map(|name| parse(&ask(name))).unwrap_or_default();
                    let is_own = said["pid"] == std::process::id() && said["records"].as_array().is_some_and(|records| records.len() == 2);
                    names.len() == 1 && is_own && own.len() == 2
                });
                // SAFETY: ends the child at once, without its parent's destructors.
                unsafe { libc::_exit(i32::from(!is_right)) }
            }
            child => assert_eq!(exit_status(child), Some(0), "the child did not answer"),
        }
        let said = parse(&ask(&sockets()[0]));
        assert_eq!((&said["pid"], &said["records"].as_array().unwrap().len()), (&std::process::id().into(), &1));
    });
}

#[test]
fn another_user_gets_no_answer() {
    if !rustix::process::geteuid().is_root() {
        skip!("only root can become another user");
    }
    alone_in_a_process("status::another_user_gets_no_answer", || {
        let comms = communicators(Wiring::Shm, 1);
        let name = sockets().remove(0);
        let stranger = name.clone();
        let got = std::thread::spawn(move || {
            let unchanged: libc::c_long = -1;
            // SAFETY: the system call changes the user of this thread alone (the C library's function would change all
            // threads), and reads no memory.
            let result = unsafe { libc::syscall(libc::SYS_setresuid, unchanged, 12_345_u64, unchanged) };
            assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
            ask(&stranger)
        });
        assert_eq!(got.join().unwrap(), "");
        assert_eq!(parse(&ask(&name))["records"].as_array().unwrap().len(), 1);
        drop(comms);
    });
}
