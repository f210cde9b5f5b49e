//! The search for a library, and the errors if there is none, tested with small libraries made by a C compiler.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "functions are C's")]

mod common;

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::ptr::{null, null_mut};
use std::sync::Barrier;
use std::{env, fs, thread};

use common::{output, shared_object};
use nccl_sys::*;
use tempfile::{TempDir, tempdir};

/// Returns the source of a library that reports this NCCL version code and has two more functions.
fn nccl_like(code: i32) -> String {
    format!(
        "typedef struct {{ char internal[128]; }} id;
         int ncclGetVersion(int *version) {{ *version = {code}; return 0; }}
         int ncclGroupStart(void) {{ return {code}; }}
         int ncclCommInitRank(void **comm, int ranks, id key, int rank) {{
             for (int at = 0; at < 128; at++) if (key.internal[at] != at) return 4;
             *comm = (void *)(long)(1000 * ranks + rank);
             return 0;
         }}"
    )
}

/// Creates a folder with one such library under `name`.
fn folder_with(name: &str, code: i32) -> TempDir {
    let folder = tempdir().unwrap();
    shared_object(&folder.path().join(name), None, &nccl_like(code));
    folder
}

/// Opens a small library of these tests.
fn open_file(file: &Path) -> Result<&'static Library, LoadError> {
    // SAFETY: the libraries here have no initialisers, and the called functions have NCCL's signatures.
    unsafe { Library::open_file(file) }
}

fn refused(path: &Path) -> (Attempt, String) {
    let error = open_file(path).unwrap_err();
    assert_eq!(error.attempts().len(), 1, "a named file is the only one that is tried");
    let attempt = error.attempts()[0].clone();
    assert_eq!(attempt.name, path.to_str().unwrap());
    let text = error.to_string();
    assert!(text.contains(&attempt.name) && text.contains("Install NCCL"), "{text}");
    (attempt, text)
}

#[test]
fn a_missing_file_is_refused_in_the_loaders_words() {
    let (attempt, text) = refused(Path::new("/nonexistent/libnccl.so.2"));
    assert!(matches!(&attempt.reason, Reason::NotOpened(words) if words.contains("No such file")), "{attempt:?}");
    assert_eq!(text.matches("/nonexistent").count(), 1, "{text}");
}

#[test]
fn a_file_that_is_no_library_is_refused() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("libnccl.so.2");
    fs::write(&file, "this is a text, and long enough to hold the header of a library, if only it began in another way").unwrap();
    assert!(matches!(refused(&file).0.reason, Reason::NotOpened(words) if words.contains("ELF")));
    assert!(matches!(refused(folder.path()).0.reason, Reason::NotOpened(_)), "a folder");
    assert!(matches!(refused(Path::new("/tmp/a\0b")).0.reason, Reason::NotOpened(_)), "no name for C");
}

#[test]
fn a_library_that_is_not_nccl_is_refused() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("libother.so");
    shared_object(&file, None, "int ncclAllReduce(void) { return 0; }");
    let (attempt, text) = refused(&file);
    assert_eq!(attempt.reason, Reason::NotNccl);
    assert!(text.contains("ncclGetVersion"), "{text}");
}

#[test]
fn a_library_that_cannot_say_its_version_is_refused() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("libnccl.so.2");
    shared_object(&file, None, "int ncclGetVersion(int *version) { return 3; }");
    assert_eq!(refused(&file).0.reason, Reason::VersionFailed(ncclResult_t::ncclInternalError));
}

#[test]
fn arguments_arrive_and_results_come_back() {
    let folder = folder_with("any.so", 22809);
    let nccl = open_file(&folder.path().join("any.so")).unwrap();
    let mut comm = NCCL_COMM_NULL;
    let id = ncclUniqueId { internal: std::array::from_fn(|at| at as _) };
    // SAFETY: the library is the one above.
    unsafe {
        assert_eq!(nccl.ncclCommInitRank(&mut comm, 7, id, 5), Ok(ncclResult_t::ncclSuccess));
        assert_eq!(nccl.ncclGroupStart(), Ok(ncclResult_t(22809)), "a code without a name is a number");
    }
    assert_eq!(comm.addr(), 7005);
}

#[test]
fn a_function_that_should_be_there_and_is_not_is_an_error() {
    let folder = folder_with("any.so", 22809);
    let nccl = open_file(&folder.path().join("any.so")).unwrap();
    assert!(!nccl.has("ncclAllReduce") && nccl.has("ncclGroupStart"));
    // SAFETY: the library has no such function.
    let missing =
        unsafe { nccl.ncclAllReduce(null(), null_mut(), 0, ncclDataType_t::ncclInt8, ncclRedOp_t::ncclSum, null_mut(), null_mut()) };
    let text = missing.unwrap_err().to_string();
    assert_eq!(
        text,
        "ncclAllReduce is missing from the loaded library, although the library reports NCCL 2.28.9 \
         and NCCL has had this function since 1.2.1"
    );
}

