//! Safetensors files of other programs: a single file, or several with an index of names.

use std::collections::HashMap;

use collectives_train::checkpoint::{Checkpoint, Piece};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

use super::tensors::{Tensor, load, tensors};
use crate::common::random::Random;

/// Returns the other crate's name of the type.
fn theirs(tensor: &Tensor) -> Dtype {
    use collectives::DType;
    match tensor.dtype {
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::F16 => Dtype::F16,
        DType::Bf16 => Dtype::BF16,
        DType::F8E4M3 => Dtype::F8_E4M3,
        DType::F8E5M2 => Dtype::F8_E5M2,
        DType::I8 => Dtype::I8,
        DType::I16 => Dtype::I16,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
        DType::U8 => Dtype::U8,
        DType::U16 => Dtype::U16,
        DType::U32 => Dtype::U32,
        DType::U64 => Dtype::U64,
        DType::Bool => Dtype::BOOL,
        other => panic!("{other} is new"),
    }
}

/// Writes a file with the other crate.
fn write(path: &std::path::Path, tensors: &[Tensor]) {
    let views = tensors.iter().map(|it| (it.name.clone(), TensorView::new(theirs(it), it.shape.clone(), &it.bytes).unwrap()));
    let words = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    serialize_to_file(views, Some(words), path).unwrap();
}

/// Loads every tensor in pieces.
fn compare(checkpoint: &Checkpoint, tensors: &[Tensor], random: &mut Random) {
    assert_eq!((checkpoint.step(), checkpoint.world_size()), (None, None));
    assert_eq!(checkpoint.names().count(), tensors.len());
    for tensor in tensors {
        for piece in tensor.divide(random, 3).concat() {
            assert!(load(checkpoint, tensor, &piece).unwrap() == tensor.piece(&piece), "{piece} of {}", tensor.name);
        }
    }
}

#[test]
fn a_file_of_another_writer_is_loaded_in_pieces() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    let folder = tempfile::tempdir().unwrap();
    let tensors = tensors(&mut random);
    let path = folder.path().join("model.safetensors");
    write(&path, &tensors);
    for path in [&path, folder.path()] {
        let checkpoint = Checkpoint::open(path).unwrap();
        compare(&checkpoint, &tensors, &mut random);
        assert_eq!(checkpoint.metadata()["format"], "pt");
    }
}

#[test]
fn a_model_in_several_files_is_loaded_by_its_index() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    let folder = tempfile::tempdir().unwrap();
    let tensors = tensors(&mut random);
    let mut map = serde_json::Map::new();
    for (number, part) in tensors.chunks(8).enumerate() {
        let name = format!("model-{number:05}-of-00003.safetensors");
        write(&folder.path().join(&name), part);
        map.extend(part.iter().map(|tensor| (tensor.name.clone(), name.clone().into())));
    }
    let index = folder.path().join("model.safetensors.index.json");
    let text = |map: &serde_json::Map<String, serde_json::Value>| {
        serde_json::json!({"metadata": {"total_size": 12}, "weight_map": map}).to_string()
    };
    std::fs::write(&index, text(&map)).unwrap();
    for path in [&index, folder.path()] {
        let checkpoint = Checkpoint::open(path).unwrap();
        compare(&checkpoint, &tensors, &mut random);
        assert_eq!(checkpoint.metadata()["total_size"], "12");
    }
    for (file, words) in
        [("model-00001-of-00003.safetensors", "does not contain tensor"), ("../outside", "not the name of a file"), ("none", "none")]
    {
        map.insert("scalar".to_owned(), file.into());
        map.insert("absent".to_owned(), file.into());
        std::fs::write(&index, text(&map)).unwrap();
        let error = Checkpoint::open(&index).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_type_that_is_not_known_is_named_and_the_others_are_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let json = r#"{"a":{"dtype":"C64","shape":[1],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[2],"data_offsets":[8,10]}}"#;
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    bytes.extend([0; 8].iter().chain(&[3, 4]));
    let path = folder.path().join("odd.safetensors");
    std::fs::write(&path, bytes).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.read_vec::<u8>("b", &[2], Piece::Whole).unwrap(), [3, 4]);
    let error = checkpoint.read_vec::<f32>("a", &[1], Piece::Whole).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("C64") && error.to_string().contains("odd.safetensors"), "{error}");
}
