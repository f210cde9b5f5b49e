//! Groups of ranks that run at the same time, as `NCCL_TESTS_SPLIT` divides them.

use std::fmt;

/// How the number of a process determines the colour of its ranks; ranks of one colour are a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Subset {
    form: Form,
    value: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    And,
    Or,
    Modulo,
    Divide,
}

/// The forms, their names and their operators.
const FORMS: [(Form, &str, &str); 4] =
    [(Form::And, "AND", "&"), (Form::Or, "OR", "|"), (Form::Modulo, "MOD", "%"), (Form::Divide, "DIV", "/")];

/// The largest value: nccl-tests' colours are C integers.
const MOST: u32 = i32::MAX as u32;

impl Subset {
    /// Reads `AND 0x7`, `%2` and similar texts.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let after = |word: &str| {
            let is_there = text.get(..word.len()).is_some_and(|start| start.eq_ignore_ascii_case(word));
            is_there.then(|| text[word.len()..].trim_start())
        };
        let found = FORMS.into_iter().find_map(|(form, word, sign)| Some((form, after(word).or_else(|| after(sign))?)));
        let (form, number) = found.ok_or("expected AND, OR, MOD or DIV (or &, |, %, /), followed by a number")?;
        let value = number_of(number).ok_or_else(|| not_a_number(number))?;
        match (form, value) {
            (Form::Modulo | Form::Divide, 0) => Err("division by 0; use a number of at least 1".to_owned()),
            _ => Ok(Self { form, value }),
        }
    }

    /// Reads a mask: a hexadecimal number.
    pub(crate) fn masked(text: &str) -> Result<Self, String> {
        let lower = text.trim().to_ascii_lowercase();
        let value = in_base(lower.strip_prefix("0x").unwrap_or(&lower), 16).ok_or_else(|| not_a_number(text))?;
        Ok(Self { form: Form::And, value })
    }

    /// Returns the colour of the process with this number.
    pub(crate) fn color(self, number: usize) -> u32 {
        // There are at most 2^20 processes.
        let number = u32::try_from(number).unwrap_or(MOST);
        match self.form {
            Form::And => number & self.value,
            Form::Or => number | self.value,
            Form::Modulo => number % self.value.max(1),
            Form::Divide => number / self.value.max(1),
        }
    }
}

impl fmt::Display for Subset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = FORMS.into_iter().find(|(form, ..)| *form == self.form).map_or("", |(_, word, _)| word);
        write!(f, "{word} {:#x}", self.value)
    }
}

fn not_a_number(text: &str) -> String {
    format!("{:?} is not a number from 0 to {MOST}", text.chars().take(40).collect::<String>())
}

/// Reads a number in C's notation, or in binary after `0b`.
fn number_of(text: &str) -> Option<u32> {
    let lower = text.to_ascii_lowercase();
    match (lower.strip_prefix("0x"), lower.strip_prefix("0b"), lower.strip_prefix('0')) {
        (Some(digits), ..) => in_base(digits, 16),
        (_, Some(digits), _) => in_base(digits, 2),
        (.., Some(digits)) if !digits.is_empty() => in_base(digits, 8),
        _ => in_base(&lower, 10),
    }
}

fn in_base(digits: &str, base: u32) -> Option<u32> {
    // Rust would accept a sign.
    let all_digits = !digits.is_empty() && digits.chars().all(|digit| digit.is_digit(base));
    u32::from_str_radix(digits, base).ok().filter(|value| all_digits && *value <= MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn colors(text: &str) -> Vec<u32> {
        let subset = Subset::parse(text).unwrap();
        (0..13).map(|number| subset.color(number)).collect()
    }

    #[test]
    fn ranks_are_divided_as_nccl_tests_divides_them() {
        for text in ["AND 0x3", "and 3", "&3", "& 0b11", "AND 03", "MOD 4", "mod4", "%4", "% 0x4"] {
            assert_eq!(colors(text), [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0], "{text}");
        }
        for text in ["DIV 8", "/8", "div 010", "/ 0b1000"] {
            assert_eq!(colors(text), [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1], "{text}");
        }
        for text in ["OR 0x7", "|7", "or 7"] {
            assert_eq!(colors(text), [7, 7, 7, 7, 7, 7, 7, 7, 15, 15, 15, 15, 15], "{text}");
        }
        assert_eq!(Subset::masked("f"), Subset::parse("AND 15"));
        assert_eq!(Subset::masked("0x10"), Subset::parse("AND 0x10"));
        assert_eq!(Subset::parse("MOD 10").unwrap().to_string(), "MOD 0xa");
    }

    #[test]
    fn what_divides_nothing_is_an_error() {
        let forms =
            ["XOR 1", "8", "", "AND", "MOD x", "MOD -1", "MOD +1", "DIV 0", "% 0", "OR 2147483648", "AND 8 9", "& 0x", "& 0b2", "é"];
        for text in forms.into_iter().chain(["OR 08", "MOD 99999999999999999999", "& 0x1ffffffff", "AN"]) {
            assert!(Subset::parse(text).is_err(), "{text}");
        }
        for text in ["", "g", "-1", "0x0x1", "80000000", "123456789abcdef01"] {
            assert!(Subset::masked(text).is_err(), "{text}");
        }
        assert!(Subset::parse("OR 0x7fffffff").is_ok());
    }
}
