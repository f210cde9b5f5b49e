//! Collectives on tensors against plain arithmetic.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use burn::tensor::{DType, Device, Int, Tensor, TensorData, kind::Basic};
use collectives::{Communicator, ReduceOp};
use collectives_burn::{Error, all_gather, all_reduce, all_to_all, broadcast, reduce_scatter};

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
const INTS: [DType; 8] = [DType::I64, DType::I32, DType::I16, DType::I8, DType::U64, DType::U32, DType::U16, DType::U8];
const ROWS: usize = 12;
const COLUMNS: usize = 2;

/// Runs a program on `count` ranks.
fn ranks<R: Send>(count: usize, program: impl Fn(&Communicator) -> R + Sync) -> Vec<R> {
    Communicator::run_local(count, |comm| Ok(program(comm))).unwrap()
}

/// An element of rank `rank`'s `ROWS` × `COLUMNS` tensor: a small whole number, which all types can represent.
fn element(rank: usize, index: usize) -> i64 {
    ((rank * 3 + index * 5) % 4) as i64
}

fn values(rank: usize) -> Vec<i64> {
    (0..ROWS * COLUMNS).map(|index| element(rank, index)).collect()
}

fn tensor<K: Basic>(rank: usize, dtype: DType) -> Tensor<2, K> {
    let data = TensorData::new(values(rank), [ROWS, COLUMNS]).try_cast(dtype).unwrap();
    Tensor::from_data(data, (&Device::default(), dtype))
}

/// The type, the shape, and the values.
type Read = (DType, [usize; 2], Vec<i64>);

fn read<K: Basic>(tensor: Tensor<2, K>) -> Read {
    let (dtype, dims) = (tensor.dtype(), tensor.dims());
    (dtype, dims, tensor.into_data().iter::<i64>().collect())
}

/// Returns the results of the five calls for a tensor, along the first dimension.
fn five<K: Basic>(comm: &Communicator, dtype: DType) -> [Read; 5] {
    let own = || tensor::<K>(comm.rank(), dtype);
    let outputs = [
        all_reduce(comm, own(), ReduceOp::Sum),
        broadcast(comm, own(), comm.world_size() - 1),
        all_gather(comm, own(), 0),
        reduce_scatter(comm, own(), 0, ReduceOp::Max),
        all_to_all(comm, own(), 0),
    ];
    outputs.map(|output| read(output.unwrap()))
}

fn expected(rank: usize, count: usize, dtype: DType) -> [Read; 5] {
    let all: Vec<Vec<i64>> = (0..count).map(values).collect();
    let block = ROWS * COLUMNS / count;
    let fold = |start: i64, with: fn(i64, i64) -> i64| -> Vec<i64> {
        (0..ROWS * COLUMNS).map(|index| all.iter().fold(start, |sum, values| with(sum, values[index]))).collect()
    };
    let mine = rank * block..(rank + 1) * block;
    [
        (dtype, [ROWS, COLUMNS], fold(0, |one, other| one + other)),
        (dtype, [ROWS, COLUMNS], all[count - 1].clone()),
        (dtype, [ROWS * count, COLUMNS], all.concat()),
        (dtype, [ROWS / count, COLUMNS], fold(0, i64::max)[mine.clone()].to_vec()),
        (dtype, [ROWS, COLUMNS], all.iter().flat_map(|values| values[mine.clone()].to_vec()).collect()),
    ]
}

#[test]
fn every_type_goes_through_every_call() {
    for count in 1..=4 {
        for dtype in FLOATS {
            let found = ranks(count, |comm| five::<burn::tensor::Float>(comm, dtype));
            found
                .into_iter()
                .enumerate()
                .for_each(|(rank, found)| assert_eq!(found, expected(rank, count, dtype), "rank {rank} of {count}"));
        }
        for dtype in INTS {
            let found = ranks(count, |comm| five::<Int>(comm, dtype));
            found
                .into_iter()
                .enumerate()
                .for_each(|(rank, found)| assert_eq!(found, expected(rank, count, dtype), "rank {rank} of {count}"));
        }
    }
}

#[test]
fn other_dimensions_are_split_and_joined_as_the_first_one() {
    let turned = |tensor: Tensor<2, Int>| tensor.swap_dims(0, 1);
    for count in 1..=4 {
        let found = ranks(count, |comm| {
            let own = || tensor::<Int>(comm.rank(), DType::I32);
            let along_columns = [
                all_gather(comm, turned(own()), 1),
                reduce_scatter(comm, turned(own()), 1, ReduceOp::Sum),
                all_to_all(comm, turned(own()), 1),
            ];
            let along_rows = [all_gather(comm, own(), 0), reduce_scatter(comm, own(), 0, ReduceOp::Sum), all_to_all(comm, own(), 0)];
            (along_columns.map(|output| read(turned(output.unwrap()))), along_rows.map(|output| read(output.unwrap())))
        });
        found.into_iter().for_each(|(columns, rows)| assert_eq!(columns, rows));
    }
}

#[test]
fn tensors_without_elements_and_of_one_go_through() {
    let found = ranks(3, |comm| {
        let empty = Tensor::<2>::zeros([0, 4], &Device::default());
        let one = Tensor::<1>::from_data([comm.rank() as f32], &Device::default());
        let sum = all_reduce(comm, one.clone(), ReduceOp::Avg).unwrap().into_data().try_into_vec::<f32>().unwrap();
        (all_gather(comm, empty, 1).unwrap().dims(), all_gather(comm, one, 0).unwrap().dims(), sum)
    });
    assert!(found.into_iter().all(|found| found == ([0, 12], [3], vec![1.0])));
}

#[test]
fn what_cannot_be_is_an_error_and_the_next_call_works() {
    let found = ranks(2, |comm| {
        let device = Device::default();
        let odd = || Tensor::<2>::ones([3, 5], &device);
        let errors = [
            reduce_scatter(comm, odd(), 0, ReduceOp::Sum).unwrap_err(),
            all_to_all(comm, odd(), 1).unwrap_err(),
            all_gather(comm, odd(), 2).unwrap_err(),
            all_reduce(comm, odd().greater_elem(0), ReduceOp::Sum).unwrap_err(),
            broadcast(comm, odd(), 2).unwrap_err(),
        ];
        let next = all_reduce(comm, odd(), ReduceOp::Sum).unwrap().into_data().try_into_vec::<f32>().unwrap();
        let different = all_reduce(comm, Tensor::<2>::ones([3, 5 + comm.rank()], &device), ReduceOp::Sum).unwrap_err();
        (errors, next, different.to_string())
    });
    for (errors, next, different) in found {
        let words = errors.each_ref().map(ToString::to_string);
        assert!(words[0].contains("3 cannot be split equally between 2 ranks") && words[1].contains("5 cannot be split"), "{words:?}");
        assert!(words[2].contains("[3, 5] has no dimension 2") && matches!(errors[3], Error::Type { .. }), "{words:?}");
        assert!(matches!(errors[4], Error::Collective(_)), "{words:?}");
        assert_eq!(next, [2.0; 15]);
        assert!(different.contains("count 15") && different.contains("count 18"), "{different}");
    }
}

#[test]
fn a_lost_communicator_is_an_error() {
    let errors = ranks(2, |comm| {
        comm.abort();
        all_reduce(comm, Tensor::<1>::ones([4], &Device::default()), ReduceOp::Sum).unwrap_err()
    });
    assert!(errors.iter().all(|error| matches!(error, Error::Collective(_))), "{errors:?}");
}
