//! The mapped memory that the ranks of one host share.
//!
//! It is an anonymous file (`memfd_create`): it has no name in any file system, and disappears with the last process
//! that maps it, however that process ends. It is sealed against shrinking, so that no mapping of it can turn into a
//! bus error.

#![expect(unsafe_code, reason = "owns the mapping and hands out what lies in it; locks of open file descriptions have no safe wrapper")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;

use super::control::{Control, Lightness, Member};
use super::flags::Flag;
use super::layout::RegionLayout;
use super::pages::{Pages, alignment};
use crate::base::tuning::shm::{LAP_CACHES, LEAST_LAP_BYTES, USUAL_LAP_BYTES};
use crate::host::abort_reason::AbortReason;
use crate::host::caches::Caches;
use crate::host::processors::{self, Processors};

/// One rank's mapping of the region, its lock on it, and the layout.
pub(super) struct Region {
    pages: Pages,
    layout: RegionLayout,
    /// This rank's local index.
    me: usize,
    presence: Presence,
    lightness: Lightness,
}

/// The seals of all memory that ranks share: its size cannot change.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Creates a file for ranks to share: its size is fixed, its bytes are zero.
pub(super) fn create(name: &str, bytes: usize) -> io::Result<OwnedFd> {
    check_limit(bytes)?;
    let file = anonymous_file(name)?;
    rustix::fs::ftruncate(&file, bytes as u64)?;
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

/// Creates an empty file without a path, which can be sealed. No process can execute it if the kernel is Linux 6.3 or
/// later. With the setting `vm.memfd_noexec=2`, such a kernel refuses all other files of this kind.
fn anonymous_file(name: &str) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // The kernel does not know the flag.
        Err(Errno::INVAL) => Ok(rustix::fs::memfd_create(name, flags)?),
        created => Ok(created?),
    }
}

/// Returns the bytes of a lap: more than the writer's and the reader's second-level caches, but less than half of the
/// ranks' share of a last-level cache.
fn lap_bytes(caches: Caches, ranks: usize) -> usize {
    let wanted = caches.second_level.map_or(USUAL_LAP_BYTES, |bytes| bytes.saturating_mul(LAP_CACHES));
    let share = caches.last_level.map_or(usize::MAX, |(bytes, processors)| bytes / 2 / ranks.min(processors).max(1));
    wanted.min(share).max(LEAST_LAP_BYTES)
}

/// Refuses a file that is larger than this process may create: to exceed that limit would end the process by a signal.
fn check_limit(bytes: usize) -> io::Result<()> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    match limit.filter(|limit| *limit < bytes as u64) {
        None => Ok(()),
        Some(limit) => {
            let message =
                format!("it is larger than the limit on file sizes, {limit} B (RLIMIT_FSIZE); raise the limit: `ulimit -f unlimited`");
            Err(io::Error::new(io::ErrorKind::FileTooLarge, message))
        }
    }
}

/// Refuses a file that has a different size, or whose size could still be changed. If it shrank, a read would be a bus
/// error.
pub(super) fn check(file: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
    let found = rustix::fs::fstat(file)?.st_size;
    // Files that cannot be sealed do not support the query.
    let seals = rustix::fs::fcntl_get_seals(file).unwrap_or(SealFlags::empty());
    let message = if u64::try_from(found) != Ok(bytes as u64) {
        format!("its file has {found} bytes, but {bytes} were expected")
    } else if !seals.contains(SEALS) {
        format!("its file must be sealed against shrinking, growing and unsealing, but has only these seals: {seals:?}")
    } else {
        return Ok(());
    };
    Err(io::Error::new(io::ErrorKind::InvalidData, message))
}

impl Region {
    /// Maps the file, takes the lock of rank `me`, and enters that rank.
    pub(super) fn enter(file: OwnedFd, layout: RegionLayout, me: usize) -> io::Result<Self> {
        check(file.as_fd(), layout.bytes)?;
        let pages = Pages::of_file(file.as_fd(), layout.bytes, alignment(layout.bytes, 1))?;
        Ok(Self::new(pages, layout, me, Presence::claim(file, me)?))
    }

    /// Enters the region for threads of one process, where memory has a number instead of a file.
    #[cfg(miri)]
    pub(super) fn numbered(number: u64, layout: RegionLayout, me: usize) -> io::Result<Self> {
        let pages = Pages::numbered(number, layout.bytes, alignment(layout.bytes, 1))?;
        Ok(Self::new(pages, layout, me, Presence::unknown()?))
    }

