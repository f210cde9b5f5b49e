//! Buffers that the crate allocates: their properties, the agreement of ranks on them, and every collective on them,
//! against the oracle.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::cases::{Memory, everything_in, movements_in, reductions_in};
use crate::common::meeting::wait_until;
use crate::common::oracle::{Predict, assert_bits, folded, inputs};
use crate::common::ranks::{Meeting, Wiring, alone_in_a_process, communicators, each, patience, processes, threads};

use collectives::{AbortHandle, Communicator, CustomOp, Error, F8E4M3, ReduceOp, Reduction, Result, SharedBuffer, bf16};

/// The fixed seed of the inputs. Every failure prints the seed it used.
const SEED: u64 = 0xa110c;

/// Enough elements of four bytes that blocks span chunks, segments and huge pages on every path.
const LARGE: usize = (3 << 20) / 4 + 1;

/// Parts of one allocation. They do not overlap, and each begins at an odd number of elements.
struct Parts<'a> {
    start: *mut u8,
    end: usize,
    used: Cell<usize>,
    memory: PhantomData<&'a mut SharedBuffer<u8>>,
}

impl<'a> Parts<'a> {
    fn of(buffer: &'a mut SharedBuffer<u8>) -> Self {
        Self { start: buffer.as_mut_ptr(), end: buffer.len(), used: Cell::new(0), memory: PhantomData }
    }
}

impl<'a> Memory for Parts<'a> {
    type Element<T: Predict> = T;
    type Buffer<T: Predict> = &'a mut [T];

    fn reduction<T: Predict>(&self, op: ReduceOp) -> Reduction<T> {
        op.into()
    }

    #[expect(unsafe_code, reason = "elements of many types in one allocation")]
    fn put<T: Predict>(&self, elements: &[T]) -> &'a mut [T] {
        let first = (self.used.get().next_multiple_of(2 * size_of::<T>())) + size_of::<T>();
        self.used.set(first + size_of_val(elements));
        assert!(self.used.get() <= self.end, "the test needs a larger allocation");
        // SAFETY: inside the allocation, which is borrowed for 'a and aligned to a page; aligned to the element; no
        // other part has these bytes; they are zeros at first, which any element may be.
        let part = unsafe { std::slice::from_raw_parts_mut(self.start.add(first).cast::<T>(), elements.len()) };
        part.copy_from_slice(elements);
        part
    }

    fn get<T: Predict>(&self, buffer: &&'a mut [T]) -> Vec<T> {
        buffer.to_vec()
    }
}

