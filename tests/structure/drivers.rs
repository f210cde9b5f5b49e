//! No package calls a function that a driver of CUDA 12.0, the oldest supported one, does not have.

use super::sources::{code, files_below, root};

/// Methods of cudarc that call a newer function, and panic if the driver lacks it.
const NEWER: [(&str, &str); 3] = [
    (".elapsed_ms(", "cuEventElapsedTime_v2, since 12.8: use milliseconds_between"),
    (".set_flags(", "cuCtxSetFlags, since 12.1"),
    (".set_blocking_synchronize(", "cuCtxSetFlags, since 12.1"),
];

#[test]
fn no_source_calls_what_the_oldest_driver_lacks() {
    for folder in ["src", "train", "collperf", "benches", "candle", "burn", "examples"] {
        for file in files_below(&root().join(folder)) {
            let code = code(&file);
            for (call, why) in NEWER {
                assert!(!code.contains(call), "{}: {call}…) calls {why}", file.display());
            }
        }
    }
}