    /// Enters rank `me` in memory that is already mapped.
    fn new(pages: Pages, layout: RegionLayout, me: usize, presence: Presence) -> Self {
        let region = Self { pages, layout, me, presence, lightness: Lightness::default() };
        let lap = lap_bytes(Caches::of_this_machine(), layout.ranks);
        region.member(me).enter(region.presence.is_locked(), lap, &Processors::here());
        region
    }

    /// Returns this rank's local index.
    pub(super) fn me(&self) -> usize {
        self.me
    }

    /// Returns where everything lies.
    #[inline]
    pub(super) fn layout(&self) -> &RegionLayout {
        &self.layout
    }

    /// Returns the address of the byte at an offset from the layout.
    #[inline]
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.layout.bytes);
        self.pages.at(offset)
    }

    /// Returns the group's shared words.
    #[inline]
    pub(super) fn control(&self) -> &Control {
        // SAFETY: the layout puts it at the start, page-aligned; it consists of atomics, valid for any bytes, and lives as
        // long as the mapping.
        unsafe { self.pages.base().cast().as_ref() }
    }

    /// Returns what a rank publishes about itself.
    pub(super) fn member(&self, rank: usize) -> &Member {
        assert!(rank < self.layout.ranks);
        // SAFETY: a record of this index (checked) lies there, aligned to 128 bytes. It consists of atomics, valid for
        // any bytes, and lives as long as the mapping.
        unsafe { &*self.at(self.layout.member(rank)).cast() }
    }

    /// Returns a rank's flag of a parity: the first word of its mailbox. The caller vouches for the rank
    /// (debug-checked).
    #[inline]
    pub(super) fn flag(&self, rank: usize, parity: usize) -> &Flag {
        // SAFETY: the mailbox of a rank of the group (trusted: the callers are all in this module's group) starts
        // there, aligned to 128 bytes, with a word that is only ever used as this atomic, for which any bytes are
        // valid.
        unsafe { &*self.at(self.layout.mailbox(rank, parity)).cast() }
    }

    /// Returns how many processors the ranks share, by their affinities and quotas. Every rank gets the same answer
    /// once all have entered.
    pub(super) fn processors(&self) -> usize {
        let ranks: Vec<Processors> = (0..self.layout.ranks).map(|rank| self.member(rank).processors()).collect();
        processors::between(&ranks)
    }

    /// Whether ranks share processors.
    pub(super) fn is_crowded(&self) -> bool {
        self.processors() < self.layout.ranks
    }

    /// Returns the bytes that a writer goes through before it starts over, the same on every rank once all have
    /// entered. If ranks share processors, and thus caches, these are as few bytes as possible.
    pub(super) fn lap(&self) -> usize {
        let laps = (0..self.layout.ranks).map(|rank| self.member(rank).lap());
        if self.is_crowded() { 0 } else { laps.min().unwrap_or(0) }
    }

    /// Returns the capacity of the rings between two ranks: a power of two.
    pub(super) fn ring_bytes(&self) -> usize {
        let lap = self.lap().max(LEAST_LAP_BYTES);
        self.layout.ring_bytes().min(1 << lap.ilog2())
    }

    /// Returns why the group ended, if a rank has recorded it.
    pub(super) fn abort_reason(&self) -> Option<AbortReason> {
        self.control().abort_reason()
    }

    /// Records for the whole group why it ended, and wakes all sleepers, unless another rank already has.
    pub(super) fn propagate(&self, abort_reason: &AbortReason) {
        self.control().propagate(abort_reason);
    }

    /// Whether a rank lives and has not left. Costs a system call.
    pub(super) fn lives(&self, rank: usize) -> bool {
        self.presence.lives(rank, self.member(rank))
    }

    /// Records that this rank leaves voluntarily, then releases its lock.
    pub(super) fn depart(&self) {
        self.member(self.me).depart();
        self.wake();
        self.presence.release(self.me);
    }

    /// Wakes every sleeper.
    pub(super) fn wake(&self) {
        self.control().wake();
    }

    /// Makes the others check for this rank after each publish for a while. Returns whether this is new to them.
    pub(super) fn sleeps_lightly(&self) -> bool {
        self.lightness.grow(self.control())
    }

    /// Records that this rank has published once more.
    pub(super) fn fade(&self) {
        self.lightness.fade(self.control());
    }

    /// Wakes a rank whose ring has moved, if it sleeps.
    #[cold]
    pub(super) fn ring(&self, rank: usize) {
        Control::fence();
        self.member(rank).ring();
        self.fade();
    }

    /// Sleeps until woken, for at most `limit`, unless `done` returns true after the sleep has been announced.
    pub(super) fn sleep(&self, limit: Duration, done: impl FnOnce() -> bool) {
        self.control().sleep(limit, done);
    }
}

