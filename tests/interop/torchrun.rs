//! Ranks of this crate, started by PyTorch's own launcher.

use collectives::store::TcpStoreServer;

use crate::peer::{Peer, example, script};
use crate::python;
use crate::rank;

#[test]
fn torchrun_starts_our_example() {
    let python = python!();
    let example = example("gradient_averaging");
    let arguments = ["--nproc-per-node", "4", "--standalone", "--no-python", "--", example.to_str().unwrap()];
    let printed = Peer::start(&mut python.torchrun(&arguments)).finish();
    assert!(printed.contains("parameters alike on all 4 ranks, bit for bit: true"), "{printed}");
}

#[test]
fn torchrun_and_collrun_say_what_a_rank_failed_of() {
    let python = python!();
    let example = example("gradient_averaging");
    let mut collrun = std::process::Command::new(crate::common::programs::program("collrun").unwrap());
    collrun.args(["--nproc-per-node", "2", "--"]).arg(&example);
    let torchrun = python.torchrun(&["--nproc-per-node", "2", "--standalone", "--no-python", "--", example.to_str().unwrap()]);
    for mut launcher in [collrun, torchrun] {
        let output = launcher.env("COLLECTIVES_TIMEOUT", "soon").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let (_, last) = said.split_once("first failure").or_else(|| said.split_once("first observed failure")).unwrap();
        assert!(!output.status.success() && last.contains("COLLECTIVES_TIMEOUT=\"soon\""), "{said}");
    }
}

#[test]
fn a_rank_that_dies_in_its_first_life_is_started_again_by_torchrun_with_all_others() {
    let python = python!();
    let rank = rank::command();
    let arguments = ["--nproc-per-node", "4", "--max-restarts", "2", "--standalone", "--no-python", "--"];
    let arguments: Vec<&str> = arguments.into_iter().chain(rank.iter().map(String::as_str)).collect();
    let printed = Peer::start(python.torchrun(&arguments).envs([rank::variable("dies once")])).finish();
    for rank in 0..4 {
        assert!(printed.contains(&format!("rank {rank} of 4 is right in life 1")), "{printed}");
    }
}

#[test]
fn two_agents_of_torchrun_meet_over_our_server_and_so_do_their_ranks() {
    let python = python!();
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let (rank, endpoint) = (rank::command(), format!("127.0.0.1:{}", server.local_addr().port()));
    let arguments = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "2", "--local-addr", "127.0.0.1"];
    let meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", &endpoint, "--rdzv-id", "job", "--rdzv-conf", "is_host=0"];
    let arguments: Vec<&str> =
        arguments.into_iter().chain(meeting).chain(["--no-python", "--"]).chain(rank.iter().map(String::as_str)).collect();
    let agents = [(); 2].map(|()| Peer::start(python.torchrun(&arguments).envs([rank::variable("dies once")])));
    let printed = agents.map(Peer::finish).concat();
    for rank in 0..4 {
        assert!(printed.contains(&format!("rank {rank} of 4 is right in life 1")), "{printed}");
    }
    assert!(server.requests_served() > 0);
}

#[test]
fn ranks_of_python_and_of_rust_in_one_job_read_each_others_keys() {
    let python = python!();
    let [program, test, exact, nocapture, threads] = rank::command();
    let (python_rank, interpreter) = (script("gloo.py"), python.program().to_str().unwrap());
    let choose = format!(
        "if [ $((RANK % 2)) = 0 ]; then exec {interpreter} -W ignore {} mixed; else exec {program} {test} {exact} {nocapture} {threads}; fi",
        python_rank.display()
    );
    let arguments = ["--nproc-per-node", "4", "--standalone", "--no-python", "--", "sh", "-c", &choose];
    let printed = Peer::start(python.torchrun(&arguments).envs([rank::variable("mixed")])).finish();
    for rank in 0..4 {
        assert!(printed.contains(&format!("rank {rank} has met the others")), "{printed}");
    }
}