/// Runs `cases` on parts of an allocation of `bytes` bytes.
fn on_parts(comm: &Communicator, bytes: usize, cases: impl Fn(&Parts<'_>)) {
    cases(&Parts::of(&mut comm.alloc::<u8>(bytes).unwrap()));
}

/// Runs the large cases, each in its own allocation.
fn large(comm: &Communicator) {
    let bytes = 16 * comm.world_size() * (LARGE + 1) * 4;
    on_parts(comm, bytes, |parts| reductions_in::<f32, _>(parts, comm, ReduceOp::Sum, LARGE, SEED));
    on_parts(comm, bytes, |parts| reductions_in::<bf16, _>(parts, comm, ReduceOp::Avg, LARGE, SEED + 1));
    on_parts(comm, bytes, |parts| movements_in::<u8, _>(parts, comm, LARGE, SEED + 2));
}

macro_rules! wirings {
    ($($small:ident $large:ident $wiring:ident;)*) => {$(
        #[test]
        fn $small() {
            for world_size in [1, 2, 3] {
                threads(Wiring::$wiring, world_size, |comm| {
                    on_parts(comm, 8 << 20, |parts| everything_in(parts, comm, &[0, 1, 13], SEED + world_size as u64));
                });
            }
        }

        #[test]
        fn $large() {
            threads(Wiring::$wiring, 3, large);
        }
    )*};
}

wirings! {
    every_collective_on_shm every_large_collective_on_shm Shm;
    every_collective_on_tcp every_large_collective_on_tcp Tcp;
    every_collective_on_pairs every_large_collective_on_pairs Pairs;
    every_collective_on_dealt every_large_collective_on_dealt Dealt;
}

macro_rules! processes {
    ($($test:ident $wiring:ident $world_size:literal;)*) => {$(
        #[test]
        fn $test() {
            processes(stringify!($test), Wiring::$wiring, $world_size, |comm| {
                on_parts(comm, 8 << 20, |parts| everything_in(parts, comm, &[13], SEED));
                large(comm);
                Ok(())
            });
        }
    )*};
}

processes! {
    processes_on_shm_2 Shm 2;
    processes_on_shm_3 Shm 3;
    processes_on_tcp_2 Tcp 2;
    processes_on_pairs_4 Pairs 4;
}

/// Checks all-reduces: in place on all of a buffer and on its middle, from buffer to buffer, and started.
fn whole_buffers<T: Predict>(comm: &Communicator, count: usize) -> Result<()> {
    let (n, me) = (comm.world_size(), comm.rank());
    let what = format!("{count} of {} on rank {me} of {n}, seed {SEED}", T::ELEMENT_TYPE);
    let op = ReduceOp::Max;
    let all = inputs::<T>(op, SEED, n, count);
    let expected = folded(op, &all);
    let mut buffer = comm.alloc::<T>(count)?;
    assert_bits(&what, &buffer, &vec![T::default(); count]);
    assert!(buffer.is_empty() || buffer.as_ptr().addr().is_multiple_of(4096));
    buffer.copy_from_slice(&all[me]);
    comm.all_reduce(&mut buffer, op)?;
    assert_bits(&what, &buffer, &expected);

    let (from, to) = (count / 3, count - count / 5);
    buffer.copy_from_slice(&all[me]);
    comm.all_reduce(&mut buffer[from..to], op)?;
    assert_bits(&what, &buffer[from..to], &expected[from..to]);
    assert_bits(&what, &[&buffer[..from], &buffer[to..]].concat(), &[&all[me][..from], &all[me][to..]].concat());

    buffer.copy_from_slice(&all[me]);
    let mut result = comm.alloc::<T>(count)?;
    comm.all_reduce_into(&buffer, &mut result, op)?;
    assert_bits(&what, &result, &expected);
    assert_bits(&what, &buffer, &all[me]);
    assert_eq!(format!("{result:?}"), format!("{expected:?}"));

    // Memory of `alloc` on one side and ordinary memory on the other, and not on every rank.
    let mut ordinary = vec![T::default(); count];
    comm.all_reduce_into(&buffer, &mut ordinary, op)?;
    assert_bits(&what, &ordinary, &expected);
    if me == 0 {
        comm.all_reduce_into(&buffer, &mut result, op)?
    } else {
        comm.all_reduce_into(&all[me], &mut ordinary, op)?
    }
    assert_bits(&what, if me == 0 { &result } else { &ordinary }, &expected);

    assert_bits(&what, &comm.start_all_reduce(buffer, op)?.wait()?, &expected);
    Ok(())
}

#[test]
fn whole_buffers_are_reduced_in_every_way() {
    for wiring in Wiring::ALL {
        threads(wiring, 3, |comm| {
            for count in [0, 1, 1023, (3 << 20) / 4] {
                whole_buffers::<f32>(comm, count).unwrap();
            }
            whole_buffers::<F8E4M3>(comm, 5001).unwrap();
            whole_buffers::<bool>(comm, 77).unwrap();
        });
    }
}

#[test]
fn a_rank_may_drop_its_buffer_before_the_others() {
    for wiring in Wiring::ALL {
        threads(wiring, 3, |comm| {
            let mut buffer = Some(comm.alloc::<u32>(50_000).unwrap());
            let meeting = comm.rank() == 1;
            if meeting {
                drop(buffer.take());
            }
            for round in 0..3_u32 {
                let mut ordinary = vec![0; 50_000];
                let mine = buffer.as_deref_mut().unwrap_or(&mut ordinary);
                mine.fill(comm.rank() as u32 + round);
                comm.all_reduce(mine, ReduceOp::Sum).unwrap();
                assert!(mine.iter().all(|sum| *sum == 3 + 3 * round), "round {round}, {wiring:?}");
            }
            assert!(comm.alloc::<u32>(7).unwrap().iter().all(|zero| *zero == 0));
        });
    }
}

#[test]
fn a_buffer_outlives_its_communicator_and_its_thread() {
    for wiring in Wiring::ALL {
        let buffers = each(communicators(wiring, 2), |comm| {
            let mut buffer = comm.alloc::<u64>(300_000).unwrap();
            buffer.fill(comm.rank() as u64 + 5);
            comm.close().unwrap();
            buffer
        });
        for (rank, buffer) in (0..).zip(&buffers) {
            assert!(buffer.iter().all(|element| *element == rank + 5), "{wiring:?}");
        }
    }
}

#[test]
fn ranks_that_ask_for_different_things_are_told_of_both() {
    for wiring in Wiring::ALL {
        threads(wiring, 3, |comm| {
            let last = comm.rank() == 2;
            let error = comm.alloc::<f32>(if last { 11 } else { 10 }).unwrap_err();
            assert!(error.is_mismatch() && !error.is_poisoned(), "{error}");
            assert_eq!(error.to_string(), "rank 0 called alloc(f32, count 10), but rank 2 called alloc(f32, count 11)");
            let error = if last { comm.alloc::<f32>(10).err() } else { comm.alloc::<[f32; 1]>(10).err() };
            let text = "rank 0 called alloc([f32; 1], count 10), but rank 2 called alloc(f32, count 10)";
            assert_eq!(error.unwrap().to_string(), text);
            assert_eq!(comm.alloc::<f32>(10).unwrap().len(), 10, "the communicator lives on");
        });
    }
}

#[test]
fn a_rank_that_calls_something_else_is_told_so() {
    threads(Wiring::Shm, 2, |comm| {
        let error = if comm.rank() == 0 { comm.alloc::<f32>(10).unwrap_err() } else { comm.barrier().unwrap_err() };
        assert!(error.is_mismatch(), "{error}");
    });
}

#[test]
fn a_rank_that_does_not_come_is_waited_for_until_the_deadline() {
    let meeting = Meeting::new(2);
    threads(Wiring::Shm, 2, |comm| {
        if comm.rank() == 0 {
            comm.set_timeout(Duration::from_millis(50));
            let error = comm.alloc::<f32>(10).unwrap_err();
            assert!(matches!(&error, Error::Timeout { missing, .. } if missing[0].rank == 1), "{error}");
        }
        meeting.meet();
    });
}

#[test]
fn more_than_there_is_is_refused_and_named() {
    threads(Wiring::Shm, 3, |comm| {
        for (count, words) in [(1 << 45, "on rank 0 "), (usize::MAX / 8, "address space"), (usize::MAX, "address space")] {
            let error = comm.alloc::<u64>(count).unwrap_err();
            assert!(error.to_string().contains(words) && !error.is_poisoned(), "{error}");
        }
        assert_eq!(comm.alloc::<u64>(10).unwrap().len(), 10, "the communicator lives on");
    });
}

#[test]
fn elements_without_a_size_are_refused() {
    threads(Wiring::Shm, 1, |comm| {
        assert!(matches!(comm.alloc::<[u8; 0]>(3).unwrap_err(), Error::InvalidArgument { call: "alloc", .. }));
    });
}

/// Lets rank 1 have less address space than a buffer takes.
fn where_one_rank_has_no_room(name: &str, wiring: Wiring) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    processes(name, wiring, 3, |comm| {
        let before = getrlimit(Resource::As);
        if comm.rank() == 1 {
            let pages: u64 = std::fs::read_to_string("/proc/self/statm").unwrap().split(' ').next().unwrap().parse().unwrap();
            setrlimit(Resource::As, Rlimit { current: Some((pages << 12) + (32 << 20)), maximum: before.maximum }).unwrap();
        }
        let error = comm.alloc::<u8>(64 << 20).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("alloc(u8, count 67108864) on rank 1 ") && text.contains("memory"), "{text}");
        setrlimit(Resource::As, before).unwrap();
        assert_eq!(comm.alloc::<u8>(64 << 20)?.len(), 64 << 20, "the communicator lives on");
        Ok(())
    });
}

