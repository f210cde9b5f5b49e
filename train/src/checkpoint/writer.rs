//! Saving: every rank declares what it holds, and rank 0 divides the work. Then `publication.rs` writes the files.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;

use super::directory::named;
use super::index;
use super::piece::Piece;
use super::plan::{Declaration, Declared, Plan, head, plan};
use super::publication::{Publication, SAVING};
use super::values::Values;
use crate::agreement::everywhere;
use collectives::Communicator;
use collectives::Element;
use collectives::{Error, Result};

/// Saves a checkpoint: takes parts of tensors from every rank, and writes them at [`commit`](Self::commit).
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// # let directory = folder.path();
/// use collectives::Communicator;
/// use collectives_train::checkpoint::{Checkpoint, Piece, Writer};
///
/// Communicator::run_local(3, |comm| {
///     let bias = [0.5_f32; 2]; // the same on every rank: one of them writes it
///     let columns = Piece::part(1, 8, comm.rank(), comm.world_size());
///     let weight = vec![comm.rank() as f32; columns.len(&[4, 8])?];
///     let mut writer = Writer::new(comm, directory);
///     writer.tensor("bias", &[2], Piece::Whole, &bias);
///     writer.tensor("weight", &[4, 8], columns, &weight);
///     writer.metadata("learning rate", "0.1").keep(3);
///     writer.commit(42)?;
///     Ok(())
/// })?;
/// let checkpoint = Checkpoint::latest(directory)?.expect("one was saved");
/// assert_eq!(checkpoint.step(), Some(42));
/// let row: Vec<f32> = checkpoint.read_vec("weight", &[4, 8], Piece::part(0, 4, 0, 4))?;
/// assert_eq!(row, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The writer borrows the elements, and does not copy them. If an argument is invalid, the writer keeps the error, and
/// `commit` fails on every rank. So no rank waits for a rank that failed earlier.
///
/// To train while the files are written, pass the writer to [`Saver::save`](super::Saver::save) instead of calling
/// `commit`.
pub struct Writer<'a> {
    comm: &'a Communicator,
    directory: PathBuf,
    declaration: Declaration,
    /// The elements of each part.
    values: Vec<Values<'a>>,
    /// The names of sharded parameters, which must not be used for anything else.
    reserved: BTreeSet<String>,
    keep: Option<usize>,
    mistake: Option<Error>,
}

/// Returns the error for a name that is already in use.
fn taken(name: &str) -> Error {
    let reason = format!("tensor {name:?}: a sharded parameter and another tensor have this name; give each its own prefix");
    Error::argument("Writer::shares", reason)
}

impl<'a> Writer<'a> {
    /// Creates a writer that saves a checkpoint in `directory`. This folder contains all checkpoints of a run. Every
    /// rank must pass the same folder, on a file system that all ranks share. This call is local and writes nothing:
    /// `commit` creates the folder if it does not exist.
    pub fn new(comm: &'a Communicator, directory: impl Into<PathBuf>) -> Self {
        let (directory, declaration) = (named(&directory.into()).to_owned(), Declaration::default());
        Self { comm, directory, declaration, values: Vec::new(), reserved: BTreeSet::new(), keep: None, mistake: None }
    }

