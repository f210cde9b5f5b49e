//! mpirun's flags, which many have at their fingertips: what to give in their place.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// What begins as these do, and what says the same here.
const FLAGS: [(&str, &str); 9] = [
    ("-n", "--nproc-per-node"),
    ("--np", "--nproc-per-node"),
    ("-c", "--nproc-per-node"),
    ("-N", "--nproc-per-node"),
    ("-p", "--nproc-per-node"),
    ("-H", "--hosts"),
    ("--host", "--hosts"),
    ("--machinefile", "--hostfile"),
    ("-x", "--env"),
];

/// What to say of a line that cannot be read for the sake of one of them.
pub(crate) fn hint(error: &clap::Error, words: &[OsString]) -> Option<String> {
    let Some(ContextValue::String(wrong)) = error.get(ContextKind::InvalidArg).filter(|_| error.kind() == ErrorKind::UnknownArgument)
    else {
        return None;
    };
    let (_, ours) = FLAGS.into_iter().find(|(theirs, _)| wrong == theirs)?;
    // One dash and several letters, as in -np, are read as a letter each.
    let place = words.iter().position(|word| word.to_str().is_some_and(|word| word.starts_with(wrong.as_str())))?;
    let (whole, value) = (words[place].to_string_lossy(), words.get(place + 1).map(|value| value.to_string_lossy()));
    let known = ["-n", "-np", "-c", "-N", "-ppn", "-H", "-x"].contains(&&*whole) || whole == *wrong;
    let value = value.filter(|value| !value.starts_with('-')).map_or_else(String::new, |value| format!(" {value}"));
    let each = if ours == "--nproc-per-node" { "; it counts the ranks of each host" } else { "" };
    known.then(|| format!("{whole}{value}: that is mpirun's; give {ours}{value}{each}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::Arguments;

    fn said(line: &str) -> Result<String, clap::Error> {
        let words: Vec<_> = std::iter::once("collrun").chain(line.split_whitespace()).map(OsString::from).collect();
        Arguments::of(&words, |_| None).map(|read| read.unwrap_err())
    }

    #[test]
    fn flags_of_mpirun_lead_to_ours() {
        let counts = "; it counts the ranks of each host";
        for (line, expected) in [
            ("-np 4 prog", format!("-np 4: that is mpirun's; give --nproc-per-node 4{counts}")),
            ("-n 4 prog", format!("-n 4: that is mpirun's; give --nproc-per-node 4{counts}")),
            ("--np 4 prog -n 3", format!("--np 4: that is mpirun's; give --nproc-per-node 4{counts}")),
            ("-ppn 2 prog", format!("-ppn 2: that is mpirun's; give --nproc-per-node 2{counts}")),
            ("-n", format!("-n: that is mpirun's; give --nproc-per-node{counts}")),
            ("-H a,b prog", "-H a,b: that is mpirun's; give --hosts a,b".to_owned()),
            ("--machinefile f prog", "--machinefile f: that is mpirun's; give --hostfile f".to_owned()),
            ("-x LIBRARY=/a prog", "-x LIBRARY=/a: that is mpirun's; give --env LIBRARY=/a".to_owned()),
        ] {
            assert_eq!(said(line).unwrap(), expected, "{line}");
        }
    }

    #[test]
    fn other_flags_are_just_unknown() {
        for line in ["-q prog", "-nofork prog", "--nproc-per-rank 3 prog", "--nproc-per-node x prog"] {
            assert!(said(line).is_err(), "{line}");
        }
    }
}
