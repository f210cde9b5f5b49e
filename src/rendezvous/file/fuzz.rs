//! What must hold whatever is in the file of a store.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::Duration;

use super::log::{Access, Log};
use super::{FileStore, Store};
use crate::deadline::Deadline;

/// Long enough for a lock that nobody else wants.
const LIMIT: Duration = Duration::from_secs(5);

/// Any bytes as a store's file: an error, or records that mean the same when written again; and a store that works on it.
pub fn file_log(data: &[u8]) {
    let (file, path) = file(data);
    let mut log = Log::default();
    match log.open(&path, Access::Read, &Deadline::after(LIMIT)) {
        Err(error) => assert!(error.to_string().contains("store file"), "{error}"),
        Ok(_) => check_records(&log),
    }
    // Half a record or a counter that is no number is an error of every call.
    if let Ok(store) = FileStore::open(&path, None, LIMIT) {
        store.set("key", b"value").expect("a store that opens can be written");
        assert_eq!(store.get("key", Duration::ZERO).expect("just set"), b"value");
        let listed = store.list_keys().expect("readable");
        assert!(listed.iter().any(|key| key == "key"));
        let _ = store.add("number", 1);
        assert!(store.delete_key("key").expect("still there") && !store.check(&["key"]).expect("readable"));
    }
    drop(file);
}

/// Writes what was read to another file, which must then say the same.
fn check_records(log: &Log) {
    let records = |log: &Log| log.keys().map(|key| (key.to_vec(), log.value(key).map(<[u8]>::to_vec))).collect::<BTreeMap<_, _>>();
    let expected = records(log);
    let (file, path) = file(&[]);
    let mut writer = Log::default();
    let opened = writer.open(&path, Access::Existing, &Deadline::after(LIMIT)).and_then(|opened| opened.present(&path));
    let mut target = opened.expect("an empty file is a store");
    // One at a time: what was read before is not read again.
    for (key, value) in &expected {
        writer.append(&mut target, &path, &[(key, value.as_deref().unwrap_or_default())]).expect("written");
    }
    drop(target);
    let mut reader = Log::default();
    reader.open(&path, Access::Read, &Deadline::after(LIMIT)).expect("what was written can be read");
    assert!(records(&writer) == expected && records(&reader) == expected, "read again");
    drop(file);
}

/// A file without a name, which is gone when it is closed, and a path to it.
fn file(content: &[u8]) -> (File, PathBuf) {
    let file = rustix::fs::memfd_create("store", rustix::fs::MemfdFlags::CLOEXEC).expect("memory for a file");
    let mut file = File::from(file);
    file.write_all(content).expect("memory for a file");
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    (file, path)
}
