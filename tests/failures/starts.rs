//! Starts for which the system refuses a resource. They continue without it, or end at once with an error that names
//! the limit and the remedy.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use collectives::store::{Store as _, TcpStore, TcpStoreServer};
use collectives::{Builder, Communicator, ReduceOp, Result, Transport};
use rustix::process::Resource;

use crate::common::hosts::{Hosts, run};
use crate::common::ranks::{free_port, is_rank_of, patience, threads_with};
use crate::resources::{Limited, alone, open_descriptors};
use crate::sandboxes::forbid;

/// Longer than any start here that ends by itself.
const LONG: Duration = patience(120);
/// The limit for a start that cannot succeed.
pub(super) const SOON: Duration = patience(30);

fn patient() -> Builder {
    Communicator::builder().configure(|config| config.timeout = LONG)
}

/// Returns the sum of all ranks, to which every rank contributes.
pub(super) fn sum(comm: &Communicator) -> u64 {
    let mut x = [comm.rank() as u64];
    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
    let (to, from) = ((comm.rank() + 1) % comm.world_size(), (comm.rank() + comm.world_size() - 1) % comm.world_size());
    let mut y = [0];
    comm.send_recv(&x, to, &mut y, from).unwrap();
    assert_eq!(x, y);
    x[0]
}

#[test]
fn ranks_that_may_not_share_memory_go_over_tcp_and_say_so() {
    alone("starts::ranks_that_may_not_share_memory_go_over_tcp_and_say_so", || {
        forbid(libc::SYS_memfd_create, libc::ENOSYS);
        let seen = patient().run_local(3, |comm| {
            assert_eq!(comm.local_world_size(), 3, "they are on one host, although they may not share memory");
            let half = comm.split(Some(u32::from(comm.rank() == 1)), 0)?.unwrap();
            half.barrier()?;
            let mut buffer = comm.alloc::<u64>(1000)?;
            buffer.fill(1);
            comm.all_reduce(&mut buffer, ReduceOp::Sum)?;
            assert!(buffer.iter().all(|x| *x == 3));
            Ok((sum(comm), comm.explain()))
        });
        for (sum, explained) in seen.unwrap() {
            assert_eq!(sum, 3);
            assert!(
                explained.contains("over TCP (without shared memory: rank 0 ") && explained.contains("Function not implemented"),
                "{explained}"
            );
        }
        // If shared memory is required, the error contains the reason.
        let error = patient().configure(|config| config.transport = Transport::Shm).local(2).unwrap_err().to_string();
        assert!(error.contains("Function not implemented"), "{error}");
    });
}

#[test]
fn one_host_that_may_not_share_memory_takes_none_from_another() {
    alone("starts::one_host_that_may_not_share_memory_takes_none_from_another", || {
        let builder = |rank: usize| {
            if rank == 0 {
                forbid(libc::SYS_memfd_create, libc::EPERM);
            }
            patient().configure(|config| config.host_identity = Some(if rank < 2 { "first" } else { "second" }.to_owned()))
        };
        for (rank, (sum, explained)) in threads_with(5, builder, |comm| (sum(comm), comm.explain())).into_iter().enumerate() {
            assert_eq!(sum, 10, "rank {rank}");
            let words = ["shared memory inside 3 hosts", "Operation not permitted", "COLLECTIVES_HOST_IDENTITY"];
            assert!(words.iter().all(|words| explained.contains(words)), "rank {rank}: {explained}");
        }
    });
}

#[test]
fn shared_memory_larger_than_files_may_be_is_done_without_and_is_no_signal() {
    alone("starts::shared_memory_larger_than_files_may_be_is_done_without_and_is_no_signal", || {
        let small = Limited::to(Resource::Fsize, 1 << 20);
        for (sum, explained) in patient().run_local(2, |comm| Ok((sum(comm), comm.explain()))).unwrap() {
            assert!(sum == 1 && explained.contains("1048576 B") && explained.contains("ulimit -f"), "{explained}");
        }
        drop(small);
        let comms = patient().local(2).unwrap();
        let _larger = Limited::to(Resource::Fsize, 8 << 20);
        crate::common::ranks::each(comms, |comm| {
            let error = comm.alloc::<u8>(16 << 20).unwrap_err().to_string();
            assert!(error.contains("8388608 B") && error.contains("ulimit -f"), "{error}");
            assert_eq!(sum(&comm), 1, "and the communicator goes on");
        });
    });
}

