//! A module: its variables laid out in one block, its functions decoded, its kernels with their parameters.

use std::sync::Arc;

use crate::ParseError;
use crate::lower::{self, Place, Surroundings};
use crate::parser::Parser;
use crate::program::{Callee, Initial, Kernel, Parameter, Program, Shared};
use crate::syntax::{FunctionText, Source};
use crate::types::Space;

/// Modules have no more variables; buffers are allocated.
const MOST_GLOBALS: usize = 1 << 28;

/// PTX, decoded and ready to run; nothing in it changes any more.
#[derive(Debug, Clone)]
pub struct Module {
    program: Arc<Program>,
    kernels: Vec<Kernel>,
    target: u32,
    version: (u32, u32),
}

impl Module {
    /// Decodes the text of a module. Costs about a microsecond per line.
    ///
    /// # Errors
    /// The text is not PTX, or holds an instruction or a declaration that is not supported; the error names it and its line.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let source = Parser::new(text)?.source()?;
        let (mut surroundings, globals) = surroundings(&source)?;
        let defined: Vec<&FunctionText<'_>> = source.functions.iter().filter(|function| function.body.is_some()).collect();
        let parameters: Vec<_> = defined.iter().map(|function| parameters(function)).collect();
        let mut functions = Vec::new();
        for (number, text) in defined.iter().enumerate() {
            let offsets: Vec<u64> = parameters[number].0.iter().map(|parameter| parameter.offset as u64).collect();
            functions.push(lower::function(text, &offsets, &mut surroundings)?);
        }
        let (shared, accesses) = (surroundings.shared, surroundings.accesses);
        let program = Arc::new(Program { functions, shared, globals, accesses });
        let entries = defined.iter().zip(parameters).enumerate().filter(|(_, (text, _))| text.entry);
        let kernels = entries.map(|(number, (text, parameters))| kernel(&program, number, text, parameters)).collect();
        Ok(Self { program, kernels, target: source.target, version: source.version })
    }

    /// The kernels, in the order of the text.
    pub fn kernels(&self) -> impl Iterator<Item = &Kernel> {
        self.kernels.iter()
    }

    /// The kernel of this name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.name() == name)
    }

    /// Bytes of the block that holds the module's variables. Put it at a multiple of 256.
    pub fn globals_bytes(&self) -> usize {
        self.program.globals.len()
    }

    /// What that block holds before the first launch.
    pub fn globals_image(&self) -> Vec<u8> {
        self.program.globals.clone()
    }

    /// The compute capability that the text names: 70 for `sm_70`.
    pub fn target(&self) -> u32 {
        self.target
    }

    /// The version of PTX, major and minor.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }
}

/// Lays out the module's variables, and lists what functions can refer to.
fn surroundings<'a>(source: &Source<'a>) -> Result<(Surroundings<'a>, Vec<u8>), ParseError> {
    let mut found = Surroundings::default();
    let mut globals: Vec<u8> = Vec::new();
    for variable in &source.variables {
        let place = match variable.space {
            Space::Global | Space::Const => {
                let offset = globals.len().next_multiple_of(variable.align.max(1));
                if offset + variable.bytes > MOST_GLOBALS {
                    return Err(ParseError::new(variable.line, format!("the module's variables take more than {MOST_GLOBALS} bytes")));
                }
                globals.resize(offset, 0);
                globals.extend_from_slice(&variable.initial);
                globals.resize(offset + variable.bytes, 0);
                Place::Global(offset as u64)
            }
            Space::Shared if variable.external => Place::Dynamic,
            Space::Shared => {
                found.shared.push(Shared { bytes: variable.bytes, align: variable.align });
                Place::Shared(found.shared.len() - 1)
            }
            _ => return Err(ParseError::new(variable.line, format!("variable {} cannot be declared in a module", variable.name))),
        };
        found.variables.insert(variable.name, (place, variable.space, variable.bytes));
    }
    let mut number = 0;
    for function in &source.functions {
        if function.body.is_some() {
            if let Some(Some(_)) = found.functions.insert(function.name, Some(number)) {
                return Err(ParseError::new(function.line, format!("function {} is defined twice", function.name)));
            }
            number += 1;
        } else {
            found.functions.entry(function.name).or_insert(None);
        }
    }
    Ok((found, globals))
}

/// The parameters of a function in memory, and how many bytes they take together.
fn parameters(text: &FunctionText<'_>) -> (Vec<Parameter>, usize) {
    let mut end = 0_usize;
    let place = |formal: &crate::syntax::Formal<'_>| {
        let (bytes, align) = (formal.variable.bytes, formal.variable.align.max(1));
        let offset = end.next_multiple_of(align);
        end = offset + bytes;
        Parameter { offset, bytes, align }
    };
    let found = text.parameters.iter().map(place).collect();
    (found, end)
}

fn kernel(program: &Arc<Program>, function: usize, text: &FunctionText<'_>, parameters: (Vec<Parameter>, usize)) -> Kernel {
    let (shared_offsets, shared_bytes) = shared_layout(program, function);
    Kernel {
        program: Arc::clone(program),
        function,
        parameters: parameters.0,
        parameter_bytes: parameters.1,
        max_threads: text.max_threads,
        exact_threads: text.exact_threads,
        shared_offsets,
        shared_bytes,
    }
}

/// Offsets of the shared variables that a kernel or a function it calls refers to.
fn shared_layout(program: &Program, entry: usize) -> (Vec<Option<u64>>, usize) {
    let mut reached = vec![false; program.functions.len()];
    let mut open = vec![entry];
    let mut offsets = vec![None; program.shared.len()];
    let mut end = 0_usize;
    while let Some(number) = open.pop() {
        if std::mem::replace(&mut reached[number], true) {
            continue;
        }
        let function = &program.functions[number];
        open.extend(function.calls.iter().filter_map(|call| if let Callee::Defined(callee) = call.callee { Some(callee) } else { None }));
        for (_, initial) in &function.initial {
            let &Initial::Shared(variable, _) = initial else { continue };
            if offsets[variable].is_none() {
                let offset = end.next_multiple_of(program.shared[variable].align.max(1));
                end = offset + program.shared[variable].bytes;
                offsets[variable] = Some(offset as u64);
            }
        }
    }
    (offsets, end)
}
