//! What holds while somebody has the progress engine's lock.

use std::time::Duration;

use crate::{Communicator, Result};

#[test]
fn whoever_has_the_lock_can_abort_and_the_peers_hear_of_it() -> Result<()> {
    let has_heard = std::sync::Barrier::new(2);
    let heard = Communicator::builder().timeout(Duration::from_secs(30)).run_local(2, |comm| {
        if comm.rank() == 0 {
            // Nobody is called under the lock, but another thread may have it.
            let held = comm.core.shared.progress.lock();
            comm.abort_handle().abort();
            drop(held);
            has_heard.wait();
            return Ok("aborted".to_owned());
        }
        // Before the call, or in it.
        let error = comm.recv(&mut [0_u8], 0).expect_err("nothing was sent");
        has_heard.wait();
        Ok(error.to_string())
    })?;
    assert!(heard.iter().all(|words| words.contains("aborted")), "{heard:?}");
    Ok(())
}
