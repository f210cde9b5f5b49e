//! Sizes on the command line, and the sweep over them.

/// The most rows of one sweep; a larger number is taken for a mistake.
const MOST_ROWS: usize = 1 << 20;

/// Reads a number of bytes in nccl-tests' form: a number, fractions allowed, then perhaps K, M or G (powers of 1024).
pub(crate) fn parse(text: &str) -> Result<usize, String> {
    let wrong = || format!("size {text:?}: expected a number of bytes such as 8, 4K, 1.5M or 2G");
    let trimmed = text.trim();
    let (number, unit) = match trimmed.chars().last() {
        Some('K' | 'k') => (&trimmed[..trimmed.len() - 1], 1_usize << 10),
        Some('M' | 'm') => (&trimmed[..trimmed.len() - 1], 1 << 20),
        Some('G' | 'g') => (&trimmed[..trimmed.len() - 1], 1 << 30),
        _ => (trimmed, 1),
    };
    let number = number.trim_end();
    if !number.starts_with(|first: char| first.is_ascii_digit() || first == '.') {
        return Err(wrong());
    }
    if let Ok(whole) = number.parse::<usize>() {
        return whole.checked_mul(unit).filter(|size| *size <= isize::MAX as usize).ok_or_else(|| format!("size {text:?}: too large"));
    }
    let bytes = number.parse::<f64>().map_err(|_| wrong())? * unit as f64;
    if bytes < isize::MAX as f64 { Ok(bytes as usize) } else { Err(format!("size {text:?}: too large")) }
}

/// The step from one size of a sweep to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Multiply by this.
    Factor(usize),
    /// Add this many bytes.
    Bytes(usize),
}

/// Returns the sizes from `least` to `most`.
pub(crate) fn sweep(least: usize, most: usize, step: Step) -> Result<Vec<usize>, String> {
    if least > most {
        return Err(format!("invalid sizes for 'minbytes' and 'maxbytes': {least} > {most}"));
    }
    match step {
        Step::Factor(0 | 1) => return Err("a step factor (-f) must be at least 2".to_owned()),
        Step::Bytes(0) => return Err("a step (-i) must be at least one byte".to_owned()),
        _ => {}
    }
    let mut sizes = vec![least];
    let mut size = least;
    loop {
        size = match step {
            // Zero times anything stays zero, so the sweep continues with one byte.
            Step::Factor(_) if size == 0 => 1,
            Step::Factor(factor) => size.saturating_mul(factor),
            Step::Bytes(bytes) => size.saturating_add(bytes),
        };
        if size > most {
            return Ok(sizes);
        }
        if sizes.len() == MOST_ROWS {
            return Err(format!("the steps from {least} to {most} bytes give more than {MOST_ROWS} rows; use larger steps"));
        }
        sizes.push(size);
    }
}

/// Formats a size briefly: `8 B`, `4 KiB`, `1.5 MiB`.
pub(crate) fn human(bytes: usize) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 || unit == "GiB" {
            let text = format!("{value:.1}");
            return format!("{} {unit}", text.strip_suffix(".0").unwrap_or(&text));
        }
        value /= 1024.0;
    }
    String::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_nccl_tests_reads_them() {
        for (text, bytes) in
            [("8", 8), ("0", 0), ("4K", 4096), ("4k", 4096), ("128M", 128 << 20), ("2g", 2 << 30), ("1.5K", 1536), ("1 M", 1 << 20)]
        {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in ["", "K", "-1", "+1", "8T", "1e999", "x", "nan", "inf", "1..2", "99999999999999999999", "99999999999G", "é", "4é"] {
            assert!(parse(text).unwrap_err().contains(text), "{text}");
        }
    }

    #[test]
    fn sweeps_include_both_ends() {
        assert_eq!(sweep(8, 64, Step::Factor(2)), Ok(vec![8, 16, 32, 64]));
        assert_eq!(sweep(8, 63, Step::Factor(2)), Ok(vec![8, 16, 32]));
        assert_eq!(sweep(5, 5, Step::Bytes(1)), Ok(vec![5]));
        assert_eq!(sweep(0, 30, Step::Bytes(10)), Ok(vec![0, 10, 20, 30]));
        assert_eq!(sweep(0, 4, Step::Factor(2)), Ok(vec![0, 1, 2, 4]));
        assert_eq!(sweep(1, usize::MAX - 1, Step::Factor(usize::MAX)), Ok(vec![1]));
    }

    #[test]
    fn sweeps_that_cannot_be_are_refused() {
        assert!(sweep(9, 8, Step::Factor(2)).unwrap_err().contains("9 > 8"));
        assert!(sweep(1, 8, Step::Factor(1)).is_err());
        assert!(sweep(1, 8, Step::Bytes(0)).is_err());
        assert!(sweep(0, 1 << 40, Step::Bytes(1)).unwrap_err().contains("rows"));
    }

    #[test]
    fn sizes_are_written_shortly() {
        for (bytes, text) in [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (128 << 20, "128 MiB"), (3 << 40, "3072 GiB")] {
            assert_eq!(human(bytes), text);
        }
    }
}