/// Checks a start under a limit of descriptors: it ends soon, with success or with an error that names the limit.
/// Returns whether it succeeded.
fn judge_start(outcome: Result<()>, began: Instant) -> bool {
    assert!(began.elapsed() < SOON, "it took {:?}: {outcome:?}", began.elapsed());
    let Err(error) = outcome else { return true };
    let said = error.to_string();
    assert!(said.contains("RLIMIT_NOFILE") && said.contains("ulimit -n"), "{said}");
    false
}

#[test]
fn threads_without_descriptors_for_all_are_told_at_once() {
    alone("starts::threads_without_descriptors_for_all_are_told_at_once", || {
        for (transport, ranks) in [(Transport::Auto, 33), (Transport::Shm, 12), (Transport::Tcp, 12)] {
            let builder = patient().configure(|config| config.transport = transport);
            for spare in [60, 40, 25, 14, 7] {
                let limited = Limited::to(Resource::Nofile, (open_descriptors() + spare) as u64);
                let began = Instant::now();
                let outcome = builder.clone().run_local(ranks, |comm| comm.barrier());
                drop(limited);
                assert!(!judge_start(outcome.map(drop), began) || spare > 7, "{transport}: the limit was met");
            }
        }
    });
}

/// Runs one rank of a job and prints the outcome of its start.
pub(super) fn rank_that_says() {
    let began = Instant::now();
    let outcome = Communicator::from_env().and_then(|comm| {
        println!("@explained {}", comm.explain().replace('\n', " "));
        assert_eq!(sum(&comm), (0..comm.world_size() as u64).sum::<u64>());
        comm.close()
    });
    match outcome {
        Ok(()) => println!("@ok"),
        Err(error) => println!("@failed after {:.1} s: {}", began.elapsed().as_secs_f64(), error.to_string().replace('\n', " ")),
    }
}

/// Starts a rank of the test `name`. `command` gets the test binary and its arguments.
pub(super) fn start(name: &str, mut command: Command, rank: usize, world_size: usize, port: u16) -> Child {
    let program = std::env::current_exe().unwrap();
    command.arg(program).args([name, "--exact", "--nocapture", "--test-threads=1"]);
    command.env("COLLECTIVES_TEST_CHILD", name).env("RANK", rank.to_string()).env("WORLD_SIZE", world_size.to_string());
    let defaults = [("MASTER_ADDR", "127.0.0.1".to_owned()), ("MASTER_PORT", port.to_string())];
    for (variable, value) in defaults {
        if !command.get_envs().any(|(set, _)| set == variable) {
            command.env(variable, value);
        }
    }
    command.env("COLLECTIVES_TIMEOUT", LONG.as_secs().to_string());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Returns what ranks have printed after `@`.
pub(super) fn said(ranks: Vec<Child>) -> Vec<String> {
    let words = |Output { stdout, stderr, .. }: Output| {
        let text = String::from_utf8_lossy(&stdout).into_owned();
        let lines: Vec<&str> = text.lines().filter_map(|line| line.split_once('@').map(|(_, said)| said)).collect();
        if lines.is_empty() { format!("nothing; {text} {}", String::from_utf8_lossy(&stderr)) } else { lines.join("; ") }
    };
    ranks.into_iter().map(|rank| words(rank.wait_with_output().unwrap())).collect()
}

#[test]
fn a_store_server_without_descriptors_tells_who_comes_and_goes_on_for_who_is_there() {
    const NAME: &str = "starts::a_store_server_without_descriptors_tells_who_comes_and_goes_on_for_who_is_there";
    if is_rank_of(NAME) {
        let server = TcpStoreServer::bind_with_linger("127.0.0.1:0", Duration::ZERO).unwrap();
        println!("\n@{}", server.local_addr().port());
        std::io::stdin().read_line(&mut String::new()).unwrap();
        return;
    }
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 20; exec \"$0\" \"$@\""]).arg(std::env::current_exe().unwrap());
    command.args([NAME, "--exact", "--nocapture", "--test-threads=1"]).env("COLLECTIVES_TEST_CHILD", NAME);
    let mut server = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines().map_while(std::result::Result::ok);
    let port: u16 = lines.by_ref().find_map(|line| line.strip_prefix('@')?.parse().ok()).unwrap();
    let began = Instant::now();
    let mut clients = Vec::new();
    let error = loop {
        assert!(clients.len() < 20, "no limit was met");
        match TcpStore::connect("127.0.0.1", port, LONG) {
            Ok(client) => clients.push(client),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("RLIMIT_NOFILE") && error.contains(&port.to_string()) && began.elapsed() < SOON, "{error}");
    assert!(!clients.is_empty());
    for client in &clients {
        client.add("n", 1).unwrap();
    }
    assert_eq!(clients[0].get("n", LONG).unwrap(), clients.len().to_string().as_bytes());
    // It accepts other clients again once there is room.
    drop(clients);
    TcpStore::connect("127.0.0.1", port, LONG).unwrap().set("k", b"v").unwrap();
    drop(server.stdin.take());
    lines.for_each(drop);
    assert!(server.wait().unwrap().success());
}

