//! Collectives on tensors, and their gradients, against plain arithmetic.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Result, Tensor, Var};
use collectives::{Communicator, ReduceOp};
use collectives_candle::{
    all_gather, all_gather_in_place, all_reduce, all_reduce_in_place, all_to_all, all_to_all_in_place, broadcast, broadcast_in_place,
    copy_to_ranks, gather_from_ranks, reduce_from_ranks, reduce_scatter, reduce_scatter_in_place, scatter_to_ranks,
};

const RANKS: [usize; 4] = [1, 2, 3, 4];
const TYPES: [DType; 10] =
    [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64, DType::BF16, DType::F16, DType::F32, DType::F64, DType::F8E4M3];

/// Runs a program on `count` ranks.
fn ranks<R: Send>(count: usize, program: impl Fn(&Communicator) -> Result<R> + Sync) -> Vec<R> {
    Communicator::run_local(count, |comm| Ok(program(comm).unwrap())).unwrap()
}

/// The values of rank `rank`: `rows` × 2 small whole numbers, which all types can represent.
fn values(rank: usize, rows: usize) -> Vec<f64> {
    (0..rows * 2).map(|index| ((rank * 3 + index * 5) % 4) as f64).collect()
}

fn tensor(rank: usize, rows: usize, dtype: DType) -> Result<Tensor> {
    Tensor::from_vec(values(rank, rows), (rows, 2), &Device::Cpu)?.to_dtype(DType::F32)?.to_dtype(dtype)
}

