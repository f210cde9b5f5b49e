//! How a communicator and its work end: abort flags, revoking, shrinking with an abort, finalizing, destroying.

use super::{Comm, DEAD, LIVE, State};
use crate::clique::Departure;
use crate::fault::{Fault, Outcome};
use crate::report::lock;
use std::sync::PoisonError;
use std::time::Duration;

/// The interval at which a thread that waits for a device checks whether the device is broken.
const LOOK: Duration = Duration::from_millis(20);

impl Comm {
    pub(crate) fn is_revoked(&self) -> bool {
        lock(&self.state).revoked
    }

    /// Waits until all launches are done and no graph holds one. As with NCCL, an abort ends no such wait.
    pub(crate) fn drain(&self) {
        let mut state = lock(&self.state);
        while state.held > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        self.await_launches();
    }

    /// Raises the flags and refuses new calls. Running work ends; [`Comm::end_revoke`] then lowers the flags.
    pub(crate) fn begin_revoke(&self) -> Outcome<()> {
        {
            let mut state = lock(&self.state);
            if state.finalized || state.revoked {
                return Err(Fault::argument("ncclCommRevoke : the communicator was finalized or revoked before"));
            }
            state.revoked = true;
            state.error = None;
        }
        self.flags.raise();
        self.abandon_progress();
        Ok(())
    }

    pub(crate) fn end_revoke(&self) {
        self.flags.await_launches();
        self.flags.lower();
    }

    /// Ends the running work, waits for its end inside the call, and goes on.
    pub(crate) fn interrupt(&self) {
        self.flags.raise();
        self.flags.await_launches();
        self.flags.holders().iter().for_each(|comm| lock(&comm.state).interrupted = true);
        self.flags.lower();
    }

    /// Resumes after the flags are lowered.
    pub(crate) fn resume(&self) {
        let revoked = {
            let mut state = lock(&self.state);
            state.halted = false;
            state.revoked
        };
        if let Some(member) = self.member.get() {
            member.link.resume(revoked);
        }
    }

    /// Ends running and waiting work, as raised flags do. The communicator stays alive.
    pub(crate) fn halt(&self) {
        lock(&self.state).halted = true;
        self.changed.notify_all();
        if let Some(member) = self.member.get() {
            member.link.halt();
        }
    }

    /// Raises the flags of this communicator, and of a child that is being made from it. Waits until the streams have
    /// passed all launches of the communicators that hold the flags, which share one stream of the device.
    pub(crate) fn raise_flags(&self) {
        let child = lock(&self.state).child_flags.take();
        let flags = child.iter().chain([&self.flags]);
        flags.clone().for_each(|flags| flags.raise());
        self.abandon_progress();
        flags.for_each(|flags| flags.await_launches());
    }

    /// Frees the communicator. `how` determines what its peers notice.
    pub(crate) fn end_life(&self, how: Departure) {
        lock(&LIVE).remove(&self.handle);
        let end = if how == Departure::Destroyed { "was destroyed" } else { "was aborted" };
        lock(&DEAD).insert(self.handle, end);
        let halted = lock(&self.state).halted;
        self.leave(if halted { Departure::Aborted } else { how });
    }

    /// Gives up its place, and those of children that were never made.
    fn leave(&self, how: Departure) {
        let unborn = {
            let mut state = lock(&self.state);
            state.stopped = true;
            std::mem::take(&mut state.unborn)
        };
        unborn.iter().for_each(|link| link.leave(Departure::Aborted));
        if let Some(member) = self.member.get() {
            member.link.leave(how);
        }
        self.changed.notify_all();
        self.abandon_progress();
        lock(&self.resources).order = None;
    }

    /// Simulates the death of its process, for its peers and for itself.
    pub(crate) fn lose(&self) {
        if let Some(member) = self.member.get() {
            self.break_off(&Fault::remote(format!("rank {} is lost", member.rank)));
            member.link.leave(Departure::Dead);
        }
    }

    /// Joins its background work, which the flags end.
    fn abandon_progress(&self) {
        let progress = lock(&self.progress).take();
        if let Some(progress) = progress {
            progress.abandon();
        }
    }

    /// Waits until the streams have passed all launches, and so all work before them. A broken context never reaches
    /// them: NCCL's wait for the stream then fails, and an abort ignores that error.
    pub(crate) fn await_launches(&self) {
        loop {
            let state = lock(&self.state);
            let waits = |state: &mut State| state.queued > 0 || state.running > 0;
            let waited = self.changed.wait_timeout_while(state, LOOK, waits);
            let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if !waits(&mut state) {
                return;
            }
            drop(state);
            if self.device.is_broken() {
                return;
            }
        }
    }
}
