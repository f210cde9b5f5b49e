//! The simulated NCCL among processes: each test starts itself again, once for each rank.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "NCCL is C")]

#[path = "../../tests/common/limit.rs"]
#[allow(dead_code, unreachable_pub, reason = "tests of other packages share it")]
mod limit;
mod nccl_common;

use std::ffi::c_int;
use std::io::{BufRead, BufReader, Write};
use std::ops::{Deref, DerefMut};
use std::process::{Child, Command, Stdio};
use std::ptr::null_mut;

use limit::Limit;
use nccl_common::oracle::SUM;
use nccl_common::*;

const U8: c_int = 1;
const F32: c_int = 7;

/// The parameters of a process that a test started.
struct Role {
    rank: usize,
    size: usize,
    device: usize,
    id: Option<Id>,
}

fn setting(name: &str) -> Option<usize> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

/// Returns the role of this process, if a test started it.
fn role() -> Option<Role> {
    let rank = setting("RANK")?;
    let digits = std::env::var("ID").ok();
    let id = digits.map(|digits| Id(std::array::from_fn(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap())));
    Some(Role { rank, size: setting("SIZE").unwrap(), device: setting("DEVICE").unwrap_or(rank), id })
}

fn digits(id: Id) -> String {
    id.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A process that a test started. It is killed if it does not end.
struct Process {
    child: Child,
    limit: Limit,
}

impl Deref for Process {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.child
    }
}

impl DerefMut for Process {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.child
    }
}

/// Starts this test again, as one rank.
fn start(test: &str, rank: usize, size: usize, id: Option<Id>, settings: &[(&str, &str)]) -> Process {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    command.env("RANK", rank.to_string()).env("SIZE", size.to_string()).envs(settings.iter().copied());
    if let Some(id) = id {
        command.env("ID", digits(id));
    }
    let child = command.spawn().unwrap();
    Process { limit: Limit::on(&child), child }
}

/// Waits for the next line that begins with `key` and returns the rest of it.
fn read(child: &mut Child, key: &str) -> String {
    let mut reader = BufReader::new(child.stdout.as_mut().unwrap());
    loop {
        let mut line = String::new();
        assert_ne!(reader.read_line(&mut line).unwrap(), 0, "the process ended before it said {key}");
        if let Some((_, rest)) = line.trim_end().split_once(key) {
            return rest.to_owned();
        }
    }
}

