//! Tests of the file's format, its rules, and several users at once.

use super::*;

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(20);

fn open(path: &Path, world_size: Option<usize>) -> FileStore {
    FileStore::open(path, world_size, LONG).unwrap()
}

/// Encodes one record as PyTorch writes it.
fn record(key: &str, value: &str) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
    [text(key), text(value)].concat()
}

#[test]
fn the_format_is_that_of_pytorch() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = open(&path, Some(1));
    store.set("k", b"v").unwrap();
    assert_eq!(store.add("n", 5).unwrap(), 5);
    assert_eq!(store.add("n", -7).unwrap(), -2);
    assert!(store.delete_key("k").unwrap() && !store.delete_key("k").unwrap());
    let expected = [record("refcount/", "1"), record("/k", "v"), record("/n", "5"), record("/n", "-2"), record("-/k", "")];
    assert_eq!(std::fs::read(&path).unwrap(), expected.concat());
    drop(store);
    assert!(!path.exists());
}

#[test]
fn what_another_writer_adds_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    std::fs::write(&path, [record("refcount/", "1"), record("/a", "old"), record("/a", "new"), record("/b", "1")].concat()).unwrap();
    let store = open(&path, None);
    assert_eq!(store.get("a", LONG).unwrap(), b"new");
    let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
    std::io::Write::write_all(&mut file, &[record("-/a", ""), record("/b", "17")].concat()).unwrap();
    assert!(!store.check(&["a"]).unwrap());
    assert_eq!(store.add("b", 1).unwrap(), 18);
    assert_eq!(store.list_keys().unwrap(), ["b"]);
    assert_eq!(store.num_keys().unwrap(), 2);
    drop(store);
    assert!(path.exists(), "without a world size the file stays");
}

#[test]
fn every_call() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder.path().join("store"), Some(1));
    assert_eq!(store.compare_set("c", b"x", b"y").unwrap(), b"x");
    assert_eq!(store.compare_set("c", b"", b"y").unwrap(), b"y");
    assert_eq!(store.compare_set("c", b"x", b"z").unwrap(), b"y");
    assert_eq!(store.compare_set("c", b"y", b"").unwrap(), b"");
    store.append("log", b"one,").unwrap();
    store.append("log", b"two").unwrap();
    store.multi_set(&[("m1", b"1"), ("m2", b"")]).unwrap();
    assert_eq!(store.multi_get(&["log", "m2", "m1"], LONG).unwrap(), [b"one,two".to_vec(), b"".to_vec(), b"1".to_vec()]);
    store.wait(&["log", "c"], Duration::ZERO).unwrap();
    store.barrier("b", 1, LONG).unwrap();
    assert!(store.queue_push("q", b"").unwrap_err().is_unsupported());
    assert!(store.queue_pop("q", LONG).unwrap_err().is_unsupported() && store.queue_len("q").unwrap_err().is_unsupported());
    store.set("text", b"abc").unwrap();
    assert!(store.add("text", 1).unwrap_err().to_string().contains("abc"));
    let error = store.wait(&["log", "gone", "c"], SHORT).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("1 are missing: \"gone\""), "{error}");
    let error = store.barrier("b2", 2, SHORT).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("1 of 2"), "{error}");
}

#[test]
fn several_threads_share_a_file() {
    const WORLD: usize = 4;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    std::thread::scope(|scope| {
        for rank in 0..WORLD {
            let path = &path;
            scope.spawn(move || {
                let store = open(path, Some(WORLD));
                for _ in 0..10 {
                    store.add("sum", 1 + rank as i64).unwrap();
                }
                store.append("letters", &[b'a' + rank as u8]).unwrap();
                store.barrier("end", WORLD, LONG).unwrap();
                assert_eq!(store.get("sum", LONG).unwrap(), b"100");
                let mut letters = store.get("letters", LONG).unwrap();
                letters.sort_unstable();
                assert_eq!(letters, b"abcd");
            });
        }
    });
    assert!(!path.exists(), "the last to leave removes the file");
}

#[test]
fn a_file_of_an_earlier_run_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    // A run of two that crashed: both opened the file, neither closed it.
    let left = [record("refcount/", "1"), record("refcount/", "2"), record("/key", "stale")].concat();
    std::fs::write(&path, &left).unwrap();
    let error = FileStore::open(&path, Some(2), LONG).unwrap_err();
    assert!(matches!(error, Error::Config { .. }) && error.to_string().contains("earlier run"), "{error}");
    // A run in which one rank ended in order.
    std::fs::write(&path, [left, record("cleanup/", "1"), record("refcount/", "1")].concat()).unwrap();
    assert!(matches!(FileStore::open(&path, Some(2), LONG), Err(Error::Config { .. })));
}

#[test]
fn a_file_that_is_no_store_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let torn = [record("/k", "v"), record("/torn", "value")[..14].to_vec()].concat();
    for content in [b"hello, world".to_vec(), vec![255; 40], vec![3], torn] {
        std::fs::write(&path, &content).unwrap();
        let error = FileStore::open(&path, None, LONG).unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }) && error.to_string().contains("an incomplete record"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), content, "it is left as it was");
    }
    std::fs::write(&path, record("refcount/", "x")).unwrap();
    assert!(matches!(FileStore::open(&path, None, LONG), Err(Error::Protocol { .. })));
    assert!(matches!(FileStore::open(folder.path(), None, LONG), Err(Error::Io { .. })));
    assert!(matches!(FileStore::open(folder.path().join("no/folder"), None, LONG), Err(Error::Io { .. })));
}

#[test]
fn a_file_that_shrinks_or_goes_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = open(&path, None);
    store.set("k", b"v").unwrap();
    std::fs::write(&path, b"").unwrap();
    assert!(store.get("k", SHORT).unwrap_err().to_string().contains("replaced"));
    std::fs::remove_file(&path).unwrap();
    assert!(!store.check(&["k"]).unwrap());
    assert!(store.get("k", SHORT).unwrap_err().is_timeout());
}

#[test]
fn a_lock_that_is_held_does_not_hang() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = FileStore::open(&path, None, SHORT).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let error = store.set("k", b"v").unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("lock"), "{error}");
    drop(file);
    store.set("k", b"v").unwrap();
}

#[test]
fn the_file_is_for_its_user_alone() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = open(&path, Some(1));
    store.set("k", b"v").unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}
