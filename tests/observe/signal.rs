//! Records written on SIGUSR1, with a listener that panics at the event.

use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::mpsc::channel;

use collectives::{ReduceOp, flight::write_records_on_sigusr1};
use rustix::process::{Signal, getpid, kill_process};
use tracing::Level;

use super::common::ranks::{Wiring, alone_in_a_process, threads};
use super::listener::Listener;
use super::{PATIENCE, WANTED, quiet_panics};

/// A folder whose name is made by code of the program. That code may panic, or call the function that it is passed to.
struct Folder<F: FnOnce() -> PathBuf>(F);

impl<F: FnOnce() -> PathBuf> From<Folder<F>> for PathBuf {
    fn from(folder: Folder<F>) -> Self {
        folder.0()
    }
}

#[test]
fn the_signal_writes_records_and_nothing_else_whatever_listeners_do() {
    alone_in_a_process("signal::the_signal_writes_records_and_nothing_else_whatever_listeners_do", || {
        quiet_panics();
        let (told, hears) = channel();
        let hears = Mutex::new(hears);
        let told = Mutex::new(told);
        let listener = Listener::new(Level::INFO);
        listener.act(move |_, what| {
            if what.contains("flight records are written") {
                told.lock().unwrap().send(()).unwrap();
                std::panic::panic_any(WANTED);
            }
        });
        tracing::subscriber::set_global_default(listener).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let first = Folder(|| std::panic::panic_any(WANTED));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| write_records_on_sigusr1(first))).is_err());
        let path = folder.path().to_owned();
        let inner = path.clone();
        write_records_on_sigusr1(Folder(move || {
            write_records_on_sigusr1(&inner).unwrap();
            inner
        }))
        .unwrap();
        threads(Wiring::Shm, 2, |comm| {
            comm.all_reduce(&mut [1_u8], ReduceOp::Sum).unwrap();
            if comm.rank() == 0 {
                let mut open = Vec::new();
                for round in 0..5 {
                    kill_process(getpid(), Signal::USR1).unwrap();
                    hears.lock().unwrap().recv_timeout(PATIENCE).unwrap();
                    let written = fs::read_dir(&path).unwrap().count();
                    assert_eq!(written, 2, "round {round}");
                    fs::read_dir(&path).unwrap().for_each(|file| fs::remove_file(file.unwrap().path()).unwrap());
                    // The numbers of descriptors that were closed meanwhile are reused.
                    open.extend((0..16).map(|_| tempfile::tempfile().unwrap()));
                }
                assert!(open.iter().all(|file: &File| file.metadata().unwrap().len() == 0));
            }
            comm.barrier().unwrap();
        });
    });
}
