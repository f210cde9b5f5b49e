//! What must hold whatever another rank sends as an object.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::object::decode;
use crate::error::Peer;

/// Something with everything in it.
#[derive(Debug, Serialize, Deserialize)]
struct Everything {
    name: String,
    letter: char,
    loss: Option<f64>,
    shape: (u16, [i8; 3]),
    layers: BTreeMap<String, Vec<Layer>>,
    nothing: (),
    numbers: (i128, u64, bool),
    boxed: Option<Box<Everything>>,
}

#[derive(Debug, Serialize, Deserialize)]
enum Layer {
    Dense { inputs: u64, outputs: i32 },
    Dropout(f32),
    Identity,
}

/// Any bytes as an object: an error that names the sender, or a value that means the same when encoded again.
pub fn objects(data: &[u8]) {
    check::<Everything>(data);
    check::<Vec<(u8, String)>>(data);
    check::<Vec<Vec<u64>>>(data);
}

fn check<T: Serialize + serde::de::DeserializeOwned>(data: &[u8]) {
    match decode::<T>(&Peer::unknown(3), data) {
        Ok(value) => {
            // Numbers of many lengths mean the same, and NaN is not equal to itself: so bytes are compared once they are ours.
            let bytes = postcard::to_stdvec(&value).expect("what was decoded can be encoded");
            let again = decode::<T>(&Peer::unknown(3), &bytes).expect("what was encoded can be decoded");
            assert!(bytes.len() <= data.len());
            assert_eq!(postcard::to_stdvec(&again).expect("as before"), bytes);
        }
        Err(error) => assert!(error.to_string().contains("rank 3"), "{error}"),
    }
}

/// Inputs to begin with.
pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let layers = vec![Layer::Dense { inputs: u64::MAX, outputs: -7 }, Layer::Dropout(0.5), Layer::Identity];
    let everything = |boxed| Everything {
        name: "h\u{f6}st".to_owned(),
        letter: '\u{1f680}',
        loss: Some(0.25),
        shape: (300, [-1, 0, 1]),
        layers: [("first".to_owned(), Vec::new())].into(),
        nothing: (),
        numbers: (i128::MIN, u64::MAX, true),
        boxed,
    };
    let mut outer = everything(Some(Box::new(everything(None))));
    outer.layers.insert("second".to_owned(), layers);
    let pairs = vec![(1_u8, "one".to_owned()), (2, String::new())];
    let encoded = [postcard::to_stdvec(&outer), postcard::to_stdvec(&pairs), postcard::to_stdvec(&vec![vec![1_u64, u64::MAX], vec![]])];
    encoded.into_iter().map(|bytes| ("objects", bytes.expect("these can be encoded"))).collect()
}
