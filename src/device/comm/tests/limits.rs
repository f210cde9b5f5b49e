//! Each call keeps its time limit, whatever the limits of other calls are.

use std::time::Instant;

use super::*;

const SHORT: Duration = Duration::from_millis(100);

/// Looks after the device as the watchdog does after this time.
fn look_after(rank: &Rank, time: Duration) {
    for now in [Instant::now(), Instant::now() + time] {
        rank.comm.inner.probe(now);
        rank.comm.inner.keep_time(now);
    }
}

/// Makes a call that ends as soon as its stream reaches it.
fn nothing(rank: &Rank, stream: &Arc<CudaStream>, timeout: Duration) {
    // SAFETY: nothing is put on the stream.
    unsafe { rank.comm.enqueue(&|| "nothing".to_owned(), stream, timeout, |_| Ok(())) }.unwrap();
}

#[test]
fn a_short_call_shortens_no_long_one() {
    let sim = Sim::new();
    let late = Meeting::new(2);
    ranks(2, |rank| {
        let mut vector = rank.vector(100);
        if rank.comm.rank() == 1 {
            late.meet();
        } else {
            nothing(&rank, &rank.stream, SHORT);
        }
        rank.all_reduce(&mut vector, LONG).unwrap();
        if rank.comm.rank() == 0 {
            // Behind the long call on the same stream, and beside it on another stream.
            let other = rank.gpu.context.new_stream().unwrap();
            nothing(&rank, &other, SHORT);
            nothing(&rank, &rank.stream, SHORT);
            other.synchronize().unwrap();
            // The first call has ended by the time to which the clock is set.
            wait_until("the first call is over", || {
                rank.comm.inner.probe(Instant::now());
                rank.comm.inner.watched.unfinished().is_some_and(|unfinished| unfinished.limit == LONG)
            });
            look_after(&rank, 10 * SHORT);
            assert!(rank.comm.failure().is_none(), "{:?}", rank.comm.failure());
            late.meet();
        }
        assert_eq!(read(&rank.stream, &vector), total(100, &[0, 1]));
    });
    sim.finish();
}

#[test]
fn a_long_call_lengthens_no_short_one() {
    for beside in [false, true] {
        let sim = Sim::new();
        ranks(2, |rank| {
            if rank.comm.rank() == 1 {
                return leave_late(&rank.comm);
            }
            let other = rank.gpu.context.new_stream().unwrap();
            let mut vector = rank.vector(100);
            nothing(&rank, &rank.stream, 10 * LONG);
            rank.all_reduce(&mut vector, SHORT).unwrap();
            nothing(&rank, if beside { &other } else { &rank.stream }, 10 * LONG);
            let failure = failure_of(&rank.comm);
            assert!(matches!(&failure, Error::Timeout { elapsed, .. } if (SHORT..LONG).contains(elapsed)), "{failure}");
            let _ = rank.stream.synchronize();
        });
        sim.finish();
    }
}

#[test]
fn the_time_of_a_call_counts_from_the_end_of_what_was_queued_before() {
    let sim = Sim::new();
    let late = Meeting::new(2);
    ranks(2, |rank| {
        let mut first = rank.vector(100);
        let mut second = rank.vector(100);
        if rank.comm.rank() == 1 {
            late.meet();
            rank.all_reduce(&mut first, LONG).unwrap();
            assert_eq!(read(&rank.stream, &first), total(100, &[0, 1]));
            return leave_late(&rank.comm);
        }
        rank.all_reduce(&mut first, LONG).unwrap();
        let event = rank.comm.position(&rank.stream);
        // Long enough to see the end of the first call, however busy the machine is.
        let limit = 10 * SHORT;
        rank.all_reduce(&mut second, limit).unwrap();
        look_after(&rank, 10 * limit);
        assert!(rank.comm.failure().is_none(), "{:?}", rank.comm.failure());
        late.meet();
        rank.comm.wait(&event, &Deadline::after(LONG)).unwrap();
        // Now the second call is the oldest, and no rank joins it.
        let failure = failure_of(&rank.comm);
        assert!(matches!(&failure, Error::Timeout { elapsed, .. } if (limit..LONG).contains(elapsed)), "{failure}");
        let _ = rank.stream.synchronize();
    });
    sim.finish();
}
