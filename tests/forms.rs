//! The rule of forms: every collective in place and into, blocking, started and in a group; and the guide's table of them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::forms::every_form;
use common::ranks::{Wiring, threads};

const SEED: u64 = 0xf0;

#[test]
fn every_form_gives_what_the_blocking_one_gives() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        for ranks in [1, 2, 3, 5] {
            threads(wiring, ranks, |comm| every_form(comm, SEED + ranks as u64, <[u32]>::to_vec, Vec::clone));
        }
    }
}

/// The names of public methods in these files.
fn methods(files: &[&str]) -> Vec<String> {
    let sources = files.iter().map(|file| std::fs::read_to_string(format!("src/communicator/{file}.rs")).unwrap());
    let name = |line: &str| {
        let rest = line.trim_start().strip_prefix("pub fn ")?;
        Some(rest.split(|sign: char| !sign.is_alphanumeric() && sign != '_').next()?.to_owned())
    };
    sources.flat_map(|source| source.lines().filter_map(name).collect::<Vec<_>>()).collect()
}

#[test]
fn the_table_of_the_guide_shows_what_there_is() {
    let page = std::fs::read_to_string("docs/src/collectives.md").unwrap();
    let table = page.split("## The forms").nth(1).unwrap().split("\n## ").next().unwrap();
    let (blocking, started, grouped) = (methods(&["collectives", "variable", "barrier"]), methods(&["started"]), methods(&["group"]));
    let mut listed = Vec::new();
    for row in table.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let named = |cell: &str| cell.strip_prefix('`').and_then(|cell| cell.strip_suffix('`')).map(str::to_owned);
        let name = named(cells[0]).unwrap();
        assert!(blocking.contains(&name), "{name} is no method");
        let start = named(cells[1]).inspect(|start| assert_eq!(*start, format!("start_{name}")));
        assert_eq!(start.is_some(), started.contains(&format!("start_{name}")), "whether {name} can be started");
        assert_eq!(cells[2] == "yes", grouped.contains(&name), "whether {name} can be in a group");
        assert!(cells.iter().all(|cell| !cell.is_empty() && *cell != "no"), "{name}: a hole says why");
        listed.push(name);
    }
    let missing: Vec<_> = blocking.iter().filter(|name| !listed.contains(name)).collect();
    assert!(missing.is_empty(), "the table lacks {missing:?}");
}
