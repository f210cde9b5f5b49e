//! What a checkpoint holds, wherever that was read. Pure.

use std::collections::BTreeMap;

use super::piece::{Division, Extent, Piece, in_order};
use collectives::DType;

/// All of it.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// `None` for files of others.
    pub(super) step: Option<u64>,
    /// How many ranks wrote it.
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
    /// How many bytes it has, and the SHA-256 of its head, where an index says so.
    pub(super) expected: Option<(u64, [u8; 32])>,
}

/// One tensor.
#[derive(Debug)]
pub(super) struct Tensor {
    /// Its type; or the name of one that is no element type here.
    pub(super) dtype: Result<DType, String>,
    pub(super) shape: Vec<usize>,
    /// All of its elements, each once, in order.
    pub(super) extents: Vec<Extent>,
    /// Where each of these lies.
    pub(super) places: Vec<Place>,
}

/// Where a part of a tensor lies.
#[derive(Debug)]
pub(super) struct Place {
    /// The number of its file.
    pub(super) file: usize,
    /// Its name there.
    pub(super) key: String,
    /// Its shape there.
    pub(super) shape: Vec<usize>,
}

impl Tensor {
    /// A tensor of parts, each with the number of its file and its name there; or what is wrong with them.
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
                Division::Overlap(first, second) => format!("its parts {:?} and {:?} overlap", key(first), key(second)),
                Division::Dimensions(first, second) => {
                    format!("its parts {:?} and {:?} are ranges of different dimensions", key(first), key(second))
                }
                Division::Gap(what) => format!("{what} in no part"),
            }
        })?;
        held.sort_by_key(|(extent, _)| extent.start());
        let (extents, places) = held.into_iter().unzip();
        Ok(Self { dtype, shape, extents, places })
    }
}
