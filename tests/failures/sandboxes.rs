//! Hosts that do not let ranks share memory, each in another way: by a filter of system calls, or because ranks that
//! look like ranks of one host have no socket in common. The ranks use TCP, all of them, and one warning says why.

#![expect(unsafe_code, reason = "a system call can be forbidden by hand alone")]

use std::process::{Command, Output};
use std::time::Instant;

use crate::common::hosts::{Hosts, skip};
use crate::common::ranks::{free_port, is_rank_of};
use crate::starts::{SOON, rank_that_says, start, unshared};

/// The variable that names what is forbidden to a rank.
const FORBIDDEN: &str = "COLLECTIVES_TEST_FORBIDDEN";

/// The words of the warning.
const WARNING: &str = "the ranks of this host reach each other over TCP, without shared memory: ";

/// Makes the kernel refuse a system call to this thread and to those that it starts.
pub(super) fn forbid(call: libc::c_long, error: libc::c_int) {
    forbid_if(call, None, error);
}

/// Makes the kernel refuse a system call, or only those of its calls whose argument of an index has a value.
fn forbid_if(call: libc::c_long, argument: Option<(u32, libc::c_int)>, error: libc::c_int) {
    let filter = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    // Loads the call's number. If it is another one, allows the call.
    let mut program = vec![filter(0x20, 0, 0, 0), filter(0x15, 1, 0, call as u32), filter(0x06, 0, 0, libc::SECCOMP_RET_ALLOW)];
    if let Some((index, value)) = argument {
        // Does the same with the lower half of the argument.
        let low = 16 + 8 * index;
        program.extend([filter(0x20, 0, 0, low), filter(0x15, 1, 0, value as u32), filter(0x06, 0, 0, libc::SECCOMP_RET_ALLOW)]);
    }
    program.push(filter(0x06, 0, 0, libc::SECCOMP_RET_ERRNO | error as u32));
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the call takes only numbers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: the program outlives the call, which copies it.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_SECCOMP, 2, &raw const program) }, 0);
}

/// Forbids what the variable names, and runs a rank.
fn rank_in_a_sandbox() {
    match std::env::var(FORBIDDEN).as_deref() {
        Err(_) => {}
        Ok("memfd_create") => forbid(libc::SYS_memfd_create, libc::EPERM),
        Ok("sendmsg") => forbid(libc::SYS_sendmsg, libc::EPERM),
        Ok("recvmsg") => forbid(libc::SYS_recvmsg, libc::ENOSYS),
        Ok("unix sockets") => forbid_if(libc::SYS_socket, Some((0, libc::AF_UNIX)), libc::EAFNOSUPPORT),
        Ok("locks") => forbid_if(libc::SYS_fcntl, Some((1, libc::F_OFD_SETLK)), libc::EPERM),
        Ok(other) => panic!("{other}"),
    }
    rank_that_says();
}

/// Starts three ranks, of which one may not do what `forbidden` names. Returns their outputs.
fn three_ranks(name: &str, rank: usize, forbidden: &str, transport: &str) -> Vec<Output> {
    let port = free_port();
    let ranks = (0..3).map(|number| {
        let mut command = Command::new("env");
        command.env("COLLECTIVES_TRANSPORT", transport);
        if number == rank {
            command.env(FORBIDDEN, forbidden);
        }
        start(name, command, number, 3, port)
    });
    ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.wait_with_output().unwrap()).collect()
}

/// Returns what a rank has printed after `@`, and its error output.
fn words(output: &Output) -> (String, String) {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    let said: Vec<&str> = out.lines().filter_map(|line| Some(line.split_once('@')?.1)).collect();
    (said.join("; "), err)
}

/// Checks that ranks have the right sums over TCP, that all of them name the same rank and reason, and that one of them
/// warns, once.
fn check_fallback(outputs: &[Output], rank: usize, reason: &str) {
    let mut warnings = String::new();
    for output in outputs {
        let (said, err) = words(output);
        let named = format!("over TCP (without shared memory: rank {rank} ");
        assert!(said.ends_with("ok") && said.contains(&named) && said.contains(reason), "{reason}: {said} {err}");
        warnings.extend(err.lines().filter(|line| line.contains(WARNING)).map(|line| format!("{line}\n")));
    }
    assert!(warnings.lines().count() == 1 && warnings.contains(reason), "{reason}: {warnings:?}");
    assert!(warnings.contains(&format!("{WARNING}rank {rank} ")), "{reason}: {warnings:?}");
}

