//! The MPI launchers that the distribution packages.

use std::process::Command;

use crate::common::hosts::run;
use crate::peer::{Peer, absent, example};
use crate::rank;
use crate::skip;

/// Returns Open MPI's launcher, run as root and with more ranks than cores.
fn open_mpi() -> Result<Command, String> {
    // If another MPI is also installed, the plain name may be that one's.
    let name = ["mpirun.openmpi", "mpirun"].into_iter().find(|name| run(name, &["--version"]).is_ok());
    let Some(name) = name else { return absent("launchers", "no mpirun of Open MPI".to_owned()) };
    let version = Command::new(name).arg("--version").output().map_err(|error| error.to_string())?;
    if !String::from_utf8_lossy(&version.stdout).contains("open-mpi.org") {
        return absent("launchers", format!("{name} is not Open MPI's"));
    }
    let mut command = Command::new(name);
    command.args(["--allow-run-as-root", "--oversubscribe", "-n", "4"]);
    Ok(command)
}

/// Returns MPICH's launcher.
fn mpich() -> Result<Command, String> {
    run("mpiexec.hydra", &["--version"]).or_else(|why| absent("launchers", why))?;
    let mut command = Command::new("mpiexec.hydra");
    command.args(["-n", "4"]);
    Ok(command)
}

/// Runs a program under a launcher as two jobs at once, which must stay separate.
fn starts_our_example(launcher: fn() -> Result<Command, String>) -> Result<(), String> {
    // Jobs of Open MPI 4 share a folder, and a job that ends can remove it while another starts. So each gets its own
    // folder.
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let mut commands = [launcher()?, launcher()?];
    for (command, folder) in commands.iter_mut().zip(&folders) {
        command.arg(example("gradient_averaging")).env("TMPDIR", folder.path());
    }
    let jobs = commands.each_mut().map(Peer::start_without_input);
    for printed in jobs.map(Peer::finish) {
        assert!(printed.contains("parameters alike on all 4 ranks, bit for bit: true"), "{printed}");
    }
    Ok(())
}

#[test]
fn open_mpi_starts_our_example_twice_at_once() {
    if let Err(why) = starts_our_example(open_mpi) {
        skip!("{why}");
    }
}

#[test]
fn mpich_starts_our_example_twice_at_once() {
    if let Err(why) = starts_our_example(mpich) {
        skip!("{why}");
    }
}

#[test]
fn mpich_on_two_hosts_needs_an_address_and_does_with_one() {
    if let Err(why) = mpich() {
        skip!("{why}");
    }
    let port = crate::common::ranks::free_port().to_string();
    for (address, succeeds) in [(None, false), (Some("127.0.0.1"), true)] {
        let mut command = Command::new("mpiexec.hydra");
        // Two host names that both mean this machine, so no remote shell is needed.
        command.args(["-launcher", "fork", "-hosts", "127.0.0.1,localhost", "-ppn", "2", "-n", "4"]).args(rank::command());
        command.envs([rank::variable("sums")]).envs(address.map(|address| ("MASTER_ADDR", address))).env("MASTER_PORT", &port);
        let (success, printed, errors) = Peer::start_without_input(&mut command).end();
        assert_eq!(success, succeeds, "{printed}\n{errors}");
        if succeeds {
            assert_eq!(printed.matches("of 4 is right").count(), 4, "{printed}");
        } else {
            assert!(format!("{printed}{errors}").contains("set it to that host"), "{printed}\n{errors}");
        }
    }
}
