//! Meshes of ranks in several dimensions, compared with computed coordinates.

use collectives::{Communicator, Error, ReduceOp, Result};
use collectives_train::Mesh;

use super::common::ranks::{Wiring, processes, threads, threads_with};

/// Returns the coordinates of all ranks, in rank order; the last coordinate changes fastest.
fn coordinates(sizes: &[usize]) -> Vec<Vec<usize>> {
    sizes.iter().fold(vec![vec![]], |all, size| {
        all.into_iter().flat_map(|head| (0..*size).map(move |last| [head.clone(), vec![last]].concat())).collect()
    })
}

/// Returns the ranks whose coordinates equal this one's, except in the chosen dimensions.
fn expected(all: &[Vec<usize>], rank: usize, chosen: &[usize]) -> Vec<usize> {
    let is_alike = |other: &usize| (0..all[rank].len()).all(|index| chosen.contains(&index) || all[*other][index] == all[rank][index]);
    (0..all.len()).filter(is_alike).collect()
}

/// Creates a mesh of these sizes, compares its slices with the coordinates, and sums along each of them.
fn slices(comm: &Communicator, sizes: &[usize]) -> Result<()> {
    let (all, names) = (coordinates(sizes), ["pp", "dp", "tp"]);
    let named: Vec<(&str, usize)> = names.iter().copied().zip(sizes.iter().copied()).collect();
    let mesh = Mesh::new(comm, &named)?;
    assert_eq!(mesh.dimensions().collect::<Vec<_>>(), named);
    for (index, (name, size)) in named.iter().enumerate() {
        assert_eq!((mesh.coordinate(name)?, mesh.size(name)?), (all[comm.rank()][index], *size));
        let (slice, expected) = (mesh.dimension(name)?, expected(&all, comm.rank(), &[index]));
        assert_eq!((slice.world_ranks(), slice.rank()), (&*expected, all[comm.rank()][index]));
        let mut sum = comm.rank() as u64;
        slice.all_reduce(&mut sum, ReduceOp::Sum)?;
        assert_eq!(sum as usize, expected.iter().sum::<usize>(), "along {name} of {named:?}");
    }
    if sizes.len() == 3 {
        assert_eq!(mesh.flatten(&["tp", "pp"])?.world_ranks(), expected(&all, comm.rank(), &[0, 2]));
        assert_eq!(mesh.flatten(&["dp"])?.world_ranks(), expected(&all, comm.rank(), &[1]));
    }
    let everybody: Vec<&str> = named.iter().map(|(name, _)| *name).collect();
    assert_eq!(mesh.flatten(&everybody)?.world_ranks(), comm.world_ranks());
    Ok(())
}

#[test]
fn each_slice_has_the_ranks_that_differ_along_it_alone() {
    for sizes in [&[1][..], &[4], &[2, 3], &[3, 2], &[2, 1, 3], &[2, 2, 2], &[1, 13]] {
        Communicator::run_local(sizes.iter().product(), |comm| slices(comm, sizes)).unwrap();
    }
    for wiring in [Wiring::Tcp, Wiring::Pairs, Wiring::Dealt] {
        for sizes in [&[4][..], &[2, 3], &[3, 1], &[2, 1, 3]] {
            threads(wiring, sizes.iter().product(), |comm| slices(comm, sizes).unwrap());
        }
    }
}

#[test]
fn each_slice_has_its_ranks_between_processes() {
    let name = "mesh::each_slice_has_its_ranks_between_processes";
    processes(name, Wiring::Shm, 4, |comm| [&[2, 2][..], &[1, 4], &[2, 1, 2]].iter().try_for_each(|sizes| slices(comm, sizes)));
}

#[test]
fn each_slice_has_its_ranks_between_processes_over_tcp() {
    let name = "mesh::each_slice_has_its_ranks_between_processes_over_tcp";
    processes(name, Wiring::Tcp, 3, |comm| [&[3][..], &[1, 3], &[3, 1]].iter().try_for_each(|sizes| slices(comm, sizes)));
}