#[test]
fn where_one_rank_has_no_room_for_windows_all_are_told_which() {
    where_one_rank_has_no_room("shared_buffers::where_one_rank_has_no_room_for_windows_all_are_told_which", Wiring::Shm);
}

#[test]
fn where_one_rank_has_no_room_for_memory_of_its_own_all_are_told_which() {
    where_one_rank_has_no_room("shared_buffers::where_one_rank_has_no_room_for_memory_of_its_own_all_are_told_which", Wiring::Tcp);
}

#[test]
fn many_buffers_leave_nothing_behind() {
    alone_in_a_process("shared_buffers::many_buffers_leave_nothing_behind", || {
        // The mapped bytes of each file, by its number. The kernel shows adjacent mappings of one file as one.
        let mapped = || {
            let mut files = BTreeMap::<String, (u64, u64)>::new();
            for line in std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|line| line.contains("collectives-buffer")) {
                let fields: Vec<&str> = line.split_whitespace().collect();
                let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
                let (start, end) = fields[0].split_once('-').unwrap();
                let (length, file) = (hex(end) - hex(start), files.entry(fields[4].to_owned()).or_default());
                *file = (file.0 + length, file.1.max(hex(fields[2]) + length));
            }
            files.into_values().collect::<Vec<_>>()
        };
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let meeting = Meeting::new(2);
        // Counting opens a descriptor, so one rank counts while the other waits.
        let count = |comm: &Communicator| {
            meeting.meet();
            let counted = (comm.rank() == 0).then(|| (mapped(), descriptors()));
            meeting.meet();
            counted
        };
        threads(Wiring::Shm, 2, |comm| {
            let before = count(comm);
            let buffers: Vec<_> = (0..100).map(|number| comm.alloc::<u16>(number * 100).unwrap()).collect();
            comm.barrier().unwrap();
            if let (Some((none, open)), Some((files, still_open))) = (&before, count(comm)) {
                assert_eq!((none.len(), *open), (0, still_open));
                assert_eq!(files.len(), 99, "one file for each buffer that is not empty");
                let thrice = files.iter().all(|(mapped, length)| *mapped == 3 * length);
                assert!(thrice, "each rank maps the file, and its own part once more to keep it after a failure: {files:?}");
            }
            drop(buffers);
            comm.barrier().unwrap();
            comm.barrier().unwrap();
            assert_eq!(count(comm), before);
        });
    });
}

