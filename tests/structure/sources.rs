//! Reads the crate's sources as modules: what each file defines, and which names it takes from elsewhere. Items under
//! `#[cfg(test)]` are left out: tests may use any item.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use quote::ToTokens;
use syn::visit::Visit;
use syn::{Attribute, Item, UseTree};

/// The path of a module from the crate's root, whose own path is empty.
pub(crate) type ModulePath = Vec<String>;

/// One module: a file, or an inline module of a file.
#[derive(Debug, Default)]
pub(crate) struct Module {
    /// The path relative to the checkout.
    pub(crate) file: PathBuf,
    /// The names of items that are defined here.
    pub(crate) defines: BTreeSet<String>,
    /// The imports of `use`: the name here, and the path as written.
    pub(crate) imports: Vec<(String, Vec<String>)>,
    /// The imports that are re-exported.
    pub(crate) exports: BTreeSet<Vec<String>>,
    /// The paths of glob imports.
    pub(crate) globs: Vec<Vec<String>>,
    /// All paths of two or more segments in the module's code.
    pub(crate) paths: BTreeSet<Vec<String>>,
}

/// Every module that is reached from a package's `src/lib.rs`.
pub(crate) struct Sources {
    pub(crate) modules: BTreeMap<ModulePath, Module>,
}

/// Returns the package's folder.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the files below a folder of the package that end in `.rs`, sorted.
pub(crate) fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files_below(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// Returns a file's code without its tests, its comments and its white space.
pub(crate) fn code(path: &Path) -> String {
    let items = parse(path).items;
    let tokens = items.iter().filter(|item| !is_test(attributes(item))).map(|item| item.to_token_stream().to_string());
    tokens.collect::<String>().split_whitespace().collect()
}

fn parse(path: &Path) -> syn::File {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Whether an item is compiled for tests only.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        let words = list.tokens.to_string();
        let mut all = words.split(|letter: char| !letter.is_alphanumeric());
        list.path.is_ident("cfg") && (words == "test" || words.starts_with("all") && all.any(|word| word == "test"))
    })
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Returns the name that an item defines.
fn name(item: &Item) -> Option<String> {
    Some(match item {
        Item::Const(item) => item.ident.to_string(),
        Item::Enum(item) => item.ident.to_string(),
        Item::Fn(item) => item.sig.ident.to_string(),
        Item::Macro(item) => item.ident.as_ref()?.to_string(),
        Item::Static(item) => item.ident.to_string(),
        Item::Struct(item) => item.ident.to_string(),
        Item::Trait(item) => item.ident.to_string(),
        Item::Type(item) => item.ident.to_string(),
        Item::Union(item) => item.ident.to_string(),
        _ => return None,
    })
}

/// Collects the paths in an item's code, without those in its test code.
struct Paths<'a>(&'a mut Module);

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if is_test(attributes(item)) {
            return;
        }
        if let Item::Use(item) = item {
            let before = self.0.imports.len();
            flatten(&item.tree, &mut Vec::new(), self.0);
            if !matches!(item.vis, syn::Visibility::Inherited) {
                let exports: Vec<_> = self.0.imports[before..].iter().map(|(_, path)| path.clone()).collect();
                self.0.exports.extend(exports);
            }
        }
        syn::visit::visit_item(self, item);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if segments.len() > 1 {
            self.0.paths.insert(segments);
        }
        syn::visit::visit_path(self, path);
    }
}

/// Collects the leaves of a `use`.
fn flatten(tree: &UseTree, before: &mut Vec<String>, into: &mut Module) {
    match tree {
        UseTree::Path(path) => {
            before.push(path.ident.to_string());
            flatten(&path.tree, before, into);
            before.pop();
        }
        UseTree::Name(leaf) => import(leaf.ident.to_string(), None, before, into),
        UseTree::Rename(leaf) => import(leaf.ident.to_string(), Some(leaf.rename.to_string()), before, into),
        UseTree::Glob(_) => into.globs.push(before.clone()),
        UseTree::Group(group) => group.items.iter().for_each(|tree| flatten(tree, before, into)),
    }
}

fn import(name: String, renamed: Option<String>, before: &[String], into: &mut Module) {
    let mut path = before.to_vec();
    if name != "self" {
        path.push(name);
    }
    let here = renamed.or_else(|| path.last().cloned()).unwrap_or_default();
    into.imports.push((here, path));
}

impl Sources {
    /// Reads the crate in a folder of the checkout.
    pub(crate) fn read(package: &str) -> Self {
        let mut sources = Self { modules: BTreeMap::new() };
        let folder = root().join(package).join("src");
        let head = ["lib.rs", "main.rs"].map(|name| folder.join(name)).into_iter().find(|file| file.exists());
        sources.read_file(&head.unwrap(), Vec::new());
        sources
    }

    fn read_file(&mut self, file: &Path, module: ModulePath) {
        self.read_items(&parse(file).items, file, module);
    }

    fn read_items(&mut self, items: &[Item], file: &Path, path: ModulePath) {
        let mut module = Module { file: file.strip_prefix(root()).unwrap().to_path_buf(), ..Module::default() };
        for item in items.iter().filter(|item| !is_test(attributes(item))) {
            match item {
                Item::Mod(inner) => {
                    let below: ModulePath = path.iter().cloned().chain([inner.ident.to_string()]).collect();
                    match &inner.content {
                        Some((_, items)) => self.read_items(items, file, below),
                        None => self.read_file(&file_of(file, &path, &inner.ident.to_string()), below),
                    }
                }
                _ => {
                    module.defines.extend(name(item));
                    Paths(&mut module).visit_item(item);
                }
            }
        }
        self.modules.insert(path, module);
    }
}

/// Returns the file of `mod name;`.
fn file_of(file: &Path, module: &[String], name: &str) -> PathBuf {
    let is_folder = module.is_empty() || file.file_name().is_some_and(|file| file == "mod.rs");
    let folder = if is_folder { file.parent().unwrap().to_path_buf() } else { file.with_extension("") };
    let flat = folder.join(format!("{name}.rs"));
    if flat.exists() { flat } else { folder.join(name).join("mod.rs") }
}
