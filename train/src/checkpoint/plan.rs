//! Decides on rank 0 which rank writes which parts, from the parts that all ranks hold. Pure.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::header;
use super::index::{Index, WrittenFile, WrittenPiece, WrittenTensor, digits};
use super::json::{self, MOST_DIMENSIONS};
use super::piece::{Division, Extent, Piece, element_count, in_order};
use collectives::DType;

/// The metadata and parts of a rank, in the form in which they are sent to rank 0.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Declaration {
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) tensors: Vec<Declared>,
}

/// A part of a tensor that a rank holds.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Declared {
    pub(crate) name: String,
    /// The type's name in the files.
    pub(crate) dtype: String,
    #[serde(deserialize_with = "json::shape")]
    pub(crate) shape: Vec<usize>,
    pub(crate) piece: Piece,
}

impl Declared {
    /// Declares a rank's piece of a tensor. Pieces without elements have a single form, and so do pieces with all
    /// elements.
    pub(crate) fn new(name: &str, dtype: DType, shape: &[usize], piece: Piece) -> Result<Self, String> {
        if name.is_empty() || name.contains('#') || name == header::METADATA {
            return Err("a name must not be empty, contain # or be __metadata__".to_owned());
        }
        if shape.len() > MOST_DIMENSIONS {
            return Err(format!("the tensor has {} dimensions; the limit is {MOST_DIMENSIONS}", shape.len()));
        }
        let (count, total) = (piece.extent(shape)?.len(), element_count(shape)?);
        let piece = match count {
            _ if count == total => Piece::Whole,
            0 => Piece::Flat(0..0),
            _ => piece,
        };
        Ok(Self { name: name.to_owned(), dtype: header::name(dtype).to_owned(), shape: shape.to_vec(), piece })
    }

    fn bytes(&self) -> Result<u64, String> {
        Ok(self.piece.extent(&self.shape)?.len() as u64 * element_bytes(&self.dtype)? as u64)
    }
}

/// Returns the size of an element of the type with this name.
pub(crate) fn element_bytes(name: &str) -> Result<usize, String> {
    header::dtype(name).map(DType::size_bytes).map_err(|name| format!("there is no element type {name:?}"))
}

/// The parts that each rank writes, and the index.
#[derive(Debug)]
pub(super) struct Plan {
    /// For each rank, the numbers of the parts that it writes, in the order of its file.
    pub(super) written: Vec<Vec<usize>>,
    pub(super) index: Index,
}

/// Returns the name of a rank's file.
pub(super) fn file_name(rank: usize, world_size: usize) -> String {
    format!("rank-{rank:05}-of-{world_size:05}.safetensors")
}

/// Returns the header of a rank's file.
pub(super) fn head(declaration: &Declaration, written: &[usize], step: u64) -> Result<Vec<u8>, String> {
    let entry = |number: &usize| {
        let declared = declaration.tensors.get(*number).ok_or_else(|| format!("there is no part number {number}"))?;
        let dtype = header::dtype(&declared.dtype).map_err(|name| format!("there is no element type {name:?}"))?;
        Ok((declared.piece.key(&declared.name), dtype, declared.piece.shape_of(&declared.shape)))
    };
    let tensors: Vec<_> = written.iter().map(entry).collect::<Result<_, String>>()?;
    header::encode(&tensors, &BTreeMap::from([("step".to_owned(), step.to_string())]))
}

/// The ranks that hold a tensor, each with the number of its part.
pub(crate) type Holders = Vec<(usize, usize)>;

/// Divides the work. The error says why the parts that ranks hold are not a checkpoint.
pub(super) fn plan(all: &[Declaration], step: u64) -> Result<Plan, String> {
    let mut parts: Vec<Holders> = Vec::new();
    for (name, holders) in by_name(all) {
        let declared = |holder: &(usize, usize)| &all[holder.0].tensors[holder.1];
        parts.extend(distinct(declared, &holders).map_err(|reason| format!("tensor {name:?}: {reason}"))?);
    }
    let written = shared_out(all, parts)?;
    let index = index(all, &written, step)?;
    Ok(Plan { written, index })
}

/// Returns every tensor, with the ranks that hold parts of it.
fn by_name(all: &[Declaration]) -> BTreeMap<&str, Holders> {
    let mut tensors: BTreeMap<&str, Holders> = BTreeMap::new();
    for (rank, declaration) in all.iter().enumerate() {
        for (number, declared) in declaration.tensors.iter().enumerate() {
            tensors.entry(&declared.name).or_default().push((rank, number));
        }
    }
    tensors
}

