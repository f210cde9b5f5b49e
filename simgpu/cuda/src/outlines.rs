//! The outlines of files with PTX. They are cached in a file beside the first one, as long as none of the files
//! changes: making them requires reading all.

use std::fmt::Write as _;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use simgpu_ptx::ParseError;

use crate::library::unread;

/// The first line of the cache. A new form of outlines needs a new number.
const FORM: &str = "outlines of PTX, form 1";

#[derive(Debug)]
pub(crate) enum Error {
    Unread(String),
    /// The wrong text is identified by its position among the files.
    Wrong(ParseError),
}

/// Returns the outlines of files, and the open files.
pub(crate) fn of(files: &[PathBuf]) -> Result<(Vec<String>, Vec<File>), Error> {
    let open = |path: &PathBuf| File::open(path).map_err(|error| Error::Unread(unread(path, &error)));
    let mut opened = files.iter().map(open).collect::<Result<Vec<File>, Error>>()?;
    let stamp = stamp(files, &opened);
    let kept = files.first().map(|first| place(first, &stamp));
    if let Some(outlines) = kept.as_ref().and_then(|path| recall(path, &stamp, files.len())) {
        return Ok((outlines, opened));
    }
    let mut outlines = Vec::new();
    for (text, file) in opened.iter_mut().enumerate() {
        let mut whole = String::new();
        file.read_to_string(&mut whole).map_err(|error| Error::Unread(unread(&files[text], &error)))?;
        outlines.push(simgpu_ptx::outline(&whole).map_err(|error| Error::Wrong(ParseError { text, ..error }))?);
    }
    // If the cache cannot be written, the next process makes the outlines again.
    kept.iter().for_each(|path| drop(keep(path, &stamp, &outlines)));
    Ok((outlines, opened))
}

/// Returns a text that identifies these files in their present state.
fn stamp(files: &[PathBuf], opened: &[File]) -> String {
    let mut stamp = format!("{FORM}\n");
    for (path, file) in files.iter().zip(opened) {
        let about =
            file.metadata().map(|about| [about.dev() as i64, about.ino() as i64, about.size() as i64, about.mtime(), about.mtime_nsec()]);
        // Writing to a string cannot fail.
        let _ = writeln!(stamp, "{path:?} {about:?}");
    }
    stamp
}

/// Returns the path of the cache, beside the first file.
fn place(first: &Path, stamp: &str) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    stamp.hash(&mut hasher);
    first.with_file_name(format!(".outlines-{:016x}", hasher.finish()))
}

/// Reads the outlines that [`keep`] wrote: the stamp, the length of each, and then all of them.
fn recall(path: &Path, stamp: &str, count: usize) -> Option<Vec<String>> {
    let kept = std::fs::read_to_string(path).ok()?;
    let (lengths, mut rest) = kept.strip_prefix(stamp)?.split_once('\n')?;
    let lengths = lengths.split(' ').map(|length| length.parse::<usize>().ok()).collect::<Option<Vec<usize>>>()?;
    let mut outlines = Vec::new();
    for length in lengths {
        let (outline, after) = rest.split_at_checked(length)?;
        outlines.push(outline.to_owned());
        rest = after;
    }
    (outlines.len() == count && rest.is_empty()).then_some(outlines)
}

/// Writes the cache under another name first, so that no process reads a part of it.
fn keep(path: &Path, stamp: &str, outlines: &[String]) -> std::io::Result<()> {
    let lengths: Vec<String> = outlines.iter().map(|outline| outline.len().to_string()).collect();
    let half = path.with_extension(format!("{}", std::process::id()));
    let written = std::fs::write(&half, format!("{stamp}{}\n{}", lengths.join(" "), outlines.concat()));
    let kept = written.and_then(|()| std::fs::rename(&half, path));
    if kept.is_err() {
        let _ = std::fs::remove_file(&half);
    }
    kept
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    const HEAD: &str = ".version 8.0\n.target sm_80\n.address_size 64\n";

    /// A temporary folder, removed on drop.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("simgpu-outlines-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Folder(path)
        }

        fn write(&self, name: &str, text: &str) -> PathBuf {
            let path = self.0.join(name);
            std::fs::write(&path, format!("{HEAD}{text}")).unwrap();
            path
        }

        fn kept(&self) -> Vec<PathBuf> {
            let entries = std::fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path());
            entries.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(".outlines")).collect()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn outlines_are_kept_until_a_file_changes() {
        let folder = Folder::new("kept");
        let files = [folder.write("a.ptx", ".func f() { ret; }"), folder.write("b.ptx", ".func e() { ret; }")];
        let (first, _) = of(&files).unwrap();
        let kept = folder.kept();
        assert_eq!(kept.len(), 1);
        // The second read comes from the cache, which was changed to show that.
        let text = std::fs::read_to_string(&kept[0]).unwrap();
        std::fs::write(&kept[0], text.replace(".func f", ".func g")).unwrap();
        let (second, _) = of(&files).unwrap();
        assert_eq!(second, [first[0].replace(".func f", ".func g"), first[1].clone()]);
        folder.write("b.ptx", ".func h() { exit; ret; }");
        let (third, _) = of(&files).unwrap();
        assert!(third[0] == first[0] && third[1].contains(".func h"));
    }

    #[test]
    fn what_is_torn_is_made_again() {
        let folder = Folder::new("torn");
        let files = [folder.write("a.ptx", ".func f() { ret; }")];
        let (first, _) = of(&files).unwrap();
        let kept = folder.kept().remove(0);
        let text = std::fs::read_to_string(&kept).unwrap();
        for torn in [&text[..text.len() - 1], &text[..10], "", &format!("{text}x")] {
            std::fs::write(&kept, torn).unwrap();
            assert_eq!(of(&files).unwrap().0, first);
        }
        assert!(matches!(of(&[folder.write("c.ptx", ".func f() {")]), Err(Error::Wrong(ParseError { text: 0, line: 4, .. }))));
        assert!(matches!(of(&[folder.0.join("none.ptx")]), Err(Error::Unread(why)) if why.contains("none.ptx cannot be read")));
    }
}
