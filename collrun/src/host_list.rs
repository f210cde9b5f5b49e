//! The hosts of a job, as `--hosts` and host files name them.

use std::path::Path;

use collectives::__private::regular_file;

use crate::arguments::Arguments;

/// A host, and how many ranks it gets where that is said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    /// As ssh takes it: a name, an address, or `user@name`.
    pub(crate) name: String,
    pub(crate) ranks: Option<u16>,
}

impl Host {
    /// Its name or address, by which other hosts reach it.
    pub(crate) fn address(&self) -> &str {
        self.name.rsplit_once('@').map_or(&*self.name, |(_, host)| host)
    }

    /// `a`, `a:4`, `user@a`, `[fe80::1]:4`.
    fn read(word: &str) -> Option<Self> {
        let (name, ranks) = match word.rsplit_once(':') {
            Some((name, ranks)) if !name.contains(':') || name.ends_with(']') => (name, Some(count(ranks)?)),
            _ => (word, None),
        };
        let name = name.replace(['[', ']'], "");
        let is_name = !name.is_empty() && !name.starts_with('-') && !name.ends_with('@') && !name.contains([',', '/', ' ', '\'']);
        is_name.then_some(Self { name, ranks })
    }
}

/// The most bytes of a host file.
const LONGEST: u64 = 16 << 20;

fn count(text: &str) -> Option<u16> {
    text.parse().ok().filter(|count| (1..=4096).contains(count))
}

/// `a,b:4`.
fn listed(text: &str) -> Result<Vec<Host>, String> {
    let host = |word: &str| Host::read(word.trim()).ok_or_else(|| format!("--hosts {text}: {word:?} is none of: host, host:4, user@host"));
    text.split(',').map(host).collect()
}

/// Lines of `host`, `host slots=4` and `host:4`; what stands behind # is a comment.
fn of_file(path: &Path) -> Result<Vec<Host>, String> {
    let text = regular_file::read(path, LONGEST).map_err(|error| format!("--hostfile {}: {error}", path.display()))?;
    let text = String::from_utf8(text).map_err(|error| format!("--hostfile {}: {error}", path.display()))?;
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or("").trim()).filter(|line| !line.is_empty());
    let read = |line: &str| {
        let mut words = line.split_whitespace();
        let mut host = Host::read(words.next()?)?;
        for word in words {
            host.ranks = Some(word.strip_prefix("slots=").and_then(count)?);
        }
        Some(host)
    };
    let hosts = lines
        .map(|line| read(line).ok_or_else(|| format!("--hostfile {}: {line:?} is none of: host, host:4, host slots=4", path.display())));
    let hosts = hosts.collect::<Result<Vec<_>, _>>()?;
    if hosts.is_empty() { Err(format!("--hostfile {}: there is no host in it", path.display())) } else { Ok(hosts) }
}

/// The hosts that were named, if any were.
pub(crate) fn named(arguments: &Arguments) -> Result<Option<Vec<Host>>, String> {
    let hosts = match (&arguments.hosts, &arguments.hostfile) {
        (Some(list), _) => listed(list)?,
        (None, Some(path)) => of_file(path)?,
        (None, None) => return Ok(None),
    };
    if let Some(other) = hosts.iter().find(|host| host.ranks != hosts[0].ranks) {
        return Err(format!("{} and {}: every host gets as many ranks", hosts[0].name, other.name));
    }
    if hosts[0].ranks.is_some() && arguments.nproc_per_node.is_some() {
        return Err("the ranks of each host are given twice: by --nproc-per-node, and behind the names of the hosts".to_owned());
    }
    if hosts.len() > 4096 {
        return Err(format!("{} hosts: 4096 are the most", hosts.len()));
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
        for wrong in ["", "a,", "a:0", "a:x", "a:4097", "-oProxyCommand=x", "a b", "me@", "a'b", "a/b"] {
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
