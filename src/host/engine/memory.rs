//! The memory that a plan works on, and the check that every span of a plan lies in it.

#![expect(unsafe_code, reason = "the caller's buffers may be one and the same, so they are held as pointers")]

use std::cell::Cell;

use crate::call::Call;
use crate::call::job;
use crate::host::plan::{Action, Plan, Space, Span};
use crate::host::scratch::Scratch;

/// A plan that can be run any number of times. It is checked again only if the terms differ from those of its last
/// check.
#[derive(Debug)]
pub(crate) struct CheckedPlan {
    /// Never changed, so the result of a check stays valid.
    plan: Plan,
    passed: Cell<Option<Terms>>,
}

impl CheckedPlan {
    /// Wraps a plan that has not been checked yet.
    pub(crate) fn new(plan: Plan) -> Self {
        Self { plan, passed: Cell::new(None) }
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }
}

/// Everything that the check of a plan depends on, apart from the plan. Scratch memory is not included: it overlaps
/// nothing, and has the length that the plan requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Terms {
    source_len: usize,
    destination_len: usize,
    /// The offset of the destination from the start of the source, if they have bytes in common.
    shift: Option<usize>,
    element_bytes: Option<usize>,
}

/// The block addresses of buffers that are lists.
pub(crate) type Lists = job::Lists<*const u8, *mut u8>;

/// The caller's two buffers. They may be the same memory, one may be a block of the other, or either may be a list of
/// blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory<'a> {
    source: *const u8,
    source_len: usize,
    destination: *mut u8,
    destination_len: usize,
    lists: Option<&'a Lists>,
}

impl<'a> Memory<'a> {
    /// # Safety
    ///
    /// - For as long as a run uses it, `source` is valid for reading `source_len` bytes, and `destination` for reading
    ///   and writing `destination_len` bytes. All these bytes are initialised, and nothing else touches them. A null
    ///   pointer has length 0.
    /// - Both are aligned to the element that the run's fold works on.
    /// - If a buffer is a list, all this applies to each of its blocks. The length is the total of all blocks, and the
    ///   address is not used.
    ///
    /// The two may share bytes, in whole or in part. Bytes from peers are written unchanged: the owner of the
    /// destination makes valid values of them before it is used.
    pub(crate) unsafe fn new(
        source: *const u8,
        source_len: usize,
        destination: *mut u8,
        destination_len: usize,
        lists: Option<&'a Lists>,
    ) -> Self {
        Self { source, source_len, destination, destination_len, lists }
    }
}

/// A start and a length.
type Region = (*mut u8, usize);

/// The three spaces of one run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spaces<'a> {
    source: Region,
    destination: Region,
    scratch: Region,
    lists: Option<&'a Lists>,
}

impl<'a> Spaces<'a> {
    /// Returns the spaces of a run. `scratch` must not change until the run is over.
    pub(super) fn new(memory: &Memory<'a>, scratch: &mut Scratch) -> Self {
        Self {
            source: (memory.source.cast_mut(), memory.source_len),
            destination: (memory.destination, memory.destination_len),
            scratch: scratch.region(),
            lists: memory.lists,
        }
    }

    fn region(&self, space: Space) -> Region {
        match space {
            Space::Source => self.source,
            Space::Destination => self.destination,
            Space::Scratch => self.scratch,
        }
    }

    /// Returns the address where a span begins. It may be dereferenced only after [`Spaces::check_once`] has passed.
    pub(super) fn pointer(&self, span: Span) -> *mut u8 {
        match (self.lists, span.space) {
            (Some(Lists { source: Some(list), .. }), Space::Source) => list.at(span.offset).cast_mut(),
            (Some(Lists { destination: Some(list), .. }), Space::Destination) => list.at(span.offset),
            _ => self.region(span.space).0.wrapping_add(span.offset),
        }
    }

    /// Whether a span lies in one piece of memory.
    fn is_whole(&self, span: &Span) -> bool {
        match (self.lists, span.space) {
            (Some(Lists { source: Some(list), .. }), Space::Source) => list.holds(span.offset, span.len),
            (Some(Lists { destination: Some(list), .. }), Space::Destination) => list.holds(span.offset, span.len),
            _ => true,
        }
    }

