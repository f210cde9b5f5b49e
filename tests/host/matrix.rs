//! Every collective × op × element type × world size × count × wiring × kind of rank, against the oracle, bit by bit.

use crate::common::cases::{everything, movements, reductions};
use crate::common::ranks::{Wiring, processes, threads};

use collectives::{ReduceOp, bf16};

/// The fixed seed of the inputs. Every failure prints the seed it used.
const SEED: u64 = 0x5eed;

/// The counts at which every op and type is checked.
const COUNTS: [usize; 3] = [0, 1, 13];

/// Enough elements that blocks span chunks and segments on every path.
const LARGE: usize = 150_001;

fn all_sizes(wiring: Wiring) {
    for world_size in [1, 2, 3, 4, 5, 6, 7, 8, 13] {
        // The whole matrix at three sizes. At the others, one count is enough for what is special to the size.
        let counts: &[usize] = if [1, 3, 4].contains(&world_size) { &COUNTS } else { &COUNTS[2..] };
        threads(wiring, world_size, |comm| everything(comm, counts, SEED + world_size as u64));
    }
}

fn large(wiring: Wiring) {
    for world_size in [2, 3, 5] {
        threads(wiring, world_size, |comm| {
            reductions::<f32>(comm, ReduceOp::Sum, LARGE, SEED);
            reductions::<bf16>(comm, ReduceOp::Avg, LARGE, SEED + 1);
            reductions::<i16>(comm, ReduceOp::BitXor, LARGE, SEED + 2);
            reductions::<u8>(comm, ReduceOp::Max, LARGE, SEED + 3);
            movements::<f64>(comm, LARGE / 4, SEED + 4);
            movements::<u8>(comm, LARGE, SEED + 5);
        });
    }
}

macro_rules! wirings {
    ($($wiring:ident $small:ident $large:ident;)*) => {$(
        #[test]
        fn $small() {
            all_sizes(Wiring::$wiring);
        }

        #[test]
        fn $large() {
            large(Wiring::$wiring);
        }
    )*};
}

wirings! {
    Shm shm_threads shm_threads_large;
    Tcp tcp_threads tcp_threads_large;
    Pairs pairs_threads pairs_threads_large;
    Dealt dealt_threads dealt_threads_large;
}

#[cfg(feature = "encryption")]
#[test]
fn encrypted_threads() {
    for world_size in [1, 2, 3, 5] {
        threads(Wiring::Encrypted, world_size, |comm| everything(comm, &COUNTS, SEED + world_size as u64));
    }
}

#[cfg(feature = "encryption")]
#[test]
fn encrypted_threads_large() {
    large(Wiring::Encrypted);
}

macro_rules! processes {
    ($($test:ident $wiring:ident $world_size:literal;)*) => {$(
        #[test]
        fn $test() {
            processes(stringify!($test), Wiring::$wiring, $world_size, |comm| {
                everything(comm, &[13], SEED);
                reductions::<f32>(comm, ReduceOp::Sum, LARGE, SEED);
                movements::<u8>(comm, LARGE, SEED);
                Ok(())
            });
        }
    )*};
}

processes! {
    shm_processes_1 Shm 1;
    shm_processes_2 Shm 2;
    shm_processes_5 Shm 5;
    tcp_processes_2 Tcp 2;
    tcp_processes_3 Tcp 3;
    pairs_processes_4 Pairs 4;
    dealt_processes_6 Dealt 6;
}

#[cfg(feature = "encryption")]
processes! {
    encrypted_processes_3 Encrypted 3;
}
