//! Barriers, and the instructions for which the threads of a warp meet.

use super::{Builder, Lowered};
use crate::integer::{self as int, instance};
use crate::program::{Barrier, Meeting, Op, Reduction, Slot, WarpSite};
use crate::syntax::{Operand, Text};
use crate::types::Type;

const WORD: Type = Type::U(32);

impl<'a> Builder<'a, '_> {
    pub(super) fn barrier(&mut self, text: &Text<'a>) -> Lowered<()> {
        if text.suffixes[..] == ["warp", "sync"] {
            let [mask] = self.operands(text)?;
            let mask = self.source(mask, WORD)?;
            return self.meet(Meeting::Sync, Some(mask), [None; 3], None, None);
        }
        let rest: Vec<_> = text.suffixes.iter().copied().filter(|&s| s != "cta" && s != "aligned").collect();
        let aligned = text.opcode == "bar" || text.has("aligned");
        let site = match (&rest[..], &text.operands[..]) {
            (["sync"], [id, count @ ..]) if count.len() < 2 => self.barrier_site(id, count.first(), true, aligned)?,
            (["arrive"], [id, count]) => self.barrier_site(id, Some(count), false, aligned)?,
            (["red", operation, kind], [to, id, rest @ ..]) if rest.len() == 1 || rest.len() == 2 => {
                let (kind, reduction) = match (*operation, *kind) {
                    ("popc", "u32") => (WORD, Reduction::Popc),
                    ("and", "pred") => (Type::Pred, Reduction::And),
                    ("or", "pred") => (Type::Pred, Reduction::Or),
                    _ => return Err(self.unsupported(text)),
                };
                let (value, count) = (&rest[rest.len() - 1], rest[..rest.len() - 1].first());
                let mut site = self.barrier_site(id, count, true, aligned)?;
                site.reduction = Some((reduction, self.source(value, Type::Pred)?, self.target(to, kind)?));
                site
            }
            _ => return Err(self.unsupported(text)),
        };
        self.function.barriers.push(site);
        let site = (self.function.barriers.len() - 1) as u32;
        self.emit(Op::Barrier { site });
        Ok(())
    }

    fn barrier_site(&mut self, id: &Operand<'a>, count: Option<&Operand<'a>>, waits: bool, aligned: bool) -> Lowered<Barrier> {
        let id = self.source(id, WORD)?;
        let count = count.map(|count| self.source(count, WORD)).transpose()?;
        Ok(Barrier { id, count, waits, aligned, reduction: None })
    }

    pub(super) fn warp(&mut self, text: &Text<'a>) -> Lowered<()> {
        match text.opcode {
            "shfl" => self.shuffle(text),
            "vote" => self.vote(text),
            "match" => self.matching(text),
            "redux" => self.redux(text),
            _ => {
                let [to] = self.operands(text)?;
                let to = self.target(to, WORD)?;
                self.meet(Meeting::ActiveMask, None, [None; 3], Some(to), None)
            }
        }
    }

    fn meet(
        &mut self,
        meeting: Meeting,
        mask: Option<Slot>,
        sources: [Option<Slot>; 3],
        to: Option<Slot>,
        flag: Option<Slot>,
    ) -> Lowered<()> {
        let zero = self.zero();
        let [a, b, c] = sources.map(|slot| slot.unwrap_or(zero));
        self.function.warps.push(WarpSite { meeting, mask, a, b, c, to, flag });
        let site = (self.function.warps.len() - 1) as u32;
        self.emit(Op::Warp { site });
        Ok(())
    }

    fn shuffle(&mut self, text: &Text<'a>) -> Lowered<()> {
        let (synced, mode) = match text.suffixes[..] {
            ["sync", mode, "b32"] => (true, mode),
            [mode, "b32"] => (false, mode),
            _ => return Err(self.unsupported(text)),
        };
        let meeting = match mode {
            "up" => Meeting::ShuffleUp,
            "down" => Meeting::ShuffleDown,
            "bfly" => Meeting::ShuffleXor,
            "idx" => Meeting::ShuffleIndex,
            _ => return Err(self.unsupported(text)),
        };
        let (to, a, b, c, mask) = match (&text.operands[..], synced) {
            ([to, a, b, c, mask], true) => (to, a, b, c, Some(self.source(mask, WORD)?)),
            ([to, a, b, c], false) => (to, a, b, c, None),
            _ => return Err(self.unsupported(text)),
        };
        let sources = [Some(self.source(a, WORD)?), Some(self.source(b, WORD)?), Some(self.source(c, WORD)?)];
        let (to, flag) = match to {
            Operand::Pair(to, flag) => (self.target(to, WORD)?, Some(self.target(flag, Type::Pred)?)),
            to => (self.target(to, WORD)?, None),
        };
        self.meet(meeting, mask, sources, Some(to), flag)
    }

    fn vote(&mut self, text: &Text<'a>) -> Lowered<()> {
        let synced = text.suffixes.first() == Some(&"sync");
        let (meeting, kind) = match text.suffixes[usize::from(synced)..] {
            ["all", "pred"] => (Meeting::VoteAll, Type::Pred),
            ["any", "pred"] => (Meeting::VoteAny, Type::Pred),
            ["uni", "pred"] => (Meeting::VoteUniform, Type::Pred),
            ["ballot", "b32"] => (Meeting::Ballot, WORD),
            _ => return Err(self.unsupported(text)),
        };
        let (to, value, mask) = match (&text.operands[..], synced) {
            ([to, value, mask], true) => (to, value, Some(self.source(mask, WORD)?)),
            ([to, value], false) => (to, value, None),
            _ => return Err(self.unsupported(text)),
        };
        let value = self.source(value, Type::Pred)?;
        let to = self.target(to, kind)?;
        self.meet(meeting, mask, [Some(value), None, None], Some(to), None)
    }

    fn matching(&mut self, text: &Text<'a>) -> Lowered<()> {
        let (meeting, kind) = match text.suffixes[..] {
            ["any", "sync", kind] => (Meeting::MatchAny, kind),
            ["all", "sync", kind] => (Meeting::MatchAll, kind),
            _ => return Err(self.unsupported(text)),
        };
        let kind = Type::named(kind).ok_or_else(|| self.unsupported(text))?;
        let [to, value, mask] = self.operands(text)?;
        let (value, mask) = (self.source(value, kind)?, self.source(mask, WORD)?);
        let (to, flag) = match to {
            Operand::Pair(to, flag) => (self.target(to, WORD)?, Some(self.target(flag, Type::Pred)?)),
            to => (self.target(to, WORD)?, None),
        };
        self.meet(meeting, Some(mask), [Some(value), None, None], Some(to), flag)
    }

    fn redux(&mut self, text: &Text<'a>) -> Lowered<()> {
        let ["sync", operation, kind] = text.suffixes[..] else { return Err(self.unsupported(text)) };
        let kind = Type::named(kind).filter(|kind| kind.is_integer() && kind.bits() == 32).ok_or_else(|| self.unsupported(text))?;
        let fold = match operation {
            "add" => instance!(kind, int::add),
            "min" => instance!(kind, int::min),
            "max" => instance!(kind, int::max),
            "and" => instance!(kind, int::and),
            "or" => instance!(kind, int::or),
            "xor" => instance!(kind, int::xor),
            _ => None,
        };
        let fold = fold.ok_or_else(|| self.unsupported(text))?;
        let [to, value, mask] = self.operands(text)?;
        let (value, mask) = (self.source(value, kind)?, self.source(mask, WORD)?);
        let to = self.target(to, kind)?;
        self.meet(Meeting::Reduce(fold), Some(mask), [Some(value), None, None], Some(to), None)
    }
}
