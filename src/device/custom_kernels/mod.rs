//! Custom kernels: a CUDA C expression, compiled by NVRTC, or a PTX image.
//!
//! A custom kernel is loaded when its op is first used, which may take a second, and is then kept. A graph can capture
//! only ops that were used before.

#![expect(unsafe_code, reason = "the run-time compiler is C")]

mod expression;

use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};
use cudarc::nvrtc::{self, CompileError, CompileOptions};

use super::driver::{self, Gpu};
use super::kernels::{Function, Module};
use crate::call::element::DType;
use crate::call::element::TypeTag;
use crate::call::op::DeviceCode;
use crate::error::Error;
use crate::error::Result;

/// The source around an expression: the placeholders, and the kernel's name.
const TEMPLATE: &str = include_str!("../../../kernels/user.cuh");
const ELEMENT: &str = "@ELEMENT@";
const EXPRESSION: &str = "@EXPRESSION@";
const ENTRY: &str = "fold_user";

/// The custom kernels on one device.
#[derive(Debug)]
pub(crate) struct CustomKernels {
    context: Arc<CudaContext>,
    capability: (i32, i32),
    loaded: Vec<Loaded>,
}

/// A loaded kernel.
#[derive(Debug)]
struct Loaded {
    code: DeviceCode,
    element: TypeTag,
    function: Function,
    /// The module of the function.
    _module: Module,
}

impl CustomKernels {
    /// Creates an empty set of kernels.
    pub(crate) fn new(gpu: &Gpu) -> Self {
        Self { context: Arc::clone(&gpu.context), capability: gpu.capability, loaded: Vec::new() }
    }

    /// Returns the index of an op's kernel, which is loaded if this is its first use.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for an invalid expression; `Unsupported` if there is no compiler or a graph is being captured;
    /// `Config`, with the compiler's text, if the expression does not compile; `Cuda` if the driver refuses the image.
    pub(crate) fn place(&mut self, code: &DeviceCode, element: TypeTag, stream: &CudaStream) -> Result<usize> {
        if let Some(place) = self.loaded.iter().position(|known| known.element == element && is_same(&known.code, code)) {
            return Ok(place);
        }
        if driver::is_capturing(stream) {
            let reason = "its kernel is loaded when it is first used; use it once before the capture";
            return Err(Error::unsupported("the first use of a custom op while a graph is captured", reason));
        }
        let (image, entry, what) = match code {
            DeviceCode::Expression(expression) => {
                let TypeTag::Scalar(dtype) = element else {
                    let reason = "an expression works only on single elements; give the op a kernel with CustomOp::with_ptx";
                    return Err(Error::unsupported(format!("a custom op from an expression, on {element}"), reason));
                };
                let image = compile(&source(expression, dtype)?, self.capability, expression)?;
                (image, ENTRY, format!("the kernel of the expression {expression:?} for {dtype}"))
            }
            DeviceCode::Ptx { image, entry } => (image.to_string(), &**entry, format!("the caller's image with the kernel {entry:?}")),
        };
        let image = CString::new(image).map_err(|_| Error::argument("CustomOp::with_ptx", "the image contains a zero byte"))?;
        let module = Module::load(&self.context, &image, &what)?;
        let function = module.function(entry)?;
        self.loaded.push(Loaded { code: code.clone(), element, function, _module: module });
        Ok(self.loaded.len() - 1)
    }

    /// Whether an op has been used before.
    pub(crate) fn knows(&self, code: &DeviceCode, element: TypeTag) -> bool {
        self.loaded.iter().any(|known| known.element == element && is_same(&known.code, code))
    }

    /// Forgets an op, as if it had not been used.
    pub(crate) fn forget(&mut self, code: &DeviceCode, element: TypeTag) {
        self.loaded.retain(|known| known.element != element || !is_same(&known.code, code));
    }

    /// Returns the kernel at an index.
    ///
    /// # Errors
    ///
    /// `Unsupported` if there is no such kernel.
    pub(crate) fn function(&self, place: usize) -> Result<Function> {
        let none = || Error::unsupported("a custom op", format!("there is no kernel number {place}"));
        self.loaded.get(place).map(|loaded| loaded.function).ok_or_else(none)
    }
}

/// Whether two codes are the same. Clones of an op share their text, which saves comparing it.
fn is_same(a: &DeviceCode, b: &DeviceCode) -> bool {
    let same = |a: &Arc<str>, b: &Arc<str>| Arc::ptr_eq(a, b) || a == b;
    match (a, b) {
        (DeviceCode::Expression(a), DeviceCode::Expression(b)) => same(a, b),
        (DeviceCode::Ptx { image, entry }, DeviceCode::Ptx { image: other, entry: by }) => same(entry, by) && same(image, other),
        _ => false,
    }
}