    /// Returns `len` bytes of a span, starting at `at`, for reading.
    ///
    /// # Safety
    ///
    /// The span's plan has passed [`Spaces::check_once`], `at + len` is at most the span's length, and nothing writes
    /// to these bytes while the slice lives.
    pub(super) unsafe fn bytes<'b>(&self, span: Span, at: usize, len: usize) -> &'b [u8] {
        debug_assert!(at + len <= span.len);
        if len == 0 {
            return &[];
        }
        // SAFETY: the span lies in its region (checked), whose bytes are initialised and valid (promised to
        // `Memory::new`, and ensured by `Scratch::reserve`); the caller promises the rest.
        unsafe { std::slice::from_raw_parts(self.pointer(span).add(at), len) }
    }

    /// Returns `len` bytes of a span, starting at `at`, for writing.
    ///
    /// # Safety
    ///
    /// As for [`Spaces::bytes`]. In addition, nothing else reads these bytes while the slice lives, and the span is not
    /// in the source.
    pub(super) unsafe fn bytes_mut<'b>(&self, span: Span, at: usize, len: usize) -> &'b mut [u8] {
        debug_assert!(at + len <= span.len && span.space != Space::Source);
        if len == 0 {
            return &mut [];
        }
        // SAFETY: the span lies in its region (checked), which is not the source; its bytes are initialised and may be
        // written (promised to `Memory::new`, and ensured by `Scratch::reserve`); the caller promises that nothing else
        // uses them meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(span).add(at), len) }
    }

    /// Checks the plan like [`Spaces::check`], unless it has passed on the same terms before. Lists are checked every
    /// time.
    pub(super) fn check_once(&self, checked: &CheckedPlan, element_bytes: Option<usize>) -> Result<(), String> {
        if self.lists.is_some() {
            return self.check(&checked.plan, element_bytes);
        }
        let terms = Some(self.terms(element_bytes));
        if checked.passed.get() != terms {
            self.check(&checked.plan, element_bytes)?;
            checked.passed.set(terms);
        }
        Ok(())
    }

    fn terms(&self, element_bytes: Option<usize>) -> Terms {
        let ((source, source_len), (destination, destination_len)) = (self.source, self.destination);
        let (first, second) = (source.addr(), destination.addr());
        let overlap = first < second.saturating_add(destination_len) && second < first.saturating_add(source_len);
        Terms { source_len, destination_len, shift: overlap.then(|| second.wrapping_sub(first)), element_bytes }
    }

    /// Checks that every span of the plan lies in its space, that nothing writes to the source, and that folds work on
    /// whole, aligned elements that overlap nothing but themselves. The error describes what is wrong.
    fn check(&self, plan: &Plan, element_bytes: Option<usize>) -> Result<(), String> {
        for (index, step) in plan.steps.iter().enumerate() {
            self.check_action(&step.action, element_bytes, plan.scratch_bytes)
                .map_err(|reason| format!("step {index}, {:?}: {reason}", step.action))?;
        }
        Ok(())
    }

