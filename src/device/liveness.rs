//! What others know of the ranks that a device waits for. NCCL itself says nothing of a peer on the same host that has died, or is stopped.

use std::fmt::Debug;
use std::time::Duration;

use crate::error::{Error, Peer};

/// Knows more about a communicator's ranks than NCCL does.
pub(crate) trait LivenessProbe: Debug + Send + Sync {
    /// Why nothing will come of `doing`, where a rank is known to be gone. To be asked now and then by whoever has been waiting for so
    /// long; may take some hundred milliseconds, seldom.
    fn trouble(&self, doing: &dyn Fn() -> String, waited: Duration) -> Option<Error>;

    /// Which rank is gone, where NCCL says that one is; `None` where all are there.
    fn culprit(&self, doing: &dyn Fn() -> String) -> Option<Error>;

    /// The ranks that are known not to run at the moment: to be named where a deadline passes.
    fn standing_still(&self) -> Vec<Peer>;
}
