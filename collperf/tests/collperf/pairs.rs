//! `collperf pairs` between hosts with an artificially slow link, and `collperf stragglers` with an artificially slow
//! rank.

use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::common::hosts::{Hosts, run, skip};
use crate::common::ranks::{free_port, run_ranks};

const COLLPERF: &str = env!("CARGO_BIN_EXE_collperf");
/// The capacity of ordinary links: so small that busy processors make no difference.
const FAST: &str = "rate 100mbit burst 32kb latency 400ms";
/// The capacity of a slow link.
const SLOW: &str = "rate 2mbit burst 8kb latency 400ms";

/// Runs one test at a time, because these tests compare speeds.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn collperf(arguments: &str) -> Output {
    Command::new(COLLPERF).args(arguments.split_whitespace()).stdin(Stdio::null()).output().unwrap()
}

/// Runs `collperf` with one rank on each host, and returns rank 0's output and exit code.
fn on_hosts(hosts: &Hosts, net: u8, arguments: &str) -> (String, Option<i32>) {
    let start = |host: usize| {
        let mut command = hosts.command(host, COLLPERF);
        command.args(arguments.split_whitespace()).env("RANK", host.to_string()).env("WORLD_SIZE", hosts.count.to_string());
        command.env("MASTER_ADDR", format!("10.99.{net}.1")).env("MASTER_PORT", "29517").env("COLLECTIVES_TIMEOUT", "60").spawn().unwrap()
    };
    let ranks: Vec<Child> = (0..hosts.count).map(start).collect();
    let ended: Vec<Output> = ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect();
    assert!(ended[1..].iter().all(|rank| rank.status.success()), "{ended:?}");
    assert!(ended[0].stderr.is_empty(), "{ended:?}");
    (String::from_utf8(ended[0].stdout.clone()).unwrap(), ended[0].status.code())
}

/// Starts hosts whose links are all alike.
fn alike(net: u8, count: usize) -> Result<Hosts, String> {
    let hosts = Hosts::up(net, count)?;
    (0..count).try_for_each(|host| shape(&hosts.space(host), "eth0", FAST))?;
    Ok(hosts)
}

/// Gives two hosts a separate link, which is slow from the first to the second.
fn slow_link(hosts: &Hosts, net: u8, from: usize, to: usize) -> Result<(), String> {
    let (one, other) = (hosts.space(from), hosts.space(to));
    run("ip", &["link", "add", "eth1", "netns", &one, "type", "veth", "peer", "name", "eth1", "netns", &other])?;
    for (space, own, peer) in [(&one, from, to), (&other, to, from)] {
        let [own, peer] = [own, peer].map(|host| format!("10.99.{net}.{}", host + 1));
        run("ip", &["-n", space, "link", "set", "eth1", "up"])?;
        run("ip", &["-n", space, "route", "add", &format!("{peer}/32"), "dev", "eth1", "src", &own])?;
    }
    shape(&one, "eth1", SLOW)?;
    shape(&other, "eth1", FAST)
}

/// Sets the speed at which a host sends through a device.
fn shape(space: &str, device: &str, speed: &str) -> Result<(), String> {
    let words: Vec<&str> = ["-n", space, "qdisc", "replace", "dev", device, "root", "tbf"].into_iter().chain(speed.split(' ')).collect();
    run("tc", &words)
}

/// Returns the lines that name outliers.
fn named(text: &str) -> Vec<&str> {
    text.lines().skip_while(|line| !line.starts_with("# Out of line")).skip(1).filter(|line| line.contains("bandwidth")).collect()
}

#[test]
fn a_slow_link_among_four_hosts_is_named() {
    let _alone = alone();
    let hosts = match alike(31, 4) {
        Ok(hosts) => hosts,
        Err(why) => skip!("links between network namespaces cannot be made: {why}"),
    };
    slow_link(&hosts, 31, 1, 2).unwrap();
    let (text, code) = on_hosts(&hosts, 31, "pairs --threshold 90 -b 32K --stream-ms 200");
    assert_eq!(code, Some(7), "{text}");
    let lines = named(&text);
    assert!(
        lines.len() == 1 && lines[0].starts_with("#   1 (") && lines[0].contains("-> 2 (") && lines[0].contains("% less than"),
        "{text}"
    );
}

#[test]
fn a_slow_host_among_four_is_named() {
    let _alone = alone();
    let hosts = match alike(32, 4) {
        Ok(hosts) => hosts,
        Err(why) => skip!("links between network namespaces cannot be made: {why}"),
    };
    // Latencies are not judged, because these hosts share processors.
    let (text, _) = on_hosts(&hosts, 32, "pairs --threshold 90 -b 32K --stream-ms 200");
    assert!(named(&text).is_empty(), "{text}");
    shape(&hosts.space(3), "eth0", SLOW).unwrap();
    let (text, code) = on_hosts(&hosts, 32, "pairs --threshold 90 -b 32K --stream-ms 200");
    assert_eq!(code, Some(7), "{text}");
    let lines = named(&text);
    assert!(lines.len() == 1 && lines[0].starts_with("#   3 (") && lines[0].contains(": to others bandwidth "), "{text}");
}

