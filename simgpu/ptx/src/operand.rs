//! Operands in their written form.

use crate::ParseError;
use crate::parser::Parser;
use crate::syntax::{Literal, Operand};
use crate::token::Token;

/// The limit for the nesting of operands and for the dimensions of an array.
const DEEPEST: usize = 16;

type Parsed<T> = Result<T, ParseError>;

impl<'a> Parser<'a> {
    pub(crate) fn operand(&mut self) -> Parsed<Operand<'a>> {
        let first = self.simple_operand()?;
        if self.take('|') {
            return Ok(Operand::Pair(Box::new(first), Box::new(self.simple_operand()?)));
        }
        Ok(first)
    }

    fn simple_operand(&mut self) -> Parsed<Operand<'a>> {
        self.enter()?;
        let operand = self.open_operand();
        self.leave();
        operand
    }

    /// Enters one level of nesting, until `leave`.
    pub(crate) fn enter(&mut self) -> Parsed<()> {
        self.depth += 1;
        if self.depth > DEEPEST { Err(self.error("brackets nest too deep")) } else { Ok(()) }
    }

    pub(crate) fn leave(&mut self) {
        self.depth -= 1;
    }

    fn open_operand(&mut self) -> Parsed<Operand<'a>> {
        match self.next() {
            Some(Token::Word("_")) => Ok(Operand::Sink),
            Some(Token::Word("WARP_SZ")) => Ok(Operand::Number(Literal::Integer(32))),
            Some(Token::Word(name)) => {
                if let (true, Some(Token::Dot(component))) = (name.starts_with('%'), self.peek()) {
                    self.next();
                    return Ok(Operand::Component(name, component));
                }
                Ok(Operand::Name(name, self.offset()?))
            }
            Some(Token::Number(text)) => Ok(Operand::Number(self.literal(text)?)),
            Some(Token::Mark('-')) => match self.next() {
                Some(Token::Number(text)) => Ok(Operand::Number(self.literal(text)?.negated())),
                _ => Err(self.error("a number is needed after the minus")),
            },
            Some(Token::Mark('!')) => Ok(Operand::Not(Box::new(self.simple_operand()?))),
            Some(Token::Mark('[')) => {
                let mut inner = self.list(']')?;
                // Textures have several coordinates.
                let inner = if inner.len() == 1 { inner.remove(0) } else { Operand::Vector(inner) };
                Ok(Operand::Address(Box::new(inner)))
            }
            Some(Token::Mark('{')) => Ok(Operand::Vector(self.list('}')?)),
            Some(Token::Mark('(')) => Ok(Operand::Group(self.list(')')?)),
            _ => {
                self.at -= 1;
                Err(self.unexpected("an operand"))
            }
        }
    }

    fn list(&mut self, end: char) -> Parsed<Vec<Operand<'a>>> {
        let mut operands = Vec::new();
        while !self.take(end) {
            if !operands.is_empty() {
                self.expect(',')?;
            }
            operands.push(self.operand()?);
        }
        Ok(operands)
    }

    /// Parses `+4`, `-4`, `+-4` or nothing.
    pub(crate) fn offset(&mut self) -> Parsed<i64> {
        let plus = self.take('+');
        let minus = self.take('-');
        if !plus && !minus {
            return Ok(0);
        }
        let value = self.integer()? as i64;
        Ok(if minus { value.wrapping_neg() } else { value })
    }

    pub(crate) fn literal(&self, text: &str) -> Parsed<Literal> {
        Literal::read(text).ok_or_else(|| self.error(format!("{text} is no number")))
    }
}
