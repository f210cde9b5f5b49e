//! Files that are truncated, have changed bits or contain impossible values: errors, and never data other than those
//! saved.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use collectives::{DType, Error, Result};
use collectives_train::checkpoint::{Checkpoint, Piece};

use super::tensors::{Tensor, load, save};
use crate::common::random::Random;
use crate::common::ranks::{Wiring, threads};

/// Saves a checkpoint of two ranks, with columns, flat pieces and whole tensors.
fn saved(random: &mut Random, directory: &Path) -> (PathBuf, Vec<Tensor>) {
    let shapes: [(&str, DType, &[usize]); 4] =
        [("columns", DType::F32, &[5, 8]), ("flat", DType::Bf16, &[31]), ("whole", DType::I64, &[3]), ("flags", DType::Bool, &[9])];
    let tensors = shapes.map(|(name, dtype, shape)| Tensor::random(random, name, dtype, shape));
    threads(Wiring::Shm, 2, |comm| {
        let flat = [0..17, 17..31][comm.rank()].clone();
        let pieces = [Piece::part(1, 8, comm.rank(), 2), Piece::Flat(flat), Piece::Whole, Piece::Whole];
        let held: Vec<_> = tensors.iter().cloned().zip(pieces.map(|piece| vec![piece])).collect();
        save(comm, directory, 1, &held).unwrap();
    });
    (directory.join("step-00000001"), tensors.to_vec())
}

/// Opens and reads everything. Returns whether it is what was saved, if there is no error.
fn read_all(path: &Path, tensors: &[Tensor]) -> Result<bool> {
    let checkpoint = Checkpoint::open(path)?;
    let mut same = true;
    for tensor in tensors {
        same &= load(&checkpoint, tensor, &Piece::Whole)? == tensor.bytes;
    }
    checkpoint.check()?;
    Ok(same)
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Returns the number of bytes before the data of a safetensors file.
fn head(bytes: &[u8]) -> usize {
    8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize
}

#[test]
fn whatever_is_changed_before_the_data_is_found() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = saved(&mut random, folder.path());
    assert!(read_all(&path, &tensors).unwrap());
    let files = files(&path);
    assert_eq!(files.len(), 3);
    for file in files {
        let good = std::fs::read(&file).unwrap();
        let is_index = file.ends_with("checkpoint.json");
        for _ in 0..600 {
            let mut bad = good.clone();
            let end = if is_index { good.len() } else { head(&good) };
            match random.below(3) {
                0 => bad.truncate(random.below(good.len())),
                1 => bad[random.below(end)] ^= 1 << random.below(8),
                _ => {
                    let (start, count) = (random.below(end), random.below(8));
                    bad.splice(start..(start + random.below(8)).min(end), random.next().to_le_bytes().into_iter().take(count));
                }
            }
            if bad == good {
                continue;
            }
            std::fs::write(&file, &bad).unwrap();
            match read_all(&path, &tensors) {
                // A damaged index may still describe these tensors correctly; a file's head is compared byte by byte.
                Ok(same) => assert!(is_index && same, "{file:?}, seed {seed}: {}", String::from_utf8_lossy(&bad)),
                Err(Error::Io { error, .. }) => {
                    assert!([ErrorKind::InvalidData, ErrorKind::UnexpectedEof, ErrorKind::NotFound].contains(&error.kind()), "{error}");
                }
                Err(Error::InvalidArgument { reason, .. }) => assert!(is_index && reason.contains("tensor"), "{reason}"),
                Err(error) => assert!(is_index, "{error}"),
            }
        }
        std::fs::write(&file, &good).unwrap();
    }
    assert!(read_all(&path, &tensors).unwrap());
}

#[test]
fn files_of_others_with_other_bits_are_errors_or_read_within_bounds() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = saved(&mut random, folder.path());
    let good = std::fs::read(path.join("rank-00000-of-00002.safetensors")).unwrap();
    let file = folder.path().join("model.safetensors");
    for _ in 0..1500 {
        let mut bad = good.clone();
        for _ in 0..1 + random.below(3) {
            bad[random.below(head(&good))] ^= 1 << random.below(8);
        }
        std::fs::write(&file, &bad).unwrap();
        let Ok(checkpoint) = Checkpoint::open(&file) else { continue };
        for name in checkpoint.names() {
            let (Ok(dtype), shape) = (checkpoint.dtype(name), checkpoint.shape(name).unwrap().to_vec()) else { continue };
            let tensor = Tensor { name: name.to_owned(), dtype, shape, bytes: Vec::new() };
            if let Ok(bytes) = load(&checkpoint, &tensor, &Piece::Whole) {
                assert!(bytes.len() < good.len(), "seed {seed}");
            }
        }
    }
}

#[test]
fn heads_of_any_length_are_refused_before_anything_is_made_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    for length in [u64::MAX, 1 << 62, 1 << 40, 100_000_001, 17, 1] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend([b'{'; 16]);
        std::fs::write(&file, bytes).unwrap();
        let error = Checkpoint::open(&file).unwrap_err().to_string();
        assert!(error.contains("head") && error.contains("model.safetensors"), "{length}: {error}");
    }
    for bytes in [&b""[..], b"1234567"] {
        std::fs::write(&file, bytes).unwrap();
        assert!(Checkpoint::open(&file).unwrap_err().to_string().contains("model.safetensors"));
    }
}

