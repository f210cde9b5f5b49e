//! What the system refuses: descriptors, memory and disk space. Also forked processes.

#![expect(unsafe_code, reason = "fork has no safe form")]

use std::time::{Duration, Instant};

use collectives::{
    Collective, Communicator, DType, Error, ReduceOp, Transport,
    store::{FileStore, Store},
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::common::hosts::run;
use crate::common::limit::exit_status;
use crate::common::ranks::{Meeting, Wiring, free_port, is_rank_of, spawn_rank, threads};

/// Runs a test in a separate process, since its changes affect the whole process.
pub(crate) fn alone(name: &str, test: fn()) {
    if is_rank_of(name) {
        return test();
    }
    let output = spawn_rank(name, 0, 1, free_port(), &[]).wait_with_output().unwrap();
    let said = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{}", said.0, said.1);
    said.0.lines().filter(|line| line.starts_with("skipped")).for_each(|line| println!("{line}"));
}

/// A limit, which is reset when this value is dropped.
pub(crate) struct Limited(Resource, Rlimit);

impl Limited {
    pub(crate) fn to(resource: Resource, current: u64) -> Self {
        let before = getrlimit(resource);
        let limited = Self(resource, before);
        setrlimit(resource, Rlimit { current: Some(current), maximum: before.maximum }).unwrap();
        limited
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        setrlimit(self.0, self.1).unwrap();
    }
}

pub(crate) fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count() - 1
}

#[test]
fn without_descriptors_a_start_says_so_and_leaves_none_open() {
    alone("resources::without_descriptors_a_start_says_so_and_leaves_none_open", || {
        let start = |transport| {
            Communicator::builder()
                .configure(|config| {
                    config.transport = transport;
                    config.timeout = Duration::from_millis(400);
                })
                .local(2)
        };
        for transport in [Transport::Shm, Transport::Tcp] {
            drop(start(transport).unwrap());
            let before = open_descriptors();
            let mut refused = 0;
            for spare in 0..24 {
                let limit = Limited::to(Resource::Nofile, (before + spare) as u64);
                let outcome = start(transport);
                drop(limit);
                match outcome {
                    Ok(comms) => drop(comms),
                    Err(error) => {
                        refused += 1;
                        // The rank that meets the limit reports it. The other may only notice that it is alone.
                        let said = error.to_string();
                        assert!(said.contains("Too many open files") || error.is_timeout() || error.is_peer_lost(), "{spare}: {said}");
                    }
                }
            }
            assert!(refused > 0, "no limit was met");
            let begun = Instant::now();
            while open_descriptors() > before && begun.elapsed() < Duration::from_secs(10) {
                std::thread::yield_now();
            }
            assert_eq!(open_descriptors(), before, "{transport:?}");
            assert!(start(transport).is_ok(), "{transport:?}: all is well once there are descriptors again");
        }
    });
}

#[test]
fn without_memory_for_it_a_call_says_so() {
    alone("resources::without_memory_for_it_a_call_says_so", || {
        const COUNT: usize = 16 << 20;
        let errors = threads(Wiring::Tcp, 2, |comm| {
            comm.set_timeout(Duration::from_secs(10));
            let mut x = vec![1.0_f32; COUNT];
            comm.barrier().unwrap();
            let limit = (comm.rank() == 0).then(|| {
                let pages: u64 = std::fs::read_to_string("/proc/self/statm").unwrap().split(' ').next().unwrap().parse().unwrap();
                Limited::to(Resource::As, pages * rustix::param::page_size() as u64 + (8 << 20))
            });
            comm.barrier().unwrap();
            // Both ranks share one address space. `PreMulSum` needs memory for the products.
            let error = comm.all_reduce(&mut x, ReduceOp::PreMulSum(2.0)).expect_err("there is no room");
            let again = comm.barrier();
            drop(limit);
            (error.to_string(), again.is_ok() || comm.barrier().unwrap_err().is_poisoned())
        });
        for (error, goes_on) in errors {
            assert!(error.contains("memory") && goes_on, "{error}");
        }
    });
}