    /// Returns the communicator whose ranks save the checkpoint.
    #[must_use]
    pub fn communicator(&self) -> &'a Communicator {
        self.comm
    }

    /// Adds this rank's piece of a tensor. `values` are the elements of the piece, in row-major order. `shape` is the
    /// shape of the whole tensor, and must be the same on every rank.
    ///
    /// All ranks' pieces together must be the whole tensor. Two ranks may have the same piece, but different pieces
    /// must not overlap. If several ranks have the same piece, its values must be the same on all these ranks. Only one
    /// of these ranks writes the piece. No rank compares the values. All pieces of a tensor must be flat ranges, or all
    /// must be ranges of the same dimension. A range of rows is also a flat range.
    ///
    /// This call returns no error. [`commit`](Self::commit) returns `InvalidArgument` in these cases:
    ///
    /// - The tensor has no such piece.
    /// - `values` does not have the piece's length.
    /// - The name is empty, contains a `#`, or is `__metadata__`.
    /// - The name is the name of a parameter that [`shares`](Self::shares) saves.
    pub fn tensor<T: Element>(&mut self, name: &str, shape: &[usize], piece: Piece, values: &'a [T]) -> &mut Self {
        self.check_name(name);
        self.add(name, shape, piece, values)
    }

    /// Adds this rank's piece of a tensor, like [`tensor`](Self::tensor), but only a rank that writes the piece obtains
    /// the elements: it calls `read` once, during the commit or in [`Saver::save`](super::Saver::save). For example,
    /// `read` copies a tensor from a GPU. If all ranks have the same tensor, one rank copies it.
    ///
    /// ```
    /// # let folder = tempfile::tempdir()?;
    /// # let directory = folder.path();
    /// use collectives::Communicator;
    /// use collectives_train::checkpoint::{Checkpoint, Piece, Writer};
    ///
    /// Communicator::run_local(2, |comm| {
    ///     let mut writer = Writer::new(comm, directory);
    ///     writer.tensor_with("bias", &[3], Piece::Whole, || Ok(vec![0.5_f32; 3])); // one of the ranks calls it
    ///     writer.commit(1).map(drop)
    /// })?;
    /// let checkpoint = Checkpoint::latest(directory)?.expect("one was saved");
    /// assert_eq!(checkpoint.read_vec::<f32>("bias", &[3], Piece::Whole)?, [0.5; 3]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// This call returns no error. [`commit`](Self::commit) fails if `read` fails, panics, or returns a wrong number of
    /// elements, and in the cases that [`tensor`](Self::tensor) lists.
    pub fn tensor_with<T: Element>(
        &mut self,
        name: &str,
        shape: &[usize],
        piece: Piece,
        read: impl FnOnce() -> Result<Vec<T>> + Send + 'a,
    ) -> &mut Self {
        self.check_name(name);
        match piece.extent(shape).and_then(|extent| Ok((Declared::new(name, T::ELEMENT_TYPE, shape, piece)?, extent.len()))) {
            Ok((declared, len)) => self.declare(declared, Values::read_with(name, len, read)),
            Err(reason) => self.refuse(Error::argument("Writer::tensor_with", format!("tensor {name:?}: {reason}"))),
        }
        self
    }

    /// Refuses the name of a sharded parameter.
    fn check_name(&mut self, name: &str) {
        if self.reserved.contains(name) {
            self.refuse(taken(name));
        }
    }

    /// Reserves names for sharded parameters, and refuses those already in use.
    pub(super) fn reserve(&mut self, names: impl IntoIterator<Item = String>) {
        let mut had: BTreeSet<&str> = self.declaration.tensors.iter().map(|declared| &*declared.name).collect();
        let mut names: BTreeSet<String> = names.into_iter().collect();
        had.retain(|name| names.contains(*name));
        if let Some(name) = had.first() {
            let mistake = taken(name);
            self.refuse(mistake);
        }
        self.reserved.append(&mut names);
    }

    /// Adds this rank's piece of a tensor, even if its name is reserved.
    pub(super) fn add<T: Element>(&mut self, name: &str, shape: &[usize], piece: Piece, values: &'a [T]) -> &mut Self {
        let declared = piece.extent(shape).and_then(|extent| match extent.len() == values.len() {
            true => Declared::new(name, T::ELEMENT_TYPE, shape, piece),
            false => Err(format!("{} elements were passed, but the part {piece} of {shape:?} has {}", values.len(), extent.len())),
        });
        match declared {
            Ok(declared) => self.declare(declared, Values::borrowed(values)),
            Err(reason) => self.refuse(Error::argument("Writer::tensor", format!("tensor {name:?}: {reason}"))),
        }
        self
    }

    fn declare(&mut self, declared: Declared, values: Values<'a>) {
        self.declaration.tensors.push(declared);
        self.values.push(values);
    }

    /// Stores a key-value pair of strings with the checkpoint. Several ranks may store the same key, but only with the
    /// same value.
    pub fn metadata(&mut self, key: impl Into<String>, value: impl Into<String>) -> &mut Self {
        self.declaration.metadata.insert(key.into(), value.into());
        self
    }

    /// Sets how many checkpoints to keep. After this checkpoint is saved, only the last `count` checkpoints are kept,
    /// including this one. By default, all checkpoints are kept. Only the `count` that rank 0 passes is used.
    pub fn keep(&mut self, count: usize) -> &mut Self {
        if count == 0 {
            self.refuse(Error::argument(
                "Writer::keep",
                "0 checkpoints cannot be kept, because the new checkpoint is always kept: pass 1 or more",
            ));
        }
        self.keep = Some(count);
        self
    }

    /// Makes [`commit`](Self::commit) fail on every rank, with this error on this rank. If this method is called
    /// several times, the first error counts. Code that adds the tensors of another crate can call this method for a
    /// tensor that it cannot add. If this code returned an error instead, the other ranks would wait in `commit`.
    pub fn refuse(&mut self, mistake: Error) {
        self.mistake.get_or_insert(mistake);
    }

    /// Writes the checkpoint of a step, and returns the checkpoint's path. The step must not be before the latest step
    /// in the folder. Collective.
    ///
    /// If the latest checkpoint in the folder has the same step, the new checkpoint replaces it. So a run can always
    /// save at its end, even if it has just saved the same step. If a reader has the replaced checkpoint open, the
    /// reader either reads that checkpoint to the end or gets an error about a file.
    ///
    /// When every rank's file is written and synced, one rename publishes the checkpoint. Until then, the previous
    /// checkpoint remains the latest, even if a rank fails or is killed. The next save removes the files that an
    /// interrupted save left. So only one group of ranks may save to a folder at a time. If a second group begins to
    /// save before the first group has finished, the second group removes the files of the first group. The save of the
    /// first group then fails. If files or an old checkpoint cannot be removed, the save does not fail, and a `tracing`
    /// event reports the error.
    ///
    /// **Cost**: each element is written once, by one rank. All ranks wait for the slowest rank, but at most for the
    /// communicator's timeout. Every rank sends the description of each piece to rank 0: the tensor's name and shape,
    /// and the range. A description has about 100 B.
    ///
    /// # Errors
    ///
    /// If one rank fails, all fail. The failing rank gets its own error, and the others get an `Io` that names the
    /// failing rank and the reason.
    ///
    /// - `Io` if a file cannot be written or synced, or if a rank does not see rank 0's files.
    /// - `InvalidArgument` if an earlier call on this writer, such as `tensor`, had invalid arguments. Those calls
    ///   return no error themselves.
    /// - `InvalidArgument` if the pieces of all ranks together are not whole tensors.
    /// - `InvalidArgument` if the step is before the latest step in the folder.
    /// - `Mismatch` if ranks pass different steps.
    /// - The errors common to all collectives. If a rank dies after all files were written, the checkpoint may exist in
    ///   spite of the error. [`Checkpoint::latest`](super::Checkpoint::latest) then finds the checkpoint.
    pub fn commit(self, step: u64) -> Result<PathBuf> {
        same_call(self.comm, step, 0)?;
        let comm = self.comm;
        let (publication, values) = self.agree(step)?;
        publication.publish(comm, values.into_iter().map(Values::into_bytes))
    }

    /// Decides with the other ranks what each rank writes. Returns the values that this rank writes, in the order of
    /// its file. Writes nothing. Fails on all ranks if it fails on one. Collective.
    pub(super) fn agree(mut self, step: u64) -> Result<(Publication, Vec<Values<'a>>)> {
        everywhere(self.comm, SAVING, self.mistake.take().map_or(Ok(()), Err))?;
        let all = self.gather()?;
        let plan = all.map(|(all, counts)| plan_of(self.comm, &all, &counts, step)).transpose();
        let plan = everywhere(self.comm, SAVING, plan)?;
        let numbers = self.hand_out(plan.as_ref())?;
        let head = match numbers.is_empty() {
            true => Ok(None),
            false => head(&self.declaration, &numbers, step).map(Some).map_err(|reason| Error::argument("commit", reason)),
        };
        let mut values: Vec<Option<Values<'a>>> = self.values.into_iter().map(Some).collect();
        let values = numbers.iter().filter_map(|number| values.get_mut(*number)?.take()).collect();
        Ok((Publication { directory: self.directory, step, keep: self.keep, head, plan }, values))
    }

    /// Collects the declarations of all ranks, concatenated, with their lengths, on rank 0.
    fn gather(&self) -> Result<Option<(Vec<u8>, Vec<usize>)>> {
        let comm = self.comm;
        let mine = serde_json::to_vec(&self.declaration).map_err(|error| Error::argument("commit", error.to_string()));
        let mine = everywhere(comm, SAVING, mine)?;
        let mut lengths = vec![0_u64; comm.world_size()];
        comm.all_gather_into(&[mine.len() as u64], &mut lengths)?;
        if let Some(rank) = lengths.iter().position(|length| *length > index::LONGEST) {
            let reason = format!("rank {rank} needs {} bytes to describe its tensors; the limit is {}", lengths[rank], index::LONGEST);
            return Err(Error::argument("commit", reason));
        }
        let counts: Vec<usize> = lengths.iter().map(|length| *length as usize).collect();
        if comm.rank() != 0 {
            comm.gather_v_into::<_, Vec<u8>>(&mine, None, 0)?;
            return Ok(None);
        }
        let mut all = vec![0; counts.iter().sum()];
        comm.gather_v_into(&mine, Some((&mut all, &counts)), 0)?;
        Ok(Some((all, counts)))
    }

    /// Sends to every rank the numbers of the parts that it writes.
    fn hand_out(&self, plan: Option<&Plan>) -> Result<Vec<usize>> {
        let comm = self.comm;
        let counts: Option<Vec<usize>> = plan.map(|plan| plan.written.iter().map(Vec::len).collect());
        let told: Option<Vec<u64>> = counts.as_ref().map(|counts| counts.iter().map(|count| *count as u64).collect());
        let mut count = [0_u64];
        comm.scatter_into(told.as_ref(), &mut count, 0)?;
        // Each part is written once.
        let count = (count[0] as usize).min(self.values.len());
        let all: Option<Vec<u64>> = plan.map(|plan| plan.written.concat().iter().map(|number| *number as u64).collect());
        let mut numbers = vec![0_u64; count];
        comm.scatter_v_into(all.as_ref().zip(counts.as_deref()), &mut numbers, 0)?;
        Ok(numbers.into_iter().map(|number| number as usize).collect())
    }
}

