//! Calls between two ranks beside busy processes on the same processors, compared with two threads that exchange the
//! same bytes over a blocking socket.
//!
//! Both run alternately for short stretches, so that other disturbances of the machine affect both. No thread is
//! pinned: where threads run is part of the question. The first rank times each of its calls and checks the result.
//! "step" is what an inference engine does: some work, then a call.
//!
//! `cargo bench --bench crowd [-- busy=0,1,2,4 rounds=7 stretch=60 only=TEXT]` prints the mean, the median and the 99th
//! percentile of both, in µs, for each number of busy processes and each call. It also prints the ratios of the means
//! and of the 99th percentiles. `stretch` is in milliseconds; `only` is a part of a name.

use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use collectives::{Communicator, Envelope, ReduceOp, Transport};

/// The bit that the first rank sets in its word to end a stretch.
const STOP: u64 = 1 << 40;
const BOTH: &str = "both ranks make the same calls";
/// The number of additions in "some work": about 20 µs.
const WORK: u64 = 50_000;
/// The argument that makes this program one of the busy processes.
const SPIN: &str = "spin";

/// A way to exchange words between the two ranks.
trait Exchange: Send {
    /// Sends a word to the other rank, and returns the sum of both ranks' words.
    fn exchange(&mut self, word: u64) -> u64;
}

/// All-reduces of this many words.
struct AllReduce(Communicator, Vec<u64>);

impl Exchange for AllReduce {
    fn exchange(&mut self, word: u64) -> u64 {
        self.1.fill(word);
        self.0.all_reduce(&mut self.1, ReduceOp::Sum).expect(BOTH);
        assert_eq!(self.1.first(), self.1.last());
        self.1[0]
    }
}

/// A message in each direction.
struct Messages(Communicator);

impl Exchange for Messages {
    fn exchange(&mut self, word: u64) -> u64 {
        let (other, mut theirs) = (1 - self.0.rank(), [0_u64]);
        if self.0.rank() == 0 {
            self.0.send(&[word], other).expect(BOTH);
            self.0.recv(&mut theirs, Envelope::rank(other)).expect(BOTH);
            return word + theirs[0];
        }
        self.0.recv(&mut theirs, Envelope::rank(other)).expect(BOTH);
        self.0.send(&[word], other).expect(BOTH);
        word + theirs[0]
    }
}

/// As many bytes over a blocking socket, added up as an all-reduce does.
struct Socket<S> {
    stream: S,
    mine: Vec<u64>,
    theirs: Vec<u64>,
    /// Whether this end reads first.
    answers: bool,
}

impl<S: Read + Write + Send> Socket<S> {
    fn write(&mut self) {
        let bytes: Vec<u8> = self.mine.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.stream.write_all(&bytes).expect(BOTH);
    }

    fn read(&mut self) {
        let mut bytes = vec![0; self.theirs.len() * 8];
        self.stream.read_exact(&mut bytes).expect(BOTH);
        self.theirs.iter_mut().zip(bytes.as_chunks().0).for_each(|(word, bytes)| *word = u64::from_ne_bytes(*bytes));
    }
}

impl<S: Read + Write + Send> Exchange for Socket<S> {
    fn exchange(&mut self, word: u64) -> u64 {
        self.mine.fill(word);
        if self.answers {
            self.read();
            self.write();
        } else {
            self.write();
            self.read();
        }
        self.mine.iter_mut().zip(&self.theirs).for_each(|(mine, theirs)| *mine += theirs);
        self.mine[0]
    }
}

/// Both ends of an exchange.
type Pair = [Box<dyn Exchange>; 2];

fn ranks(transport: Transport, make: impl Fn(Communicator) -> Box<dyn Exchange>) -> Pair {
    let comms = Communicator::builder().configure(|config| config.transport = transport).local(2).expect("two ranks");
    let mut pair = comms.into_iter().map(make);
    std::array::from_fn(|_| pair.next().expect("two ranks"))
}

fn sockets(transport: Transport, words: usize, takes_turns: bool) -> Pair {
    let end = |answers| (vec![0; words], vec![0; words], answers && takes_turns);
    if transport == Transport::Shm {
        let (one, other) = UnixStream::pair().expect("two sockets");
        return [(one, false), (other, true)].map(|(stream, answers)| {
            let (mine, theirs, answers) = end(answers);
            Box::new(Socket { stream, mine, theirs, answers }) as Box<dyn Exchange>
        });
    }
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let one = TcpStream::connect(listener.local_addr().expect("it has one")).expect("it listens");
    let other = listener.accept().expect("one has connected").0;
    [(one, false), (other, true)].map(|(stream, answers)| {
        stream.set_nodelay(true).expect("a stream of TCP");
        let (mine, theirs, answers) = end(answers);
        Box::new(Socket { stream, mine, theirs, answers }) as Box<dyn Exchange>
    })
}

