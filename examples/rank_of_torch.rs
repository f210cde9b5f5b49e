//! A rank in Rust in the default group of `torch.distributed`, whose other ranks are Python processes with the backend
//! of `collectives_torch`. This rank produces the data.
//!
//! `python/examples/train_with_rust.py` is the other side. Both read `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and
//! `MASTER_PORT`, which torchrun or another launcher sets. The store is PyTorch's, on rank 0. This rank is the last
//! one.

use std::env;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use collectives::store::{PrefixStore, TcpStore};
use collectives::{Communicator, ReduceOp};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// The prefix of the keys of the default group's backend. For a group from `new_group`, its number replaces the 0.
const GROUP: &str = "default_pg/0//cpu/";
const LIMIT: Duration = Duration::from_secs(60);
const STEPS: u32 = 40;
const BATCH: usize = 16;

fn main() -> Outcome<()> {
    let comm = join()?;
    let trainers = comm.world_size() - 1;
    let mut random = 1_u32;
    let mut loss = [0.0_f32];
    for step in 0..STEPS {
        for trainer in 0..trainers {
            comm.send(&batch(&mut random), trainer)?;
        }
        loss = [0.0];
        comm.all_reduce(&mut loss, ReduceOp::Sum)?;
        if step % 10 == 0 {
            println!("step {step}: loss {:.4}", loss[0] / trainers as f32);
        }
    }
    println!("the last loss is {:.4}", loss[0] / trainers as f32);
    Ok(())
}

/// Joins the default group, as `init_process_group("collectives")` does.
fn join() -> Outcome<Communicator> {
    let number = |name: &str| -> Outcome<usize> { Ok(env::var(name)?.parse()?) };
    let store = TcpStore::connect(&env::var("MASTER_ADDR")?, env::var("MASTER_PORT")?.parse()?, LIMIT)?;
    // The process that has the store waits until all ranks have joined.
    store.join()?;
    let group = Arc::new(PrefixStore::new(GROUP, store));
    let builder = Communicator::builder().configure(|config| config.timeout = LIMIT);
    Ok(builder.with_store(group, number("RANK")?, number("WORLD_SIZE")?)?)
}

/// Returns points x and values of a line with noise: `[x…, 3x - 1…]`.
fn batch(random: &mut u32) -> Vec<f32> {
    let mut uniform = || {
        *random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (*random >> 8) as f32 / (1 << 24) as f32
    };
    let points: Vec<f32> = (0..BATCH).map(|_| 2.0 * uniform() - 1.0).collect();
    let values: Vec<f32> = points.iter().map(|x| 3.0 * x - 1.0 + 0.01 * uniform()).collect();
    [points, values].concat()
}
