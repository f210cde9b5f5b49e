//! The rule of forms: every collective in place and into another buffer, blocking, started and in a group. Also checks
//! the guide's table of them.

use crate::common::forms::every_form;
use crate::common::ranks::{Wiring, threads};

const SEED: u64 = 0xf0;

#[test]
fn every_form_gives_what_the_blocking_one_gives() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        for ranks in [1, 2, 3, 5] {
            threads(wiring, ranks, |comm| every_form(comm, SEED + ranks as u64, <[u32]>::to_vec, Vec::clone));
        }
    }
}

/// Returns the names of a type's public methods in these files.
fn methods(of: &str, files: &[&str]) -> Vec<String> {
    let mut names = Vec::new();
    for file in files {
        let source = std::fs::read_to_string(format!("src/communicator/forms/{file}.rs")).unwrap();
        let mut is_of = false;
        for line in source.lines() {
            if line.starts_with("impl") {
                is_of = line.contains(of);
            }
            let Some(rest) = line.trim_start().strip_prefix("pub fn ").filter(|_| is_of) else { continue };
            names.extend(rest.split(|sign: char| !sign.is_alphanumeric() && sign != '_').next().map(str::to_owned));
        }
    }
    names
}

#[test]
fn the_table_of_the_guide_shows_what_there_is() {
    let page = std::fs::read_to_string("docs/src/collectives.md").unwrap();
    let table = page.split("## The forms").nth(1).unwrap().split("\n## ").next().unwrap();
    let of_communicators = methods(" Communicator ", &["collectives", "variable", "barrier", "started", "many", "list"]);
    let (started, blocking): (Vec<_>, Vec<_>) = of_communicators.into_iter().partition(|name| name.starts_with("start_"));
    let grouped = methods(" Group<", &["group", "many", "list"]);
    assert!(started.len() > 20 && blocking.len() > started.len() && grouped.len() > 20, "{started:?} {blocking:?} {grouped:?}");
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
