use std::ffi::c_void;
use std::io::Write;
use std::sync::Once;

use crate::call::{driver, put};
use crate::code::Code;

driver! {
    /// Gives private tables of NVIDIA's driver, which are not simulated. NVRTC and a CUDA runtime that is linked
    /// statically ask for them. NVRTC works without them, but not without this function.
    fn cuGetExportTable(table: *mut *const c_void, _id: *const c_void) {
        static SAID: Once = Once::new();
        SAID.call_once(|| {
            let line = b"simulated GPU: cuGetExportTable, through which a library asks for private tables of NVIDIA's driver, is not simulated\n";
            let _ = std::io::stderr().write_all(line);
        });
        put(table, std::ptr::null())?;
        Err(Code::NOT_FOUND)
    }
}
