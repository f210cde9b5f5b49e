//! Reads from the kernel's files which processors form a core, share a last-level cache, or belong to a NUMA node. Only
//! processors that this process may use count. Without those files, each processor counts as a core, with one cache and
//! one node for all.

use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity};

/// The cores whose processors this process may run on, ordered by node, and within a node by cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Topology {
    cores: Vec<Core>,
}

/// One core and its usable processors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Core {
    /// Its NUMA node, by its number.
    pub(super) node: usize,
    /// Its socket, by the kernel's number.
    pub(super) socket: usize,
    /// Its last-level cache, by the first processor that shares it.
    pub(super) cache: usize,
    /// The first of its hardware threads, usable or not.
    first: usize,
    /// The usable processors, in ascending order.
    pub(super) processors: Vec<usize>,
}

impl Topology {
    /// Reads this machine's topology, for a process that may use these processors.
    pub(super) fn of(permitted: &[usize]) -> Self {
        Self::read(Path::new("/sys/devices/system"), permitted)
    }

    /// Reads the topology from the files below `system`, for a process that may use these processors.
    fn read(system: &Path, permitted: &[usize]) -> Self {
        let nodes = nodes(&system.join("node"));
        let mut cores: Vec<Core> = Vec::new();
        for processor in permitted {
            let folder = system.join(format!("cpu/cpu{processor}"));
            let siblings = ranges_in(&folder.join("topology/thread_siblings_list"));
            let first = first_of(siblings.as_deref()).unwrap_or(*processor);
            if let Some(core) = cores.iter_mut().find(|core| core.first == first) {
                core.processors.push(*processor);
                continue;
            }
            let node = nodes.iter().find(|(_, ranges)| ranges.iter().any(|range| range.contains(processor)));
            let (node, cache) = (node.map_or(0, |(number, _)| *number), last_level_cache(&folder.join("cache")).unwrap_or(0));
            let socket = fs::read_to_string(folder.join("topology/physical_package_id")).ok();
            let socket = socket.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
            cores.push(Core { node, socket, cache, first, processors: vec![*processor] });
        }
        cores.iter_mut().for_each(|core| core.processors.sort_unstable());
        cores.sort_by_key(|core| (core.node, core.cache, core.first));
        Self { cores }
    }

    /// Returns the number of cores.
    pub(super) fn core_count(&self) -> usize {
        self.cores.len()
    }

    pub(super) fn cores(&self) -> &[Core] {
        &self.cores
    }
}

/// Returns the processors that the calling thread may run on, in ascending order.
pub(super) fn permitted() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|processor| set.is_set(*processor)).collect())
}

/// Reads the nodes with their processors.
fn nodes(folder: &Path) -> Vec<(usize, Vec<RangeInclusive<usize>>)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let node = |entry: fs::DirEntry| {
        let number = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
        Some((number, ranges_in(&entry.path().join("cpulist"))?))
    };
    entries.filter_map(node).collect()
}

/// Returns the first processor that shares a processor's last-level cache.
fn last_level_cache(folder: &Path) -> Option<usize> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let cache = |entry: fs::DirEntry| {
        let level: u32 = fs::read_to_string(entry.path().join("level")).ok()?.trim().parse().ok()?;
        Some((level, first_of(ranges_in(&entry.path().join("shared_cpu_list")).as_deref())?))
    };
    entries.filter_map(cache).max_by_key(|(level, _)| *level).map(|(_, first)| first)
}

fn first_of(ranges: Option<&[RangeInclusive<usize>]>) -> Option<usize> {
    ranges?.iter().map(|range| *range.start()).min()
}

/// Reads a file with a kernel list such as `0-3,8`; `None` if it holds no such list.
fn ranges_in(path: &Path) -> Option<Vec<RangeInclusive<usize>>> {
    let text = fs::read_to_string(path).ok()?;
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    text.trim().split(',').map(range).collect()
}

/// Formats processors in the kernel's format: `0-3,8`.
pub(super) fn listed(processors: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for processor in processors {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *processor => *last = *processor,
            _ => ranges.push((*processor, *processor)),
        }
    }
    let range = |(first, last): (usize, usize)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    ranges.into_iter().map(range).collect::<Vec<_>>().join(",")
}

/// Simulated machines.
#[cfg(test)]
pub(super) mod made_up {
    use super::*;

    /// One processor: its core's hardware threads, the processors of its cache, and its node. `None` means that the
    /// file is missing.
    pub(crate) struct Processor {
        pub(crate) siblings: Option<String>,
        pub(crate) shared: Option<String>,
        pub(crate) node: Option<usize>,
    }

