//! Slurm's `srun`, on one node and on two.

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
}
