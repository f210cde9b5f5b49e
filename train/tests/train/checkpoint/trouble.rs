//! A failure on one rank fails on all ranks, with that rank's reason, and the previous checkpoint remains the latest.

#![expect(unsafe_code, reason = "a signal is ignored so that a limit is an error of the system's")]

use std::path::Path;

use collectives::{Communicator, Error, Result};
use collectives_train::checkpoint::{Checkpoint, Piece, Writer};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::common::ranks::{Wiring, processes, threads};

fn save<'a>(comm: &'a Communicator, directory: &Path, step: u64, add: impl FnOnce(&mut Writer<'a>)) -> Result<()> {
    let mut writer = Writer::new(comm, directory);
    writer.tensor("good", &[2], Piece::Whole, &[1.0_f32, 2.0]);
    add(&mut writer);
    writer.commit(step).map(drop)
}

/// Checks that the only checkpoint is whole, and that the folder contains nothing else.
fn assert_only(directory: &Path, step: u64) {
    let checkpoint = Checkpoint::latest(directory).unwrap().unwrap();
    checkpoint.check().unwrap();
    assert_eq!(checkpoint.step(), Some(step));
    assert_eq!(std::fs::read_dir(directory).unwrap().count(), 1);
}

#[test]
fn a_mistake_of_one_rank_is_told_to_all_and_the_next_save_works() {
    type Mistake = (fn(&mut Writer<'_>), &'static str);
    let mistakes: [Mistake; 8] = [
        (
            |writer| {
                writer.tensor("a", &[3], Piece::Whole, &[1_u8; 2]);
            },
            "2 elements were passed, but the part (all of it) of [3] has 3",
        ),
        (
            |writer| {
                writer.tensor("a", &[3], Piece::Flat(2..4), &[1_u8; 2]);
            },
            "there is no part (elements 2..4 of the flattened tensor)",
        ),
        (
            |writer| {
                writer.tensor("a#1", &[], Piece::Whole, &[1_u8]);
            },
            "tensor \"a#1\": a name must not be empty, contain #",
        ),
        (
            |writer| {
                writer.tensor("a", &[3], Piece::Flat(0..2), &[1_u8; 2]);
            },
            "tensor \"a\": elements 2..3 of the flattened tensor are held by no rank",
        ),
        (
            |writer| {
                writer.tensor("good", &[2], Piece::Whole, &[1_u32; 2]);
            },
            "tensor \"good\": rank 0 has F32[2], but rank 1 has U32[2]",
        ),
        (
            |writer| {
                writer.tensor("good", &[2], Piece::Flat(0..1), &[1.0_f32]);
            },
            "the parts overlap",
        ),
        (
            |writer| {
                writer.keep(0);
            },
            "0 checkpoints cannot be kept",
        ),
        (
            |writer| {
                writer.tensor("a", &[usize::MAX, 8], Piece::Flat(0..0), &[0_u8; 0]);
            },
            "more elements than fit into the address space",
        ),
    ];
    let folder = tempfile::tempdir().unwrap();
    threads(Wiring::Shm, 3, |comm| {
        save(comm, folder.path(), 1, |_| ()).unwrap();
        for (mistake, words) in &mistakes {
            let error = save(comm, folder.path(), 2, |writer| {
                if comm.rank() == 1 {
                    mistake(writer)
                }
            })
            .unwrap_err()
            .to_string();
            assert!(error.contains(words), "{words}: {error}");
            comm.barrier().unwrap();
            assert_only(folder.path(), 1);
            comm.barrier().unwrap();
        }
        let error = save(comm, folder.path(), 2 + comm.rank() as u64 / 2, |_| ()).unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("commit(3)"), "{error}");
        let error = save(comm, folder.path(), 0, |_| ()).unwrap_err().to_string();
        assert!(error.contains("step 0 is not after step-00000001"), "{error}");
        save(comm, folder.path(), 2, |writer| {
            writer.keep(1);
        })
        .unwrap();
    });
    assert_only(folder.path(), 2);
}

#[test]
fn ranks_that_do_not_share_their_folder_are_told_so() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    threads(Wiring::Pairs, 3, |comm| {
        let mine = folders[comm.rank() / 2].path();
        let error = save(comm, mine, 1, |_| ()).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");
        assert!(error.to_string().contains("rank 0's file cannot be seen here"), "{error}");
        assert!(comm.rank() == 2 || error.to_string().contains("on rank 2"), "{error}");
        comm.barrier().unwrap();
        assert_eq!(std::fs::read_dir(mine).unwrap().count(), 0);
    });
}

