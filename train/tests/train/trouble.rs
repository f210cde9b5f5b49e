//! Mistakes are named, on every rank if the others would wait; a rank that dies during training is noticed.

use collectives::{Communicator, Error};
use collectives_train::{DataParallel, Missing, Options, Parameter, ShardedOptimizer};

use crate::common::ranks::{Wiring, communicators, each, free_port, is_rank_of, processes, spawn_rank, threads};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn two() -> Vec<Parameter> {
    vec![Parameter::new::<f32>("weight", &[100]), Parameter::new::<f32>("bias", &[2])]
}

/// Returns options with a bucket for each parameter.
fn small() -> Options {
    Options { first_bucket_bytes: 0, bucket_bytes: 0, ..Options::default() }
}

#[test]
fn the_first_parameter_that_differs_is_named_with_both_ranks() {
    let odd = |parameters: Vec<Parameter>| (parameters, Options::default());
    let (mut name, mut shape, mut dtype, mut more) = (two(), two(), two(), two());
    name[1].name = "offset".to_owned();
    shape[0].shape = vec![10, 10];
    dtype[1].dtype = collectives::DType::Bf16;
    more.push(Parameter::new::<f64>("extra", &[]));
    let cases = [
        (odd(name), vec!["rank 0 called", "parameter 1 \"bias\" (f32[2])", "rank 2 called", "parameter 1 \"offset\" (f32[2])"]),
        (odd(shape), vec!["parameter 0 \"weight\" (f32[100])", "parameter 0 \"weight\" (f32[10, 10])"]),
        (odd(dtype), vec!["(f32[2])", "(bf16[2])"]),
        (odd(more), vec!["2 parameters", "3 parameters, including parameter 2 \"extra\" (f64[]), which the other rank does not have"]),
        (odd(vec![]), vec!["2 parameters, including parameter 0 \"weight\"", "with 0 parameters"]),
        ((two(), small()), vec!["first_bucket_bytes 1048576", "first_bucket_bytes 0"]),
    ];
    for (wiring, world_size) in [(Wiring::Shm, 3), (Wiring::Tcp, 4)] {
        for ((parameters, options), words) in &cases {
            let errors = threads(wiring, world_size, |comm| {
                let (parameters, options) =
                    if comm.rank() == 2 { (parameters.clone(), options.clone()) } else { (two(), Options::default()) };
                let error = DataParallel::new(comm, parameters, options).unwrap_err();
                assert!(error.is_mismatch());
                let mut next = DataParallel::new(comm, two(), Options::default()).expect("the communicator lives on");
                next.average(&mut [vec![1.0_f32; 100], vec![1.0; 2]]).unwrap();
                error.to_string()
            });
            for error in &errors {
                assert!(words.iter().all(|word| error.contains(word)), "{error}");
                assert_eq!(*error, errors[0]);
            }
        }
    }
}

#[test]
fn mistakes_of_one_call_are_refused_there_and_harm_nothing() {
    threads(Wiring::Shm, 2, |comm| {
        let mut model = DataParallel::new(comm, two(), small()).unwrap();
        let said = |result: collectives::Result<()>| result.unwrap_err().to_string();
        model.ready(1, &[1.0_f32, 2.0]).unwrap();
        for (error, words) in [
            (said(model.ready(1, &[1.0_f32, 2.0])), "parameter 1 \"bias\" (f32[2]): its gradient was already given"),
            (said(model.accumulate(1, &[1.0_f32, 2.0])), "already given"),
            (said(model.ready(0, &[1.0_f32])), "parameter 0 \"weight\" (f32[100]): 1 elements were passed"),
            (said(model.ready(0, &vec![1.0_f64; 100])), "elements of f64 were passed"),
            (said(model.ready(2, &[1.0_f32])), "there is no parameter 2: the model has 2"),
        ] {
            assert!(error.contains(words), "{error}");
        }
        model.ready(0, &vec![3.0_f32; 100]).unwrap();
        let averaged = model.finish().unwrap();
        assert_eq!(averaged.gradient::<f32>(1).unwrap(), [1.0, 2.0]);
        assert!(averaged.gradient::<f64>(1).is_err());
        assert!(averaged.copy_to(1, &mut [0.0_f32; 3]).is_err());
        assert_eq!(averaged.gradient::<f32>(0).unwrap(), [3.0; 100]);
    });
}

