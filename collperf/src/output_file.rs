//! A file of results that is either written completely or keeps its old contents.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// A file that is written as a whole, at the end. Until then, an existing file stays unchanged.
#[derive(Debug)]
pub(crate) struct OutputFile {
    /// The path as the user gave it.
    path: PathBuf,
    /// The path with all links resolved.
    target: PathBuf,
    found: Found,
}

/// The kind of file that exists at the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Nothing,
    /// A file, which will be replaced.
    Older,
    /// A pipe or a device, which will be written to.
    Special,
}

impl OutputFile {
    /// Checks, before anything is measured, that the file can be written. Leaves no file behind.
    pub(crate) fn new(path: &Path) -> Result<Self, Failure> {
        Self::look(path).map_err(|error| Failure::io(format!("creating {}", path.display()), &error))
    }

    fn look(path: &Path) -> io::Result<Self> {
        // The target of a link is replaced, not the link.
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let found = match fs::metadata(&target) {
            Ok(there) if there.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            // `/dev/stdout` may lead to a file to which others write.
            Ok(there) if there.is_file() && !path.starts_with("/dev") => {
                OpenOptions::new().write(true).open(&target).map(|_| Found::Older)?
            }
            Ok(_) => Found::Special,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Found::Nothing,
            Err(error) => return Err(error),
        };
        let file = Self { path: path.to_owned(), target, found };
        if found == Found::Nothing {
            let beside = file.beside()?;
            File::create_new(&beside)?;
            fs::remove_file(&beside)?;
        }
        Ok(file)
    }

    /// Refuses a file that is also an input, or lies in a folder that is one.
    pub(crate) fn is_none_of<'a>(&self, inputs: impl IntoIterator<Item = &'a Path>) -> Result<(), Failure> {
        let is_read = |input: &Path| {
            fs::canonicalize(input).is_ok_and(|input| input == self.target || Some(&*input) == self.target.parent() && input.is_dir())
        };
        if self.found == Found::Older && inputs.into_iter().any(is_read) {
            return Err(Failure::usage(format!("{}: this file is read, so the result cannot replace it", self.path.display())));
        }
        Ok(())
    }

    /// Whether two paths name the same file, which need not exist.
    pub(crate) fn is_same(one: &Path, other: &Path) -> bool {
        let resolved = |path: &Path| {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
            fs::canonicalize(path).or_else(|_| fs::canonicalize(folder).map(|folder| folder.join(path.file_name().unwrap_or_default())))
        };
        one == other || resolved(one).is_ok_and(|one| resolved(other).is_ok_and(|other| one == other))
    }

    /// Returns the path of the temporary file: in the same folder, with an ending that collectors of result files
    /// ignore.
    fn beside(&self) -> io::Result<PathBuf> {
        let mut name = self.target.file_name().ok_or(io::ErrorKind::IsADirectory)?.to_owned();
        name.push(format!(".{}.part", std::process::id()));
        let beside = self.target.with_file_name(name);
        // A killed process with the same number may have left such a file.
        let _ = fs::remove_file(&beside);
        Ok(beside)
    }

    /// Writes the text to the file.
    pub(crate) fn write(&self, text: &str) -> Result<(), Failure> {
        self.put(text).map_err(|error| Failure::io(format!("writing {}", self.path.display()), &error))
    }

    fn put(&self, text: &str) -> io::Result<()> {
        if self.found == Found::Special {
            return fs::write(&self.target, text);
        }
        use io::ErrorKind::{CrossesDevices, PermissionDenied, ReadOnlyFilesystem, ResourceBusy};
        match self.replace(text) {
            // The folder does not accept another file, or the file itself is a mount point, as in a container.
            Err(error)
                if self.found == Found::Older
                    && matches!(error.kind(), CrossesDevices | PermissionDenied | ReadOnlyFilesystem | ResourceBusy) =>
            {
                fs::write(&self.target, text)
            }
            result => result,
        }
    }

    fn replace(&self, text: &str) -> io::Result<()> {
        let beside = self.beside()?;
        let written = File::create_new(&beside).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            if let Ok(older) = fs::metadata(&self.target) {
                file.set_permissions(older.permissions())?;
            }
            fs::rename(&beside, &self.target)
        });
        written.inspect_err(|_| drop(fs::remove_file(&beside)))
    }

    /// Returns the file's name, and whether it replaced another one.
    pub(crate) fn told(&self) -> String {
        let older = if self.found == Found::Older { ", replacing an older one" } else { "" };
        format!("{}{older}", self.path.display())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn files_are_the_same_however_they_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let [path, other] = ["r.json", "s.json"].map(|name| folder.path().join(name));
        let roundabout = folder.path().join(".").join("r.json");
        assert!(OutputFile::is_same(&path, &roundabout) && !OutputFile::is_same(&path, &other), "neither exists");
        fs::write(&path, "old").unwrap();
        symlink(&path, &other).unwrap();
        assert!(OutputFile::is_same(&path, &other));
        let file = OutputFile::new(&other).unwrap();
        assert!(file.is_none_of([&*roundabout]).is_err() && file.is_none_of([folder.path()]).is_err());
    }

    #[test]
    fn a_file_is_as_it_was_until_all_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r.json");
        let first = OutputFile::new(&path).unwrap();
        assert!(names(folder.path()).is_empty(), "looking leaves nothing behind");
        first.write("old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let second = OutputFile::new(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        second.write("new").unwrap();
        assert_eq!((fs::read_to_string(&path).unwrap().as_str(), names(folder.path())), ("new", vec!["r.json".to_owned()]));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(first.told(), path.display().to_string());
        assert_eq!(second.told(), format!("{}, replacing an older one", path.display()));
    }

    #[test]
    fn links_stay_links_and_devices_devices() {
        let folder = tempfile::tempdir().unwrap();
        let [path, link] = ["r.json", "link.json"].map(|name| folder.path().join(name));
        fs::write(&path, "old").unwrap();
        symlink(&path, &link).unwrap();
        OutputFile::new(&link).unwrap().write("new").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink() && fs::read_to_string(&path).unwrap() == "new");
        OutputFile::new(Path::new("/dev/null")).unwrap().write("gone").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }

    #[test]
    fn what_cannot_be_written_is_found_out_at_once() {
        let folder = tempfile::tempdir().unwrap();
        for path in ["absent/r.json", ".", "..", "/", "/proc/r.json"] {
            let failure = OutputFile::new(&folder.path().join(path)).unwrap_err();
            assert!(failure.message.starts_with("creating ") && failure.message.contains(path), "{}", failure.message);
        }
        assert!(names(folder.path()).is_empty());
    }
}
