//! Calls on several buffers. Small buffers are joined, so that together they cost one call. Each large buffer has a
//! call of its own, because copying large buffers would cost more than the additional calls.
//!
//! Which buffers are joined follows from what the ranks have agreed on (the lengths of all buffers, the type, the
//! hosts), so all ranks join the same buffers. Every collective of such a call carries the digest of all lengths. So
//! the first collective detects ranks whose lengths differ, before anything is written.

#![expect(unsafe_code, reason = "copies between the buffers of jobs and the memory that holds them together")]

use std::ops::Range;

use super::HostBackend;
use super::job::{Job, Operands, Reduction};
use crate::base::deadline::Deadline;
use crate::base::tuning::many::{JOINED_BYTES, LINKS_BYTES, SHARED_BYTES};
use crate::call::{BlockLayout, Call, Collective};
use crate::error::{Error, Result};
use crate::host::copy::copy;
use crate::host::scratch::Scratch;

/// Jobs that run as one call: one job, or several of one kind, op, type and root, each on its own buffers.
#[derive(Debug)]
pub(crate) struct Jobs {
    first: Job,
    others: Vec<Job>,
}

impl From<Job> for Jobs {
    fn from(first: Job) -> Self {
        Self { first, others: Vec::new() }
    }
}

impl Jobs {
    /// Returns the name of the collective.
    pub(crate) fn name(&self) -> &'static str {
        self.first.call.kind.name()
    }

    /// Makes one call of these jobs; `None` if there are none. The ranks agree on the call and on the lengths of all
    /// buffers.
    pub(crate) fn several(jobs: Vec<Job>) -> Option<Self> {
        let counts: Vec<usize> = jobs.iter().map(|job| job.call.count as usize).collect();
        let call = jobs.first()?.call.of_many(&counts);
        let mut jobs = jobs.into_iter().map(|job| Job { call: Call { count: job.call.count, ..call }, ..job });
        Some(Self { first: jobs.next()?, others: jobs.collect() })
    }

    /// Makes a call on an empty list; `job` has no elements.
    pub(crate) fn of_no_buffer(job: Job) -> Self {
        Job { call: job.call.of_many(&[]), ..job }.into()
    }

    /// Returns the first job's call, which stands for all.
    pub(crate) fn call(&self) -> &Call {
        &self.first.call
    }

    fn iter(&self) -> impl Iterator<Item = &Job> {
        std::iter::once(&self.first).chain(&self.others)
    }
}

/// Returns the length in bytes of a job's longer buffer, which is the same on every rank.
fn bytes(job: &Job) -> usize {
    job.memory.source_len.max(job.memory.destination_len)
}

/// Returns the length in bytes of a job's block, or of its vector if there are no blocks.
fn block(job: &Job) -> usize {
    match job.layout {
        BlockLayout::Equal(block) => block,
        _ => 0,
    }
}

/// The blocks of the joined memory that hold each job's source and destination.
struct Sides {
    source: Range<usize>,
    destination: Range<usize>,
}

impl Sides {
    fn of(job: &Job, me: usize, ranks: usize) -> Self {
        let (own, all, none) = (me..me + 1, 0..ranks, 0..0);
        let (source, destination) = match job.call.kind {
            Collective::AllGather => (own, all),
            Collective::ReduceScatter => (all, own),
            // The root keeps its own data.
            Collective::Broadcast if job.call.root == Some(me as u32) => (0..1, none),
            Collective::Broadcast => (none, 0..1),
            _ => (0..1, 0..1),
        };
        Self { source, destination }
    }
}

impl HostBackend {
    /// Runs the jobs of one call. The deadline applies to all of them together.
    pub(crate) fn run_all(&mut self, jobs: &Jobs, deadline: &Deadline) -> Result<()> {
        if jobs.others.is_empty() {
            return self.run(&jobs.first, deadline);
        }
        let small = if self.topology.is_one_host() { SHARED_BYTES } else { LINKS_BYTES };
        let (mut together, mut sum) = (Vec::with_capacity(jobs.others.len() + 1), 0);
        for job in jobs.iter() {
            if bytes(job) > small {
                self.run(job, deadline)?;
                continue;
            }
            if sum + bytes(job) > JOINED_BYTES {
                self.run_together(&together, deadline)?;
                together.clear();
                sum = 0;
            }
            together.push(job);
            sum += bytes(job);
        }
        self.run_together(&together, deadline)
    }