#[test]
fn two_and_three_hosts_have_pairs_too() {
    let _alone = alone();
    for count in [2, 3] {
        let hosts = match Hosts::up(33, count) {
            Ok(hosts) => hosts,
            Err(why) => skip!("network namespaces cannot be made: {why}"),
        };
        let (text, code) = on_hosts(&hosts, 33, "pairs --stream-ms 20");
        assert_eq!((code, text.contains("# There is only one pair: ")), (Some(0), count == 2), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("    ")).count(), 2 * count + 2, "{text}");
    }
}

#[test]
fn processes_on_hosts_have_several_ranks_each() {
    let _alone = alone();
    let hosts = match Hosts::up(34, 2) {
        Ok(hosts) => hosts,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    let (text, code) = on_hosts(&hosts, 34, "all -t 2 --backend host --sizes 8,1K -n 2");
    assert!(code == Some(0) && !text.contains("FAILED") && text.contains("#  Rank  3 Group  0 "), "{text}");
}

#[test]
fn ranks_of_one_host_make_pairs_where_that_is_asked_for() {
    let _alone = alone();
    for (ranks, rows) in [(2, 2), (3, 3), (13, 13)] {
        let output = collperf(&format!("pairs -g {ranks} --of ranks --stream-ms 1 -b 1000"));
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(text.lines().filter(|line| line.starts_with("    ")).count(), 2 * rows + 2, "{text}");
    }
}

#[test]
fn what_has_no_pairs_is_refused() {
    for (arguments, words) in [
        ("pairs -g 3", "all 3 ranks are on one host"),
        ("pairs -g 1 --of ranks", "there is only one rank"),
        ("pairs -b 0", "-b 0: expected a size from 1 byte"),
        ("pairs -b 2G", "expected a size from 1 byte to 1G"),
        ("pairs --threshold 100", "--threshold"),
        ("pairs --stream-ms 0", "--stream-ms"),
        ("stragglers -g 1", "stragglers: there is only one rank"),
        ("stragglers --seconds 0", "--seconds"),
        ("stragglers --seconds inf", "--seconds"),
        ("stragglers --work-us 1", "--work-us"),
    ] {
        let output = collperf(arguments);
        assert_eq!(output.status.code(), Some(6), "{arguments}: {output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(words), "{arguments}: {output:?}");
    }
    for ended in run_ranks(2, || {
        let mut command = Command::new(COLLPERF);
        command.args(["stragglers", "-g", "2"]);
        command
    }) {
        assert_eq!(ended.status.code(), Some(6), "{ended:?}");
    }
}

/// Lets a process run for a moment and stops it for longer, repeatedly until `is_over`.
fn hold_up(pid: u32, is_over: impl Fn() -> bool) {
    use rustix::process::{Pid, Signal, kill_process};
    let pid = Pid::from_raw(pid as i32).unwrap();
    let mut signal = Signal::STOP;
    while !is_over() {
        let _ = kill_process(pid, signal);
        let (after, time) = if signal == Signal::STOP { (Signal::CONT, 30) } else { (Signal::STOP, 10) };
        signal = after;
        let next = Instant::now() + Duration::from_millis(time);
        while Instant::now() < next {
            std::thread::park_timeout(next.saturating_duration_since(Instant::now()));
        }
    }
    let _ = kill_process(pid, Signal::CONT);
}

#[test]
fn a_rank_that_is_slow_is_the_straggler() {
    let _alone = alone();
    let port = free_port();
    let start = |rank: usize| {
        let mut command = Command::new(COLLPERF);
        // Enough work that a rank which is stopped so often cannot finish a round in between, even on busy processors.
        command
            .args(["stragglers", "--threshold", "20", "--work-us", "20000", "--seconds", "3"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "3").env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.env("COLLECTIVES_TIMEOUT", "60").spawn().unwrap()
    };
    let mut ranks: Vec<Child> = (0..3).map(start).collect();
    let last = ranks.remove(2);
    let pid = last.id();
    let ended = std::thread::scope(|scope| {
        let others: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || rank.wait_with_output().unwrap())).collect();
        hold_up(pid, || others.iter().all(std::thread::ScopedJoinHandle::is_finished));
        others.into_iter().map(|other| other.join().unwrap()).collect::<Vec<Output>>()
    });
    assert!(last.wait_with_output().unwrap().status.success());
    let text = String::from_utf8_lossy(&ended[0].stdout);
    assert_eq!(ended[0].status.code(), Some(7), "{ended:?}");
    assert!(text.contains("# The others wait for rank 2 (") && text.contains(&format!("pid {pid})")), "{text}");
}

#[test]
fn ranks_that_are_alike_are_waited_for_by_nobody() {
    let _alone = alone();
    let output = collperf("stragglers -g 2 --seconds 0.3 --work-us 500 --threshold 99");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("# No rank costs the others 99% of the time"), "{output:?}");
}