#[test]
fn a_file_gives_one_library_by_whatever_name_and_another_file_another() {
    let (first, second) = (folder_with("a.so", 21803), folder_with("a.so", 20906));
    let (file, link) = (first.path().join("a.so"), first.path().join("link.so"));
    symlink(&file, &link).unwrap();
    let library = open_file(&file).unwrap();
    assert!(std::ptr::eq(library, open_file(&file).unwrap()));
    assert!(std::ptr::eq(library, open_file(&link).unwrap()));
    let other = open_file(&second.path().join("a.so")).unwrap();
    assert_eq!((library.version(), other.version()), (Version::new(2, 18, 3), Version::new(2, 9, 6)));
    assert_eq!(library.path(), file.canonicalize().unwrap().to_str().unwrap());
    assert_ne!(library.path(), other.path());
}

#[test]
fn many_threads_open_and_call_the_same_library() {
    const THREADS: usize = 8;
    let folder = folder_with("threads.so", 23203);
    let (file, start) = (folder.path().join("threads.so"), Barrier::new(THREADS));
    let open = || {
        start.wait();
        let nccl = open_file(&file).unwrap();
        // SAFETY: neither function has arguments, and the second does not exist.
        unsafe {
            assert_eq!(nccl.ncclGroupStart(), Ok(ncclResult_t(23203)));
            assert_eq!(nccl.ncclGroupEnd().unwrap_err().symbol, "ncclGroupEnd");
        }
        std::ptr::from_ref(nccl).addr()
    };
    let libraries = thread::scope(|scope| {
        let threads = [(); THREADS].map(|()| scope.spawn(open));
        threads.map(|thread| thread.join().unwrap())
    });
    assert_eq!(libraries, [libraries[0]; THREADS]);
}

/// Returns what `Library::open()` finds in a process whose loader searches `folder` first, and in which `present` is
/// already loaded.
fn found(folder: &Path, present: Option<&Path>) -> String {
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", "in_a_process_of_its_own", "--nocapture"]).env("NCCL_SYS_TEST", present.unwrap_or(Path::new("")));
    let text = output(child.env("LD_LIBRARY_PATH", folder));
    text.lines().find_map(|line| line.split_once("found: ")).unwrap_or_else(|| panic!("{text}")).1.to_owned()
}

/// Does nothing unless it is started by [`found`].
#[test]
fn in_a_process_of_its_own() {
    let Some(present) = env::var_os("NCCL_SYS_TEST") else { return };
    // SAFETY: the library has no initialisers.
    let _present = (!present.is_empty()).then(|| unsafe { libloading::Library::new(&present) }.unwrap());
    match Library::open() {
        Ok(library) => {
            assert!(std::ptr::eq(library, Library::open().unwrap()));
            println!("found: {} {}", library.version(), library.path());
        }
        Err(error) => println!("found: {error}"),
    }
}

#[test]
fn the_library_for_users_comes_before_the_one_for_developers() {
    let folder = folder_with("libnccl.so.2", 22809);
    shared_object(&folder.path().join("libnccl.so"), None, &nccl_like(21803));
    let file = folder.path().canonicalize().unwrap();
    assert_eq!(found(folder.path(), None), format!("2.28.9 {}", file.join("libnccl.so.2").display()));
    fs::remove_file(folder.path().join("libnccl.so.2")).unwrap();
    fs::write(folder.path().join("libnccl.so.2"), "no library").unwrap();
    assert_eq!(found(folder.path(), None), format!("2.18.3 {}", file.join("libnccl.so").display()));
}

#[test]
fn a_library_that_is_in_the_process_comes_first() {
    let (folder, other) = (folder_with("libnccl.so.2", 22809), tempdir().unwrap());
    for (file, soname) in [("libnccl.so.2", None), ("brought_by_somebody.so", Some("libnccl.so.2")), ("developers.so", Some("libnccl.so"))]
    {
        let file = other.path().join(file);
        shared_object(&file, soname, &nccl_like(22707));
        let expected = if soname.is_some() { format!("2.27.7 {}", file.canonicalize().unwrap().display()) } else { "2.28.9".to_owned() };
        let found = found(folder.path(), Some(&file));
        assert!(found.starts_with(&expected), "{found}, and not {expected}");
    }
}

#[test]
fn where_there_is_none_every_name_is_listed() {
    let folder = tempdir().unwrap();
    shared_object(&folder.path().join("libnccl.so.2"), None, "int nothing;");
    fs::write(folder.path().join("libnccl.so"), "no library").unwrap();
    let text = found(folder.path(), None);
    let start = "cannot open NCCL: libnccl.so.2: this file is not NCCL, because it has no function ncclGetVersion; ";
    assert!(text.starts_with(start), "{text}");
    assert!(text.contains("libnccl.so: ") && text.contains("Install NCCL"), "{text}");
}
