//! The index of a checkpoint: the parts of each tensor, and their files. JSON. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};

use super::contents::{Contents, FileEntry, Tensor};
use super::header;
use super::json;
use super::piece::Piece;

/// The index in a checkpoint's folder.
pub(super) const NAME: &str = "checkpoint.json";
/// The most bytes of an index.
pub(super) const LONGEST: u64 = 256 << 20;
/// The format that this version writes and reads.
const FORMAT: &str = "collectives checkpoint 1";

/// The index as it is written.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    format: String,
    step: u64,
    world_size: usize,
    #[serde(deserialize_with = "json::unique")]
    metadata: BTreeMap<String, String>,
    files: Vec<WrittenFile>,
    #[serde(deserialize_with = "json::unique")]
    tensors: BTreeMap<String, WrittenTensor>,
}

/// A file as it is written.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WrittenFile {
    pub(super) name: String,
    pub(super) bytes: u64,
    /// SHA-256 of its header, including the length: 64 digits.
    pub(super) header_sha256: String,
}

/// A tensor as it is written.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WrittenTensor {
    pub(super) dtype: String,
    #[serde(deserialize_with = "json::shape")]
    pub(super) shape: Vec<usize>,
    pub(super) pieces: Vec<WrittenPiece>,
}

/// A part of a tensor as it is written.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WrittenPiece {
    /// The number of its file.
    pub(super) file: usize,
    /// Its name in that file.
    pub(super) key: String,
    pub(super) piece: Piece,
}

impl Index {
    /// Creates an index without files and tensors.
    pub(super) fn new(step: u64, world_size: usize, metadata: BTreeMap<String, String>) -> Self {
        Self { format: FORMAT.to_owned(), step, world_size, metadata, files: Vec::new(), tensors: BTreeMap::new() }
    }

    /// Adds a file and returns its number.
    pub(super) fn add_file(&mut self, file: WrittenFile) -> usize {
        self.files.push(file);
        self.files.len() - 1
    }

    /// Returns the tensor of this name, to which parts are added.
    pub(super) fn tensor(&mut self, name: &str, make: impl FnOnce() -> WrittenTensor) -> &mut WrittenTensor {
        self.tensors.entry(name.to_owned()).or_insert_with(make)
    }

    /// Returns the files, in the order of their numbers.
    pub(super) fn files(&self) -> &[WrittenFile] {
        &self.files
    }

    /// Returns the bytes of the index.
    pub(super) fn encode(&self) -> Result<Vec<u8>, String> {
        let json = serde_json::to_vec_pretty(self).map_err(|error| format!("the index cannot be written: {error}"))?;
        if json.len() as u64 > LONGEST {
            return Err(format!("the index would have {} bytes; the limit is {LONGEST}", json.len()));
        }
        Ok(json)
    }
}

/// Reads an index.
pub(super) fn parse(json: &[u8]) -> Result<Contents, String> {
    #[derive(Deserialize)]
    struct Version {
        format: String,
    }
    let failed = |error: serde_json::Error| format!("the file is not a valid index: {error}");
    let Version { format } = serde_json::from_slice(json).map_err(failed)?;
    if format != FORMAT {
        return Err(format!("the index has the format {format:?}, but this version reads {FORMAT:?}"));
    }
    let Index { step, world_size, metadata, files, tensors, .. } = serde_json::from_slice(json).map_err(failed)?;
    let mut keys = BTreeSet::new();
    if let Some(twice) = tensors.values().flat_map(|tensor| &tensor.pieces).find(|piece| !keys.insert((piece.file, &piece.key))) {
        return Err(format!("part {:?} of file number {} (from 0) is listed twice", twice.key, twice.file));
    }
    let count = files.len();
    let files = files.into_iter().map(file).collect::<Result<_, _>>()?;
    let tensors = tensors.into_iter().map(|(name, written)| match tensor(written, count) {
        Ok(tensor) => Ok((name, tensor)),
        Err(reason) => Err(format!("tensor {name:?}: {reason}")),
    });
    Ok(Contents { step: Some(step), world_size: Some(world_size), metadata, files, tensors: tensors.collect::<Result<_, _>>()? })
}

fn file(written: WrittenFile) -> Result<FileEntry, String> {
    let WrittenFile { name, bytes, header_sha256 } = written;
    check_name(&name)?;
    let digest = digest(&header_sha256).ok_or_else(|| format!("file {name:?}: {header_sha256:?} is not a SHA-256"))?;
    Ok(FileEntry { name, expected: Some((bytes, digest)) })
}

fn tensor(written: WrittenTensor, files: usize) -> Result<Tensor, String> {
    let dtype = header::dtype(&written.dtype).map_err(|name| format!("the element type {name:?} is not known"))?;
    if let Some(piece) = written.pieces.iter().find(|piece| piece.file >= files) {
        return Err(format!("part {:?} is in file number {} (from 0), but the index lists {files} files", piece.key, piece.file));
    }
    let parts = written.pieces.into_iter().map(|WrittenPiece { file, key, piece }| (piece, file, key)).collect();
    Tensor::of_parts(Ok(dtype), written.shape, parts)
}

/// Refuses names that lead out of the checkpoint's folder.
pub(super) fn check_name(name: &str) -> Result<(), String> {
    let mut parts = Path::new(name).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(only)), None) if only == name => Ok(()),
        _ => Err(format!("{name:?} is not the name of a file in the checkpoint's folder")),
    }
}

/// Converts 64 digits to bytes.
fn digest(text: &str) -> Option<[u8; 32]> {
    let digits: Vec<u8> = text.chars().map(|digit| digit.to_digit(16).map(|digit| digit as u8)).collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
    bytes.try_into().ok().filter(|_| digits.len() == 64)
}

/// Converts bytes to digits.
pub(super) fn digits(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