#[test]
fn processes_with_few_descriptors_are_told_at_once() {
    const NAME: &str = "starts::processes_with_few_descriptors_are_told_at_once";
    if is_rank_of(NAME) {
        return rank_that_says();
    }
    let mut failed = 0;
    for descriptors in 5..14 {
        let (port, began) = (free_port(), Instant::now());
        let limited = || {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("ulimit -n {descriptors}; exec \"$0\" \"$@\"")]);
            command
        };
        let said = first_failure((0..2).map(|rank| start(NAME, limited(), rank, 2, port)).collect());
        assert!(began.elapsed() < SOON, "{descriptors}: {:?}: {said:?}", began.elapsed());
        if let Err(said) = said {
            failed += 1;
            assert!(said.contains("RLIMIT_NOFILE") && said.contains("ulimit -n"), "{descriptors}: {said:?}");
        }
    }
    assert!(failed > 0, "no limit was met");
}

/// Collects the failures of ranks until one names a limit, or all ranks have ended. Then kills the others, as a
/// launcher does: a rank that has not reached the store cannot learn that another one never will.
fn first_failure(ranks: Vec<Child>) -> std::result::Result<(), String> {
    let (ended, ends) = std::sync::mpsc::channel();
    let mut pids: Vec<_> = ranks.iter().map(rustix::process::Pid::from_child).collect();
    for rank in ranks {
        let ended = ended.clone();
        std::thread::spawn(move || {
            let pid = rustix::process::Pid::from_child(&rank);
            let _ = ended.send((pid, said(vec![rank]).remove(0)));
        });
    }
    drop(ended);
    let mut failures = Vec::new();
    while let Ok((pid, words)) = ends.recv_timeout(SOON) {
        pids.retain(|other| *other != pid);
        if words.ends_with("ok") {
            continue;
        }
        failures.push(words);
        if failures.iter().any(|words| words.contains("RLIMIT_NOFILE")) {
            break;
        }
    }
    pids.into_iter().for_each(|pid| rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap_or_default());
    ends.into_iter().for_each(drop);
    if failures.is_empty() { Ok(()) } else { Err(failures.join("; ")) }
}

/// Returns a command that runs another one in its own namespaces, if that is allowed.
pub(super) fn unshared(flags: &[&str]) -> std::result::Result<impl Fn() -> Command, String> {
    let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
    run("unshare", &flags.iter().map(String::as_str).chain(["true"]).collect::<Vec<_>>())?;
    Ok(move || {
        let mut command = Command::new("unshare");
        command.args(&flags);
        command
    })
}

#[test]
fn containers_of_one_pod_share_memory() {
    const NAME: &str = "starts::containers_of_one_pod_share_memory";
    if is_rank_of(NAME) {
        return rank_that_says();
    }
    // The container sees the host's processes, or only its own. In both cases its process has number 1.
    for flags in [&["--pid", "--fork"][..], &["--pid", "--fork", "--mount-proc"]] {
        let container = match unshared(flags) {
            Ok(container) => container,
            Err(why) => return println!("skipped: PID namespaces cannot be made: {why}"),
        };
        let port = free_port();
        let plain = || Command::new("env");
        for ranks in [[plain(), container()], [container(), container()]] {
            let ranks = ranks.into_iter().enumerate();
            let ranks = ranks.map(|(rank, mut command)| {
                command.env("COLLECTIVES_TRANSPORT", "shm");
                start(NAME, command, rank, 2, port)
            });
            for said in said(ranks.collect()) {
                assert!(said.contains("2 ranks of one host: shared memory") && said.ends_with("ok"), "{flags:?}: {said}");
            }
        }
    }
}

