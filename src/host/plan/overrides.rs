//! The algorithms that the caller asks for: `doubling:0-16K,ring:16K-`.

use std::fmt;

use super::Algorithm;
use crate::{Error, Result};

/// An algorithm for a range of sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rule {
    algorithm: Algorithm,
    from: usize,
    /// The first size that is too large; `None` where there is none.
    to: Option<usize>,
}

/// Rules in the order in which they were given; the first that fits counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Overrides {
    rules: Vec<Rule>,
}

impl Overrides {
    /// Understands `name:from-to` parts separated by commas. Sizes are bytes, with a binary suffix K, M or G if wished; `from`
    /// belongs to the range, `to` does not, and a `to` left out means any size.
    ///
    /// # Errors
    ///
    /// `Config`, quoting every part that cannot be understood.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let (mut rules, mut complaints) = (Vec::new(), Vec::new());
        for part in text.split(',').map(str::trim) {
            match parse_rule(part) {
                Ok(rule) => rules.push(rule),
                Err(complaint) => complaints.push(format!("{part:?}: {complaint}")),
            }
        }
        if complaints.is_empty() { Ok(Self { rules }) } else { Err(Error::config(format!("algorithm {text:?}"), complaints.join("; "))) }
    }

    /// The algorithm asked for at this size, among those that the collective knows.
    pub(super) fn find(&self, bytes: usize, candidates: &[Algorithm]) -> Option<Algorithm> {
        let fits = |rule: &&Rule| rule.from <= bytes && rule.to.is_none_or(|to| bytes < to) && candidates.contains(&rule.algorithm);
        self.rules.iter().find(fits).map(|rule| rule.algorithm)
    }

    /// Every size at which a rule begins or ends.
    pub(super) fn borders(&self) -> impl Iterator<Item = usize> {
        self.rules.iter().flat_map(|rule| [Some(rule.from), rule.to]).flatten()
    }
}

impl fmt::Display for Overrides {
    /// As it would be written.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, rule) in self.rules.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{}:{}-", rule.algorithm, Size(rule.from))?;
            if let Some(to) = rule.to {
                write!(f, "{}", Size(to))?;
            }
        }
        Ok(())
    }
}

/// A number of bytes, written with the largest suffix that leaves it whole.
pub(super) struct Size(pub(super) usize);

/// The suffixes and the bits that they stand for.
const SUFFIXES: [(char, u32); 3] = [('G', 30), ('M', 20), ('K', 10)];

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match SUFFIXES.iter().find(|(_, bits)| self.0 > 0 && self.0.trailing_zeros() >= *bits) {
            Some((suffix, bits)) => write!(f, "{}{suffix}", self.0 >> bits),
            None => write!(f, "{}", self.0),
        }
    }
}

/// One `name:from-to`; an error says what is wrong with it.
fn parse_rule(part: &str) -> std::result::Result<Rule, String> {
    let expected = "expected NAME:FROM-TO or NAME:FROM-, for example ring:16K-";
    let (name, range) = part.split_once(':').ok_or(expected)?;
    let algorithm = Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name).ok_or_else(|| {
        let known = Algorithm::ALL.map(Algorithm::name).join(", ");
        format!("unknown algorithm {name:?}, known are {known}")
    })?;
    let (from, to) = range.split_once('-').ok_or(expected)?;
    let from = parse_size(from)?;
    let to = if to.is_empty() { None } else { Some(parse_size(to)?) };
    match to {
        Some(to) if to <= from => Err(format!("the range {range:?} is empty: it has to end above its beginning")),
        _ => Ok(Rule { algorithm, from, to }),
    }
}

/// A number of bytes with an optional binary suffix.
fn parse_size(text: &str) -> std::result::Result<usize, String> {
    let suffix = SUFFIXES.iter().find_map(|(suffix, bits)| {
        let digits = text.strip_suffix(*suffix).or_else(|| text.strip_suffix(suffix.to_ascii_lowercase()))?;
        Some((digits, *bits))
    });
    let (digits, bits) = suffix.unwrap_or((text, 0));
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("{text:?} is no size: expected digits and at most one of K, M, G"));
    }
    let scaled = digits.parse::<usize>().ok().and_then(|number| number.checked_mul(1 << bits));
    scaled.ok_or_else(|| format!("{text:?} is more bytes than this machine can count"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaint(text: &str) -> String {
        Overrides::parse(text).expect_err(text).to_string()
    }

    #[test]
    fn ranges_are_half_open_and_the_first_that_fits_decides() {
        let overrides = Overrides::parse("doubling:0-16K, ring:16k-1M,direct:512K-").expect("rules");
        let all = Algorithm::ALL;
        for (bytes, algorithm) in [(0, "doubling"), (16383, "doubling"), (16384, "ring"), (1 << 20, "direct"), (usize::MAX, "direct")] {
            assert_eq!(overrides.find(bytes, &all).map(Algorithm::name), Some(algorithm), "{bytes}");
        }
        assert_eq!(overrides.find(20_000, &[Algorithm::Direct]), None);
        assert_eq!(overrides.find(600 << 10, &[Algorithm::Direct]), Some(Algorithm::Direct));
    }

    #[test]
    fn what_is_printed_can_be_read_again() {
        for text in ["doubling:0-16K,ring:16K-", "chain:1-3,scatter_gather:1M-2G,binomial:1025-"] {
            assert_eq!(Overrides::parse(text).expect("rules").to_string(), text);
        }
        assert_eq!(Overrides::parse("ring:1024k-").expect("rules").to_string(), "ring:1M-");
    }

    #[test]
    fn every_malformed_part_is_quoted() {
        let words = complaint("ring:5-3,doubling:0-1K,rung:0-,ring,direct:1X-,direct:-5,ring:99999999999G-,");
        for part in ["\"ring:5-3\"", "\"rung:0-\"", "\"ring\"", "\"direct:1X-\"", "\"direct:-5\"", "\"ring:99999999999G-\"", "\"\""] {
            assert!(words.contains(&format!("{part}: ")), "{part} in {words}");
        }
        assert!(words.contains("known are doubling, binomial, ring, chain, scatter_gather, direct"), "{words}");
        assert!(!words.contains("\"doubling:0-1K\":"), "{words}");
    }

    #[test]
    fn nonsense_is_an_error_and_no_panic() {
        for text in [
            "",
            ",",
            ":",
            "ring:",
            "ring:-",
            "ring:--",
            "ring:K-",
            "ring:+1-",
            "ring:1-2-3",
            "ring:1é-",
            "ring:0-0",
            "ring:18446744073709551616-",
        ] {
            complaint(text);
        }
    }
}
