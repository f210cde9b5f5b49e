//! The English of documents, comments and messages: none of the phrases below, no word twice, no long sentence in a document, and a verb at
//! the start of what a public function's documentation says. Code is left out, also within a sentence. So are the strings of tests.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use super::sources::root;

/// The documents, and the folders whose documents and sources are read.
const PLACES: &str = "ARCHITECTURE.md CHANGELOG.md CONTRIBUTING.md README.md SECURITY.md benches burn candle collperf collrun docs/src examples \
                      fuzz kernels launch nccl-sys python simgpu src tests train";

/// The most words of a sentence in a document.
const LONGEST: usize = 40;

/// Phrases, and what to write in their place. `a/b` is one of two words, `*` any word, `*'s` any genitive, and `;` any
/// punctuation mark or the end of a paragraph.
const RULES: [(&str, &str); 24] = [
    ("whoever/whomever/whosoever", "name it: the caller, a program that …"),
    ("nobody/somebody/anybody/everybody", "name it: no rank, a thread, every peer"),
    ("of *'s ;/and/or/that/which/is/are/in/to/by/with/for", "the owner first: an NCCL communicator, not one of the owner's"),
    ("a/an * of ours/yours/theirs", "our …, your own …"),
    ("of one's own", "its own, your own"),
    ("and its kin/like", "name them, or: and similar …"),
    ("affair/affairs", "say who must do it"),
    ("is/are/was/were/be/been told", "say who reports it, and to whom"),
    ("is/are/was/were/be/been answered with", "say who answers"),
    ("it is said", "say who says it"),
    ("./?/! what/who", "begin with a noun: the bytes that …, a rank that …"),
    ("./?/! where", "If …, or When …"),
    ("where there is/are/was/were", "if there is"),
    (", but for/where", "except …, or except if …"),
    ("all the same ;", "even so, or still"),
    (", be it", "whether it is …"),
    ("in vain", "without success"),
    ("be had", "be installed, be found, be obtained"),
    ("fail/fails/failed of", "fail because of"),
    ("let/lets/letting go of", "release, drop"),
    ("for want of", "without, because there is no"),
    ("least rust/version/versions", "minimum, or oldest"),
    ("to the letter", "exactly"),
    (
        "lest/anew/hence/whence/thence/thereof/therein/thereby/thereupon/whereof/wherein/whereby/whereupon/herein/hereby/hitherto/henceforth/\
         albeit/whilst/amongst/unto/inasmuch/wherefore/wherewith/forthwith",
        "a word of everyday English",
    ),
];

/// Returns the documents and sources at or below a path, without build outputs and records of measurements.
fn texts_below(path: PathBuf) -> Vec<PathBuf> {
    let name = path.file_name().unwrap().to_string_lossy().into_owned();
    if path.is_symlink() || ["target", "record"].contains(&name.as_str()) || name.starts_with('.') {
        Vec::new()
    } else if path.is_dir() {
        fs::read_dir(path).unwrap().flat_map(|entry| texts_below(entry.unwrap().path())).collect()
    } else {
        Some(path).filter(|_| name.ends_with(".md") || name.ends_with(".rs")).into_iter().collect()
    }
}

/// Whether a file is for tests: a test, a benchmark, a model, or functions for a fuzz target.
fn is_test(file: &str) -> bool {
    ["tests/", "benches/"].iter().any(|folder| file.contains(folder))
        || ["tests.rs", "model.rs", "fuzz.rs"].iter().any(|end| file.ends_with(end))
}

/// Returns a source file's comments and its strings that contain a space, each on its line; `¶` is around a string.
fn prose_of_source(text: &str, mut is_test: bool) -> String {
    let (mut prose, mut rest) = (String::new(), text);
    while let Some(at) = rest.find(['/', '"', '\'']) {
        let (code, here) = rest.split_at(at);
        prose.extend(code.matches('\n'));
        is_test |= code.rsplit_once("#[cfg(test)]\nmod ").is_some_and(|(_, module)| module.lines().next().unwrap().ends_with('{'));
        let (raw, hashes) = code.split_at(code.trim_end_matches('#').len());
        let length = if here.starts_with("//") {
            here.find('\n').unwrap_or(here.len())
        } else if here.starts_with('"') && raw.ends_with('r') {
            2 + here[1..].find(&format!("\"{hashes}")).unwrap() + hashes.len()
        } else if here.starts_with('"') {
            let mut end = 1;
            while !here[end..].starts_with('"') {
                end += if here[end..].starts_with('\\') { 2 } else { here[end..].find(['"', '\\']).unwrap() };
            }
            end + 1
        } else if here.starts_with("'\\") {
            3 + here[3..].find('\'').unwrap() + 1
        } else {
            // A character's end, or a lifetime or a division.
            here.char_indices().nth(2).filter(|(_, letter)| here.starts_with('\'') && *letter == '\'').map_or(1, |(end, _)| end + 1)
        };
        let part = &here[..length];
        if part.starts_with("//") {
            prose += part.trim_start_matches(['/', '!']);
        } else if part.starts_with('"') && part.contains(' ') && !is_test {
            prose += &format!("¶{}¶", part.replace("\\n", "¶").replace('\\', ""));
        } else {
            prose.extend(part.matches('\n'));
        }
        rest = &here[length..];
    }
    prose
}

