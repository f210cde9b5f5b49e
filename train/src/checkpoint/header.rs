//! The header of a safetensors file: a length, then JSON with the places of the tensors after it. Pure.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::json::{self, Unique};
use super::piece::element_count;
use collectives::DType;

/// The longest header that readers of the format accept.
pub(super) const LONGEST: u64 = 100_000_000;
/// The number of bytes of the length before a header.
pub(super) const LENGTH_BYTES: usize = 8;

/// The contents of a file.
#[derive(Debug, Default)]
pub(super) struct Header {
    /// Strings from the program that wrote it.
    pub(super) metadata: BTreeMap<String, String>,
    /// Tensors by name.
    pub(super) entries: BTreeMap<String, Entry>,
}

/// One tensor of a file.
#[derive(Debug)]
pub(super) struct Entry {
    /// Its type, or the name of a type that `collectives` does not have.
    pub(super) dtype: Result<DType, String>,
    pub(super) shape: Vec<usize>,
    /// Its bytes, counted from the end of the header.
    pub(super) bytes: Range<u64>,
}

/// The one name that no tensor can have.
pub(super) const METADATA: &str = "__metadata__";

/// A header as it is written.
#[derive(Default)]
struct Written {
    metadata: Option<BTreeMap<String, String>>,
    entries: BTreeMap<String, WrittenEntry>,
}

#[derive(Serialize, Deserialize)]
struct WrittenEntry {
    dtype: String,
    #[serde(deserialize_with = "json::shape")]
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

impl<'de> Deserialize<'de> for Written {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(WrittenVisitor)
    }
}

/// Reads one tensor after the other. A derived reader would first read the whole header into values, which take twenty
/// times as many bytes as the header.
struct WrittenVisitor;

impl<'de> Visitor<'de> for WrittenVisitor {
    type Value = Written;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Written, A::Error> {
        let mut written = Written::default();
        let mut has_metadata = false;
        while let Some(name) = from.next_key::<String>()? {
            if name != METADATA {
                let entry = from.next_value()?;
                json::add(&mut written.entries, name, entry)?;
            } else if std::mem::replace(&mut has_metadata, true) {
                return Err(serde::de::Error::duplicate_field(METADATA));
            } else {
                written.metadata = from.next_value::<Option<Unique<String>>>()?.map(|map| map.0);
            }
        }
        Ok(written)
    }
}

/// Returns the name of an element type in the format.
pub(super) fn name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "F32",
        DType::F64 => "F64",
        DType::F16 => "F16",
        DType::Bf16 => "BF16",
        DType::F8E4M3 => "F8_E4M3",
        DType::F8E5M2 => "F8_E5M2",
        DType::I8 => "I8",
        DType::I16 => "I16",
        DType::I32 => "I32",
        DType::I64 => "I64",
        DType::U8 => "U8",
        DType::U16 => "U16",
        DType::U32 => "U32",
        DType::U64 => "U64",
        DType::Bool => "BOOL",
        // A type that was added to `collectives` later.
        other => other.name(),
    }
}

/// Returns the element type with this name. The error is the name.
pub(super) fn dtype(text: &str) -> Result<DType, String> {
    DType::ALL.into_iter().find(|dtype| name(*dtype) == text).ok_or_else(|| text.to_owned())
}

/// Returns the length of the header after its length field, in a file of `file_bytes` bytes.
pub(super) fn length(first: [u8; LENGTH_BYTES], file_bytes: u64) -> Result<usize, String> {
    let length = u64::from_le_bytes(first);
    let room = file_bytes.saturating_sub(LENGTH_BYTES as u64);
    if length > LONGEST || length > room {
        return Err(format!(
            "according to the length field, the header has {length} bytes, but a header may have at most {LONGEST} bytes, \
             and must fit into the {room} bytes after the field"
        ));
    }
    // At most the limit above.
    Ok(length as usize)
}

/// Reads a header, followed by `data_bytes` bytes, each of which must belong to one tensor.
pub(super) fn parse(json: &[u8], data_bytes: u64) -> Result<Header, String> {
    let written: Written = serde_json::from_slice(json).map_err(|error| format!("its header is not valid: {error}"))?;
    let entries = written.entries.into_iter().map(|(name, entry)| match checked(entry) {
        Ok(entry) => Ok((name, entry)),
        Err(reason) => Err(format!("tensor {name:?}: {reason}")),
    });
    let entries: BTreeMap<String, Entry> = entries.collect::<Result<_, _>>()?;
    let mut order: Vec<(&String, &Range<u64>)> = entries.iter().map(|(name, entry)| (name, &entry.bytes)).collect();
    order.sort_by_key(|(_, bytes)| (bytes.start, bytes.end));
    let mut reached = 0;
    for (name, bytes) in order {
        if bytes.start != reached {
            return Err(format!(
                "tensor {name:?} begins at byte {} of the data, but the tensors before it end at byte {reached}",
                bytes.start
            ));
        }
        reached = bytes.end;
    }
    if reached != data_bytes {
        return Err(format!("the tensors have {reached} bytes, but {data_bytes} bytes follow the header"));
    }
    Ok(Header { metadata: written.metadata.unwrap_or_default(), entries })
}

