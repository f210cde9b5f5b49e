//! Checkpoints of variables: saved and loaded by any numbers of ranks, and compared with plain copies.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Init, VarMap};
use collectives::Communicator;
use collectives_candle::checkpoint::{read_tensor, read_variables, write_tensor, write_variables};
use collectives_train::checkpoint::{Checkpoint, Piece, Saver, Writer};

const TYPES: [DType; 10] =
    [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64, DType::BF16, DType::F16, DType::F32, DType::F64, DType::F8E4M3];
const SHAPE: [usize; 2] = [6, 4];

/// Whole numbers that all types can represent.
fn values(dtype: DType, number: usize) -> Tensor {
    let values: Vec<f32> = (0..24).map(|index| ((index * 5 + number * 3) % 8) as f32).collect();
    Tensor::from_vec(values, &SHAPE, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Returns the bytes of a tensor, as in a safetensors file.
fn bytes(tensor: &Tensor) -> Vec<u8> {
    let serialized = safetensors::serialize([("x", tensor)], None).unwrap();
    safetensors::SafeTensors::deserialize(&serialized).unwrap().tensor("x").unwrap().data().to_vec()
}

/// Makes a map of one variable of every type, with zeros, and one without elements.
fn zeros(shape: &[usize]) -> VarMap {
    let map = VarMap::new();
    for dtype in TYPES {
        let zeros = Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        map.data().lock().unwrap().insert(format!("layer.{}", dtype.as_str()), Var::from_tensor(&zeros).unwrap());
    }
    map.get((0, 3), "empty", Init::Const(0.0), DType::F32, &Device::Cpu).unwrap();
    map
}

fn set(map: &VarMap, value: impl Fn(DType) -> Tensor) {
    for dtype in TYPES {
        map.data().lock().unwrap()[&format!("layer.{}", dtype.as_str())].set(&value(dtype)).unwrap();
    }
}

/// Checks every variable of a map, bit by bit.
fn assert_are(map: &VarMap, value: impl Fn(DType) -> Tensor) {
    for dtype in TYPES {
        let variable = map.data().lock().unwrap()[&format!("layer.{}", dtype.as_str())].as_tensor().clone();
        assert_eq!((variable.dtype(), bytes(&variable)), (dtype, bytes(&value(dtype))), "{dtype:?}");
    }
}

/// Runs a program on `count` ranks.
fn ranks(count: usize, program: impl Fn(&Communicator) -> Result<()> + Sync) {
    Communicator::run_local(count, |comm| {
        program(comm).unwrap();
        Ok(())
    })
    .unwrap();
}

fn latest(directory: &Path) -> Checkpoint {
    Checkpoint::latest(directory).unwrap().unwrap()
}

/// Returns what a split of the rows over the ranks gives for every variable except the empty one.
fn rows(comm: &Communicator) -> impl Fn(&str) -> Option<(Vec<usize>, Piece)> {
    let piece = Piece::part(0, SHAPE[0], comm.rank(), comm.world_size());
    move |name| (name != "empty").then(|| (SHAPE.to_vec(), piece.clone()))
}

fn own_rows(comm: &Communicator, whole: &Tensor) -> Tensor {
    let len = SHAPE[0] / comm.world_size();
    whole.narrow(0, comm.rank() * len, len).unwrap().contiguous().unwrap()
}

#[test]
fn variables_of_every_type_are_loaded_by_any_number_of_ranks() {
    for (saving, loading) in [(1, 1), (1, 3), (3, 2), (2, 1)] {
        let folder = tempfile::tempdir().unwrap();
        ranks(saving, |comm| {
            let map = zeros(&SHAPE);
            set(&map, |dtype| values(dtype, 1));
            let mut writer = Writer::new(comm, folder.path());
            write_variables(&mut writer, &map, |_| None);
            writer.commit(1).unwrap();
            Ok(())
        });
        let files = std::fs::read_dir(folder.path().join("step-00000001")).unwrap().count();
        assert_eq!(files, saving + 1, "every rank wrote a part");
        ranks(loading, |_| {
            let map = zeros(&SHAPE);
            read_variables(&latest(folder.path()), &map, |_| None)?;
            assert_are(&map, |dtype| values(dtype, 1));
            Ok(())
        });
    }
}

#[test]
fn other_programs_can_read_the_files() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |comm| {
        let map = zeros(&SHAPE);
        set(&map, |dtype| values(dtype, 2));
        let mut writer = Writer::new(comm, folder.path());
        write_variables(&mut writer, &map, |_| None);
        writer.commit(1).unwrap();
        Ok(())
    });
    let mut by_candle = HashMap::new();
    let mut by_safetensors = BTreeMap::new();
    for entry in std::fs::read_dir(folder.path().join("step-00000001")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            by_candle.extend(candle_core::safetensors::load(&path, &Device::Cpu).unwrap());
            let file = std::fs::read(&path).unwrap();
            for (name, view) in safetensors::SafeTensors::deserialize(&file).unwrap().tensors() {
                by_safetensors.insert(name, (view.shape().to_vec(), view.data().to_vec()));
            }
        }
    }
    assert_eq!((by_candle.len(), by_safetensors.len()), (TYPES.len() + 1, TYPES.len() + 1));
    for dtype in TYPES {
        let name = format!("layer.{}", dtype.as_str());
        let expected = bytes(&values(dtype, 2));
        assert_eq!((by_candle[&name].dtype(), bytes(&by_candle[&name])), (dtype, expected.clone()));
        assert_eq!(by_safetensors[&name], (SHAPE.to_vec(), expected));
    }
}

