//! Ranks in several dimensions, against coordinates that are counted out.

use collectives::Communicator;
use collectives::train::Mesh;

use super::common::ranks::threads_with;

/// The ranks of a world in the order of their coordinates, the last fastest.
fn coordinates(sizes: &[usize]) -> Vec<Vec<usize>> {
    sizes.iter().fold(vec![vec![]], |all, size| {
        all.into_iter().flat_map(|head| (0..*size).map(move |last| [head.clone(), vec![last]].concat())).collect()
    })
}

/// The ranks whose coordinates are like this one's but for the dimensions chosen.
fn expected(all: &[Vec<usize>], rank: usize, chosen: &[usize]) -> Vec<usize> {
    let is_alike = |other: &usize| (0..all[rank].len()).all(|index| chosen.contains(&index) || all[*other][index] == all[rank][index]);
    (0..all.len()).filter(is_alike).collect()
}

#[test]
fn each_slice_has_the_ranks_that_differ_along_it_alone() {
    for sizes in [&[1][..], &[4], &[2, 3], &[3, 2], &[2, 1, 3], &[2, 2, 2], &[1, 13]] {
        let (all, names) = (coordinates(sizes), ["pp", "dp", "tp"]);
        Communicator::run_local(all.len(), |comm| {
            let named: Vec<(&str, usize)> = names.iter().copied().zip(sizes.iter().copied()).collect();
            let mesh = Mesh::new(comm, &named)?;
            assert_eq!(mesh.dimensions().collect::<Vec<_>>(), named);
            for (index, (name, size)) in named.iter().enumerate() {
                assert_eq!((mesh.coordinate(name)?, mesh.size(name)?), (all[comm.rank()][index], *size));
                assert_eq!(mesh.dimension(name)?.world_ranks(), expected(&all, comm.rank(), &[index]));
                assert_eq!(mesh.dimension(name)?.rank(), all[comm.rank()][index]);
            }
            if sizes.len() == 3 {
                assert_eq!(mesh.flatten(&["tp", "pp"])?.world_ranks(), expected(&all, comm.rank(), &[0, 2]));
                assert_eq!(mesh.flatten(&["dp"])?.world_ranks(), expected(&all, comm.rank(), &[1]));
            }
            let everybody: Vec<&str> = named.iter().map(|(name, _)| *name).collect();
            assert_eq!(mesh.flatten(&everybody)?.world_ranks(), comm.world_ranks());
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn dimensions_that_do_not_fit_are_refused() {
    Communicator::run_local(4, |comm| {
        for wrong in [&[("dp", 2)][..], &[("dp", 0), ("tp", 4)], &[("dp", 2), ("dp", 2)], &[("", 4)], &[], &[("a", usize::MAX), ("b", 4)]] {
            Mesh::new(comm, wrong).unwrap_err();
        }
        let mesh = Mesh::new(comm, &[("dp", 2), ("tp", 2)])?;
        assert!(mesh.dimension("pp").unwrap_err().to_string().contains("there is no dimension \"pp\" in [\"dp\", \"tp\"]"));
        mesh.flatten(&[]).unwrap_err();
        mesh.flatten(&["tp", "tp"]).unwrap_err();
        mesh.whole().barrier()
    })
    .unwrap();
}

#[test]
fn ranks_that_name_different_dimensions_are_told() {
    let errors = Communicator::run_local(4, |comm| {
        let named = if comm.rank() == 2 { [("tp", 2), ("dp", 2)] } else { [("dp", 2), ("tp", 2)] };
        let made = Mesh::new(comm, &named).unwrap_err();
        let wrong: &[(&str, usize)] = if comm.rank() == 1 { &[("dp", 3)] } else { &[("dp", 4)] };
        let refused = Mesh::new(comm, wrong).unwrap_err();
        let mesh = Mesh::new(comm, &[("dp", 2), ("tp", 2)])?;
        let flattened = mesh.flatten(if comm.rank() == 3 { &["dp"] } else { &["tp"] }).unwrap_err();
        Ok([made, refused, flattened].map(|error| error.to_string()))
    });
    for errors in errors.unwrap() {
        let expected = [["rank 2", "\"tp\""], ["rank 1", "of 3"], ["rank 3", "\"dp\""]];
        errors.iter().zip(expected).for_each(|(error, words)| assert!(words.iter().all(|word| error.contains(word)), "{error}"));
    }
}

/// Ranks on hosts of these names.
fn on_hosts<R: Send>(hosts: &[&str], program: impl Fn(&Communicator) -> R + Sync) -> Vec<R> {
    let builder = |rank: usize| Communicator::builder().configure(|config| config.host_identity = Some(hosts[rank].to_owned()));
    threads_with(hosts.len(), builder, program)
}

#[test]
fn hosts_are_the_outer_dimension_and_their_ranks_the_inner_one() {
    let found = on_hosts(&["a", "a", "b", "b", "c", "c"], |comm| {
        let mesh = Mesh::by_host(comm, "replicate", "shard").unwrap();
        (mesh.dimension("shard").unwrap().world_ranks().to_vec(), mesh.dimension("replicate").unwrap().world_ranks().to_vec())
    });
    for (rank, (shard, replicate)) in found.into_iter().enumerate() {
        assert_eq!((shard, replicate), (vec![rank / 2 * 2, rank / 2 * 2 + 1], vec![rank % 2, rank % 2 + 2, rank % 2 + 4]));
    }
    for (hosts, words) in [(&["a", "a", "b"][..], "rank 2's has 1"), (&["a", "b", "a", "b"], "rank 1 is number 0 on its host")] {
        for error in on_hosts(hosts, |comm| Mesh::by_host(comm, "replicate", "shard").unwrap_err().to_string()) {
            assert!(error.contains(words), "{error}");
        }
    }
}
