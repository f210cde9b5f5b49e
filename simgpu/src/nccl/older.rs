//! Imitates older releases: the same library, in which later names cannot be found.

use std::ops::Range;
use std::path::Path;

use libloading::os::unix::Library;

use super::SYMBOLS;
use crate::library;

/// Opens a copy of the library without the names that are newer than `version`.
pub(super) fn open(path: &Path, version: i32) -> Library {
    let mut image = std::fs::read(path).unwrap_or_else(|error| panic!("reading {}: {error}", path.display()));
    let newer: Vec<&str> = SYMBOLS.iter().filter(|(_, since)| *since > version).map(|(name, _)| *name).collect();
    let hidden = hide(&mut image, &newer);
    assert_eq!(hidden, Some(newer.len()), "{} does not have the symbols it should have", path.display());
    let copy = std::env::temp_dir().join(format!("simulated-nccl-{version}-{}.so", std::process::id()));
    std::fs::write(&copy, image).unwrap_or_else(|error| panic!("writing {}: {error}", copy.display()));
    let library = library::open(&copy);
    // The mapping stays valid.
    let _ = std::fs::remove_file(&copy);
    library
}

/// Changes the first letter of these dynamic symbols, so that the hash of the old name leads to another name. Returns
/// how many there were, or `None` if this is no 64-bit library.
fn hide(image: &mut [u8], names: &[&str]) -> Option<usize> {
    const DYNAMIC_SYMBOLS: u32 = 11;
    let table = number(image, 0x28, 8)?;
    let (size, count) = (number(image, 0x3a, 2)?, number(image, 0x3c, 2)?);
    let header = |index: usize| table + index * size;
    let symbols = (0..count).map(header).find(|&at| number(image, at + 4, 4) == Some(DYNAMIC_SYMBOLS as usize))?;
    let strings = header(number(image, symbols + 0x28, 4)?);
    let extent = |image: &[u8], at: usize| -> Option<Range<usize>> {
        let start = number(image, at + 0x18, 8)?;
        Some(start..start + number(image, at + 0x20, 8)?)
    };
    let texts = extent(image, strings)?;
    let mut hidden = 0;
    for symbol in extent(image, symbols)?.step_by(24) {
        let at = texts.start + number(image, symbol, 4)?;
        let length = image.get(at..texts.end)?.iter().position(|&byte| byte == 0)?;
        if names.iter().any(|name| name.as_bytes() == &image[at..at + length]) {
            image[at] = b'x';
            hidden += 1;
        }
    }
    Some(hidden)
}

fn number(image: &[u8], at: usize, bytes: usize) -> Option<usize> {
    let mut number = [0; 8];
    number[..bytes].copy_from_slice(image.get(at..at + bytes)?);
    Some(usize::from_le_bytes(number))
}
