//! Reduce operations: the built-in ones and those of the caller.

use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::call::element::{AnyElement, DType, Data, Element, TypeTag};
use crate::error::{Error, Result};

/// The operation that combines one element from each rank into one result.
///
/// These rules define the result for `n` ranks on host memory, over every transport. They apply to devices too, unless
/// a rule says otherwise:
///
/// - If a rank reduces several inputs in one pass (in shared memory or in a direct exchange), it accumulates `f16`,
///   `bf16` and the 8-bit floats in `f32`, and rounds once. In a ring or a tree, each rank sends its partial result in
///   the element's type.
/// - Integer `Sum` and `Prod` wrap on overflow.
/// - `Min` and `Max` drop a NaN if the other operand is a number.
/// - For `bool`, `Sum` and `Max` mean OR, and `Prod` and `Min` mean AND. `Avg` is refused.
/// - `Avg` first sums, and then divides by `n` once. For integers, the sum wraps, and the quotient is truncated toward
///   zero. For floats near the largest number of their type, the sum overflows: the mean of eight `f32` of `1e38` is
///   infinity. On devices, NCCL may first divide and then sum, so that the sum does not overflow. Do not rely on this:
///   the order depends on the size, the type, the number of ranks and the devices. `Device::explain` reports which
///   order NCCL uses. Means of `f16` on devices do not overflow.
/// - On host memory, every rank gets the same bits. Another run gives the same bits if its inputs, build, settings, world
///   size, transport and placement of ranks on hosts are the same. With
///   [`Config::reproducible`](crate::Config::reproducible), the bits do not depend on the transport, the algorithm or the
///   number of hosts either. On devices, NCCL chooses the order for the ops that it computes. With `reproducible`, kernels
///   of this crate compute `Sum`, `Prod`, `Avg` and `PreMulSum` of floats in rank order (tested only on a simulated GPU).
///
/// ```
/// # use collectives::{Communicator, ReduceOp};
/// let got = Communicator::run_local(2, |comm| {
///     let (mut bits, mut weighted) = (1u8 << comm.rank(), 1.0f32);
///     comm.all_reduce(&mut bits, ReduceOp::BitOr)?;
///     comm.all_reduce(&mut weighted, ReduceOp::PreMulSum(0.25))?;
///     Ok((bits, weighted))
/// })?;
/// assert_eq!(got, [(3, 0.5); 2]);
/// # Ok::<(), collectives::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum; OR for `bool`.
    Sum,
    /// The product; AND for `bool`.
    Prod,
    /// The minimum; AND for `bool`.
    Min,
    /// The maximum; OR for `bool`.
    Max,
    /// The mean. Refused for `bool`. The sum of floats may overflow even if the mean would not.
    Avg,
    /// Bitwise AND of integers and `bool`.
    BitAnd,
    /// Bitwise OR of integers and `bool`.
    BitOr,
    /// Bitwise XOR of integers and `bool`.
    BitXor,
    /// The sum of all ranks' elements, each multiplied by its rank's own scalar. The scalar is first rounded to the
    /// element's type. Floats only.
    PreMulSum(f64),
}

impl ReduceOp {
    /// Every built-in op. `PreMulSum` has the scalar 1 here.
    pub const ALL: [ReduceOp; 9] = [
        ReduceOp::Sum,
        ReduceOp::Prod,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Avg,
        ReduceOp::BitAnd,
        ReduceOp::BitOr,
        ReduceOp::BitXor,
        ReduceOp::PreMulSum(1.0),
    ];

