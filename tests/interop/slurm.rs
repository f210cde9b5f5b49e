//! Slurm's `srun`, on one node and on two.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::common::meeting::patience;
use crate::common::programs::program;
use crate::peer::{Peer, example};
use crate::rank;
use crate::skip;
use crate::slurm_cluster::Cluster;

#[test]
fn srun_starts_our_example_on_one_node_in_several_steps_at_once() {
    let cluster = match Cluster::up(31, 1) {
        Ok(cluster) => cluster,
        Err(why) => skip!("{why}"),
    };
    // Two jobs at once, and two steps of one allocation at once: each has its own port.
    let jobs = [(); 2].map(|()| Peer::start(cluster.command(0, "srun").args(["-n", "4"]).arg(example("gradient_averaging"))));
    for printed in jobs.map(Peer::finish) {
        assert!(printed.contains("parameters alike on all 4 ranks, bit for bit: true"), "{printed}");
    }
    let steps = format!("for step in 1 2; do srun --exact -n 2 {} & done; wait", rank::command().join(" "));
    let mut salloc = cluster.command(0, "salloc");
    let printed = Peer::start(salloc.args(["-n", "4", "sh", "-c", &steps]).envs([rank::variable("sums")])).finish();
    for rank in 0..2 {
        assert_eq!(printed.matches(&format!("rank {rank} of 2 is right")).count(), 2, "{printed}");
    }
}

#[test]
fn srun_starts_our_ranks_on_two_nodes_and_a_batch_script_without_it_is_told_so() {
    let cluster = match Cluster::up(32, 2) {
        Ok(cluster) => cluster,
        Err(why) => skip!("{why}"),
    };
    // The nodes are this machine in two namespaces. They share its kernel, and no setting hides that.
    for arguments in [&["-N", "2", "-n", "4"][..], &["-N", "2", "-n", "3", "--distribution=cyclic"]] {
        let mut srun = cluster.command(0, "srun");
        let printed = Peer::start(srun.args(arguments).args(rank::command()).envs([rank::variable("sums")])).finish();
        let n: usize = arguments[3].parse().unwrap();
        assert_eq!(printed.matches(&format!("of {n} is right")).count(), n, "{printed}");
    }
    let output = tempfile::NamedTempFile::new().unwrap();
    let mut sbatch = cluster.command(0, "sbatch");
    sbatch.args(["-N", "2", "-n", "4", "--wait", "--wrap", &rank::command().join(" "), "--output"]).arg(output.path());
    let (success, ..) = Peer::start(sbatch.envs([rank::variable("sums")])).end();
    let printed = std::fs::read_to_string(output.path()).unwrap();
    assert!(!success && printed.contains("start it with srun"), "{printed}");
    match program("collperf") {
        Ok(collperf) => a_step_of_srun_asks_a_job_that_hangs(&cluster, &collperf),
        Err(why) => skip!("{why}"),
    }
}

/// Checks the commands of the guide that ask a job on several nodes where it is.
fn a_step_of_srun_asks_a_job_that_hangs(cluster: &Cluster, collperf: &Path) {
    let mut srun = cluster.command(0, "srun");
    let mut job = Peer::start(srun.args(["-N", "2", "-n", "4"]).args(rank::command()).envs([rank::variable("hangs")]));
    job.expect("rank 3 of 4 is late");
    let number = Peer::start(cluster.command(0, "squeue").args(["--noheader", "--format", "%A"])).finish();
    // The other ranks first have to wait for a second.
    let (mut said, began) = (String::new(), Instant::now());
    while began.elapsed() < patience(60) {
        let folder = tempfile::tempdir().unwrap();
        let file = |node: &str| folder.path().join(format!("ps-{node}.json"));
        let mut step = cluster.command(0, "srun");
        step.args(["--overlap", "--jobid", number.trim(), "-N", "2", "--ntasks-per-node", "1", "--output"]).arg(file("%n"));
        Peer::start(step.arg(collperf).args(["ps", "--json"])).finish();
        let merged = Command::new(collperf).args(["ps", "--merge"]).args(["0", "1"].map(file)).output().unwrap();
        said = String::from_utf8_lossy(&merged.stdout).into_owned();
        assert!(merged.status.success(), "{said}");
        if said.contains("is behind") {
            break;
        }
    }
    job.kill();
    assert!(said.contains("4 ranks") && said.contains("rank 3 (host ") && said.contains("is behind: it has not reached"), "{said}");
    assert!(said.contains("in which ranks 0-2 waited") && !said.contains("no socket"), "{said}");
}
