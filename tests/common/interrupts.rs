//! SIGINT for the programs that tests start.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Makes the programs that this one starts interruptible. Shells ignore SIGINT in what they start in the background,
/// and child processes inherit that. A signal that is caught, as from here on, has the default action in child
/// processes.
pub fn heed() {
    signal_hook::flag::register_conditional_shutdown(signal_hook::consts::SIGINT, 130, Arc::new(AtomicBool::new(true))).unwrap();
}
