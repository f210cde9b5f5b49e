//! The names in `tests/sanitize`: a name that no test has leaves out nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::sources::root;

/// Returns the lines that the script prints for a sanitizer, each with a program and the beginning of a test's path.
fn skipped(sanitizer: &str) -> Vec<(String, String)> {
    let functions = r#"eval "$(sed -n '/^skipped()/,/^}/p; /^not_for_miri()/,/^}/p' tests/sanitize)" && skipped"#;
    let output = Command::new("bash").args(["-c", functions]).env("sanitizer", sanitizer).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let lines = String::from_utf8(output.stdout).unwrap();
    lines.lines().map(|line| line.split_once(' ').unwrap()).map(|(program, test)| (program.to_owned(), test.to_owned())).collect()
}

/// Returns the folder that holds the sources of a program's tests.
fn folder(program: &str) -> PathBuf {
    match program {
        "lib" => root().join("src"),
        "collrun" | "collperf" => root().join(program).join("tests").join(program),
        _ => root().join("tests").join(program),
    }
}

/// Whether a test whose path begins in this way is in the file of its module.
fn exists(program: &Path, test: &str) -> bool {
    let (mut place, mut names) = (program.to_owned(), test.split("::").peekable());
    while let Some(inside) =
        names.peek().map(|name| place.join(name)).filter(|inside| inside.is_dir() || inside.with_extension("rs").is_file())
    {
        (place, _) = (inside, names.next());
    }
    let files = [place.with_extension("rs"), place.join("mod.rs"), place.join("main.rs"), place.join("lib.rs")];
    let text: String = files.iter().filter_map(|file| fs::read_to_string(file).ok()).collect();
    names.all(|name| text.contains(&format!("fn {name}")) || text.contains(&format!("mod {name}")))
}

#[test]
fn tests_that_sanitizers_leave_out_exist() {
    for sanitizer in ["address", "thread", "miri"] {
        let skipped = skipped(sanitizer);
        assert!(skipped.len() > 5, "{sanitizer}: {skipped:?}");
        let unknown: Vec<_> = skipped.iter().filter(|(program, test)| !exists(&folder(program), test)).collect();
        assert!(unknown.is_empty(), "tests/sanitize {sanitizer} leaves out {unknown:?}, which do not exist");
    }
    assert!(!exists(&folder("lib"), "communicator::shrink::tests") && !exists(&folder("host"), "background::a_test_of_no_such_name"));
}
