//! Custom kernels: a CUDA C expression, compiled by NVRTC, or a PTX image.
//!
//! A custom kernel is loaded when its op is first used, which may take a second, and is then kept. A graph can capture
//! only ops that were used before.

mod compiler;
mod expression;

use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, CudaStream};

use super::driver::{self, Gpu};
use super::kernels::{Function, Image, Module};
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
            let reason = "the op's kernel is loaded at the op's first use; use the op once before the capture";
            return Err(Error::unsupported("the first use of a custom op while a graph is captured", reason));
        }
        let (module, entry) = match code {
            DeviceCode::Expression(expression) => {
                let TypeTag::Scalar(dtype) = element else {
                    let reason = "an expression works only on single elements; give the op a kernel with CustomOp::with_ptx";
                    return Err(Error::unsupported(format!("a custom op from an expression, on {element}"), reason));
                };
                (self.compiled(expression, dtype)?, ENTRY)
            }
            DeviceCode::Ptx { image, entry } => {
                let image = CString::new(&**image).map_err(|_| Error::argument("CustomOp::with_ptx", "the image contains a zero byte"))?;
                (Module::load(&self.context, Image::Ptx(&image), &format!("the caller's image with the kernel {entry:?}"))?, &**entry)
            }
        };
        let function = module.function(entry)?;
        self.loaded.push(Loaded { code: code.clone(), element, function, _module: module });
        Ok(self.loaded.len() - 1)
    }

    /// Compiles an expression and loads its kernel: as PTX, or, if the driver cannot compile that, as machine code. A
    /// driver cannot compile the PTX of a newer toolkit, nor any without its own compiler.
    fn compiled(&self, expression: &str, dtype: DType) -> Result<Module> {
        const NO_COMPILER: u32 = CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND as u32;
        const NEWER_PTX: u32 = CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION as u32;
        const COMPILER_DISABLED: u32 = CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED as u32;
        let source = source(expression, dtype)?;
        let what = format!("the kernel of the expression {expression:?} for {dtype}");
        let ptx = compiler::ptx(&source, self.capability, expression)?;
        match Module::load(&self.context, Image::Ptx(&ptx), &what) {
            Err(Error::Cuda { code: NO_COMPILER | NEWER_PTX | COMPILER_DISABLED, .. }) => {
                let code = compiler::machine_code(&source, self.capability, expression)?;
                Module::load(&self.context, Image::MachineCode(&code), &format!("{what}, as machine code"))
            }
            loaded => loaded,
        }
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
    fn clones_and_equal_texts_are_one_op() {
        let expression = |text: &str| DeviceCode::Expression(text.into());
        let ptx = |image: &str, entry: &str| DeviceCode::Ptx { image: image.into(), entry: entry.into() };
        assert!(is_same(&expression("a + b"), &expression("a + b")));
        assert!(!is_same(&expression("a + b"), &expression("b + a")));
        assert!(is_same(&ptx("x", "y"), &ptx("x", "y").clone()));
        assert!(!is_same(&ptx("x", "y"), &ptx("x", "z")) && !is_same(&ptx("x", "y"), &expression("x")));
    }
}
