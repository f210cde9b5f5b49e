//! Properties that hold for any files: headers and indexes are refused, or are consistent.

use std::collections::BTreeMap;

use super::contents::Contents;
use super::foreign::WeightMap;
use super::header::{self, LENGTH_BYTES};
use super::index;
use super::piece::{Piece, runs};
use super::plan::{Declaration, Declared, plan};
use collectives::DType;

/// The most elements of a tensor whose parts are walked through.
const WALKED: usize = 1 << 12;

/// Parses arbitrary bytes as a safetensors file. If they are accepted, each byte of the file's data belongs to exactly
/// one tensor.
pub fn safetensors_headers(data: &[u8]) {
    let Some(first) = data.first_chunk::<LENGTH_BYTES>() else { return };
    let Ok(length) = header::length(*first, data.len() as u64) else { return };
    let (json, rest) = data[LENGTH_BYTES..].split_at(length);
    let Ok(header) = header::parse(json, rest.len() as u64) else { return };
    let bytes: u64 = header.entries.values().map(|entry| entry.bytes.end - entry.bytes.start).sum();
    assert_eq!(bytes, rest.len() as u64);
    let known = header.entries.iter().filter_map(|(name, entry)| Some((name.clone(), entry.dtype.clone().ok()?, entry.shape.clone())));
    let known: Vec<_> = known.collect();
    let data_bytes: u64 = known.iter().map(|(name, ..)| header.entries[name].bytes.end - header.entries[name].bytes.start).sum();
    let head = header::encode(&known, &header.metadata).expect("what was understood can be written");
    let again = header::parse(&head[LENGTH_BYTES..], data_bytes).expect("what was written is understood");
    assert_eq!(again.metadata, header.metadata);
    for (name, dtype, shape) in known {
        assert_eq!((&again.entries[&name].dtype, &again.entries[&name].shape), (&Ok(dtype), &shape));
    }
}

/// Parses arbitrary bytes as our index, as an index of another library, and as a rank's declaration. If they are
/// accepted, they name only files in the folder, and contain every element of every tensor once.
pub fn checkpoint_indexes(data: &[u8]) {
    if let Ok(contents) = index::parse(data) {
        check(&contents);
    }
    if let Ok(map) = WeightMap::parse(data) {
        assert!(map.files().iter().all(|file| !file.contains('/') && file != ".."));
    }
    if let Ok(declaration) = serde_json::from_slice::<Declaration>(data)
        && let Ok(plan) = plan(&[declaration], 3)
    {
        let json = plan.index.encode().expect("what was planned can be written");
        check(&index::parse(&json).expect("what was written is understood"));
    }
}

fn check(contents: &Contents) {
    assert!(contents.files.iter().all(|file| !file.name.contains('/') && file.name != ".."));
    for tensor in contents.tensors.values() {
        let extent = Piece::Whole.extent(&tensor.shape).expect("its shape was looked at");
        assert!(tensor.places.iter().all(|place| place.file < contents.files.len()));
        if extent.len() <= WALKED {
            let mut reached = 0;
            for run in runs(&extent, &tensor.extents, usize::MAX) {
                assert_eq!(run.to, reached);
                assert!(run.from + run.len <= tensor.extents[run.source].len());
                reached += run.len;
            }
            assert_eq!(reached, extent.len());
        }
    }
}

/// Returns initial inputs: valid files.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let columns = |range| Piece::Along { dimension: 1, range };
    let pieces = [
        ("weight", columns(0..3)),
        ("bias", Piece::Whole),
        ("state", Piece::Flat(0..20)),
        ("weight", columns(3..4)),
        ("state", Piece::Flat(20..24)),
    ];
    let tensors = pieces.into_iter().filter_map(|(name, piece)| Declared::new(name, DType::Bf16, &[6, 4], piece).ok());
    let declaration = Declaration { metadata: BTreeMap::from([("epoch".to_owned(), "1".to_owned())]), tensors: tensors.collect() };
    let mut seeds = Vec::new();
    seeds.extend(serde_json::to_vec(&declaration).ok().map(|json| ("checkpoint_indexes", json)));
    let tensors = [("a".to_owned(), DType::F32, vec![2, 3]), ("b#0-2".to_owned(), DType::Bool, vec![2])];
    if let Ok(mut file) = header::encode(&tensors, &declaration.metadata) {
        file.extend([0; 26]);
        seeds.push(("safetensors_headers", file));
    }
    let planned = plan(&[declaration], 42).and_then(|plan| plan.index.encode());
    seeds.extend(planned.ok().map(|json| ("checkpoint_indexes", json)));
    let map = br#"{"metadata":{"total_size":8},"weight_map":{"a":"model-00001-of-00001.safetensors"}}"#;
    seeds.push(("checkpoint_indexes", map.to_vec()));
    seeds
}
