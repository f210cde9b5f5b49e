//! Files of results, records and traces that a user names.

use std::io;
use std::path::Path;

use collectives::__private::regular_file;

/// The largest accepted file, in bytes. A trace has about 30 MiB.
const MOST: u64 = 256 << 20;

/// Reads a whole file.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    regular_file::read(path, MOST)
}
