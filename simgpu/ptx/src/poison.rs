//! Finds reads of registers that no path has written, when a function is decoded. Only if some paths write and others
//! do not is there work at run time: a flag per register, set by writes and checked by reads.
//!
//! A plain copy of an unset register is no fault, since compilers copy values they never use; the copy is unset as
//! well.

use std::collections::BTreeSet;

use crate::module::Unset;
use crate::program::{Callee, Carrier, Function, Initial, Instruction, Op, Slot};

type Bits = Vec<u64>;

fn has(set: &Bits, slot: Slot) -> bool {
    set[slot as usize / 64] >> (slot % 64) & 1 == 1
}
fn put(set: &mut Bits, slot: Slot, value: bool) {
    let bit = 1 << (slot % 64);
    if value { set[slot as usize / 64] |= bit } else { set[slot as usize / 64] &= !bit }
}

fn registers(carriers: &[Carrier]) -> impl Iterator<Item = Slot> {
    carriers.iter().filter_map(|carrier| if let Carrier::Register(slot) = carrier { Some(*slot) } else { None })
}

/// Returns the slots that a step reads.
fn reads(function: &Function, op: &Op) -> Vec<Slot> {
    match *op {
        Op::Alu { a, b, c, .. } => vec![a, b, c],
        Op::Copy { from, .. } | Op::Generic { from, .. } | Op::Within { from, .. } | Op::IsIn { from, .. } => vec![from],
        Op::Branch { on, .. } => vec![on],
        Op::Switch { index, .. } => vec![index],
        Op::Load { access } => vec![function.accesses[access as usize].base],
        Op::Store { access } => {
            let access = &function.accesses[access as usize];
            access.slots.iter().flatten().copied().chain([access.base]).collect()
        }
        Op::Atomic { access } => {
            let access = &function.accesses[access as usize];
            access.atomic.iter().flat_map(|atomic| [atomic.b, atomic.c]).chain([access.base]).collect()
        }
        Op::Barrier { site } => {
            let site = &function.barriers[site as usize];
            site.count.into_iter().chain([site.id]).chain(site.reduction.map(|(_, value, _)| value)).collect()
        }
        Op::Warp { site } => {
            let site = &function.warps[site as usize];
            site.mask.into_iter().chain([site.a, site.b, site.c]).collect()
        }
        Op::Call { site } => {
            let call = &function.calls[site as usize];
            let pointer = if let Callee::Pointer { register, .. } = call.callee { Some(register) } else { None };
            registers(&call.arguments).chain(pointer).collect()
        }
        Op::Return => registers(&function.results).collect(),
        Op::Jump { .. } | Op::Clock { .. } | Op::Exit | Op::Trap | Op::Fence { .. } | Op::Unsupported { .. } | Op::Check { .. } => {
            Vec::new()
        }
    }
}

/// Returns the slots that a step writes.
fn writes(function: &Function, op: &Op) -> Vec<Slot> {
    match *op {
        Op::Alu { to, .. }
        | Op::Copy { to, .. }
        | Op::Generic { to, .. }
        | Op::Within { to, .. }
        | Op::IsIn { to, .. }
        | Op::Clock { to } => vec![to],
        Op::Load { access } | Op::Atomic { access } => function.accesses[access as usize].slots.iter().flatten().copied().collect(),
        Op::Barrier { site } => function.barriers[site as usize].reduction.iter().map(|&(_, _, to)| to).collect(),
        Op::Warp { site } => {
            let site = &function.warps[site as usize];
            site.to.into_iter().chain(site.flag).collect()
        }
        Op::Call { site } => registers(&function.calls[site as usize].results).collect(),
        _ => Vec::new(),
    }
}

/// Returns the steps that may follow a step.
fn successors(function: &Function, at: usize) -> Vec<usize> {
    match function.code[at].op {
        Op::Jump { target } => vec![target as usize],
        Op::Branch { target, .. } => vec![at + 1, target as usize],
        Op::Switch { table, .. } => function.tables[table as usize].iter().map(|&target| target as usize).collect(),
        Op::Return | Op::Exit | Op::Trap | Op::Unsupported { .. } => Vec::new(),
        _ => vec![at + 1],
    }
}

/// Applies a step's writes to the set of slots that are surely written.
fn step(function: &Function, op: &Op, set: &mut Bits) {
    if let Op::Copy { to, from } = *op {
        let written = has(set, from);
        put(set, to, written);
        return;
    }
    writes(function, op).into_iter().for_each(|slot| put(set, slot, true));
}

