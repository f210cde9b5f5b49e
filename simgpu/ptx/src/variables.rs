//! Declarations of variables and their initial values.

use crate::ParseError;
use crate::parser::Parser;
use crate::syntax::{Address, Linkage, Literal, Variable};
use crate::token::Token;
use crate::types::{Space, Type};

/// The limit for a variable of a module; buffers are allocated.
const LARGEST: usize = 1 << 28;

impl<'a> Parser<'a> {
    /// Parses variables up to the semicolon: `.align 4 .b8 name[16] = {1, 2}, other;`.
    pub(crate) fn variables(&mut self, space: Space, linkage: Linkage) -> Result<Vec<Variable<'a>>, ParseError> {
        let mut found = vec![self.variable_head(space)?];
        loop {
            if let Some(last) = found.last_mut() {
                last.linkage = linkage;
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
            found.push(Variable { name, bytes, initial: Vec::new(), addresses: Vec::new(), line, ..first });
        }
    }

    /// Parses attributes, type, name and dimensions.
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
        // Attributes after the type describe the memory that a pointer points to, not the variable.
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
        Ok(Variable { name, space, kind, align, bytes, linkage: Linkage::Internal, initial: Vec::new(), addresses: Vec::new(), line })
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
        self.values(variable)?;
        if variable.bytes == 0 {
            variable.bytes = variable.initial.len();
        }
        if variable.initial.len() > variable.bytes {
            return Err(self.error(format!("{} has more initial values than places", variable.name)));
        }
        Ok(())
    }

    fn values(&mut self, variable: &mut Variable<'a>) -> Result<(), ParseError> {
        if !self.take('{') {
            let value = self.value(variable)?;
            variable.initial.extend_from_slice(&value.to_le_bytes()[..variable.kind.bytes()]);
            return Ok(());
        }
        self.enter()?;
        while !self.take('}') {
            self.values(variable)?;
            self.take(',');
        }
        self.leave();
        Ok(())
    }

    /// Parses a number with its sign, or an address, which stays zero here: `name`, `name+4`, `generic(name)+4`,
    /// `0xff00(name)`.
    fn value(&mut self, variable: &mut Variable<'a>) -> Result<u64, ParseError> {
        let (minus, kind) = (self.take('-'), variable.kind);
        match self.next() {
            Some(Token::Number(text)) if self.is('(') => match self.literal(text)? {
                Literal::Integer(mask) if mask != 0 => self.address(variable, mask),
                _ => Err(self.error(format!("{text} picks no bits of an address"))),
            },
            Some(Token::Number(text)) => {
                let literal = self.literal(text)?;
                Ok(if minus { literal.negated() } else { literal }.bits(kind))
            }
            Some(Token::Word(name)) => {
                self.at -= usize::from(name != "generic" || !self.is('('));
                if kind.bytes() < 8 {
                    return Err(self.error(format!("the address of {name} has 8 bytes, and its place {}", kind.bytes())));
                }
                self.address(variable, u64::MAX)
            }
            _ => Err(self.error("a number or an address is needed in an initialiser")),
        }
    }

    fn address(&mut self, variable: &mut Variable<'a>, mask: u64) -> Result<u64, ParseError> {
        let line = self.line();
        let inner = self.take('(');
        let name = self.word()?;
        let mut offset = self.offset()?;
        if inner {
            self.expect(')')?;
            offset = offset.wrapping_add(self.offset()?);
        }
        let (at, bytes) = (variable.initial.len(), variable.kind.bytes());
        variable.addresses.push(Address { at, bytes, name, offset, mask, line });
        Ok(0)
    }
}
