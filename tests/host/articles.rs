//! Examples of torch.distributed tutorials, line by line, with the numbers they print.
//!
//! The sources:
//! - 000: a blog post on torch.distributed's collectives
//! - 001: the second part of another on writing distributed applications
//! - 002: notes on running on two nodes
//! - 003: a chapter on parallel programming
//! - 004: a page on reduce ops

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::ranks::{Wiring, free_port, is_rank_of, patience, processes, spawn_rank, threads, threads_with};

use collectives::{
    Communicator, CustomOp, Envelope, Error, ReduceOp, Result,
    store::{FileStore, MemoryStore, PrefixStore, Store, TcpStore, TcpStoreServer},
};

const WAIT: Duration = patience(20);

/// Runs ranks as threads, each of which initialises itself.
fn initialised<R: Send>(
    ranks: usize,
    init: impl Fn(usize) -> Result<Communicator> + Sync,
    program: impl Fn(&Communicator) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let (init, program) = (&init, &program);
        let ranks: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || program(&init(rank).unwrap()))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn sum_of_ranks(comm: &Communicator) -> i64 {
    let mut x = comm.rank() as i64;
    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
    x
}

// Setup and rendezvous

#[test]
fn init_by_tcp_url_with_rank_and_world_size_in_its_query() {
    let port = free_port();
    let init = |rank| Communicator::from_url(&format!("tcp://127.0.0.1:{port}?rank={rank}&world_size=3"));
    assert_eq!(initialised(3, init, sum_of_ranks), [3; 3]);
}

#[test]
fn init_by_variables() {
    processes("articles::init_by_variables", Wiring::Shm, 3, |comm| {
        assert_eq!(comm.world_size(), 3);
        assert_eq!(sum_of_ranks(comm), 3);
        Ok(())
    });
}

#[test]
fn init_by_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meeting");
    let init = |rank| Communicator::from_url(&format!("file://{}?rank={rank}&world_size=2", path.display()));
    assert_eq!(initialised(2, init, sum_of_ranks), [1; 2]);
}

#[test]
fn init_by_an_explicit_store_of_each_kind() {
    let memory = MemoryStore::new();
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let stores: [&(dyn Fn() -> Arc<dyn Store> + Sync); 4] = [
        &|| Arc::new(memory.clone()),
        &|| Arc::new(PrefixStore::new("second", Arc::new(memory.clone()))),
        &|| TcpStore::connect("127.0.0.1", server.local_addr().port(), WAIT).unwrap(),
        &|| Arc::new(FileStore::open(&path, Some(2), WAIT).unwrap()),
    ];
    for store in stores {
        let init = |rank| Communicator::builder().with_store(store(), rank, 2);
        assert_eq!(initialised(2, init, sum_of_ranks), [1; 2]);
    }
}

#[test]
fn the_default_timeout_is_half_an_hour_and_twenty_seconds_can_be_asked_for() {
    let defaults = threads_with(1, |_| Communicator::builder(), |comm| comm.timeout());
    assert_eq!(defaults, [Duration::from_secs(1800)]);
    let asked = threads_with(1, |_| Communicator::builder().configure(|config| config.timeout = WAIT), |comm| comm.timeout());
    assert_eq!(asked, [WAIT]);
}

#[test]
fn a_rank_that_does_not_come_is_named_with_those_that_did() {
    let store = MemoryStore::new();
    let join = |rank| {
        Communicator::builder().configure(|config| config.timeout = Duration::from_millis(300)).with_store(Arc::new(store.clone()), rank, 3)
    };
    let errors = std::thread::scope(|scope| {
        let ranks = [scope.spawn(|| join(0)), scope.spawn(|| join(2))];
        ranks.map(|rank| rank.join().unwrap().expect_err("rank 1 never comes"))
    });
    for error in errors {
        let Error::Timeout { missing, arrived, .. } = &error else { panic!("{error}") };
        assert_eq!(missing.iter().map(|peer| peer.rank).collect::<Vec<_>>(), [1]);
        assert_eq!(
            arrived.iter().map(|peer| (peer.rank, peer.pid)).collect::<Vec<_>>(),
            [(0, std::process::id()), (2, std::process::id())]
        );
        assert!(arrived.iter().all(|peer| !peer.host.is_empty()), "{error}");
    }
}