/// A comparison: its name, the work before each call, and both ways to exchange.
struct Cell {
    name: String,
    work: u64,
    pairs: [Pair; 2],
    times: [Vec<u32>; 2],
}

fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for transport in [Transport::Shm, Transport::Tcp] {
        let mut add = |name: &str, work, ours, theirs| {
            cells.push(Cell { name: format!("{transport} {name}"), work, pairs: [ours, theirs], times: Default::default() });
        };
        let all_reduce = |words: usize| ranks(transport, move |comm| Box::new(AllReduce(comm, vec![0; words])));
        add("all_reduce 8 B", 0, all_reduce(1), sockets(transport, 1, false));
        add("all_reduce 16 KiB", 0, all_reduce(2048), sockets(transport, 2048, false));
        add("step of 16 KiB", WORK, all_reduce(2048), sockets(transport, 2048, false));
        add("message and answer", 0, ranks(transport, |comm| Box::new(Messages(comm))), sockets(transport, 1, true));
    }
    cells
}

/// Runs additions whose time does not depend on other programs.
fn work(steps: u64) {
    (0..steps).for_each(|step| _ = black_box(step));
}

/// Runs one stretch: makes calls until `limit` has passed, and appends their times to `times`.
fn stretch([first, second]: &mut Pair, steps: u64, limit: Duration, times: &mut Vec<u32>) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for call in 0_u64.. {
                work(steps);
                let sum = second.exchange(call);
                assert!(sum & (STOP - 1) == 2 * call, "rank 1 got {sum} of call {call}");
                if sum & STOP != 0 {
                    break;
                }
            }
        });
        let begin = Instant::now();
        for call in 0_u64.. {
            let began = Instant::now();
            work(steps);
            let stop = if begin.elapsed() < limit { 0 } else { STOP };
            let sum = first.exchange(call | stop);
            assert!(sum == (2 * call) | stop, "rank 0 got {sum} of call {call}");
            times.push(u32::try_from(began.elapsed().as_nanos()).unwrap_or(u32::MAX));
            if stop != 0 {
                break;
            }
        }
    });
}

/// Returns the mean, the median and the 99th percentile, in µs.
fn figures(times: &mut [u32]) -> [f64; 3] {
    times.sort_unstable();
    let mean = times.iter().map(|time| f64::from(*time)).sum::<f64>() / times.len() as f64;
    [mean, f64::from(times[times.len() / 2]), f64::from(times[times.len() * 99 / 100])].map(|nanoseconds| nanoseconds / 1e3)
}

/// Busy processes, which end when this is dropped.
struct Busy(Vec<Child>);

impl Busy {
    fn start(count: usize) -> Self {
        let program = std::env::current_exe().expect("this program has a file");
        let start = |_| Command::new(&program).arg(SPIN).stdin(Stdio::piped()).spawn().expect("this program starts");
        Self((0..count).map(start).collect())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Keeps a processor busy until the process that started this one is gone.
fn spin() -> ! {
    std::thread::spawn(|| {
        // The end of that process closes the pipe.
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(0);
    });
    loop {
        work(WORK);
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.iter().any(|argument| argument == SPIN) {
        spin();
    }
    let option = |name: &str| arguments.iter().find_map(|argument| argument.strip_prefix(name)?.strip_prefix('='));
    let number = |name: &str, default| option(name).and_then(|text| text.parse().ok()).unwrap_or(default);
    let (rounds, limit) = (number("rounds", 7), Duration::from_millis(number("stretch", 60)));
    let only = option("only").unwrap_or_default();
    let mut cells: Vec<Cell> = cells().into_iter().filter(|cell| cell.name.contains(only)).collect();
    println!("{:4} {:24} {:^32} {:^32} ratios", "busy", "µs: mean, median, 99 of 100", "ours", "a blocking socket");
    for busy in option("busy").unwrap_or("0,1,2,4").split(',').filter_map(|text| text.parse().ok()) {
        let neighbours = Busy::start(busy);
        for _ in 0..rounds {
            for Cell { work, pairs, times, .. } in &mut cells {
                pairs.iter_mut().zip(times).for_each(|(pair, times)| stretch(pair, *work, limit, times));
            }
        }
        drop(neighbours);
        for Cell { name, times, .. } in &mut cells {
            let [ours, theirs] = times.each_mut().map(|times| figures(times));
            let columns = |figures: [f64; 3]| figures.map(|figure| format!("{figure:>10.2}")).concat();
            println!("{busy:4} {name:24} {}   {}   {:.2} {:.2}", columns(ours), columns(theirs), ours[0] / theirs[0], ours[2] / theirs[2]);
            times.iter_mut().for_each(Vec::clear);
        }
    }
}
