//! SIGINT for the programs that tests start.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Lets programs that this one starts be interrupted. Shells have SIGINT ignored in what they start in the background, and programs pass that on;
/// what one catches, as from here on, those that it starts have as it is by default.
pub fn heed() {
    signal_hook::flag::register_conditional_shutdown(signal_hook::consts::SIGINT, 130, Arc::new(AtomicBool::new(true))).unwrap();
}
