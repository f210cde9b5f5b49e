//! Parses text to declarations and statements. Debug information and pragmas are skipped.

use crate::ParseError;
use crate::short;
use crate::syntax::{Formal, FunctionText, Linkage, Literal, Prototype, Registers, Source, Stands, Statement, Text};
use crate::token::{Token, declares_shared, outline, tokens};
use crate::types::{Space, Type};

pub(crate) struct Parser<'a> {
    tokens: Vec<(Token<'a>, u32)>,
    pub(crate) at: usize,
    /// The number of open brackets around an operand or an initial value.
    pub(crate) depth: usize,
    /// Whether the text is an outline, in which each body is replaced by its position.
    short: bool,
}

/// A limit far above what compilers declare at once.
const MOST_REGISTERS: u32 = 1 << 20;

type Parsed<T> = Result<T, ParseError>;

impl<'a> Parser<'a> {
    /// Parses the declarations of a module; the bodies of functions are left unread.
    pub(crate) fn source(text: &'a str) -> Parsed<Source<'a>> {
        let mut parser = Self { tokens: outline(text)?, at: 0, depth: 0, short: false };
        parser.declarations(text)
    }

    /// Parses the declarations of a module, from its outline.
    pub(crate) fn short_source(text: &'a str) -> Parsed<Source<'a>> {
        let mut parser = Self { tokens: outline(text)?, at: 0, depth: 0, short: true };
        parser.declarations(text)
    }

    /// Parses a function with its body, from its `definition`.
    pub(crate) fn definition(text: &'a str, line: u32, entry: bool) -> Parsed<(FunctionText<'a>, Vec<Statement<'a>>)> {
        let mut parser = Self { tokens: tokens(text, line)?, at: 0, depth: 0, short: false };
        let head = parser.head(entry, Linkage::Internal)?;
        let body = parser.body()?;
        Ok((head, body))
    }

    fn declarations(&mut self, text: &'a str) -> Parsed<Source<'a>> {
        let mut source = Source::default();
        while let Some(token) = self.peek() {
            let Token::Dot(directive) = token else { return Err(self.unexpected("a directive")) };
            self.directive(directive, text, &mut source)?;
        }
        if source.version == (0, 0) || source.target == 0 {
            return Err(ParseError::new(1, "the text names no .version or no .target: it is not a PTX module"));
        }
        Ok(source)
    }

    fn directive(&mut self, directive: &'a str, text: &'a str, source: &mut Source<'a>) -> Parsed<()> {
        match directive {
            "version" => source.version = self.version()?,
            "target" => source.target = self.target()?,
            "address_size" => {
                self.next();
                if self.integer()? != 64 {
                    return Err(self.error("only modules with 64-bit addresses can be run"));
                }
            }
            "file" | "loc" => self.skip_line(),
            "pragma" => self.skip_past(';')?,
            "section" => self.skip_section()?,
            "visible" | "weak" | "common" | "extern" | "global" | "const" | "shared" | "entry" | "func" => {
                self.declaration(text, source)?;
            }
            other => return Err(ParseError::new(self.line(), format!("directive .{other} is not supported"))),
        }
        Ok(())
    }

    fn version(&mut self) -> Parsed<(u32, u32)> {
        self.next();
        let Some(Token::Number(number)) = self.next() else { return Err(self.error("a version is needed after .version")) };
        let parts = number.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        parts.ok_or_else(|| self.error(format!("{number} is no version")))
    }

    fn target(&mut self) -> Parsed<u32> {
        self.next();
        let name = self.word()?;
        while self.take(',') {
            self.word()?;
        }
        let digits = name.strip_prefix("sm_").map(|rest| rest.trim_end_matches(['a', 'f']));
        digits.and_then(|digits| digits.parse().ok()).ok_or_else(|| self.error(format!("{name} is no target like sm_70")))
    }

    /// Parses a variable or function with its prefixes.
    fn declaration(&mut self, text: &'a str, source: &mut Source<'a>) -> Parsed<()> {
        let mut linkage = Linkage::Internal;
        while let Some(Token::Dot(found @ ("visible" | "weak" | "common" | "extern"))) = self.peek() {
            linkage = match found {
                "visible" => Linkage::Visible,
                "weak" => Linkage::Weak,
                "common" => Linkage::Common,
                _ => Linkage::External,
            };
            self.next();
        }
        match self.peek() {
            Some(Token::Dot(kind @ ("entry" | "func"))) => {
                self.next();
                source.functions.push(self.function(text, kind, linkage)?);
            }
            Some(Token::Dot(space)) => {
                let space = Space::named(space).ok_or_else(|| self.unexpected("a state space"))?;
                self.next();
                source.variables.extend(self.variables(space, linkage)?);
            }
            _ => return Err(self.unexpected("a variable or a function")),
        }
        Ok(())
    }

    /// Parses a function of an outline; `kind` is the directive that began it.
    fn function(&mut self, text: &'a str, kind: &'a str, linkage: Linkage) -> Parsed<FunctionText<'a>> {
        let line = self.tokens.get(self.at - 1).map_or(1, |(_, line)| *line);
        let mut function = FunctionText { line, ..self.head(kind == "entry", linkage)? };
        let Some(Token::Body(body)) = self.peek() else {
            self.expect(';')?;
            return Ok(function);
        };
        self.next();
        if self.short {
            let (stands, line) = short::read(body).ok_or_else(|| self.error("an outline says where each body stands"))?;
            (function.definition, function.line) = (Some(stands), line);
            return Ok(function);
        }
        let start = |part: &str| part.as_ptr() as usize - text.as_ptr() as usize;
        let place = start(kind) + kind.len()..start(body) + body.len();
        function.definition = Some(Stands { place, shared: declares_shared(body) });
        Ok(function)
    }

    /// Parses name, parameters and directives: everything before the body.
    fn head(&mut self, entry: bool, linkage: Linkage) -> Parsed<FunctionText<'a>> {
        let line = self.line();
        let results = if self.is('(') { self.formals()? } else { Vec::new() };
        let name = self.word()?;
        let parameters = if self.is('(') { self.formals()? } else { Vec::new() };
        let mut function =
            FunctionText { name, entry, results, parameters, max_threads: None, exact_threads: false, linkage, definition: None, line };
        while let Some(Token::Dot(directive)) = self.peek() {
            self.next();
            match directive {
                "maxntid" | "reqntid" => {
                    function.max_threads = Some(self.three()?);
                    function.exact_threads = directive == "reqntid";
                }
                "pragma" => self.skip_past(';')?,
                _ => {
                    while matches!(self.peek(), Some(Token::Number(_) | Token::Mark(',') | Token::Text(_))) {
                        self.next();
                    }
                }
            }
        }
        Ok(function)
    }

    fn three(&mut self) -> Parsed<[u32; 3]> {
        let mut sizes = [1; 3];
        for (place, size) in sizes.iter_mut().enumerate() {
            if place > 0 && !self.take(',') {
                break;
            }
            *size = u32::try_from(self.integer()?).map_err(|_| self.error("a number of threads is too large"))?;
        }
        Ok(sizes)
    }

    fn formals(&mut self) -> Parsed<Vec<Formal<'a>>> {
        self.expect('(')?;
        let mut formals = Vec::new();
        while !self.take(')') {
            self.take(',');
            let register = match self.next() {
                Some(Token::Dot("param")) => false,
                Some(Token::Dot("reg")) => true,
                _ => return Err(self.error("a parameter begins with .param or .reg")),
            };
            formals.push(Formal { variable: self.variable_head(Space::Param)?, register });
        }
        Ok(formals)
    }