#[test]
fn ranks_that_do_not_add_up_are_told_so() {
    // The second rank expects a world of two, the others one of three.
    let store = MemoryStore::new();
    let join = |rank, world_size| {
        Communicator::builder().configure(|config| config.timeout = WAIT).with_store(Arc::new(store.clone()), rank, world_size)
    };
    let begin = Instant::now();
    let errors = std::thread::scope(|scope| {
        let ranks = [scope.spawn(|| join(0, 3)), scope.spawn(|| join(1, 2)), scope.spawn(|| join(2, 3))];
        ranks.map(|rank| rank.join().unwrap().expect_err("the world sizes differ").to_string())
    });
    assert!(begin.elapsed() < patience(5));
    for error in errors {
        assert!(error.contains("2 ranks according to rank 1") && error.contains("3 ranks according to rank "), "{error}");
    }
}

#[test]
fn two_processes_with_one_rank_are_told_so() {
    let store = MemoryStore::new();
    let join = |rank| Communicator::builder().configure(|config| config.timeout = WAIT).with_store(Arc::new(store.clone()), rank, 3);
    let begin = Instant::now();
    let errors = std::thread::scope(|scope| {
        let ranks = [scope.spawn(|| join(0)), scope.spawn(|| join(1)), scope.spawn(|| join(1))];
        ranks.map(|rank| rank.join().unwrap().expect_err("rank 1 came twice").to_string())
    });
    assert!(begin.elapsed() < patience(5));
    for error in errors {
        assert!(error.contains("rank 1 is claimed by two processes") && error.contains(&format!("pid {}", std::process::id())), "{error}");
    }
}

#[test]
fn a_rank_outside_the_world_is_told_so_and_so_are_the_others() {
    let store = MemoryStore::new();
    let join = |rank| Communicator::builder().configure(|config| config.timeout = WAIT).with_store(Arc::new(store.clone()), rank, 2);
    let begin = Instant::now();
    let errors = std::thread::scope(|scope| {
        let ranks = [scope.spawn(|| join(0)), scope.spawn(|| join(2))];
        ranks.map(|rank| rank.join().unwrap().expect_err("rank 2 of 2").to_string())
    });
    assert!(begin.elapsed() < patience(5));
    for error in errors {
        assert!(error.contains("claims rank 2") && error.contains("2 ranks"), "{error}");
    }
}

#[test]
fn two_ranks_on_one_host_and_one_on_another() {
    let hosts = |rank: usize| {
        Communicator::builder().configure(|config| {
            config.timeout = WAIT;
            config.host_identity = Some(if rank < 2 { "first" } else { "second" }.into());
        })
    };
    let seen = threads_with(3, hosts, |comm| (comm.local_rank(), comm.local_world_size(), sum_of_ranks(comm)));
    assert_eq!(seen, [(0, 2, 3), (1, 2, 3), (0, 1, 3)]);
}

#[test]
fn spawn_runs_n_workers_in_one_program() {
    assert_eq!(Communicator::run_local(4, |comm| Ok(sum_of_ranks(comm))).unwrap(), [6; 4]);
}

#[test]
fn an_address_in_use_is_explained() {
    let taken = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let url = format!("tcp://{}?rank=0&world_size=1", taken.local_addr());
    let error = Communicator::from_url(&url).expect_err("the port is taken").to_string();
    assert!(error.to_lowercase().contains("in use") && error.contains(&taken.local_addr().port().to_string()), "{error}");
}

#[test]
fn rank_0_must_run_where_the_address_is() {
    // No host has an address in TEST-NET-1.
    let error = Communicator::builder()
        .configure(|config| config.timeout = Duration::from_secs(1))
        .from_url("tcp://192.0.2.1:29500?rank=0&world_size=1")
        .unwrap_err();
    assert!(error.to_string().contains("192.0.2.1"), "{error}");
}

