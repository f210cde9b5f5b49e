//! The hosts of a job, from `--hosts` or a host file.

use std::path::Path;

use collectives::__private::regular_file;

use crate::arguments::Arguments;
use crate::mpirun::COUNTS_ALL;

/// A host, and how many ranks it gets, if given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    /// The name for ssh: a name, an address, or `user@name`.
    pub(crate) name: String,
    pub(crate) ranks: Option<u16>,
}

impl Host {
    /// Returns its name or address, by which other hosts reach it.
    pub(crate) fn address(&self) -> &str {
        self.name.rsplit_once('@').map_or(&*self.name, |(_, host)| host)
    }

    /// Reads `a`, `a:4`, `user@a`, `[fe80::1]:4`, `fe80::1%eth0`.
    fn read(word: &str) -> Option<Self> {
        let (name, ranks) = match word.rsplit_once(':') {
            Some((name, ranks)) if !name.contains(':') || name.ends_with(']') => (name, Some(count(ranks)?)),
            _ => (word, None),
        };
        let (user, host) = name.split_once('@').map_or((None, name), |(user, host)| (Some(user), host));
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let (address, scope) = host.split_once('%').map_or((host, None), |(address, scope)| (address, Some(scope)));
        let is_host = is_word(address) && scope.is_none_or(is_word) && user.is_none_or(is_word);
        let name = user.map_or_else(|| host.to_owned(), |user| format!("{user}@{host}"));
        is_host.then_some(Self { name, ranks })
    }
}

/// The most bytes of a host file.
const LONGEST: u64 = 16 << 20;

/// Whether a text has no special meaning to a shell and is not a flag. Names of hosts and users are passed to ssh,
/// which may run programs that are named in them.
fn is_word(text: &str) -> bool {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "._:-".contains(letter);
    !text.is_empty() && !text.starts_with('-') && text.chars().all(is_plain)
}

/// The accepted forms of a host.
const HOSTS: &str = "host, host:4, user@host, [v6]:4 or v6%interface; a name consists of letters (A-Z, a-z), digits and the characters \
                     . _ : -, and must not begin with -";

fn count(text: &str) -> Option<u16> {
    text.parse().ok().filter(|count| (1..=4096).contains(count))
}

/// Reads `a,b:4`.
fn listed(text: &str) -> Result<Vec<Host>, String> {
    let host = |(place, word): (usize, &str)| {
        let host = Host::read(word.trim());
        host.ok_or_else(|| format!("--hosts, entry {}: {word:?} is not a host: expected {HOSTS}", place + 1))
    };
    text.split(',').enumerate().map(host).collect()
}

/// Reads lines of `host`, `host slots=4` and `host:4`; text after # is a comment.
fn of_file(path: &Path) -> Result<Vec<Host>, String> {
    let text = regular_file::read(path, LONGEST).map_err(|error| format!("--hostfile {}: {error}", path.display()))?;
    let text = String::from_utf8(text).map_err(|error| format!("--hostfile {}: {error}", path.display()))?;
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or("").trim()).enumerate().filter(|(_, line)| !line.is_empty());
    let read = |line: &str| {
        let mut words = line.split_whitespace();
        let mut host = Host::read(words.next()?)?;
        for word in words {
            host.ranks = Some(word.strip_prefix("slots=").and_then(count)?);
        }
        Some(host)
    };
    let hosts = lines.map(|(place, line)| {
        let wrong = || format!("--hostfile {}, line {}: {line:?} is not a host: expected host slots=4, {HOSTS}", path.display(), place + 1);
        read(line).ok_or_else(wrong)
    });
    let hosts = hosts.collect::<Result<Vec<_>, _>>()?;
    if hosts.is_empty() { Err(format!("--hostfile {}: the file contains no host", path.display())) } else { Ok(hosts) }
}

/// Returns the hosts that the flags name, if any.
pub(crate) fn named(arguments: &Arguments) -> Result<Option<Vec<Host>>, String> {
    let hosts = match (&arguments.hosts, &arguments.hostfile) {
        (Some(list), _) => listed(list)?,
        (None, Some(path)) => of_file(path)?,
        (None, None) => return Ok(None),
    };
    if let Some(other) = hosts.iter().find(|host| host.ranks != hosts[0].ranks) {
        return Err(format!("{} and {}: every host must have the same number of ranks", hosts[0].name, other.name));
    }
    if hosts[0].ranks.is_some() && (arguments.nproc_per_node.is_some() || arguments.np.is_some()) {
        return Err("the number of ranks on a host is given twice: by --nproc-per-node or -n, and after the names of the hosts".to_owned());
    }
    if let Some(np) = arguments.np.filter(|_| hosts.len() > 1) {
        return Err(format!("-n {np}: {COUNTS_ALL}; give --nproc-per-node, or the number of ranks after the name of each host"));
    }
    if hosts.len() > 4096 {
        return Err(format!("{} hosts: at most 4096 are supported", hosts.len()));
    }
    Ok(Some(hosts))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, ranks: Option<u16>) -> Host {
        Host { name: name.to_owned(), ranks }
    }

    #[test]
    fn hosts_are_names_and_addresses() {
        let expected = [host("a", Some(4)), host("me@b", Some(2)), host("10.0.0.1", None), host("fe80::1", None), host("fe80::1", Some(3))];
        assert_eq!(listed("a:4, me@b:2,10.0.0.1,fe80::1,[fe80::1]:3").unwrap(), expected);
        assert_eq!(expected.each_ref().map(Host::address), ["a", "b", "10.0.0.1", "fe80::1", "fe80::1"]);
        assert_eq!(listed("[fe80::1%eth0]:2,me@fe80::1%eth0.7").unwrap(), [host("fe80::1%eth0", Some(2)), host("me@fe80::1%eth0.7", None)]);
        for wrong in ["", "a,", "a:0", "a:x", "a:4097", "a b", "me@", "@a", "a/b", "a@b@c", "[a", "a]:4", "[a]b", "a%", "%eth0", "é"] {
            assert!(listed(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn names_that_ssh_or_a_shell_would_take_for_more_are_no_hosts() {
        for wrong in [
            "-oProxyCommand=id",
            "me@-oProxyCommand=id",
            "me@-o",
            "-l@a",
            "a$(id)",
            "$(id)@a",
            "a`id`",
            "a;id",
            "a|id",
            "a'b",
            "a\"b",
            "a\\b",
        ] {
            let said = listed(&format!("first,{wrong}")).unwrap_err();
            assert!(said.starts_with("--hosts, entry 2: ") && said.contains(&format!("{wrong:?}")), "{said}");
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("hosts");
            std::fs::write(&path, format!("# hosts\nfirst slots=2\n{wrong} slots=2\n")).unwrap();
            let said = of_file(&path).unwrap_err();
            assert!(said.contains("hosts, line 3: ") && said.contains("slots=2"), "{said}");
        }
        for wrong in ["a%$(id)", "a%-o", "a\n-o", "a\0"] {
            assert!(listed(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn host_files_are_those_of_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            of_file(&path)
        };
        assert_eq!(read("# both\n a slots=4 # first\n\nb:4\n").unwrap(), [host("a", Some(4)), host("b", Some(4))]);
        for wrong in ["", "# none\n", "a slots=0\n", "a max_slots=4\n", "a 4\n", "a,b\n"] {
            assert!(read(wrong).is_err(), "{wrong:?}");
        }
        assert!(of_file(&folder.path().join("absent")).unwrap_err().contains("absent"));
    }
}
