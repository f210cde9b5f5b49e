//! What a rank says of its buffers in the first step of a direct call: the windows they lie in, and where.

use super::layout::HEAD_BYTES;
use super::window::WindowOffset;

/// What a rank says of its source and its destination: the windows they lie in, 0 for none, and where.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Offer {
    windows: [u32; 2],
    offsets: [u64; 2],
}

const _: () = assert!(size_of::<Offer>() == HEAD_BYTES, "an offer travels in a mailbox's header");

/// One of a rank's two buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(super) enum Side {
    Source = 0,
    Destination = 1,
}

impl Offer {
    pub(super) fn new(source: Option<WindowOffset>, destination: Option<WindowOffset>) -> Self {
        let places = [source, destination];
        Self {
            windows: places.map(|place| place.map_or(0, |place| place.window)),
            offsets: places.map(|place| place.map_or(0, |place| place.offset as u64)),
        }
    }

    /// The window that a buffer lies in, 0 for none.
    pub(super) fn window(&self, side: Side) -> u32 {
        self.windows[side as usize]
    }

    /// Where a buffer lies from its byte `start` on. `None` for a place that no address space has: any bytes can have been read as an offer.
    pub(super) fn place(&self, side: Side, start: usize) -> Option<WindowOffset> {
        let offset = usize::try_from(self.offsets[side as usize]).ok()?.checked_add(start)?;
        Some(WindowOffset { window: self.window(side), offset })
    }

    /// The windows that it names.
    pub(super) fn windows(&self) -> impl Iterator<Item = u32> + use<> {
        self.windows.into_iter().filter(|window| *window != 0)
    }
}