    /// Runs small jobs as one, on memory that holds their buffers together.
    fn run_together(&mut self, jobs: &[&Job], deadline: &Deadline) -> Result<()> {
        match jobs {
            [] => Ok(()),
            [job] => self.run(job, deadline),
            [first, ..] => {
                // Kept from call to call. A custom op that panics loses it.
                let mut memory = std::mem::take(&mut self.joined);
                let ran = self.run_in(&mut memory, first, jobs, deadline);
                self.joined = memory;
                ran
            }
        }
    }

    fn run_in(&mut self, memory: &mut Scratch, first: &Job, jobs: &[&Job], deadline: &Deadline) -> Result<()> {
        let joined = Joined::of(memory, jobs, self.rank, self.peers.len())?;
        // SAFETY: the jobs' buffers are initialised and valid for their lengths until the jobs have run: they come from
        // borrows that live that long, or belong to the call. They do not overlap the memory, which belongs to the
        // backend, and nothing else writes to them.
        unsafe { joined.fill(jobs) };
        self.run(&joined.job(first), deadline)?;
        // SAFETY: as above; each destination comes from an exclusive borrow.
        unsafe { joined.empty(jobs) };
        Ok(())
    }
}

/// Memory that holds the buffers of several jobs: one block for each rank if the call has blocks, and in each block the
/// data of all jobs side by side.
struct Joined {
    start: *mut u8,
    /// The bytes of one block, and of all blocks.
    block: usize,
    bytes: usize,
    me: usize,
    ranks: usize,
}

impl Joined {
    /// Reserves memory for these jobs.
    fn of(memory: &mut Scratch, jobs: &[&Job], me: usize, ranks: usize) -> Result<Self> {
        let block = jobs.iter().map(|job| block(job)).sum();
        let has_blocks = jobs.first().is_some_and(|job| matches!(job.call.kind, Collective::AllGather | Collective::ReduceScatter));
        // At most as much as the jobs' buffers together, which is bounded.
        let bytes = if has_blocks { block * ranks } else { block };
        if !memory.reserve(bytes) {
            let doing = format!("allocating {bytes} B for {} buffers in one call", jobs.len());
            return Err(Error::io(doing, std::io::Error::from(std::io::ErrorKind::OutOfMemory)));
        }
        Ok(Self { start: memory.as_mut_ptr(), block, bytes, me, ranks })
    }

    /// Returns one job, in place, that stands for all of them.
    fn job(&self, first: &Job) -> Job {
        // In a broadcast, the other ranks contribute nothing.
        let in_place = first.call.kind != Collective::Broadcast || first.call.root == Some(self.me as u32);
        let (source, source_len) = if in_place { (self.start.cast_const(), self.bytes) } else { (std::ptr::null(), 0) };
        Job {
            call: Call { count: (self.block / first.element_bytes) as u64, ..first.call },
            memory: Operands { source, source_len, destination: self.start, destination_len: self.bytes },
            layout: BlockLayout::Equal(self.block),
            // Contributions that need a multiplication have already been multiplied.
            reduction: first.reduction.as_ref().map(Reduction::again),
            element_bytes: first.element_bytes,
            in_place,
            lists: None,
        }
    }

    /// Copies the jobs' contributions into the joined memory.
    ///
    /// # Safety
    ///
    /// The jobs are those that this was made for. Their buffers are initialised, and valid for reads of their lengths.
    unsafe fn fill(&self, jobs: &[&Job]) {
        let mut offset = 0;
        for job in jobs {
            let (len, blocks) = (block(job), Sides::of(job, self.me, self.ranks).source);
            for (index, at) in blocks.enumerate() {
                // SAFETY: a source has as many blocks as `Sides` states (checked when the job was made). The joined
                // memory has one block, or one for each rank, each with room for every job's part. The two do not
                // overlap: the joined memory belongs to the backend.
                unsafe { copy(job.memory.source.wrapping_add(index * len), self.start.wrapping_add(at * self.block + offset), len) };
            }
            offset += len;
        }
    }

    /// Copies the results to the jobs' destinations.
    ///
    /// # Safety
    ///
    /// The jobs are those that this was made for. Their destinations are valid for writes of their lengths.
    unsafe fn empty(&self, jobs: &[&Job]) {
        let mut offset = 0;
        for job in jobs {
            let (len, blocks) = (block(job), Sides::of(job, self.me, self.ranks).destination);
            for (index, at) in blocks.enumerate() {
                // SAFETY: the destination has as many blocks as `Sides` states (checked when the job was made). As many
                // come from the joined memory, which does not overlap it and is initialised. They hold valid elements:
                // `run` has normalised what was received as bools.
                unsafe { copy(self.start.wrapping_add(at * self.block + offset), job.memory.destination.wrapping_add(index * len), len) };
            }
            offset += len;
        }
    }
}
