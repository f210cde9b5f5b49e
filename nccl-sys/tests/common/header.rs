//! A reader of declarations in a preprocessed C header, independent of the generator of the bindings.

use std::path::Path;

use super::{cc, output};

/// The declarations of one `nccl.h`.
pub(crate) struct Header {
    statements: Vec<String>,
}

impl Header {
    pub(crate) fn read(path: &Path) -> Self {
        let text = output(cc().args(["-E", "-P"]).arg(path));
        Self { statements: split(&text, ';') }
    }

    /// Returns the name and the whole declaration of each function, except those for profilers (`pnccl…`).
    pub(crate) fn functions(&self) -> Vec<(&str, &str)> {
        let named = |statement: &'_ str| {
            let start = statement.match_indices("nccl").map(|(at, _)| at).find(|&at| {
                let name = identifier(&statement[at..]);
                let alone = !statement[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_');
                alone && !statement[..at].contains('(') && statement[at + name.len()..].trim_start().starts_with('(')
            })?;
            Some((start, start + identifier(&statement[start..]).len()))
        };
        let declarations = self.statements.iter().map(|statement| unattributed(statement));
        declarations.filter_map(|statement| named(statement).map(|(start, end)| (&statement[start..end], statement))).collect()
    }

    /// Returns the name and the fields of each struct that has a body.
    pub(crate) fn structs(&self) -> Vec<(&str, Vec<&str>)> {
        let fields = |body| -> Vec<&str> { parts(body, ';').map(|field| last_name(field.split('[').next().unwrap())).collect() };
        self.bodies("typedef struct").map(|(name, body)| (name, fields(body))).collect()
    }

    /// Returns the name and the constants of each enum.
    pub(crate) fn enums(&self) -> Vec<(&str, Vec<&str>)> {
        self.bodies("typedef enum").map(|(name, body)| (name, parts(body, ',').map(identifier).collect())).collect()
    }

    fn bodies<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.statements.iter().filter(move |statement| statement.starts_with(kind)).filter_map(|statement| {
            let (open, close) = (statement.find('{')?, statement.rfind('}')?);
            let name = statement[close + 1..].trim();
            name.starts_with("nccl").then(|| (name, &statement[open + 1..close]))
        })
    }
}

/// Removes `__attribute__((…))` before a declaration.
fn unattributed(statement: &str) -> &str {
    let Some(rest) = statement.strip_prefix("__attribute__") else { return statement };
    rest.rsplit_once("))").map_or(statement, |(_, declaration)| declaration.trim_start())
}

/// Splits `text` at each `separator` outside braces.
fn parts(text: &str, separator: char) -> impl Iterator<Item = &str> {
    let mut depth = 0;
    let pieces = text.split(move |letter| {
        depth += i32::from(letter == '{') - i32::from(letter == '}');
        letter == separator && depth == 0
    });
    pieces.map(str::trim).filter(|piece| !piece.is_empty())
}

fn split(text: &str, separator: char) -> Vec<String> {
    parts(text, separator).map(ToOwned::to_owned).collect()
}

fn identifier(text: &str) -> &str {
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next().unwrap()
}

fn last_name(text: &str) -> &str {
    let start = text.trim_end().rfind(|letter: char| !letter.is_alphanumeric() && letter != '_').map_or(0, |at| at + 1);
    text[start..].trim_end()
}
