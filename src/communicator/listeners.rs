//! Who is told of the calls of a new communicator: its trace, those who listen, its flight recorder.

use std::sync::Arc;
use std::time::Duration;

use crate::config::{Config, nvtx_injection};
use crate::flight::About;
use crate::host::plane::HostPlane;
use crate::observe::{TraceLog, Watch};

/// Begins a trace where one was asked for.
pub(super) fn trace(plane: &HostPlane, config: &Config) -> Option<Arc<TraceLog>> {
    if !config.trace && config.trace_dir.is_none() {
        return None;
    }
    let (ranks, me) = ((plane.rank(), plane.peers().len()), plane.peers()[plane.rank()].clone());
    Some(Arc::new(TraceLog::new(About::id_of(plane.id()), ranks, me, config.trace_dir.clone())))
}

/// Who listens to a new communicator.
pub(super) fn watch(plane: &HostPlane, name: &str, config: &Config, trace: Option<&Arc<TraceLog>>) -> Watch {
    let ranks = (plane.rank(), plane.peers().len());
    Watch::new(name, ranks, config.observer.clone(), trace, nvtx_injection().as_deref())
}

/// What a recorder is told of its communicator.
pub(super) fn about(plane: &HostPlane, name: String, timeout: Duration) -> About {
    About { id: About::id_of(plane.id()), name, rank: plane.rank(), peers: plane.peers(), wiring: plane.wiring(), timeout }
}
