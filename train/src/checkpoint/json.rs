//! JSON of untrusted files: no duplicate names, as the safetensors format requires, and a limit on dimensions. Pure.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// The most dimensions of a tensor: as many as a NumPy array can have.
pub(super) const MOST_DIMENSIONS: usize = 64;

/// A map without duplicate names.
#[derive(Debug)]
pub(super) struct Unique<V>(pub(super) BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Unique<V> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(UniqueVisitor(PhantomData))
    }
}

struct UniqueVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueVisitor<V> {
    type Value = Unique<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Unique<V>, A::Error> {
        let mut map = BTreeMap::new();
        while let Some(name) = from.next_key::<String>()? {
            let value = from.next_value()?;
            add(&mut map, name, value)?;
        }
        Ok(Unique(map))
    }
}

/// Adds an entry, unless its name is a duplicate.
pub(super) fn add<V, E: Error>(map: &mut BTreeMap<String, V>, name: String, value: V) -> Result<(), E> {
    if map.contains_key(&name) {
        return Err(E::custom(format_args!("{name:?} appears twice")));
    }
    map.insert(name, value);
    Ok(())
}

/// Reads, for `deserialize_with`, a map without duplicate names.
pub(super) fn unique<'de, V: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, V>, D::Error> {
    Unique::deserialize(from).map(|map| map.0)
}

/// Reads, for `deserialize_with`, a shape of at most [`MOST_DIMENSIONS`].
pub(super) fn shape<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<usize>, D::Error> {
    struct ShapeVisitor;

    impl<'de> Visitor<'de> for ShapeVisitor {
        type Value = Vec<usize>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("the lengths of a tensor's dimensions")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Vec<usize>, A::Error> {
            let mut shape = Vec::new();
            while let Some(length) = from.next_element()? {
                if shape.len() == MOST_DIMENSIONS {
                    return Err(A::Error::custom(format_args!("a shape has more than {MOST_DIMENSIONS} dimensions")));
                }
                shape.push(length);
            }
            Ok(shape)
        }
    }

    from.deserialize_seq(ShapeVisitor)
}
