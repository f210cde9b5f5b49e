//! This crate's kernels on one device: the images, which are loaded once, and the launch of each kernel.

#![expect(unsafe_code, reason = "kernels take addresses")]

mod module;
mod names;

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::sys::CUstream;
use cudarc::driver::{CudaStream, result};

use self::names::{DIVIDED, FAMILIES, FAMILY_COUNT, FLOATS, TYPES};
use super::driver::{Gpu, cuda_error};
use super::plan::{FoldArguments, FoldOp};
use crate::base::tuning::device_folds::BLOCKS_PER_MULTIPROCESSOR;
use crate::call::element::DType;
use crate::error::Error;
use crate::error::Result;

pub(crate) use self::module::{Function, Image, Module};
#[cfg(test)]
pub(crate) use self::names::has_fold;
pub(crate) use self::names::{FamilySet, family_of};

/// The number of threads in a block, as every kernel expects.
const BLOCK: u32 = 512;

/// The bytes that one thread moves at a time.
const CHUNK_BYTES: u64 = 16;

/// The kernels of one device.
#[derive(Debug)]
pub(crate) struct Kernels {
    folds: [[Function; TYPES]; FoldOp::ALL.len()],
    divisions: [Function; TYPES],
    products: [Function; TYPES],
    truth: Function,
    fill: Function,
    check: Function,
    most_blocks: u32,
    /// Why the driver has refused a family, if it has.
    refused: [Option<Error>; FAMILY_COUNT],
    /// The modules of the functions above.
    _modules: Vec<Module>,
}

/// The kernels in use, by context.
static LOADED: Mutex<Vec<(usize, Weak<Kernels>)>> = Mutex::new(Vec::new());

impl Kernels {
    /// Returns the kernels on a device: those that another communicator uses there, or newly loaded ones. Families that
    /// the driver refuses are missing.
    pub(crate) fn on(gpu: &Gpu) -> Arc<Self> {
        // Live contexts have different addresses, and kernels keep theirs alive.
        let context = gpu.context.cu_ctx() as usize;
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.retain(|(_, kernels)| kernels.strong_count() != 0);
        if let Some(kernels) = loaded.iter().find(|(of, _)| *of == context).and_then(|(_, kernels)| kernels.upgrade()) {
            return kernels;
        }
        let kernels = Arc::new(Self::load(gpu));
        loaded.push((context, Arc::downgrade(&kernels)));
        kernels
    }

    fn load(gpu: &Gpu) -> Self {
        let loaded = FAMILIES.each_ref().map(|family| family.load(gpu));
        let mut refused = loaded.each_ref().map(|family| family.as_ref().err().cloned());
        let mut find = |(family, name): (FamilySet, String)| {
            let Ok(module) = &loaded[family.place()] else { return Function::NONE };
            module.function(&name).unwrap_or_else(|error| {
                refused[family.place()] = Some(error);
                Function::NONE
            })
        };
        let mut folds = [[Function::NONE; TYPES]; FoldOp::ALL.len()];
        for op in FoldOp::ALL {
            for dtype in DType::ALL.into_iter().filter(|dtype| names::has_fold(op, *dtype)) {
                folds[op as usize][dtype as usize] = find(names::fold(op, dtype));
            }
        }
        let [mut divisions, mut products] = [[Function::NONE; TYPES]; 2];
        for dtype in DIVIDED {
            divisions[dtype as usize] = find(names::divide(dtype));
        }
        for dtype in FLOATS {
            products[dtype as usize] = find(names::multiply(dtype));
        }
        let truth = find(names::truth());
        let [fill, check] = ["fill_pattern", "check_pattern"].map(|name| find((FamilySet::CHECK, name.to_owned())));
        let most_blocks = gpu.multiprocessors.max(1) * BLOCKS_PER_MULTIPROCESSOR;
        let modules = loaded.into_iter().flatten().collect();
        Self { folds, divisions, products, truth, fill, check, most_blocks, refused, _modules: modules }
    }

    /// Returns the families that can be used: those of which the driver has accepted every kernel.
    pub(crate) fn families(&self) -> FamilySet {
        let bits = self.refused.iter().rev().fold(0, |bits, refused| bits << 1 | u8::from(refused.is_none()));
        FamilySet::from_bits(bits)
    }

    /// Returns why the driver has refused a family: the first one, if it has refused several.
    pub(crate) fn refusal(&self) -> Option<&Error> {
        self.refused.iter().flatten().next()
    }

    /// Refuses to use a family that is missing.
    fn require(&self, family: FamilySet) -> Result<()> {
        self.refused[family.place()].clone().map_or(Ok(()), Err)
    }

    /// Returns the fold of an op on a type.
    ///
    /// # Errors
    ///
    /// `Unsupported` if there is none.
    pub(crate) fn fold_of(&self, op: FoldOp, dtype: DType) -> Result<Function> {
        let function = self.folds[op as usize][dtype as usize];
        let lacking =
            || Error::unsupported(format!("a fold of {dtype} by {}", op.name()), "there is no kernel for this op and element type");
        function.handle().map(|_| function).ok_or_else(lacking)
    }