#[test]
fn memory_that_was_dropped_is_free_before_the_next_call() {
    alone_in_a_process("shared_buffers::memory_that_was_dropped_is_free_before_the_next_call", || {
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
            line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10
        };
        let meeting = Meeting::new(2);
        threads(Wiring::Shm, 2, |comm| {
            let buffer = comm.alloc::<u8>(32 << 20).unwrap();
            meeting.meet();
            assert!(resident() >= 64 << 20, "memory is found at once: {} B", resident());
            meeting.meet();
            drop(buffer);
            meeting.meet();
            assert!(resident() < 8 << 20, "{} B", resident());
            meeting.meet();
        });
    });
}

#[test]
fn a_rank_that_leaves_in_the_last_step_leaves_nobody_with_what_it_wrote_since() {
    let (done, gone) = (&AtomicBool::new(false), &AtomicBool::new(false));
    let handles = &Mutex::new(None::<AbortHandle>);
    let wait_for = |what: &str, flag: &AtomicBool| wait_until(what, || flag.load(Ordering::Acquire));
    std::thread::scope(|scope| {
        let builder = Communicator::builder().configure(|config| config.timeout = patience(60));
        let mut ranks = builder.local(2).unwrap().into_iter();
        let (zero, one) = (ranks.next().unwrap(), ranks.next().unwrap());
        *handles.lock().unwrap() = Some(zero.abort_handle());
        scope.spawn(move || {
            let mut source = zero.alloc::<f32>(2 * LARGE).unwrap();
            source.fill(1.0);
            let op = CustomOp::new("sum", |into: &mut [f32], from: &[f32]| into.iter_mut().zip(from).for_each(|(a, b)| *a += *b));
            // It has reduced its block and is aborted while it waits for rank 1, which is still reading.
            let result = zero.reduce_scatter_into(&source, &mut vec![0.0; LARGE], op);
            assert!(matches!(result, Err(Error::Aborted { .. })), "{result:?}");
            source.fill(-5.0);
            gone.store(true, Ordering::Release);
        });
        scope.spawn(move || {
            let mut source = one.alloc::<f32>(2 * LARGE).unwrap();
            source.fill(2.0);
            let mut block = vec![0.0_f32; LARGE];
            std::thread::scope(|inner| {
                inner.spawn(move || {
                    wait_for("rank 1 is in its op", done);
                    handles.lock().unwrap().take().unwrap().abort();
                });
                let (tell, hear) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
                let (told, heard) = (Arc::clone(&tell), Arc::clone(&hear));
                let op = CustomOp::new("sum", move |into: &mut [f32], from: &[f32]| {
                    tell.store(true, Ordering::Release);
                    wait_until("rank 0 has written", || hear.load(Ordering::Acquire));
                    into.iter_mut().zip(from).for_each(|(a, b)| *a += *b);
                });
                inner.spawn(move || {
                    wait_for("rank 1 is in its op", &told);
                    done.store(true, Ordering::Release);
                    wait_for("rank 0 has written", gone);
                    heard.store(true, Ordering::Release);
                });
                let result = one.reduce_scatter_into(&source, &mut block, op);
                assert!(matches!(result, Err(Error::Aborted { .. })), "{result:?}");
            });
        });
    });
}