#[test]
fn the_address_to_listen_on_can_be_chosen() {
    let listen = |_| Wiring::Tcp.builder(0).configure(|config| config.listen_address = Some([127, 0, 0, 2].into()));
    assert_eq!(threads_with(2, listen, sum_of_ranks), [1; 2]);
}

#[test]
fn messages_carry_host_name_and_process() {
    let peers = threads(Wiring::Shm, 2, |comm| comm.peers().to_vec());
    assert!(peers.iter().flatten().all(|peer| !peer.host.is_empty() && peer.pid == std::process::id()), "{peers:?}");
    assert!(peers[0][1].to_string().starts_with("rank 1 (host "));
}

#[test]
fn malformed_urls_are_quoted() {
    for (url, part) in [
        ("tcp://127.0.0.1:port?rank=0&world_size=1", "port"),
        ("tcp://127.0.0.1:1?rank=minus&world_size=1", "minus"),
        ("http://127.0.0.1", "http"),
        ("file://", "file"),
        ("", "\"\""),
    ] {
        let error = Communicator::from_url(url).expect_err(url);
        assert!(matches!(error, Error::Config { .. }) && error.to_string().contains(part), "{url}: {error}");
    }
}

// Point to point

#[test]
fn send_and_recv_hand_over_a_one() {
    // 001: rank 0 adds 1 to a zero tensor and sends it; both end with 1.
    let got = threads(Wiring::Shm, 2, |comm| {
        let mut tensor = [0.0_f32];
        if comm.rank() == 0 {
            tensor[0] += 1.0;
            comm.send(&tensor, 1).unwrap();
        } else {
            comm.recv(&mut tensor, 0).unwrap();
        }
        tensor[0]
    });
    assert_eq!(got, [1.0, 1.0]);
}

#[test]
fn isend_and_irecv_complete_by_wait() {
    for wiring in Wiring::ALL {
        let got = threads(wiring, 2, |comm| {
            if comm.rank() == 0 {
                comm.start_send([1.0_f32], 1).unwrap().wait().unwrap()[0]
            } else {
                comm.start_recv([0.0_f32], 0).unwrap().wait().unwrap().0[0]
            }
        });
        assert_eq!(got, [1.0, 1.0]);
    }
}

#[test]
fn several_isends_are_outstanding_at_once_and_waited_for_in_a_loop() {
    // 002: rank 0 sends to every other rank. The messages are too large to leave before they are received.
    for wiring in Wiring::ALL {
        threads(wiring, 4, |comm| {
            if comm.rank() == 0 {
                let works: Vec<_> = (1..4).map(|to| comm.start_send(vec![to as i64; 100_000], to).unwrap()).collect();
                for work in works {
                    work.wait().unwrap();
                }
            } else {
                let mut x = vec![0_i64; 100_000];
                comm.recv(&mut x, 0).unwrap();
                assert!(x.iter().all(|value| *value == comm.rank() as i64));
            }
        });
    }
}

#[test]
fn tags_are_received_in_any_order() {
    for wiring in Wiring::ALL {
        threads(wiring, 2, |comm| {
            if comm.rank() == 0 {
                let first = comm.start_send(vec![1_u8; 1 << 20], Envelope::rank(1).tag(1)).unwrap();
                let second = comm.start_send(vec![2_u8; 1 << 20], Envelope::rank(1).tag(2)).unwrap();
                first.wait().unwrap();
                second.wait().unwrap();
            } else {
                let mut x = vec![0_u8; 1 << 20];
                comm.recv(&mut x, Envelope::rank(0).tag(2)).unwrap();
                assert!(x.iter().all(|byte| *byte == 2));
                comm.recv(&mut x, Envelope::rank(0).tag(1)).unwrap();
                assert!(x.iter().all(|byte| *byte == 1));
            }
        });
    }
}

#[test]
fn a_receive_from_any_source_says_who_sent() {
    for wiring in Wiring::ALL {
        threads(wiring, 5, |comm| {
            if comm.rank() != 0 {
                return comm.send(&[comm.rank() as u64], 0).unwrap();
            }
            let mut sources: Vec<usize> = (1..5)
                .map(|_| {
                    let mut x = [0_u64];
                    let received = comm.recv(&mut x, Envelope::any()).unwrap();
                    assert_eq!((x[0] as usize, received.count), (received.source, 1));
                    received.source
                })
                .collect();
            sources.sort_unstable();
            assert_eq!(sources, [1, 2, 3, 4]);
        });
    }
}