fn read(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.to_dtype(DType::F32)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

fn sums(count: usize, rows: usize) -> Vec<f64> {
    (0..rows * 2).map(|index| (0..count).map(|rank| values(rank, rows)[index]).sum()).collect()
}

#[test]
fn every_type_goes_through_every_call() {
    for count in RANKS {
        for dtype in TYPES {
            let rows = 12;
            let outputs = ranks(count, |comm| {
                let own = tensor(comm.rank(), rows, dtype)?;
                let in_place = (own.copy()?, own.copy()?);
                all_reduce_in_place(comm, &in_place.0, ReduceOp::Sum)?;
                broadcast_in_place(comm, &in_place.1, count - 1)?;
                let outputs = [
                    all_reduce(comm, &own, ReduceOp::Sum)?,
                    all_gather(comm, &own, 0)?,
                    reduce_scatter(comm, &own, 0, ReduceOp::Sum)?,
                    broadcast(comm, &own, count - 1)?,
                    all_to_all(comm, &own, 0)?,
                    in_place.0,
                    in_place.1,
                ];
                outputs.iter().map(|output| Ok((output.dtype(), output.dims().to_vec(), read(output)?))).collect::<Result<Vec<_>>>()
            });
            let block = rows * 2 / count;
            for (rank, outputs) in outputs.into_iter().enumerate() {
                let whole: Vec<f64> = (0..count).flat_map(|rank| values(rank, rows)).collect();
                let exchanged: Vec<f64> = (0..count).flat_map(|from| values(from, rows)[rank * block..][..block].to_vec()).collect();
                let expected = [
                    (rows, sums(count, rows)),
                    (rows * count, whole),
                    (rows / count, sums(count, rows)[rank * block..][..block].to_vec()),
                    (rows, values(count - 1, rows)),
                    (rows, exchanged),
                    (rows, sums(count, rows)),
                    (rows, values(count - 1, rows)),
                ];
                for (call, ((found, shape, values), (rows, expected))) in outputs.into_iter().zip(expected).enumerate() {
                    assert_eq!(
                        (found, &shape[..], values),
                        (dtype, &[rows, 2][..], expected),
                        "call {call}, {dtype:?}, rank {rank} of {count}"
                    );
                }
            }
        }
    }
}

#[test]
fn every_type_goes_through_the_calls_in_place_that_split_and_join() {
    for count in RANKS {
        for dtype in TYPES {
            let rows = 12;
            let each = rows / count;
            let outputs = ranks(count, |comm| {
                let own = tensor(comm.rank(), rows, dtype)?;
                let [gathered, reduced, exchanged] = [own.copy()?, own.copy()?, own.copy()?];
                all_gather_in_place(comm, &gathered)?;
                reduce_scatter_in_place(comm, &reduced, ReduceOp::Max)?;
                all_to_all_in_place(comm, &exchanged)?;
                let largest = reduce_scatter(comm, &own, 0, ReduceOp::Max)?;
                Ok([read(&gathered)?, read(&reduced)?, read(&exchanged)?, read(&largest)?])
            });
            let part = |from: usize, of: usize| values(from, rows)[of * each * 2..][..each * 2].to_vec();
            for (rank, outputs) in outputs.into_iter().enumerate() {
                let largest: Vec<f64> =
                    (0..each * 2).map(|index| (0..count).map(|from| part(from, rank)[index]).fold(0.0, f64::max)).collect();
                let mut reduced = values(rank, rows);
                reduced[rank * each * 2..][..each * 2].copy_from_slice(&largest);
                let expected = [
                    (0..count).flat_map(|from| part(from, from)).collect(),
                    reduced,
                    (0..count).flat_map(|from| part(from, rank)).collect(),
                    largest,
                ];
                assert_eq!(outputs, expected, "{dtype:?}, rank {rank} of {count}");
            }
        }
    }
}

#[test]
fn another_dimension_is_split_and_joined_there() {
    let outputs = ranks(2, |comm| {
        let own = tensor(comm.rank(), 2, DType::F32)?;
        let wide = all_gather(comm, &own, 1)?;
        Ok((
            wide.to_vec2::<f32>()?,
            reduce_scatter(comm, &wide, 1, ReduceOp::Sum)?.to_vec2::<f32>()?,
            scatter_to_ranks(comm, &wide, 1)?.to_vec2::<f32>()?,
        ))
    });
    let rows = |rank: usize| values(rank, 2).chunks(2).map(|row| row.iter().map(|x| *x as f32).collect()).collect::<Vec<Vec<f32>>>();
    let wide: Vec<Vec<f32>> = rows(0).into_iter().zip(rows(1)).map(|(left, right)| [left, right].concat()).collect();
    for (rank, (gathered, reduced, scattered)) in outputs.into_iter().enumerate() {
        assert_eq!(gathered, wide);
        assert_eq!(reduced, rows(rank).into_iter().map(|row| row.iter().map(|x| 2.0 * x).collect::<Vec<_>>()).collect::<Vec<_>>());
        assert_eq!(scattered, rows(rank));
    }
}

/// Compares the gradients with central differences: how much the sum of all ranks' losses changes with each value of a
/// rank.
fn against_differences(count: usize, name: &str, loss: impl Fn(&Communicator, &Tensor) -> Result<Tensor> + Sync) {
    const STEP: f64 = 1e-4;
    let rows = 12;
    let start = |rank: usize| -> Vec<f64> { values(rank, rows).iter().enumerate().map(|(index, x)| x + 0.1 * index as f64).collect() };
    let shape = (rows, 2);
    let total = |rank: usize, index: usize, by: f64| -> f64 {
        let losses = ranks(count, |comm| {
            let mut own = start(comm.rank());
            own[index] += if comm.rank() == rank { by } else { 0.0 };
            loss(comm, &Tensor::from_vec(own, shape, &Device::Cpu)?)?.to_scalar::<f64>()
        });
        losses.iter().sum()
    };
    let gradients = ranks(count, |comm| {
        let own = Var::from_vec(start(comm.rank()), shape, &Device::Cpu)?;
        let gradients = loss(comm, own.as_tensor())?.backward()?;
        gradients.get(&own).unwrap().flatten_all()?.to_vec1::<f64>()
    });
    for (rank, gradient) in gradients.iter().enumerate() {
        for index in [0, 7, 2 * rows - 1] {
            let expected = (total(rank, index, STEP) - total(rank, index, -STEP)) / (2.0 * STEP);
            assert!(
                (gradient[index] - expected).abs() < 1e-5,
                "{name}, rank {rank} of {count}, {index}: {} and {expected}",
                gradient[index]
            );
        }
    }
}

#[test]
fn gradients_are_what_all_losses_change_by() {
    // Different weights, so that a value in the wrong place is noticed.
    let weighted = |comm: &Communicator, output: Tensor| -> Result<Tensor> {
        let count = output.elem_count();
        let weights: Vec<f64> = (0..count).map(|index| 0.3 + 0.01 * (index + 5 * comm.rank()) as f64).collect();
        (output.flatten_all()?.sqr()? * Tensor::from_vec(weights, count, &Device::Cpu)?)?.sum_all()
    };
    for count in [1, 2, 3] {
        against_differences(count, "all_reduce sum", |comm, x| weighted(comm, all_reduce(comm, x, ReduceOp::Sum)?));
        against_differences(count, "all_reduce avg", |comm, x| weighted(comm, all_reduce(comm, x, ReduceOp::Avg)?));
        against_differences(count, "all_gather", |comm, x| weighted(comm, all_gather(comm, x, 0)?));
        against_differences(count, "all_gather along 1", |comm, x| weighted(comm, all_gather(comm, x, 1)?));
        against_differences(count, "reduce_scatter sum", |comm, x| weighted(comm, reduce_scatter(comm, x, 0, ReduceOp::Sum)?));
        against_differences(count, "reduce_scatter avg", |comm, x| weighted(comm, reduce_scatter(comm, x, 0, ReduceOp::Avg)?));
        against_differences(count, "broadcast", |comm, x| weighted(comm, broadcast(comm, x, count - 1)?));
        against_differences(count, "all_to_all", |comm, x| weighted(comm, all_to_all(comm, x, 0)?));
    }
}

#[test]
fn a_split_part_of_a_model_has_the_gradient_of_the_whole() {
    let whole = |x: &Tensor| -> Result<Tensor> { x.sqr()?.tanh()?.mean_all() };
    let x: Vec<f64> = (0..12).map(|index| 0.05 * index as f64).collect();
    let expected = {
        let x = Var::from_vec(x.clone(), (6, 2), &Device::Cpu).unwrap();
        whole(x.as_tensor()).unwrap().backward().unwrap().get(&x).unwrap().to_vec2::<f64>().unwrap()
    };
    for count in [1, 2, 3] {
        let by_parts = ranks(count, |comm| {
            let x = Var::from_vec(x.clone(), (6, 2), &Device::Cpu)?;
            let part = scatter_to_ranks(comm, x.as_tensor(), 0)?.sqr()?.tanh()?;
            let loss = gather_from_ranks(comm, &part, 0)?.mean_all()?;
            loss.backward()?.get(&x).unwrap().to_vec2::<f64>()
        });
        let by_sums = ranks(count, |comm| {
            let x = Var::from_vec(x.clone(), (6, 2), &Device::Cpu)?;
            let rows = 6 / comm.world_size();
            let part = copy_to_ranks(comm, x.as_tensor())?.narrow(0, comm.rank() * rows, rows)?.sqr()?.tanh()?;
            let loss = (reduce_from_ranks(comm, &part.sum_all()?)? / 12.0)?;
            loss.backward()?.get(&x).unwrap().to_vec2::<f64>()
        });
        for found in by_parts.iter().chain(&by_sums) {
            let difference = found.iter().flatten().zip(expected.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(difference < 1e-12, "{count} ranks: {difference}");
        }
    }
}

#[test]
fn what_cannot_be_done_is_said() {
    let messages = ranks(2, |comm| {
        let x = Var::from_vec(vec![1.0_f32; 6], (3, 2), &Device::Cpu)?;
        let scalar = Tensor::new(1.0_f32, &Device::Cpu)?;
        let largest = all_reduce(comm, x.as_tensor(), ReduceOp::Max)?.sum_all()?;
        let strided = x.as_tensor().t()?;
        Ok([
            reduce_scatter(comm, &x, 0, ReduceOp::Sum).unwrap_err().to_string(),
            all_gather(comm, &x, 2).unwrap_err().to_string(),
            all_gather(comm, &scalar, 0).unwrap_err().to_string(),
            largest.backward().unwrap_err().to_string(),
            all_reduce_in_place(comm, &strided, ReduceOp::Sum).unwrap_err().to_string(),
            broadcast(comm, &x, 5).unwrap_err().to_string(),
            // Six elements can be halved; three rows cannot.
            all_to_all_in_place(comm, &x).unwrap_err().to_string(),
            all_gather_in_place(comm, &scalar).unwrap_err().to_string(),
            reduce_scatter_in_place(comm, &strided, ReduceOp::Sum).unwrap_err().to_string(),
            reduce_scatter(comm, &strided.contiguous()?, 0, ReduceOp::Max)?.sum_all()?.backward().unwrap_err().to_string(),
        ])
    });
    let expected = [
        "cannot be split equally between 2 ranks",
        "no dimension 2",
        "a scalar",
        "has no gradient",
        "contiguous",
        "root 5",
        "all_to_all_in_place: a dimension of length 3 cannot be split equally between 2 ranks",
        "all_gather_in_place: a scalar",
        "contiguous",
        "reduce_scatter has no gradient with this op",
    ];
    assert_eq!(messages[1].len(), expected.len());
    for (message, expected) in messages[1].iter().zip(expected) {
        assert!(message.contains(expected), "{message}");
    }
    let errors = Communicator::run_local(2, |comm| {
        let x = Tensor::zeros(2 + comm.rank(), DType::F32, &Device::Cpu).unwrap();
        Ok(all_reduce(comm, &x, ReduceOp::Sum).unwrap_err().to_string())
    });
    assert!(errors.unwrap().iter().all(|error| error.contains("count 2") && error.contains("count 3")));
}

#[test]
fn tensors_without_elements_and_scalars_pass() {
    let outputs = ranks(3, |comm| {
        let nothing = Tensor::zeros((0, 2), DType::F32, &Device::Cpu)?;
        let one = Tensor::new(comm.rank() as f32, &Device::Cpu)?;
        all_gather_in_place(comm, &nothing)?;
        reduce_scatter_in_place(comm, &nothing, ReduceOp::Sum)?;
        all_to_all_in_place(comm, &nothing)?;
        Ok((all_gather(comm, &nothing, 0)?.elem_count(), all_reduce(comm, &one, ReduceOp::Sum)?.to_scalar::<f32>()?))
    });
    assert_eq!(outputs, [(0, 3.0); 3]);
}
