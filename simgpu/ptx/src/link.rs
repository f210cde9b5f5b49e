//! Linking: resolves the names of several texts to places of one program.

use std::collections::HashMap;
use std::fmt::Display;

use crate::ParseError;
use crate::lower::Place;
use crate::module::Options;
use crate::program::{Definition, Program, Relocation, Shared, Target};
use crate::syntax::{Address, FunctionText, Linkage, Source, Variable};
use crate::types::Space;

/// The limit for the variables of a program; buffers are allocated.
const MOST_GLOBALS: usize = 1 << 28;

/// Functions that no text defines, because the driver provides them. Only the first one can be called here.
const OF_THE_DRIVER: [&str; 4] = ["__assertfail", "vprintf", "malloc", "free"];

type Linked<T> = Result<T, ParseError>;

/// The names that a text uses.
#[derive(Debug, Default)]
pub(crate) struct Names {
    pub(crate) variables: HashMap<Box<str>, (Place, Space, usize)>,
    /// Functions by their number; `None` for those of the driver.
    pub(crate) functions: HashMap<Box<str>, Option<usize>>,
}

/// A definition that other texts can refer to, with its place.
#[derive(Clone, Copy)]
struct Export {
    text: usize,
    line: u32,
    linkage: Linkage,
    /// The space of a variable; `None` for a function.
    space: Option<Space>,
    bytes: usize,
    /// Its number among the variables or the functions of its text.
    number: usize,
}

impl Export {
    /// Whether this definition takes precedence over another one of the same name.
    fn beats(&self, other: &Export) -> bool {
        let rank = |linkage| match linkage {
            Linkage::Visible => 2,
            Linkage::Weak => 1,
            _ => 0,
        };
        let (own, theirs) = (rank(self.linkage), rank(other.linkage));
        own > theirs || (own == 0 && theirs == 0 && self.bytes > other.bytes)
    }
}

struct Linker<'s, 'a> {
    sources: &'s [Source<'a>],
    exports: HashMap<&'a str, Export>,
    program: Program,
    names: Vec<Names>,
    /// Initial values that are addresses, with the text and the start of their variable.
    addresses: Vec<(usize, u64, Address<'a>)>,
}

