//! Arranges ranks in several dimensions.

use super::agreement::{Listed, agree};
use collectives::Communicator;
use collectives::{Error, Result};

/// A grid of ranks with named dimensions, and a communicator along each dimension. For example, one dimension is
/// data-parallel, and another is tensor-parallel. In another example, one dimension runs over the shards inside a host,
/// and another runs over the replicas on different hosts.
///
/// The last dimension varies fastest, as in torch's `init_device_mesh`. In `[("dp", 2), ("tp", 4)]`, ranks 0 to 3
/// differ only in their `tp` coordinate, and ranks 0 and 4 differ only in their `dp` coordinate.
///
/// ```
/// use collectives_train::Mesh;
/// use collectives::{Communicator, ReduceOp};
///
/// let sums = Communicator::run_local(4, |comm| {
///     let mesh = Mesh::new(comm, &[("dp", 2), ("tp", 2)])?;
///     let (mut along_tp, mut along_dp) = ([comm.rank()].map(|rank| rank as u32), [comm.rank() as u32]);
///     mesh.dimension("tp")?.all_reduce(&mut along_tp, ReduceOp::Sum)?;
///     mesh.dimension("dp")?.all_reduce(&mut along_dp, ReduceOp::Sum)?;
///     Ok((along_tp[0], along_dp[0]))
/// })?;
/// assert_eq!(sums, [(1, 2), (1, 4), (5, 2), (5, 4)]);
/// # Ok::<(), collectives::Error>(())
/// ```
#[derive(Debug, Clone)]
#[doc(alias("init_device_mesh", "DeviceMesh", "MPI_Cart_create"))]
pub struct Mesh {
    comm: Communicator,
    dimensions: Vec<Dimension>,
}

#[derive(Debug, Clone)]
struct Dimension {
    name: String,
    size: usize,
    /// This rank's coordinate along it.
    coordinate: usize,
    /// The ranks whose coordinates differ from this rank's only in this dimension.
    slice: Communicator,
}

const NEW: &str = "Mesh::new";
const BY_HOST: &str = "Mesh::by_host";

impl Mesh {
    /// Arranges all ranks. Makes one call of [`Communicator::split`] for each dimension. Collective.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if the product of the sizes is not the world size, or a size is 0.
    /// - `InvalidArgument` if a name is empty or repeated.
    /// - `Mismatch` if ranks pass different names or sizes.
    /// - The errors of [`Communicator::split`].
    pub fn new(comm: &Communicator, dimensions: &[(&str, usize)]) -> Result<Self> {
        agree(comm, NEW, &listed(dimensions.iter().map(|(name, size)| format!("dimension {name:?} of {size}"))), "")?;
        // Errors of this check are the same on every rank.
        check(comm.world_size(), dimensions)?;
        let mut made = Vec::with_capacity(dimensions.len());
        let mut stride = comm.world_size();
        for (name, size) in dimensions {
            stride /= size;
            let coordinate = comm.rank() / stride % size;
            let slice = slice_of(comm, comm.rank() - coordinate * stride, coordinate)?;
            made.push(Dimension { name: (*name).to_owned(), size: *size, coordinate, slice });
        }
        Ok(Self { comm: comm.clone(), dimensions: made })
    }

    /// Arranges ranks by host: the dimension `outer` runs over the hosts, and `inner` runs over the ranks of each host.
    /// The ranks of one host have shared memory or fast links, so shard along `inner`, and replicate along `outer`.
    /// Collective.
    ///
    /// # Errors
    ///
    /// - `Unsupported` on every rank if hosts have different numbers of ranks, or if the ranks of a host are not
    ///   numbered consecutively.
    /// - The errors of [`new`](Self::new).
    pub fn by_host(comm: &Communicator, outer: &str, inner: &str) -> Result<Self> {
        let mut all = vec![[0_u64; 2]; comm.world_size()];
        comm.all_gather_into(&[[comm.local_rank() as u64, comm.local_world_size() as u64]], &mut all)?;
        let each = all[0][1];
        if let Some(rank) = all.iter().position(|[_, size]| *size != each) {
            let reason = format!(
                "the host of rank 0 has {each} ranks, but the host of rank {rank} has {}: \
                 a mesh by host needs the same number of ranks on every host",
                all[rank][1]
            );
            return Err(Error::unsupported(BY_HOST, reason));
        }
        if let Some(rank) = all.iter().enumerate().position(|(rank, [local, _])| *local != rank as u64 % each) {
            let reason = format!(
                "rank {rank} is number {} on its host, counted from 0, but number {} was expected: \
                 the ranks of a host must be consecutive, as launchers number them by default",
                all[rank][0],
                rank as u64 % each
            );
            return Err(Error::unsupported(BY_HOST, reason));
        }
        let each = each as usize;
        Self::new(comm, &[(outer, comm.world_size() / each), (inner, each)])
    }

