//! Sizes as typed by a user.

#[path = "../../../collperf/src/sizes.rs"]
mod program;

use program::{Step, human, parse, sweep};

/// The initial inputs.
pub(crate) const SEEDS: [&str; 4] = ["8 1.5M 2", "4K 2g 16", "0 128M i4096", "1e3 .5G i1"];

/// Interprets any text as the smallest and the largest size of a sweep, and its step. Valid sizes must be in order,
/// within both bounds, and can be parsed again.
pub(crate) fn sizes(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut words = text.split_ascii_whitespace();
    let (least, most, step) = (words.next().unwrap_or_default(), words.next().unwrap_or_default(), words.next().unwrap_or("2"));
    for word in [least, most] {
        match parse(word) {
            Ok(bytes) => {
                assert!(bytes <= isize::MAX as usize);
                assert_eq!(parse(&bytes.to_string()), Ok(bytes), "{word:?}");
                assert!(human(bytes).ends_with('B'));
            }
            Err(reason) => assert!(reason.contains("size"), "{reason}"),
        }
    }
    let (Ok(least), Ok(most)) = (parse(least), parse(most)) else { return };
    let number = |text: &str| text.parse::<usize>().ok();
    let step = step.strip_prefix('i').map_or(number(step).map(Step::Factor), |bytes| number(bytes).map(Step::Bytes));
    let Some(Ok(sizes)) = step.map(|step| sweep(least, most, step)) else { return };
    assert_eq!(sizes.first(), Some(&least));
    assert!(sizes.is_sorted_by(|a, b| a < b) && sizes.iter().all(|size| *size <= most));
}
