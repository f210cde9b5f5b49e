//! A module: its variables in one block, its functions decoded, its kernels with their parameters.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use crate::ParseError;
use crate::link;
use crate::lower;
use crate::parser::Parser;
use crate::program::{Callee, Function, Initial, Kernel, Program, Target, Texts};
use crate::syntax::Source;

/// The handling of registers that are read before they are set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unset {
    /// The read is a fault.
    #[default]
    Fault,
    /// They hold these bits. Compilers leave such reads in code whose result is not used.
    Holds(u64),
}

/// Options for making a module from texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// The handling of registers that are read before they are set.
    pub unset: Unset,
    /// Whether functions are decoded at their first call instead of at once. The texts are kept for that long. An
    /// error in a function is a fault of the launch that calls it, and an unsupported instruction is a fault of the
    /// thread that reaches it.
    pub late: bool,
}

/// Decoded PTX, ready to run and immutable.
#[derive(Debug, Clone)]
pub struct Module {
    program: Arc<Program>,
    kernels: Vec<Kernel>,
}

impl Module {
    /// Decodes the text of a module. Costs about a microsecond per line.
    ///
    /// # Errors
    /// The text is not PTX, or holds an instruction or a declaration that is not supported; the error names it and its line.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        Self::link(&[text], Options::default())
    }

    /// Makes one module of several texts, which may refer to each other's functions and variables (`.extern`). If
    /// several texts define a name, a `.visible` definition takes precedence over `.weak` ones, and these over
    /// `.common` ones. With late decoding it costs a millisecond per megabyte, and a microsecond per line of each
    /// function that is called.
    ///
    /// # Errors
    /// A text is not PTX or not supported; a name is defined twice, or declared and not defined. The error names the
    /// text and the line.
    pub fn link(texts: &[&str], options: Options) -> Result<Self, ParseError> {
        let kept: Vec<String> = if options.late { texts.iter().map(|&text| text.to_owned()).collect() } else { Vec::new() };
        let sources = texts.iter().enumerate().map(|(text, whole)| Parser::source(whole).map_err(|error| error.of(text)));
        let part = |text: usize, place: Range<usize>| Ok(Cow::Borrowed(texts[text].get(place).unwrap_or_default()));
        let mut program = assemble(&sources.collect::<Result<Vec<_>, _>>()?, options, part)?;
        if options.late {
            program.texts = Some(Box::new(kept));
        }
        Ok(Self::of(program))
    }

    /// Links like [`Self::link`], with late decoding, from outlines of the texts. The bodies of functions are read
    /// from `texts`.
    ///
    /// # Errors
    /// As for [`Self::link`]. Lines outside of functions are those of the outline.
    pub fn link_outlines(outlines: &[&str], unset: Unset, texts: Box<dyn Texts>) -> Result<Self, ParseError> {
        let sources = outlines.iter().enumerate().map(|(text, short)| Parser::short_source(short).map_err(|error| error.of(text)));
        let part = |text: usize, place: Range<usize>| texts.part(text, place).map(Cow::Owned);
        let mut program = assemble(&sources.collect::<Result<Vec<_>, _>>()?, Options { unset, late: true }, part)?;
        program.texts = Some(texts);
        Ok(Self::of(program))
    }

    fn of(program: Program) -> Self {
        let program = Arc::new(program);
        let kernels = (0..program.functions.len()).filter(|&number| program.functions[number].entry);
        let kernels = kernels.map(|number| kernel(&program, number)).collect();
        Self { program, kernels }
    }

    /// Returns the kernels, in the order of the text.
    pub fn kernels(&self) -> impl Iterator<Item = &Kernel> {
        self.kernels.iter()
    }

    /// Returns the kernel of this name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.name() == name)
    }

    /// Lists what is not supported: decodes all remaining functions, and returns each instruction and each function
    /// that is a fault when a thread reaches it. Empty if functions were decoded at once.
    pub fn unsupported(&self) -> Vec<ParseError> {
        let numbers = 0..self.program.functions.len();
        numbers.flat_map(|number| self.program.unsupported(number)).collect()
    }

    /// Returns the bytes of the block that holds the module's variables. Its address must be a multiple of 256.
    pub fn globals_bytes(&self) -> usize {
        self.program.globals.len()
    }

    /// Returns the range of the variable of this name in that block.
    pub fn variable(&self, name: &str) -> Option<Range<usize>> {
        self.program.variables.get(name).cloned()
    }

    /// Returns the initial contents of that block at this address: some variables hold addresses of others.
    pub fn globals_image(&self, address: u64) -> Vec<u8> {
        let mut image = self.program.globals.clone();
        for relocation in &self.program.relocations {
            let value = match relocation.target {
                Target::Global(offset) => address.wrapping_add(offset),
                Target::Bits(bits) => bits,
            };
            let picked = (value & relocation.mask) >> relocation.mask.trailing_zeros();
            image[relocation.at..][..relocation.bytes].copy_from_slice(&picked.to_le_bytes()[..relocation.bytes]);
        }
        image
    }

    /// Returns the compute capability that the text names: 70 for `sm_70`.
    pub fn target(&self) -> u32 {
        self.program.target
    }

    /// Returns the version of PTX, major and minor.
    pub fn version(&self) -> (u32, u32) {
        self.program.version
    }
}

