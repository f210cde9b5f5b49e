//! NVRTC, the run-time compiler of CUDA: from the source of a kernel to PTX, or to the machine code of one device.

#![expect(unsafe_code, reason = "the run-time compiler is C")]

use std::ffi::{CStr, CString};

use cudarc::nvrtc::result;
use cudarc::nvrtc::sys;

use crate::device::driver;
use crate::error::{Error, Result};

/// The function that returns machine code. Compilers before CUDA 11.1 lack it.
const MACHINE_CODE: &str = "nvrtcGetCUBIN";

/// Compiles a source to PTX that the device can run. `expression` names it in errors.
///
/// # Errors
///
/// `Unsupported` if there is no compiler; `Config`, with the compiler's text, if it refuses the source.
pub(super) fn ptx(source: &str, capability: (i32, i32), expression: &str) -> Result<CString> {
    // These kernels do not benefit from newer targets on any device, and old compilers support these targets.
    let target = match capability {
        (8.., _) => "compute_80",
        (7, 5..) => "compute_75",
        _ => "compute_70",
    };
    let compiled = compile(source, target, expression)?;
    // SAFETY: the program is alive, and its compilation has succeeded.
    let text = unsafe { result::get_ptx(compiled.0) }.map_err(|error| failed(expression, &format!("{error:?}")))?;
    let text: Vec<u8> = text.into_iter().map(|byte| byte as u8).collect();
    CStr::from_bytes_until_nul(&text).map(CStr::to_owned).map_err(|_| failed(expression, "its PTX has no end"))
}

/// Compiles a source to the machine code of devices with this compute capability.
///
/// # Errors
///
/// The errors of [`ptx`], also if the compiler does not know the device.
pub(super) fn machine_code(source: &str, (major, minor): (i32, i32), expression: &str) -> Result<Vec<u8>> {
    let compiled = compile(source, &format!("sm_{major}{minor}"), expression)?;
    if !has(MACHINE_CODE) {
        return Err(Error::unsupported(format!("the expression {expression:?} on a device"), format!("this NVRTC lacks {MACHINE_CODE}")));
    }
    let mut bytes = 0;
    // SAFETY: the program is alive and compiled, and the answer goes to our variable.
    unsafe { sys::nvrtcGetCUBINSize(compiled.0, &mut bytes) }.result().map_err(|error| failed(expression, &format!("{error:?}")))?;
    let mut code = vec![0_u8; bytes];
    // SAFETY: the same, and the buffer has the size that was asked for just now.
    unsafe { sys::nvrtcGetCUBIN(compiled.0, code.as_mut_ptr().cast()) }
        .result()
        .map_err(|error| failed(expression, &format!("{error:?}")))?;
    Ok(code)
}

/// A program of the compiler.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `compile`, and destroyed only here.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// Compiles a source for a target.
fn compile(source: &str, target: &str, expression: &str) -> Result<Program> {
    if opened().is_none() {
        return Err(Error::unsupported(format!("the expression {expression:?} on a device"), absent()));
    }
    let text = CString::new(source).map_err(|_| failed(expression, "it contains a zero byte"))?;
    let program = result::create_program(&text, Some(c"user.cu")).map_err(|error| failed(expression, &format!("{error:?}")))?;
    let program = Program(program);
    // SAFETY: the program was made just now, and is destroyed after this.
    let compiled = unsafe { result::compile_program(program.0, &[format!("--gpu-architecture={target}"), "--std=c++17".to_owned()]) };
    compiled.map_err(|error| failed(expression, &format!("for {target}: {error:?}: {}", log_of(&program))))?;
    Ok(program)
}

/// Returns what the compiler reports about a program.
fn log_of(program: &Program) -> String {
    // SAFETY: the program is alive.
    let log = unsafe { result::get_program_log(program.0) }.unwrap_or_default();
    let log: Vec<u8> = log.into_iter().map(|byte| byte as u8).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&log).trim().to_owned()
}

fn failed(expression: &str, words: &str) -> Error {
    Error::config(format!("the expression {expression:?}"), format!("NVRTC failed to compile it: {words}"))
}

/// Returns the compiler, if a library with one of its names can be opened. cudarc would panic if it found none.
fn opened() -> Option<libloading::Library> {
    // SAFETY: opening the compiler runs its initialisers, which have no preconditions; that a file of this name is the
    // compiler is trusted, as by cudarc.
    driver::candidates("nvrtc").find_map(|name| unsafe { libloading::Library::new(name) }.ok())
}

/// Whether the compiler has a function. cudarc would panic if it called a function that is missing.
fn has(function: &str) -> bool {
    // SAFETY: the type states only that it is an address, and the address is not called.
    opened().is_some_and(|library| unsafe { library.get::<*const ()>(function) }.is_ok())
}

/// Returns an explanation that there is no compiler, with advice.
fn absent() -> String {
    let names: Vec<_> = driver::candidates("nvrtc").filter(|name| !name.contains("64")).collect();
    format!(
        "the run-time compiler NVRTC was not found (tried {}); install it with the CUDA toolkit, or give the op a kernel with \
         CustomOp::with_ptx, which needs no compiler",
        names.join(", ")
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::super::{ENTRY, source};
    use super::*;
    use crate::call::element::DType;

    #[test]
    fn a_compiler_compiles_or_says_what_is_wrong() {
        let good = source("fabsf(b) > fabsf(a) ? b : a", DType::F32).unwrap();
        // Code that passes the check may still be nonsense.
        let bad = ptx(&source("max(float)a", DType::F32).unwrap(), (9, 0), "max(float)a").unwrap_err();
        let (text, code) = (ptx(&good, (9, 0), "good"), machine_code(&good, (9, 0), "good"));
        if opened().is_none() {
            for error in [text.unwrap_err(), code.unwrap_err(), bad] {
                assert!(error.is_unsupported(), "{error}");
                assert!(error.to_string().contains("libnvrtc.so") && error.to_string().contains("with_ptx"), "{error}");
            }
            return;
        }
        let text = text.unwrap().into_string().unwrap();
        assert!(text.contains(&format!(".entry {ENTRY}(")) && text.contains(".target sm_80"), "{text}");
        assert!(bad.to_string().contains("max(float)a") && bad.to_string().contains("error"), "{bad}");
        // An ELF file for NVIDIA's devices (machine 190), which ends where its headers say.
        let code = code.unwrap();
        assert_eq!((&code[..4], u16::from_le_bytes([code[18], code[19]])), (&b"\x7fELF"[..], 190));
        assert!(code.windows(ENTRY.len()).any(|bytes| bytes == ENTRY.as_bytes()));
        let unknown = machine_code(&good, (99, 9), "good").unwrap_err().to_string();
        assert!(unknown.contains("NVRTC failed to compile it: for sm_999"), "{unknown}");
    }
}
