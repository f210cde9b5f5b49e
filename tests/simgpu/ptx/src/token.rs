//! Splits PTX text into tokens; comments and white space fall away.

use crate::ParseError;

/// A token; what it names stays in the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Token<'a> {
    /// A name: an opcode, a label, a variable, a register (`%r1`).
    Word(&'a str),
    /// A name after a dot: a directive or a suffix of an opcode.
    Dot(&'a str),
    /// A number, not yet read.
    Number(&'a str),
    /// A string with its quotes taken away.
    Text(&'a str),
    /// Any other character.
    Mark(char),
}

/// Tokens with the lines they stand on.
pub(crate) fn tokens(text: &str) -> Result<Vec<(Token<'_>, u32)>, ParseError> {
    let mut found = Vec::with_capacity(text.len() / 4);
    let mut rest = text;
    let mut line = 1;
    loop {
        let after = skip_blank(rest, line)?;
        line += lines(&rest[..rest.len() - after.len()]);
        rest = after;
        let Some(first) = rest.chars().next() else { return Ok(found) };
        let (token, length) = one(rest, first).ok_or_else(|| ParseError::new(line, format!("no PTX token begins with {first:?}")))?;
        found.push((token, line));
        line += lines(&rest[..length]);
        rest = &rest[length..];
    }
}

fn lines(text: &str) -> u32 {
    text.bytes().filter(|&b| b == b'\n').count() as u32
}

/// What follows white space, both kinds of comments, and the NUL that compilers leave at the end.
fn skip_blank(text: &str, line: u32) -> Result<&str, ParseError> {
    let mut rest = text;
    loop {
        let trimmed = rest.trim_start_matches(|c: char| c.is_whitespace() || c == '\0');
        if let Some(comment) = trimmed.strip_prefix("//") {
            rest = comment.find('\n').map_or("", |end| &comment[end..]);
        } else if let Some(comment) = trimmed.strip_prefix("/*") {
            let begins = line + lines(&text[..text.len() - trimmed.len()]);
            let end = comment.find("*/").ok_or_else(|| ParseError::new(begins, "a comment does not end"))?;
            rest = &comment[end + 2..];
        } else {
            return Ok(trimmed);
        }
    }
}

fn one(rest: &str, first: char) -> Option<(Token<'_>, usize)> {
    let name = |from: usize| from + rest[from..].bytes().take_while(|&b| b.is_ascii_alphanumeric() || b == b'_' || b == b'$').count();
    match first {
        'a'..='z' | 'A'..='Z' | '_' | '$' | '%' => {
            let end = name(1);
            Some((Token::Word(&rest[..end]), end))
        }
        '0'..='9' => {
            let end = number_end(rest);
            Some((Token::Number(&rest[..end]), end))
        }
        '.' => {
            let mut end = name(1);
            while rest[end..].starts_with("::") {
                end = name(end + 2);
            }
            (end > 1).then(|| (Token::Dot(&rest[1..end]), end))
        }
        '"' => {
            let end = rest[1..].find('"')?;
            Some((Token::Text(&rest[1..=end]), end + 2))
        }
        '{' | '}' | '[' | ']' | '(' | ')' | ',' | ';' | ':' | '+' | '-' | '|' | '!' | '@' | '=' | '<' | '>' | '*' | '~' | '#' => {
            Some((Token::Mark(first), 1))
        }
        _ => None,
    }
}

/// `12`, `0x1fU`, `0f3F800000`, `1.5`, `1e-3`.
fn number_end(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let alphanumeric = |from: usize| from + bytes[from..].iter().take_while(|b| b.is_ascii_alphanumeric()).count();
    let mut end = alphanumeric(0);
    let decimal = bytes[..end].iter().all(|b| b.is_ascii_digit());
    if decimal && bytes.get(end) == Some(&b'.') && bytes.get(end + 1).is_some_and(u8::is_ascii_digit) {
        end = alphanumeric(end + 1);
    }
    let exponent =
        bytes[..end].iter().all(|b| b.is_ascii_digit() || matches!(b, b'.' | b'e' | b'E')) && matches!(bytes[end - 1], b'e' | b'E');
    if exponent && matches!(bytes.get(end), Some(b'-' | b'+')) {
        end = alphanumeric(end + 1);
    }
    end
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn comments_strings_and_numbers_are_told_apart() {
        let text = "ld.global.L1::no_allocate.u32 %r1, [%rd1+4]; // x\n/* two\nlines */ .file 1 \"a b\"\n0f3F800000 1.5e-3 -7U\0";
        let found = tokens(text).unwrap();
        let words: Vec<_> = found.iter().map(|(token, _)| *token).collect();
        assert!(words.contains(&Token::Dot("L1::no_allocate")));
        assert!(words.contains(&Token::Text("a b")));
        assert_eq!(words[words.len() - 4..], [Token::Number("0f3F800000"), Token::Number("1.5e-3"), Token::Mark('-'), Token::Number("7U")]);
        assert_eq!(found.iter().find(|(token, _)| *token == Token::Dot("file")).unwrap().1, 3);
        assert_eq!(found.last().unwrap().1, 4);
    }

    #[test]
    fn what_is_no_token_is_named_with_its_line() {
        assert_eq!(tokens("\n\n ^").unwrap_err().line, 3);
        assert_eq!(tokens("\n/* never").unwrap_err().line, 2);
        assert!(tokens("\"never").is_err());
    }
}