fn wait(children: impl IntoIterator<Item = Process>) {
    for Process { child, limit } in children {
        let _limit = limit;
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

impl Role {
    fn join(&self) -> Rank {
        Rank::on(self.device, self.rank, self.size).join(self.id.unwrap())
    }

    fn attempt(&self) -> c_int {
        let mut rank = Rank::on(self.device, self.rank, self.size);
        let code = ncclCommInitRank(&raw mut rank.comm, self.size as c_int, self.id.unwrap(), self.rank as c_int);
        if code == 0 {
            ok(ncclCommDestroy(rank.comm))
        } else {
            ok(ncclCommAbort(rank.comm))
        }
        code
    }
}

fn add_up(rank: &Rank) {
    let values: Vec<u8> = (0..1000).flat_map(|at| ((rank.rank * at) as f32).to_le_bytes()).collect();
    let (from, into) = (rank.upload(&values), rank.room(4000));
    ok(ncclAllReduce(rank.at(&from), rank.at(&into), 1000, F32, SUM, rank.comm, rank.stream()));
    let total = rank.size * (rank.size - 1) / 2;
    let expected: Vec<u8> = (0..1000).flat_map(|at| ((total * at) as f32).to_le_bytes()).collect();
    assert!(rank.download(&into) == expected, "rank {}", rank.rank);
}

fn everything(rank: &Rank) {
    let (n, me, comm, stream) = (rank.size, rank.rank, rank.comm, rank.stream());
    add_up(rank);
    let (from, wide, ring) = (rank.upload(&[me as u8; 100]), rank.room(100 * n), rank.room(100));
    ok(ncclAllGather(rank.at(&from), rank.at(&wide), 100, U8, comm, stream));
    assert_eq!(rank.download(&wide), (0..n).flat_map(|rank| [rank as u8; 100]).collect::<Vec<_>>());
    ok(ncclGroupStart());
    ok(ncclSend(rank.at(&from), 100, U8, ((me + 1) % n) as c_int, comm, stream));
    ok(ncclRecv(rank.at(&ring), 100, U8, ((me + n - 1) % n) as c_int, comm, stream));
    ok(ncclGroupEnd());
    assert_eq!(rank.download(&ring), [((me + n - 1) % n) as u8; 100]);
    let (mut half, mut size) = (null_mut(), 0);
    ok(ncclCommSplit(comm, (me % 2) as c_int, 0, &raw mut half, null_mut()));
    ok(ncclCommCount(half, &raw mut size));
    let place = Rank { comm: half, rank: me / 2, size: size as usize, context: rank.context.clone(), stream: rank.stream.clone() };
    add_up(&place);
    ok(ncclCommDestroy(half));
}

#[test]
fn ranks_are_processes_or_threads() {
    let _alone = alone();
    if let Some(role) = role() {
        let rank = role.join();
        everything(&rank);
        ok(ncclCommDestroy(rank.comm));
        return expect_clean();
    }
    let id = new_id();
    let children: Vec<_> = (0..3).map(|rank| start("ranks_are_processes_or_threads", rank, 5, Some(id), &[])).collect();
    on_threads(2, move |thread| {
        let rank = Rank::on(thread.rank + 3, thread.rank + 3, 5).join(id);
        everything(&rank);
        ok(ncclCommDestroy(rank.comm));
    });
    wait(children);
    expect_clean();
}

#[test]
fn a_killed_process_is_noticed_by_its_peers() {
    let _alone = alone();
    if let Some(role) = role() {
        let rank = role.join();
        add_up(&rank);
        if role.rank == 1 {
            std::process::abort();
        }
        let buffer = rank.upload(&[1; 8]);
        // The notification may come before the call.
        let code = ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 8, U8, SUM, rank.comm, rank.stream());
        assert!(code == 0 || code == 6, "{code}");
        assert_eq!(rank.await_error(), 6);
        ok(ncclCommAbort(rank.comm));
        assert_eq!(rank.download(&buffer), [1; 8]);
        return expect_clean();
    }
    let id = new_id();
    let mut children: Vec<_> = (0..3).map(|rank| start("a_killed_process_is_noticed_by_its_peers", rank, 3, Some(id), &[])).collect();
    assert!(!children.remove(1).wait().unwrap().success());
    wait(children);
}

/// Runs a test in which the first process makes the unique id, so the others meet there.
fn with_first(test: &str, then: impl FnOnce(Process, Process)) {
    let mut first = start(test, 0, 2, None, &[]);
    let digits = read(&mut first, "id=");
    then(first, start(test, 1, 2, None, &[("ID", &digits)]));
}

fn first_or_second() -> Option<(Role, Rank)> {
    let mut role = role()?;
    if role.rank == 0 {
        let id = new_id();
        println!("id={}", digits(id));
        role.id = Some(id);
    }
    let rank = role.join();
    Some((role, rank))
}

#[test]
fn the_process_that_made_the_id_may_be_killed_too() {
    let _alone = alone();
    if let Some((role, rank)) = first_or_second() {
        add_up(&rank);
        if role.rank == 0 {
            // Until the other process has received what it waited for.
            std::io::stdin().read_line(&mut String::new()).unwrap();
            std::process::abort();
        }
        println!("added up");
        assert_eq!(rank.await_error(), 6);
        assert_eq!(last_error(), "the process that made the unique id is gone");
        return ok(ncclCommAbort(rank.comm));
    }
    with_first("the_process_that_made_the_id_may_be_killed_too", |mut first, mut second| {
        read(&mut second, "added up");
        first.stdin.take().unwrap().write_all(b"go\n").unwrap();
        assert!(!first.wait().unwrap().success());
        wait([second]);
    });
}

#[test]
fn the_process_that_made_the_id_may_end_first() {
    let _alone = alone();
    if let Some((role, rank)) = first_or_second() {
        add_up(&rank);
        if role.rank == 1 {
            // Until the other process has ended.
            std::io::stdin().read_line(&mut String::new()).unwrap();
        }
        assert_eq!(rank.async_error(), 0);
        ok(ncclCommDestroy(rank.comm));
        return expect_clean();
    }
    with_first("the_process_that_made_the_id_may_end_first", |first, mut second| {
        wait([first]);
        second.stdin.take().unwrap().write_all(b"go\n").unwrap();
        wait([second]);
    });
}

#[test]
fn processes_share_a_device_only_as_different_hosts_or_with_leave() {
    let _alone = alone();
    let test = "processes_share_a_device_only_as_different_hosts_or_with_leave";
    if let Some(role) = role() {
        return println!("code={}", role.attempt());
    }
    let codes = |settings: [&[(&str, &str)]; 2]| {
        let id = new_id();
        let start = |rank: usize| start(test, rank, 2, Some(id), &[settings[rank], &[("DEVICE", "0")]].concat());
        let mut children = [start(0), start(1)];
        let codes = children.each_mut().map(|child| read(child, "code="));
        wait(children);
        codes.map(|code| code.parse::<c_int>().unwrap())
    };
    assert_eq!(codes([&[], &[]]), [5, 5]);
    assert_eq!(codes([&[("NCCL_HOSTID", "a")], &[("NCCL_HOSTID", "b")]]), [0, 0]);
    assert_eq!(codes([&[("NCCL_MULTI_RANK_GPU_ENABLE", "1")]; 2]), [0, 0]);
}

#[test]
fn processes_with_different_versions_are_refused() {
    if let Some(role) = role() {
        simgpu::nccl::install(setting("VERSION").unwrap() as i32);
        let _alone = alone();
        return println!("code={}", role.attempt());
    }
    let _alone = alone();
    let id = new_id();
    let test = "processes_with_different_versions_are_refused";
    let mut children = ["22809", "23007"].map(|version| {
        let rank = usize::from(version == "23007");
        start(test, rank, 2, Some(id), &[("VERSION", version)])
    });
    assert_eq!(children.each_mut().map(|child| read(child, "code=")), ["5", "5"]);
    wait(children);
}

/// Runs a test in a process that has NCCL of this version.
fn with_version(test: &str, version: i32, check: impl Fn()) {
    if setting("VERSION") == Some(version as usize) {
        simgpu::nccl::install(version);
        let _alone = alone();
        check();
    } else if setting("VERSION").is_none() {
        wait([start(test, 0, 1, None, &[("VERSION", &version.to_string())])]);
    }
}

#[test]
fn older_versions_lack_what_came_later() {
    let test = "older_versions_lack_what_came_later";
    let has = |name: &str| find::<usize>(name).is_some();
    for version in [21801, 22605, 22809, 22907, 23203] {
        with_version(test, version, || {
            let mut found = 0;
            ok(ncclGetVersion(&raw mut found));
            assert_eq!(found, version);
            for (name, since) in simgpu::nccl::SYMBOLS {
                assert_eq!(has(name), since <= version, "{name} in {version}");
            }
            everything_of_one();
        });
    }
}

/// Checks the calls that every version supports.
fn everything_of_one() {
    in_ranks(1, |rank| {
        let buffer = rank.upload(&[5; 12]);
        ok(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 12, U8, SUM, rank.comm, rank.stream()));
        assert_eq!(rank.download(&buffer), [5; 12]);
    });
    expect_clean();
}

#[test]
fn some_versions_lose_the_end_of_an_average_of_one_rank() {
    let test = "some_versions_lose_the_end_of_an_average_of_one_rank";
    for (version, kept) in [(22605, 20), (22705, 16), (22906, 16), (22907, 20)] {
        with_version(test, version, || {
            in_ranks(1, move |rank| {
                let (from, into) = (rank.upload(&1f32.to_le_bytes().repeat(5)), rank.room(20));
                ok(ncclAllReduce(rank.at(&from), rank.at(&into), 5, F32, 4, rank.comm, rank.stream()));
                let mut expected = 1f32.to_le_bytes().repeat(5);
                expected[kept..].fill(0xee);
                assert_eq!(rank.download(&into), expected);
            });
            expect_clean();
        });
    }
}
