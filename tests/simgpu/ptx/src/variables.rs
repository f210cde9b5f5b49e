//! Declarations of variables and their initial values.

use crate::ParseError;
use crate::parser::Parser;
use crate::syntax::Variable;
use crate::token::Token;
use crate::types::{Space, Type};

/// Modules have no larger variables; buffers are allocated.
const LARGEST: usize = 1 << 28;

impl<'a> Parser<'a> {
    /// Variables up to the semicolon: `.align 4 .b8 name[16] = {1, 2}, other;`.
    pub(crate) fn variables(&mut self, space: Space, external: bool) -> Result<Vec<Variable<'a>>, ParseError> {
        let mut found = vec![self.variable_head(space)?];
        loop {
            if let Some(last) = found.last_mut() {
                last.external = external && last.space == Space::Shared;
                if self.take('=') {
                    self.initial(last)?;
                }
            }
            if !self.take(',') {
                self.expect(';')?;
                return Ok(found);
            }
            let first = found[0].clone();
            let element = first.kind.bytes();
            let line = self.line();
            let name = self.word()?;
            let bytes = self.dimensions(element)?;
            found.push(Variable { name, bytes, initial: Vec::new(), line, ..first });
        }
    }

    /// Attributes, type, name and dimensions.
    pub(crate) fn variable_head(&mut self, space: Space) -> Result<Variable<'a>, ParseError> {
        let (mut align, mut pointer, mut elements) = (None, false, 1);
        let kind = loop {
            let Some(Token::Dot(attribute)) = self.next() else { return Err(self.error("a type is needed in a declaration")) };
            match attribute {
                "align" => {
                    let value = self.integer()? as usize;
                    if !value.is_power_of_two() || value > 4096 {
                        return Err(self.error(format!("{value} is no alignment")));
                    }
                    align = Some(value);
                }
                "v2" => elements = 2,
                "v4" => elements = 4,
                "attribute" => {
                    self.expect('(')?;
                    while !self.take(')') {
                        if self.next().is_none() {
                            return Err(self.error("an attribute does not end"));
                        }
                    }
                }
                name => break Type::named(name).ok_or_else(|| self.error(format!("type .{name} is not supported in a declaration")))?,
            }
        };
        // What follows the type tells of the memory that a pointer points to, not of the variable.
        while let Some(Token::Dot(attribute)) = self.peek() {
            self.next();
            pointer |= attribute == "ptr";
            if attribute == "align" {
                let value = self.integer()? as usize;
                if !pointer {
                    align = Some(value);
                }
            }
        }
        let line = self.line();
        let name = self.word()?;
        let bytes = self.dimensions(kind.bytes() * elements)?;
        let align = align.unwrap_or(kind.bytes() * elements);
        Ok(Variable { name, space, kind, align, bytes, external: false, initial: Vec::new(), line })
    }

    fn dimensions(&mut self, element: usize) -> Result<usize, ParseError> {
        let mut bytes = element;
        while self.take('[') {
            let count = if self.take(']') {
                0
            } else {
                let count = self.integer()? as usize;
                self.expect(']')?;
                count
            };
            bytes = bytes.checked_mul(count).filter(|&b| b <= LARGEST).ok_or_else(|| self.error("a variable is too large"))?;
        }
        Ok(bytes)
    }

    fn initial(&mut self, variable: &mut Variable<'a>) -> Result<(), ParseError> {
        let mut values = Vec::new();
        self.values(variable.kind, &mut values)?;
        if variable.bytes == 0 {
            variable.bytes = values.len();
        }
        if values.len() > variable.bytes {
            return Err(self.error(format!("{} has more initial values than places", variable.name)));
        }
        variable.initial = values;
        Ok(())
    }

    fn values(&mut self, kind: Type, into: &mut Vec<u8>) -> Result<(), ParseError> {
        if !self.take('{') {
            let value = self.value(kind)?;
            into.extend_from_slice(&value.to_le_bytes()[..kind.bytes()]);
            return Ok(());
        }
        self.enter()?;
        while !self.take('}') {
            self.values(kind, into)?;
            self.take(',');
        }
        self.leave();
        Ok(())
    }
}
