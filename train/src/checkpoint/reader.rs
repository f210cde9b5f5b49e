//! Loading: a rank asks for parts of tensors, which are assembled from the files that hold them.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::batches::{Batch, Limits, read_all};
use super::bytes::copy_from_bytes;
use super::contents::{Contents, Place, Tensor};
use super::directory;
use super::file::{self, Folder, HeadBytes, failed, malformed};
use super::foreign::{self, WeightMap};
use super::header::Header;
use super::index;
use super::piece::{Extent, Piece, runs};
use crate::agreement::everywhere;
use crate::tuning::checkpoint::{GAP_BYTES, READ_BYTES};
use collectives::Communicator;
use collectives::{DType, Element};
use collectives::{Error, Result};

/// An opened checkpoint, or opened safetensors files of another program.
///
/// Ranks read tensors independently of each other, so any number of ranks can load any tensors. The index is read when
/// the checkpoint is opened. The header of a file is read when the header or the data are first needed. The SHA-256 of
/// each header is compared with the SHA-256 in the index. The data have no checksum.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// # let directory = folder.path();
/// use collectives::Communicator;
/// use collectives_train::checkpoint::{Checkpoint, Piece, Writer};
///
/// Communicator::run_local(2, |comm| {
///     let half = [comm.rank() as f64; 3];
///     let mut writer = Writer::new(comm, directory);
///     writer.tensor("weight", &[6], Piece::part(0, 6, comm.rank(), 2), &half);
///     writer.commit(1).map(drop)
/// })?;
/// let loaded = Communicator::run_local(3, |comm| {
///     let Some(checkpoint) = Checkpoint::resume(comm, directory)? else { return Ok(None) };
///     let mut third = [0.0_f64; 2];
///     checkpoint.read("weight", &[6], Piece::part(0, 6, comm.rank(), 3), &mut third)?;
///     Ok(Some(third))
/// })?;
/// assert_eq!(loaded, [Some([0.0, 0.0]), Some([0.0, 1.0]), Some([1.0, 1.0])]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Checkpoint {
    folder: Folder,
    contents: Contents,
    /// The offset of each file's data, and its header, once it was read.
    headers: Vec<OnceLock<(u64, Header)>>,
    head_bytes: HeadBytes,
}

impl Checkpoint {
    /// Returns the steps of all checkpoints in a folder, in ascending order. Returns no steps if the folder does not
    /// exist.
    ///
    /// # Errors
    ///
    /// `Io` if the folder cannot be listed.
    pub fn steps(directory: impl AsRef<Path>) -> Result<Vec<u64>> {
        directory::steps(directory::named(directory.as_ref()))
    }

    /// Opens the latest checkpoint in a folder. Returns `None` if the folder has no checkpoint. This call is local:
    /// ranks that start together should call [`resume`](Self::resume) instead.
    ///
    /// # Errors
    ///
    /// The errors of [`open`](Self::open).
    pub fn latest(directory: impl AsRef<Path>) -> Result<Option<Self>> {
        let directory = directory::named(directory.as_ref());
        let latest = directory::steps(directory)?.last().copied();
        latest.map(|step| Self::open(directory.join(directory::name(step)))).transpose()
    }

    /// Opens the same checkpoint on every rank: the latest checkpoint that rank 0 sees. Returns `None` on all ranks if
    /// rank 0 sees no checkpoint. Collective.
    ///
    /// # Errors
    ///
    /// The errors of [`open`](Self::open), and the errors common to all collectives. If one rank fails, all fail: the
    /// failing rank gets its own error, and the others get an error that names the failing rank and the reason.
    pub fn resume(comm: &Communicator, directory: impl AsRef<Path>) -> Result<Option<Self>> {
        const RESUMING: &str = "opening the latest checkpoint";
        let directory = directory::named(directory.as_ref());
        let listed = if comm.rank() == 0 { directory::steps(directory) } else { Ok(Vec::new()) };
        let latest = everywhere(comm, RESUMING, listed)?.last().copied();
        let mut told = [latest.is_some().into(), latest.unwrap_or_default()];
        comm.broadcast(&mut told, 0)?;
        let [1, step] = told else { return Ok(None) };
        everywhere(comm, RESUMING, Self::open(directory.join(directory::name(step)))).map(Some)
    }