/// One rank's lock, which shows the others that it still lives.
///
/// Each rank holds a lock on one byte of the region's file, under an open file description of its own. The kernel
/// releases it with the last descriptor, however the process ends, and any rank can test it without waiting.
struct Presence {
    file: OwnedFd,
    locked: bool,
}

impl Presence {
    /// Takes the lock of `rank`. `received` is shared with other ranks, so the file is reopened through /proc. Without
    /// /proc there is no lock, and peers take the rank for alive until it records that it leaves: in the peers'
    /// namespace, its process ID may belong to another process.
    fn claim(received: OwnedFd, rank: usize) -> io::Result<Self> {
        let path = format!("/proc/self/fd/{}", received.as_raw_fd());
        let file = match rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            Ok(file) => file,
            // A temporary error, which shows nothing about /proc.
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => return Err(error.into()),
            Err(error) => {
                crate::base::event::warn!(%error, "the shared memory cannot be reopened through /proc: if this process \
                     ends, the other ranks of this host notice only when their timeouts pass");
                return Ok(Self { file: received, locked: false });
            }
        };
        lock(file.as_fd(), libc::F_OFD_SETLK, libc::F_WRLCK, rank)?;
        Ok(Self { file, locked: true })
    }

    /// Returns the lock of a thread under Miri, where ranks live as long as the process, and files have no locks.
    #[cfg(miri)]
    fn unknown() -> io::Result<Self> {
        Ok(Self { file: std::fs::File::open("/dev/null")?.into(), locked: false })
    }

    /// Whether peers can test a lock of this rank.
    fn is_locked(&self) -> bool {
        self.locked
    }

    /// Releases the lock while the file stays open.
    fn release(&self, rank: usize) {
        if self.locked {
            let _ = lock(self.file.as_fd(), libc::F_OFD_SETLK, libc::F_UNLCK, rank);
        }
    }

    /// Whether another rank lives, as far as is known: one that cannot be tested counts as alive.
    fn lives(&self, rank: usize, member: &Member) -> bool {
        !member.is_locked() || lock(self.file.as_fd(), libc::F_OFD_GETLK, libc::F_WRLCK, rank).map_or(true, |held| held != libc::F_UNLCK)
    }
}

/// Runs one lock command on the byte of `rank`. Returns the type of lock that the kernel reports.
fn lock(file: BorrowedFd<'_>, command: libc::c_int, kind: libc::c_int, rank: usize) -> io::Result<libc::c_int> {
    // SAFETY: all-zero bytes are a valid `flock`: it consists of integers.
    let mut request: libc::flock = unsafe { std::mem::zeroed() };
    request.l_type = kind as libc::c_short;
    request.l_whence = libc::SEEK_SET as libc::c_short;
    request.l_start = rank as libc::off_t;
    request.l_len = 1;
    // SAFETY: the descriptor is open (borrowed), the command takes a `flock`, and `request` outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut request) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(request.l_type.into()) }
}

#[cfg(test)]
pub(super) mod tests {
    use rustix::fs::memfd_create;

    use super::*;
    use crate::host::processors::WORDS;
    use crate::meeting::wait_until;

    /// Returns the regions of several ranks over one file.
    pub(in crate::host::shm) fn regions(ranks: usize) -> Vec<Region> {
        let layout = RegionLayout::new(ranks).unwrap();
        #[cfg(miri)]
        if layout.bytes > 0 {
            let number = crate::host::shm::shared_file::number();
            return (0..ranks).map(|me| Region::numbered(number, layout, me).unwrap()).collect();
        }
        let file = create("collectives", layout.bytes).unwrap();
        (0..ranks).map(|me| Region::enter(file.try_clone().unwrap(), layout, me).unwrap()).collect()
    }