#[test]
fn one_identity_in_two_network_namespaces_is_tcp_and_the_variable_is_named() {
    const NAME: &str = "starts::one_identity_in_two_network_namespaces_is_tcp_and_the_variable_is_named";
    const NET: u8 = 17;
    if is_rank_of(NAME) {
        return rank_that_says();
    }
    let hosts = match Hosts::up(NET, 2) {
        Ok(hosts) => hosts,
        Err(why) => return println!("skipped: network namespaces cannot be made: {why}"),
    };
    let on = |rank: usize| {
        let mut command = hosts.command(rank, "env");
        command.env("COLLECTIVES_HOST_IDENTITY", "one").env("MASTER_ADDR", format!("10.99.{NET}.1"));
        start(NAME, command, rank, 2, 29_517)
    };
    for said in said((0..2).map(on).collect()) {
        assert!(said.ends_with("ok") && said.contains("COLLECTIVES_HOST_IDENTITY") && said.contains("over TCP"), "{said}");
    }
}

#[test]
fn an_address_that_no_other_host_can_reach_is_refused_at_once() {
    const NAME: &str = "starts::an_address_that_no_other_host_can_reach_is_refused_at_once";
    const NET: u8 = 18;
    if is_rank_of(NAME) {
        return rank_that_says();
    }
    let hosts = match Hosts::up(NET, 2) {
        Ok(hosts) => hosts,
        Err(why) => return println!("skipped: network namespaces cannot be made: {why}"),
    };
    // As on Debian, a host's own name resolves to the loopback interface.
    let etc = (0..2).map(|host| std::path::Path::new("/etc/netns").join(hosts.space(host)));
    let etc: Vec<_> = etc.collect();
    for folder in &etc {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("hosts"), "127.0.0.1 localhost\n127.0.1.1 host1\n").unwrap();
    }
    let began = Instant::now();
    let at = |rank: usize, variables: &[(&str, &str)]| {
        let mut command = hosts.command(rank, "env");
        command.envs(variables.iter().copied());
        start(NAME, command, rank, 2, 29_518)
    };
    let by_name = [("MASTER_ADDR", "host1")];
    let ways = [
        [&by_name[..], &[("LOCAL_WORLD_SIZE", "1")]].concat(),
        [&by_name[..], &[("GROUP_WORLD_SIZE", "2")]].concat(),
        [&by_name[..], &[("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0")]].concat(),
    ];
    let mut errors = Vec::new();
    for way in &ways {
        errors.extend(said((0..2).map(|rank| at(rank, way)).collect()));
    }
    // Ranks that meet at another address but publish a loopback address as their own.
    let published = [("MASTER_ADDR", format!("10.99.{NET}.1")), ("COLLECTIVES_LISTEN_ADDRESS", "127.0.0.1".to_owned())];
    let published: Vec<(&str, &str)> = published.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let told = said((0..2).map(|rank| at(rank, &published)).collect());
    etc.iter().for_each(|folder| fs::remove_dir_all(folder).unwrap());
    drop(fs::remove_dir("/etc/netns"));
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    for error in errors {
        assert!(error.contains("MASTER_ADDR=\"host1\"") && error.contains("127.0.1.1") && error.contains("/etc/hosts"), "{error}");
    }
    for error in told {
        assert!(error.contains("listen address 127.0.0.1 of rank 0") && error.contains("COLLECTIVES_LISTEN_ADDRESS"), "{error}");
    }
}

#[test]
fn a_rank_that_its_world_does_not_have_is_told_at_once() {
    let began = Instant::now();
    let url = |rank: usize, port: u16| format!("tcp://127.0.0.1:{port}?rank={rank}&world_size=2");
    let error = patient().from_url(&url(5, free_port())).unwrap_err().to_string();
    assert!(error.contains("rank 5") && error.contains("2 ranks, 0 to 1"), "{error}");
    // The other ranks also get the error at once, if they can be reached.
    let port = free_port();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| patient().from_url(&url(0, port)).unwrap_err().to_string());
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            std::thread::yield_now();
        }
        let outside = patient().from_url(&url(2, port)).unwrap_err().to_string();
        for error in [first.join().unwrap(), outside] {
            assert!(error.contains("claims rank 2, but its world has 2 ranks"), "{error}");
        }
    });
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
}

#[test]
fn a_variable_with_a_slip_is_named() {
    const NAME: &str = "starts::a_variable_with_a_slip_is_named";
    if is_rank_of(NAME) {
        return rank_that_says();
    }
    let mut command = Command::new("env");
    command.env("COLLECTIVES_TIMOUT", "5");
    let said = said(vec![start(NAME, command, 0, 1, free_port())]);
    assert!(said[0].contains("COLLECTIVES_TIMOUT: not known; did you mean COLLECTIVES_TIMEOUT?"), "{said:?}");
}
