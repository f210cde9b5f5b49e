//! Files and ports of live metrics.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use collectives::ReduceOp;
use collectives::observe::CallReport;

use super::common::meeting::wait_until;
use super::common::ranks::{Wiring, alone_in_a_process, communicators_with, each, threads_with};

/// Returns this process's file as a map from each sample's name and labels to its value.
fn read(folder: &Path) -> BTreeMap<String, f64> {
    // A file that is being written has a hidden name.
    let is_hidden = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with('.');
    let files: Vec<_> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).filter(|path| !is_hidden(path)).collect();
    let own: Vec<_> = files.iter().filter(|file| file.to_string_lossy().ends_with(&format!("-{}.prom", std::process::id()))).collect();
    assert_eq!((own.len(), files.len()), (1, 1), "{files:?}");
    let text = fs::read_to_string(own[0]).unwrap();
    // Each sample names the process, which the tests need not repeat.
    let pid = format!(",pid=\"{}\"", std::process::id());
    let sample = |line: &str| {
        let (name, value) = line.rsplit_once(' ')?;
        assert!(name.contains(&pid), "{line}");
        Some((name.replace(&pid, ""), value.parse().unwrap()))
    };
    let samples: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect();
    let map: BTreeMap<String, f64> = samples.iter().cloned().collect();
    assert_eq!(map.len(), samples.len(), "each sample occurs once: {text}");
    map
}

#[test]
fn calls_bytes_errors_and_waits_are_in_one_file_of_the_process() {
    alone_in_a_process("metrics::calls_bytes_errors_and_waits_are_in_one_file_of_the_process", || {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("made when needed");
        let seen = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&seen);
        let observer: Arc<dyn collectives::observe::Observer> = Arc::new(move |call: &CallReport<'_>| {
            counted.fetch_add(usize::from(call.kind == collectives::Collective::AllReduce), Ordering::Relaxed);
        });
        let builder = |rank: usize| {
            Wiring::Shm.builder(rank).configure(|config| {
                config.metrics_dir = Some(path.clone());
                config.observer = Some(Arc::clone(&observer));
            })
        };
        threads_with(2, builder, |comm| {
            for _ in 0..5 {
                comm.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum).unwrap();
            }
            let split = comm.split(Some(0), 0).unwrap().unwrap();
            split.broadcast(&mut [1_u8; 3], 0).unwrap();
            split.broadcast(&mut [1_u8; 3], 1).unwrap();
            comm.send_recv(&[1_u16], 1 - comm.rank(), &mut [0_u16], 1 - comm.rank()).unwrap();
            assert!(comm.all_reduce(&mut vec![1_u8; 1 + comm.rank()], ReduceOp::Sum).unwrap_err().is_mismatch());
        });
        assert_eq!(seen.load(Ordering::Relaxed), 12, "the program's observer sees all calls, too");
        let metrics = read(&path);
        let value =
            |name: &str, labels: &str| *metrics.get(&format!("{name}{{{labels}}}")).unwrap_or_else(|| panic!("{labels}: {metrics:#?}"));
        for rank in 0..2 {
            let world = format!("communicator=\"world\",rank=\"{rank}\"");
            let reduced = format!("{world},backend=\"host\",kind=\"all_reduce\"");
            assert_eq!(value("collectives_calls_total", &format!("{reduced},result=\"ok\"")), 5.0);
            assert_eq!(value("collectives_calls_total", &format!("{reduced},result=\"mismatch\"")), 1.0);
            assert_eq!(value("collectives_bytes_total", &reduced), 160.0);
            assert!(value("collectives_call_seconds_total", &reduced) > 0.0);
            let broadcast = format!("communicator=\"world/0 from rank 0\",rank=\"{rank}\",backend=\"host\",kind=\"broadcast\"");
            assert_eq!(value("collectives_calls_total", &format!("{broadcast},result=\"ok\"")), 2.0);
            assert_eq!(value("collectives_bytes_total", &broadcast), 6.0);
            assert_eq!(value("collectives_bytes_total", &format!("{world},backend=\"host\",kind=\"send\"")), 2.0);
            let info = metrics.keys().find(|name| name.starts_with(&format!("collectives_communicator_info{{{world},world_size=\"2\"")));
            assert!(info.is_some_and(|name| name.contains("shared memory")), "{metrics:#?}");
            assert!(!metrics.contains_key(&format!("collectives_waiting_seconds{{{world}}}")), "it is gone");
        }

        // While a rank waits, the file says so. Another communicator of the same name continues its counters.
        each(communicators_with(2, builder), |comm| {
            let waits = || read(&path).get("collectives_waiting_seconds{communicator=\"world\",rank=\"0\"}").copied();
            if comm.rank() == 1 {
                wait_until("the file says how long rank 0 has waited", || waits().is_some_and(|seconds| seconds > 0.0));
            }
            comm.barrier().unwrap();
        });
        // One at the end of each start.
        let barriers = "collectives_calls_total{communicator=\"world\",rank=\"0\",backend=\"host\",kind=\"barrier\",result=\"ok\"}";
        assert_eq!(read(&path).get(barriers), Some(&3.0));
    });
}

#[test]
fn a_folder_that_cannot_be_written_leaves_the_job_alone() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let builder = |rank: usize| Wiring::Shm.builder(rank).configure(|config| config.metrics_dir = Some(file.path().to_owned()));
    threads_with(2, builder, |comm| comm.barrier().unwrap());
}

/// Returns the answer of a port to a collector.
fn get(address: SocketAddr) -> String {
    let mut connection = TcpStream::connect(address).unwrap();
    connection.write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    let mut text = String::new();
    connection.read_to_string(&mut text).unwrap();
    text
}

/// Returns an address whose port was free a moment ago, and is not among those that the system chooses by itself.
fn free_address() -> SocketAddr {
    let own = 20_000 + u16::try_from(std::process::id() % 10_000).unwrap();
    let address = |port| SocketAddr::from(([127, 0, 0, 1], port));
    (own..own + 500).map(address).find(|address| TcpListener::bind(address).is_ok()).expect("a free port")
}

#[test]
fn a_port_answers_while_ranks_wait() {
    alone_in_a_process("metrics::a_port_answers_while_ranks_wait", || {
        let address = free_address();
        let builder = |rank: usize| Wiring::Shm.builder(rank).configure(|config| config.metrics_address = Some(address));
        each(communicators_with(2, builder), |comm| {
            comm.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum).unwrap();
            if comm.rank() == 1 {
                // A client that says nothing only delays the next one.
                let _silent = TcpStream::connect(address).unwrap();
                wait_until("the port says how long rank 0 has waited", || {
                    let text = get(address);
                    assert!(text.starts_with("HTTP/1.0 200 OK\r\n") && text.ends_with("# EOF\n"), "{text}");
                    assert!(
                        text.contains(
                            "collectives_bytes_total{communicator=\"world\",rank=\"1\",backend=\"host\",kind=\"all_reduce\"} 32\n"
                        )
                    );
                    let waits = "collectives_waiting_seconds{communicator=\"world\",rank=\"0\"} ";
                    text.lines().find_map(|line| line.strip_prefix(waits)).is_some_and(|seconds| seconds.parse::<f64>().unwrap() > 0.0)
                });
            }
            comm.barrier().unwrap();
        });
        assert!(get(address).contains("kind=\"barrier\""), "it answers until the process ends");
    });
}

#[test]
fn a_port_that_is_in_use_leaves_the_job_alone() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let builder = |rank: usize| Wiring::Shm.builder(rank).configure(|config| config.metrics_address = Some(address));
    threads_with(2, builder, |comm| comm.barrier().unwrap());
}