    /// Opens a checkpoint's folder (`…/step-00000042`), a safetensors file, or a model in several files. If the model
    /// has several files, `path` is the path of their index (`model.safetensors.index.json`) or of their folder.
    ///
    /// # Errors
    ///
    /// `Io` if a file does not exist or cannot be read. The error names the file. The error's kind is `InvalidData` if
    /// the file's contents are invalid, for example in these cases:
    ///
    /// - The parts of a tensor in the index overlap, or they leave out elements of the tensor.
    /// - A header is longer than the file.
    /// - A name occurs twice.
    /// - A tensor has more than 64 dimensions.
    /// - A header is larger than 100 MB, or all headers together are larger than 256 MiB.
    /// - The index is larger than 256 MiB.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let is_index = |path: &Path| path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(foreign::INDEX_ENDING));
        let inside = [index::NAME, foreign::INDEX, foreign::FILE].map(|name| path.join(name));
        match &inside {
            _ if !path.is_dir() && is_index(path) => Self::sharded(path),
            _ if !path.is_dir() => Self::single(path),
            [own, ..] if own.exists() => Self::own(path),
            [_, index, _] if index.exists() => Self::sharded(index),
            [.., file] if file.exists() => Self::single(file),
            _ => Err(malformed(path, format!("the folder contains no {}, {} or {}", index::NAME, foreign::INDEX, foreign::FILE))),
        }
    }

    /// Opens a checkpoint of this crate.
    fn own(path: &Path) -> Result<Self> {
        let folder = Folder::open(directory::named(path))?;
        let json = folder.read_all(index::NAME, index::LONGEST)?;
        let contents = index::parse(&json).map_err(|reason| malformed(&folder.join(index::NAME), reason))?;
        let headers = contents.files.iter().map(|_| OnceLock::new()).collect();
        Ok(Self { folder, contents, headers, head_bytes: HeadBytes::default() })
    }

    /// Opens one safetensors file.
    fn single(path: &Path) -> Result<Self> {
        let mut opened = Self::empty(path)?;
        let name = file_name(path)?;
        opened.add(name.to_owned(), |_| true)?;
        if let Some((_, header)) = opened.headers.first().and_then(OnceLock::get) {
            opened.contents.metadata = header.metadata.clone();
        }
        Ok(opened)
    }

    /// Opens several safetensors files by their index.
    fn sharded(path: &Path) -> Result<Self> {
        let mut opened = Self::empty(path)?;
        let json = opened.folder.read_all(file_name(path)?, index::LONGEST)?;
        let map = WeightMap::parse(&json).map_err(|reason| malformed(path, reason))?;
        opened.contents.metadata = map.metadata();
        for name in map.files() {
            opened.add(name.clone(), |tensor| map.has(tensor, &name))?;
        }
        match map.missing(&opened.contents.tensors) {
            Some((tensor, file)) => Err(malformed(
                &opened.folder.join(file),
                format!("the file does not contain tensor {tensor:?}, although {path:?} lists the tensor for this file"),
            )),
            None => Ok(opened),
        }
    }

    /// Creates an empty checkpoint in the folder of a file.
    fn empty(path: &Path) -> Result<Self> {
        let folder = Folder::open(directory::named(path.parent().unwrap_or(Path::new(""))))?;
        Ok(Self { folder, contents: Contents::default(), headers: Vec::new(), head_bytes: HeadBytes::default() })
    }

    /// Adds a safetensors file, and those of its tensors that are wanted.
    fn add(&mut self, name: String, wanted: impl Fn(&str) -> bool) -> Result<()> {
        let path = self.folder.join(&name);
        let entry = super::contents::FileEntry { name: name.clone(), expected: None };
        let (begin, header) = file::read_header(&self.folder, &entry, &self.head_bytes)?;
        foreign::add(&mut self.contents, name, &header, wanted).map_err(|reason| malformed(&path, reason))?;
        self.headers.push(OnceLock::from((begin, header)));
        Ok(())
    }

    /// Returns the step at which the checkpoint was saved, or `None` for files of other programs.
    #[must_use]
    pub fn step(&self) -> Option<u64> {
        self.contents.step
    }

    /// Returns the number of ranks that saved the checkpoint, or `None` for files of other programs.
    #[must_use]
    pub fn world_size(&self) -> Option<usize> {
        self.contents.world_size
    }

    /// Returns the metadata that [`Writer::metadata`](super::Writer::metadata) stored with the tensors, or the metadata
    /// in files of other programs.
    #[must_use]
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.contents.metadata
    }

    /// Returns the names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.contents.tensors.keys().map(String::as_str)
    }

    /// Returns the type of a tensor's elements.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if there is no such tensor, and `Unsupported` if the tensor's type is not a [`DType`].
    pub fn dtype(&self, name: &str) -> Result<DType> {
        let unknown =
            |dtype: String| Error::unsupported(self.said(name, &format!("of type {dtype}")), "collectives has no such element type");
        self.tensor("Checkpoint::dtype", name)?.dtype.clone().map_err(unknown)
    }

    /// Returns the shape of a tensor.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if there is no such tensor.
    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        Ok(&self.tensor("Checkpoint::shape", name)?.shape)
    }

    /// Reads a part of a tensor into `values`, with elements in row-major order. `shape` is the shape of the whole
    /// tensor. Local.
    ///
    /// **Cost**: the call reads the bytes of the part, from the files that contain them. If two needed ranges of a file
    /// are less than 4 KiB apart, the call also reads the bytes between these ranges. The call needs 1 MiB of memory,
    /// plus the memory for the headers of the files that contain the part.
    ///
    /// # Errors
    ///
    /// The call returns `InvalidArgument`, and leaves `values` unchanged, in these cases:
    ///
    /// - The tensor does not exist, or has another type or shape.
    /// - The tensor has no such part.
    /// - `values` does not have the part's length.
    ///
    /// `Io` if a file cannot be read. The error's kind is `InvalidData` if the file does not match the index, or if a
    /// `bool` in the file is neither 0 nor 1. After an `Io` error, `values` may be partly overwritten.
    pub fn read<T: Element>(&self, name: &str, shape: &[usize], piece: Piece, values: &mut [T]) -> Result<()> {
        let (tensor, extent) = self.part::<T>(name, shape, &piece)?;
        if extent.len() != values.len() {
            let reason = format!("the part {piece} of {shape:?} has {} elements, but there is room for {}", extent.len(), values.len());
            return Err(Error::argument("Checkpoint::read", self.said(name, &reason)));
        }
        let begins = self.begins(name, tensor, &extent)?;
        let (mut bytes, mut open): (Vec<u8>, Option<(usize, File)>) = (Vec::new(), None);
        let limits = Limits { most: (READ_BYTES / size_of::<T>()).max(1), gap: GAP_BYTES / size_of::<T>() };
        read_all(runs(&extent, &tensor.extents, limits.most), begins.len(), limits, |batch| {
            let file = tensor.places[batch.source].file;
            let path = self.path(file);
            let doing = |error| failed(&format!("reading tensor {name:?} from"), &path)(error);
            let reading = match &open {
                Some((number, reading)) if *number == file => reading,
                _ => &open.insert((file, self.folder.file(&self.contents.files[file].name)?.0)).1,
            };
            bytes.resize((batch.end - batch.start) * size_of::<T>(), 0);
            let begin = begins[batch.source] + (batch.start * size_of::<T>()) as u64;
            reading.read_exact_at(&mut bytes, begin).map_err(doing)?;
            let is_copied = copied(batch, &bytes, values);
            is_copied.then_some(()).ok_or_else(|| malformed(&path, format!("tensor {name:?} has a bool that is neither 0 nor 1")))
        })
    }

    /// Reads a part of a tensor into a new vector, like [`read`](Self::read).
    ///
    /// # Errors
    ///
    /// The errors of [`read`](Self::read), and `Io` of kind `OutOfMemory` if there is not enough memory for the vector.
    pub fn read_vec<T: Element>(&self, name: &str, shape: &[usize], piece: Piece) -> Result<Vec<T>> {
        let (tensor, extent) = self.part::<T>(name, shape, &piece)?;
        // Nothing is allocated before the files are known to have that much data.
        self.begins(name, tensor, &extent)?;
        let mut values = Vec::new();
        let bytes = extent.len().saturating_mul(size_of::<T>());
        let no_room = |_| Error::io(self.said(name, &format!("allocating {bytes} B")), io::Error::from(ErrorKind::OutOfMemory));
        values.try_reserve_exact(extent.len()).map_err(no_room)?;
        values.resize(extent.len(), T::default());
        self.read(name, shape, piece, &mut values)?;
        Ok(values)
    }

    /// Compares the length and header of every file, and the type and shape of every part, with the index. Reads no
    /// elements of tensors.
    ///
    /// # Errors
    ///
    /// `Io` if a file cannot be read. The error's kind is `InvalidData` if a file does not match the index.
    pub fn check(&self) -> Result<()> {
        (0..self.headers.len()).try_for_each(|file| self.header(file).map(drop))?;
        let places = self.contents.tensors.iter().flat_map(|(name, tensor)| tensor.places.iter().map(move |place| (name, tensor, place)));
        places.map(|(name, tensor, place)| self.begin(name, tensor, place)).try_for_each(|begin| begin.map(drop))
    }

    /// Returns a part of a tensor, if the tensor exists and has this type and this shape.
    fn part<T: Element>(&self, name: &str, shape: &[usize], piece: &Piece) -> Result<(&Tensor, Extent)> {
        let tensor = self.tensor("Checkpoint::read", name)?;
        let refused = |reason: String| Error::argument("Checkpoint::read", self.said(name, &reason));
        let dtype = self.dtype(name)?;
        if (dtype, shape) != (T::ELEMENT_TYPE, &*tensor.shape) {
            return Err(refused(format!("it is {dtype}{:?}, but {}{shape:?} was requested", tensor.shape, T::ELEMENT_TYPE)));
        }
        Ok((tensor, piece.extent(shape).map_err(refused)?))
    }

    fn tensor(&self, call: &'static str, name: &str) -> Result<&Tensor> {
        self.contents.tensors.get(name).ok_or_else(|| Error::argument(call, self.said(name, "it does not exist")))
    }

    /// Describes a tensor and the files that hold it.
    fn said(&self, name: &str, what: &str) -> String {
        let files = self.contents.tensors.get(name).map_or(&[][..], |tensor| &tensor.places);
        let place = match (files, &*self.contents.files) {
            ([only], _) => self.path(only.file),
            ([], [only]) => self.folder.join(&only.name),
            _ => self.folder.path().to_owned(),
        };
        format!("tensor {name:?} of {place:?}: {what}")
    }

    fn path(&self, file: usize) -> PathBuf {
        self.folder.join(&self.contents.files[file].name)
    }

    /// Returns the offset of a file's data, and its header.
    fn header(&self, file: usize) -> Result<&(u64, Header)> {
        if let Some(header) = self.headers[file].get() {
            return Ok(header);
        }
        let read = file::read_header(&self.folder, &self.contents.files[file], &self.head_bytes)?;
        Ok(self.headers[file].get_or_init(|| read))
    }

    /// Returns, for each source of a part, the offset of the source in its file, after verifying the source against the
    /// index. The offset is 0 for sources that are not needed.
    fn begins(&self, name: &str, tensor: &Tensor, part: &Extent) -> Result<Vec<u64>> {
        let mut begins = vec![0; tensor.places.len()];
        for run in runs(part, &tensor.extents, usize::MAX) {
            // Data never begin at offset 0.
            if begins[run.source] == 0 {
                begins[run.source] = self.begin(name, tensor, &tensor.places[run.source])?;
            }
        }
        Ok(begins)
    }

    fn begin(&self, name: &str, tensor: &Tensor, place: &Place) -> Result<u64> {
        let (begin, header) = self.header(place.file)?;
        let wrong = |reason: String| malformed(&self.path(place.file), format!("{:?} of tensor {name:?} {reason}", place.key));
        let entry = header.entries.get(&place.key).ok_or_else(|| wrong("is not in this file".to_owned()))?;
        if (&entry.dtype, &entry.shape) != (&tensor.dtype, &place.shape) {
            let said = |dtype: &std::result::Result<DType, String>| dtype.as_ref().map_or_else(String::clone, DType::to_string);
            let (theirs, expected) = (said(&entry.dtype), said(&tensor.dtype));
            return Err(wrong(format!("is {theirs}{:?} in this file, but {expected}{:?} in the index", entry.shape, place.shape)));
        }
        Ok(begin + entry.bytes.start)
    }
}

/// Returns the name of a file in its folder.
fn file_name(path: &Path) -> Result<&str> {
    path.file_name().and_then(|name| name.to_str()).ok_or_else(|| malformed(path, "the file's name is not valid UTF-8"))
}

/// Copies the elements that were read to their destinations. Returns `false` if their bytes are not valid values.
fn copied<T: Element>(batch: &Batch, bytes: &[u8], values: &mut [T]) -> bool {
    batch.runs.iter().all(|run| {
        let start = (run.from - batch.start) * size_of::<T>();
        copy_from_bytes(&mut values[run.to..run.to + run.len], &bytes[start..start + run.len * size_of::<T>()])
    })
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tensors, files) = (self.contents.tensors.len(), self.contents.files.len());
        write!(f, "Checkpoint({tensors} tensors in {files} files in {:?})", self.folder.path())
    }
}
