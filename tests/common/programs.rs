//! Programs that cargo built beside the test binary: examples, and programs of other packages. Cargo passes the
//! latter's paths only to their own tests.

use std::path::PathBuf;

/// Returns an example of the crate as last built. `cargo test` builds it, unless its arguments select tests.
pub fn example(name: &str) -> Result<PathBuf, String> {
    built(&format!("examples/{name}"), "--examples")
}

/// Returns a program of the workspace as last built. `cargo test --workspace` builds it.
pub fn program(name: &str) -> Result<PathBuf, String> {
    built(name, &format!("-p {name}"))
}

/// Finds a program above the test binary in `target/…/deps`, or beside it, as in a bundle. Otherwise the error names
/// the command that builds it.
fn built(name: &str, flags: &str) -> Result<PathBuf, String> {
    let own = std::env::current_exe().unwrap();
    let mut places = own.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    places.find(|path| path.exists()).ok_or_else(|| format!("{name} is not built: run `cargo build {flags}`"))
}