/// Returns the parts of one tensor in order, each with all ranks that hold it. `declared` returns the declaration of a
/// holder. Together the parts must be the whole tensor.
pub(crate) fn distinct<'a>(declared: impl Fn(&(usize, usize)) -> &'a Declared, holders: &Holders) -> Result<Vec<Holders>, String> {
    let Some(first) = holders.first() else { return Ok(Vec::new()) };
    let (dtype, shape) = (&declared(first).dtype, &declared(first).shape);
    if let Some(other) = holders.iter().find(|other| (&declared(other).dtype, &declared(other).shape) != (dtype, shape)) {
        let (rank, theirs) = (other.0, declared(other));
        return Err(format!("rank {} has {dtype}{shape:?}, but rank {rank} has {}{:?}", first.0, theirs.dtype, theirs.shape));
    }
    let total = element_count(shape)?;
    let mut parts: BTreeMap<Extent, Holders> = BTreeMap::new();
    for holder in holders {
        let extent = declared(holder).piece.extent(shape)?;
        if extent.len() > 0 {
            parts.entry(extent).or_default().push(*holder);
        }
    }
    if total == 0 {
        return Ok(vec![holders.clone()]);
    }
    // Holders are in the order of ranks.
    if let Some(twice) = parts.values().flat_map(|holders| holders.windows(2)).find(|pair| pair[0].0 == pair[1].0) {
        return Err(format!("rank {} has the part {} twice", twice[0].0, declared(&twice[0]).piece));
    }
    match in_order(&parts.keys().collect::<Vec<_>>(), total) {
        Ok(_) => Ok(parts.into_values().collect()),
        Err(division) => {
            let first = parts.values().filter_map(|holders| holders.first());
            let said: Vec<String> = first.map(|holder| format!("rank {} has {}", holder.0, declared(holder).piece)).collect();
            Err(in_words(division, &said))
        }
    }
}

/// Describes what is wrong with parts. `said` names each part and the rank that holds it.
fn in_words(division: Division, said: &[String]) -> String {
    match division {
        Division::Overlap(first, second) => format!("the parts overlap: {}, {}", said[first], said[second]),
        Division::Dimensions(first, second) => {
            format!("the parts are ranges along different dimensions: {}, {}", said[first], said[second])
        }
        Division::Gap(what) => format!("{what} held by no rank"),
    }
}

/// Assigns each part to one of the ranks that hold it, so that the bytes are spread as evenly as possible: the largest
/// part first, to the rank with the fewest bytes.
fn shared_out(all: &[Declaration], parts: Vec<Holders>) -> Result<Vec<Vec<usize>>, String> {
    let bytes = |(rank, number): (usize, usize)| all[rank].tensors[number].bytes();
    let mut sized = Vec::new();
    for holders in parts {
        let Some(first) = holders.first() else { continue };
        sized.push((bytes(*first)?, holders));
    }
    sized.sort_by_key(|(bytes, holders)| (holders.len() > 1, Reverse(*bytes)));
    let mut loads = vec![0_u64; all.len()];
    let mut written: Vec<Vec<usize>> = vec![Vec::new(); all.len()];
    for (bytes, holders) in sized {
        let Some((rank, number)) = holders.into_iter().min_by_key(|(rank, _)| loads[*rank]) else { continue };
        loads[rank] += bytes;
        written[rank].push(number);
    }
    for (declaration, numbers) in all.iter().zip(&mut written) {
        // Larger elements first, so that each tensor's offset is a multiple of its elements' size.
        let size = |number: &usize| element_bytes(&declaration.tensors[*number].dtype).unwrap_or_default();
        numbers.sort_by_key(|number| (Reverse(size(number)), *number));
    }
    Ok(written)
}

/// Returns the index of the parts that are written.
fn index(all: &[Declaration], written: &[Vec<usize>], step: u64) -> Result<Index, String> {
    let mut index = Index::new(step, all.len(), merged(all)?);
    for (rank, (declaration, numbers)) in all.iter().zip(written).enumerate() {
        if numbers.is_empty() {
            continue;
        }
        let head = head(declaration, numbers, step)?;
        let data: u64 = numbers.iter().map(|number| declaration.tensors[*number].bytes()).sum::<Result<_, _>>()?;
        let (bytes, header_sha256) = (head.len() as u64 + data, digits(&Sha256::digest(&head)));
        let file = index.add_file(WrittenFile { name: file_name(rank, all.len()), bytes, header_sha256 });
        for number in numbers {
            let Declared { name, dtype, shape, piece } = &declaration.tensors[*number];
            let make = || WrittenTensor { dtype: dtype.clone(), shape: shape.clone(), pieces: Vec::new() };
            index.tensor(name, make).pieces.push(WrittenPiece { file, key: piece.key(name), piece: piece.clone() });
        }
    }
    Ok(index)
}