#[test]
fn variables_that_are_split_over_ranks_are_split_again_for_other_numbers_of_ranks() {
    for (saving, loading) in [(3, 2), (2, 3), (1, 2)] {
        let folder = tempfile::tempdir().unwrap();
        ranks(saving, |comm| {
            let map = zeros(&[SHAPE[0] / saving, SHAPE[1]]);
            set(&map, |dtype| own_rows(comm, &values(dtype, 3)));
            let mut saver = Saver::new(comm).unwrap();
            let mut writer = Writer::new(comm, folder.path());
            write_variables(&mut writer, &map, rows(comm));
            saver.save(writer, 1).unwrap();
            set(&map, |dtype| own_rows(comm, &values(dtype, 4))); // training goes on
            saver.wait().unwrap();
            Ok(())
        });
        ranks(loading, |comm| {
            let map = zeros(&[SHAPE[0] / loading, SHAPE[1]]);
            read_variables(&latest(folder.path()), &map, rows(comm))?;
            assert_are(&map, |dtype| own_rows(comm, &values(dtype, 3)));
            let whole = read_tensor(&latest(folder.path()), "layer.bf16", &SHAPE, Piece::Whole, &Device::Cpu)?;
            assert_eq!(bytes(&whole), bytes(&values(DType::BF16, 3)));
            let column = read_tensor(&latest(folder.path()), "layer.i64", &SHAPE, Piece::part(1, 4, 2, 4), &Device::Cpu)?;
            assert_eq!(bytes(&column), bytes(&values(DType::I64, 3).narrow(1, 2, 1)?.contiguous()?));
            let range = read_tensor(&latest(folder.path()), "layer.f64", &SHAPE, Piece::Flat(5..11), &Device::Cpu)?;
            assert_eq!(bytes(&range), bytes(&values(DType::F64, 3).flatten_all()?.narrow(0, 5, 6)?.contiguous()?));
            Ok(())
        });
    }
}

#[test]
fn a_tensor_that_is_not_contiguous_is_saved_in_its_order() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |comm| {
        let transposed = values(DType::F32, 1).t()?;
        let mut writer = Writer::new(comm, folder.path());
        write_tensor(&mut writer, "columns", &[4, 6], Piece::Whole, &transposed);
        let own = values(DType::F32, 1).narrow(1, 2 * comm.rank(), 2)?; // two columns of four
        write_tensor(&mut writer, "parts", &SHAPE, Piece::part(1, 4, comm.rank(), 2), &own);
        writer.commit(1).unwrap();
        Ok(())
    });
    let read = |name, shape: &[usize]| read_tensor(&latest(folder.path()), name, shape, Piece::Whole, &Device::Cpu).unwrap();
    assert_eq!(bytes(&read("columns", &[4, 6])), bytes(&values(DType::F32, 1).t().unwrap().contiguous().unwrap()));
    assert_eq!(bytes(&read("parts", &SHAPE)), bytes(&values(DType::F32, 1)));
}

