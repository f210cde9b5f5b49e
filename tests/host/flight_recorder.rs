//! The flight recorder: its records of calls that have ended and of calls that are stuck.
//! `collperf/tests/collperf/hang.rs` checks what is made of the records.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::ranks::{Wiring, alone_in_a_process, communicators_with, each, patience, threads};
use collectives::{Collective, Communicator, Config, ReduceOp, Transport, flight::State};

/// Long enough for anything that is not stuck.
const PATIENCE: Duration = patience(20);

#[test]
#[expect(unsafe_code, reason = "stands for a program with a handler of its own")]
fn a_signal_that_the_program_handles_itself_is_left_alone() {
    alone_in_a_process("flight_recorder::a_signal_that_the_program_handles_itself_is_left_alone", || {
        extern "C" fn own(_: libc::c_int) {}
        let own: extern "C" fn(libc::c_int) = own;
        // SAFETY: the handler does nothing.
        unsafe { libc::signal(libc::SIGUSR1, own as libc::sighandler_t) };
        let error = collectives::flight::write_records_on_sigusr1("nowhere").unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("handler of its own"), "{error}");
    });
}

#[test]
fn a_stuck_call_is_seen_from_another_thread_on_every_wiring() {
    for wiring in Wiring::ALL {
        let comms = communicators_with(3, |rank| wiring.builder(rank));
        let stuck = comms[0].flight_recorder();
        let (go, wait) = channel::<()>();
        let wait = Mutex::new(wait);
        std::thread::scope(|scope| {
            // Dropped if this fails, so that rank 1 goes on.
            let go = go;
            let ranks = scope.spawn(|| {
                each(comms, |comm| {
                    if comm.rank() == 1 {
                        wait.lock().unwrap().recv().unwrap();
                    }
                    comm.all_reduce(&mut [1.0_f32; 9], ReduceOp::Sum).unwrap();
                    comm.flight_recorder().records().last().map(|record| record.state)
                })
            });
            let began = Instant::now();
            let seen = loop {
                assert!(began.elapsed() < PATIENCE, "{:?}", stuck.records());
                let last = stuck.records().pop().filter(|last| last.kind == Collective::AllReduce && !last.waiting_for.is_empty());
                if let Some(last) = last {
                    break last;
                }
                std::thread::yield_now();
            };
            assert_eq!((seen.state, seen.sequence, seen.count), (State::Started, Some(1), 9), "{wiring:?}");
            assert!(seen.started_ns.is_some() && seen.finished_ns.is_none());
            go.send(()).unwrap();
            assert_eq!(ranks.join().unwrap(), [Some(State::Finished); 3]);
        });
    }
}

#[test]
fn every_kind_of_call_is_on_record() {
    let kinds = threads(Wiring::Shm, 2, |comm| {
        let other = 1 - comm.rank();
        comm.broadcast(&mut [0_u8; 3], 1).unwrap();
        comm.all_gather_v_into(&[1_u16][..], &mut [0_u16; 2], &[1, 1]).unwrap();
        comm.start_reduce(vec![1_i64; 5], 0, ReduceOp::Sum).unwrap().wait().unwrap();
        comm.send_recv(&[1_u8], other, &mut [0_u8], other).unwrap();
        let half = comm.split(Some(comm.rank() as u32), 0).unwrap().unwrap();
        half.barrier().unwrap();
        let (all, alone) = (comm.flight_recorder().records(), half.flight_recorder().records());
        assert!(all.iter().chain(&alone).all(|record| record.state == State::Finished), "{all:?} {alone:?}");
        let sequences: Vec<_> = all.iter().filter_map(|record| record.sequence).collect();
        assert!(sequences.is_sorted_by(|a, b| a + 1 == *b));
        (all.iter().map(|record| record.kind.name()).collect::<Vec<_>>(), alone.iter().map(|record| record.kind.name()).collect::<Vec<_>>())
    });
    for (all, alone) in kinds {
        assert_eq!(all[..4], ["barrier", "broadcast", "all_gather_v", "reduce"]);
        assert_eq!(all[all.len() - 2..], ["send", "recv"]);
        assert_eq!(alone, ["barrier", "barrier"]);
    }
}

#[test]
fn a_recorder_that_is_switched_off_keeps_nothing() {
    let mut config = Config::default();
    config.flight_recorder_calls = 0;
    let kept = Communicator::builder().config(config).run_local(2, |comm| {
        comm.barrier()?;
        Ok(comm.flight_recorder().records().len())
    });
    assert_eq!(kept.unwrap(), [0, 0]);
}

/// The warnings that a thread received.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0.push_str(&format!("{}={value:?} ", field.name()));
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_call_that_does_not_end_is_warned_of_once_before_its_deadline() {
    for transport in [Transport::Shm, Transport::Tcp] {
        let builder = |_| {
            Communicator::builder().configure(|config| {
                config.transport = transport;
                config.timeout = Duration::from_secs(20);
            })
        };
        let comms = communicators_with(2, builder);
        let (come, wait) = channel::<()>();
        let wait = Mutex::new(wait);
        let come = Mutex::new(Some(come));
        each(comms, |comm| {
            if comm.rank() == 1 {
                wait.lock().unwrap().recv().unwrap_err();
                drop(comm.barrier());
                return;
            }
            let come = come.lock().unwrap().take();
            comm.set_timeout(Duration::from_millis(800));
            let warnings = Warnings::default();
            tracing::subscriber::with_default(warnings.clone(), || {
                assert!(comm.barrier().unwrap_err().is_timeout());
                assert!(comm.recv(&mut [0_u8], 1).is_err());
            });
            drop(come);
            // There is also an event when the calls fail in the end.
            let said: Vec<_> = warnings.0.lock().unwrap().iter().filter(|said| said.contains("still waiting")).cloned().collect();
            let of_barrier: Vec<_> = said.iter().filter(|said| said.contains("barrier() number 1")).collect();
            assert_eq!(of_barrier.len(), 1, "{transport:?}: {said:?}");
            assert!(of_barrier[0].contains("rank 1 (host ") && of_barrier[0].contains("communicator=\"world\""), "{of_barrier:?}");
            if transport == Transport::Shm {
                assert!(said.iter().any(|said| said.contains("call=recv from rank 1")), "{said:?}");
            }
        });
    }
}
