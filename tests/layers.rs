//! Arrows point down: reads the sources and fails on a `use` that points up, and on what certain modules must not know.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

/// Top-level modules, lowest first; modules of one row do not know each other, unless named in `BESIDE`.
const LAYERS: [&[&str]; 11] = [
    &["deadline", "error", "event", "float8", "fork"],
    &["element", "proof"],
    &["buffer", "op"],
    &["call", "interchange", "nccl_config"],
    &["flight"],
    &["observe"],
    &["config"],
    &["device", "host", "rendezvous"],
    &["communicator"],
    &["train"],
    &["internals"],
];

/// Pure modules: no sockets, threads, clocks, environment or unsafe code.
const PURE: [&str; 4] = ["src/host/plan", "src/rendezvous/protocol", "src/rendezvous/url.rs", "src/call.rs"];

/// The programs, and the library that they share: packages that know the crate by its public face.
const PROGRAMS: [&str; 3] = ["collperf", "collrun", "launch"];

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            // Unit tests that outgrew the file they test may use what they like.
            if !(path.ends_with("tests") && path.starts_with(root().join("src"))) {
                found.extend(sources(&path));
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("tests.rs") {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The file's text without its tests and comments.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]").next().unwrap_or_default();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|row| row.contains(&module))
}

/// The top-level modules that a text names as `crate::module`.
fn named(text: &str) -> Vec<String> {
    let mut modules = Vec::new();
    for part in text.split("crate::").skip(1) {
        let list = part.strip_prefix('{').map_or(part, |list| list.split('}').next().unwrap_or_default());
        let names = if part.starts_with('{') { list.split(',').collect() } else { vec![list] };
        for name in names {
            let name: String = name.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            modules.push(name);
        }
    }
    modules
}

#[test]
fn modules_use_only_what_lies_below_them() {
    let mut wrong = Vec::new();
    for path in sources(&root().join("src")) {
        let relative = path.strip_prefix(root().join("src")).unwrap().to_path_buf();
        let own = relative.components().next().unwrap().as_os_str().to_string_lossy().trim_end_matches(".rs").to_owned();
        let Some(own_layer) = layer(&own) else { continue };
        for module in named(&code(&path)) {
            if module != own && layer(&module).is_some_and(|theirs| theirs >= own_layer) {
                wrong.push(format!("{} uses {module}", relative.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "arrows that point up or sideways:\n{}", wrong.join("\n"));
}

#[test]
fn every_top_level_module_has_a_layer() {
    for entry in fs::read_dir(root().join("src")).unwrap() {
        let name = entry.unwrap().file_name().to_string_lossy().trim_end_matches(".rs").to_owned();
        assert!(name == "lib" || layer(&name).is_some(), "src/{name} stands in no layer");
    }
}

#[test]
fn pure_modules_name_no_sockets_threads_clocks_or_unsafe() {
    for pure in PURE {
        let path = root().join(pure);
        let files = if path.is_dir() { sources(&path) } else { vec![path] };
        assert!(!files.is_empty(), "{pure} is gone");
        for file in files {
            let code = code(&file);
            for word in [
                "TcpStream",
                "TcpListener",
                "UdpSocket",
                "ToSocketAddrs",
                "std::os",
                "std::thread",
                "std::time::Instant",
                "SystemTime",
                "std::env",
                "std::fs",
                "rustix",
                "libc",
                "unsafe ",
            ] {
                assert!(!code.contains(word), "{} names {word}", file.display());
            }
        }
    }
}

#[test]
fn whoever_listens_is_called_in_one_way() {
    for file in sources(&root().join("src")) {
        let relative = file.strip_prefix(root()).unwrap().display().to_string();
        // The watch says how a call ended inside that call's span.
        if !["src/event.rs", "src/observe/watch.rs"].contains(&relative.as_str()) && !relative.starts_with("src/bin/") {
            for word in ["event!", "error!", "warn!", "info!", "debug!", "trace!", "span!"] {
                assert!(!code(&file).contains(&format!("tracing::{word}")), "{relative} sends events around src/event.rs");
            }
        }
    }
}

#[test]
fn the_environment_is_read_in_one_file() {
    for file in sources(&root().join("src")) {
        let relative = file.strip_prefix(root()).unwrap().display().to_string();
        if relative != "src/config.rs" {
            assert!(!code(&file).contains("env::var"), "{relative} reads the environment");
        }
    }
}

#[test]
fn the_programs_use_the_public_face_alone() {
    for program in PROGRAMS {
        let manifest = fs::read_to_string(root().join(program).join("Cargo.toml")).unwrap();
        assert!(!manifest.contains("internals"), "{program}/Cargo.toml asks for the feature `internals`");
        let files = sources(&root().join(program));
        assert!(!files.is_empty(), "{program} is gone");
        for file in files {
            // The feature is on where the workspace is built with all of them.
            assert!(!code(&file).contains("collectives::internals"), "{} reaches into the crate", file.display());
        }
    }
}

#[test]
fn no_file_is_longer_than_it_should_be() {
    for folder in ["src", "tests", "examples"].iter().chain(&PROGRAMS) {
        for file in sources(&root().join(folder)) {
            let lines = fs::read_to_string(&file).unwrap().lines().count();
            assert!(lines <= 800, "{} has {lines} lines: split it", file.display());
        }
    }
}
