//! Other programs' safetensors files: one, or several with an index of names (`model.safetensors.index.json`). Pure.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::contents::{Contents, FileEntry, Tensor};
use super::header::Header;
use super::index::check_name;
use super::json;
use super::piece::Piece;

/// The usual names of such files.
pub(super) const FILE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// The end of an index's name.
pub(super) const INDEX_ENDING: &str = ".index.json";

/// The file of each tensor.
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
        let map: Self = serde_json::from_slice(json).map_err(|error| format!("the file is not a valid index: {error}"))?;
        map.weight_map.values().try_for_each(|file| check_name(file))?;
        Ok(map)
    }

    /// Returns the files, each once, sorted by name.
    pub(super) fn files(&self) -> Vec<String> {
        let mut files: Vec<String> = self.weight_map.values().cloned().collect();
        files.sort_unstable();
        files.dedup();
        files
    }

    /// Returns the metadata; values that are not strings are in their JSON form.
    pub(super) fn metadata(&self) -> BTreeMap<String, String> {
        let word = |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        self.metadata.iter().map(|(key, value)| (key.clone(), word(value))).collect()
    }

    /// Returns whether the index assigns this tensor to this file.
    pub(super) fn has(&self, tensor: &str, file: &str) -> bool {
        self.weight_map.get(tensor).is_some_and(|theirs| theirs == file)
    }

    /// Returns the first tensor that was not found in its file.
    pub(super) fn missing(&self, found: &BTreeMap<String, Tensor>) -> Option<(&str, &str)> {
        self.weight_map.iter().find(|(name, _)| !found.contains_key(*name)).map(|(name, file)| (&**name, &**file))
    }
}

/// Adds a file and those of its tensors for which `wanted` returns `true`.
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
