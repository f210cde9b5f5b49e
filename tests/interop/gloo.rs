//! Python ranks that find each other through this crate's store, started with and without `collrun`.

use std::process::Command;

use collectives::store::TcpStoreServer;

use crate::common::programs::program;
use crate::peer::{Peer, script};
use crate::{python, skip};

#[test]
fn python_ranks_meet_over_our_server_and_reduce_over_gloo() {
    let python = python!();
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().port().to_string();
    let ranks: Vec<Peer> =
        ["0", "1", "2"].iter().map(|rank| Peer::start(&mut python.script("gloo.py", &["store", &port, rank, "3"]))).collect();
    for (rank, peer) in ranks.into_iter().enumerate() {
        let printed = peer.finish();
        assert!(printed.contains(&format!("rank {rank} of 3 is right")), "{printed}");
    }
}

#[test]
fn collrun_starts_python_ranks_which_use_its_store() {
    let python = python!();
    let mut collrun = match program("collrun") {
        Ok(collrun) => Command::new(collrun),
        Err(why) => skip!("{why}"),
    };
    collrun.args(["--nproc-per-node", "3", "--"]).arg(python.program()).args(["-W", "ignore"]).arg(script("gloo.py")).arg("env");
    let printed = Peer::start(&mut collrun).finish();
    for rank in 0..3 {
        assert!(printed.contains(&format!("rank {rank} of 3 is right")), "{printed}");
    }
}