    #[test]
    fn what_one_writes_the_other_sees() {
        let regions = regions(2);
        regions[0].flag(0, 1).publish(5);
        assert!(regions[1].flag(0, 1).has_reached(5) && !regions[1].flag(0, 0).has_reached(1));
        regions[1].propagate(&AbortReason::Lost { rank: 9, by: 1 });
        assert_eq!(regions[0].abort_reason(), Some(AbortReason::Lost { rank: 9, by: 1 }));
        assert!(!regions[0].member(1).has_departed() && regions[0].lives(1));
        regions[1].depart();
        assert!(regions[0].member(1).has_departed() && (cfg!(miri) || !regions[0].lives(1)), "Miri's ranks have no locks");
    }

    #[test]
    fn a_file_that_is_no_region_is_refused() {
        let layout = RegionLayout::new(2).unwrap();
        let refused = |file: OwnedFd, layout| Region::enter(file, layout, 0).err().unwrap().to_string();
        assert!(refused(create("collectives", layout.bytes).unwrap(), RegionLayout::new(3).unwrap()).contains("were expected"));
        let unsealed = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&unsealed, layout.bytes as u64).unwrap();
        for seals in [SealFlags::empty(), SealFlags::SHRINK, SealFlags::GROW] {
            rustix::fs::fcntl_add_seals(&unsealed, seals).unwrap();
            assert!(refused(unsealed.try_clone().unwrap(), layout).contains("must be sealed"));
        }
        let plain = tempfile::tempfile().unwrap();
        plain.set_len(layout.bytes as u64).unwrap();
        assert!(refused(plain.into(), layout).contains("must be sealed"));
    }

    #[test]
    fn a_sleeper_is_woken() {
        let regions = regions(2);
        std::thread::scope(|scope| {
            scope.spawn(|| regions[0].sleep(Duration::from_secs(60), || false));
            wait_until("the other one sleeps", || regions[1].control().sleepers() > 0);
            // The announcement comes before the sleep, so wake until the sleeper is gone.
            wait_until("the sleeper has gone", || {
                regions[1].wake();
                regions[1].control().sleepers() == 0
            });
        });
    }

    /// Returns a member record as its rank would enter it.
    fn member(presence: &Presence) -> Box<Member> {
        // SAFETY: a record consists of atomic integers, for which zero is valid.
        let member: Box<Member> = unsafe { Box::new(std::mem::zeroed()) };
        member.enter(presence.is_locked(), 0, &Processors { available: 1, mask: [0; WORDS] });
        member
    }

    #[test]
    fn a_lock_ends_with_its_file() {
        let file = memfd_create("presence-test", MemfdFlags::CLOEXEC).unwrap();
        let mine = Presence::claim(file.try_clone().unwrap(), 0).unwrap();
        let other = Presence::claim(file.try_clone().unwrap(), 1).unwrap();
        assert!(other.is_locked(), "/proc is needed here");
        let record = member(&other);
        assert!(mine.lives(1, &record));
        drop(other);
        assert!(!mine.lives(1, &record));

        let again = Presence::claim(file, 1).unwrap();
        assert!(mine.lives(1, &record));
        again.release(1);
        assert!(!mine.lives(1, &record));
    }

    #[test]
    fn a_byte_is_locked_once() {
        let file = memfd_create("presence-test", MemfdFlags::CLOEXEC).unwrap();
        let _first = Presence::claim(file.try_clone().unwrap(), 3).unwrap();
        assert!(Presence::claim(file, 3).is_err());
    }

    #[test]
    fn a_rank_without_a_lock_counts_as_alive() {
        let file = memfd_create("presence-test", MemfdFlags::CLOEXEC).unwrap();
        let unlocked = Presence { file, locked: false };
        assert!(unlocked.lives(1, &member(&unlocked)));
    }

    #[test]
    fn a_file_cannot_be_executed_if_the_kernel_can_prevent_it() {
        let knows = memfd_create("probe", MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL).is_ok();
        let file = create("collectives", 4096).unwrap();
        let mode = rustix::fs::fstat(&file).unwrap().st_mode;
        assert_eq!(mode & 0o111 == 0, knows, "mode {mode:o}");
        check(file.as_fd(), 4096).unwrap();
    }

    #[test]
    fn a_file_larger_than_files_may_be_is_refused_in_words() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let before = getrlimit(Resource::Fsize);
        // More than any other test of this process writes.
        setrlimit(Resource::Fsize, Rlimit { current: Some(1 << 40), ..before }).unwrap();
        let error = create("limit-test", (1 << 40) + 1).unwrap_err().to_string();
        setrlimit(Resource::Fsize, before).unwrap();
        assert!(error.contains("1099511627776 B") && error.contains("ulimit -f"), "{error}");
    }
}
