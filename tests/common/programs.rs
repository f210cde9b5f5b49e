//! What cargo has built beside a test's own program: examples, and programs of other packages, which cargo names to their own tests alone.

use std::path::PathBuf;

/// An example of the crate, as it was last built: `cargo test` does that, unless it is told which tests to build.
pub fn example(name: &str) -> Result<PathBuf, String> {
    built(&format!("examples/{name}"), "--examples")
}

/// A program of the workspace, as it was last built: `cargo test --workspace` does that.
pub fn program(name: &str) -> Result<PathBuf, String> {
    built(name, &format!("-p {name}"))
}

/// Above the test's own program, which lies in `target/…/deps`, or beside it, as in a bundle. Where there is nothing, what makes it.
fn built(name: &str, flags: &str) -> Result<PathBuf, String> {
    let own = std::env::current_exe().unwrap();
    let mut places = own.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    places.find(|path| path.exists()).ok_or_else(|| format!("{name} is not built: run `cargo build {flags}`"))
}
