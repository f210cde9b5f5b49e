//! The cache sizes of this machine, as the kernel reports them.

use std::fs;
use std::path::Path;

/// The folder in which the kernel describes the caches of the first processor, one subfolder each. The other processors
/// are assumed to have the same caches.
const CACHES: &str = "/sys/devices/system/cpu/cpu0/cache";

/// Cache sizes; `None` for those that are unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Caches {
    /// Bytes of one processor's second-level cache.
    pub(crate) second_level: Option<usize>,
    /// Bytes of a last-level cache beyond the second level, and the number of processors that share it.
    pub(crate) last_level: Option<(usize, usize)>,
}

impl Caches {
    /// Reads the sizes from the kernel.
    pub(crate) fn of_this_machine() -> Self {
        Self::read(Path::new(CACHES))
    }

    fn read(folder: &Path) -> Self {
        let mut caches = Self { second_level: None, last_level: None };
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let text = |name: &str| fs::read_to_string(entry.path().join(name)).ok();
            let Some((level, bytes)) = text("level").and_then(|level| level.trim().parse::<u32>().ok()).zip(text("size").and_then(bytes))
            else {
                continue;
            };
            match level {
                2 => caches.second_level = Some(bytes),
                3.. => caches.last_level = Some((bytes, text("shared_cpu_list").and_then(count).unwrap_or(1))),
                _ => {}
            }
        }
        caches
    }
}

/// Parses a size as the kernel writes it, such as `512K`.
fn bytes(text: String) -> Option<usize> {
    let text = text.trim();
    let unit = match text.chars().last()? {
        'K' => 1 << 10,
        'M' => 1 << 20,
        'G' => 1 << 30,
        _ => 1,
    };
    text.trim_end_matches(['K', 'M', 'G']).parse::<usize>().ok()?.checked_mul(unit)
}

/// Counts the processors in a list such as `0-3,8`.
fn count(list: String) -> Option<usize> {
    let mut count = 0_usize;
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        count += last.checked_sub(first)? + 1;
    }
    Some(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_are_read_as_the_kernel_describes_them() {
        let folder = std::env::temp_dir().join(format!("collectives-caches-{}", std::process::id()));
        for (index, [level, size, shared]) in [["1", "32K", "0"], ["2", "1024K", "0-1"], ["3", "32768K", "0-3,8-11"]].iter().enumerate() {
            let cache = folder.join(format!("index{index}"));
            fs::create_dir_all(&cache).unwrap();
            for (name, text) in [("level", level), ("size", size), ("shared_cpu_list", shared)] {
                fs::write(cache.join(name), format!("{text}\n")).unwrap();
            }
        }
        let caches = Caches::read(&folder);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(caches, Caches { second_level: Some(1 << 20), last_level: Some((32 << 20, 8)) });
        assert_eq!(Caches::read(&folder), Caches { second_level: None, last_level: None });
    }

    #[test]
    fn other_words_are_no_sizes_and_no_lists() {
        assert_eq!(["2M", "7", "", "K", "xK"].map(|text| bytes(text.into())), [Some(2 << 20), Some(7), None, None, None]);
        assert_eq!(["0", "0-95", "1-0", ""].map(|list| count(list.into())), [Some(1), Some(96), None, None]);
    }
}
