//! Checks the guide in `docs/`: no link is dead, and the variables, settings, methods and flags that it names exist.
//! Its code is compiled and run by `cargo test --doc`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, str};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the guide's pages by name, with what they include.
fn pages() -> BTreeMap<String, String> {
    let files = fs::read_dir(root().join("docs/src")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    files.filter(|name| name.ends_with(".md")).map(|name| (name.clone(), page(&name))).collect()
}

fn page(name: &str) -> String {
    let text = read(&format!("docs/src/{name}"));
    match text.trim().strip_prefix("{{#include ../../").and_then(|rest| rest.strip_suffix("}}")) {
        Some(included) => read(included),
        None => text,
    }
}

/// Returns a text without its code blocks.
fn prose(text: &str) -> String {
    text.split("\n```").step_by(2).collect::<Vec<_>>().join("\n")
}

/// Returns each text between `open` and the next `close`.
fn between<'a>(text: &'a str, open: &str, close: char) -> Vec<&'a str> {
    text.split(open).skip(1).filter_map(|rest| rest.split(close).next()).collect()
}

/// Returns all source files in a folder as one text.
fn sources(folder: &str) -> String {
    let (mut all, mut folders) = (String::new(), vec![root().join(folder)]);
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            match path.extension() {
                _ if path.is_dir() => folders.push(path),
                Some(extension) if extension == "rs" => all += &fs::read_to_string(path).unwrap(),
                _ => {}
            }
        }
    }
    all
}

/// Returns the words of letters, digits and underscores that begin with `prefix`.
fn words_from(text: &str, prefix: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with(prefix) && word.len() > prefix.len() && !word.ends_with('_')).map(str::to_owned).collect()
}

/// Returns the anchors of a page's headings, as mdBook makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let text = prose(text);
    let headings = text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    let kept = |c: char| match c {
        c if c.is_alphanumeric() || c == '_' || c == '-' => Some(c.to_ascii_lowercase()),
        c if c.is_whitespace() => Some('-'),
        _ => None,
    };
    headings.map(|heading| heading.chars().filter_map(kept).collect()).collect()
}

/// Returns what is wrong with a link of the page `from`.
fn trouble(pages: &BTreeMap<String, String>, from: &str, link: &str) -> Option<String> {
    let (file, anchor) = link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor)));
    let file = if file.is_empty() { from } else { file };
    let known = match file.strip_prefix("../doc/collectives/") {
        Some(item) => return (!is_documented(item)).then(|| format!("{from}: the crate has no public {item}")),
        None => pages.get(file).map(|text| anchor.is_none_or(|anchor| anchors(text).contains(anchor))),
    };
    match known {
        Some(true) => None,
        Some(false) => Some(format!("{from}: {file} has no heading for #{}", anchor.unwrap_or_default())),
        None if root().join("docs/src").join(file).is_file() && !file.starts_with("..") => None,
        None => Some(format!("{from}: {link} leads nowhere")),
    }
}

/// Whether `struct.Name.html`, `store/trait.Name.html` and the like stand for a public item of the crate.
fn is_documented(item: &str) -> bool {
    let (module, file) = item.split_once('/').map_or((None, item), |(module, file)| (Some(module), file));
    let [kind, name, "html"] = file.split('.').collect::<Vec<_>>()[..] else { return false };
    let library = read("src/lib.rs");
    let (root, inline) = library.split_once("pub mod nccl {").unwrap();
    let place = match module {
        None => root.to_owned(),
        Some(module) if root.contains(&format!("pub mod {module};")) => read(&format!("src/{module}/mod.rs")),
        Some(module) => format!("pub mod nccl {{{inline}")
            .split_once(&format!("pub mod {module} {{"))
            .map_or(String::new(), |(_, rest)| rest.split("\n}").next().unwrap().to_owned()),
    };
    let lists = place.split("pub use").skip(1).map(|list| list.split(';').next().unwrap());
    let exported = lists.flat_map(|list| list.split(|c: char| !c.is_alphanumeric() && c != '_')).any(|word| word == name);
    let sources = sources("src").replace("pub unsafe trait", "pub trait");
    exported && ["<", " ", "(", ":", ";"].iter().any(|end| sources.contains(&format!("pub {kind} {name}{end}")))
}