// Collectives

#[test]
fn broadcast_gives_everyone_the_sources_tensor() {
    let got = threads(Wiring::Shm, 4, |comm| {
        let mut x = if comm.rank() == 0 { [1_i64, 2, 3] } else { [0; 3] };
        comm.broadcast(&mut x, 0).unwrap();
        x
    });
    assert_eq!(got, [[1, 2, 3]; 4]);
}

#[test]
fn scatter_gives_each_its_part() {
    let got = threads(Wiring::Shm, 4, |comm| {
        let parts = (comm.rank() == 0).then_some([0.0_f32, 1.0, 2.0, 3.0]);
        let mut x = [-1.0_f32];
        comm.scatter_into(parts.as_ref(), &mut x, 0).unwrap();
        x[0]
    });
    assert_eq!(got, [0.0, 1.0, 2.0, 3.0]);
}

#[test]
fn gather_collects_at_the_destination_and_nowhere_else() {
    let got = threads(Wiring::Shm, 4, |comm| {
        let mut all = (comm.rank() == 0).then_some([0_i64; 4]);
        comm.gather_into(&(comm.rank() as i64), all.as_mut(), 0).unwrap();
        all
    });
    assert_eq!(got, [Some([0, 1, 2, 3]), None, None, None]);
}

#[test]
fn gather_with_unequal_shapes_is_refused_on_every_rank() {
    let errors = threads(Wiring::Shm, 3, |comm| {
        let mine = vec![1.0_f32; 1 + usize::from(comm.rank() == 2)];
        let mut all = (comm.rank() == 0).then_some([0.0_f32; 3]);
        comm.gather_into(&mine, all.as_mut(), 0).expect_err("the shapes differ")
    });
    assert!(errors.iter().all(Error::is_mismatch), "{errors:?}");
}

#[test]
fn reduce_leaves_the_sum_at_the_destination_and_the_others_untouched() {
    // 000 prints partial sums [3], [2], [1] on three ranks of ones. Here only the root changes.
    let got = threads(Wiring::Shm, 3, |comm| {
        let mut x = [1_i64];
        comm.reduce(&mut x, 0, ReduceOp::Sum).unwrap();
        x[0]
    });
    assert_eq!(got, [3, 1, 1]);
}

#[test]
fn all_reduce_of_ones_in_a_group_of_two_gives_two() {
    let got = threads(Wiring::Shm, 2, |comm| {
        let group = comm.subgroup(&[0, 1]).unwrap().unwrap();
        let mut x = [1.0_f32];
        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        x[0]
    });
    assert_eq!(got, [2.0, 2.0]);
}

#[test]
fn gradients_are_averaged_by_all_reduce_and_division() {
    // 001: all_reduce per parameter, then a division by the world size, which is the same as Avg.
    threads(Wiring::Shm, 4, |comm| {
        let gradient: Vec<f32> = (0..10).map(|index| (comm.rank() * 4 + index) as f32).collect();
        let (mut summed, mut averaged) = (gradient.clone(), gradient);
        comm.all_reduce(&mut summed, ReduceOp::Sum).unwrap();
        summed.iter_mut().for_each(|x| *x /= comm.world_size() as f32);
        comm.all_reduce(&mut averaged, ReduceOp::Avg).unwrap();
        assert_eq!(summed, averaged);
        assert_eq!(averaged[0], 6.0);
    });
}

#[test]
fn all_gather_collects_everywhere() {
    let got = threads(Wiring::Shm, 4, |comm| {
        let mut all = [0_i64; 4];
        comm.all_gather_into(&(comm.rank() as i64), &mut all).unwrap();
        all
    });
    assert_eq!(got, [[0, 1, 2, 3]; 4]);
}