#[test]
fn a_slice_can_be_a_mesh_itself() {
    threads(Wiring::Shm, 4, |comm| {
        let outer = Mesh::new(comm, &[("replicate", 1), ("within", 4)]).unwrap();
        let inner = Mesh::new(outer.dimension("within").unwrap(), &[("dp", 2), ("tp", 2)]).unwrap();
        drop(outer);
        assert_eq!(inner.dimension("dp").unwrap().world_ranks(), [comm.rank() % 2, comm.rank() % 2 + 2]);
        inner.dimension("tp").unwrap().barrier().unwrap();
    });
}

#[test]
fn dimensions_that_do_not_fit_are_refused_on_every_rank_and_harm_nothing() {
    let many = "is not the world size 4";
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        threads(wiring, 4, |comm| {
            for (wrong, words) in [
                (&[("dp", 2)][..], many),
                (&[("dp", 2), ("tp", 3)], many),
                (&[("dp", 0), ("tp", 4)], many),
                (&[("dp", 0)], many),
                (&[], many),
                (&[("a", usize::MAX), ("b", 4)], many),
                (&[("dp", 2), ("dp", 2)], "the name \"dp\" is empty or appears twice"),
                (&[("dp", 4), ("tp", 1), ("dp", 1)], "the name \"dp\" is empty or appears twice"),
                (&[("", 4)], "the name \"\" is empty or appears twice"),
            ] {
                let error = Mesh::new(comm, wrong).unwrap_err();
                assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains(words), "{wrong:?}: {error}");
            }
            let mesh = Mesh::new(comm, &[("dp", 2), ("tp", 2)]).unwrap();
            let unknown = [mesh.dimension("pp").map(drop), mesh.size("").map(drop), mesh.coordinate("DP").map(drop)];
            for error in unknown.map(Result::unwrap_err) {
                assert!(error.to_string().contains("in [\"dp\", \"tp\"]"), "{error}");
            }
            for (wrong, words) in
                [(&[][..], "at least one"), (&["tp", "tp"], "each dimension only once"), (&["tp", "pp"], "there is no dimension \"pp\"")]
            {
                let error = mesh.flatten(wrong).unwrap_err().to_string();
                assert!(error.contains(words), "{wrong:?}: {error}");
            }
            mesh.whole().barrier().unwrap();
            mesh.dimension("tp").unwrap().barrier().unwrap();
        });
    }
}

#[test]
fn ranks_with_more_dimensions_or_other_meshes_than_the_first_are_told_over_tcp() {
    for rank in threads(Wiring::Tcp, 3, |comm| {
        let named: &[(&str, usize)] = if comm.rank() == 2 { &[("dp", 3), ("tp", 1)] } else { &[("dp", 3)] };
        let more = Mesh::new(comm, named).unwrap_err();
        let wrong = if comm.rank() == 1 { Mesh::by_host(comm, "dp", "dp") } else { Mesh::by_host(comm, "dp", "tp") }.unwrap_err();
        let mesh = Mesh::new(comm, &[("dp", 3)]).unwrap();
        mesh.dimension("dp").unwrap().barrier().unwrap();
        [more, wrong]
    }) {
        let [more, wrong] = rank.map(|error| (error.is_mismatch(), error.to_string()));
        assert!(more.0 && more.1.contains("rank 2") && more.1.contains("\"tp\" of 1"), "{more:?}");
        assert!(wrong.0 && wrong.1.contains("rank 1") && wrong.1.contains("\"tp\""), "{wrong:?}");
    }
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

/// Runs ranks on hosts with these names.
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
    for (hosts, words) in [(&["a", "a", "b"][..], "the host of rank 2 has 1"), (&["a", "b", "a", "b"], "rank 1 is number 0 on its host")] {
        for error in on_hosts(hosts, |comm| Mesh::by_host(comm, "replicate", "shard").unwrap_err().to_string()) {
            assert!(error.contains(words), "{error}");
        }
    }
}