#[test]
fn every_page_is_in_the_summary_and_every_link_leads_somewhere() {
    let pages = pages();
    let listed: BTreeSet<_> = between(&pages["SUMMARY.md"], "](", ')').into_iter().collect();
    let unlisted: Vec<_> = pages.keys().filter(|page| *page != "SUMMARY.md" && !listed.contains(page.as_str())).collect();
    assert!(unlisted.is_empty(), "not in docs/src/SUMMARY.md: {unlisted:?}");
    let links = pages.iter().flat_map(|(name, text)| {
        between(&prose(text), "](", ')').into_iter().map(|link| (name.clone(), link.to_owned())).collect::<Vec<_>>()
    });
    let mut seen = 0;
    let troubles: Vec<_> = links.inspect(|_| seen += 1).filter_map(|(from, link)| trouble(&pages, &from, &link)).collect();
    assert!(troubles.is_empty(), "{}", troubles.join("\n"));
    assert!(seen > 80, "only {seen} links were found");
}

#[test]
fn every_page_with_code_is_compiled() {
    let (library, training) = (read("src/lib.rs"), read("train/src/lib.rs"));
    for (name, text) in pages() {
        let included = read(&format!("docs/src/{name}")).starts_with("{{#include");
        let compiled = library.contains(&format!("\"../docs/src/{name}\"")) || training.contains(&format!("\"../docs/{name}\""));
        assert!(compiled || included || !text.contains("\n```rust"), "{name} has code and stands in no src/lib.rs");
    }
}

#[test]
fn variables_and_settings_are_those_of_the_configuration() {
    let config = read("src/config.rs");
    let there = words_from(&config, "COLLECTIVES_");
    for (name, text) in pages().into_iter().chain([("README.md".to_owned(), read("README.md"))]) {
        let named = words_from(&text, "COLLECTIVES_");
        let unknown: Vec<_> =
            named.difference(&there).filter(|name| !["COLLECTIVES_TEST_GPU", "COLLECTIVES_NVCC"].contains(&name.as_str())).collect();
        assert!(unknown.is_empty(), "{name}: src/config.rs knows no {unknown:?}");
    }
    let settings = page("settings.md");
    let missing: Vec<_> = there.iter().filter(|variable| !settings.contains(variable.as_str())).collect();
    assert!(missing.is_empty(), "settings.md does not say what {missing:?} are");
    let declared = config.split("pub struct Config {").nth(1).unwrap().split("\n}").next().unwrap();
    let fields: BTreeSet<_> = declared.lines().filter_map(|line| line.trim().strip_prefix("pub ")?.split(':').next()).collect();
    let listed: BTreeSet<_> = settings.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    assert_eq!(fields, listed, "Config's fields, and the table of settings.md");
}

#[test]
fn methods_and_variants_that_are_named_exist() {
    let sources = sources("src") + &sources("train/src");
    let exists = |name: &str| {
        let forms = [
            format!("fn {name}("),
            format!("fn {name}<"),
            format!("pub {name}:"),
            format!("    {name},"),
            format!("    {name}("),
            format!("    {name} {{"),
        ];
        forms.iter().any(|form| sources.contains(form))
    };
    let types = [
        "Options",
        "DataParallel",
        "Communicator",
        "Config",
        "Builder",
        "ReduceOp",
        "CustomOp",
        "Work",
        "Device",
        "NcclConfig",
        "NcclCommunicator",
        "UniqueId",
        "DeviceChoice",
        "Transport",
        "RawCall",
    ];
    let mut seen = 0;
    for (page, text) in pages() {
        for code in between(&prose(&text), "`", '`').into_iter().flat_map(|code| code.split([' ', '(', ')', ','])) {
            let Some((kind, member)) = code.rsplit_once("::").filter(|(kind, _)| types.contains(kind)) else { continue };
            seen += 1;
            assert!(exists(member), "{page}: {kind} has no {member}");
        }
    }
    assert!(seen > 40, "only {seen} were found");
    for (page, column) in [("from-torch.md", 2), ("from-nccl.md", 2), ("from-nccl.md", 3), ("subgroups.md", 1), ("collectives.md", 1)] {
        for row in page_rows(page) {
            for code in between(row.get(column).map_or("", String::as_str), "`", '`').into_iter().step_by(2) {
                let name = code.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap();
                let is_method = name.starts_with(|c: char| c.is_ascii_lowercase()) && code.starts_with(name) && name.len() > 3;
                let ours = !["unsafe", "torchrun", "nccl", "collrun", "collperf", "root", "collectives_train", "None", "Some", "serde"]
                    .contains(&name);
                assert!(!is_method || !ours || exists(name), "{page}: there is no {name}, in {row:?}");
            }
        }
    }
}

/// Returns the rows of a page's tables as cells. The first cell is empty.
fn page_rows(name: &str) -> Vec<Vec<String>> {
    let text = prose(&page(name)).replace("\\|", "¦");
    text.lines()
        .filter(|line| line.starts_with("| ") && !line.contains("---"))
        .map(|line| line.split('|').map(|cell| cell.trim().to_owned()).collect())
        .collect()
}