/// Returns the first word of the documentation of each public function, with its line.
fn first_words(text: &str) -> Vec<(usize, &str)> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let is_function = |line: &str| line.starts_with("pub ") && line.split('(').next().unwrap().contains(" fn ");
    let first = |at: usize| {
        let above = lines[..at].iter().rev().take_while(|line| line.starts_with("///") || line.starts_with("#[")).count();
        let line = (at - above..at).find(|line| lines[*line].starts_with("///"))?;
        Some((line + 1, lines[line].trim_start_matches('/').split_whitespace().next()?))
    };
    (0..lines.len()).filter(|at| is_function(lines[*at])).filter_map(first).collect()
}

/// Returns the words and punctuation marks of a text, in lower case, each with its line: `¶` between paragraphs, and a backtick for code.
fn tokens(text: &str) -> Vec<(usize, String)> {
    let (mut found, mut block, mut code) = (Vec::new(), false, false);
    for (line, text) in (1..).zip(text.lines().map(str::trim)) {
        block ^= text.starts_with("```");
        if block || text.is_empty() || text.starts_with("```") || text.starts_with(['-', '*', '#', '|', '¶']) {
            found.push((line, "¶".to_owned()));
            code = false;
        }
        let mut rest = if block || text.starts_with("```") { "" } else { text };
        while let Some(next) = rest.chars().next() {
            let in_word = |(at, c): (usize, char)| {
                let inner = ['.', '\'', '-', ','].contains(&c) && rest[at + 1..].starts_with(char::is_alphanumeric);
                !(c.is_alphanumeric() || c == '_' || at > 0 && inner)
            };
            let word = rest.char_indices().find(|at| in_word(*at)).map_or(rest.len(), |(at, _)| at);
            let length = if rest.starts_with("](") { rest.find(')').map_or(1, |end| end + 1) } else { word.max(next.len_utf8()) };
            code ^= next == '`';
            match next {
                '`' if code => found.push((line, "`".to_owned())),
                '|' if !code => found.push((line, "¶".to_owned())),
                _ if code || next.is_whitespace() || ['*', '`', '[', ']'].contains(&next) => {}
                _ => found.push((line, rest[..length].to_lowercase())),
            }
            rest = &rest[length..];
        }
    }
    found
}

fn is_word(token: &str) -> bool {
    token == "`" || token.starts_with(char::is_alphanumeric)
}

fn fits(pattern: &str, token: &str) -> bool {
    pattern.split('/').any(|pattern| match pattern {
        "*" => is_word(token),
        "*'s" => token.ends_with("'s"),
        ";" => !is_word(token),
        word => word == token,
    })
}

#[test]
fn texts_are_plain_english() {
    let mut rules: BTreeMap<&str, Vec<(Vec<&str>, &str)>> = BTreeMap::new();
    for (phrase, instead) in RULES {
        let phrase: Vec<&str> = phrase.split(' ').collect();
        phrase[0].split('/').for_each(|first| rules.entry(first).or_default().push((phrase.clone(), instead)));
    }
    let (mut wrong, mut words) = (Vec::new(), 0);
    let mut files: Vec<PathBuf> = PLACES.split(' ').flat_map(|place| texts_below(root().join(place))).collect();
    files.sort();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let file = file.strip_prefix(root()).unwrap().display().to_string();
        let is_document = file.ends_with(".md");
        let tokens = tokens(&if is_document { text.clone() } else { prose_of_source(&text, is_test(&file)) });
        for (at, (line, token)) in tokens.iter().enumerate() {
            let fitting =
                |phrase: &[&str]| tokens[at..].len() >= phrase.len() && phrase.iter().zip(&tokens[at..]).all(|(p, (_, t))| fits(p, t));
            for (phrase, instead) in rules.get(token.as_str()).into_iter().flatten().filter(|(phrase, _)| fitting(phrase)) {
                let found: Vec<&str> = tokens[at..at + phrase.len()].iter().map(|(_, token)| token.as_str()).collect();
                wrong.push(format!("{file}:{line}: \"{}\"; write: {instead}", found.join(" ")));
            }
            let next = tokens.get(at + 1).filter(|(_, next)| next == token && token.len() > 1 && token.chars().all(char::is_alphabetic));
            wrong.extend(next.map(|(line, _)| format!("{file}:{line}: \"{token} {token}\"; write it once")));
        }
        for sentence in tokens.split(|(_, token)| fits("./?/!/¶", token)) {
            let length = sentence.iter().filter(|(_, token)| is_word(token)).count();
            words += length;
            if is_document && length > LONGEST {
                wrong.push(format!("{file}:{}: a sentence of {length} words; write two", sentence[0].0));
            }
        }
        let is_verb = |word: &str| word == "Whether" || word.ends_with('s') && word != "As" && word != "This";
        for (line, word) in first_words(&text).into_iter().filter(|(_, word)| !is_test(&file) && !is_verb(word)) {
            wrong.push(format!("{file}:{line}: the documentation begins with \"{word}\"; write: Returns …, Waits …, Whether …"));
        }
    }
    assert!(words > 100_000, "only {words} words were found");
    assert!(wrong.is_empty(), "{} places are not plain English:\n{}", wrong.len(), wrong.join("\n"));
}