#[test]
fn all_reduce_is_reduce_scatter_and_all_gather() {
    for wiring in Wiring::ALL {
        threads(wiring, 4, |comm| {
            let x: Vec<f32> = (0..32).map(|index| (index * (comm.rank() + 1)) as f32).collect();
            let mut reduced = x.clone();
            comm.all_reduce(&mut reduced, ReduceOp::Sum).unwrap();
            let mut part = [0.0_f32; 8];
            comm.reduce_scatter_into(&x, &mut part, ReduceOp::Sum).unwrap();
            let mut joined = [0.0_f32; 32];
            comm.all_gather_into(&part, &mut joined).unwrap();
            assert_eq!(reduced, joined);
        });
    }
}

#[test]
fn everyone_leaves_a_barrier_when_the_slowest_arrives() {
    // 003 sleeps for 0, 1 and 2 s and sees 2.0025 s everywhere. Here the slowest waits for a signal from rank 0
    // instead.
    for wiring in Wiring::ALL {
        let (release, released) = std::sync::mpsc::channel();
        let released = std::sync::Mutex::new(released);
        let slowest_entered = std::sync::OnceLock::new();
        let left = threads(wiring, 3, |comm| {
            match comm.rank() {
                0 => release.send(()).unwrap(),
                2 => {
                    released.lock().unwrap().recv().unwrap();
                    slowest_entered.set(Instant::now()).unwrap();
                }
                _ => {}
            }
            comm.barrier().unwrap();
            Instant::now()
        });
        assert!(left.iter().all(|left| left > slowest_entered.get().unwrap()));
    }
}

#[test]
fn a_monitored_barrier_names_who_is_missing_and_leaves_the_group_usable() {
    for wiring in Wiring::ALL {
        let store = MemoryStore::new();
        let errors = threads(wiring, 3, |comm| {
            // So that no rank is late because its thread has not begun.
            comm.barrier().unwrap();
            let outcome = if comm.rank() == 2 {
                // Late on purpose: this rank comes after the others have given up.
                store.wait(&["given up"], WAIT).unwrap();
                comm.monitored_barrier(WAIT)
            } else {
                let outcome = comm.monitored_barrier(Duration::from_millis(500));
                store.set("given up", b"").unwrap();
                outcome
            };
            comm.monitored_barrier(WAIT).unwrap();
            assert_eq!(sum_of_ranks(comm), 3);
            outcome.expect_err("rank 2 was late")
        });
        for error in errors {
            let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
            assert_eq!(missing.iter().map(|peer| peer.rank).collect::<Vec<_>>(), [2]);
        }
    }
}

// Groups

#[test]
fn a_subset_works_without_disturbing_the_others() {
    for wiring in Wiring::ALL {
        let got = threads(wiring, 4, |comm| {
            let group = comm.subgroup(&[1, 3]).unwrap();
            let mut x = comm.rank() as i64 * 10;
            if let Some(group) = &group {
                group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
            }
            (group.map(|group| group.rank()), x)
        });
        assert_eq!(got, [(None, 0), (Some(0), 40), (None, 20), (Some(1), 40)]);
    }
}

#[test]
fn a_list_is_kept_in_its_order() {
    let got = threads(Wiring::Shm, 3, |comm| comm.subgroup(&[2, 0]).unwrap().map(|group| group.rank()));
    assert_eq!(got, [Some(1), None, Some(0)]);
}

// Ops

#[test]
fn every_op_of_the_page() {
    // 004, on four ranks with 1, 3, 5, 7.
    let each = |op: ReduceOp| {
        let got = threads(Wiring::Shm, 4, |comm| {
            let mut x = [[1_u8, 3, 5, 7][comm.rank()]];
            comm.all_reduce(&mut x, op).unwrap();
            x[0]
        });
        assert!(got.iter().all(|x| *x == got[0]));
        got[0]
    };
    assert_eq!(each(ReduceOp::Sum), 16);
    assert_eq!(each(ReduceOp::Prod), 105);
    assert_eq!(each(ReduceOp::Min), 1);
    assert_eq!(each(ReduceOp::Max), 7);
    assert_eq!(each(ReduceOp::BitAnd), 1);
    assert_eq!(each(ReduceOp::BitOr), 7);
    assert_eq!(each(ReduceOp::BitXor), 0);
    assert_eq!(each(ReduceOp::Avg), 4);
}

