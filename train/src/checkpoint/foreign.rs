//! Safetensors files of others: one, or several with an index of names (`model.safetensors.index.json`). Pure.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::contents::{Contents, FileEntry, Tensor};
use super::header::Header;
use super::index::check_name;
use super::json;
use super::piece::Piece;

/// What such files are called.
pub(super) const FILE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// How an index's name ends.
pub(super) const INDEX_ENDING: &str = ".index.json";

/// Which file each tensor lies in.
#[derive(Debug, Deserialize)]
pub(super) struct WeightMap {
    #[serde(default, deserialize_with = "json::unique")]
    metadata: BTreeMap<String, serde_json::Value>,
    #[serde(deserialize_with = "json::unique")]
    weight_map: BTreeMap<String, String>,
}

impl WeightMap {
    /// Reads an index.
    pub(super) fn parse(json: &[u8]) -> Result<Self, String> {
        let map: Self = serde_json::from_slice(json).map_err(|error| format!("it is not what an index should be: {error}"))?;
        map.weight_map.values().try_for_each(|file| check_name(file))?;
        Ok(map)
    }

    /// The files, each once, in the order of their names.
    pub(super) fn files(&self) -> Vec<String> {
        let mut files: Vec<String> = self.weight_map.values().cloned().collect();
        files.sort_unstable();
        files.dedup();
        files
    }

    /// Words beside the tensors; numbers and the like as JSON has them.
    pub(super) fn metadata(&self) -> BTreeMap<String, String> {
        let word = |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        self.metadata.iter().map(|(key, value)| (key.clone(), word(value))).collect()
    }

    /// Whether a tensor of a file is the one that the index means.
    pub(super) fn has(&self, tensor: &str, file: &str) -> bool {
        self.weight_map.get(tensor).is_some_and(|theirs| theirs == file)
    }

    /// The first tensor that was not found in its file.
    pub(super) fn missing(&self, found: &BTreeMap<String, Tensor>) -> Option<(&str, &str)> {
        self.weight_map.iter().find(|(name, _)| !found.contains_key(*name)).map(|(name, file)| (&**name, &**file))
    }
}

/// Adds a file and its tensors, of which `wanted` says which to take.
pub(super) fn add(contents: &mut Contents, file: String, header: &Header, wanted: impl Fn(&str) -> bool) -> Result<(), String> {
    let number = contents.files.len();
    for (name, entry) in header.entries.iter().filter(|(name, _)| wanted(name)) {
        let parts = vec![(Piece::Whole, number, name.clone())];
        let tensor = Tensor::of_parts(entry.dtype.clone(), entry.shape.clone(), parts);
        contents.tensors.insert(name.clone(), tensor.map_err(|reason| format!("tensor {name:?}: {reason}"))?);
    }
    contents.files.push(FileEntry { name: file, expected: None });
    Ok(())
}
