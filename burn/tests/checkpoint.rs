//! Checkpoints of modules and optimisers: saved and loaded by any numbers of ranks, and compared with plain copies.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::Path;

use burn::module::{Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::optim::AdamConfig;
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData, kind::Basic};
use collectives::Communicator;
use collectives_burn::checkpoint::{read_module, read_optimizer, write_module, write_optimizer};
use collectives_burn::{Result, Trainer};
use collectives_train::checkpoint::{Checkpoint, Piece, Saver, Writer};

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
const INTS: [DType; 8] = [DType::I64, DType::I32, DType::I16, DType::I8, DType::U64, DType::U32, DType::U16, DType::U8];

/// Parameters of every kind.
#[derive(Module, Debug)]
struct Every {
    by_columns: Linear,
    layers: Vec<Linear>,
    floats: Vec<Param<Tensor<2>>>,
    ints: Vec<Param<Tensor<1, Int>>>,
    mask: Param<Tensor<1, Bool>>,
    empty: Param<Tensor<2>>,
}

/// Whole numbers that all types can represent.
fn numbers(seed: usize, len: usize) -> Vec<i64> {
    (0..len).map(|index| ((index * 5 + seed * 3) % 7) as i64).collect()
}

fn tensor<const D: usize, K: Basic>(seed: usize, shape: [usize; D], dtype: DType, device: &Device) -> Tensor<D, K> {
    let data = TensorData::new(numbers(seed, shape.iter().product()), shape).try_cast(dtype).unwrap();
    Tensor::from_data(data, (device, dtype))
}

fn param<const D: usize, K: Basic>(tensor: Tensor<D, K>) -> Param<Tensor<D, K>>
where
    Tensor<D, K>: burn::module::ParameterValue,
{
    Param::initialized(ParamId::new(), tensor)
}

impl Every {
    /// Makes a module whose values differ for each seed. The weights of its layers are random.
    fn new(seed: usize) -> Self {
        let device = Device::default();
        let config = LinearConfig::new(3, 5);
        let mask: Vec<bool> = numbers(seed, 6).iter().map(|number| number % 2 == 0).collect();
        Self {
            by_columns: config.clone().with_layout(LinearLayout::Col).init(&device),
            layers: (0..2).map(|_| config.clone().init(&device)).collect(),
            floats: FLOATS.iter().map(|dtype| param(tensor(seed, [2, 3], *dtype, &device))).collect(),
            ints: INTS.iter().map(|dtype| param(tensor(seed, [4], *dtype, &device))).collect(),
            mask: param(Tensor::from_data(TensorData::new(mask, [6]), &device)),
            empty: param(Tensor::zeros([0, 3], &device)),
        }
    }

    /// Returns the bytes and the id of each parameter. The weight of a layer has the form that its forward pass uses.
    fn parameters(&self) -> BTreeMap<String, (ParamId, DType, Vec<usize>, Vec<u8>)> {
        let mut all = BTreeMap::new();
        let mut add = |name: String, id: ParamId, data: TensorData| {
            all.insert(name, (id, data.dtype(), data.shape().to_vec(), data.as_bytes().to_vec()));
        };
        for (name, layer) in [("by_columns", &self.by_columns), ("layers.0", &self.layers[0]), ("layers.1", &self.layers[1])] {
            let bias = layer.bias.as_ref().unwrap();
            add(format!("{name}.weight"), layer.weight.id, layer.weight.val().into_data());
            add(format!("{name}.bias"), bias.id, bias.val().into_data());
        }
        for (index, float) in self.floats.iter().enumerate() {
            add(format!("floats.{index}"), float.id, float.val().into_data());
        }
        for (index, int) in self.ints.iter().enumerate() {
            add(format!("ints.{index}"), int.id, int.val().into_data());
        }
        add("mask".to_owned(), self.mask.id, self.mask.val().into_data());
        add("empty".to_owned(), self.empty.id, self.empty.val().into_data());
        all
    }
}

/// Runs a program on `count` ranks.
fn ranks<R: Send>(count: usize, program: impl Fn(&Communicator) -> R + Sync) -> Vec<R> {
    Communicator::run_local(count, |comm| Ok(program(comm))).unwrap()
}

fn latest(directory: &Path) -> Checkpoint {
    Checkpoint::latest(directory).unwrap().unwrap()
}

#[test]
fn modules_of_every_type_are_loaded_by_any_number_of_ranks() {
    for (saving, loading, prefix) in [(1, 2, ""), (3, 2, "model"), (2, 3, "a.b")] {
        let folder = tempfile::tempdir().unwrap();
        let module = Every::new(1);
        let expected = module.parameters();
        ranks(saving, |comm| {
            let mut saver = Saver::new(comm).unwrap();
            let mut writer = Writer::new(comm, folder.path());
            write_module(&mut writer, prefix, &module);
            write_module(&mut writer, "another", &module.layers[0]);
            saver.save(writer, 1).unwrap();
            assert!(saver.wait().unwrap().is_some());
        });
        let files = std::fs::read_dir(folder.path().join("step-00000001")).unwrap().count();
        assert_eq!(files, saving + 1, "every rank wrote a part");
        for loaded in ranks(loading, |_| read_module(&latest(folder.path()), prefix, Every::new(2)).unwrap().parameters()) {
            assert_eq!(loaded, expected);
        }
    }
}