    fn check_action(&self, action: &Action, element_bytes: Option<usize>, scratch_bytes: usize) -> Result<(), &'static str> {
        let inside = |span: &Span| {
            let len = if span.space == Space::Scratch { scratch_bytes } else { self.region(span.space).1 };
            let fits = span.offset.checked_add(span.len).is_some_and(|end| end <= len);
            match fits {
                false => Err("a span ends outside its memory"),
                true if self.is_whole(span) => Ok(()),
                true => Err("a span crosses several blocks of a list"),
            }
        };
        let writable = |span: &Span| {
            inside(span)?;
            if span.space == Space::Source { Err("the source is read-only") } else { Ok(()) }
        };
        match action {
            Action::Send { from, .. } => inside(from),
            Action::Receive { into, .. } => writable(into),
            Action::Copy { from, into } => {
                inside(from).and_then(|()| writable(into))?;
                self.check_pair(*from, *into)
            }
            Action::Fold { into, inputs, .. } => {
                let element_bytes = element_bytes.filter(|bytes| *bytes > 0).ok_or("this call has no fold")?;
                if inputs.is_empty() {
                    return Err("a fold has no inputs");
                }
                writable(into).and_then(|()| check_elements(into, element_bytes))?;
                inputs.iter().try_for_each(|input| {
                    inside(input).and_then(|()| check_elements(input, element_bytes))?;
                    self.check_pair(*input, *into)
                })
            }
        }
    }

    /// Checks that two spans of equal length are either the same memory or disjoint.
    fn check_pair(&self, from: Span, into: Span) -> Result<(), &'static str> {
        if from.len != into.len {
            return Err("the lengths differ");
        }
        let (from_at, into_at) = (self.pointer(from).addr(), self.pointer(into).addr());
        let apart = from_at.abs_diff(into_at);
        if apart == 0 || apart >= from.len { Ok(()) } else { Err("the spans overlap partially") }
    }
}

/// Checks that a span consists of whole elements and begins at an element boundary. The size of a type is a multiple of
/// its alignment. User memory is aligned to the type, and scratch memory begins at a cache line.
fn check_elements(span: &Span, element_bytes: usize) -> Result<(), &'static str> {
    let alignment = match 1 << element_bytes.trailing_zeros() {
        power if span.space == Space::Scratch => Scratch::ALIGNMENT.min(power),
        power => power,
    };
    let whole = span.len.is_multiple_of(element_bytes) && span.offset.is_multiple_of(alignment);
    if whole { Ok(()) } else { Err("a span does not consist of whole, aligned elements") }
}

/// The data that all parts of a run share. The plan has passed [`Spaces::check_once`] with these spaces.
pub(super) struct Context<'a> {
    pub(super) rank: usize,
    pub(super) plan: &'a Plan,
    pub(super) spaces: Spaces<'a>,
    pub(super) call: &'a Call,
    pub(super) fingerprint: [u8; Call::FINGERPRINT_BYTES],
}