/// Links, and decodes the functions that do not wait for their first call.
fn assemble<'t>(
    sources: &[Source<'_>],
    options: Options,
    part: impl Fn(usize, Range<usize>) -> Result<Cow<'t, str>, String>,
) -> Result<Program, ParseError> {
    let mut program = link::link(sources, options)?;
    program.target = sources.iter().map(|source| source.target).max().unwrap_or_default();
    program.version = sources.iter().map(|source| source.version).max().unwrap_or_default();
    let mut shared = std::mem::take(&mut program.shared);
    for (number, definition) in program.functions.iter().enumerate() {
        if options.late && !definition.stands.shared {
            continue;
        }
        let unread = |why| ParseError::new(definition.line, why).of(definition.text);
        let text = part(definition.text, definition.stands.place.clone()).map_err(unread)?;
        match lower::function(&program, number, &text, &mut shared).map_err(|error| error.of(definition.text)) {
            Err(error) if !options.late => return Err(error),
            decoded => drop(definition.decoded.set(decoded)),
        }
    }
    program.shared = shared;
    if !options.late {
        program.names.clear();
    }
    Ok(program)
}

fn kernel(program: &Arc<Program>, function: usize) -> Kernel {
    let (shared_offsets, shared_bytes) = shared_layout(program, function);
    Kernel { program: Arc::clone(program), function, shared_offsets, shared_bytes }
}

/// Returns the offsets of the shared variables that a kernel or a function it calls refers to, or of all of them if
/// the functions are decoded late.
fn shared_layout(program: &Program, entry: usize) -> (Vec<Option<u64>>, usize) {
    let mut offsets = vec![None; program.shared.len()];
    let mut end = 0_usize;
    let mut place = |variable: usize| {
        if offsets[variable].is_none() {
            let offset = end.next_multiple_of(program.shared[variable].align.max(1));
            end = offset + program.shared[variable].bytes;
            offsets[variable] = Some(offset as u64);
        }
    };
    if program.options.late {
        (0..program.shared.len()).for_each(place);
        return (offsets, end);
    }
    let mut reached = vec![false; program.functions.len()];
    let mut open = vec![entry];
    while let Some(number) = open.pop() {
        if std::mem::replace(&mut reached[number], true) {
            continue;
        }
        let function = program.function(number);
        open.extend(callees(program, function));
        for (_, initial) in &function.initial {
            if let &Initial::Shared(variable, _) = initial {
                place(variable);
            }
        }
    }
    (offsets, end)
}

/// Returns the functions that a function may call: by name, and, if it calls through a pointer, all those whose
/// address is taken.
fn callees(program: &Program, function: &Function) -> Vec<usize> {
    let mut found = Vec::new();
    let mut pointers = false;
    for call in &function.calls {
        match &call.callee {
            Callee::Defined(number) => found.push(*number),
            Callee::External(_) => {}
            Callee::Pointer { .. } => pointers = true,
        }
    }
    if pointers {
        found.extend(&program.pointed);
        let initial = (0..program.functions.len()).flat_map(|number| &program.function(number).initial);
        found.extend(initial.filter_map(|(_, initial)| match initial {
            Initial::Bits(bits) => program.pointed_by(*bits).ok(),
            _ => None,
        }));
    }
    found
}
