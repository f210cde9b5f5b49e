//! The elements of a tensor on the host as buffers of collectives.

use burn::tensor::{DType, TensorData};

use crate::error::{Error, Result};

/// An element type that both burn and collectives have.
pub(crate) trait Both: burn::tensor::Element + collectives::Element {}

impl<T: burn::tensor::Element + collectives::Element> Both for T {}

/// A call in the buffer's own memory.
pub(crate) trait InPlace {
    fn run<T: Both>(&self, elements: &mut [T]) -> collectives::Result<()>;
}

/// A call from one buffer to another.
pub(crate) trait ToOther {
    fn run<T: Both>(&self, source: &[T], destination: &mut [T]) -> collectives::Result<()>;
}

/// Evaluates an expression with `$T` as the type of a tensor's elements.
macro_rules! with_type {
    ($what:expr, $dtype:expr, $T:ident => $body:expr) => {{
        macro_rules! as_type {
            ($type:ty) => {{
                type $T = $type;
                $body
            }};
        }
        match $dtype {
            DType::F64 => as_type!(f64),
            DType::F32 => as_type!(f32),
            DType::F16 => as_type!(collectives::f16),
            DType::BF16 => as_type!(collectives::bf16),
            DType::I64 => as_type!(i64),
            DType::I32 => as_type!(i32),
            DType::I16 => as_type!(i16),
            DType::I8 => as_type!(i8),
            DType::U64 => as_type!(u64),
            DType::U32 => as_type!(u32),
            DType::U16 => as_type!(u16),
            DType::U8 => as_type!(u8),
            dtype => Err(Error::Type { what: $what.to_owned(), dtype }),
        }
    }};
}

pub(crate) use with_type;

/// Makes a call in a tensor's own memory.
pub(crate) fn change(what: &str, data: &mut TensorData, call: &impl InPlace) -> Result<()> {
    with_type!(what, data.dtype(), T => {
        let elements = data.as_mut_slice::<T>().map_err(|error| Error::burn(what, error))?;
        Ok(call.run(elements)?)
    })
}

/// Makes a call from a tensor's memory to that of a new one.
pub(crate) fn compute(what: &str, data: &TensorData, shape: Vec<usize>, call: &impl ToOther) -> Result<TensorData> {
    with_type!(what, data.dtype(), T => {
        let source = data.as_slice::<T>().map_err(|error| Error::burn(what, error))?;
        let mut destination = vec![T::default(); shape.iter().product()];
        call.run(source, &mut destination)?;
        Ok(TensorData::new(destination, shape))
    })
}
