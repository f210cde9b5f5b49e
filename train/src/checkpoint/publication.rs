//! The part of a save that touches files: all ranks write, and rank 0 publishes the checkpoint.

use std::path::PathBuf;

use super::directory::{MARK_LENGTH, Unfinished, keep_last, name};
use super::file::{failed, malformed, sync_folder, write_new};
use super::index;
use super::plan::{Plan, file_name};
use crate::agreement::everywhere;
use collectives::Communicator;
use collectives::{Error, Result};

/// The operation in which all ranks fail together, for their errors.
pub(super) const SAVING: &str = "saving a checkpoint";

/// A save on which all ranks have agreed, without the values of tensors.
pub(super) struct Publication {
    pub(super) directory: PathBuf,
    pub(super) step: u64,
    pub(super) keep: Option<usize>,
    /// The header of this rank's file, if this rank has parts to write.
    pub(super) head: Result<Option<Vec<u8>>>,
    /// On rank 0.
    pub(super) plan: Option<Plan>,
}

impl Publication {
    /// Writes the checkpoint, and returns its path. `values` are those that this rank writes. Fails on all ranks if it
    /// fails on one. Collective.
    pub(super) fn publish<B: AsRef<[u8]>>(mut self, comm: &Communicator, values: impl IntoIterator<Item = Result<B>>) -> Result<PathBuf> {
        let begun = self.plan.as_ref().map(|_| Unfinished::begin(&self.directory, self.step)).transpose();
        let begun = everywhere(comm, SAVING, begun)?;
        if let Err(error) = self.fill(comm, begun.as_ref(), values) {
            // Ranks that have not yet noticed a lost or late rank may still write there. The next save removes it.
            let is_everywhere = !(error.is_peer_lost() || error.is_poisoned() || error.is_timeout());
            if let Some(begun) = begun.filter(|_| is_everywhere) {
                begun.discard(&self.directory);
            }
            return Err(error);
        }
        if let (Some(count), 0) = (self.keep, comm.rank()) {
            keep_last(&self.directory, count);
        }
        Ok(self.directory.join(name(self.step)))
    }

    /// Writes this rank's file, and publishes the checkpoint when all have written theirs. `begun` is what rank 0 has
    /// begun.
    fn fill<B: AsRef<[u8]>>(
        &mut self,
        comm: &Communicator,
        begun: Option<&Unfinished>,
        values: impl IntoIterator<Item = Result<B>>,
    ) -> Result<()> {
        let mut mark = [0_u8; MARK_LENGTH];
        if let Some(begun) = begun {
            mark.iter_mut().zip(begun.mark.bytes()).for_each(|(to, from)| *to = from);
        }
        comm.broadcast(&mut mark, 0)?;
        let unfinished = Unfinished::of(self.step, String::from_utf8_lossy(&mark).into_owned());
        everywhere(comm, SAVING, self.write(comm, &unfinished, values))?;
        everywhere(comm, SAVING, begun.map_or(Ok(()), |begun| self.finish(begun)))
    }

    /// Writes this rank's file, if it has parts to write, to the folder that has rank 0's marker.
    fn write<B: AsRef<[u8]>>(
        &mut self,
        comm: &Communicator,
        unfinished: &Unfinished,
        values: impl IntoIterator<Item = Result<B>>,
    ) -> Result<()> {
        unfinished.check(&self.directory)?;
        let Some(head) = std::mem::replace(&mut self.head, Ok(None))? else { return Ok(()) };
        let folder = self.directory.join(&unfinished.folder);
        let path = folder.join(file_name(comm.rank(), comm.world_size()));
        write_new(&path, &head, values)?;
        sync_folder(&folder)
    }

    /// Checks that every rank's file exists, writes the index, and gives the folder its name. For rank 0.
    fn finish(&self, unfinished: &Unfinished) -> Result<()> {
        let Some(plan) = &self.plan else { return Ok(()) };
        let folder = self.directory.join(&unfinished.folder);
        for file in plan.index.files() {
            let path = folder.join(&file.name);
            let length = std::fs::metadata(&path).map_err(failed("looking on rank 0 for", &path))?.len();
            if length != file.bytes {
                return Err(malformed(&path, format!("rank 0 sees {length} bytes, but {} bytes were written", file.bytes)));
            }
        }
        let index = plan.index.encode().map_err(|reason| Error::argument("commit", reason))?;
        write_new::<&[u8]>(&folder.join(index::NAME), &index, [])?;
        unfinished.finish(&self.directory, self.step)
    }
}
