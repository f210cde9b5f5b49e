use std::ffi::c_char;

use crate::call::{driver, put};
use crate::code::{self, Code};

driver! {
    fn cuGetErrorName(error: u32, text: *mut *const c_char) {
        let known = code::describe(error);
        put(text, known.map_or(std::ptr::null(), |(name, _)| name))?;
        known.map(drop).ok_or(Code::INVALID_VALUE)
    }

    fn cuGetErrorString(error: u32, text: *mut *const c_char) {
        let known = code::describe(error);
        put(text, known.map_or(std::ptr::null(), |(_, meaning)| meaning))?;
        known.map(drop).ok_or(Code::INVALID_VALUE)
    }
}