    /// Folds inputs into an output.
    ///
    /// # Safety
    ///
    /// `function` is a fold of elements of `element_bytes`, of a module that remains loaded until the stream has passed
    /// the call. Until then, inputs and output are memory of the stream's device, and may be used at that point of the
    /// stream.
    pub(crate) unsafe fn fold(
        &self,
        function: Function,
        arguments: &FoldArguments,
        element_bytes: usize,
        stream: &CudaStream,
    ) -> Result<()> {
        let FoldArguments { mut inputs, mut stride, own, mut ranks, mut output, mut count, mut divisor } = *arguments;
        let (mut own, mut own_index) = own.unwrap_or((0, u32::MAX));
        let mut parameters = [
            address(&mut inputs),
            address(&mut stride),
            address(&mut own),
            address(&mut own_index),
            address(&mut ranks),
            address(&mut output),
            address(&mut count),
            address(&mut divisor),
        ];
        // SAFETY: the parameters are those of a fold; the rest is the caller's promise.
        unsafe { self.launch(function, "a fold", count * element_bytes as u64, stream, &mut parameters) }
    }

    /// Divides each element in place.
    ///
    /// # Safety
    ///
    /// `data` is `count` elements of this type, in memory of the stream's device, until the stream has passed the call.
    pub(crate) unsafe fn divide(&self, dtype: DType, mut data: u64, mut count: u64, mut divisor: u32, stream: &CudaStream) -> Result<()> {
        let function = self.divisions[dtype as usize];
        let mut parameters = [address(&mut data), address(&mut count), address(&mut divisor)];
        // SAFETY: the parameters are those of a division; the rest is the caller's promise.
        unsafe { self.launch(function, "a division", count * dtype.size_bytes() as u64, stream, &mut parameters) }
    }

    /// Multiplies each element by a scalar, which is rounded to the type first. Source and destination may be the same.
    ///
    /// # Safety
    ///
    /// Both are `count` elements of this type, in memory of the stream's device, until the stream has passed the call.
    pub(crate) unsafe fn multiply(
        &self,
        dtype: DType,
        mut source: u64,
        mut destination: u64,
        mut count: u64,
        mut scalar: f64,
        stream: &CudaStream,
    ) -> Result<()> {
        let function = self.products[dtype as usize];
        let mut parameters = [address(&mut source), address(&mut destination), address(&mut count), address(&mut scalar)];
        // SAFETY: the parameters are those of a multiplication; the rest is the caller's promise.
        unsafe { self.launch(function, "a multiplication", count * dtype.size_bytes() as u64, stream, &mut parameters) }
    }

    /// Makes every byte a truth value: a byte that is neither 0 nor 1 becomes 1.
    ///
    /// # Safety
    ///
    /// `data` is `bytes` bytes of memory of the stream's device until the stream has passed the call.
    pub(crate) unsafe fn make_truths(&self, mut data: u64, mut bytes: u64, stream: &CudaStream) -> Result<()> {
        let mut parameters = [address(&mut data), address(&mut bytes)];
        // SAFETY: the parameters are those of the kernel, which reads and writes only these bytes: memory there is the
        // caller's promise.
        unsafe { self.launch(self.truth, "making truth values", bytes, stream, &mut parameters) }
    }

    /// Fills memory with a repeated pattern, beginning at the pattern's `phase`-th byte.
    ///
    /// # Safety
    ///
    /// Destination and pattern have the stated lengths, do not overlap, and are memory of the stream's device until the
    /// stream has passed the call.
    pub(crate) unsafe fn fill_pattern(
        &self,
        (mut destination, mut bytes): (u64, u64),
        (mut pattern, mut pattern_bytes): (u64, u64),
        mut phase: u64,
        stream: &CudaStream,
    ) -> Result<()> {
        self.require(FamilySet::CHECK)?;
        let mut parameters =
            [address(&mut destination), address(&mut bytes), address(&mut pattern), address(&mut pattern_bytes), address(&mut phase)];
        // SAFETY: the parameters are those of the kernel; the rest is the caller's promise.
        unsafe { self.launch(self.fill, "filling memory", bytes, stream, &mut parameters) }
    }

    /// Counts how many of `count` elements differ from a repeated pattern, beginning at the pattern's `phase`-th
    /// element. Adds the result to the number at `wrong`.
    ///
    /// # Safety
    ///
    /// Buffer and pattern hold the stated numbers of elements, and `wrong` is an aligned 64-bit number. All are memory
    /// of the stream's device until the stream has passed the call.
    pub(crate) unsafe fn check_pattern(
        &self,
        (mut buffer, mut count): (u64, u64),
        mut element_bytes: u32,
        (mut pattern, mut pattern_elements): (u64, u64),
        mut phase: u64,
        mut wrong: u64,
        stream: &CudaStream,
    ) -> Result<()> {
        self.require(FamilySet::CHECK)?;
        let bytes = count * u64::from(element_bytes);
        let mut parameters = [
            address(&mut buffer),
            address(&mut count),
            address(&mut element_bytes),
            address(&mut pattern),
            address(&mut pattern_elements),
            address(&mut phase),
            address(&mut wrong),
        ];
        // SAFETY: the parameters are those of the kernel; the rest is the caller's promise.
        unsafe { self.launch(self.check, "checking memory", bytes, stream, &mut parameters) }
    }

