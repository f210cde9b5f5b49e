//! What ranks get from the command line and from a launcher above theirs, and output that cannot be written.

use std::fs::OpenOptions;
use std::process::Command;

use super::{collrun, output, sorted_lines};

#[test]
fn variables_of_the_command_line_reach_the_ranks() {
    let run = output("--nproc-per-node 2 --env A=b=c", "echo $A");
    assert_eq!(sorted_lines(&run.stdout), ["[0] b=c", "[1] b=c"]);
    for (flags, words) in [("--env =x", "the name of the variable is missing"), ("--env NOT_SET_ANYWHERE", "not set in this shell")] {
        let run = output(flags, "true");
        assert!(run.status.code() == Some(2) && String::from_utf8_lossy(&run.stderr).contains(words), "{run:?}");
    }
}

#[test]
fn a_job_inside_a_rank_does_not_join_the_job_around_it() {
    let said = |variables: &[(&str, &str)]| {
        let run = collrun("", "echo $COLLECTIVES_JOIN").envs(variables.iter().copied()).output().unwrap();
        String::from_utf8(run.stdout).unwrap()
    };
    let join = ("COLLECTIVES_JOIN", "127.0.0.1:1");
    assert_eq!(said(&[join, ("COLLECTIVES_JOIN_FILE", "/absent")]), "[0] \n", "a launcher has set both");
    assert_eq!(said(&[join]), "[0] 127.0.0.1:1\n", "a person has set one");
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let run = collrun("--nproc-per-node 2", "echo lost").stdout(full).output().unwrap();
    let text = String::from_utf8_lossy(&run.stderr).into_owned();
    assert_eq!(run.status.code(), Some(1), "{text}");
    assert!(text.contains("the output of a rank could not be written: No space left on device"), "{text}");
    // The same through a launcher for each host.
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let run = collrun("--hosts localhost:2", "echo lost").stdout(full).output().unwrap();
    let text = String::from_utf8_lossy(&run.stderr).into_owned();
    assert_eq!(run.status.code(), Some(1), "{text}");
    assert!(text.contains("the output of localhost could not be written: No space left on device"), "{text}");
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let run = Command::new(env!("CARGO_BIN_EXE_collrun")).arg("--help").stdout(full).output().unwrap();
    assert_eq!(run.status.code(), Some(1), "{run:?}");
}

#[test]
fn a_stopped_rank_ends_with_the_others() {
    let run = output("--nproc-per-node 2 --grace 60", "if [ $RANK = 0 ]; then kill -STOP $$; exec sleep 600; fi; exit 3");
    let text = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.code() == Some(3) && !text.contains("killing"), "{run:?}");
}

#[test]
fn times_without_end_are_refused() {
    for time in ["1e19", "1e300", "inf", "nan", "-1"] {
        let run = output(&format!("--grace {time}"), "true");
        assert_eq!(run.status.code(), Some(2), "{time}: {run:?}");
    }
}