#[test]
fn the_global_minimum() {
    let got = threads(Wiring::Shm, 4, |comm| {
        let mut x = [[4.5_f32, 2.0, 9.0, 3.0][comm.rank()]];
        comm.all_reduce(&mut x, ReduceOp::Min).unwrap();
        x[0]
    });
    assert_eq!(got, [2.0; 4]);
}

#[test]
fn a_function_is_an_op() {
    // 004 passes a function as the op, which torch refuses.
    for wiring in Wiring::ALL {
        let got = threads(wiring, 4, |comm| {
            let op = CustomOp::new("larger by magnitude", |into: &mut [f32], from: &[f32]| {
                into.iter_mut().zip(from).for_each(|(a, b)| {
                    if b.abs() > a.abs() {
                        *a = *b
                    }
                });
            });
            let mut x = [[1.0_f32, -3.0, 2.0, 0.0][comm.rank()]];
            comm.all_reduce(&mut x, &op).unwrap();
            x[0]
        });
        assert_eq!(got, [-3.0; 4]);
    }
}

#[test]
fn an_op_that_does_not_commute_is_folded_in_rank_order() {
    for wiring in Wiring::ALL {
        for ranks in [2, 3, 5, 8] {
            let got = threads(wiring, ranks, |comm| {
                // Affine maps under composition, which is associative but not commutative.
                let op = CustomOp::ordered("compose", |into: &mut [[u64; 2]], from: &[[u64; 2]]| {
                    for (a, b) in into.iter_mut().zip(from) {
                        *a = [a[0].wrapping_mul(b[0]), a[1].wrapping_mul(b[0]).wrapping_add(b[1])];
                    }
                });
                let mut x = vec![[comm.rank() as u64 + 2, comm.rank() as u64 * 7 + 1]; 1000];
                comm.all_reduce(&mut x, &op).unwrap();
                x
            });
            let mut expected = [2_u64, 1];
            for rank in 1..ranks as u64 {
                expected = [expected[0].wrapping_mul(rank + 2), expected[1].wrapping_mul(rank + 2).wrapping_add(rank * 7 + 1)];
            }
            assert!(got.iter().flatten().all(|x| *x == expected), "{wiring:?}, {ranks} ranks");
        }
    }
}

#[test]
fn a_list_of_parameters_is_reduced_in_one_call() {
    // 004 passes model.parameters() to all_reduce, which torch refuses.
    threads(Wiring::Shm, 3, |comm| {
        let (mut weights, mut bias) = (vec![comm.rank() as f32; 100], vec![1.0_f32; 3]);
        comm.all_reduce_many(&mut [&mut weights, &mut bias], ReduceOp::Sum).unwrap();
        assert!(weights.iter().all(|x| *x == 3.0) && bias.iter().all(|x| *x == 3.0));
    });
}

/// Starts ranks as processes from the launcher's variables, without a port in the environment.
#[test]
fn a_missing_variable_is_named() {
    const NAME: &str = "articles::a_missing_variable_is_named";
    if is_rank_of(NAME) {
        let error = Communicator::from_env().expect_err("WORLD_SIZE is malformed");
        assert!(error.to_string().contains("WORLD_SIZE") && error.to_string().contains("many"), "{error}");
        return;
    }
    let child = spawn_rank(NAME, 0, 1, free_port(), &[("WORLD_SIZE", "many".to_owned())]);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_process_may_join_an_agents_store_more_than_once() {
    const NAME: &str = "articles::a_process_may_join_an_agents_store_more_than_once";
    if is_rank_of(NAME) {
        for _ in 0..3 {
            let comm = Communicator::builder().configure(|config| config.timeout = WAIT).from_env().unwrap();
            assert_eq!(sum_of_ranks(&comm), 1);
        }
        return;
    }
    let agent = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let agents = [("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned())];
    let ranks = [0, 1].map(|rank| spawn_rank(NAME, rank, 2, agent.local_addr().port(), &agents));
    for rank in ranks {
        let output = rank.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