#[test]
fn gradients_of_which_one_does_not_fit_are_none_taken() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        threads(wiring, 2, |comm| {
            let mut model = DataParallel::new(comm, two(), small()).unwrap();
            for step in 0..3 {
                let error = model.average(&mut [vec![1.0_f32; 99], vec![1.0; 2]]).unwrap_err().to_string();
                assert!(error.contains("parameter 0 \"weight\" (f32[100]): 99 elements were passed"), "{error}");
                let mut gradients = [vec![comm.rank() as f32 + step as f32; 100], vec![1.0; 2]];
                model.average(&mut gradients).unwrap();
                assert_eq!(gradients, [vec![0.5 + step as f32; 100], vec![1.0; 2]]);
            }
            model.ready(0, &[5.0_f32; 100]).unwrap();
            let error = model.average(&mut [vec![1.0_f32; 100], vec![1.0; 2]]).unwrap_err().to_string();
            assert!(error.contains("parameter 0 \"weight\" (f32[100]): its gradient was already given"), "{error}");
            model.ready(1, &[7.0_f32; 2]).unwrap();
            assert_eq!(model.finish().unwrap().gradient::<f32>(1).unwrap(), [7.0; 2]);
        });
    }
}

#[test]
fn a_gradient_that_never_comes_is_every_ranks_error_and_the_next_step_follows() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        for absent in [0, 1] {
            threads(wiring, 3, |comm| {
                let mut model = DataParallel::new(comm, two(), small()).unwrap();
                for index in [1, 0] {
                    if comm.rank() != 1 || index != absent {
                        model.ready(index, &vec![1.0_f32; [100, 2][index]]).unwrap();
                    }
                }
                let error = model.finish().unwrap_err().to_string();
                let words = ["rank 1", ["parameter 0 \"weight\"", "parameter 1 \"bias\""][absent], "Missing::Zeros"];
                assert!(words.iter().all(|word| error.contains(word)), "{error}");
                let mut gradients = [vec![comm.rank() as f32; 100], vec![1.0; 2]];
                model.average(&mut gradients).unwrap();
                assert_eq!(gradients, [vec![1.0; 100], vec![1.0; 2]]);
            });
        }
    }
}

#[test]
fn gradients_that_never_come_count_as_zeros_where_that_is_asked_for() {
    threads(Wiring::Shm, 2, |comm| {
        let options = Options { missing: Missing::Zeros, ..small() };
        let mut model = DataParallel::new(comm, two(), options).unwrap();
        for step in 0..3 {
            if (comm.rank() + step) % 2 == 0 {
                model.ready(1, &[4.0_f32, 2.0]).unwrap();
            }
            let averaged = model.finish().unwrap();
            assert_eq!(averaged.gradient::<f32>(1).unwrap(), [2.0, 1.0]);
            assert_eq!(averaged.gradient::<f32>(0).unwrap(), [0.0; 100]);
        }
    });
}

#[test]
fn what_was_accumulated_of_a_gradient_that_never_comes_counts() {
    threads(Wiring::Shm, 2, |comm| {
        let mut model = DataParallel::new(comm, two(), Options { missing: Missing::Zeros, ..small() }).unwrap();
        for step in 0..3 {
            // One rank accumulates twice, without a last part; the other has no gradient.
            if (comm.rank() + step) % 2 == 0 {
                model.accumulate(1, &[4.0_f32, 2.0]).unwrap();
                model.accumulate(1, &[2.0_f32, 0.0]).unwrap();
            }
            let averaged = model.finish().unwrap();
            assert_eq!(averaged.gradient::<f32>(1).unwrap(), [3.0, 1.0]);
            assert_eq!(averaged.gradient::<f32>(0).unwrap(), [0.0; 100]);
        }
        // By default it still counts as missing.
        let mut model = DataParallel::new(comm, two(), small()).unwrap();
        model.ready(0, &vec![1.0_f32; 100]).unwrap();
        model.accumulate(1, &[4.0_f32, 2.0]).unwrap();
        let error = model.finish().map(drop).unwrap_err().to_string();
        assert!(error.contains("parameter 1 \"bias\""), "{error}");
    });
}

#[test]
fn ranks_with_different_hooks_are_told_of_both_calls() {
    threads(Wiring::Shm, 2, |comm| {
        let mut model = DataParallel::new(comm, two(), Options::default()).unwrap();
        let op = [collectives::ReduceOp::Sum, collectives::ReduceOp::Avg][comm.rank()];
        model.set_hooks::<f32>(|_| Ok(Box::new(collectives_train::AllReduce::new(op)))).unwrap();
        let error = model.average(&mut [vec![1.0_f32; 100], vec![1.0; 2]]).unwrap_err();
        assert!(error.is_mismatch(), "{error}");
        let next = model.ready(0, &vec![1.0_f32; 100]).unwrap_err();
        assert!(next.is_poisoned() && next.is_mismatch(), "{next}");
    });
}