    /// Puts a kernel on a stream, with as many blocks as `bytes` can keep busy. The stream's context is current.
    ///
    /// # Safety
    ///
    /// The parameters are those of the kernel, and the memory that they point to may be used there; its module remains
    /// loaded until it has run.
    unsafe fn launch(&self, function: Function, what: &str, bytes: u64, stream: &CudaStream, parameters: &mut [*mut c_void]) -> Result<()> {
        let blocks = bytes.div_ceil(CHUNK_BYTES * u64::from(BLOCK)).clamp(1, u64::from(self.most_blocks)) as u32;
        // SAFETY: the parameters are the kernel's, and it may use their memory: this function's contract, which is the
        // same.
        unsafe { Self::launch_blocks(function, what, blocks, stream, parameters) }
    }

    /// Puts a kernel on a stream, with this many blocks.
    ///
    /// # Safety
    ///
    /// The parameters are those of the kernel, and the memory that they point to may be used there; its module remains
    /// loaded until it has run.
    unsafe fn launch_blocks(
        function: Function,
        what: &str,
        blocks: u32,
        stream: &CudaStream,
        parameters: &mut [*mut c_void],
    ) -> Result<()> {
        let Some(handle) = function.handle() else {
            return Err(Error::unsupported(what, "there is no kernel for this element type"));
        };
        let stream: CUstream = stream.cu_stream();
        // SAFETY: the module is loaded, the stream is alive, and the driver copies the parameters; the rest is the
        // caller's promise.
        unsafe { result::launch_kernel(handle, (blocks, 1, 1), (BLOCK, 1, 1), 0, stream, parameters) }
            .map_err(|error| cuda_error(format!("launching the kernel of {what}"), error))
    }
}

/// Returns the address of a parameter.
fn address<T>(parameter: &mut T) -> *mut c_void {
    std::ptr::from_mut(parameter).cast()
}

#[cfg(test)]
#[cfg(simgpu)]
mod tests {
    //! Which images are loaded, and when, on the simulated GPU.

    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::sync::Arc;

    use super::names::FAMILIES;
    use super::*;
    use crate::device::driver;

    /// Returns the kernels of a device, and the number of their images.
    fn loaded() -> (Arc<Kernels>, u64) {
        let before = modules();
        let kernels = Kernels::on(&driver::open(0).unwrap());
        (kernels, modules() - before)
    }

    fn modules() -> u64 {
        simgpu::counts().modules as u64
    }

    /// Reserves the simulation for one test.
    fn alone() -> simgpu::Alone {
        simgpu::install();
        simgpu::alone()
    }

    #[test]
    fn images_are_loaded_once_for_all_who_use_a_device() {
        let _alone = alone();
        let (kernels, images) = loaded();
        assert_eq!(images, FAMILIES.len() as u64);
        let before = modules();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                // Another communicator on the same device gets the same kernels.
                scope.spawn(|| drop(Kernels::on(&driver::open(0).unwrap())));
            }
        });
        assert_eq!(modules(), before);
        drop(kernels);
        assert_eq!(modules() + FAMILIES.len() as u64, before);
        assert_eq!(simgpu::reports(), [""; 0]);
    }

    #[test]
    fn a_family_that_is_refused_is_missing_until_it_is_loaded_again() {
        let _alone = alone();
        let gpu = driver::open(0).unwrap();
        // The second time the driver is called for its compiler's text.
        simgpu::fail_call_of_this_thread("cuModuleLoadData", 1, 200);
        let kernels = Kernels::on(&gpu);
        assert_eq!(FamilySet::ALL.without(kernels.families()), FamilySet::BITS);
        let refusal = kernels.refusal().unwrap().to_string();
        assert!(refusal.contains("loading kernels of the family \"bits\" on device 0"), "{refusal}");
        assert!(kernels.fold_of(FoldOp::And, DType::U8).is_err() && kernels.fold_of(FoldOp::Avg, DType::F32).is_ok());
        drop(kernels);
        assert_eq!(Kernels::on(&gpu).families(), FamilySet::ALL);
    }

    #[test]
    fn a_family_without_one_of_its_kernels_is_missing() {
        let _alone = alone();
        let gpu = driver::open(0).unwrap();
        simgpu::fail_call_of_this_thread("cuModuleGetFunction", 1, 500);
        let kernels = Kernels::on(&gpu);
        assert_eq!(FamilySet::ALL.without(kernels.families()), FamilySet::SUM, "the first fold is a sum");
        assert!(kernels.refusal().unwrap().to_string().contains("looking up the kernel"));
    }
}
