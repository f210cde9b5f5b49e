//! Meets the other ranks at a store. There is no communicator, because it would not start if a firewall separated two
//! ranks.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use collectives::Secret;
use collectives::store::{PrefixStore, TcpStore, TcpStoreServer};

use crate::failure::Failure;
use crate::job::variable;
use crate::process::address_towards;

/// The launchers' variables for the rank and the number of ranks.
const NUMBERS: [(&str, &[&str]); 5] = [
    ("RANK", &["WORLD_SIZE"]),
    ("OMPI_COMM_WORLD_RANK", &["OMPI_COMM_WORLD_SIZE"]),
    ("PMI_RANK", &["PMI_SIZE"]),
    ("SLURM_PROCID", &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]),
    ("JOB_COMPLETION_INDEX", &["WORLD_SIZE"]),
];
/// The port if the launcher names none.
const DEFAULT_PORT: u16 = 29_500;

/// This rank, and what it needs to exchange findings with the others.
pub(super) struct Meeting {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// How long the other ranks may take to arrive.
    pub(super) timeout: Duration,
    pub(super) store: PrefixStore,
    /// The address from which this host reaches the store.
    pub(super) address: IpAddr,
    /// Kept until the others have finished.
    _server: Option<TcpStoreServer>,
}

impl Meeting {
    /// Meets the other ranks as the launcher's variables specify. They must arrive within `timeout`.
    pub(super) fn join(timeout: Duration) -> Result<Self, Failure> {
        let (rank, world_size) = numbers()?;
        let host = variable("MASTER_ADDR").unwrap_or_else(|| Ipv4Addr::LOCALHOST.to_string());
        let port = match variable("MASTER_PORT") {
            None => DEFAULT_PORT,
            Some(port) => port.parse().map_err(|_| Failure::usage(format!("MASTER_PORT={port:?}: expected a port number")))?,
        };
        let is_served = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
        let secret = Secret::from_env()?;
        let server = (rank == 0 && !is_served).then(|| match &secret {
            Some(secret) => TcpStoreServer::bind_with_secret((host.as_str(), port), secret),
            None => TcpStoreServer::bind((host.as_str(), port)),
        });
        let server = server.transpose()?;
        let store = match &secret {
            Some(secret) => TcpStore::connect_with_secret(&host, port, timeout, secret)?,
            None => TcpStore::connect(&host, port, timeout)?,
        };
        let address = address_towards(&host).unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
        Ok(Self { rank, world_size, timeout, store: PrefixStore::new("collperf doctor", store as Arc<_>), address, _server: server })
    }
}

/// Returns rank and number of ranks from the launcher's variables, if both are set.
fn numbers() -> Result<(usize, usize), Failure> {
    let number = |name: &str| variable(name).and_then(|value| value.trim().parse::<usize>().ok());
    let found = NUMBERS.into_iter().find_map(|(rank, sizes)| Some((number(rank)?, sizes.iter().find_map(|size| number(size))?)));
    match found {
        Some((rank, size)) if rank < size => Ok((rank, size)),
        Some((rank, size)) => {
            let last = size.saturating_sub(1);
            Err(Failure::usage(format!(
                "doctor: the launcher's variables give rank {rank}, but {size} ranks are numbered from 0 to {last}"
            )))
        }
        None => Err(Failure::usage("doctor: the launcher's variables lack the rank or the number of ranks; set RANK and WORLD_SIZE")),
    }
}
