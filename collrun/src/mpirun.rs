//! Reads the supported flags of mpirun, and names replacements for the others.

use std::ffi::OsString;

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Why a count of ranks is not taken as the count on each host.
pub(crate) const COUNTS_ALL: &str = "mpirun counts the ranks of all hosts together, and this job has several hosts";
/// mpirun's flags of several letters after one dash.
const ONE_DASH: [&str; 10] = ["-np", "-wdir", "-chdir", "-host", "-hosts", "-hostfile", "-machinefile", "-ppn", "-npernode", "-bind-to"];
/// mpirun's flags, and the flags to use instead.
const FLAGS: [(&str, &str); 8] = [
    ("-c", "--nproc-per-node"),
    ("-N", "--nproc-per-node"),
    ("--ppn", "--nproc-per-node"),
    ("--npernode", "--nproc-per-node"),
    ("-H", "--hosts"),
    ("--host", "--hosts"),
    ("--machinefile", "--hostfile"),
    ("-x", "--env"),
];

/// Gives mpirun's flags two dashes, because the parser would read each letter after one dash as a flag. Leaves the
/// program and its arguments unchanged.
pub(crate) fn with_two_dashes(command: &Command, words: &[OsString]) -> Vec<OsString> {
    let mut read = words.to_vec();
    let mut place = 1;
    while let Some(word) = read.get(place).and_then(|word| word.to_str()).map(str::to_owned) {
        if !word.starts_with('-') || word == "--" || word == "-" {
            break;
        }
        let theirs = ONE_DASH.contains(&&*word);
        if theirs {
            read[place] = format!("-{word}").into();
        }
        place += if theirs || takes_next(command, &word) { 2 } else { 1 };
    }
    read
}

/// Whether the next word is this flag's value.
fn takes_next(command: &Command, word: &str) -> bool {
    let takes_values = |argument: &clap::Arg| argument.get_action().takes_values();
    match word.strip_prefix("--") {
        Some(long) if long.contains('=') => false,
        Some(long) => {
            let is_named = |argument: &&clap::Arg| {
                argument.get_long() == Some(long) || argument.get_all_aliases().is_some_and(|aliases| aliases.contains(&long))
            };
            command.get_arguments().find(is_named).is_some_and(takes_values)
        }
        // Of letters after one dash, only the last may take the next word; an earlier one takes the rest of this word.
        None => {
            let takes =
                |letter: char| command.get_arguments().any(|argument| argument.get_short() == Some(letter) && takes_values(argument));
            word.char_indices()
                .skip(1)
                .find(|(_, letter)| takes(*letter))
                .is_some_and(|(place, letter)| place + letter.len_utf8() == word.len())
        }
    }
}

/// Returns the message for a line that cannot be read because of one of mpirun's flags.
pub(crate) fn hint(error: &clap::Error, words: &[OsString]) -> Option<String> {
    let Some(ContextValue::String(wrong)) = error.get(ContextKind::InvalidArg).filter(|_| error.kind() == ErrorKind::UnknownArgument)
    else {
        return None;
    };
    let (_, ours) = FLAGS.into_iter().find(|(theirs, _)| wrong == theirs)?;
    // Several letters after one dash are read as one flag each.
    let place = words.iter().position(|word| word.to_str().is_some_and(|word| word.starts_with(wrong.as_str())))?;
    let (whole, value) = (words[place].to_string_lossy(), words.get(place + 1).map(|value| value.to_string_lossy()));
    let known = whole == *wrong;
    let value = value.filter(|value| !value.starts_with('-')).map_or_else(String::new, |value| format!(" {value}"));
    let each = if ours == "--nproc-per-node" { ", which counts the ranks of each host" } else { "" };
    known.then(|| format!("{whole}{value}: this is a flag of mpirun; give {ours}{value}{each}"))
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
        let counts = ", which counts the ranks of each host";
        for (line, expected) in [
            ("-ppn 2 prog", format!("--ppn 2: this is a flag of mpirun; give --nproc-per-node 2{counts}")),
            ("-N 4 prog", format!("-N 4: this is a flag of mpirun; give --nproc-per-node 4{counts}")),
            ("-c", format!("-c: this is a flag of mpirun; give --nproc-per-node{counts}")),
            ("-n 2 -H a,b prog", "-H a,b: this is a flag of mpirun; give --hosts a,b".to_owned()),
            ("-host a,b prog", "--host a,b: this is a flag of mpirun; give --hosts a,b".to_owned()),
            ("--host a,b prog", "--host a,b: this is a flag of mpirun; give --hosts a,b".to_owned()),
            ("--machinefile f prog", "--machinefile f: this is a flag of mpirun; give --hostfile f".to_owned()),
            ("-x LIBRARY=/a prog", "-x LIBRARY=/a: this is a flag of mpirun; give --env LIBRARY=/a".to_owned()),
        ] {
            assert_eq!(said(line).unwrap(), expected, "{line}");
        }
    }

    #[test]
    fn one_dash_is_as_good_as_two_before_the_program() {
        let read = |line: &str| {
            let words: Vec<_> = std::iter::once("collrun").chain(line.split_whitespace()).map(OsString::from).collect();
            let read = Arguments::of(&words, |_| None).unwrap().unwrap();
            (read.np.map(|count| count.to_string()), read.wdir.map(|folder| folder.display().to_string()), read.hostfile, read.command)
        };
        let text = |text: &str| Some(text.to_owned());
        let command = |words: &str| words.split_whitespace().map(OsString::from).collect::<Vec<_>>();
        for line in
            ["-np 4 -wdir /a prog -np 3", "-n 4 --chdir /a -- prog -np 3", "-n4 --wdir=/a prog -np 3", "-r 3 --np 4 -chdir /a prog -np 3"]
        {
            assert_eq!(read(line), (text("4"), text("/a"), None, command("prog -np 3")), "{line}");
        }
        assert_eq!(read("-hostfile f prog"), (None, None, Some("f".into()), command("prog")));
        // Neither a value nor an argument of the program is a flag.
        assert_eq!(read("--role trainer prog -wdir x").3, command("prog -wdir x"));
        assert_eq!(read("-m prog -np 4").3, command("prog -np 4"));
    }

    #[test]
    fn other_flags_are_just_unknown() {
        for line in ["-q prog", "-nofork prog", "--nproc-per-rank 3 prog", "--nproc-per-node x prog"] {
            assert!(said(line).is_err(), "{line}");
        }
    }
}
