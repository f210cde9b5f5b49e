//! Collectives on any serialisable value (feature `serde`). Values are encoded with postcard, and their total size is
//! limited. The ranks exchange the sizes before they exchange the encoded values.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::communicator::Communicator;
use crate::error::{Error, Peer, Result};

/// Sent in place of a size if the value could not be serialised, so that the other ranks do not wait for it.
const FAILED: u64 = u64::MAX;

/// Returns the size of an encoded value, as it is sent to the other ranks.
fn told(encoded: &Result<Vec<u8>>) -> u64 {
    encoded.as_ref().map_or(FAILED, |bytes| bytes.len() as u64)
}

/// Decodes the bytes of another rank. Every byte must be used: if some are left over, the sender sent another type.
pub(in crate::communicator) fn decode<T: DeserializeOwned>(from: &Peer, bytes: &[u8]) -> Result<T> {
    let wrong = |what: String| Error::Protocol {
        with: from.to_string(),
        reason: format!("an object of {} B is not of the expected type: {what}", bytes.len()),
    };
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(wrong(format!("{} B are left over", rest.len()))),
        Err(error) => Err(wrong(error.to_string())),
    }
}

impl Communicator {
    /// Encodes a value as bytes.
    pub(in crate::communicator) fn encode<T: Serialize + ?Sized>(call: &'static str, value: &T) -> Result<Vec<u8>> {
        postcard::to_stdvec(value).map_err(|error| Error::argument(call, format!("the value cannot be serialised: {error}")))
    }

    /// Decodes the bytes of rank `from`.
    pub(in crate::communicator) fn decode<T: DeserializeOwned>(&self, from: usize, bytes: &[u8]) -> Result<T> {
        decode(&self.peers()[from], bytes)
    }

    /// Refuses objects that are together larger than `Config::object_limit_bytes`, or that could not be serialised.
    /// Every rank refuses them alike. `encoder` is the rank that serialises all objects; without one, each rank
    /// serialises its own.
    fn bounded(&self, call: &'static str, sizes: &[u64], encoder: Option<usize>) -> Result<Vec<usize>> {
        if let Some(rank) = sizes.iter().position(|size| *size == FAILED) {
            let encoder = &self.peers()[encoder.unwrap_or(rank)];
            return Err(Error::argument(call, format!("the value could not be serialised on {encoder}")));
        }
        let limit = self.config().object_limit_bytes as u64;
        let total = sizes.iter().try_fold(0_u64, |sum, size| sum.checked_add(*size));
        match total {
            Some(total) if total <= limit => Ok(sizes.iter().map(|size| *size as usize).collect()),
            _ => Err(Error::argument(call, format!("objects of {sizes:?} B together exceed Config::object_limit_bytes ({limit} B)"))),
        }
    }

    /// Encodes this rank's object, and returns it with the sizes of all ranks' objects.
    fn exchange_sizes<T: Serialize>(&self, call: &'static str, object: &T) -> Result<(Vec<u8>, Vec<usize>)> {
        let encoded = Self::encode(call, object);
        let mut sizes = vec![0_u64; self.world_size()];
        self.all_gather_into(&told(&encoded), &mut sizes)?;
        let encoded = encoded?;
        Ok((encoded, self.bounded(call, &sizes, None)?))
    }

