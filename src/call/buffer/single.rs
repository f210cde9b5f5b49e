//! Single elements as buffers, and types of other crates as elements.

#![expect(unsafe_code, reason = "an implementor of a buffer trait promises that its memory stays in place")]

use half::{bf16, f16};

use super::{Buffer, BufferMut, Memory, MemoryMut, StableMemory};
use crate::call::element::{F8E4M3, F8E5M2};

macro_rules! single_elements {
    ($($element:ty),* $(,)?) => {$(
        // SAFETY: its memory is itself.
        unsafe impl StableMemory for $element {}
        impl Buffer for $element {
            type Element = $element;
            fn memory(&self) -> Memory<'_, $element> {
                Memory::from(std::slice::from_ref(self))
            }
        }
        impl BufferMut for $element {
            fn memory_mut(&mut self) -> MemoryMut<'_, $element> {
                MemoryMut::from(std::slice::from_mut(self))
            }
        }
    )*};
}

single_elements!(f32, f64, f16, bf16, F8E4M3, F8E5M2, i8, i16, i32, i64, u8, u16, u32, u64, bool);
#[cfg(feature = "float8")]
single_elements!(::float8::F8E4M3, ::float8::F8E5M2);

/// Makes your own struct an element type. Its only field must be an element: `element!(Meters(f32))`, or
/// `element!(Meters { value: f32 })`. Calls reduce and transfer the struct like its field, and the other ranks see the
/// field's type. To use a type of another crate, wrap it in your own struct.
///
/// The macro needs no `unsafe`, because its expansion proves that the struct meets the requirements of
/// [`Element`](crate::Element). The struct must be `Copy`, `PartialEq`, `Debug` and `Default`, and defined in the crate
/// that calls the macro.
///
/// ```
/// use collectives::{Communicator, CustomOp, ReduceOp};
///
/// #[derive(Debug, Clone, Copy, PartialEq, Default)]
/// struct Meters(f32);
/// collectives::element!(Meters(f32));
///
/// let nearest = CustomOp::new("nearest", |into: &mut [Meters], from: &[Meters]| {
///     into.iter_mut().zip(from).for_each(|(into, from)| into.0 = into.0.min(from.0));
/// });
/// let got = Communicator::run_local(2, |comm| {
///     let (mut all, mut one) = (vec![Meters(comm.rank() as f32 + 1.0); 3], Meters(7.0 - comm.rank() as f32));
///     comm.all_reduce(&mut all, ReduceOp::Sum)?;
///     comm.all_reduce(&mut one, &nearest)?;
///     Ok((all[2], one))
/// })?;
/// assert_eq!(got, [(Meters(3.0), Meters(6.0)); 2]);
/// # Ok::<(), collectives::Error>(())
/// ```
///
/// # What does not compile
///
/// More than one field:
///
/// ```compile_fail,E0027
/// #[derive(Debug, Clone, Copy, PartialEq, Default)]
/// struct Point(f32, f32);
/// collectives::element!(Point(f32));
/// ```
///
/// ```compile_fail,E0027
/// #[derive(Debug, Clone, Copy, PartialEq, Default)]
/// struct Point { x: f32, y: f32 }
/// collectives::element!(Point { x: f32 });
/// ```
///
/// A field whose type is not the given one:
///
/// ```compile_fail,E0308
/// #[derive(Debug, Clone, Copy, PartialEq, Default)]
/// struct Feet(u32);
/// collectives::element!(Feet(f32));
/// ```
///
/// A field that is not an element:
///
/// ```compile_fail,E0277
/// #[derive(Debug, Clone, Copy, PartialEq, Default)]
/// struct Letter(char);
/// collectives::element!(Letter(char));
/// ```
///
/// A struct that is larger than its field, or has a different alignment:
///
/// ```compile_fail,E0080
/// #[derive(Debug, Clone, Copy, PartialEq, Default)]
/// #[repr(align(16))]
/// struct Wide(f32);
/// collectives::element!(Wide(f32));
/// ```
///
/// The same struct, even if the crate defines a macro with the name of one that the expansion uses:
///
/// ```compile_fail,E0080
/// macro_rules! assert { ($($any:tt)*) => { () } }
/// #[derive(Debug, Clone, Copy, PartialEq, Default)]
/// #[repr(align(16))]
/// struct Wide(f32);
/// collectives::element!(Wide(f32));
/// ```
///
/// A union:
///
/// ```compile_fail,E0133
/// #[derive(Clone, Copy)]
/// union Bits { value: f32 }
/// # impl PartialEq for Bits { fn eq(&self, _: &Self) -> bool { true } }
/// # impl std::fmt::Debug for Bits { fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { Ok(()) } }
/// # impl Default for Bits { fn default() -> Self { Bits { value: 0.0 } } }
/// collectives::element!(Bits { value: f32 });
/// ```
#[macro_export]
macro_rules! element {
    ($name:ident ( $inner:ty $(,)? )) => {
        $crate::element!($name { 0: $inner });
    };
    // A field's name, or its number. The code below proves what the `unsafe` code relies on, for any input.
    ($name:ident { $field:tt : $inner:ty $(,)? }) => {
        const _: fn($name) -> $inner = |value| {
            // A pattern without `..` names every field, and this field's value has the given type.
            let $name { $field: inner } = value;
            inner
        };
        const _: () = $crate::__private::core::assert!(
            $crate::__private::core::mem::size_of::<$name>() == $crate::__private::core::mem::size_of::<$inner>()
                && $crate::__private::core::mem::align_of::<$name>() == $crate::__private::core::mem::align_of::<$inner>(),
            "the struct is larger than its field, or has a different alignment"
        );

        // SAFETY: a struct with one field (its pattern), an element, of its size (asserted): so the field begins where
        // the struct does, and there is nothing else. Its bytes mean what the field's do, and any that are a value of
        // the field's type are one of the struct's. The constant identifies `bool`, as it does for the field.
        unsafe impl $crate::Data for $name {
            const DTYPE: $crate::__private::core::option::Option<$crate::DType> =
                $crate::__private::core::option::Option::Some(<$inner as $crate::Element>::ELEMENT_TYPE);
        }

        // SAFETY: it has the size, the alignment and the layout of its field (see above), and names that field's type.
        unsafe impl $crate::Element for $name {
            const ELEMENT_TYPE: $crate::DType = <$inner as $crate::Element>::ELEMENT_TYPE;
        }

        // SAFETY: its memory is itself.
        unsafe impl $crate::interop::StableMemory for $name {}

        impl $crate::Buffer for $name {
            type Element = $name;

            fn memory(&self) -> $crate::interop::Memory<'_, $name> {
                <$crate::interop::Memory<'_, $name> as $crate::__private::core::convert::From<&[$name]>>::from(
                    $crate::__private::core::slice::from_ref(self),
                )
            }
        }

        impl $crate::BufferMut for $name {
            fn memory_mut(&mut self) -> $crate::interop::MemoryMut<'_, $name> {
                <$crate::interop::MemoryMut<'_, $name> as $crate::__private::core::convert::From<&mut [$name]>>::from(
                    $crate::__private::core::slice::from_mut(self),
                )
            }
        }
    };
}