    /// Returns the communicator along a dimension. The ranks of this communicator have the same coordinates as this
    /// rank in all other dimensions. The ranks are in the order of their coordinates along this dimension.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if there is no such dimension.
    pub fn dimension(&self, name: &str) -> Result<&Communicator> {
        self.find("Mesh::dimension", name).map(|found| &self.dimensions[found].slice)
    }

    /// Returns this rank's coordinate along a dimension.
    ///
    /// # Errors
    ///
    /// The errors of [`dimension`](Self::dimension).
    pub fn coordinate(&self, name: &str) -> Result<usize> {
        self.find("Mesh::coordinate", name).map(|found| self.dimensions[found].coordinate)
    }

    /// Returns the number of ranks along a dimension.
    ///
    /// # Errors
    ///
    /// The errors of [`dimension`](Self::dimension).
    pub fn size(&self, name: &str) -> Result<usize> {
        self.find("Mesh::size", name).map(|found| self.dimensions[found].size)
    }

    /// Returns the dimensions with their sizes, in the order of [`new`](Self::new): the last dimension varies fastest.
    pub fn dimensions(&self) -> impl ExactSizeIterator<Item = (&str, usize)> {
        self.dimensions.iter().map(|dimension| (dimension.name.as_str(), dimension.size))
    }

    /// Returns the communicator of all ranks.
    #[must_use]
    pub fn whole(&self) -> &Communicator {
        &self.comm
    }

    /// Creates one communicator along several dimensions, for example to average gradients over both a data-parallel
    /// and a context-parallel dimension. The ranks of the new communicator are in the order of the mesh. The order of
    /// `names` does not change the order of the ranks. Collective over all ranks of the mesh.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if a dimension does not exist, a name is repeated, or no name is given.
    /// - `Mismatch` if ranks pass different names, or the same names in different orders.
    /// - The errors of [`Communicator::split`].
    pub fn flatten(&self, names: &[&str]) -> Result<Communicator> {
        const CALL: &str = "Mesh::flatten";
        agree(&self.comm, CALL, &listed(names.iter().map(|name| format!("dimension {name:?}"))), "")?;
        let mut chosen = names.iter().map(|name| self.find(CALL, name)).collect::<Result<Vec<_>>>()?;
        chosen.sort_unstable();
        if chosen.is_empty() || chosen.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(Error::argument(CALL, format!("{names:?}: expected at least one dimension, and each dimension only once")));
        }
        let (mut color, mut key) = (0, 0);
        for (index, dimension) in self.dimensions.iter().enumerate() {
            let place = if chosen.contains(&index) { &mut key } else { &mut color };
            *place = *place * dimension.size + dimension.coordinate;
        }
        slice_of(&self.comm, color, key)
    }

    fn find(&self, call: &'static str, name: &str) -> Result<usize> {
        self.dimensions.iter().position(|dimension| dimension.name == name).ok_or_else(|| {
            let names: Vec<&str> = self.dimensions.iter().map(|dimension| dimension.name.as_str()).collect();
            Error::argument(call, format!("there is no dimension {name:?} in {names:?}"))
        })
    }
}

fn listed(lines: impl Iterator<Item = String>) -> Listed {
    Listed { noun: "dimensions", lines: lines.collect() }
}

/// Splits off the ranks of one colour.
fn slice_of(comm: &Communicator, color: usize, key: usize) -> Result<Communicator> {
    let slice = comm.split(Some(color as u32), key as i64)?;
    slice.ok_or_else(|| Error::argument(NEW, "a split left this rank out".to_owned()))
}

fn check(world_size: usize, dimensions: &[(&str, usize)]) -> Result<()> {
    let product = dimensions.iter().try_fold(1_usize, |product, (_, size)| product.checked_mul(*size));
    if product != Some(world_size) {
        return Err(Error::argument(NEW, format!("the product of the sizes in {dimensions:?} is not the world size {world_size}")));
    }
    let is_again = |index: usize| dimensions[..index].iter().any(|(name, _)| *name == dimensions[index].0);
    match (0..dimensions.len()).find(|index| dimensions[*index].0.is_empty() || is_again(*index)) {
        Some(index) => Err(Error::argument(NEW, format!("the name {:?} is empty or appears twice", dimensions[index].0))),
        None => Ok(()),
    }
}