#[test]
fn other_programs_can_read_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let module = Every::new(3);
    ranks(2, |comm| {
        let mut writer = Writer::new(comm, folder.path());
        write_module(&mut writer, "", &module);
        writer.commit(1).unwrap();
    });
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(folder.path().join("step-00000001")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let file = std::fs::read(&path).unwrap();
            for (name, view) in safetensors::SafeTensors::deserialize(&file).unwrap().tensors() {
                found.insert(name, (view.shape().to_vec(), view.data().to_vec()));
            }
        }
    }
    let mut expected = module.parameters();
    // Like burn's own records, the files have a weight that is stored by columns in its stored form.
    let (weight, (shape, stored)) = (expected.remove("by_columns.weight").unwrap(), found.remove("by_columns.weight").unwrap());
    assert_eq!((weight.2, shape), (vec![3, 5], vec![5, 3]));
    let element = |bytes: &[u8], index: usize| bytes[4 * index..4 * index + 4].to_vec();
    assert!((0..15).all(|index| element(&weight.3, index) == element(&stored, index % 5 * 3 + index / 5)));
    let expected: BTreeMap<_, _> = expected.into_iter().map(|(name, (_, _, shape, bytes))| (name, (shape, bytes))).collect();
    assert_eq!(found, expected);
}

#[test]
fn a_parameter_that_does_not_fit_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let layer = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&Device::default());
    ranks(1, |comm| {
        let mut writer = Writer::new(comm, folder.path());
        write_module(&mut writer, "model", &layer(3, 5));
        writer.tensor("optimizer", &[3], Piece::Whole, &[1_u8, 2, 3]);
        writer.commit(1).unwrap();
    });
    let checkpoint = latest(folder.path());
    let refused = |prefix: &str, module: Linear| read_module(&checkpoint, prefix, module).unwrap_err().to_string();
    let error = refused("model", layer(5, 3));
    assert!(error.contains("\"model.weight\"") && error.contains("it is f32[3, 5], but f32[5, 3] was requested"), "{error}");
    let error = refused("other", layer(3, 5));
    assert!(error.contains("\"other.weight\"") && error.contains("it does not exist"), "{error}");
    let mut doubles = layer(3, 5);
    doubles.bias = doubles.bias.map(|bias| bias.map(|bias| bias.cast(burn::tensor::FloatDType::F64)));
    let error = refused("model", doubles);
    assert!(error.contains("\"model.bias\"") && error.contains("it is f32[5], but f64[5] was requested"), "{error}");
    for (name, words) in
        [("optimizer", "optimizer: burn failed"), ("absent", "it does not exist"), ("model.bias", "but u8[5] was requested")]
    {
        let error = read_optimizer(&checkpoint, name, AdamConfig::new().init()).err().unwrap().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn ranks_with_different_modules_fail_all() {
    let folder = tempfile::tempdir().unwrap();
    ranks(3, |comm| {
        let mut writer = Writer::new(comm, folder.path());
        write_module(&mut writer, "", &LinearConfig::new(3, 5 + comm.rank() / 2).init(&Device::default()));
        let error = writer.commit(1).unwrap_err().to_string();
        assert!(error.contains("rank 0 has F32[5], but rank 2 has F32[6]"), "{error}");
    });
    assert!(!folder.path().join("step-00000001").exists());
}

/// Trains for some steps with Adam, from the latest checkpoint if there is one. Saves at the end, and returns the
/// parameters.
fn train(comm: &Communicator, directory: &Path, steps: std::ops::Range<usize>) -> Result<Vec<u8>> {
    let device = Device::default().autodiff();
    let (mut module, mut optimizer): (Linear, _) = (LinearConfig::new(3, 2).init(&device), AdamConfig::new().init());
    if let Some(checkpoint) = Checkpoint::resume(comm, directory)? {
        module = read_module(&checkpoint, "model", module)?;
        optimizer = read_optimizer(&checkpoint, "adam", optimizer)?;
    } else {
        module.weight = module.weight.map(|weight| weight.zeros_like().require_grad());
        module.bias = module.bias.map(|bias| bias.map(|bias| bias.zeros_like().require_grad()));
    }
    let (mut trainer, mut module) = Trainer::new(comm, module, optimizer)?;
    for step in steps.clone() {
        let input = tensor::<2, burn::tensor::Float>(step + comm.rank(), [4, 3], DType::F32, &device);
        let loss = (module.forward(input.clone()) - input.slice([0..4, 0..2])).powi_scalar(2).mean();
        (module, _) = trainer.step(0.1, module, loss)?;
    }
    let mut writer = Writer::new(comm, directory);
    write_module(&mut writer, "model", &module);
    write_optimizer(&mut writer, "adam", trainer.optimizer());
    writer.commit(steps.end as u64)?;
    Ok([module.weight.val(), module.bias.unwrap().val().unsqueeze()]
        .into_iter()
        .flat_map(|tensor| tensor.into_data().as_bytes().to_vec())
        .collect())
}

#[test]
fn training_that_is_continued_ends_like_training_without_an_interruption() {
    for count in [1, 2, 3] {
        let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let undisturbed = ranks(count, |comm| train(comm, whole.path(), 0..8).unwrap());
        let halfway = ranks(count, |comm| train(comm, parts.path(), 0..4).unwrap());
        assert_ne!(halfway, undisturbed);
        let continued = ranks(count, |comm| train(comm, parts.path(), 4..8).unwrap());
        assert_eq!(continued, undisturbed);
        // Without a step, any number of ranks has exactly what was saved.
        let loaded = ranks(4 - count, |comm| train(comm, parts.path(), 8..8).unwrap());
        assert!(loaded.iter().all(|loaded| *loaded == undisturbed[0]));
    }
}
