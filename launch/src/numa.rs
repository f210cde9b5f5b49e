//! Binds each rank near its GPU, with the words of torchrun's `--numa-binding`. On a host without GPUs, ranks are spread
//! evenly.

use std::fs;
use std::path::Path;
use std::str::FromStr;

use super::bind::{Asked, Bind, Binding, Width};
use super::topology::{Core, Topology, permitted};

/// The processors near a rank's GPU to which the rank is bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NumaBinding {
    /// All processors of the NUMA node.
    Node,
    /// All processors of the socket.
    Socket,
    /// A share of the node's cores, which no rank of another GPU has.
    Exclusive,
    /// The cores of the node that share one last-level cache.
    CoreComplex,
}

impl FromStr for NumaBinding {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "node" => Ok(Self::Node),
            "socket" => Ok(Self::Socket),
            "exclusive" => Ok(Self::Exclusive),
            "core-complex" => Ok(Self::CoreComplex),
            _ => Err("expected node, socket, exclusive or core-complex".to_owned()),
        }
    }
}

impl NumaBinding {
    /// Chooses processors for each of `ranks` ranks of this host. The GPU of a rank is the visible GPU with the rank's
    /// local number. GPUs are counted in the order of their PCI addresses.
    ///
    /// # Errors
    ///
    /// If there are fewer GPUs than ranks, or if the binding is impossible. The error is a sentence that gives the reason.
    pub fn here(self, ranks: usize) -> Result<Binding, String> {
        let permitted = permitted().map_err(|error| format!("reading which processors this process may use: {error}"))?;
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let nodes = visible_nodes(&gpu_nodes(Path::new("/sys/bus/pci/devices")), visible.as_deref())?;
        self.of(&Topology::of(&permitted), &nodes, ranks)
    }

    /// Places the ranks on a given topology; `nodes` are the NUMA nodes of the visible GPUs.
    fn of(self, topology: &Topology, nodes: &[usize], ranks: usize) -> Result<Binding, String> {
        if nodes.is_empty() {
            return self.without_gpus(topology, ranks);
        }
        if nodes.len() < ranks {
            return Err(format!("--numa-binding: {ranks} ranks, but only {} visible GPUs; start fewer ranks, or give --bind", nodes.len()));
        }
        let mut processors = Vec::with_capacity(ranks);
        for rank in 0..ranks {
            let cores = self.cores(topology.cores(), nodes, rank);
            if cores.is_empty() {
                return Err(format!(
                    "--numa-binding: there is no core for local rank {rank} that this process may use on NUMA node {}, which has its GPU; \
                     give another mode, or --bind",
                    nodes[rank]
                ));
            }
            let mut of_rank: Vec<usize> = cores.iter().flat_map(|core| core.processors.iter().copied()).collect();
            of_rank.sort_unstable();
            processors.push(of_rank);
        }
        Ok(Binding { to: self.kind(), processors, why_none: None, is_asked: true })
    }

    /// Returns the cores for a rank.
    fn cores<'a>(self, cores: &'a [Core], nodes: &[usize], rank: usize) -> Vec<&'a Core> {
        let node = nodes[rank];
        let of_node: Vec<&Core> = cores.iter().filter(|core| core.node == node).collect();
        // The place of the rank's GPU among the GPUs of its node.
        let place = nodes[..rank].iter().filter(|other| **other == node).count();
        match self {
            Self::Node => of_node,
            Self::Socket => match of_node.first() {
                Some(first) => cores.iter().filter(|core| core.socket == first.socket).collect(),
                None => of_node,
            },
            Self::Exclusive => share(&of_node, place, nodes.iter().filter(|other| **other == node).count()),
            Self::CoreComplex => {
                let caches: Vec<&[&Core]> = of_node.chunk_by(|one, other| one.cache == other.cache).collect();
                caches.get(place % caches.len().max(1)).map_or_else(Vec::new, |cores| cores.to_vec())
            }
        }
    }

    /// Spreads ranks evenly, on a host without GPUs.
    fn without_gpus(self, topology: &Topology, ranks: usize) -> Result<Binding, String> {
        if self != Self::Socket {
            return Binding::of(topology, Asked::For(self.kind()), Width::Share, ranks);
        }
        let numa = Binding::of(topology, Asked::For(Bind::Numa), Width::Share, ranks)?;
        let socket_of = |processors: &[usize]| {
            let socket = topology.cores().iter().find(|core| processors.contains(&core.processors[0])).map(|core| core.socket);
            let mine = topology.cores().iter().filter(|core| Some(core.socket) == socket);
            let mut all: Vec<usize> = mine.flat_map(|core| core.processors.iter().copied()).collect();
            all.sort_unstable();
            all
        };
        Ok(Binding { processors: numa.processors.iter().map(|processors| socket_of(processors)).collect(), ..numa })
    }

    /// Returns the kind of binding that reports name.
    fn kind(self) -> Bind {
        match self {
            Self::Node | Self::Socket => Bind::Numa,
            Self::Exclusive => Bind::Core,
            Self::CoreComplex => Bind::Cache,
        }
    }
}

/// Returns one of `count` shares of some cores. The first shares have one more core if the cores cannot be divided
/// evenly.
fn share<'a>(cores: &[&'a Core], place: usize, count: usize) -> Vec<&'a Core> {
    let (each, more) = (cores.len() / count.max(1), cores.len() % count.max(1));
    let first = place * each + place.min(more);
    cores.iter().copied().skip(first).take(each + usize::from(place < more)).collect()
}

