//! What the user asks of `collrun`.

use std::ffi::OsString;
use std::time::Duration;

use clap::Parser;

/// Starts the ranks of a job and stops them together.
///
/// Every rank is a process with torchrun's variables in its environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so
/// on) and a store to meet at. When one rank fails, collrun says which, stops the others and exits with its code. Signals
/// are passed on. No rank outlives collrun.
#[derive(Debug, Parser)]
#[command(name = "collrun", version, max_term_width = 110)]
pub(crate) struct Arguments {
    /// Ranks to start on this host
    #[arg(long, alias = "nproc_per_node", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) nproc_per_node: u16,
    /// Hosts in the job; collrun is started once on each
    #[arg(long, value_name = "M", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) nnodes: u16,
    /// This host's number, from 0; needed with several hosts
    #[arg(long, alias = "node_rank", value_name = "R")]
    pub(crate) node_rank: Option<u16>,
    /// Address of host 0, where the ranks meet; needed with several hosts
    #[arg(long, alias = "master_addr", value_name = "A")]
    pub(crate) master_addr: Option<String>,
    /// Port on host 0; needed with several hosts, else one that is free
    #[arg(long, alias = "master_port", value_name = "P", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) master_port: Option<u16>,
    /// Let in only those who know a secret that is made for this job and told to its ranks, which have to be programs of this crate;
    /// no effect where COLLECTIVES_SECRET or COLLECTIVES_SECRET_FILE says one, as they have to with several hosts
    #[arg(long)]
    pub(crate) secret: bool,
    /// Leave the ranks' output as it is, instead of putting the rank in brackets before each line
    #[arg(long)]
    pub(crate) no_prefix: bool,
    /// Let the others go on when a rank fails, as programs do that call Communicator::shrink; exit with 0 if one of them succeeds. The store
    /// is collrun's, so any rank may fail
    #[arg(long)]
    pub(crate) keep_going: bool,
    /// How long ranks may take to stop when another has failed, before they are killed
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub(crate) grace: Duration,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    pub(crate) command: Vec<OsString>,
}

/// Where this host stands in its job.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The job is this host's alone; the store's port may be given.
    Alone { address: Option<String>, port: Option<u16> },
    /// One of several hosts.
    Among { node: u16, address: String, port: u16 },
}

impl Arguments {
    /// Checks what belongs together.
    pub(crate) fn place(&self) -> Result<Place, String> {
        if self.nnodes == 1 {
            return match self.node_rank {
                None | Some(0) => Ok(Place::Alone { address: self.master_addr.clone(), port: self.master_port }),
                Some(node) => Err(format!("--node-rank {node}: there is one host, whose number is 0; give --nnodes")),
            };
        }
        let missing = |flag: &str| format!("--nnodes {}: {flag} is needed with several hosts", self.nnodes);
        let node = self.node_rank.ok_or_else(|| missing("--node-rank"))?;
        if node >= self.nnodes {
            return Err(format!("--node-rank {node}: the hosts of --nnodes {} are numbered from 0", self.nnodes));
        }
        let address = self.master_addr.clone().ok_or_else(|| missing("--master-addr"))?;
        let port = self.master_port.ok_or_else(|| missing("--master-port"))?;
        Ok(Place::Among { node, address, port })
    }
}

/// A time in seconds, fractions allowed.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Arguments {
        Arguments::try_parse_from(line.split(' ')).unwrap()
    }

    #[test]
    fn the_program_keeps_its_flags() {
        for line in ["collrun --nproc-per-node 3 prog -x --nnodes 7", "collrun --nproc_per_node=3 -- prog -x --nnodes 7"] {
            let arguments = parsed(line);
            assert_eq!(arguments.command, ["prog", "-x", "--nnodes", "7"]);
            assert_eq!((arguments.nproc_per_node, arguments.nnodes), (3, 1));
        }
    }

    #[test]
    fn several_hosts_need_to_know_where_they_meet() {
        let place = |line: &str| parsed(&format!("collrun {line} p")).place();
        assert_eq!(
            place("--nnodes 2 --node-rank 1 --master-addr a --master-port 5"),
            Ok(Place::Among { node: 1, address: "a".into(), port: 5 })
        );
        assert!(place("--nnodes 2 --master-addr a --master-port 5").unwrap_err().contains("--node-rank"));
        assert!(place("--nnodes 2 --node-rank 0 --master-port 5").unwrap_err().contains("--master-addr"));
        assert!(place("--nnodes 2 --node-rank 0 --master-addr a").unwrap_err().contains("--master-port"));
        assert!(place("--nnodes 2 --node-rank 2 --master-addr a --master-port 5").is_err());
        assert!(place("--node-rank 1").is_err());
    }

    #[test]
    fn nonsense_is_refused() {
        for line in
            ["", "--nproc-per-node 0 p", "--nproc-per-node -1 p", "--grace -1 p", "--grace x p", "--grace 1e99 p", "--master-port 0 p"]
        {
            let words = std::iter::once("collrun").chain(line.split_whitespace());
            assert!(Arguments::try_parse_from(words).is_err(), "{line}");
        }
    }
}
