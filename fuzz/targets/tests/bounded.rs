//! Tries every target for a short time, from known inputs, and tests the runner itself.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::time::Duration;

use fuzz_targets::{LONGEST, Mutator, TARGETS, Target, runner, seeds};

/// The time for each target. Longer runs are started by hand.
const SHORT: Duration = Duration::from_secs(1);

fn scratch() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

#[test]
fn every_target_holds_for_a_while() {
    let seed = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    let mut found = Vec::new();
    for target in &TARGETS {
        match runner::run(target, SHORT, seed, scratch()).unwrap() {
            Ok(tried) => println!("{}: {tried} inputs, seed {seed}", target.name),
            Err(failure) => found.push(failure.to_string()),
        }
    }
    assert!(found.is_empty(), "seed {seed}\n{}", found.join("\n"));
}

#[test]
fn the_corpus_holds_what_the_encoders_give() {
    for target in &TARGETS {
        let known = runner::known(target.name).unwrap();
        let seeds: Vec<_> = seeds().into_iter().filter(|(name, _)| *name == target.name).collect();
        assert!(!seeds.is_empty(), "{} has nothing to begin with", target.name);
        for (_, seed) in seeds {
            assert!(known.contains(&seed), "{}: run `cargo run -p fuzz-targets -- --write-seeds` and look at what changed", target.name);
        }
    }
}

#[test]
fn every_target_can_be_run_by_libfuzzer() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap();
    for target in &TARGETS {
        let text = std::fs::read_to_string(folder.join(format!("fuzz_targets/{}.rs", target.name))).unwrap();
        assert!(text.contains(&format!("fuzz_targets::check(\"{}\", input)", target.name)), "{}", target.name);
        assert!(manifest.contains(&format!("name = \"{}\"", target.name)), "{}", target.name);
    }
}

#[test]
fn a_failure_leaves_its_input_behind_and_says_how_to_repeat_it() {
    fn dislikes_long(input: &[u8]) {
        assert!(input.len() < 40, "too long for me");
    }
    static PICKY: Target = Target { name: "urls", run: dislikes_long, base_bytes: 1 << 20, bytes_per_byte: 0 };
    let found = runner::run(&PICKY, Duration::from_secs(20), 1, scratch()).unwrap().unwrap_err();
    let input = std::fs::read(&found.file).unwrap();
    assert!(input.len() >= 40 && found.what.contains("too long for me"), "{found}");
    assert!(found.to_string().contains(&format!("--target urls --input {}", found.file.display())), "{found}");
    std::fs::remove_file(&found.file).unwrap();
}

#[test]
fn memory_beyond_the_bound_is_found() {
    fn greedy(input: &[u8]) {
        drop(std::hint::black_box(vec![0_u8; input.len() << 20]));
    }
    static GREEDY: Target = Target { name: "urls", run: greedy, base_bytes: 1 << 10, bytes_per_byte: 16 };
    let found = runner::run(&GREEDY, Duration::ZERO, 1, scratch()).unwrap().unwrap_err();
    assert!(found.what.contains("bytes of memory"), "{found}");
    std::fs::remove_file(&found.file).unwrap();
}

#[test]
fn the_same_seed_gives_the_same_inputs() {
    let known = vec![b"one 1".to_vec(), vec![7; 9000], Vec::new()];
    let inputs = |seed| {
        let mut mutator = Mutator::new(seed);
        (0..500).map(|_| mutator.input(&known)).collect::<Vec<_>>()
    };
    assert!(inputs(5) == inputs(5) && inputs(5) != inputs(6));
    assert!(inputs(5).iter().all(|input| input.len() <= LONGEST));
}