/// Assigns places to the variables of all texts and resolves their names. No function is decoded yet.
pub(crate) fn link(sources: &[Source<'_>], options: Options) -> Linked<Program> {
    let names = sources.iter().map(|_| Names::default()).collect();
    let mut linker = Linker { sources, exports: HashMap::new(), program: Program::new(options), names, addresses: Vec::new() };
    for text in 0..sources.len() {
        linker.export(text).map_err(|error| error.of(text))?;
    }
    for text in 0..sources.len() {
        linker.place(text).map_err(|error| error.of(text))?;
    }
    for text in 0..sources.len() {
        linker.resolve(text).map_err(|error| error.of(text))?;
    }
    linker.relocate()?;
    linker.program.names = linker.names;
    Ok(linker.program)
}

/// Returns the linkage of a function. Kernels are visible by name, whatever their directive.
fn linkage(function: &FunctionText<'_>) -> Linkage {
    if function.entry && function.linkage == Linkage::Internal { Linkage::Visible } else { function.linkage }
}

impl<'a> Linker<'_, 'a> {
    /// Lists what a text defines for others; if a name is defined several times, the definition that takes precedence.
    fn export(&mut self, text: usize) -> Linked<()> {
        let mut own = HashMap::new();
        let source = &self.sources[text];
        for (number, variable) in source.variables.iter().enumerate().filter(|(_, variable)| variable.linkage != Linkage::External) {
            let (linkage, line) = (variable.linkage, variable.line);
            let export = Export { text, line, linkage, space: Some(variable.space), bytes: variable.bytes, number };
            self.define(&mut own, "variable", variable.name, export)?;
        }
        for (number, function) in source.functions.iter().enumerate().filter(|(_, function)| function.definition.is_some()) {
            let export = Export { text, line: function.line, linkage: linkage(function), space: None, bytes: 0, number };
            self.define(&mut own, "function", function.name, export)?;
        }
        Ok(())
    }

    fn define(&mut self, own: &mut HashMap<&'a str, u32>, what: &str, name: &'a str, export: Export) -> Linked<()> {
        let twice = |place: &dyn Display| ParseError::new(export.line, format!("{what} {name} is defined twice, here and in line {place}"));
        if let Some(line) = own.insert(name, export.line) {
            return Err(twice(&line));
        }
        if export.linkage == Linkage::Internal {
            return Ok(());
        }
        let Some(other) = self.exports.get(name) else {
            self.exports.insert(name, export);
            return Ok(());
        };
        if export.linkage == Linkage::Visible && other.linkage == Linkage::Visible {
            return Err(twice(&format!("{} of text {}", other.line, other.text + 1)));
        }
        if export.space != other.space {
            let message = format!("{name} is something else in line {} of text {}", other.line, other.text + 1);
            return Err(ParseError::new(export.line, message));
        }
        if export.beats(other) {
            self.exports.insert(name, export);
        }
        Ok(())
    }

    /// Whether a definition is the one that takes precedence.
    fn holds(&self, text: usize, number: usize, name: &str, linkage: Linkage) -> bool {
        let same = |export: &Export| (export.text, export.number) == (text, number);
        linkage == Linkage::Internal || self.exports.get(name).is_some_and(same)
    }

    /// Assigns places in the program to the definitions of a text.
    fn place(&mut self, text: usize) -> Linked<()> {
        let source = &self.sources[text];
        for (number, variable) in source.variables.iter().enumerate() {
            if variable.linkage != Linkage::External && self.holds(text, number, variable.name, variable.linkage) {
                let place = self.place_variable(text, variable)?;
                self.names[text].variables.insert(variable.name.into(), (place, variable.space, variable.bytes));
            }
        }
        for (number, function) in source.functions.iter().enumerate() {
            let Some(stands) = &function.definition else { continue };
            if !self.holds(text, number, function.name, linkage(function)) {
                continue;
            }
            let found = Definition::new(function, text, stands.clone());
            self.names[text].functions.insert(function.name.into(), Some(self.program.functions.len()));
            self.program.functions.push(found);
        }
        Ok(())
    }

    fn place_variable(&mut self, text: usize, variable: &Variable<'a>) -> Linked<Place> {
        match variable.space {
            Space::Global | Space::Const => {
                let globals = &mut self.program.globals;
                let offset = globals.len().next_multiple_of(variable.align.max(1));
                if offset + variable.bytes > MOST_GLOBALS {
                    return Err(ParseError::new(variable.line, format!("the module's variables take more than {MOST_GLOBALS} bytes")));
                }
                globals.resize(offset, 0);
                globals.extend_from_slice(&variable.initial);
                globals.resize(offset + variable.bytes, 0);
                // If several texts have an internal variable of a name, the name refers to the first one's, and never
                // hides a shared variable.
                let (named, place) = (variable.name.to_owned(), offset..offset + variable.bytes);
                if variable.linkage == Linkage::Internal {
                    self.program.variables.entry(named).or_insert(place);
                } else {
                    self.program.variables.insert(named, place);
                }
                let addresses = variable.addresses.iter().map(|address| (text, offset as u64, address.clone()));
                self.addresses.extend(addresses);
                Ok(Place::Global(offset as u64))
            }
            Space::Shared => {
                self.program.shared.push(Shared { bytes: variable.bytes, align: variable.align });
                Ok(Place::Shared(self.program.shared.len() - 1))
            }
            _ => Err(ParseError::new(variable.line, format!("variable {} cannot be declared in a module", variable.name))),
        }
    }

    /// Finds the names that a text declares and another text, or another definition, provides.
    fn resolve(&mut self, text: usize) -> Linked<()> {
        let source = &self.sources[text];
        for variable in &source.variables {
            if self.names[text].variables.contains_key(variable.name) {
                continue;
            }
            let found = match self.exports.get(variable.name) {
                Some(export) if export.space == Some(variable.space) => self.names[export.text].variables[variable.name],
                Some(export) => {
                    let message = format!("{} is something else in line {} of text {}", variable.name, export.line, export.text + 1);
                    return Err(ParseError::new(variable.line, message));
                }
                None if variable.space == Space::Shared && variable.bytes == 0 => (Place::Dynamic, Space::Shared, 0),
                None => return Err(unresolved(variable.line, "variable", variable.name)),
            };
            self.names[text].variables.insert(variable.name.into(), found);
        }
        for function in &source.functions {
            if self.names[text].functions.contains_key(function.name) {
                continue;
            }
            let found = match self.exports.get(function.name) {
                Some(export) if export.space.is_none() => self.names[export.text].functions[function.name],
                None if OF_THE_DRIVER.contains(&function.name) => None,
                _ => return Err(unresolved(function.line, "function", function.name)),
            };
            self.names[text].functions.insert(function.name.into(), found);
        }
        Ok(())
    }

    /// Replaces the names in initial values by addresses.
    fn relocate(&mut self) -> Linked<()> {
        for (text, start, address) in std::mem::take(&mut self.addresses) {
            let error = |why: &str| ParseError::new(address.line, format!("the address of {} {why}", address.name)).of(text);
            let target = match (self.names[text].variables.get(address.name), self.names[text].functions.get(address.name)) {
                (Some((Place::Global(offset), ..)), _) => Target::Global(offset.wrapping_add_signed(address.offset)),
                (Some(_), _) => {
                    return Err(error("is no initial value: only variables in global memory and functions have one for all blocks"));
                }
                (None, Some(&Some(number))) => {
                    self.program.pointed.push(number);
                    Target::Bits(self.program.address(number).wrapping_add_signed(address.offset))
                }
                (None, Some(None)) => return Err(error("cannot be taken: it is a function of the driver")),
                (None, None) => return Err(error("cannot be taken: it is not declared")),
            };
            let at = start as usize + address.at;
            self.program.relocations.push(Relocation { at, bytes: address.bytes, mask: address.mask, target });
        }
        Ok(())
    }
}

fn unresolved(line: u32, what: &str, name: &str) -> ParseError {
    ParseError::new(line, format!("{what} {name} is declared here and defined in none of the texts"))
}
