//! The names and parameters of this crate's kernels, by family. Each family is one image.

use crate::call::element::DType;
use crate::device::plan::FoldOp;

/// The number of element types.
pub(super) const TYPES: usize = DType::ALL.len();

/// The images of one family: for devices with compute capability 7.0 or more, and for 8.0 or more. The driver requires
/// a NUL at the end.
#[derive(Debug)]
pub(super) struct Family {
    pub(super) name: &'static str,
    sm70: &'static str,
    sm80: &'static str,
}

macro_rules! family {
    ($name:literal) => {
        Family {
            name: $name,
            sm70: concat!(include_str!(concat!(env!("COLLECTIVES_KERNELS"), "/", $name, "_sm70.ptx")), "\0"),
            sm80: concat!(include_str!(concat!(env!("COLLECTIVES_KERNELS"), "/", $name, "_sm80.ptx")), "\0"),
        }
    };
}

/// The number of families.
pub(super) const FAMILY_COUNT: usize = 5;

/// The families that a backend loads.
pub(super) static FAMILIES: [Family; FAMILY_COUNT] =
    [family!("bits"), family!("average"), family!("sum"), family!("premul"), family!("check")];

impl Family {
    /// Returns the image for a device.
    pub(super) fn image(&self, capability: (i32, i32)) -> &'static str {
        if capability >= (8, 0) { self.sm80 } else { self.sm70 }
    }
}

/// Some of the families: one bit for each, in the order of `FAMILIES`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FamilySet(u8);

impl FamilySet {
    pub(crate) const NONE: Self = Self(0);
    pub(crate) const ALL: Self = Self((1 << FAMILY_COUNT) - 1);
    pub(crate) const BITS: Self = Self(1);
    pub(crate) const AVERAGE: Self = Self(1 << 1);
    pub(crate) const SUM: Self = Self(1 << 2);
    pub(crate) const PREMUL: Self = Self(1 << 3);
    pub(crate) const CHECK: Self = Self(1 << 4);

    /// Returns the set with the given bits. Bits of families that do not exist are ignored.
    pub(crate) fn from_bits(bits: u8) -> Self {
        Self(bits & Self::ALL.0)
    }

    pub(crate) fn bits(self) -> u8 {
        self.0
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(crate) fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the families that are in this set and not in the other.
    pub(crate) fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns the families' names.
    pub(crate) fn names(self) -> impl Iterator<Item = &'static str> {
        FAMILIES.iter().enumerate().filter(move |(place, _)| self.0 >> place & 1 == 1).map(|(_, family)| family.name)
    }

    /// Returns the index of the only family in the set.
    pub(super) fn place(self) -> usize {
        self.0.trailing_zeros() as usize
    }
}

/// Returns the family of a fold.
pub(crate) fn family_of(op: FoldOp) -> FamilySet {
    match op {
        FoldOp::And | FoldOp::Or | FoldOp::Xor => FamilySet::BITS,
        FoldOp::Avg => FamilySet::AVERAGE,
        FoldOp::Sum | FoldOp::Prod | FoldOp::Min | FoldOp::Max => FamilySet::SUM,
    }
}

/// The six float types.
pub(super) const FLOATS: [DType; 6] = [DType::F32, DType::F64, DType::F16, DType::Bf16, DType::F8E4M3, DType::F8E5M2];

/// The floats whose sums are divided in place.
pub(super) const DIVIDED: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::Bf16];

/// Whether there is a fold of this op on this type.
pub(crate) fn has_fold(op: FoldOp, dtype: DType) -> bool {
    match op {
        FoldOp::And | FoldOp::Or | FoldOp::Xor => !dtype.is_float(),
        FoldOp::Avg => dtype != DType::Bool,
        FoldOp::Sum | FoldOp::Prod => dtype.is_float() || matches!(dtype, DType::I16 | DType::U16),
        FoldOp::Min | FoldOp::Max => matches!(dtype, DType::I16 | DType::U16 | DType::F8E4M3 | DType::F8E5M2),
    }
}

/// Returns the family and name of a fold. Bitwise ops work on bytes, whatever the type.
pub(super) fn fold(op: FoldOp, dtype: DType) -> (FamilySet, String) {
    let name = if op.is_bitwise() { format!("fold_{}_b8", op.name()) } else { format!("fold_{}_{dtype}", op.name()) };
    (family_of(op), name)
}

/// Returns the family and name of the kernel that turns bytes into truth values.
pub(super) fn truth() -> (FamilySet, String) {
    (FamilySet::BITS, "truth_b8".to_owned())
}