    fn body(&mut self) -> Parsed<Vec<Statement<'a>>> {
        self.expect('{')?;
        let mut statements = Vec::new();
        let mut depth = 0_usize;
        loop {
            match self.peek() {
                Some(Token::Mark('{')) => {
                    self.next();
                    depth += 1;
                    statements.push(Statement::Open);
                }
                Some(Token::Mark('}')) => {
                    self.next();
                    if depth == 0 {
                        return Ok(statements);
                    }
                    depth -= 1;
                    statements.push(Statement::Close);
                }
                Some(Token::Dot(directive)) => self.local_directive(directive, &mut statements)?,
                Some(Token::Mark(';')) => {
                    self.next();
                }
                Some(_) => self.statement(&mut statements)?,
                None => return Err(self.error("the body of a function does not end")),
            }
        }
    }

    fn local_directive(&mut self, directive: &'a str, statements: &mut Vec<Statement<'a>>) -> Parsed<()> {
        match directive {
            "loc" | "file" => self.skip_line(),
            "pragma" => self.skip_past(';')?,
            "reg" => {
                self.next();
                statements.push(self.registers()?);
            }
            "extern" => {
                self.next();
                let Some(Token::Dot("shared")) = self.next() else { return Err(self.error("only shared memory can be .extern here")) };
                statements.extend(self.variables(Space::Shared, Linkage::External)?.into_iter().map(Statement::Variable));
            }
            other => {
                self.next();
                let space = Space::named(other).ok_or_else(|| self.error(format!("directive .{other} is not supported in a function")))?;
                statements.extend(self.variables(space, Linkage::Internal)?.into_iter().map(Statement::Variable));
            }
        }
        Ok(())
    }

    fn registers(&mut self) -> Parsed<Statement<'a>> {
        let kind = self.kind()?;
        let mut registers = Vec::new();
        loop {
            let name = self.word()?;
            let mut count = None;
            if self.take('<') {
                let found = u32::try_from(self.integer()?).ok().filter(|&count| count <= MOST_REGISTERS);
                count = Some(found.ok_or_else(|| self.error("too many registers"))?);
                self.expect('>')?;
            }
            registers.push(Registers { name, count });
            if !self.take(',') {
                self.expect(';')?;
                return Ok(Statement::Registers(registers, kind));
            }
        }
    }

    /// Parses a label, a table of labels or an instruction.
    fn statement(&mut self, statements: &mut Vec<Statement<'a>>) -> Parsed<()> {
        let line = self.line();
        if let (Some(Token::Word(name)), Some((Token::Mark(':'), _))) = (self.peek(), self.tokens.get(self.at + 1)) {
            self.at += 2;
            match self.peek() {
                Some(Token::Dot("branchtargets" | "calltargets")) => {
                    self.next();
                    let mut targets = vec![self.word()?];
                    while self.take(',') {
                        targets.push(self.word()?);
                    }
                    self.expect(';')?;
                    statements.push(Statement::Targets(name, targets));
                }
                Some(Token::Dot("callprototype")) => {
                    self.next();
                    statements.push(Statement::Prototype(name, self.prototype()?));
                }
                _ => statements.push(Statement::Label(name, line)),
            }
            return Ok(());
        }
        statements.push(Statement::Instruction(self.instruction(line)?));
        Ok(())
    }

    /// Parses `(.param .b32 _) _ (.param .b64 _);`.
    fn prototype(&mut self) -> Parsed<Prototype> {
        let results = if self.is('(') { self.formals()? } else { Vec::new() };
        self.word()?;
        let parameters = if self.is('(') { self.formals()? } else { Vec::new() };
        self.skip_past(';')?;
        let bytes = |formals: Vec<Formal<'_>>| formals.iter().map(|formal| formal.variable.bytes).collect();
        Ok(Prototype { results: bytes(results), parameters: bytes(parameters) })
    }

    fn instruction(&mut self, line: u32) -> Parsed<Text<'a>> {
        let guard = if self.take('@') {
            let unless = self.take('!');
            Some((self.word()?, unless))
        } else {
            None
        };
        let opcode = self.word()?;
        let mut suffixes = Vec::new();
        while let Some(Token::Dot(suffix)) = self.peek() {
            self.next();
            suffixes.push(suffix);
        }
        let mut operands = Vec::new();
        while !self.take(';') {
            if !operands.is_empty() {
                self.expect(',')?;
            }
            operands.push(self.operand()?);
        }
        Ok(Text { guard, opcode, suffixes, operands, line })
    }

    pub(crate) fn kind(&mut self) -> Parsed<Type> {
        match self.next() {
            Some(Token::Dot(name)) => Type::named(name).ok_or_else(|| self.error(format!("type .{name} is not supported"))),
            _ => Err(self.error("a type is needed here")),
        }
    }

    pub(crate) fn integer(&mut self) -> Parsed<u64> {
        match self.next() {
            Some(Token::Number(text)) => match self.literal(text)? {
                Literal::Integer(value) => Ok(value),
                _ => Err(self.error(format!("{text} is no integer"))),
            },
            _ => Err(self.error("an integer is needed here")),
        }
    }

    pub(crate) fn word(&mut self) -> Parsed<&'a str> {
        match self.next() {
            Some(Token::Word(name)) => Ok(name),
            _ => {
                self.at -= 1;
                Err(self.unexpected("a name"))
            }
        }
    }

    pub(crate) fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.at).map(|(token, _)| *token)
    }

    pub(crate) fn next(&mut self) -> Option<Token<'a>> {
        let token = self.peek();
        self.at += 1;
        token
    }

    pub(crate) fn is(&self, mark: char) -> bool {
        self.peek() == Some(Token::Mark(mark))
    }

    pub(crate) fn take(&mut self, mark: char) -> bool {
        let there = self.is(mark);
        self.at += usize::from(there);
        there
    }

    pub(crate) fn expect(&mut self, mark: char) -> Parsed<()> {
        if self.take(mark) { Ok(()) } else { Err(self.unexpected(&format!("'{mark}'"))) }
    }

    pub(crate) fn line(&self) -> u32 {
        self.tokens.get(self.at.min(self.tokens.len().saturating_sub(1))).map_or(1, |(_, line)| *line)
    }

    pub(crate) fn error(&self, message: impl Into<String>) -> ParseError {
        let at = self.at.saturating_sub(1).min(self.tokens.len().saturating_sub(1));
        ParseError::new(self.tokens.get(at).map_or(1, |(_, line)| *line), message)
    }

    pub(crate) fn unexpected(&self, wanted: &str) -> ParseError {
        let found = match self.peek() {
            Some(Token::Word(name)) => name.to_owned(),
            Some(Token::Dot(name)) => format!(".{name}"),
            Some(Token::Number(text)) => text.to_owned(),
            Some(Token::Text(text)) => format!("{text:?}"),
            Some(Token::Mark(mark)) => format!("'{mark}'"),
            Some(Token::Body(_)) => "'{'".to_owned(),
            None => "the end".to_owned(),
        };
        ParseError::new(self.line(), format!("{wanted} is needed where {found} stands"))
    }

    fn skip_line(&mut self) {
        let line = self.line();
        while self.tokens.get(self.at).is_some_and(|(_, at)| *at == line) {
            self.at += 1;
        }
    }

    fn skip_past(&mut self, mark: char) -> Parsed<()> {
        while !self.take(mark) {
            if self.next().is_none() {
                return Err(self.error(format!("'{mark}' is missing")));
            }
        }
        Ok(())
    }

    fn skip_section(&mut self) -> Parsed<()> {
        loop {
            match self.next() {
                Some(Token::Body(_)) => return Ok(()),
                Some(_) => {}
                None => return Err(self.error("a section has no contents")),
            }
        }
    }
}