#[test]
fn a_variable_that_does_not_fit_is_named_and_nothing_changes() {
    let folder = tempfile::tempdir().unwrap();
    ranks(1, |comm| {
        let map = zeros(&SHAPE);
        set(&map, |dtype| values(dtype, 1));
        let mut writer = Writer::new(comm, folder.path());
        write_variables(&mut writer, &map, |_| None);
        writer.tensor("u16", &[2], Piece::Whole, &[1_u16, 2]);
        writer.commit(1).unwrap();
        Ok(())
    });
    let checkpoint = latest(folder.path());
    let refused = |name: &str, variable: Tensor, split: Option<(Vec<usize>, Piece)>| {
        let map = zeros(&SHAPE);
        map.data().lock().unwrap().insert(name.to_owned(), Var::from_tensor(&variable).unwrap());
        let error = read_variables(&checkpoint, &map, |asked| split.clone().filter(|_| asked == name)).unwrap_err();
        for dtype in TYPES.iter().filter(|dtype| name != format!("layer.{}", dtype.as_str())) {
            let untouched = map.data().lock().unwrap()[&format!("layer.{}", dtype.as_str())].as_tensor().clone();
            assert!(bytes(&untouched).iter().all(|byte| *byte == 0), "{dtype:?}");
        }
        error.to_string()
    };
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    let error = refused("layer.f32", zeros(&SHAPE, DType::F64), None);
    assert!(error.contains("variable \"layer.f32\" is f64[6, 4], but the checkpoint has f32[6, 4]"), "{error}");
    let error = refused("layer.f32", zeros(&[4, 6], DType::F32), None);
    assert!(error.contains("variable \"layer.f32\" is f32[4, 6], but the checkpoint has f32[6, 4]"), "{error}");
    let error = refused("zzz", zeros(&[1], DType::F32), None);
    assert!(error.contains("tensor \"zzz\"") && error.contains("it does not exist"), "{error}");
    let half = || Some((SHAPE.to_vec(), Piece::part(0, 6, 0, 2)));
    let error = refused("layer.f32", zeros(&[4, 3], DType::F32), half());
    assert!(error.contains("\"layer.f32\" has shape [4, 3] on this rank, but its piece has shape [3, 4]"), "{error}");
    let error = refused("layer.f32", zeros(&[3, 4], DType::F32), Some((SHAPE.to_vec(), Piece::part(2, 6, 0, 2))));
    assert!(error.contains("there is no part"), "{error}");
    let error = read_tensor(&checkpoint, "u16", &[2], Piece::Whole, &Device::Cpu).unwrap_err().to_string();
    assert!(error.contains("\"u16\" of type u16"), "{error}");
}

#[test]
fn a_tensor_that_cannot_be_saved_fails_the_commit_on_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    ranks(3, |comm| {
        let failed = |add: &dyn Fn(&mut Writer<'_>)| {
            let mut writer = Writer::new(comm, folder.path());
            write_tensor(&mut writer, "good", &SHAPE, Piece::Whole, &values(DType::F32, 1));
            if comm.rank() == 1 {
                add(&mut writer);
            }
            writer.commit(1).unwrap_err().to_string()
        };
        let tensor = values(DType::F32, 1);
        let error = failed(&|writer| write_tensor(writer, "bad", &[6, 8], Piece::part(1, 8, 0, 2), &tensor.t().unwrap()));
        assert!(error.contains("\"bad\" has shape [4, 6] on this rank, but its piece has shape [6, 4]"), "{error}");
        let error = failed(&|writer| write_tensor(writer, "bad#", &SHAPE, Piece::Whole, &tensor));
        assert!(error.contains("a name must not be empty, contain #"), "{error}");
        let error = failed(&|writer| write_tensor(writer, "bad", &SHAPE, Piece::Flat(0..25), &tensor));
        assert!(error.contains("there is no part"), "{error}");
        Ok(())
    });
    assert!(!folder.path().join("step-00000001").exists());
}