/// Checks that an entry has as many bytes as its shape and type require.
fn checked(entry: WrittenEntry) -> Result<Entry, String> {
    let WrittenEntry { dtype: text, shape, data_offsets: (start, end) } = entry;
    let dtype = dtype(&text);
    let count = element_count(&shape)?;
    let bytes = end.checked_sub(start).ok_or_else(|| format!("the tensor's bytes end at {end}, before they begin at {start}"))?;
    // Types that are not known here may have less than one byte per element.
    if let Ok(dtype) = dtype
        && bytes != count as u64 * dtype.size_bytes() as u64
    {
        return Err(format!("the tensor has {bytes} bytes for {count} elements of {dtype}"));
    }
    Ok(Entry { dtype, shape, bytes: start..end })
}

/// Returns the header, preceded by its length, of a file in which these tensors are contiguous.
pub(super) fn encode(tensors: &[(String, DType, Vec<usize>)], metadata: &BTreeMap<String, String>) -> Result<Vec<u8>, String> {
    let mut entries = serde_json::Map::new();
    let failed = |error: serde_json::Error| format!("the header cannot be written: {error}");
    entries.insert(METADATA.to_owned(), serde_json::to_value(metadata).map_err(failed)?);
    let mut reached = 0;
    for (name, dtype, shape) in tensors {
        let end = element_count(shape)? as u64 * dtype.size_bytes() as u64 + reached;
        let entry = WrittenEntry { dtype: self::name(*dtype).to_owned(), shape: shape.clone(), data_offsets: (reached, end) };
        entries.insert(name.clone(), serde_json::to_value(entry).map_err(failed)?);
        reached = end;
    }
    let mut json = serde_json::to_vec(&entries).map_err(failed)?;
    // The data begin at a multiple of 8, as the format requires.
    json.resize(json.len().next_multiple_of(LENGTH_BYTES), b' ');
    if json.len() as u64 > LONGEST {
        return Err(format!("the header of a file with {} tensors would have {} bytes; the limit is {LONGEST}", tensors.len(), json.len()));
    }
    let mut head = (json.len() as u64).to_le_bytes().to_vec();
    head.append(&mut json);
    Ok(head)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(json: &str, data_bytes: u64) -> Result<Header, String> {
        parse(json.as_bytes(), data_bytes)
    }

    #[test]
    fn a_head_that_is_written_is_read_again() {
        let metadata = BTreeMap::from([("step".to_owned(), "4".to_owned())]);
        let tensors: Vec<_> = DType::ALL.map(|dtype| (format!("a {dtype}\n\""), dtype, vec![3, 1])).into();
        let head = encode(&tensors, &metadata).unwrap();
        assert_eq!(head.len() % 8, 0);
        let data: usize = tensors.iter().map(|(_, dtype, _)| 3 * dtype.size_bytes()).sum();
        let length = length(*head.first_chunk().unwrap(), (head.len() + data) as u64).unwrap();
        let header = parse(&head[8..8 + length], data as u64).unwrap();
        assert_eq!(header.metadata, metadata);
        for (name, dtype, shape) in tensors {
            let entry = &header.entries[&name];
            assert_eq!((entry.dtype.clone(), &entry.shape), (Ok(dtype), &shape));
        }
    }

    #[test]
    fn heads_that_contradict_themselves_are_refused() {
        let cases = [
            (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,7]}}"#, 7, "7 bytes for 2 elements of f32"),
            (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, 9, "have 8 bytes, but 9 bytes follow"),
            (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, 4, "have 8 bytes, but 4 bytes follow"),
            (
                r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#,
                3,
                "begins at byte 1 of the data, but the tensors before it end at byte 0",
            ),
            (r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[3,1]}}"#, 3, "before they begin"),
            (
                r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#,
                3,
                "tensor \"b\" begins at byte 1",
            ),
            (r#"{"a":{"dtype":"U8","shape":[18446744073709551615,2],"data_offsets":[0,2]}}"#, 2, "address space"),
            (r#"{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,2]}}"#, 2, "its header is not valid"),
            (r#"{"a":{"dtype":"U8","shape":[1]}}"#, 1, "its header is not valid"),
            (r#"[[[["#, 0, "its header is not valid"),
            (
                r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
                1,
                "\"a\" appears twice",
            ),
            (r#"{"__metadata__":{"k":"1","k":"2"}}"#, 0, "\"k\" appears twice"),
            (r#"{"__metadata__":{},"__metadata__":null}"#, 0, "duplicate field `__metadata__`"),
            (&format!(r#"{{"a":{{"dtype":"U8","shape":[{}1],"data_offsets":[0,1]}}}}"#, "1,".repeat(64)), 1, "more than 64 dimensions"),
            ("", 0, "its header is not valid"),
        ];
        for (json, data_bytes, words) in cases {
            let error = parsed(json, data_bytes).unwrap_err();
            assert!(error.contains(words), "{json}: {error}");
        }
        let error = length([0xff; 8], 100).unwrap_err();
        assert!(error.contains("the header has 18446744073709551615 bytes") && error.contains("the 92 bytes after the field"), "{error}");
        assert!(length(93_u64.to_le_bytes(), 100).is_err());
        assert_eq!(length(92_u64.to_le_bytes(), 100), Ok(92));
        assert!(length((LONGEST + 1).to_le_bytes(), 1 << 40).is_err());
    }

    #[test]
    fn types_that_are_not_known_keep_their_names() {
        let header = parsed(r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}  "#, 2).unwrap();
        assert_eq!(header.entries["a"].dtype, Err("F4".to_owned()));
    }
}
