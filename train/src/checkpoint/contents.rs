//! The contents of a checkpoint, independent of where they were read. Pure.

use std::collections::BTreeMap;

use super::piece::{Division, Extent, Piece, in_order};
use collectives::DType;

/// All contents.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// `None` for other programs' files.
    pub(super) step: Option<u64>,
    /// The number of ranks that wrote it.
    pub(super) world_size: Option<usize>,
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) files: Vec<FileEntry>,
    pub(super) tensors: BTreeMap<String, Tensor>,
}

/// One file.
#[derive(Debug)]
pub(super) struct FileEntry {
    /// Its name in the checkpoint's folder.
    pub(super) name: String,
    /// Its length in bytes, and the SHA-256 of its header, if an index gives them.
    pub(super) expected: Option<(u64, [u8; 32])>,
}

/// One tensor.
#[derive(Debug)]
pub(super) struct Tensor {
    /// Its type, or the name of a type that `collectives` does not have.
    pub(super) dtype: Result<DType, String>,
    pub(super) shape: Vec<usize>,
    /// All of its elements, each once, in order.
    pub(super) extents: Vec<Extent>,
    /// The place of each extent.
    pub(super) places: Vec<Place>,
}

/// The place of a part of a tensor.
#[derive(Debug)]
pub(super) struct Place {
    /// The number of its file.
    pub(super) file: usize,
    /// Its name in that file.
    pub(super) key: String,
    /// Its shape in that file.
    pub(super) shape: Vec<usize>,
}

impl Tensor {
    /// Makes a tensor from parts, each with the number of its file and its name there. The error says what is wrong
    /// with the parts.
    pub(super) fn of_parts(dtype: Result<DType, String>, shape: Vec<usize>, parts: Vec<(Piece, usize, String)>) -> Result<Self, String> {
        let total = super::piece::element_count(&shape)?;
        let mut held = Vec::new();
        for (piece, file, key) in parts {
            let extent = piece.extent(&shape)?;
            if extent.len() > 0 {
                let place = Place { file, key, shape: piece.shape_of(&shape) };
                held.push((extent, place));
            }
        }
        let extents: Vec<&Extent> = held.iter().map(|(extent, _)| extent).collect();
        in_order(&extents, total).map_err(|division| {
            let key = |index: usize| &held[index].1.key;
            match division {
                Division::Overlap(first, second) => format!("the parts {:?} and {:?} overlap", key(first), key(second)),
                Division::Dimensions(first, second) => {
                    format!("the parts {:?} and {:?} are ranges along different dimensions", key(first), key(second))
                }
                Division::Gap(what) => format!("{what} in no part"),
            }
        })?;
        held.sort_by_key(|(extent, _)| extent.start());
        let (extents, places) = held.into_iter().unzip();
        Ok(Self { dtype, shape, extents, places })
    }
}
