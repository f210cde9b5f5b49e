//! The structure of the sources: arrows point down, neither files nor folders make circles, and pure modules stay pure.

use std::fs;
use std::path::{Path, PathBuf};

use super::arrows;
use super::sources::{Sources, code, files_below, root};

/// The top-level modules, lowest first. Modules of one row do not use each other.
const LAYERS: [&[&str]; 10] = [
    &["base", "error"],
    &["authentication", "call"],
    &["interop"],
    &["flight"],
    &["observe", "status"],
    &["metrics"],
    &["config"],
    &["device", "host", "rendezvous"],
    &["communicator"],
    &["internals"],
];

/// The pure modules: no sockets, threads, clocks, environment or unsafe code. Each one's module docs say so.
const PURE: [&str; 29] = [
    "src/call/algorithm.rs",
    "src/call/mod.rs",
    "src/communicator/handle/dissemination.rs",
    "src/device/plan",
    "src/host/engine/wire.rs",
    "src/host/net/hello.rs",
    "src/host/plan",
    "src/host/point_to_point/frame.rs",
    "src/host/point_to_point/matching.rs",
    "src/host/shm/layout.rs",
    "src/authentication/admission.rs",
    "src/authentication/frame.rs",
    "src/authentication/record.rs",
    "src/metrics/request.rs",
    "src/rendezvous/launcher",
    "src/rendezvous/protocol",
    "src/rendezvous/service",
    "src/rendezvous/url.rs",
    "train/src/checkpoint/batches.rs",
    "train/src/checkpoint/contents.rs",
    "train/src/checkpoint/foreign.rs",
    "train/src/checkpoint/header.rs",
    "train/src/checkpoint/index.rs",
    "train/src/checkpoint/piece.rs",
    "train/src/checkpoint/plan.rs",
    "train/src/layout.rs",
    "train/src/matrix.rs",
    "train/src/state_transfer/plan.rs",
    "launch/src/elastic/membership.rs",
];

/// Names that a pure module must not use.
const IMPURE: [&str; 13] = [
    "TcpStream",
    "TcpListener",
    "UdpSocket",
    "ToSocketAddrs",
    "std::os",
    "std::thread",
    "Instant::now",
    "SystemTime",
    "std::env",
    "std::fs",
    "rustix",
    "libc",
    "cudarc::driver",
];

/// The folders of the libraries whose files are checked. The first is the crate itself.
const LIBRARIES: [&str; 2] = ["", "train"];

/// Packages that use only the crate's public API: training, the programs, and the library that these share.
const PACKAGES: [&str; 4] = ["train", "collperf", "collrun", "launch"];

fn relative(file: &Path) -> String {
    file.strip_prefix(root()).unwrap().display().to_string()
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|row| row.contains(&module))
}

/// Returns the files in a folder of the package, without files of tests.
fn sources_below(folder: &str) -> Vec<PathBuf> {
    let is_test = |file: &PathBuf| file.ends_with("tests.rs") || relative(file).contains("/tests/");
    files_below(&root().join(folder.trim_start_matches('/'))).into_iter().filter(|file| !is_test(file)).collect()
}

/// Returns the same of all libraries.
fn library_sources() -> Vec<PathBuf> {
    LIBRARIES.iter().flat_map(|library| sources_below(&format!("{library}/src"))).collect()
}

