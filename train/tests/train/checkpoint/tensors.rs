//! Tensors of every type and of odd shapes, cut into random pieces, and a plain copy of the contents of each piece.

use collectives::{Communicator, DType, Element, Result};
use collectives_train::checkpoint::{Checkpoint, Piece, Writer};

use crate::common::oracle::Predict;
use crate::common::random::Random;
use crate::common::typed::{bytes_of, elements_of};

/// A tensor of a test: its name, its type, its shape and all of its bytes.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// Calls a generic function with the type that a [`DType`] names.
macro_rules! with_type {
    ($dtype:expr, $function:ident::<_>($($argument:expr),*)) => {
        match $dtype {
            collectives::DType::F32 => $function::<f32>($($argument),*),
            collectives::DType::F64 => $function::<f64>($($argument),*),
            collectives::DType::F16 => $function::<collectives::f16>($($argument),*),
            collectives::DType::Bf16 => $function::<collectives::bf16>($($argument),*),
            collectives::DType::F8E4M3 => $function::<collectives::F8E4M3>($($argument),*),
            collectives::DType::F8E5M2 => $function::<collectives::F8E5M2>($($argument),*),
            collectives::DType::I8 => $function::<i8>($($argument),*),
            collectives::DType::I16 => $function::<i16>($($argument),*),
            collectives::DType::I32 => $function::<i32>($($argument),*),
            collectives::DType::I64 => $function::<i64>($($argument),*),
            collectives::DType::U8 => $function::<u8>($($argument),*),
            collectives::DType::U16 => $function::<u16>($($argument),*),
            collectives::DType::U32 => $function::<u32>($($argument),*),
            collectives::DType::U64 => $function::<u64>($($argument),*),
            collectives::DType::Bool => $function::<bool>($($argument),*),
            other => panic!("{other} is new"),
        }
    };
}

pub(crate) use with_type;

impl Tensor {
    pub(crate) fn random(random: &mut Random, name: impl Into<String>, dtype: DType, shape: &[usize]) -> Self {
        let mut bytes = random.bytes(shape.iter().product::<usize>() * dtype.size_bytes());
        if dtype == DType::Bool {
            bytes.iter_mut().for_each(|byte| *byte &= 1);
        }
        Self { name: name.into(), dtype, shape: shape.to_vec(), bytes }
    }

    fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the bytes of a piece, by iterating over all indices.
    pub(crate) fn piece(&self, piece: &Piece) -> Vec<u8> {
        let is_in = |element: usize| match piece {
            Piece::Whole => true,
            Piece::Flat(range) => range.contains(&element),
            Piece::Along { dimension, range } => {
                let inner: usize = self.shape[dimension + 1..].iter().product();
                range.contains(&(element / inner % self.shape[*dimension]))
            }
        };
        let size = self.dtype.size_bytes();
        (0..self.len()).filter(|element| is_in(*element)).flat_map(|element| &self.bytes[element * size..][..size]).copied().collect()
    }

    /// Returns the pieces of each rank; together they cover the tensor.
    pub(crate) fn divide(&self, random: &mut Random, ranks: usize) -> Vec<Vec<Piece>> {
        match random.below(4) {
            // Replicated on all ranks, or on some.
            0 => vec![vec![Piece::Whole]; ranks],
            1 => {
                let (first, second) = (random.below(ranks), random.below(ranks));
                (0..ranks).map(|rank| if rank == first || rank == second { vec![Piece::Whole] } else { vec![] }).collect()
            }
            2 if !self.shape.is_empty() => {
                let dimension = random.below(self.shape.len());
                let ranges = cut(random, self.shape[dimension], ranks);
                ranges.into_iter().map(|range| vec![Piece::Along { dimension, range }]).collect()
            }
            // Several flat pieces for each rank, the last rank first.
            _ => {
                let ranges = cut(random, self.len(), 2 * ranks);
                ranges.chunks(2).rev().map(|pair| pair.iter().cloned().map(Piece::Flat).collect()).collect()
            }
        }
    }
}

/// Cuts a range into this many parts, some of which may be empty.
fn cut(random: &mut Random, end: usize, parts: usize) -> Vec<std::ops::Range<usize>> {
    let mut cuts: Vec<usize> = (1..parts).map(|_| random.below(end + 1)).collect();
    cuts.extend([0, end]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

/// Returns a tensor of each type with its own shape, a single number, empty ones, one larger than a single read, and a
/// narrow one.
pub(crate) fn tensors(random: &mut Random) -> Vec<Tensor> {
    let mut tensors: Vec<Tensor> = Vec::new();
    for dtype in DType::ALL {
        let shape: Vec<usize> = (0..1 + random.below(4)).map(|_| 1 + random.below(9)).collect();
        tensors.push(Tensor::random(random, format!("layer.{dtype}"), dtype, &shape));
    }
    let shapes: [(&str, DType, &[usize]); 6] = [
        ("scalar", DType::F64, &[]),
        ("empty", DType::F32, &[0]),
        ("empty rows", DType::I16, &[3, 0, 5]),
        ("odd", DType::Bf16, &[37, 51]),
        ("large", DType::F32, &[701, 403]),
        ("narrow", DType::U8, &[4001, 3]),
    ];
    tensors.extend(shapes.map(|(name, dtype, shape)| Tensor::random(random, name, dtype, shape)));
    tensors
}

/// Saves tensors of which this rank has the given pieces.
pub(crate) fn save(comm: &Communicator, directory: &std::path::Path, step: u64, held: &[(Tensor, Vec<Piece>)]) -> Result<()> {
    fn add<T: Predict>(values: &mut Vec<Box<dyn std::any::Any>>, bytes: &[u8]) {
        values.push(Box::new(elements_of::<T>(bytes)));
    }
    fn hand_in<'a, T: Element>(writer: &mut Writer<'a>, tensor: &Tensor, piece: &Piece, values: &'a dyn std::any::Any) {
        writer.tensor(&tensor.name, &tensor.shape, piece.clone(), values.downcast_ref::<Vec<T>>().unwrap());
    }
    let pieces: Vec<_> = held.iter().flat_map(|(tensor, pieces)| pieces.iter().map(move |piece| (tensor, piece))).collect();
    let mut values = Vec::new();
    for (tensor, piece) in &pieces {
        with_type!(tensor.dtype, add::<_>(&mut values, &tensor.piece(piece)));
    }
    let mut writer = Writer::new(comm, directory);
    for ((tensor, piece), values) in pieces.iter().zip(&values) {
        with_type!(tensor.dtype, hand_in::<_>(&mut writer, tensor, piece, &**values));
    }
    writer.commit(step).map(drop)
}

/// Returns the bytes of a piece in a checkpoint.
pub(crate) fn load(checkpoint: &Checkpoint, tensor: &Tensor, piece: &Piece) -> Result<Vec<u8>> {
    fn typed<T: Predict>(checkpoint: &Checkpoint, tensor: &Tensor, piece: &Piece) -> Result<Vec<u8>> {
        checkpoint.read_vec::<T>(&tensor.name, &tensor.shape, piece.clone()).map(|values| bytes_of(&values))
    }
    with_type!(tensor.dtype, typed::<_>(checkpoint, tensor, piece))
}