/// Merges the metadata of all ranks.
fn merged(all: &[Declaration]) -> Result<BTreeMap<String, String>, String> {
    let mut merged: BTreeMap<String, (usize, String)> = BTreeMap::new();
    for (rank, declaration) in all.iter().enumerate() {
        for (key, value) in &declaration.metadata {
            let (first, known) = merged.entry(key.clone()).or_insert_with(|| (rank, value.clone()));
            if known != value {
                return Err(format!("metadata {key:?}: rank {first} has {known:?}, but rank {rank} has {value:?}"));
            }
        }
    }
    Ok(merged.into_iter().map(|(key, (_, value))| (key, value)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(name: &str, shape: &[usize], piece: Piece) -> Declared {
        Declared::new(name, DType::F32, shape, piece).unwrap()
    }

    fn ranks(tensors: Vec<Vec<Declared>>) -> Vec<Declaration> {
        tensors.into_iter().map(|tensors| Declaration { tensors, metadata: BTreeMap::new() }).collect()
    }

    #[test]
    fn what_several_ranks_hold_is_written_once_and_bytes_are_balanced() {
        let replicated = || (1..=8).map(|side| held(&format!("t{side}"), &[side], Piece::Whole)).collect::<Vec<_>>();
        let plan = plan(&ranks(vec![replicated(), replicated(), replicated()]), 7).unwrap();
        let mut all: Vec<usize> = plan.written.concat();
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3, 4, 5, 6, 7]);
        let loads: Vec<usize> = plan.written.iter().map(|numbers| numbers.iter().map(|number| number + 1).sum()).collect();
        assert!(loads.iter().all(|load| (11..=13).contains(load)), "{loads:?}");
    }

    #[test]
    fn parts_that_only_some_ranks_have_are_written_by_one_of_them() {
        // Each half of the columns is on two ranks.
        let half = |rank: usize| vec![held("w", &[4, 6], Piece::part(1, 6, rank % 2, 2))];
        let plan = plan(&ranks((0..4).map(half).collect()), 7).unwrap();
        assert_eq!(plan.written.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1, 0, 0]);
        assert_eq!(
            plan.index.files().iter().map(|file| &*file.name).collect::<Vec<_>>(),
            ["rank-00000-of-00004.safetensors", "rank-00001-of-00004.safetensors"]
        );
    }

    #[test]
    fn what_is_no_checkpoint_is_told_with_the_tensor_and_the_ranks() {
        let flat = |range| held("w", &[10], Piece::Flat(range));
        let cases = [
            (vec![vec![flat(0..5)], vec![flat(4..10)]], "the parts overlap: rank 0 has (elements 0..5 of the flattened tensor), rank 1"),
            (vec![vec![flat(0..5)], vec![flat(6..10)]], "elements 5..6 of the flattened tensor are held by no rank"),
            (vec![vec![flat(0..0)], vec![]], "its 10 elements are held by no rank"),
            (vec![vec![flat(0..5)], vec![held("w", &[5, 2], Piece::Whole)]], "rank 0 has F32[10], but rank 1 has F32[5, 2]"),
            (vec![vec![], vec![held("w", &[10], Piece::Whole), held("w", &[10], Piece::Whole)]], "rank 1 has the part (all of it) twice"),
        ];
        for (tensors, words) in cases {
            let error = plan(&ranks(tensors), 7).unwrap_err();
            assert!(error.starts_with("tensor \"w\": ") && error.contains(words), "{error}");
        }
        let mut contradicting = ranks(vec![vec![], vec![]]);
        contradicting[0].metadata.insert("epoch".to_owned(), "1".to_owned());
        contradicting[1].metadata.insert("epoch".to_owned(), "2".to_owned());
        assert!(plan(&contradicting, 7).unwrap_err().contains("metadata \"epoch\": rank 0 has \"1\", but rank 1 has \"2\""));
    }
}