/// Returns the NUMA nodes of NVIDIA's GPUs, in the order of their PCI addresses.
fn gpu_nodes(devices: &Path) -> Vec<usize> {
    let read = |path: &Path| fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
    let mut folders: Vec<_> = fs::read_dir(devices).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    folders.sort_unstable();
    // Display controllers: VGA, and 3D without a display.
    let is_gpu = |folder: &Path| {
        let class = read(&folder.join("class"));
        read(&folder.join("vendor")) == "0x10de" && (class.starts_with("0x0300") || class.starts_with("0x0302"))
    };
    // The kernel writes -1 if it does not know the node.
    folders.iter().filter(|folder| is_gpu(folder)).map(|folder| read(&folder.join("numa_node")).parse().unwrap_or(0)).collect()
}

/// Returns the nodes of the GPUs that `CUDA_VISIBLE_DEVICES` names by their numbers; all if it is not set.
fn visible_nodes(nodes: &[usize], visible: Option<&str>) -> Result<Vec<usize>, String> {
    let Some(visible) = visible.filter(|_| !nodes.is_empty()) else { return Ok(nodes.to_vec()) };
    let node = |name: &str| {
        let number: Option<usize> = name.trim().parse().ok();
        number.and_then(|number| nodes.get(number)).copied().ok_or_else(|| {
            format!("--numa-binding: CUDA_VISIBLE_DEVICES={visible}: expected numbers of the {} GPUs of this host", nodes.len())
        })
    };
    visible.split(',').filter(|name| !name.trim().is_empty()).map(node).collect()
}

#[cfg(test)]
mod tests {
    use super::super::topology::listed;
    use super::super::topology::made_up::{all, regular};
    use super::*;

    /// Two nodes with 8 cores each, whose caches have 4 cores.
    fn lists(binding: NumaBinding, nodes: &[usize], ranks: usize) -> Vec<String> {
        let topology = regular(16, 1, 4, 2, &all(16));
        binding.of(&topology, nodes, ranks).unwrap().processors.iter().map(|processors| listed(processors)).collect()
    }

    #[test]
    fn ranks_are_bound_near_their_gpus() {
        let crossed = [1, 0, 1, 0];
        assert_eq!(lists(NumaBinding::Node, &crossed, 4), ["8-15", "0-7", "8-15", "0-7"]);
        assert_eq!(lists(NumaBinding::Exclusive, &crossed, 4), ["8-11", "0-3", "12-15", "4-7"]);
        assert_eq!(lists(NumaBinding::CoreComplex, &crossed, 4), ["8-11", "0-3", "12-15", "4-7"]);
        // The machine is one socket with two nodes.
        assert_eq!(lists(NumaBinding::Socket, &crossed, 2), ["0-15", "0-15"]);
        // Three GPUs share the eight cores of a node: the first two have one more core, whether a rank uses them or not.
        assert_eq!(lists(NumaBinding::Exclusive, &[0, 0, 0], 2), ["0-2", "3-5"]);
        assert_eq!(lists(NumaBinding::CoreComplex, &[0, 0, 0], 3), ["0-3", "4-7", "0-3"]);
    }

    #[test]
    fn without_gpus_ranks_are_spread_evenly() {
        assert_eq!(lists(NumaBinding::Node, &[], 2), ["0-7", "8-15"]);
        assert_eq!(lists(NumaBinding::Exclusive, &[], 4), ["0-3", "4-7", "8-11", "12-15"]);
        assert_eq!(lists(NumaBinding::CoreComplex, &[], 4), ["0-3", "4-7", "8-11", "12-15"]);
        assert_eq!(lists(NumaBinding::Socket, &[], 2), ["0-15", "0-15"]);
    }

    #[test]
    fn what_cannot_be_bound_is_an_error() {
        let topology = regular(16, 1, 4, 2, &all(8));
        let error = NumaBinding::Node.of(&topology, &[0, 1], 2).unwrap_err();
        assert!(error.contains("no core for local rank 1") && error.contains("NUMA node 1"), "{error}");
        let error = NumaBinding::Node.of(&topology, &[0], 2).unwrap_err();
        assert!(error.contains("2 ranks, but only 1 visible GPUs"), "{error}");
        assert!("numa".parse::<NumaBinding>().is_err());
    }

    #[test]
    fn gpus_are_found_in_the_kernel_s_files() {
        let folder = tempfile::tempdir().unwrap();
        let device = |address: &str, vendor: &str, class: &str, node: &str| {
            let folder = folder.path().join(address);
            fs::create_dir(&folder).unwrap();
            for (name, text) in [("vendor", vendor), ("class", class), ("numa_node", node)] {
                fs::write(folder.join(name), format!("{text}\n")).unwrap();
            }
        };
        device("0000:81:00.0", "0x10de", "0x030200", "1");
        device("0000:01:00.0", "0x10de", "0x030000", "-1");
        device("0000:41:00.0", "0x10de", "0x030200", "3");
        device("0000:02:00.0", "0x8086", "0x030000", "7");
        device("0000:01:00.1", "0x10de", "0x040300", "7");
        let nodes = gpu_nodes(folder.path());
        assert_eq!(nodes, [0, 3, 1]);
        assert_eq!(visible_nodes(&nodes, Some("2,0")), Ok(vec![1, 0]));
        assert_eq!((visible_nodes(&nodes, None), visible_nodes(&nodes, Some(""))), (Ok(nodes.clone()), Ok(vec![])));
        assert!(visible_nodes(&nodes, Some("3")).is_err() && visible_nodes(&nodes, Some("GPU-1")).unwrap_err().contains("GPU-1"));
        assert_eq!(visible_nodes(&[], Some("GPU-1")), Ok(vec![]));
    }
}