/// Returns, for the first step of every basic block, the slots that every path to it has written.
fn surely_written(function: &Function, slots: usize) -> Vec<Option<Bits>> {
    let length = function.code.len();
    let mut leader = vec![false; length];
    leader[0] = true;
    for at in 0..length {
        let next = successors(function, at);
        if next != [at + 1] {
            next.into_iter().chain([at + 1]).filter(|&to| to < length).for_each(|to| leader[to] = true);
        }
    }
    let mut first = vec![0; slots.div_ceil(64)];
    function.initial.iter().map(|&(slot, _)| slot).chain(registers(&function.parameters)).for_each(|slot| put(&mut first, slot, true));
    let mut known: Vec<Option<Bits>> = vec![None; length];
    known[0] = Some(first);
    let mut open = vec![0];
    while let Some(mut at) = open.pop() {
        let Some(mut set) = known[at].clone() else { continue };
        loop {
            step(function, &function.code[at].op, &mut set);
            let next = successors(function, at);
            if next == [at + 1] && at + 1 < length && !leader[at + 1] {
                at += 1;
                continue;
            }
            for to in next.into_iter().filter(|&to| to < length) {
                if merge(&mut known[to], &set) {
                    open.push(to);
                }
            }
            break;
        }
    }
    known
}

/// Keeps the slots that both paths have written; returns whether that is fewer than before.
fn merge(known: &mut Option<Bits>, set: &Bits) -> bool {
    let Some(known) = known else {
        *known = Some(set.clone());
        return true;
    };
    let before = known.clone();
    known.iter_mut().zip(set).for_each(|(known, set)| *known &= set);
    *known != before
}

/// Adds flags and checks to a function whose steps are complete, or initial values if such reads are no fault; `names`
/// grows by the flags.
pub(crate) fn guard(function: &mut Function, names: &mut Vec<String>, unset: Unset) {
    let known = surely_written(function, names.len());
    let mut flags = vec![None; names.len()];
    let mut doubtful: Vec<Vec<Slot>> = vec![Vec::new(); function.code.len()];
    let mut set = None;
    for (at, instruction) in function.code.iter().enumerate() {
        set = known[at].clone().or(set);
        let Some(set) = &mut set else { continue };
        for slot in reads(function, &instruction.op) {
            if !has(set, slot) && !doubtful[at].contains(&slot) {
                doubtful[at].push(slot);
            }
        }
        step(function, &instruction.op, set);
    }
    if let Unset::Holds(bits) = unset {
        let slots: BTreeSet<Slot> = doubtful.into_iter().flatten().collect();
        function.initial.extend(slots.into_iter().map(|slot| (slot, Initial::Unset(bits))));
        return;
    }
    for &slot in doubtful.iter().flatten() {
        if flags[slot as usize].is_none() {
            names.push(String::new());
            let flag = (names.len() - 1) as Slot;
            flags[slot as usize] = Some(flag);
            function.initial.push((flag, Initial::Flag(slot)));
        }
    }
    if flags.iter().any(Option::is_some) {
        insert(function, names, &flags, &doubtful);
    }
}

fn insert(function: &mut Function, names: &mut Vec<String>, flags: &[Option<Slot>], doubtful: &[Vec<Slot>]) {
    names.push(String::new());
    let set = (names.len() - 1) as Slot;
    function.initial.push((set, Initial::Bits(1)));
    let mut code = Vec::with_capacity(function.code.len() * 2);
    let mut places = Vec::with_capacity(function.code.len());
    for (at, instruction) in function.code.iter().enumerate() {
        places.push(code.len() as u32);
        let line = instruction.line;
        let flag = |slot: Slot| flags.get(slot as usize).copied().flatten();
        if let Op::Copy { to, from } = instruction.op {
            code.push(instruction.clone());
            if let Some(to) = flag(to) {
                code.push(Instruction { op: Op::Copy { to, from: flag(from).unwrap_or(set) }, line });
            }
            continue;
        }
        for &slot in &doubtful[at] {
            let register = function.registers.len() as u32;
            function.registers.push(names[slot as usize].clone());
            if let Some(flag) = flag(slot) {
                code.push(Instruction { op: Op::Check { flag, register }, line });
            }
        }
        code.push(instruction.clone());
        let written = writes(function, &instruction.op).into_iter().filter_map(flag);
        code.extend(written.map(|to| Instruction { op: Op::Copy { to, from: set }, line }));
    }
    for instruction in &mut code {
        if let Op::Jump { target } | Op::Branch { target, .. } = &mut instruction.op {
            *target = places[*target as usize];
        }
    }
    function.tables.iter_mut().flatten().for_each(|target| *target = places[*target as usize]);
    function.code = code;
}