/// Returns the family and name of the division that ends a mean.
pub(super) fn divide(dtype: DType) -> (FamilySet, String) {
    (FamilySet::AVERAGE, format!("scale_{dtype}"))
}

/// Returns the family and name of the multiplication that begins a `PreMulSum`.
pub(super) fn multiply(dtype: DType) -> (FamilySet, String) {
    (FamilySet::PREMUL, format!("premul_{dtype}"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    const FOLD: &[&str] = &["u64", "u64", "u64", "u32", "u32", "u64", "u64", "u32"];
    const DIVIDE: &[&str] = &["u64", "u64", "u32"];
    const MULTIPLY: &[&str] = &["u64", "u64", "u64", "f64"];
    const TRUTH: &[&str] = &["u64", "u64"];
    const FILL: &[&str] = &["u64", "u64", "u64", "u64", "u64"];
    const CHECK: &[&str] = &["u64", "u64", "u32", "u64", "u64", "u64", "u64"];

    /// Returns every entry that we look up, with its family and parameters.
    fn expected() -> Vec<(&'static str, String, &'static [&'static str])> {
        let mut entries: Vec<(FamilySet, String, &'static [&'static str])> = Vec::new();
        for op in FoldOp::ALL {
            for dtype in DType::ALL.into_iter().filter(|dtype| has_fold(op, *dtype)) {
                let (family, name) = fold(op, dtype);
                entries.push((family, name, FOLD));
            }
        }
        entries.extend(DIVIDED.map(divide).map(|(family, name)| (family, name, DIVIDE)));
        entries.extend(FLOATS.map(multiply).map(|(family, name)| (family, name, MULTIPLY)));
        entries.push((FamilySet::BITS, truth().1, TRUTH));
        entries.push((FamilySet::CHECK, "fill_pattern".to_owned(), FILL));
        entries.push((FamilySet::CHECK, "check_pattern".to_owned(), CHECK));
        let mut entries: Vec<_> = entries.into_iter().map(|(family, name, types)| (FAMILIES[family.place()].name, name, types)).collect();
        entries.sort();
        entries.dedup();
        entries
    }

    /// Returns the entries of an image and the types of their parameters.
    fn entries(image: &str) -> Vec<(String, Vec<String>)> {
        let parts = image.split(".visible .entry ").skip(1);
        parts
            .map(|part| {
                let (name, rest) = part.split_once('(').unwrap();
                let (parameters, _) = rest.split_once(')').unwrap();
                let types = parameters.split(".param .").skip(1).map(|parameter| parameter.split(' ').next().unwrap().to_owned());
                (name.to_owned(), types.collect())
            })
            .collect()
    }

    #[test]
    fn the_images_have_every_entry_with_the_parameters_that_we_pass_and_no_other() {
        for capability in [(7, 0), (8, 0)] {
            for family in &FAMILIES {
                let mut there = entries(family.image(capability));
                there.sort();
                let wanted = expected().into_iter().filter(|(of, ..)| *of == family.name);
                let wanted: Vec<_> =
                    wanted.map(|(_, name, types)| (name, types.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())).collect();
                assert_eq!(there, wanted, "family {} for {capability:?}", family.name);
            }
        }
    }

    #[test]
    fn each_family_has_the_bit_of_its_place() {
        let named = [
            (FamilySet::BITS, "bits"),
            (FamilySet::AVERAGE, "average"),
            (FamilySet::SUM, "sum"),
            (FamilySet::PREMUL, "premul"),
            (FamilySet::CHECK, "check"),
        ];
        for (family, name) in named {
            assert_eq!(family.names().collect::<Vec<_>>(), [name]);
        }
        assert_eq!(named.iter().fold(FamilySet::NONE, |all, (family, _)| all.or(*family)), FamilySet::ALL);
        assert_eq!(FamilySet::from_bits(u8::MAX), FamilySet::ALL);
    }

    #[test]
    fn a_device_gets_the_newest_image_that_it_can_run() {
        for family in &FAMILIES {
            for (capability, target) in [((7, 0), "sm_70"), ((7, 5), "sm_70"), ((8, 0), "sm_80"), ((9, 0), "sm_80"), ((12, 1), "sm_80")] {
                let image = family.image(capability);
                assert!(image.contains(&format!(".target {target}\n")), "{} for {capability:?}", family.name);
                assert!(image.contains(".version 8.0\n") && image.ends_with('\0'), "{}", family.name);
                assert_eq!(image.matches('\0').count(), 1);
            }
        }
    }
}
