//! Finds which file names what another one defines, through any re-exports, and which files name each other in a
//! circle.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use super::sources::{ModulePath, Sources};

/// For each file, the files whose items it names, with one of the names.
pub(crate) type Arrows = BTreeMap<PathBuf, BTreeMap<PathBuf, String>>;

/// The most re-exports between a name and its definition.
const MOST_STEPS: usize = 16;

impl Sources {
    /// Returns the module that defines a path's last name, as the path reads in `module`. `None` if another crate
    /// defines it.
    fn definition(&self, module: &[String], path: &[String], steps: usize) -> Option<ModulePath> {
        let (first, rest) = path.split_first()?;
        if steps == 0 {
            return None;
        }
        match first.as_str() {
            "crate" => self.inside(Vec::new(), rest, steps),
            "self" => self.inside(module.to_vec(), rest, steps),
            "super" => self.inside(module.split_last()?.1.to_vec(), rest, steps),
            _ => self.inside(module.to_vec(), path, steps),
        }
    }

    /// Returns the same for a path that begins in the module `at`.
    fn inside(&self, at: ModulePath, path: &[String], steps: usize) -> Option<ModulePath> {
        let here = self.modules.get(&at)?;
        let Some((first, rest)) = path.split_first() else { return Some(at) };
        if first == "super" {
            return self.inside(at.split_last()?.1.to_vec(), rest, steps);
        }
        let below: ModulePath = at.iter().cloned().chain([first.clone()]).collect();
        if self.modules.contains_key(&below) {
            return self.inside(below, rest, steps);
        }
        if here.defines.contains(first) {
            return Some(at);
        }
        let named = here.imports.iter().find(|(name, path)| name == first && path[..] != [first.clone()]);
        if let Some((_, import)) = named {
            let whole: Vec<String> = import.iter().chain(rest).cloned().collect();
            return self.definition(&at, &whole, steps - 1);
        }
        here.globs.iter().find_map(|glob| {
            let whole: Vec<String> = glob.iter().chain(path).cloned().collect();
            self.definition(&at, &whole, steps - 1)
        })
    }

    /// Returns every arrow between two files.
    pub(crate) fn arrows(&self) -> Arrows {
        let mut arrows = Arrows::new();
        for (path, module) in &self.modules {
            let from = arrows.entry(module.file.clone()).or_default();
            // A re-exported name counts for the file that uses it.
            let imports = module.imports.iter().map(|(_, import)| import).filter(|import| !module.exports.contains(*import));
            for named in imports.chain(&module.paths).chain(&module.globs) {
                let Some(definition) = self.definition(path, named, MOST_STEPS) else { continue };
                let to = &self.modules[&definition].file;
                // A path that ends at a module names none of its items.
                if *to != module.file && (named.is_empty() || definition.last() != named.last()) {
                    from.entry(to.clone()).or_insert_with(|| named.join("::"));
                }
            }
        }
        arrows
    }
}

/// Returns the arrows between files as arrows between the files and folders that lie side by side in one folder.
pub(crate) fn between_neighbours(arrows: &Arrows) -> Arrows {
    let mut between = Arrows::new();
    for (from, to) in arrows {
        for (to, name) in to {
            let shared = from.components().zip(to.components()).take_while(|(from, to)| from == to).count();
            let neighbour = |file: &PathBuf| file.components().take(shared + 1).collect::<PathBuf>();
            let name = format!("{name} ({} to {})", from.display(), to.display());
            between.entry(neighbour(to)).or_default();
            between.entry(neighbour(from)).or_default().entry(neighbour(to)).or_insert(name);
        }
    }
    between
}

/// Returns the files that are in circles, circle by circle (Tarjan's strongly connected components).
pub(crate) fn circles(arrows: &Arrows) -> Vec<Vec<PathBuf>> {
    let mut search = Search { arrows, numbers: BTreeMap::new(), lowest: BTreeMap::new(), stack: Vec::new(), found: Vec::new() };
    for file in arrows.keys() {
        if !search.numbers.contains_key(file) {
            search.visit(file);
        }
    }
    search.found
}

struct Search<'a> {
    arrows: &'a Arrows,
    numbers: BTreeMap<&'a PathBuf, usize>,
    lowest: BTreeMap<&'a PathBuf, usize>,
    stack: Vec<&'a PathBuf>,
    found: Vec<Vec<PathBuf>>,
}

impl<'a> Search<'a> {
    fn visit(&mut self, file: &'a PathBuf) {
        let number = self.numbers.len();
        self.numbers.insert(file, number);
        self.lowest.insert(file, number);
        self.stack.push(file);
        for to in self.arrows.get(file).into_iter().flat_map(BTreeMap::keys) {
            let seen = if !self.numbers.contains_key(to) {
                self.visit(to);
                self.lowest[to]
            } else if self.stack.contains(&to) {
                self.numbers[to]
            } else {
                continue;
            };
            let lowest = self.lowest[file].min(seen);
            self.lowest.insert(file, lowest);
        }
        if self.lowest[file] == number {
            let at = self.stack.iter().position(|other| *other == file).unwrap();
            let circle: Vec<PathBuf> = self.stack.split_off(at).into_iter().cloned().collect();
            if circle.len() > 1 {
                self.found.push(circle);
            }
        }
    }
}

/// Describes a circle: every arrow in it, with a name that causes it.
pub(crate) fn in_words(circle: &[PathBuf], arrows: &Arrows) -> String {
    let members: BTreeSet<&PathBuf> = circle.iter().collect();
    let mut lines = Vec::new();
    for from in circle {
        for (to, name) in arrows[from].iter().filter(|(to, _)| members.contains(to)) {
            lines.push(format!("  {} names {name} of {}", from.display(), to.display()));
        }
    }
    format!("{} files name each other:\n{}", circle.len(), lines.join("\n"))
}