#[test]
fn one_rank_that_may_not_share_memory_makes_all_use_tcp() {
    const NAME: &str = "sandboxes::one_rank_that_may_not_share_memory_makes_all_use_tcp";
    if is_rank_of(NAME) {
        return rank_in_a_sandbox();
    }
    let refusals = [
        (0, "memfd_create", 0, "Operation not permitted"),
        (0, "unix sockets", 0, "Address family not supported"),
        (2, "unix sockets", 2, "Address family not supported"),
        (2, "recvmsg", 2, "Function not implemented"),
        (1, "locks", 1, "Operation not permitted"),
        // The first rank that did not receive the descriptor reports why its leader did not send it.
        (0, "sendmsg", 1, "the leader's system does not let it pass on a file descriptor: Operation not permitted"),
    ];
    for (rank, forbidden, named, reason) in refusals {
        check_fallback(&three_ranks(NAME, rank, forbidden, "auto"), named, reason);
    }
    // A rank that creates no memory needs no permission to.
    for output in three_ranks(NAME, 1, "memfd_create", "shm") {
        let (said, err) = words(&output);
        assert!(said.contains("3 ranks of one host: shared memory") && said.ends_with("ok"), "{said} {err}");
    }
}

#[test]
fn ranks_that_require_shared_memory_get_an_error_soon_if_it_is_refused() {
    const NAME: &str = "sandboxes::ranks_that_require_shared_memory_get_an_error_soon_if_it_is_refused";
    if is_rank_of(NAME) {
        return rank_in_a_sandbox();
    }
    for (rank, forbidden) in [(0, "memfd_create"), (0, "sendmsg"), (2, "recvmsg"), (1, "unix sockets")] {
        let began = Instant::now();
        for output in three_ranks(NAME, rank, forbidden, "shm") {
            let (said, err) = words(&output);
            assert!(said.starts_with("failed") && said.contains("shared"), "{forbidden}: {said} {err}");
        }
        assert!(began.elapsed() < SOON, "{forbidden}: {:?}", began.elapsed());
    }
}

#[test]
fn a_kernel_that_refuses_files_that_can_be_executed_lets_ranks_share_memory() {
    const NAME: &str = "sandboxes::a_kernel_that_refuses_files_that_can_be_executed_lets_ranks_share_memory";
    if is_rank_of(NAME) {
        return rank_that_says();
    }
    const SETTING: &str = "/proc/sys/vm/memfd_noexec";
    const RUN: [&str; 4] = ["--pid", "--fork", "--mount-proc", "sh"];
    let set = format!("echo 2 > {SETTING}");
    // The setting belongs to a PID namespace.
    if let Err(why) = unshared(&[&RUN[..], &["-c", &set]].concat()) {
        skip!("{SETTING} cannot be set in a PID namespace: {why}");
    }
    let port = free_port();
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            let mut command = Command::new("unshare");
            command.args(RUN).args(["-c", &format!("{set} && exec \"$0\" \"$@\"")]).env("COLLECTIVES_TRANSPORT", "shm");
            start(NAME, command, rank, 2, port)
        })
        .collect();
    for output in ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()) {
        let (said, err) = words(&output);
        assert!(said.contains("2 ranks of one host: shared memory") && said.ends_with("ok"), "{said} {err}");
    }
}

/// Runs four ranks, two in each of two network namespaces. Returns their outputs.
fn in_two_containers(name: &str, net: u8, variables: &[(&str, &str)]) -> Result<Vec<Output>, String> {
    let hosts = Hosts::up(net, 2)?;
    let on = |rank: usize| {
        let mut command = hosts.command(rank / 2, "env");
        command.envs(variables.iter().copied()).env("MASTER_ADDR", format!("10.99.{net}.1"));
        start(name, command, rank, 4, 29_519)
    };
    Ok((0..4).map(on).collect::<Vec<_>>().into_iter().map(|rank| rank.wait_with_output().unwrap()).collect())
}

#[test]
fn containers_with_one_boot_id_and_no_common_socket_are_hosts_of_their_own() {
    const NAME: &str = "sandboxes::containers_with_one_boot_id_and_no_common_socket_are_hosts_of_their_own";
    const NET: u8 = 19;
    if is_rank_of(NAME) {
        return rank_that_says();
    }
    let outputs = match in_two_containers(NAME, NET, &[]) {
        Ok(outputs) => outputs,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    for output in &outputs {
        let (said, err) = words(output);
        assert!(said.ends_with("ok") && said.contains("shared memory inside 2 hosts") && !err.contains(WARNING), "{said} {err}");
    }
}

#[test]
fn machines_that_look_like_one_host_use_tcp() {
    const NAME: &str = "sandboxes::machines_that_look_like_one_host_use_tcp";
    const NET: u8 = 20;
    if is_rank_of(NAME) {
        return rank_that_says();
    }
    // As virtual machines that were cloned from one snapshot do.
    let outputs = match in_two_containers(NAME, NET, &[("COLLECTIVES_HOST_IDENTITY", "boot=1 net=4:4026531840 user=4:4026531837 uid=0")]) {
        Ok(outputs) => outputs,
        Err(why) => skip!("network namespaces cannot be made: {why}"),
    };
    check_fallback(&outputs, 2, "Connection refused");
}
