//! Splits PTX text into tokens; comments and white space are dropped.

use crate::ParseError;

/// A token; its name is a slice of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Token<'a> {
    /// A name: an opcode, a label, a variable, a register (`%r1`).
    Word(&'a str),
    /// A name after a dot: a directive or a suffix of an opcode.
    Dot(&'a str),
    /// A number, not yet read.
    Number(&'a str),
    /// A string without its quotes.
    Text(&'a str),
    /// Any other character.
    Mark(char),
    /// The contents of a function's braces, with the closing one; only in an outline.
    Body(&'a str),
}

/// Returns the tokens with their lines, the first of which has the number `line`.
pub(crate) fn tokens(text: &str, line: u32) -> Result<Vec<(Token<'_>, u32)>, ParseError> {
    let mut found = Vec::with_capacity(text.len() / 4);
    let (mut rest, mut line) = (text, line);
    while let Some((token, length)) = next(&mut rest, &mut line)? {
        push(&mut found, token, length, &mut rest, &mut line);
    }
    Ok(found)
}

/// Returns the tokens like [`tokens`], with the body of each function as one unread token.
pub(crate) fn outline(text: &str) -> Result<Vec<(Token<'_>, u32)>, ParseError> {
    let mut found: Vec<(Token<'_>, u32)> = Vec::new();
    let (mut rest, mut line) = (text, 1);
    // Brackets that are open in the initial value of a variable.
    let mut initial = 0_usize;
    while let Some((mut token, mut length)) = next(&mut rest, &mut line)? {
        match token {
            Token::Mark('{') if initial == 0 && !matches!(found.last(), Some((Token::Mark('='), _))) => {
                length = body_end(rest).ok_or_else(|| ParseError::new(line, "the body of a function does not end: a '}' is missing"))?;
                token = Token::Body(&rest[1..length]);
            }
            Token::Mark('{') => initial += 1,
            Token::Mark('}') => initial = initial.saturating_sub(1),
            _ => {}
        }
        push(&mut found, token, length, &mut rest, &mut line);
    }
    Ok(found)
}

/// Returns the next token after white space, and its length.
fn next<'a>(rest: &mut &'a str, line: &mut u32) -> Result<Option<(Token<'a>, usize)>, ParseError> {
    let after = skip_blank(rest, *line)?;
    *line += lines(&rest[..rest.len() - after.len()]);
    *rest = after;
    let Some(first) = after.chars().next() else { return Ok(None) };
    let found = one(after, first).ok_or_else(|| ParseError::new(*line, format!("no PTX token begins with {first:?}")))?;
    Ok(Some(found))
}

fn push<'a>(found: &mut Vec<(Token<'a>, u32)>, token: Token<'a>, length: usize, rest: &mut &'a str, line: &mut u32) {
    found.push((token, *line));
    *line += lines(&rest[..length]);
    *rest = &rest[length..];
}

/// Returns the end of a body that begins with an opening brace: after the brace that closes it.
fn body_end(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let (mut at, mut depth) = (0, 0_usize);
    loop {
        at += bracket(&bytes[at..])?;
        match bytes[at] {
            b'{' => depth += 1,
            b'}' if depth == 1 => return Some(at + 1),
            b'}' => depth -= 1,
            b'"' => at += 1 + bytes[at + 1..].iter().position(|&byte| byte == b'"')?,
            _ if bytes.get(at + 1) == Some(&b'/') => at += bytes[at..].iter().position(|&byte| byte == b'\n')?,
            _ if bytes.get(at + 1) == Some(&b'*') => at += 3 + text[at + 2..].find("*/")?,
            _ => {}
        }
        at += 1;
    }
}

/// Returns the first byte that opens or closes something. Such bytes are rare, so many bytes are tested at a time.
fn bracket(bytes: &[u8]) -> Option<usize> {
    let opens = |byte: u8| (byte == b'{') | (byte == b'}') | (byte == b'"') | (byte == b'/');
    let without = |chunk: &&[u8]| !chunk.iter().fold(false, |found, &byte| found | opens(byte));
    let from = 32 * bytes.chunks_exact(32).take_while(without).count();
    bytes[from..].iter().position(|&byte| opens(byte)).map(|at| from + at)
}

/// Whether a variable in shared memory is declared in this body of a function, as opposed to used.
pub(crate) fn declares_shared(body: &str) -> bool {
    let begins = |at: usize| at == 0 || matches!(body.as_bytes()[at - 1], b' ' | b'\t' | b'\r' | b'\n' | b';' | b'{' | b'}' | b'/');
    body.match_indices(".shared").any(|(at, _)| begins(at))
}

fn lines(text: &str) -> u32 {
    // Short chunks, so that the count fits into a byte, and the compiler counts many bytes at once.
    text.as_bytes().chunks(128).map(|chunk| u32::from(chunk.iter().map(|&b| u8::from(b == b'\n')).sum::<u8>())).sum()
}

/// Skips white space, both kinds of comments, and the NUL that compilers leave at the end.
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

/// Returns the end of a number: `12`, `0x1fU`, `0f3F800000`, `1.5`, `1e-3`.
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
        let found = tokens(text, 1).unwrap();
        let words: Vec<_> = found.iter().map(|(token, _)| *token).collect();
        assert!(words.contains(&Token::Dot("L1::no_allocate")));
        assert!(words.contains(&Token::Text("a b")));
        assert_eq!(words[words.len() - 4..], [Token::Number("0f3F800000"), Token::Number("1.5e-3"), Token::Mark('-'), Token::Number("7U")]);
        assert_eq!(found.iter().find(|(token, _)| *token == Token::Dot("file")).unwrap().1, 3);
        assert_eq!(found.last().unwrap().1, 4);
    }

    #[test]
    fn what_is_no_token_is_named_with_its_line() {
        assert_eq!(tokens("\n\n ^", 1).unwrap_err().line, 3);
        assert_eq!(tokens("\n/* never", 1).unwrap_err().line, 2);
        assert!(tokens("\"never", 1).is_err());
    }

    #[test]
    fn an_outline_passes_over_bodies_and_nothing_else() {
        let text = ".func f() { \"}\" // }\n /* } */ { .x } / }\n.global .b8 a[2][1] = {{1}, {2}};\n.entry g() {}\n";
        let found = outline(text).unwrap();
        let bodies: Vec<_> =
            found.iter().filter_map(|&(token, line)| if let Token::Body(body) = token { Some((body, line)) } else { None }).collect();
        assert_eq!(bodies, [(" \"}\" // }\n /* } */ { .x } / }", 1), ("}", 4)]);
        assert_eq!(found.iter().filter(|(token, _)| *token == Token::Mark('{')).count(), 3);
        assert_eq!(found.iter().find(|(token, _)| *token == Token::Word("a")).unwrap().1, 3);
        assert_eq!(outline("\n.func f() { \"}").unwrap_err().line, 2);
        assert!(outline("{ /* }").is_err() && outline("{ {").is_err() && outline("{ // }").is_err());
    }

    #[test]
    fn declarations_of_shared_memory_are_told_from_uses() {
        assert!(declares_shared(".shared .b32 x;") && declares_shared("ret;\n\t.shared .b32 x;") && declares_shared("{.shared .b32 x;"));
        assert!(!declares_shared("ld.shared.u32 %r1, [x]; cvta.shared.u64 %rd1, %rd2;"));
    }
}
