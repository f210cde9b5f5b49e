//! A trainer that owns its communicator and its model, and runs in its own thread.
//!
//! `cargo launch --nproc-per-node 4 -- target/debug/examples/trainer`

use collectives::{Communicator, ReduceOp};
use collectives_train::{DataParallel, Options, Parameter};

/// Fits `y = weight · x + bias` to points; every rank has its own points.
struct Trainer {
    comm: Communicator,
    model: DataParallel,
    weight: f32,
    bias: f32,
}

impl Trainer {
    fn new(comm: Communicator) -> collectives::Result<Self> {
        let parameters = vec![Parameter::new::<f32>("weight", &[1]), Parameter::new::<f32>("bias", &[1])];
        let model = DataParallel::new(&comm, parameters, Options::default())?;
        Ok(Self { comm, model, weight: 0.0, bias: 0.0 })
    }

    /// Runs one step on this rank's points, and returns the mean loss over all ranks.
    fn step(&mut self, points: &[(f32, f32)]) -> collectives::Result<f32> {
        let count = points.len() as f32;
        let errors = points.iter().map(|(x, y)| (x, self.weight * x + self.bias - y));
        let (mut slope, mut offset, mut loss) = (0.0, 0.0, 0.0);
        errors.for_each(|(x, error)| {
            slope += 2.0 * error * x / count;
            offset += 2.0 * error / count;
            loss += error * error / count;
        });
        self.model.ready(1, &[offset])?;
        self.model.ready(0, &[slope])?;
        let mean = self.model.finish()?;
        self.weight -= 0.1 * mean.gradient::<f32>(0)?[0];
        self.bias -= 0.1 * mean.gradient::<f32>(1)?[0];
        self.comm.all_reduce(&mut loss, ReduceOp::Avg)?;
        Ok(loss)
    }
}

fn main() -> collectives::Result<()> {
    let comm = Communicator::from_env()?;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let points: Vec<_> = (0..8).map(|number| (number * ranks + rank) as f32 / (8 * ranks) as f32).map(|x| (x, 3.0 * x - 1.0)).collect();
    let mut trainer = Trainer::new(comm.clone())?;
    let training = std::thread::spawn(move || {
        let mut loss = f32::MAX;
        for _ in 0..500 {
            loss = trainer.step(&points)?;
        }
        collectives::Result::Ok((trainer, loss))
    });
    let (trainer, loss) = training.join().expect("the trainer does not panic")?;
    println!("rank {rank}: y = {:.2} x + {:.2}, loss {loss:.5}", trainer.weight, trainer.bias);
    comm.close()
}
