//! The parts that all exported functions share: counting, planted failures, and turning outcomes into codes.

use crate::abi::{Code, Handle};
use crate::comm::{self, Comm};
use crate::control;
use crate::driver;
use crate::fault::{Fault, Outcome};
use crate::group;
use crate::inside::Inside;
use crate::report::{report, warn};
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Runs the body of an exported function.
pub(crate) fn call(name: &'static str, body: impl FnOnce() -> Outcome<Code>) -> c_int {
    outcome(name, body).unwrap_or_else(|fault| fault.code).0
}

/// Does the same for functions whose failure makes the surrounding group fail.
pub(crate) fn in_group(name: &'static str, body: impl FnOnce() -> Outcome<Code>) -> c_int {
    outcome(name, body).inspect_err(group::note).unwrap_or_else(|fault| fault.code).0
}

fn outcome(name: &'static str, body: impl FnOnce() -> Outcome<Code>) -> Outcome<Code> {
    let _inside = driver::Inside::enter();
    let outcome = match control::enter(name) {
        Some(Code::SUCCESS) => Ok(Code::SUCCESS),
        Some(code) => {
            if name == "ncclCommDestroy" {
                group::leave_open();
            }
            Err(Fault::new(code, format!("{name} : a planted failure")))
        }
        // A panic must not reach C.
        None => catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
            report(format!("the simulated NCCL failed: {name} panicked"));
            Err(Fault::new(Code::INTERNAL_ERROR, format!("{name} panicked")))
        }),
    };
    outcome.inspect_err(|fault| warn(&fault.text))
}

/// Finds a communicator for a call that only queries it.
pub(crate) fn asking(handle: Handle, name: &'static str) -> Outcome<(Arc<Comm>, Inside)> {
    let comm = comm::find(handle, name)?;
    let inside = Inside::asking(&comm, name);
    Ok((comm, inside))
}

/// Finds a communicator for a call that uses it, and checks that it is ready.
pub(crate) fn acting(handle: Handle, name: &'static str) -> Outcome<(Arc<Comm>, Inside)> {
    let comm = comm::find(handle, name)?;
    let inside = Inside::acting(&comm, name);
    comm.ensure_ready()?;
    Ok((comm, inside))
}

/// Refuses a null pointer.
pub(crate) fn check_pointer<T>(pointer: *const T, name: &str, which: &str) -> Outcome<()> {
    if pointer.is_null() { Err(Fault::argument(format!("{name} : {which} argument is NULL"))) } else { Ok(()) }
}
