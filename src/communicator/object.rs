//! Collectives on any serialisable value (feature `serde`): postcard on the wire, sizes first, bounded.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Communicator;
use crate::error::{Error, Result};

impl Communicator {
    /// A value as bytes.
    fn encode<T: Serialize>(call: &'static str, value: &T) -> Result<Vec<u8>> {
        postcard::to_stdvec(value).map_err(|error| Error::argument(call, format!("the value cannot be serialised: {error}")))
    }

    /// Bytes of rank `from` as a value. All of them: where some are left, the sender meant another type.
    fn decode<T: DeserializeOwned>(&self, from: usize, bytes: &[u8]) -> Result<T> {
        let wrong = |what: String| Error::Protocol {
            with: self.peers()[from].to_string(),
            reason: format!("an object of {} B is not of the expected type: {what}", bytes.len()),
        };
        match postcard::take_from_bytes(bytes) {
            Ok((value, [])) => Ok(value),
            Ok((_, rest)) => Err(wrong(format!("{} B are left over", rest.len()))),
            Err(error) => Err(wrong(error.to_string())),
        }
    }

    /// Refuses objects that are together larger than `Config::object_limit_bytes`, on every rank alike.
    fn bounded(&self, call: &'static str, sizes: &[u64]) -> Result<Vec<usize>> {
        let limit = self.config().object_limit_bytes as u64;
        let total = sizes.iter().try_fold(0_u64, |sum, size| sum.checked_add(*size));
        match total {
            Some(total) if total <= limit => Ok(sizes.iter().map(|size| *size as usize).collect()),
            _ => Err(Error::argument(call, format!("objects of {sizes:?} B are more than Config::object_limit_bytes, {limit} B"))),
        }
    }

    /// Every rank's object, in rank order, on every rank. Two collectives: the sizes, then the bytes.
    ///
    /// # Errors
    ///
    /// Those of the collectives; `InvalidArgument` where a value cannot be serialised or the objects are too large together.
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, object: &T) -> Result<Vec<T>> {
        let mine = Self::encode("all_gather_object", object)?;
        let mut sizes = vec![0_u64; self.world_size()];
        self.all_gather_into(&(mine.len() as u64), &mut sizes)?;
        let counts = self.bounded("all_gather_object", &sizes)?;
        let mut bytes = vec![0_u8; counts.iter().sum()];
        self.all_gather_v_into(&mine, &mut bytes, &counts)?;
        self.decode_all(&bytes, &counts)
    }

    /// The root's object on every rank: the root passes `Some`, the others `None`.
    ///
    /// # Errors
    ///
    /// As [`all_gather_object`](Self::all_gather_object).
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(&self, object: Option<&T>, root: usize) -> Result<T> {
        self.only_at_root(crate::call::Kind::Broadcast, "an object", object.is_some(), root)?;
        let mut bytes = object.map(|object| Self::encode("broadcast_object", object)).transpose()?.unwrap_or_default();
        let mut size = bytes.len() as u64;
        self.broadcast(&mut size, root)?;
        self.bounded("broadcast_object", &[size])?;
        bytes.resize(size as usize, 0);
        self.broadcast(&mut bytes, root)?;
        self.decode(root, &bytes)
    }

    /// Every rank's object, in rank order, on the root; `None` elsewhere.
    ///
    /// # Errors
    ///
    /// As [`all_gather_object`](Self::all_gather_object).
    pub fn gather_object<T: Serialize + DeserializeOwned>(&self, object: &T, root: usize) -> Result<Option<Vec<T>>> {
        let mine = Self::encode("gather_object", object)?;
        let mut sizes = vec![0_u64; self.world_size()];
        // Everyone learns the sizes, so that too much is refused by everyone.
        self.all_gather_into(&(mine.len() as u64), &mut sizes)?;
        let counts = self.bounded("gather_object", &sizes)?;
        if self.rank() != root {
            self.gather_v(&mine, None::<(&mut Vec<u8>, &[usize])>, root)?;
            return Ok(None);
        }
        let mut bytes = vec![0_u8; counts.iter().sum()];
        self.gather_v(&mine, Some((&mut bytes, &counts)), root)?;
        self.decode_all(&bytes, &counts).map(Some)
    }

    /// Hands each rank its object of the root's list: the root passes `Some` with one object per rank, the others `None`.
    ///
    /// # Errors
    ///
    /// As [`all_gather_object`](Self::all_gather_object).
    pub fn scatter_object<T: Serialize + DeserializeOwned>(&self, objects: Option<&[T]>, root: usize) -> Result<T> {
        self.only_at_root(crate::call::Kind::Scatter, "objects", objects.is_some(), root)?;
        let mut sizes = vec![0_u64; self.world_size()];
        let mut bytes = Vec::new();
        if let Some(objects) = objects {
            Self::equal(crate::call::Kind::Scatter, "the list of objects", objects.len(), self.world_size(), "one for each rank")?;
            for (size, object) in sizes.iter_mut().zip(objects) {
                let encoded = Self::encode("scatter_object", object)?;
                *size = encoded.len() as u64;
                bytes.extend(encoded);
            }
        }
        self.broadcast(&mut sizes, root)?;
        let counts = self.bounded("scatter_object", &sizes)?;
        let mut mine = vec![0_u8; counts[self.rank()]];
        let source = objects.map(|_| (&bytes, &counts[..]));
        self.scatter_v(source, &mut mine, root)?;
        self.decode(root, &mine)
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