#[test]
fn a_bool_of_another_byte_is_no_bool() {
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = saved(&mut Random(1), folder.path());
    let flags = tensors.iter().find(|tensor| tensor.name == "flags").unwrap();
    for file in files(&path) {
        let mut bytes = std::fs::read(&file).unwrap();
        if let Some(place) = bytes.windows(flags.bytes.len()).position(|bytes| bytes == flags.bytes) {
            bytes[place + 3] = 2;
            std::fs::write(&file, bytes).unwrap();
        }
    }
    let error = read_all(&path, &tensors).unwrap_err().to_string();
    assert!(error.contains("tensor \"flags\" has a bool that is neither 0 nor 1") && error.contains(".safetensors"), "{error}");
}

#[test]
fn what_is_no_file_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let (path, tensors) = saved(&mut Random(1), folder.path());
    for file in files(&path) {
        let good = std::fs::read(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        assert!(read_all(&path, &tensors).unwrap_err().to_string().contains("step-00000001"));
        std::fs::create_dir(&file).unwrap();
        assert!(read_all(&path, &tensors).unwrap_err().to_string().contains("not a regular file"));
        std::fs::remove_dir(&file).unwrap();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(read_all(&path, &tensors).unwrap_err().to_string().contains("not a regular file"));
        std::fs::remove_file(&file).unwrap();
        std::fs::write(&file, good).unwrap();
    }
    assert!(read_all(&path, &tensors).unwrap());
}

/// Writes a safetensors file with this head and `data_bytes` bytes of data, all of them holes.
fn with_head(path: &Path, json: &[u8], data_bytes: u64) {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json);
    std::fs::write(path, &bytes).unwrap();
    std::fs::File::options().write(true).open(path).unwrap().set_len(bytes.len() as u64 + data_bytes).unwrap();
}

fn refusal(error: Error) -> (ErrorKind, String) {
    match &error {
        Error::Io { error: inner, .. } => (inner.kind(), error.to_string()),
        _ => panic!("{error}"),
    }
}

#[test]
fn a_tensor_for_which_there_is_no_memory_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let tebibyte = 1_usize << 40;
    with_head(&file, format!(r#"{{"a":{{"dtype":"U8","shape":[{tebibyte}],"data_offsets":[0,{tebibyte}]}}}}"#).as_bytes(), 1 << 40);
    let checkpoint = Checkpoint::open(&file).unwrap();
    // Its last bytes can be read: they are zeros.
    assert_eq!(checkpoint.read_vec::<u8>("a", &[tebibyte], Piece::Flat(tebibyte - 3..tebibyte)).unwrap(), [0; 3]);
    match checkpoint.read_vec::<u8>("a", &[tebibyte], Piece::Whole) {
        Err(error) => assert_eq!(refusal(error).0, ErrorKind::OutOfMemory),
        Ok(values) => assert_eq!(values.len(), tebibyte),
    }
}

#[test]
fn a_head_of_dimensions_without_end_is_refused_while_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let json = format!(r#"{{"a":{{"dtype":"U8","shape":[{}0],"data_offsets":[0,0]}}}}"#, "0,".repeat(1 << 20));
    with_head(&file, json.as_bytes(), 0);
    let (kind, words) = refusal(Checkpoint::open(&file).unwrap_err());
    assert!(kind == ErrorKind::InvalidData && words.contains("more than 64 dimensions"), "{words}");
}

#[test]
fn many_names_of_one_large_head_do_not_fill_the_memory() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // Spaces are valid JSON, and cost only their own bytes.
    let mut json = br#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#.to_vec();
    json.resize(90 << 20, b' ');
    json.push(b'}');
    with_head(&at("large"), &json, 1);
    let names: Vec<String> = (0..4).map(|number| format!("{number}.safetensors")).collect();
    for name in &names {
        std::os::unix::fs::symlink("large", at(name)).unwrap();
    }
    let map: Vec<String> =
        names.iter().enumerate().map(|(number, name)| format!("\"{}\":\"{name}\"", ["a", "b", "c", "d"][number])).collect();
    std::fs::write(at("model.safetensors.index.json"), format!(r#"{{"weight_map":{{{}}}}}"#, map.join(","))).unwrap();
    let (kind, words) = refusal(Checkpoint::open(folder.path()).unwrap_err());
    assert!(
        kind == ErrorKind::InvalidData && words.contains("the limit for all headers together") && words.contains("2.safetensors"),
        "{words}"
    );
}

#[test]
fn a_name_that_stands_twice_is_refused_in_heads_and_indexes() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let entry = r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    with_head(&at("model.safetensors"), format!(r#"{{"a":{entry},"a":{entry}}}"#).as_bytes(), 1);
    std::fs::write(at("model.index.json"), r#"{"weight_map":{"a":"model.safetensors","a":"other.safetensors"}}"#).unwrap();
    std::fs::create_dir(at("step-00000001")).unwrap();
    let tensor = r#"{"dtype":"U8","shape":[0],"pieces":[]}"#;
    let index = format!(
        r#"{{"format":"collectives checkpoint 1","step":1,"world_size":1,"metadata":{{}},"files":[],"tensors":{{"a":{tensor},"a":{tensor}}}}}"#
    );
    std::fs::write(at("step-00000001/checkpoint.json"), index).unwrap();
    for name in ["model.safetensors", "model.index.json", "step-00000001"] {
        let (kind, words) = refusal(Checkpoint::open(at(name)).unwrap_err());
        assert!(kind == ErrorKind::InvalidData && words.contains("\"a\" appears twice"), "{name}: {words}");
    }
}