#[test]
fn a_rank_that_leaves_in_the_middle_ends_the_step_of_the_others() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        each(communicators(wiring, 3), |comm| {
            let mut model = DataParallel::new(&comm, two(), small()).unwrap();
            model.average(&mut [vec![1.0_f32; 100], vec![1.0; 2]]).unwrap();
            model.ready(1, &[1.0_f32; 2]).unwrap();
            if comm.rank() == 2 {
                return;
            }
            model.ready(0, &vec![1.0_f32; 100]).unwrap();
            let error = model.finish().unwrap_err();
            assert!(error.is_peer_lost(), "{error}");
            assert!(model.finish().unwrap_err().is_poisoned());
        });
    }
}

/// Runs one rank of the test below: rank 1 dies after its first bucket.
fn rank_that_may_die(wiring: Wiring) {
    let comm = wiring.builder(0).from_env().unwrap();
    let parameters: Vec<_> = (0..8).map(|index| Parameter::new::<f32>(format!("{index}"), &[100_000])).collect();
    let mut model = DataParallel::new(&comm, parameters, small()).unwrap();
    model.average(&mut vec![vec![1.0_f32; 100_000]; 8]).unwrap();
    for index in (0..8).rev() {
        if comm.rank() == 1 && index == 5 {
            std::process::abort();
        }
        model.ready(index, &vec![1.0_f32; 100_000]).unwrap();
    }
    match model.finish().unwrap_err() {
        Error::PeerLost { peer, .. } => assert_eq!(peer.rank, 1),
        other => panic!("{other}"),
    }
    let rest = comm.shrink().unwrap();
    go_on(&rest);
}

/// Trains the same model on the remaining communicator.
fn go_on(comm: &Communicator) {
    let mut model = DataParallel::new(comm, two(), Options::default()).unwrap();
    let mut gradients = [vec![comm.rank() as f32; 100], vec![1.0; 2]];
    model.average(&mut gradients).unwrap();
    assert_eq!(gradients, [vec![0.5; 100], vec![1.0; 2]]);
}

/// Runs `rank` in three processes, of which the second one must die.
pub(crate) fn a_rank_dies(name: &str, rank: impl FnOnce()) {
    if is_rank_of(name) {
        return rank();
    }
    let port = free_port();
    let ranks: Vec<_> = (0..3).map(|rank| spawn_rank(name, rank, 3, port, &[])).collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), rank != 1, "rank {rank}: {}\n{said}", output.status);
    }
}

#[test]
fn a_process_that_dies_in_the_middle_is_named_and_the_others_go_on() {
    a_rank_dies("trouble::a_process_that_dies_in_the_middle_is_named_and_the_others_go_on", || rank_that_may_die(Wiring::Shm));
}

#[test]
fn a_process_that_dies_in_the_middle_is_named_over_tcp() {
    a_rank_dies("trouble::a_process_that_dies_in_the_middle_is_named_over_tcp", || rank_that_may_die(Wiring::Tcp));
}

#[test]
fn where_one_rank_has_no_room_for_its_share_all_are_told_which() {
    const MIB: u64 = 1 << 20;
    processes("trouble::where_one_rank_has_no_room_for_its_share_all_are_told_which", Wiring::Tcp, 2, |comm| {
        // Two buckets of 64 MiB, of which each rank has a share of 32 MiB.
        let parameters = || ["first", "second"].map(|name| Parameter::new::<f32>(name, &[16 << 20])).to_vec();
        let before = getrlimit(Resource::As);
        // Memory for less than one share, for one share, and for both shares but no bucket.
        for room in [16, 48, 80] {
            if comm.rank() == 1 {
                let pages: u64 = std::fs::read_to_string("/proc/self/statm").unwrap().split(' ').next().unwrap().parse().unwrap();
                setrlimit(Resource::As, Rlimit { current: Some((pages << 12) + room * MIB), maximum: before.maximum }).unwrap();
            }
            let error = ShardedOptimizer::new(comm, parameters(), Options::default()).map(drop).unwrap_err();
            setrlimit(Resource::As, before).unwrap();
            let text = error.to_string();
            assert!(matches!(error, Error::Io { .. }) && text.contains("alloc"), "{room} MiB: {text}");
            assert!(comm.rank() == 1 || text.contains("on rank 1"), "{room} MiB: {text}");
            let mut next = DataParallel::new(comm, two(), Options::default()).expect("the communicator lives on");
            next.average(&mut [vec![1.0_f32; 100], vec![1.0; 2]])?;
        }
        Ok(())
    });
}
