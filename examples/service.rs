//! An async service that awaits started calls of two communicators concurrently, on one thread of an executor.
//!
//! `cargo launch --nproc-per-node 2 -- target/debug/examples/service`

use collectives::{Communicator, Envelope, ReduceOp};

/// Averages gradients, one step after the other.
async fn averages(comm: Communicator, steps: u32) -> collectives::Result<f32> {
    let mut gradient = vec![comm.rank() as f32; 1 << 12];
    for _ in 0..steps {
        gradient = comm.start_all_reduce(gradient, ReduceOp::Avg)?.await?;
    }
    Ok(gradient[0])
}

/// Passes a token round the ranks while the averages continue.
async fn token(comm: Communicator, rounds: u64) -> collectives::Result<u64> {
    let (next, previous) = ((comm.rank() + 1) % comm.world_size(), (comm.rank() + comm.world_size() - 1) % comm.world_size());
    let mut value = 0;
    for round in 0..rounds {
        let sending = comm.start_send([value + 1], Envelope::rank(next).tag(round))?;
        let ([came], _) = comm.start_recv([0_u64], Envelope::rank(previous).tag(round))?.await?;
        sending.await?;
        value = came;
    }
    Ok(value)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> collectives::Result<()> {
    let comm = Communicator::from_env()?;
    let second = comm.duplicate()?;
    let ticks = tokio::spawn(async {
        let mut count = 0;
        loop {
            tokio::task::yield_now().await;
            count += 1;
            if count == 1000 {
                return count;
            }
        }
    });
    let (mean, hops) = tokio::try_join!(averages(comm.clone(), 20), token(second, 10))?;
    println!("rank {}: mean {mean}, token after {hops} hops, {} ticks meanwhile", comm.rank(), ticks.await.unwrap_or(0));
    comm.close()
}