#[test]
fn flags_on_command_lines_exist() {
    let texts: Vec<_> = pages().into_values().chain([read("README.md")]).collect();
    let mut seen = 0;
    for program in ["collrun", "collperf"] {
        let arguments = sources(&format!("{program}/src"));
        let blocks = texts.iter().flat_map(|text| text.split("\n```sh\n").skip(1)).map(|block| block.split("\n```").next().unwrap());
        for line in blocks.flat_map(str::lines).filter_map(|line| line.split(&format!("{program} ")).nth(1)) {
            let words = line.split_whitespace().take_while(|word| *word != "--" && *word != "collperf" && !word.starts_with('#'));
            for flag in words.filter_map(|word| word.strip_prefix("--").map(|flag| flag.split('=').next().unwrap())) {
                seen += 1;
                let field = format!(" {}:", flag.replace('-', "_"));
                let known = arguments.contains(&field)
                    || arguments.contains(&format!("long = \"{flag}\""))
                    || flag == "help"
                    || flag == "explain-hang";
                assert!(known, "{program} has no --{flag}: {line}");
            }
        }
    }
    assert!(seen > 10, "only {seen} flags were found");
    let arguments = read("collperf/src/arguments.rs");
    for flag in page_rows("from-nccl-tests.md")
        .iter()
        .flat_map(|row| between(&row[1], "`-", '`').into_iter().map(str::to_owned).collect::<Vec<_>>())
    {
        let known = flag.starts_with('-') || arguments.contains(&format!("short = '{flag}'"));
        assert!(known, "collperf does not know -{flag}");
    }
}

#[test]
fn the_commands_of_the_readme_are_those_of_ci() {
    let readme = read("README.md");
    let commands: Vec<_> = between(&readme, "\n```sh\n", '`')
        .into_iter()
        .flat_map(str::lines)
        .filter(|line| ["cargo perf", "cargo test"].iter().any(|start| line.starts_with(start)))
        .collect();
    assert_eq!(commands.len(), 2, "{commands:?}");
    let scripts = [".ci/tests", ".ci/programs"];
    let run = read(".ci/run");
    assert!(scripts.iter().all(|script| run.lines().any(|line| line == *script)), ".ci/run runs {scripts:?}");
    let lines = scripts.map(read).concat();
    let missing: Vec<_> = commands.into_iter().filter(|command| !lines.lines().any(|line| line == *command)).collect();
    assert!(missing.is_empty(), "{scripts:?} do not run {missing:?}");
}

#[test]
fn the_links_of_the_readme_lead_somewhere_and_it_is_short() {
    let readme = read("README.md");
    let text = prose(&readme);
    let dead: Vec<_> = between(&text, "](", ')').into_iter().filter(|link| !root().join(link).exists()).collect();
    assert!(dead.is_empty(), "{dead:?}");
    let words = readme.split_whitespace().count();
    assert!(words <= 700, "{words} words");
}

#[test]
fn pictures_are_what_the_script_draws() {
    match Command::new(root().join("docs/pictures/draw")).arg("--check").output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => println!("skipped: docs/pictures/draw: {error}"),
    }
}

/// Checks the links of the built book, within it and to the crate's documentation.
#[test]
fn the_built_guide_has_no_dead_link() {
    let guide = root().join("target/guide");
    let Ok(files) = fs::read_dir(&guide) else {
        return println!("skipped: not built; `mdbook build docs` does");
    };
    let pages: Vec<_> =
        files.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some_and(|extension| extension == "html")).collect();
    let documented = root().join("target/doc/collectives/index.html").exists();
    let mut dead = Vec::new();
    for path in pages.iter().filter(|path| !path.ends_with("404.html")) {
        let html = fs::read_to_string(path).unwrap();
        for link in between(&html, "href=\"", '"').into_iter().chain(between(&html, "src=\"", '"')) {
            let outside = link.contains("://") || link.starts_with("mailto:") || link.starts_with("data:");
            if !outside && (documented || !link.starts_with("../doc/")) && !is_alive(path, link) {
                dead.push(format!("{}: {link}", path.file_name().unwrap().to_string_lossy()));
            }
        }
    }
    assert!(dead.is_empty(), "{}", dead.join("\n"));
}

fn is_alive(page: &Path, link: &str) -> bool {
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = if file.is_empty() { page.to_owned() } else { page.parent().unwrap().join(file.split('?').next().unwrap()) };
    match (fs::read(&target), anchor) {
        (Err(_), _) => target.is_dir(),
        (Ok(_), "") => true,
        (Ok(html), anchor) => str::from_utf8(&html).is_ok_and(|html| html.contains(&format!("id=\"{anchor}\""))),
    }
}