    /// Gathers every rank's object on every rank, in rank order. Uses two collectives: one for the sizes, one for the
    /// bytes.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| comm.all_gather_object(&vec![comm.rank(); comm.rank()]))?;
    /// assert_eq!(got[0], [vec![], vec![1]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors common to all collectives, and `InvalidArgument`:
    /// - if a value cannot be serialised,
    /// - if the objects are together larger than [`Config::object_limit_bytes`](crate::Config::object_limit_bytes).
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, object: &T) -> Result<Vec<T>> {
        self.composite("all_gather_object", || {
            let (mine, counts) = self.exchange_sizes("all_gather_object", object)?;
            let mut bytes = vec![0_u8; counts.iter().sum()];
            self.all_gather_v_into(&mine, &mut bytes, &counts)?;
            self.decode_all(&bytes, &counts)
        })
    }

    /// Broadcasts the root's object to every rank. The root passes `Some`. The other ranks pass `None`.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let name = "run 7".to_owned();
    /// let got = Communicator::run_local(2, |comm| comm.broadcast_object((comm.rank() == 0).then_some(&name), 0))?;
    /// assert_eq!(got, ["run 7", "run 7"]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`all_gather_object`](Self::all_gather_object).
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(&self, object: Option<&T>, root: usize) -> Result<T> {
        self.composite("broadcast_object", || {
            self.only_at_root(crate::call::Collective::Broadcast, "an object", object.is_some(), root)?;
            let encoded = object.map_or(Ok(Vec::new()), |object| Self::encode("broadcast_object", object));
            let mut size = told(&encoded);
            self.broadcast(&mut size, root)?;
            let mut bytes = encoded?;
            self.bounded("broadcast_object", &[size], Some(root))?;
            bytes.resize(size as usize, 0);
            self.broadcast(&mut bytes, root)?;
            self.decode(root, &bytes)
        })
    }

    /// Gathers every rank's object on the root, in rank order. Returns `None` on the other ranks.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let got = Communicator::run_local(2, |comm| comm.gather_object(&(comm.rank(), 'x'), 0))?;
    /// assert_eq!(got, [Some(vec![(0, 'x'), (1, 'x')]), None]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`all_gather_object`](Self::all_gather_object).
    pub fn gather_object<T: Serialize + DeserializeOwned>(&self, object: &T, root: usize) -> Result<Option<Vec<T>>> {
        self.composite("gather_object", || {
            // Every rank learns the sizes, so that every rank refuses objects that are too large.
            let (mine, counts) = self.exchange_sizes("gather_object", object)?;
            if self.rank() != root {
                self.gather_v_into(&mine, None::<(&mut Vec<u8>, &[usize])>, root)?;
                return Ok(None);
            }
            let mut bytes = vec![0_u8; counts.iter().sum()];
            self.gather_v_into(&mine, Some((&mut bytes, &counts)), root)?;
            self.decode_all(&bytes, &counts).map(Some)
        })
    }

    /// Sends each object of the root's list to the rank with the object's index. The root passes `Some` with one object
    /// for each rank. The other ranks pass `None`.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let files = ["a.txt".to_owned(), "b.txt".to_owned()];
    /// let got = Communicator::run_local(2, |comm| comm.scatter_object((comm.rank() == 0).then_some(&files[..]), 0))?;
    /// assert_eq!(got, files);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`all_gather_object`](Self::all_gather_object).
    pub fn scatter_object<T: Serialize + DeserializeOwned>(&self, objects: Option<&[T]>, root: usize) -> Result<T> {
        self.composite("scatter_object", || {
            self.only_at_root(crate::call::Collective::Scatter, "objects", objects.is_some(), root)?;
            if let Some(objects) = objects {
                Self::equal(
                    crate::call::Collective::Scatter,
                    "the list of objects",
                    objects.len(),
                    self.world_size(),
                    "one for each rank",
                )?;
            }
            let encode = |object| Self::encode("scatter_object", object);
            let encoded: Vec<_> = objects.unwrap_or_default().iter().map(encode).collect();
            let mut sizes: Vec<u64> = encoded.iter().map(told).collect();
            sizes.resize(self.world_size(), 0);
            self.broadcast(&mut sizes, root)?;
            let bytes = encoded.into_iter().collect::<Result<Vec<_>>>()?.concat();
            let counts = self.bounded("scatter_object", &sizes, Some(root))?;
            let mut mine = vec![0_u8; counts[self.rank()]];
            let source = objects.map(|_| (&bytes, &counts[..]));
            self.scatter_v_into(source, &mut mine, root)?;
            self.decode(root, &mine)
        })
    }

    /// Splits gathered bytes at the counts and decodes each part.
    fn decode_all<T: DeserializeOwned>(&self, bytes: &[u8], counts: &[usize]) -> Result<Vec<T>> {
        let mut rest = bytes;
        counts
            .iter()
            .enumerate()
            .map(|(rank, count)| {
                let (part, tail) = rest.split_at(*count);
                rest = tail;
                self.decode(rank, part)
            })
            .collect()
    }
}

/// Properties that must hold whatever another rank sends as an object.
#[cfg(feature = "__internals")]
pub(crate) mod fuzz {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Serialize};

    use super::decode;
    use crate::error::Peer;

    /// A type that contains every kind of value.
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

    /// Decodes arbitrary bytes as objects, and checks the result. The result must be an error that names the sender, or
    /// a value that stays the same when it is encoded and decoded again.
    pub fn objects(data: &[u8]) {
        check::<Everything>(data);
        check::<Vec<(u8, String)>>(data);
        check::<Vec<Vec<u64>>>(data);
    }

    fn check<T: Serialize + serde::de::DeserializeOwned>(data: &[u8]) {
        match decode::<T>(&Peer::unknown(3), data) {
            Ok(value) => {
                // A number can be encoded with several lengths, and NaN is not equal to itself, so only our own
                // encodings are compared.
                let bytes = postcard::to_stdvec(&value).expect("what was decoded can be encoded");
                let again = decode::<T>(&Peer::unknown(3), &bytes).expect("what was encoded can be decoded");
                assert!(bytes.len() <= data.len());
                assert_eq!(postcard::to_stdvec(&again).expect("as before"), bytes);
            }
            Err(error) => assert!(error.to_string().contains("rank 3"), "{error}"),
        }
    }

    /// Returns the first inputs for the fuzzer.
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
}

#[cfg(test)]
mod tests {
    use serde::{Deserialize, Serializer};

    use super::*;

    /// A value that some ranks cannot serialise.
    #[derive(Debug, Deserialize)]
    struct Fickle(bool);

    impl Serialize for Fickle {
        fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
            if self.0 { serializer.serialize_bool(true) } else { Err(serde::ser::Error::custom("not today")) }
        }
    }

    #[test]
    fn a_value_that_cannot_be_serialised_keeps_nobody_waiting() {
        let seen = Communicator::run_local(3, |comm| {
            let good = comm.rank() != 1;
            let at_root = (comm.rank() == 1).then_some([Fickle(true), Fickle(false), Fickle(true)]);
            let errors = [
                comm.all_gather_object(&Fickle(good)).unwrap_err(),
                comm.gather_object(&Fickle(good), 2).unwrap_err(),
                comm.broadcast_object(at_root.as_ref().map(|objects| &objects[1]), 1).unwrap_err(),
                comm.scatter_object(at_root.as_ref().map(|objects| &objects[..]), 1).unwrap_err(),
            ];
            // The communicator stays usable.
            assert_eq!(comm.all_gather_object(&comm.rank())?, [0, 1, 2]);
            Ok(errors.map(|error| error.to_string()))
        });
        for (rank, errors) in seen.unwrap().iter().enumerate() {
            for (error, call) in errors.iter().zip(["all_gather_object", "gather_object", "broadcast_object", "scatter_object"]) {
                assert!(error.starts_with(call) && error.contains(if rank == 1 { "cannot be serialised" } else { "on rank 1" }), "{error}");
            }
        }
    }
}
