//! Branches, calls and the ends of threads.

use super::{Builder, Jump, Lowered, Symbol};
use crate::order::Order;
use crate::program::{CallSite, Callee, Carrier, Op, Slot};
use crate::syntax::{Operand, Prototype, Text};
use crate::types::Type;

impl<'a> Builder<'a, '_> {
    pub(super) fn control(&mut self, text: &Text<'a>) -> Lowered<()> {
        let op = match text.opcode {
            "bra" => return self.bra(text),
            "brx" => return self.brx(text),
            "call" => return self.call(text),
            "ret" if self.entry => Op::Exit,
            "ret" => Op::Return,
            "exit" => Op::Exit,
            "trap" | "brkpt" => Op::Trap,
            "membar" | "fence" => Op::Fence { order: Order::of_fence(text.opcode, &text.suffixes) },
            // Instructions that only take time.
            _ => return Ok(()),
        };
        self.emit(op);
        Ok(())
    }

    fn bra(&mut self, text: &Text<'a>) -> Lowered<()> {
        let [Operand::Name(label, 0)] = self.operands(text)? else { return Err(self.unsupported(text)) };
        let step = self.emit(Op::Jump { target: 0 });
        self.scope().jumps.push((Jump::Step(step), label, text.line));
        Ok(())
    }

    fn brx(&mut self, text: &Text<'a>) -> Lowered<()> {
        let [index, Operand::Name(table, 0)] = self.operands(text)? else { return Err(self.unsupported(text)) };
        let index = self.source(index, Type::U(32))?;
        let targets = self.scopes.iter().rev().find_map(|scope| scope.tables.get(table)).cloned();
        let targets = targets.ok_or_else(|| self.error(format!("the table of labels {table} is not there")))?;
        let table = self.function.tables.len();
        self.function.tables.push(vec![0; targets.len()]);
        for (row, label) in targets.into_iter().enumerate() {
            self.scope().jumps.push((Jump::Table { table, row }, label, text.line));
        }
        self.emit(Op::Switch { index, table: table as u32 });
        Ok(())
    }

    /// Lowers `call (result), function, (arguments), prototype;` in which only the function is mandatory.
    fn call(&mut self, text: &Text<'a>) -> Lowered<()> {
        let mut rest = &text.operands[..];
        let group = |rest: &mut &'_ [Operand<'a>]| match rest.split_first() {
            Some((Operand::Group(operands), others)) => {
                *rest = others;
                operands.clone()
            }
            _ => Vec::new(),
        };
        let results = group(&mut rest);
        let Some((Operand::Name(name, 0), others)) = rest.split_first() else { return Err(self.unsupported(text)) };
        rest = others;
        let arguments = group(&mut rest);
        let arguments = arguments.iter().map(|operand| self.carrier(operand)).collect::<Lowered<Vec<_>>>()?;
        let results = results.iter().map(|operand| self.carrier(operand)).collect::<Lowered<Vec<_>>>()?;
        let callee = match (self.find(name), self.module.functions.get(*name), rest) {
            (Ok(Symbol::Register(register, kind)), _, [Operand::Name(list, 0)]) if kind.bits() == 64 => {
                self.pointer(register, list, arguments.len(), results.len())?
            }
            (Ok(_), ..) => return Err(self.error(format!("a call through {name} needs a register of 64 bits and a prototype"))),
            (_, Some(_), [_, ..]) => return Err(self.error(format!("a call of {name} by its name has no prototype"))),
            (_, Some(Some(number)), []) => Callee::Defined(*number),
            (_, Some(None), []) => Callee::External((*name).to_owned()),
            (_, None, _) => return Err(self.error(format!("function {name} is not declared"))),
        };
        self.function.calls.push(CallSite { callee, arguments, results });
        let site = (self.function.calls.len() - 1) as u32;
        self.emit(Op::Call { site });
        Ok(())
    }

    /// Lowers a call through a pointer; `list` names a prototype, or a table of the functions that may be called.
    fn pointer(&self, register: Slot, list: &str, arguments: usize, results: usize) -> Lowered<Callee> {
        if let Some(prototype) = self.scopes.iter().rev().find_map(|scope| scope.prototypes.get(list)) {
            let Prototype { parameters: takes, results: gives } = prototype;
            if (takes.len(), gives.len()) != (arguments, results) {
                let message = format!(
                    "a call with {arguments} arguments and {results} results has a prototype with {} and {}",
                    takes.len(),
                    gives.len()
                );
                return Err(self.error(message));
            }
            return Ok(Callee::Pointer { register, prototype: Some(prototype.clone()), targets: Vec::new() });
        }
        let names = self.scopes.iter().rev().find_map(|scope| scope.tables.get(list));
        let names = names.ok_or_else(|| self.error(format!("{list} is neither a prototype nor a list of functions")))?;
        let number = |name: &&'a str| self.module.functions.get(*name).copied().flatten();
        let targets = names.iter().map(|name| number(name).ok_or_else(|| self.error(format!("function {name} is not defined"))));
        Ok(Callee::Pointer { register, prototype: None, targets: targets.collect::<Lowered<Vec<_>>>()? })
    }

    fn carrier(&mut self, operand: &Operand<'a>) -> Lowered<Carrier> {
        let &Operand::Name(name, 0) = operand else {
            let kind = Type::B(64);
            return Ok(Carrier::Register(self.source(operand, kind)?));
        };
        match self.find(name)? {
            Symbol::Register(slot, _) => Ok(Carrier::Register(slot)),
            Symbol::Variable(place, _, bytes) => {
                let offset = self.offset_of(place).ok_or_else(|| self.error(format!("{name} cannot be handed to a function")))?;
                Ok(Carrier::Memory { offset, bytes: bytes as u32 })
            }
        }
    }
}