#[test]
fn a_file_store_on_a_full_disk_says_so() {
    alone("resources::a_file_store_on_a_full_disk_says_so", || {
        let folder = std::env::temp_dir().join(format!("collectives-full-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let path = folder.to_str().unwrap();
        if let Err(why) = run("mount", &["-t", "tmpfs", "-o", "size=64k", "tmpfs", path]) {
            std::fs::remove_dir(&folder).unwrap();
            return println!("skipped: no file system of a given size can be mounted: {why}");
        }
        let error = (|| {
            let store = FileStore::open(folder.join("store"), None, Duration::from_secs(5))?;
            (0..100).try_for_each(|number| store.set(&format!("key {number}"), &[7; 4096]))
        })();
        run("umount", &[path]).unwrap();
        std::fs::remove_dir(&folder).unwrap();
        let error = error.expect_err("64 KiB are full");
        assert!(matches!(error, Error::Io { .. }) && error.to_string().contains("No space left"), "{error}");
    });
}

#[test]
fn a_forked_child_is_refused_and_the_parent_goes_on() {
    alone("resources::a_forked_child_is_refused_and_the_parent_goes_on", || {
        for wiring in [Wiring::Shm, Wiring::Tcp] {
            threads(wiring, 2, |comm| {
                let mut x = [comm.rank() as u64 + 1];
                comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                let started = comm.start_all_reduce(x, ReduceOp::Sum).unwrap();
                let awaited = comm.start_recv([0_u64], 1 - comm.rank()).unwrap();
                if comm.rank() == 0 {
                    // SAFETY: the child calls into this crate, prints, allocates at most as glibc allows after a fork, and exits.
                    match unsafe { libc::fork() } {
                        0 => {
                            let refused =
                                |outcome: collectives::Result<()>| outcome.is_err_and(|error| error.to_string().contains("forked"));
                            let is_right = refused(comm.all_reduce(&mut x, ReduceOp::Sum))
                                && refused(comm.send(&x, 1))
                                && refused(comm.start_broadcast(x, 0).map(drop))
                                && refused(started.wait().map(drop))
                                && refused(awaited.wait().map(drop))
                                && refused(comm.shrink().map(drop))
                                && comm.algorithm(Collective::Barrier, 0, DType::U8).is_none()
                                && comm.explain().contains("this process was forked")
                                && refused(comm.write_trace(std::env::temp_dir()).map(drop))
                                && refused({
                                    comm.abort();
                                    comm.barrier()
                                })
                                && Communicator::local(1).is_ok_and(|own| own[0].barrier().is_ok());
                            // SAFETY: ends the child at once, without its parent's destructors.
                            unsafe { libc::_exit(i32::from(!is_right)) }
                        }
                        child => {
                            assert_eq!(exit_status(child), Some(0), "{wiring:?}: the child was not refused");
                        }
                    }
                }
                assert_eq!(started.wait().unwrap(), [6]);
                comm.send(&[7_u64], 1 - comm.rank()).unwrap();
                assert_eq!(awaited.wait().unwrap().0, [7]);
                comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                assert_eq!(x, [6]);
                let mut y = [0_u64];
                comm.send_recv(&x, 1 - comm.rank(), &mut y, 1 - comm.rank()).unwrap();
                assert_eq!(y, [6]);
            });
        }
    });
}

#[test]
fn a_store_that_dies_after_the_start_takes_nothing_with_it() {
    for wiring in Wiring::ALL {
        let server = collectives::store::TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let port = server.local_addr().port();
        let ranks: Vec<Communicator> = std::thread::scope(|scope| {
            let join = |rank: usize| {
                let store = collectives::store::TcpStore::connect("127.0.0.1", port, Duration::from_secs(10)).unwrap();
                wiring.builder(rank).with_store(store, rank, 3).unwrap()
            };
            let ranks: Vec<_> = (0..3).map(|rank| scope.spawn(move || join(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        drop(server);
        let split = Meeting::new(3);
        crate::common::ranks::each(ranks, |comm| {
            let mut x = [comm.rank() as u64];
            comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
            // Agreements after the start go through the ranks, not the store.
            let half = comm.split(Some(u32::from(comm.rank() == 1)), 0).unwrap().unwrap();
            half.barrier().unwrap();
            // A shrink ends the calls that other ranks have not finished.
            split.meet();
            let again = comm.shrink().unwrap();
            again.all_reduce(&mut x, ReduceOp::Sum).unwrap();
            assert_eq!(x, [9], "{wiring:?}");
        });
    }
}