/// Returns the plan for the declarations of all ranks. For rank 0.
fn plan_of(comm: &Communicator, mut told: &[u8], counts: &[usize], step: u64) -> Result<Plan> {
    let mut all: Vec<Declaration> = Vec::new();
    for (peer, count) in comm.peers().iter().zip(counts) {
        let (theirs, behind) = told.split_at(*count);
        let wrong = |error: serde_json::Error| Error::Protocol { with: peer.to_string(), reason: error.to_string() };
        all.push(serde_json::from_slice(theirs).map_err(wrong)?);
        told = behind;
    }
    plan(&all, step).map_err(|reason| Error::argument("commit", reason))
}

/// Fails on all ranks if they save different steps, or with different savers. `saver` is 0 for a commit.
pub(super) fn same_call(comm: &Communicator, step: u64, saver: u64) -> Result<()> {
    let mut calls = vec![0; 2 * comm.world_size()];
    comm.all_gather_into(&[step, saver], &mut calls)?;
    let calls: Vec<&[u64]> = calls.chunks(2).collect();
    let Some(other) = calls.iter().position(|theirs| *theirs != calls[0]) else { return Ok(()) };
    let call = |rank: usize| match calls[rank] {
        [step, 0] => format!("Writer::commit({step})"),
        [step, saver] => format!("Saver::save({step}) of saver {saver:016x}"),
        _ => String::new(),
    };
    let peer = |rank: usize| comm.peers()[rank].clone();
    Err(Error::Mismatch { first: peer(0), first_call: call(0), second: peer(other), second_call: call(other) })
}

impl fmt::Debug for Writer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Writer({} parts for {:?} on {:?})", self.values.len(), self.directory, self.comm)
    }
}