#[test]
fn modules_use_only_what_lies_below_them() {
    let top = |file: &Path| file.components().nth(1).unwrap().as_os_str().to_string_lossy().trim_end_matches(".rs").to_owned();
    let mut wrong = Vec::new();
    for (from, to) in Sources::read("").arrows() {
        let own = top(&from);
        let Some(own_layer) = layer(&own) else { continue };
        for (file, name) in to {
            let theirs = top(&file);
            if theirs != own && layer(&theirs).is_some_and(|theirs| theirs >= own_layer) {
                wrong.push(format!("{} names {name} of {}", from.display(), file.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "arrows that point up or sideways:\n{}", wrong.join("\n"));
}

#[test]
fn no_files_name_each_other_in_a_circle() {
    for (package, least) in [""].into_iter().chain(PACKAGES).zip([500, 80, 80, 10, 20]) {
        let arrows = Sources::read(package).arrows();
        let count: usize = arrows.values().map(std::collections::BTreeMap::len).sum();
        assert!(count > least, "only {count} arrows were found: the sources are not read as they should be");
        let circles: Vec<String> = arrows::circles(&arrows).iter().map(|circle| arrows::in_words(circle, &arrows)).collect();
        assert!(circles.is_empty(), "{} circles:\n{}", circles.len(), circles.join("\n"));
    }
}

#[test]
fn no_folders_name_each_other_in_a_circle() {
    for package in [""].into_iter().chain(PACKAGES) {
        let arrows = arrows::between_neighbours(&Sources::read(package).arrows());
        let circles: Vec<String> = arrows::circles(&arrows).iter().map(|circle| arrows::in_words(circle, &arrows)).collect();
        assert!(circles.is_empty(), "{} circles:\n{}", circles.len(), circles.join("\n"));
    }
}

#[test]
fn every_file_is_part_of_the_crate() {
    for library in LIBRARIES {
        let known: Vec<PathBuf> = Sources::read(library).modules.into_values().map(|module| module.file).collect();
        for file in sources_below(&format!("{library}/src")) {
            let text = fs::read_to_string(&file).unwrap();
            let is_known = known.iter().any(|known| root().join(known) == file);
            assert!(is_known || text.contains("cfg(test)") || is_for_tests(&file), "{} is read by nobody", relative(&file));
        }
    }
}

/// Whether a file's module is declared for tests only.
fn is_for_tests(file: &Path) -> bool {
    let name = file.file_stem().unwrap().to_string_lossy().into_owned();
    let folder = file.parent().unwrap();
    [folder.join("mod.rs"), folder.with_extension("rs")].iter().filter_map(|parent| fs::read_to_string(parent).ok()).any(|text| {
        let declared = text.find(&format!("mod {name};"));
        declared.is_some_and(|at| text[..at].rsplit('\n').take(3).any(|line| line.contains("cfg(test)") || line.contains("cfg(all(test")))
    })
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
        let files = if root().join(pure).is_dir() { sources_below(pure) } else { vec![root().join(pure)] };
        assert!(!files.is_empty(), "{pure} is gone");
        for file in files {
            let code = code(&file).replace("unsafe_code", "");
            for word in IMPURE.into_iter().chain(["unsafe"]) {
                assert!(!code.contains(word), "{} names {word}", relative(&file));
            }
        }
    }
}

#[test]
fn whoever_listens_is_called_in_one_way() {
    for file in library_sources() {
        // `watch.rs` reports how a call ended, inside that call's span.
        if !["src/base/event.rs", "src/observe/watch.rs", "train/src/event.rs"].contains(&relative(&file).as_str()) {
            for word in ["event!", "error!", "warn!", "info!", "debug!", "trace!", "span!"] {
                assert!(!code(&file).contains(&format!("tracing::{word}")), "{} sends events around event.rs", relative(&file));
            }
        }
    }
}

#[test]
fn the_environment_is_read_in_one_file() {
    for file in library_sources() {
        assert!(relative(&file) == "src/config.rs" || !code(&file).contains("env::var"), "{} reads the environment", relative(&file));
    }
}

#[test]
fn other_packages_use_the_public_face_alone() {
    for package in PACKAGES {
        let manifest = fs::read_to_string(root().join(package).join("Cargo.toml")).unwrap();
        let asks = |line: &str| line.starts_with("collectives =") && line.contains("__internals");
        assert!(
            !manifest.lines().any(asks) && !manifest.contains("collectives/__internals"),
            "{package}/Cargo.toml asks for the feature `__internals`"
        );
        let files = sources_below(package);
        assert!(!files.is_empty(), "{package} is gone");
        for file in files {
            // The feature is on if the workspace is built with all features.
            assert!(!code(&file).contains("collectives::internals"), "{} reaches into the crate", relative(&file));
            let is_hidden = package == "train" && code(&file).contains("collectives::__private");
            assert!(!is_hidden, "{} uses what the documentation hides", relative(&file));
        }
    }
}

#[test]
fn the_root_holds_what_every_program_uses() {
    let names = Sources::read("").modules[&Vec::new()].exports.len();
    assert!((20..=41).contains(&names), "{names} items stand at the crate's root: 41 at most, the rest belongs into a module");
}

#[test]
fn no_file_is_longer_than_it_should_be() {
    for folder in ["src", "tests", "examples"].iter().chain(&PACKAGES) {
        for file in files_below(&root().join(folder)) {
            let lines = fs::read_to_string(&file).unwrap().lines().count();
            assert!(lines <= 800, "{} has {lines} lines: split it", relative(&file));
        }
    }
}
