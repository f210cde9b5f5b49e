//! torchrun's variables. Most stand for a flag, which overrides the variable. The others are supported as in torchrun,
//! or refused.
//!
//! The flags that variables stand for are put before the words of the command line, where a later flag wins. So each
//! variable is read in the same way as its flag.

use std::ffi::{OsStr, OsString};

use clap::parser::ValueSource;
use clap::{ArgMatches, Command};

/// Flags with a value: `PET_NNODES` stands for the first.
const FLAGS: [&str; 24] = [
    "nnodes",
    "nproc-per-node",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "max-restarts",
    "monitor-interval",
    "start-method",
    "event-log-handler",
    "role",
    "log-dir",
    "redirects",
    "tee",
    "log-line-prefix-template",
    "local-ranks-filter",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
    "node-rank",
    "master-addr",
    "master-port",
    "local-addr",
    "signals-to-handle",
    "shutdown-timeout",
];
/// Flags without a value: on if their variable is a number other than 0.
const SWITCHES: [&str; 5] = ["standalone", "module", "no-python", "run-path", "virtual-local-rank"];
/// Variables with other names; those above override them.
const NAMED: [(&str, &str); 2] =
    [("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "log-line-prefix-template"), ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "shutdown-timeout")];
/// Another variable that a launcher reads, and passes on to launchers on other hosts.
const PYTHON: &str = "PYTHON_EXEC";

/// A variable, a check whether its value requests something, and what to do instead.
type Refused = (&'static str, fn(&str) -> bool, &'static str);

/// Variables that request what is not supported.
const REFUSED: [Refused; 3] = [
    (
        "TORCHELASTIC_ENABLE_FILE_TIMER",
        |value| value == "1",
        "collrun does not watch timers of ranks; to end calls that wait too long, set COLLECTIVES_TIMEOUT",
    ),
    (
        "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
        |value| value.parse::<f64>().is_ok_and(|seconds| seconds > 0.0),
        "collrun does not check whether the kernel blocks a rank; to end the calls that wait for such a rank, set COLLECTIVES_TIMEOUT",
    ),
    (
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
        |value| value == "1",
        "collrun serves the ranks' store itself, so rank 0 does not serve it; unset the variable",
    ),
];

/// A variable that stands for a flag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Variable {
    name: String,
    value: OsString,
    /// The flag, followed by `=` and the value if it takes one.
    word: OsString,
    flag: String,
}

impl Variable {
    /// Whether a message is about this variable's flag.
    pub(crate) fn is_meant(&self, said: &str) -> bool {
        said.contains(&self.flag)
    }

    /// Returns `PET_NNODES=2 stands for --nnodes`.
    pub(crate) fn sentence(&self) -> String {
        format!("{}={} stands for {}", self.name, self.value.to_string_lossy(), self.flag)
    }
}

/// Returns the variable of a flag: `PET_NNODES`.
fn name_of(flag: &str) -> String {
    format!("PET_{}", flag.replace('-', "_").to_uppercase())
}

/// Returns the parser's name of a flag.
fn id(flag: &str) -> String {
    if flag == "shutdown-timeout" { "grace".to_owned() } else { flag.replace('-', "_") }
}

/// Returns the names of all variables that a launcher reads.
pub(crate) fn names() -> impl Iterator<Item = String> {
    let flags = FLAGS.into_iter().chain(SWITCHES).map(name_of);
    let named = NAMED.into_iter().map(|(name, _)| name).chain(REFUSED.into_iter().map(|(name, ..)| name));
    flags.chain(named.chain([PYTHON]).map(str::to_owned))
}

/// Returns why a variable is refused, if one is.
pub(crate) fn refused(value_of: impl Fn(&str) -> Option<OsString>) -> Option<String> {
    REFUSED.into_iter().find_map(|(name, asks, reason)| {
        let value = value_of(name)?;
        let value = value.to_string_lossy();
        asks(&value).then(|| format!("{name}={value}: {reason}"))
    })
}

/// Returns the variables that stand for flags which a command line does not have. An empty variable counts as unset.
pub(crate) fn given(command: &Command, line: &ArgMatches, value_of: impl Fn(&str) -> Option<OsString>) -> Result<Vec<Variable>, String> {
    let flags = FLAGS.into_iter().map(|flag| (name_of(flag), flag, true));
    let switches = SWITCHES.into_iter().map(|flag| (name_of(flag), flag, false));
    let named = NAMED.into_iter().map(|(name, flag)| (name.to_owned(), flag, true));
    let mut given: Vec<Variable> = Vec::new();
    for (name, flag, has_value) in flags.chain(switches).chain(named) {
        let Some(value) = value_of(&name).filter(|value| !value.is_empty()) else { continue };
        let on_line = line.value_source(&id(flag)) == Some(ValueSource::CommandLine);
        let flag = format!("--{flag}");
        if on_line || given.iter().any(|other| other.flag == flag) || !(has_value || is_on(&name, &value)?) {
            continue;
        }
        let word = if has_value { [OsStr::new(&flag), OsStr::new("="), &value].into_iter().collect() } else { OsString::from(&flag) };
        let variable = Variable { name, value, word, flag };
        let alone = ["collrun".into(), variable.word.clone(), "program".into()];
        if let Err(error) = command.clone().try_get_matches_from(alone) {
            return Err(format!("{}: {}", variable.name, sentence(&error)));
        }
        given.push(variable);
    }
    Ok(given)
}

/// Puts the variables' words before those of the command line.
pub(crate) fn words(variables: &[Variable], line: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut line = line.into_iter();
    line.next().into_iter().chain(variables.iter().map(|variable| variable.word.clone())).chain(line).collect()
}

/// Whether a switch is on.
fn is_on(name: &str, value: &OsStr) -> Result<bool, String> {
    let value = value.to_string_lossy();
    let number = value.trim().parse::<i64>();
    number.map(|number| number != 0).map_err(|_| format!("{name}={value}: expected 1 for yes, or 0 for no"))
}

/// Returns the parser's error in one line.
pub(crate) fn sentence(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.lines().take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"));
    let said = lines.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ");
    said.strip_prefix("error: ").unwrap_or(&said).to_owned()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::arguments::Arguments;

    /// Reads a command line, with variables as `NAME=VALUE`.
    fn read(line: &str, variables: &[&str]) -> Result<Arguments, String> {
        let variables: HashMap<_, _> = variables.iter().map(|pair| pair.split_once('=').unwrap()).collect();
        let words = std::iter::once("collrun").chain(line.split_whitespace()).map(OsString::from);
        Arguments::of(&words.collect::<Vec<_>>(), |name| variables.get(name).map(OsString::from)).unwrap()
    }

    #[test]
    fn variables_stand_for_flags_that_are_not_there() {
        let all = ["PET_MAX_RESTARTS=3", "PET_ROLE=trainer", "PET_TEE=3", "PET_NO_PYTHON=1", "PET_STANDALONE=0", "PET_RDZV_ID="];
        let found = read("p", &all).unwrap();
        assert_eq!((found.max_restarts, &*found.role, found.no_python, found.standalone), (3, "trainer", true, false));
        assert!(!found.tee.is_empty() && found.rdzv_id.is_none());
        let found = read("--max_restarts 1 -t 0 --role a p", &all).unwrap();
        assert_eq!((found.max_restarts, &*found.role, found.tee.is_empty()), (1, "a", true));
    }

    #[test]
    fn names_of_their_own_give_way() {
        let seconds = |line, all: &[&str]| read(line, all).unwrap().grace.map(|grace| grace.as_secs());
        let (own, pet) = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=7", "PET_SHUTDOWN_TIMEOUT=8");
        assert_eq!([seconds("p", &[own]), seconds("p", &[own, pet]), seconds("--grace 9 p", &[own, pet])], [Some(7), Some(8), Some(9)]);
        let template = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=${rank}:";
        assert_eq!(read("p", &[template]).unwrap().prefix(), "${rank}:");
    }

    #[test]
    fn what_is_wrong_is_said_of_the_variable() {
        for (variable, words) in [
            ("PET_NNODES=2:1", "PET_NNODES: invalid value '2:1' for '--nnodes <M|MIN:MAX>': 2 is more than 1"),
            ("PET_STANDALONE=yes", "PET_STANDALONE=yes: expected 1 for yes"),
            ("PET_START_METHOD=x", "PET_START_METHOD: invalid value 'x'"),
            ("TORCHELASTIC_ENABLE_FILE_TIMER=1", "TORCHELASTIC_ENABLE_FILE_TIMER=1: collrun does not watch timers"),
            ("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT=9", "the kernel blocks"),
        ] {
            let error = read("p", &[variable]).unwrap_err();
            assert!(error.contains(words) && error.lines().count() == 1, "{error}");
        }
        let error = read("--hosts a p", &["PET_NNODES=2"]).unwrap_err();
        assert!(error.contains("cannot be used with") && error.ends_with("(PET_NNODES=2 stands for --nnodes)"), "{error}");
        let error = read("--standalone p", &["PET_NNODES=2", "PET_ROLE=a"]).unwrap().place().unwrap_err();
        assert!(error.ends_with("leave out one of the two flags (PET_NNODES=2 stands for --nnodes)"), "{error}");
        let error = read("p", &["PET_EVENT_LOG_HANDLER=console"]).unwrap().place().unwrap_err();
        assert!(error.contains("Python handlers") && error.contains("PET_EVENT_LOG_HANDLER=console"), "{error}");
        assert!(read("p", &["TORCHELASTIC_ENABLE_FILE_TIMER=0", "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT=0"]).is_ok());
    }

    #[test]
    fn a_launcher_that_reads_an_order_reads_no_variable() {
        assert!(read("--read-order", &["PET_NNODES=x"]).unwrap().read_order);
    }
}
