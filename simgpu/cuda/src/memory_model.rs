//! The memory order of kernels. `SIMGPU_MEMORY_MODEL=SEED` makes it as weak as PTX permits; what happens is drawn from
//! the seed, a whole number.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::{LazyLock, Mutex, PoisonError};

use simgpu_ptx::MemoryModel;

const VARIABLE: &str = "SIMGPU_MEMORY_MODEL";

static SEED: LazyLock<Result<Option<u64>, String>> = LazyLock::new(|| seed(std::env::var_os(VARIABLE).as_deref()));

fn seed(value: Option<&OsStr>) -> Result<Option<u64>, String> {
    let Some(value) = value else { return Ok(None) };
    let number = value.to_str().and_then(|text| text.parse().ok());
    let wrong = || format!("{VARIABLE} is {value:?}: set it to a seed, a whole number from 0 to {}, or do not set it", u64::MAX);
    number.map(Some).ok_or_else(wrong)
}

/// Checks the variable. An error says what is wrong with it.
pub(crate) fn check() -> Result<(), &'static str> {
    SEED.as_ref().map(|_| ()).map_err(String::as_str)
}

/// Returns the memory order of a device, if it is modelled.
pub(crate) fn of(device: usize) -> Option<&'static MemoryModel> {
    static MODELS: Mutex<Option<HashMap<usize, &'static MemoryModel>>> = Mutex::new(None);
    let seed = SEED.as_ref().ok().copied().flatten()?;
    let mut models = MODELS.lock().unwrap_or_else(PoisonError::into_inner);
    let own = seed.wrapping_add((device as u64) << 32);
    Some(models.get_or_insert_default().entry(device).or_insert_with(|| Box::leak(Box::new(MemoryModel::new(own)))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_is_a_seed() {
        assert_eq!(seed(None), Ok(None));
        assert_eq!(seed(Some(OsStr::new("0"))), Ok(Some(0)));
        assert_eq!(seed(Some(OsStr::new("18446744073709551615"))), Ok(Some(u64::MAX)));
        for wrong in ["", "on", "-1", "1.5", " 1", "18446744073709551616"] {
            assert!(seed(Some(OsStr::new(wrong))).is_err_and(|why| why.contains(VARIABLE) && why.contains(wrong)), "{wrong:?}");
        }
    }

    #[test]
    fn a_device_keeps_its_order() {
        let same = |a: Option<&MemoryModel>, b: Option<&MemoryModel>| a.map(std::ptr::from_ref) == b.map(std::ptr::from_ref);
        assert!(same(of(3), of(3)));
        assert!(of(3).is_none() || !same(of(3), of(4)));
    }
}