    /// Returns the op's name in error texts, in reports and on command lines: `sum`, `prod`, `min`, `max`, `avg`,
    /// `band`, `bor`, `bxor`, `mulsum`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Prod => "prod",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Avg => "avg",
            ReduceOp::BitAnd => "band",
            ReduceOp::BitOr => "bor",
            ReduceOp::BitXor => "bxor",
            ReduceOp::PreMulSum(_) => "mulsum",
        }
    }

    /// Checks that this op supports this type.
    ///
    /// # Errors
    ///
    /// `Unsupported` for `Avg` of `bool`, for bitwise ops of floats, and for `PreMulSum` of types other than floats.
    /// The error gives the reason.
    pub fn check(self, dtype: DType) -> Result<()> {
        let reason = match self {
            ReduceOp::Avg if dtype == DType::Bool => "the mean of booleans is not a boolean; convert to a numeric type first",
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor if dtype.is_float() => {
                "bitwise ops work on integers and bool; view the bits as an unsigned integer of the same size"
            }
            ReduceOp::PreMulSum(_) if !dtype.is_float() => {
                "the scalar is a float, so the elements must be floats: use f32, f64, f16, bf16 or an 8-bit float"
            }
            _ => return Ok(()),
        };
        Err(Error::Unsupported { what: format!("{} of {dtype}", self.name()), reason: reason.to_owned() })
    }

    /// Returns the op's number in a fingerprint; 0 means no op, 255 a custom one, 254 one that is folded in rank order.
    pub(crate) const fn code(self) -> u8 {
        match self {
            ReduceOp::Sum => 1,
            ReduceOp::Prod => 2,
            ReduceOp::Min => 3,
            ReduceOp::Max => 4,
            ReduceOp::Avg => 5,
            ReduceOp::BitAnd => 6,
            ReduceOp::BitOr => 7,
            ReduceOp::BitXor => 8,
            ReduceOp::PreMulSum(_) => 9,
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ReduceOp {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        ReduceOp::ALL.into_iter().find(|op| op.name() == text).ok_or_else(|| {
            let known: Vec<_> = ReduceOp::ALL.iter().map(|op| op.name()).collect();
            Error::config(format!("reduce op {text:?}"), format!("not known; one of {}", known.join(", ")))
        })
    }
}

/// A reduction defined by the caller.
///
/// The function gets two slices of equal length and reduces the second into the first, element by element. The crate
/// may call the function on any part of a buffer, and may group the ranks' contributions in any way, so the function
/// must be associative. An op that is not commutative is applied in rank order. All ranks must use ops with the same
/// name. These ops must be either all commutative or all not commutative. The ranks compare the names, and whether the
/// ops are commutative.
///
/// ```
/// use collectives::{Communicator, CustomOp};
///
/// let largest = CustomOp::new("absmax", |into: &mut [f32], from: &[f32]| {
///     for (a, b) in into.iter_mut().zip(from) {
///         if b.abs() > a.abs() {
///             *a = *b;
///         }
///     }
/// });
/// let results = Communicator::run_local(2, |comm| {
///     let mut x = [[1.0f32, -5.0], [-3.0, 2.0]][comm.rank()];
///     comm.all_reduce(&mut x, &largest)?;
///     Ok(x)
/// })?;
/// assert_eq!(results[0], [-3.0, -5.0]);
/// # Ok::<(), collectives::Error>(())
/// ```
#[derive(Clone)]
pub struct CustomOp<T> {
    name: Arc<str>,
    /// 48 bits of the SHA-256 of its name, which ranks compare.
    hash: u64,
    commutative: bool,
    function: Option<Arc<Function<T>>>,
    device: Option<DeviceCode>,
}

/// The implementation of a custom op on a device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum DeviceCode {
    /// A CUDA C expression over `a` and `b`. NVRTC compiles it when it is first used.
    Expression(Arc<str>),
    /// A PTX image, and the name of the image's kernel that folds.
    Ptx { image: Arc<str>, entry: Arc<str> },
}

/// Returns the hash of an op's name, which ranks compare. Two names with the same hash count as the same op. Even then
/// both functions have the same element type. So the result is that of either function, and no other memory is touched.
fn hash(name: &str) -> u64 {
    let digest: [u8; 32] = Sha256::digest(name.as_bytes()).into();
    digest.first_chunk().map_or(0, |first| u64::from_le_bytes(*first)) & 0xffff_ffff_ffff
}

/// A function that folds the second slice into the first.
pub(crate) type Function<T> = dyn Fn(&mut [T], &[T]) + Send + Sync;

impl<T: Data> CustomOp<T> {
    /// Creates an op that is associative and commutative.
    pub fn new(name: &str, function: impl Fn(&mut [T], &[T]) + Send + Sync + 'static) -> Self {
        Self { name: name.into(), hash: hash(name), commutative: true, function: Some(Arc::new(function)), device: None }
    }

    /// Creates an op for device buffers only, from a CUDA C expression; see [`CustomOp::with_expression`].
    #[must_use]
    pub fn on_device(name: &str, expression: &str) -> Self {
        let device = Some(DeviceCode::Expression(expression.into()));
        Self { name: name.into(), hash: hash(name), commutative: true, function: None, device }
    }

    /// Adds an implementation for device buffers: a CUDA C expression such as `fabsf(b) > fabsf(a) ? b : a`. In the
    /// expression, `a` is the result so far, and `b` is the next rank's element. The ranks' elements are reduced in
    /// rank order. Both `a` and `b` have the element's type, except for `f16`, `bf16` and the 8-bit floats. For these
    /// types, `a` and `b` have the type `float`, and the result is rounded once, after the last rank's element.
    ///
    /// NVRTC compiles the expression when a communicator first uses the op. If NVRTC is absent, the call returns an
    /// error. Every rank must pass the same expression.
    #[must_use]
    pub fn with_expression(self, expression: &str) -> Self {
        Self { device: Some(DeviceCode::Expression(expression.into())), ..self }
    }

    /// Adds an implementation for device buffers: your own PTX image. `entry` is the name of the image's kernel that
    /// reduces. This kernel must have the parameters that the section *Folds* of `kernels/README.md` lists. The driver
    /// compiles the image when a communicator first uses the op. The image is trusted: it can do whatever a kernel can.
    ///
    /// # Safety
    ///
    /// The kernel must have the parameters that `kernels/README.md` lists. It must read only its inputs, and write only
    /// its output.
    #[expect(unsafe_code, reason = "what foreign machine code does cannot be checked")]
    #[must_use]
    pub unsafe fn with_ptx(self, image: &str, entry: &str) -> Self {
        Self { device: Some(DeviceCode::Ptx { image: image.into(), entry: entry.into() }), ..self }
    }

