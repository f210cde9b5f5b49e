//! Outlines: texts without the bodies of their functions. Linking needs no more, and they are a small part of the
//! whole.

use std::fmt::Write;

use crate::ParseError;
use crate::parser::Parser;
use crate::syntax::Stands;
use crate::token::{self, Token};

/// Returns the outline of a text: `{#from to line shared}` in place of each body, with the definition's start and end
/// in the whole text.
///
/// # Errors
/// The text is not PTX; the bodies of functions are not checked.
pub fn outline(text: &str) -> Result<String, ParseError> {
    let source = Parser::source(text)?;
    let tokens = token::outline(text)?;
    let bodies = tokens.iter().filter_map(|(token, _)| if let Token::Body(body) = token { Some(*body) } else { None });
    let definitions = source.functions.iter().filter_map(|function| Some((function.definition.as_ref()?, function.line)));
    let (mut short, mut end) = (String::new(), 0);
    for (body, (stands, line)) in bodies.zip(definitions) {
        let start = body.as_ptr() as usize - text.as_ptr() as usize;
        let place = &stands.place;
        short.push_str(&text[end..start]);
        // Writing to a string cannot fail.
        let _ = write!(short, "#{} {} {line} {}}}", place.start, place.end, u8::from(stands.shared));
        end = start + body.len();
    }
    short.push_str(&text[end..]);
    Ok(short)
}

/// Reads the position of a definition, and the line in which it begins.
pub(crate) fn read(body: &str) -> Option<(Stands, u32)> {
    let mut numbers = body.strip_prefix('#')?.strip_suffix('}')?.split(' ').map(|number| number.parse::<usize>().ok());
    let mut next = || numbers.next().flatten();
    let (start, end, line, shared) = (next()?, next()?, next()?, next()?);
    Some((Stands { place: start..end, shared: shared == 1 }, u32::try_from(line).ok()?))
}
