//! Started calls that are awaited, waited for together, and that run callbacks.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use crate::common::ranks::{Wiring, threads};
use crate::common::tasks::block_on;

use collectives::{Communicator, Envelope, Error, ReduceOp, Work};

const WIRINGS: [Wiring; 2] = [Wiring::Shm, Wiring::Tcp];

#[test]
fn a_call_wakes_its_task_when_it_has_ended() {
    for wiring in WIRINGS {
        threads(wiring, 2, |comm| {
            for count in [0, 1, 1000, 300_000] {
                let work = comm.start_all_reduce(vec![1_u32; count], ReduceOp::Sum).unwrap();
                let (sum, woken) = block_on(work.into_future());
                assert_eq!(sum.unwrap(), vec![2; count]);
                assert!(woken <= 1, "woken {woken} times");
            }
        });
    }
}

#[test]
fn messages_are_awaited_while_nobody_else_moves_them() {
    for wiring in WIRINGS {
        threads(wiring, 2, |comm| {
            let other = 1 - comm.rank();
            for count in [1, 200_000] {
                let (sent, _) = block_on(async {
                    let receiving = comm.start_recv(vec![0_u64; count], other)?.into_future();
                    let sending = comm.start_send(vec![comm.rank() as u64; count], other)?.into_future();
                    let (data, received) = receiving.await?;
                    assert_eq!((data, received.count), (vec![other as u64; count], count));
                    sending.await
                });
                assert_eq!(sent.unwrap().len(), count);
            }
        });
    }
}

#[test]
fn two_communicators_are_awaited_in_any_order() {
    for wiring in WIRINGS {
        threads(wiring, 2, |first| {
            let second = first.duplicate().unwrap();
            let start = |comm: &Communicator| comm.start_all_reduce(vec![1_u8; 10], ReduceOp::Sum).unwrap();
            // Rank 1 starts them in the opposite order, since each communicator has its own order.
            let (a, b) = if first.rank() == 0 {
                (start(first), start(&second))
            } else {
                let b = start(&second);
                (start(first), b)
            };
            let (sums, _) = block_on(async { Ok::<_, Error>((b.await?, a.await?)) });
            assert_eq!(sums.unwrap(), (vec![2; 10], vec![2; 10]));
        });
    }
}

#[test]
fn a_future_that_is_dropped_lets_the_call_go_on() {
    for wiring in WIRINGS {
        threads(wiring, 2, |comm| {
            let mut future = comm.start_all_reduce(vec![1_u8; 10], ReduceOp::Sum).unwrap().into_future();
            let _ = Pin::new(&mut future).poll(&mut Context::from_waker(Waker::noop()));
            drop(future);
            let mut x = [1_u8];
            comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
            assert_eq!(x, [2]);
        });
    }
}

#[test]
fn a_future_that_has_ended_says_so() {
    threads(Wiring::Shm, 1, |comm| {
        let mut future = comm.start_broadcast(vec![1_u8], 0).unwrap().into_future();
        let context = &mut Context::from_waker(Waker::noop());
        while Pin::new(&mut future).poll(context).is_pending() {}
        let Poll::Ready(Err(error)) = Pin::new(&mut future).poll(context) else { panic!("it was given back before") };
        assert!(error.to_string().contains("already been returned"), "{error}");
    });
}

#[test]
fn a_failed_call_is_awaited_too() {
    for wiring in WIRINGS {
        threads(wiring, 2, |comm| {
            let work = comm.start_all_reduce(vec![1_u8; 1 + comm.rank()], ReduceOp::Sum).unwrap();
            assert!(block_on(work.into_future()).0.unwrap_err().is_mismatch());
        });
    }
}

#[test]
fn callbacks_may_panic_and_may_call_the_communicator() {
    for wiring in WIRINGS {
        threads(wiring, 2, |comm| {
            let (sender, said) = channel();
            let work = comm.start_all_reduce(vec![1_u8; 100], ReduceOp::Sum).unwrap();
            work.on_end(|| panic!("a callback that panics"));
            let (again, clone) = (sender.clone(), comm.clone());
            work.on_end(move || {
                // In the callback of a call's end, a collective may be refused. A started one takes its place in the
                // order.
                let _ = clone.flight_recorder().records();
                again.send(clone.start_all_reduce(vec![2_u8], ReduceOp::Sum)).unwrap();
            });
            assert_eq!(work.wait().unwrap(), [2; 100]);
            let next = said.recv_timeout(Duration::from_secs(20)).unwrap();
            assert_eq!(next.unwrap().wait().unwrap(), [4]);
            // If the call has already ended, its callback runs at once.
            let ended = comm.start_broadcast(vec![1_u8], 0).unwrap();
            while !ended.is_done() {
                std::thread::yield_now();
            }
            ended.on_end(move || sender.send(Err(Error::Closed { call: "none".to_owned() })).unwrap());
            assert!(said.recv().unwrap().is_err());
        });
    }
}

