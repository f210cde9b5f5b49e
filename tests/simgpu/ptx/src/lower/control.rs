//! Branches, calls and the ends of threads.

use super::{Builder, Jump, Lowered, Symbol};
use crate::program::{CallSite, Callee, Carrier, Op};
use crate::syntax::{Operand, Text};
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
            "membar" | "fence" => Op::Fence,
            // They only take time.
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

    fn call(&mut self, text: &Text<'a>) -> Lowered<()> {
        let (results, name, arguments) = match &text.operands[..] {
            [Operand::Name(name, 0)] => (&[][..], name, &[][..]),
            [Operand::Name(name, 0), Operand::Group(arguments)] => (&[][..], name, &arguments[..]),
            [Operand::Group(results), Operand::Name(name, 0)] => (&results[..], name, &[][..]),
            [Operand::Group(results), Operand::Name(name, 0), Operand::Group(arguments)] => (&results[..], name, &arguments[..]),
            _ => return Err(self.error("calls through a pointer are not supported")),
        };
        let callee = match self.module.functions.get(name) {
            Some(Some(number)) => Callee::Defined(*number),
            Some(None) => Callee::External((*name).to_owned()),
            None => return Err(self.error(format!("function {name} is not declared; calls through a pointer are not supported"))),
        };
        let arguments = arguments.iter().map(|operand| self.carrier(operand)).collect::<Lowered<Vec<_>>>()?;
        let results = results.iter().map(|operand| self.carrier(operand)).collect::<Lowered<Vec<_>>>()?;
        self.function.calls.push(CallSite { callee, arguments, results });
        let site = (self.function.calls.len() - 1) as u32;
        self.emit(Op::Call { site });
        Ok(())
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