    /// Creates an op that is associative but not commutative. The op is always applied in rank order.
    pub fn ordered(name: &str, function: impl Fn(&mut [T], &[T]) + Send + Sync + 'static) -> Self {
        Self { commutative: false, ..Self::new(name, function) }
    }

    /// Returns the op's name. In a call, the ops of all ranks must have the same name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether the op is commutative.
    #[must_use]
    pub fn is_commutative(&self) -> bool {
        self.commutative
    }

    /// Returns the function that folds host memory; `None` for an op that only devices support.
    pub(crate) fn function(&self) -> Option<&Arc<Function<T>>> {
        self.function.as_ref()
    }
}

impl<T> fmt::Debug for CustomOp<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CustomOp").field("name", &self.name).field("commutative", &self.commutative).finish_non_exhaustive()
    }
}

/// The reduction of a call on buffers of `T`. Each [`ReduceOp`] supports only some element types. A
/// [`CustomOp`] can reduce any plain data. For buffers of [`AnyElement`], the reduction is a `ReduceOp` or a `CustomOp`
/// that supports the type that the buffers have at run time.
#[derive(Debug, Clone)]
pub struct Reduction<T> {
    pub(crate) kind: ReductionKind,
    elements: PhantomData<fn(T)>,
}

/// The two kinds of reduction.
#[derive(Debug, Clone)]
pub(crate) enum ReductionKind {
    Builtin(ReduceOp),
    Custom(ErasedOp),
}

/// A custom op whose element type is known at run time.
#[derive(Clone)]
pub(crate) struct ErasedOp {
    pub(crate) name: Arc<str>,
    pub(crate) element: TypeTag,
    pub(crate) element_bytes: usize,
    pub(crate) commutative: bool,
    hash: u64,
    /// Folds host memory; `None` for an op that only devices support.
    pub(crate) fold: Option<Arc<dyn ErasedFold>>,
    /// Folds device memory, if the op supports it.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only device code asks"))]
    pub(crate) device: Option<DeviceCode>,
}

/// A fold whose element type only its implementor knows.
pub(crate) trait ErasedFold: Send + Sync {
    /// Folds `inputs` into `into`, like [`Fold::fold`](crate::host::fold::Fold::fold).
    ///
    /// # Safety
    ///
    /// The conditions of `Fold::fold` must hold for the implementor's element type, and `bytes` must not be 0.
    #[expect(unsafe_code, reason = "a fold works on raw memory, and only its caller knows what lies there")]
    unsafe fn fold(&self, into: *mut u8, inputs: &[*const u8], bytes: usize);
}

impl ErasedOp {
    /// Erases the type of an op, with the fold of its function.
    pub(crate) fn of<T: Data>(op: &CustomOp<T>, fold: Option<Arc<dyn ErasedFold>>) -> Self {
        let CustomOp { name, hash, commutative, device, .. } = op.clone();
        Self { name, element: TypeTag::of::<T>(), element_bytes: size_of::<T>(), commutative, hash, fold, device }
    }

    /// Refuses to fold elements of a type other than the op's.
    pub(crate) fn check(&self, element: TypeTag) -> Result<()> {
        if element == self.element {
            return Ok(());
        }
        Err(Error::unsupported(format!("{:?} of {element}", self.name), format!("the op works on {}", self.element)))
    }
}

impl fmt::Debug for ErasedOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ErasedOp").field("name", &self.name).field("element", &self.element).finish_non_exhaustive()
    }
}

impl ReduceOp {
    /// Returns the element type of a buffer if this op supports it.
    pub(crate) fn fits(self, element: TypeTag) -> Result<DType> {
        let TypeTag::Scalar(dtype) = element else {
            return Err(Error::unsupported(
                format!("{self} of {element}"),
                "this is not one of the built-in element types; convert to one, or use a CustomOp",
            ));
        };
        self.check(dtype).map(|()| dtype)
    }
}

impl<T: Element> From<ReduceOp> for Reduction<T> {
    fn from(op: ReduceOp) -> Self {
        Self::of(ReductionKind::Builtin(op))
    }
}

impl From<ReduceOp> for Reduction<AnyElement> {
    fn from(op: ReduceOp) -> Self {
        Self::of(ReductionKind::Builtin(op))
    }
}

impl<T> Reduction<T> {
    pub(crate) fn of(kind: ReductionKind) -> Self {
        Self { kind, elements: PhantomData }
    }

    /// Returns the fingerprint's code: the op's number, and for a custom op the 48 bits of its name's hash above it.
    /// Ranks fold differently if an op is not commutative, so they must agree on that.
    #[inline]
    pub(crate) fn code(&self) -> u64 {
        match &self.kind {
            ReductionKind::Builtin(op) => op.code().into(),
            ReductionKind::Custom(op) => (if op.commutative { 255 } else { 254 }) | op.hash << 8,
        }
    }
}