/// Sets the largest size of a file of this process.
fn limit_files(bytes: Option<u64>) {
    let maximum = getrlimit(Resource::Fsize).maximum;
    setrlimit(Resource::Fsize, Rlimit { current: bytes, maximum }).unwrap();
}

#[test]
fn a_rank_that_cannot_write_is_named_with_its_reason_and_the_latest_stays() {
    processes("checkpoint::trouble::a_rank_that_cannot_write_is_named_with_its_reason_and_the_latest_stays", Wiring::Tcp, 3, |comm| {
        // SAFETY: it ignores a signal, in a process that runs only this test.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        let folder = tempfile::tempdir().unwrap();
        let mut path = folder.path().to_str().unwrap().as_bytes().to_vec();
        path.resize(200, b' ');
        comm.broadcast(&mut path, 0)?;
        let directory = Path::new(std::str::from_utf8(&path).unwrap().trim_end());
        let large = vec![comm.rank() as u64; 10_000];
        let rows = Piece::part(0, 3, comm.rank(), 3);
        for (step, victim) in [(2, 0), (4, 1), (6, 2)] {
            save(comm, directory, step - 1, |writer| {
                writer.tensor("large", &[3, 10_000], rows.clone(), &large).keep(1);
            })?;
            comm.barrier()?;
            limit_files((comm.rank() == victim).then_some(50_000));
            let error = save(comm, directory, step, |writer| {
                writer.tensor("large", &[3, 10_000], rows.clone(), &large);
            })
            .unwrap_err();
            limit_files(None);
            let error = error.to_string();
            assert!(error.contains("File too large") && error.contains(&format!("rank-0000{victim}-of-00003.safetensors")), "{error}");
            assert!(comm.rank() == victim || error.contains(&format!("on rank {victim}")), "{error}");
            comm.barrier()?;
            assert_only(directory, step - 1);
            comm.barrier()?;
        }
        // Not even the marker at the beginning of a save fits.
        limit_files((comm.rank() == 0).then_some(4));
        let error = save(comm, directory, 7, |_| ()).unwrap_err().to_string();
        limit_files(None);
        assert!(error.contains("File too large") && error.contains("marker"), "{error}");
        comm.barrier()?;
        assert_only(directory, 5);
        comm.barrier()
    });
}

#[test]
fn what_is_asked_for_and_is_not_there_is_named_with_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let comm = &Communicator::local(1).unwrap()[0];
    save(comm, folder.path(), 1, |writer| {
        writer.tensor("flag", &[4, 2], Piece::Whole, &[true; 8]);
    })
    .unwrap();
    let checkpoint = Checkpoint::latest(folder.path()).unwrap().unwrap();
    let said = |result: Result<()>| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        error.to_string()
    };
    let mut flags = [false; 8];
    let cases = [
        (said(checkpoint.read("other", &[1], Piece::Whole, &mut flags)), "tensor \"other\"", "it does not exist"),
        (
            said(checkpoint.read("flag", &[4, 2], Piece::Whole, &mut [0_u8; 8])),
            "tensor \"flag\"",
            "is bool[4, 2], but u8[4, 2] was requested",
        ),
        (
            said(checkpoint.read("flag", &[2, 4], Piece::Whole, &mut flags)),
            "tensor \"flag\"",
            "is bool[4, 2], but bool[2, 4] was requested",
        ),
        (
            said(checkpoint.read("flag", &[4, 2], Piece::part(2, 1, 0, 1), &mut flags)),
            "tensor \"flag\"",
            "there is no part (0..1 of dimension 2)",
        ),
        (
            said(checkpoint.read("flag", &[4, 2], Piece::Flat(0..7), &mut flags)),
            "tensor \"flag\"",
            "has 7 elements, but there is room for 8",
        ),
    ];
    for (error, name, words) in cases {
        assert!(error.contains(name) && error.contains(words) && error.contains("step-00000001"), "{error}");
    }
    assert!(cases_name_the_file(&checkpoint), "a tensor in one file is named with it");
    assert_eq!(flags, [false; 8]);
}

fn cases_name_the_file(checkpoint: &Checkpoint) -> bool {
    let error = checkpoint.read_vec::<u8>("flag", &[4, 2], Piece::Whole).unwrap_err().to_string();
    error.contains("rank-00000-of-00001.safetensors")
}
