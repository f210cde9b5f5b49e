//! A rank of a mesh dies: every rank gets an error, even those that share no slice with it, and the remaining ranks
//! continue as another mesh.

use collectives::{Communicator, Result};
use collectives_train::{FullySharded, FullyShardedOptions, Mesh, ShardingStrategy};

use crate::common::random::Random;
use crate::common::ranks::{Wiring, free_port, is_rank_of, spawn_rank};
use crate::network::{self, Host, Mode, Part, Training, bound, descend, samples, train_alone};

/// The rank that dies and the number of its calls before that; the seed of the training.
const FATE: &str = "COLLECTIVES_TEST_FATE";

/// Trains on two copies of two shards each until a rank is lost. This rank dies after `dies` calls.
fn train_until_lost(comm: &Communicator, training: Training, mut dies: Option<usize>) -> Result<()> {
    let mesh = Mesh::new(comm, &[("replicate", 2), ("shard", 2)])?;
    let (shard, copies) = (mesh.dimension("shard")?, mesh.dimension("replicate")?);
    let mut model = FullySharded::new(shard, network::units::<f32>(), FullyShardedOptions::default())?;
    network::load::<f32>(&mut model, shard, training.seed)?;
    for step in 0.. {
        let own = samples(training, step, 0, Part::of(comm));
        network::pass::<f32, _>(&Host, &mut model, (&own, own.len()), || match &mut dies {
            Some(0) => std::process::abort(),
            Some(left) => *left -= 1,
            None => (),
        })?;
        let mut reduced = model.reduce()?;
        reduced.reduce_over(copies)?;
        reduced.update(|shard| shard.values::<f32>().map(|(parameters, slopes)| descend(parameters, slopes)))?;
    }
    Ok(())
}

fn rank_of_a_mesh(wiring: Wiring) {
    let rank: usize = std::env::var("RANK").unwrap().parse().unwrap();
    let fate: Vec<u64> = std::env::var(FATE).unwrap().split(' ').map(|number| number.parse().unwrap()).collect();
    let training = Training { seed: fate[2], steps: 8, passes: 1, limit: None };
    let comm = wiring.builder(rank).from_env().unwrap();
    // This drops slices and models, so ranks that wait for this rank there get an error too.
    let error = train_until_lost(&comm, training, (fate[0] == rank as u64).then_some(fate[1] as usize)).unwrap_err();
    assert!(error.is_peer_lost(), "{error}");
    println!("{error}");
    let rest = comm.shrink().unwrap();
    assert_eq!(rest.world_size(), 3);
    let alone = train_alone(training);
    for shard in [1, 3] {
        let mode = Mode::Hybrid { shard, strategy: ShardingStrategy::FullShard };
        let apart = mode.apart::<f32, _>(&Host, &rest, training, &alone).unwrap();
        assert!(apart <= bound::<f32>(), "{mode:?} is {apart:e} apart");
    }
    rest.close().unwrap();
}

fn a_rank_of_a_mesh_dies(name: &str, wiring: Wiring) {
    if is_rank_of(name) {
        return rank_of_a_mesh(wiring);
    }
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for victim in 0..4 {
        let (port, fate) = (free_port(), format!("{victim} {} {}", random.below(50), random.next()));
        let ranks: Vec<_> = (0..4).map(|rank| spawn_rank(name, rank, 4, port, &[(FATE, fate.clone())])).collect();
        let dead = ranks[victim].id();
        let ends: Vec<_> = ranks.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
        for (rank, end) in ends.iter().enumerate() {
            let said = || ends.iter().map(|end| String::from_utf8_lossy(&end.stderr)).collect::<Vec<_>>().join("\n");
            assert_eq!(end.status.success(), rank != victim, "rank {rank}: {}, fate {fate}, seed {seed}\n{}", end.status, said());
            // Numbers are those of a slice. The opposite corner shares no slice with the dead rank, so its error names
            // a rank that has given up.
            let error = String::from_utf8_lossy(&end.stdout);
            let is_named = error.contains(&format!("pid {dead})"));
            assert!(
                is_named || rank == victim || rank + victim == 3,
                "rank {rank} has not lost process {dead}: {error}, fate {fate}, seed {seed}"
            );
        }
    }
}

#[test]
fn a_process_of_a_mesh_that_dies_is_told_to_all_who_go_on_without_it() {
    a_rank_of_a_mesh_dies("mesh_deaths::a_process_of_a_mesh_that_dies_is_told_to_all_who_go_on_without_it", Wiring::Shm);
}

#[test]
fn a_process_of_a_mesh_that_dies_is_told_to_all_over_tcp() {
    a_rank_of_a_mesh_dies("mesh_deaths::a_process_of_a_mesh_that_dies_is_told_to_all_over_tcp", Wiring::Tcp);
}