    /// Writes a machine's files and reads them for a process that may use `permitted`.
    pub(crate) fn machine(processors: &[Processor], permitted: &[usize]) -> Topology {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: String, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        };
        let mut nodes: Vec<(usize, Vec<usize>)> = Vec::new();
        for (number, Processor { siblings, shared, node }) in processors.iter().enumerate() {
            if let Some(siblings) = siblings {
                write(format!("cpu/cpu{number}/topology/thread_siblings_list"), siblings);
            }
            if let Some(shared) = shared {
                // The first level belongs to the core alone, and comes last in the folder.
                for (index, level, list) in [(3, "3", shared.clone()), (9, "1", number.to_string())] {
                    write(format!("cpu/cpu{number}/cache/index{index}/level"), level);
                    write(format!("cpu/cpu{number}/cache/index{index}/shared_cpu_list"), &list);
                }
            }
            match (node, nodes.iter_mut().find(|(other, _)| Some(*other) == *node)) {
                (None, _) => {}
                (_, Some((_, members))) => members.push(number),
                (Some(node), None) => nodes.push((*node, vec![number])),
            }
        }
        nodes.iter().for_each(|(node, members)| write(format!("node/node{node}/cpulist"), &listed(members)));
        // Another file of the kernel's folder.
        write("node/online".to_owned(), "0");
        Topology::read(folder.path(), permitted)
    }

    /// Simulates cores with `threads` hardware threads each. `cores_of_cache` cores share a last-level cache, and the
    /// caches are spread over `nodes` nodes. All second threads are numbered after all first ones.
    pub(crate) fn regular(cores: usize, threads: usize, cores_of_cache: usize, nodes: usize, permitted: &[usize]) -> Topology {
        let processor = |number: usize| {
            let core = number % cores;
            let siblings: Vec<usize> = (0..threads).map(|thread| core + thread * cores).collect();
            let first = core / cores_of_cache * cores_of_cache;
            let shared = (0..threads).flat_map(|thread| (first..first + cores_of_cache).map(move |core| core + thread * cores));
            Processor {
                siblings: Some(listed(&siblings)),
                shared: Some(listed(&shared.collect::<Vec<_>>())),
                node: Some(core * nodes / cores),
            }
        };
        machine(&(0..cores * threads).map(processor).collect::<Vec<_>>(), permitted)
    }

    pub(crate) fn all(count: usize) -> Vec<usize> {
        (0..count).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::made_up::{Processor, all, machine, regular};
    use super::*;

    fn cores(topology: &Topology) -> Vec<Vec<usize>> {
        topology.cores().iter().map(|core| core.processors.clone()).collect()
    }

    #[test]
    fn hardware_threads_are_of_one_core() {
        assert_eq!(cores(&regular(2, 1, 2, 1, &all(2))), [[0], [1]]);
        assert_eq!(cores(&regular(4, 2, 4, 1, &all(8))), [[0, 4], [1, 5], [2, 6], [3, 7]]);
        // Unusable processors are left out.
        assert_eq!(cores(&regular(4, 2, 4, 1, &[5, 2, 1])), [vec![1, 5], vec![2]]);
        assert_eq!(cores(&regular(4, 2, 4, 1, &[7])), [[7]]);
    }

    #[test]
    fn cores_come_by_node_and_cache() {
        let topology = regular(96, 1, 12, 2, &all(96));
        assert_eq!(cores(&topology), (0..96).map(|core| vec![core]).collect::<Vec<_>>());
        let places: Vec<_> = topology.cores().iter().map(|core| (core.node, core.cache)).collect();
        assert_eq!((places[11], places[12], places[47], places[48]), ((0, 0), (0, 12), (0, 36), (1, 48)));
        // Neighbouring numbers need not share a cache.
        let processor = |number: usize| Processor {
            siblings: Some(number.to_string()),
            shared: Some(if number.is_multiple_of(2) { "0,2" } else { "1,3" }.to_owned()),
            node: Some(0),
        };
        assert_eq!(cores(&machine(&[0, 1, 2, 3].map(processor), &all(4))), [[0], [2], [1], [3]]);
        let far = |number: usize| Processor { node: Some(1 - number / 2), ..processor(number) };
        assert_eq!(cores(&machine(&[0, 1, 2, 3].map(far), &all(4))), [[2], [3], [0], [1]]);
    }

    #[test]
    fn where_the_kernel_says_nothing_each_processor_is_a_core() {
        let silent = || Processor { siblings: None, shared: None, node: None };
        let topology = machine(&[silent(), silent(), silent()], &[0, 2]);
        assert_eq!(cores(&topology), [[0], [2]]);
        assert!(topology.cores().iter().all(|core| (core.node, core.cache) == (0, 0)));
        let malformed = || Processor { siblings: Some("x".to_owned()), shared: Some("-".to_owned()), node: None };
        assert_eq!(cores(&machine(&[malformed(), malformed()], &all(2))), [[0], [1]]);
        assert_eq!(Topology::read(Path::new("/nowhere"), &[]).core_count(), 0);
    }

    #[test]
    fn this_machine_has_as_many_processors_as_may_be_used() {
        let permitted = permitted().unwrap();
        let mut found: Vec<usize> = Topology::of(&permitted).cores().iter().flat_map(|core| core.processors.clone()).collect();
        found.sort_unstable();
        assert_eq!(found, permitted);
    }

    #[test]
    fn lists_are_those_of_the_kernel() {
        assert_eq!([listed(&[]), listed(&[5]), listed(&[0, 1, 2, 8, 10, 11])], ["", "5", "0-2,8,10-11"]);
    }
}
