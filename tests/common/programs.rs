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

/// The test's own program lies in `target/…/deps`. Where there is nothing, what makes it.
fn built(name: &str, flags: &str) -> Result<PathBuf, String> {
    let own = std::env::current_exe().unwrap();
    let path = own.ancestors().nth(2).unwrap().join(name);
    if path.exists() { Ok(path) } else { Err(format!("{} is not built: run `cargo build {flags}`", path.display())) }
}
