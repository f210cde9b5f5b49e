//! Lowers statements to steps of the machine: names become slots, guards become branches, vectors become single
//! elements.

mod arithmetic;
mod comparison;
mod control;
mod conversion;
mod floating;
mod memory;
mod moves;
mod operand;
mod warp;

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use crate::ParseError;
use crate::link::Names;
use crate::parser::Parser;
use crate::program::{Alu, Carrier, Function, Initial, Instruction, LARGEST_LOCAL, Op, Program, Shared, Slot, Special};
use crate::syntax::{Formal, Linkage, Operand, Prototype, Registers, Statement, Text, Variable};
use crate::types::{Space, Type};

pub(crate) type Lowered<T> = Result<T, ParseError>;

/// The place of a variable; an offset makes it an address.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Place {
    Global(u64),
    Shared(usize),
    Dynamic,
    Local(u64),
    Param(u64),
}

impl Place {
    fn at(self, offset: i64) -> Initial {
        match self {
            Self::Global(base) => Initial::Global(base.wrapping_add_signed(offset)),
            Self::Shared(number) => Initial::Shared(number, offset),
            Self::Dynamic => Initial::Dynamic(offset),
            Self::Local(base) => Initial::Local(base.wrapping_add_signed(offset)),
            Self::Param(base) => Initial::Param(base.wrapping_add_signed(offset)),
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Symbol {
    Register(Slot, Type),
    Variable(Place, Space, usize),
}

#[derive(Default)]
struct Scope<'a> {
    names: HashMap<String, Symbol>,
    labels: HashMap<&'a str, u32>,
    tables: HashMap<&'a str, Vec<&'a str>>,
    prototypes: HashMap<&'a str, Prototype>,
    /// Steps and tables that still need the position of a label.
    jumps: Vec<(Jump, &'a str, u32)>,
}

#[derive(Clone, Copy)]
enum Jump {
    Step(usize),
    Table { table: usize, row: usize },
}

pub(crate) struct Builder<'a, 'm> {
    program: &'m Program,
    module: &'m Names,
    /// Variables in shared memory of the whole program.
    shared: &'m mut Vec<Shared>,
    entry: bool,
    function: Function,
    scopes: Vec<Scope<'a>>,
    constants: HashMap<Initial, Slot>,
    /// Names of registers by slot; empty for constants and intermediate values.
    names: Vec<String>,
    line: u32,
    carry: Option<Slot>,
}

/// Decodes a function from its definition.
pub(crate) fn function(program: &Program, number: usize, source: &str, shared: &mut Vec<Shared>) -> Lowered<Function> {
    let definition = &program.functions[number];
    let (text, statements) = Parser::definition(source, definition.line, definition.entry)?;
    let mut builder = Builder {
        program,
        module: &program.names[definition.text],
        shared,
        entry: text.entry,
        function: Function::default(),
        scopes: vec![Scope::default()],
        constants: HashMap::new(),
        names: Vec::new(),
        line: text.line,
        carry: None,
    };
    if text.entry {
        for (formal, parameter) in text.parameters.iter().zip(&definition.parameters) {
            builder
                .name(formal.variable.name, Symbol::Variable(Place::Param(parameter.offset as u64), Space::Param, formal.variable.bytes));
        }
    } else {
        builder.function.parameters = builder.formals(&text.parameters);
        builder.function.results = builder.formals(&text.results);
    }
    for statement in &statements {
        builder.statement(statement)?;
    }
    builder.finish()
}

impl<'a> Builder<'a, '_> {
    fn formals(&mut self, formals: &[Formal<'a>]) -> Vec<Carrier> {
        let carrier = |formal: &Formal<'a>| {
            let variable = &formal.variable;
            if formal.register {
                let slot = self.register(variable.name, variable.kind);
                return Carrier::Register(slot);
            }
            let offset = self.local(variable);
            Carrier::Memory { offset: offset as u32, bytes: variable.bytes as u32 }
        };
        formals.iter().map(carrier).collect()
    }

    /// Reserves space in the function's local memory, under the variable's name.
    fn local(&mut self, variable: &Variable<'a>) -> u64 {
        let offset = self.function.local.next_multiple_of(variable.align.max(1));
        self.function.local = offset + variable.bytes;
        self.name(variable.name, Symbol::Variable(Place::Local(offset as u64), Space::Local, variable.bytes));
        offset as u64
    }

    fn statement(&mut self, statement: &Statement<'a>) -> Lowered<()> {
        match statement {
            Statement::Open => self.scopes.push(Scope::default()),
            Statement::Close => self.close()?,
            Statement::Label(name, line) => {
                let at = self.here();
                if self.scope().labels.insert(name, at).is_some() {
                    return Err(ParseError::new(*line, format!("label {name} stands twice in one scope")));
                }
            }
            Statement::Targets(name, targets) => {
                self.scope().tables.insert(name, targets.clone());
            }
            Statement::Prototype(name, prototype) => {
                self.scope().prototypes.insert(name, prototype.clone());
            }
            Statement::Registers(registers, kind) => self.registers(registers, *kind),
            Statement::Variable(variable) => self.variable(variable)?,
            Statement::Instruction(text) => self.guarded(text)?,
        }
        Ok(())
    }

    fn registers(&mut self, registers: &[Registers<'a>], kind: Type) {
        for family in registers {
            match family.count {
                None => {
                    self.register(family.name, kind);
                }
                Some(count) => (0..count).for_each(|number| {
                    self.register(&format!("{}{number}", family.name), kind);
                }),
            }
        }
    }

    fn register(&mut self, name: &str, kind: Type) -> Slot {
        let slot = self.slot(name);
        self.name(name, Symbol::Register(slot, kind));
        slot
    }

    fn variable(&mut self, variable: &Variable<'a>) -> Lowered<()> {
        let place = match variable.space {
            Space::Shared if variable.linkage == Linkage::External => match self.module.variables.get(variable.name) {
                Some(&(place, Space::Shared, _)) => place,
                _ => Place::Dynamic,
            },
            Space::Shared => {
                self.shared.push(Shared { bytes: variable.bytes, align: variable.align });
                Place::Shared(self.shared.len() - 1)
            }
            Space::Local | Space::Param => {
                self.local(variable);
                return Ok(());
            }
            _ => return Err(ParseError::new(variable.line, format!("variable {} cannot be declared in a function", variable.name))),
        };
        self.name(variable.name, Symbol::Variable(place, variable.space, variable.bytes));
        Ok(())
    }

    fn name(&mut self, name: &str, symbol: Symbol) {
        self.scope().names.insert(name.to_owned(), symbol);
    }

    fn scope(&mut self) -> &mut Scope<'a> {
        if self.scopes.is_empty() {
            self.scopes.push(Scope::default());
        }
        let last = self.scopes.len() - 1;
        &mut self.scopes[last]
    }

    /// Ends a scope: resolves its labels; jumps to others are left to the enclosing scope.
    fn close(&mut self) -> Lowered<()> {
        let Some(scope) = self.scopes.pop() else { return Ok(()) };
        let mut open = Vec::new();
        for (jump, label, line) in scope.jumps {
            let Some(&target) = scope.labels.get(label) else {
                open.push((jump, label, line));
                continue;
            };
            match jump {
                Jump::Step(step) => self.land(step, target),
                Jump::Table { table, row } => self.function.tables[table][row] = target,
            }
        }
        match (self.scopes.last_mut(), open.first()) {
            (Some(outer), _) => outer.jumps.extend(open),
            (None, Some((_, label, line))) => return Err(ParseError::new(*line, format!("label {label} is not there"))),
            (None, None) => {}
        }
        Ok(())
    }

    /// Sets the target of a jump.
    fn land(&mut self, step: usize, at: u32) {
        if let Op::Jump { target } | Op::Branch { target, .. } = &mut self.function.code[step].op {
            *target = at;
        }
    }

    fn here(&self) -> u32 {
        self.function.code.len() as u32
    }

    fn finish(mut self) -> Lowered<Function> {
        self.emit(if self.entry { Op::Exit } else { Op::Return });
        while !self.scopes.is_empty() {
            self.close()?;
        }
        let mut function = self.function;
        if function.local > LARGEST_LOCAL {
            let bytes = function.local;
            return Err(ParseError::new(self.line, format!("a function has {bytes} bytes of local memory; a thread has {LARGEST_LOCAL}")));
        }
        function.local = function.local.next_multiple_of(16);
        crate::poison::guard(&mut function, &mut self.names, self.program.options.unset);
        function.slots = self.names.len();
        let varies = |initial: &Initial| matches!(initial, Initial::Flag(_) | Initial::Unset(_) | Initial::Special(Special::Block(_)));
        function.initial.sort_by_key(|(_, initial)| !varies(initial));
        function.varying = function.initial.iter().take_while(|(_, initial)| varies(initial)).count();
        Ok(function)
    }

    /// Lowers a guarded instruction, with a branch that skips it.
    fn guarded(&mut self, text: &Text<'a>) -> Lowered<()> {
        self.line = text.line;
        let Some((name, unless)) = text.guard else { return self.decoded(text) };
        let on = self.source(&Operand::Name(name, 0), Type::Pred)?;
        if let ("bra", [Operand::Name(label, 0)]) = (text.opcode, &text.operands[..]) {
            let step = self.emit(Op::Branch { on, unless, target: 0 });
            self.scope().jumps.push((Jump::Step(step), label, text.line));
            return Ok(());
        }
        let step = self.emit(Op::Branch { on, unless: !unless, target: 0 });
        self.decoded(text)?;
        let after = self.here();
        self.land(step, after);
        Ok(())
    }

    /// Decodes an instruction. If functions are decoded late, an unknown one becomes a fault at run time.
    fn decoded(&mut self, text: &Text<'a>) -> Lowered<()> {
        match self.instruction(text) {
            Err(error) if self.program.options.late => {
                let message = self.function.registers.len() as u32;
                self.function.registers.push(error.message);
                self.emit(Op::Unsupported { message });
                Ok(())
            }
            outcome => outcome,
        }
    }

    fn next_access(&self) -> usize {
        self.program.accesses.fetch_add(1, Ordering::Relaxed)
    }

    fn instruction(&mut self, text: &Text<'a>) -> Lowered<()> {
        match text.opcode {
            "mov" => self.mov(text),
            "cvt" => self.cvt(text),
            "ld" | "ldu" | "st" | "atom" | "red" | "prefetch" | "prefetchu" | "cvta" | "isspacep" | "createpolicy" => self.memory(text),
            "bra" | "brx" | "call" | "ret" | "exit" | "trap" | "brkpt" | "membar" | "fence" | "nanosleep" | "pmevent" => self.control(text),
            "bar" | "barrier" => self.barrier(text),
            "shfl" | "vote" | "match" | "redux" | "activemask" => self.warp(text),
            _ => self.arithmetic(text),
        }
    }

    fn error(&self, message: impl Into<String>) -> ParseError {
        ParseError::new(self.line, message)
    }

    fn unsupported(&self, text: &Text<'a>) -> ParseError {
        self.error(format!("instruction {} is not supported", text.full()))
    }

    fn emit(&mut self, op: Op) -> usize {
        self.function.code.push(Instruction { op, line: self.line });
        self.function.code.len() - 1
    }

    fn alu(&mut self, run: Alu, to: Slot, sources: [Slot; 3]) {
        let [a, b, c] = sources;
        self.emit(Op::Alu { run, to, a, b, c });
    }

    /// Emits an operation whose result goes to a new slot.
    fn computed(&mut self, run: Alu, a: Slot, b: Slot, c: Slot) -> Slot {
        let to = self.temporary();
        self.alu(run, to, [a, b, c]);
        to
    }

    fn slot(&mut self, name: &str) -> Slot {
        self.names.push(name.to_owned());
        (self.names.len() - 1) as Slot
    }

    fn temporary(&mut self) -> Slot {
        self.slot("")
    }

    fn constant(&mut self, initial: Initial) -> Slot {
        if let Some(&slot) = self.constants.get(&initial) {
            return slot;
        }
        let slot = self.slot("");
        self.function.initial.push((slot, initial));
        self.constants.insert(initial, slot);
        slot
    }

    fn bits(&mut self, bits: u64) -> Slot {
        self.constant(Initial::Bits(bits))
    }

    fn zero(&mut self) -> Slot {
        self.bits(0)
    }
}