impl Context<'_> {
    /// Returns the bytes that a send or receive moves.
    pub(super) fn span(&self, step: u32) -> Span {
        match &self.plan.steps[step as usize].action {
            Action::Send { from: span, .. } | Action::Receive { into: span, .. } | Action::Copy { into: span, .. } => *span,
            Action::Fold { into, .. } => *into,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::plan::Step;

    fn span(space: Space, offset: usize, len: usize) -> Span {
        Span { space, offset, len }
    }

    /// Checks one action on a source and a destination of 64 bytes each, 100 bytes of scratch and 8-byte elements.
    fn check(action: Action) -> Result<(), String> {
        let (source, mut destination) = ([0_u64; 8], [0_u64; 8]);
        // SAFETY: both arrays live longer than the spaces, which are never dereferenced.
        let memory = unsafe { Memory::new(source.as_ptr().cast(), 64, destination.as_mut_ptr().cast(), 64, None) };
        let mut scratch = Scratch::default();
        assert!(scratch.reserve(100));
        let plan = Plan { steps: vec![Step { action, after: vec![] }], scratch_bytes: 100 };
        Spaces::new(&memory, &mut scratch).check(&plan, Some(8))
    }

    #[test]
    fn spans_outside_their_memory_are_refused() {
        use Space::{Destination, Scratch, Source};
        let send = |from| check(Action::Send { to: 1, from });
        let receive = |into| check(Action::Receive { from: 1, into });
        assert_eq!(send(span(Source, 0, 64)), Ok(()));
        assert_eq!(send(span(Source, 64, 0)), Ok(()));
        assert!(send(span(Source, 1, 64)).is_err());
        assert!(send(span(Source, usize::MAX, 2)).is_err());
        assert!(send(span(Source, 2, usize::MAX)).is_err());
        assert!(send(span(Scratch, 0, 101)).is_err());
        assert_eq!(receive(span(Destination, 0, 64)), Ok(()));
        assert!(receive(span(Source, 0, 8)).expect_err("source").contains("read-only"));
    }

    #[test]
    fn folds_and_copies_are_of_whole_equal_disjoint_spans() {
        use Space::{Destination, Scratch, Source};
        let fold = |into, inputs| check(Action::Fold { into, inputs, last: true });
        let (into, input) = (span(Destination, 0, 16), span(Source, 8, 16));
        assert_eq!(fold(into, vec![input, into]), Ok(()));
        assert!(fold(into, vec![]).is_err());
        assert!(fold(into, vec![span(Source, 8, 24)]).is_err());
        assert!(fold(into, vec![span(Source, 4, 16)]).is_err());
        assert!(fold(into, vec![span(Destination, 8, 16)]).expect_err("overlap").contains("overlap"));
        assert!(fold(span(Destination, 0, 12), vec![span(Source, 0, 12)]).is_err());
        assert!(check(Action::Copy { from: span(Source, 0, 9), into: span(Scratch, 0, 8) }).is_err());
        assert_eq!(check(Action::Copy { from: span(Scratch, 1, 99), into: span(Scratch, 1, 99) }), Ok(()));
    }

    #[test]
    fn a_span_lies_in_one_block_of_a_list() {
        let (first, second, mut into) = ([1_u8; 3], [2_u8; 5], [0_u8; 8]);
        let blocks = [(first.as_ptr(), first.len()), (second.as_ptr(), second.len())];
        let lists = Lists { source: Some(job::List::new(blocks.into_iter())), destination: None };
        // SAFETY: all three arrays live longer than the spaces, and the list has their lengths.
        let memory = unsafe { Memory::new(std::ptr::null(), 8, into.as_mut_ptr(), 8, Some(&lists)) };
        let spaces = Spaces::new(&memory, &mut Scratch::default());
        let send = |offset, len| {
            let action = Action::Send { to: 1, from: span(Space::Source, offset, len) };
            let plan = CheckedPlan::new(Plan { steps: vec![Step { action, after: vec![] }], scratch_bytes: 0 });
            // The result is not cached: another list may have other blocks.
            spaces.check_once(&plan, None).and_then(|()| spaces.check_once(&plan, None))
        };
        assert_eq!([send(0, 3), send(3, 5), send(4, 2), send(8, 0)], [const { Ok(()) }; 4]);
        assert!(send(2, 2).expect_err("two blocks").contains("several blocks"));
        assert!(send(3, 6).expect_err("too long").contains("outside"));
        assert_eq!(spaces.pointer(span(Space::Source, 4, 1)).cast_const(), second[1..].as_ptr());
        assert_eq!(spaces.pointer(span(Space::Destination, 4, 1)), into.as_mut_ptr().wrapping_add(4));
    }

    #[test]
    fn a_plan_is_checked_again_for_other_memory() {
        let copy = Action::Copy { from: span(Space::Source, 0, 8), into: span(Space::Destination, 0, 8) };
        let plan = CheckedPlan::new(Plan { steps: vec![Step { action: copy, after: vec![] }], scratch_bytes: 0 });
        let mut bytes = [0_u8; 32];
        let start = bytes.as_mut_ptr();
        let check = |at: usize, source_len: usize, destination_len: usize, element_bytes: Option<usize>| {
            // SAFETY: the array lives longer than the spaces, which are never dereferenced.
            let memory = unsafe { Memory::new(start, source_len, start.wrapping_add(at), destination_len, None) };
            Spaces::new(&memory, &mut Scratch::default()).check_once(&plan, element_bytes)
        };
        for _ in 0..2 {
            assert_eq!(check(8, 8, 8, None), Ok(()));
            assert_eq!(check(8, 8, 8, Some(4)), Ok(()));
            assert!(check(8, 7, 8, None).expect_err("a shorter source").contains("outside"));
            assert!(check(8, 8, 7, None).expect_err("a shorter destination").contains("outside"));
            assert_eq!(check(0, 8, 8, None), Ok(()));
            assert!(check(4, 8, 8, None).expect_err("half of it").contains("overlap"));
        }
    }
}