/// Returns the source of an expression's kernel.
fn source(expression: &str, dtype: DType) -> Result<String> {
    expression::check(expression)?;
    Ok(TEMPLATE.replace(ELEMENT, dtype.name()).replace(EXPRESSION, expression))
}

/// Compiles a source to PTX that the device can run, with the run-time compiler.
fn compile(source: &str, capability: (i32, i32), expression: &str) -> Result<String> {
    if !driver::candidates("nvrtc").any(|name| opens(&name)) {
        return Err(Error::unsupported(format!("the expression {expression:?} on a device"), absent()));
    }
    // These kernels do not benefit from newer targets on any device, and old compilers support these targets.
    let target = match capability {
        (8.., _) => "compute_80",
        (7, 5..) => "compute_75",
        _ => "compute_70",
    };
    let options = CompileOptions { options: vec![format!("--gpu-architecture={target}"), "--std=c++17".to_owned()], ..Default::default() };
    let options = CompileOptions { name: Some("user.cu".to_owned()), ..options };
    let compiled = nvrtc::compile_ptx_with_opts(source, options);
    let ptx = compiled.map_err(|error| {
        let words = match &error {
            CompileError::CompileError { nvrtc, log, .. } => format!("{nvrtc:?}: {}", log.to_string_lossy().trim()),
            other => format!("{other:?}"),
        };
        Error::config(format!("the expression {expression:?}"), format!("NVRTC failed to compile it: {words}"))
    })?;
    Ok(ptx.to_src())
}

/// Whether a library with this name can be opened. cudarc would panic if it found no library.
fn opens(name: &str) -> bool {
    // SAFETY: opening the compiler runs its initialisers, which have no preconditions; that a file of this name is the
    // compiler is trusted, as by cudarc.
    unsafe { libloading::Library::new(name) }.is_ok()
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

    use super::*;

    #[test]
    fn the_template_has_what_is_replaced_and_the_kernel_that_is_looked_up() {
        assert!(TEMPLATE.contains(EXPRESSION) && TEMPLATE.contains(&format!("\n{ENTRY}(")));
        for dtype in DType::ALL {
            assert!(TEMPLATE.contains(&format!(" user_{dtype};")), "{dtype}");
            let text = source("a + b", dtype).unwrap();
            assert!(text.contains("\na + b\n"), "the expression does not stand on a line of its own");
            let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
            assert!(!code.contains('@') && !code.contains("#include"), "{dtype}");
        }
    }

    #[test]
    fn an_expression_that_is_none_gets_into_no_source() {
        assert!(source("a; b", DType::F32).unwrap_err().to_string().contains("\";\""));
    }

    #[test]
    fn a_compiler_compiles_or_says_what_is_wrong() {
        let good = compile(&source("fabsf(b) > fabsf(a) ? b : a", DType::F32).unwrap(), (9, 0), "good");
        // Code that passes the check may still be nonsense.
        let bad = compile(&source("max(float)a", DType::F32).unwrap(), (9, 0), "max(float)a");
        // SAFETY: as in `compile`.
        if unsafe { nvrtc::sys::is_culib_present() } {
            let text = good.unwrap();
            assert!(text.contains(&format!(".entry {ENTRY}(")) && text.contains(".target sm_80"), "{text}");
            let text = bad.unwrap_err().to_string();
            assert!(text.contains("max(float)a") && text.contains("error"), "{text}");
        } else {
            for outcome in [good, bad] {
                let error = outcome.unwrap_err();
                assert!(error.is_unsupported(), "{error}");
                assert!(error.to_string().contains("libnvrtc.so") && error.to_string().contains("with_ptx"), "{error}");
            }
        }
    }

    #[test]
    fn clones_and_equal_texts_are_one_op() {
        let expression = |text: &str| DeviceCode::Expression(text.into());
        let ptx = |image: &str, entry: &str| DeviceCode::Ptx { image: image.into(), entry: entry.into() };
        assert!(is_same(&expression("a + b"), &expression("a + b")));
        assert!(!is_same(&expression("a + b"), &expression("b + a")));
        assert!(is_same(&ptx("x", "y"), &ptx("x", "y").clone()));
        assert!(!is_same(&ptx("x", "y"), &ptx("x", "z")) && !is_same(&ptx("x", "y"), &expression("x")));
    }
}