#[test]
fn the_first_of_many_is_found() {
    for wiring in WIRINGS {
        threads(wiring, 3, |comm| {
            if comm.rank() != 0 {
                // One after the other, each after rank 0 has seen the one before.
                comm.recv(&mut 0_u8, 0).unwrap();
                return comm.send(&(comm.rank() as u8), 0).unwrap();
            }
            let mut works = vec![
                comm.start_recv(vec![0_u8], 1).unwrap().erased(),
                comm.start_recv([0_u8], 2).unwrap().erased(),
                comm.start_send(vec![1_u16; 3], 0).unwrap().erased(),
            ];
            assert_eq!(Work::wait_any(&works[..2], Duration::from_millis(1)), None);
            let mut order = Vec::new();
            for next in [2, 1] {
                comm.send(&0_u8, next).unwrap();
                let first = Work::wait_any(&works[..works.len() - 1], Duration::from_secs(20)).unwrap();
                let (any, rank) = (works.remove(first).wait().unwrap(), next);
                order.push(rank);
                match any.downcast::<(Vec<u8>, collectives::Received)>() {
                    Ok(vec) => assert_eq!((vec.0[0] as usize, vec.1.source), (rank, rank)),
                    Err(any) => assert_eq!(any.downcast::<([u8; 1], collectives::Received)>().unwrap().0[0] as usize, rank),
                }
            }
            assert_eq!(order, [2, 1]);
            comm.recv(&mut [0_u16; 3], 0).unwrap();
            assert_eq!(Work::wait_any(&works, Duration::from_secs(20)), Some(0));
            assert_eq!(Work::<()>::wait_any(&[], Duration::from_secs(20)), None);
        });
    }
}

#[test]
fn many_tasks_share_one_thread() {
    /// Wakes one of the tasks, which run in turns after they are woken.
    struct Task(usize, Arc<Mutex<Vec<usize>>>, std::thread::Thread);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.1.lock().unwrap().push(self.0);
            self.2.unpark();
        }
    }

    for wiring in WIRINGS {
        threads(wiring, 2, |comm| {
            const TASKS: usize = 50;
            let other = 1 - comm.rank();
            let woken = Arc::new(Mutex::new((0..TASKS).collect::<Vec<_>>()));
            let mut tasks: Vec<_> = (0..TASKS)
                .map(|number| {
                    let work = comm.start_recv(vec![0_u64; 10], Envelope::rank(other).tag(number as u64)).unwrap();
                    Some(work.into_future())
                })
                .collect();
            for number in (0..TASKS).rev() {
                comm.send(&[number as u64; 10], Envelope::rank(other).tag(number as u64)).unwrap();
            }
            let mut left = TASKS;
            while left > 0 {
                let ready = std::mem::take(&mut *woken.lock().unwrap());
                for number in ready {
                    let waker = Waker::from(Arc::new(Task(number, Arc::clone(&woken), std::thread::current())));
                    let Some(task) = &mut tasks[number] else { continue };
                    if let Poll::Ready(received) = Pin::new(task).poll(&mut Context::from_waker(&waker)) {
                        assert_eq!(received.unwrap().0, [number as u64; 10]);
                        tasks[number] = None;
                        left -= 1;
                    }
                }
                if left > 0 && woken.lock().unwrap().is_empty() {
                    std::thread::park_timeout(Duration::from_millis(100));
                }
            }
        });
    }
}

#[test]
fn two_threads_wait_for_the_same_calls() {
    for wiring in WIRINGS {
        threads(wiring, 2, |comm| {
            let other = 1 - comm.rank();
            let works = [comm.start_recv(vec![0_u8], other).unwrap()];
            std::thread::scope(|scope| {
                let waiting: Vec<_> = (0..2).map(|_| scope.spawn(|| Work::wait_any(&works, Duration::from_secs(60)))).collect();
                comm.send(&1_u8, other).unwrap();
                waiting.into_iter().for_each(|waiting| assert_eq!(waiting.join().unwrap(), Some(0)));
            });
        });
    }
}
