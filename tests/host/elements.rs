//! Element types of other crates: structs that wrap one, and those of the crate `float8`.

use collectives::{Communicator, CustomOp, DType, Element, ReduceOp};

use crate::common::ranks::{Wiring, threads};

/// Types of a program that allows no unsafe code.
mod wrappers {
    #![forbid(unsafe_code)]

    /// A wrapper, as a crate of the program might define it.
    #[derive(Debug, Clone, Copy, PartialEq, Default)]
    pub(crate) struct Meters(pub(crate) f64);
    collectives::element!(Meters(f64));

    #[derive(Debug, Clone, Copy, PartialEq, Default)]
    pub(crate) struct Flag {
        pub(crate) is_set: bool,
    }
    collectives::element!(Flag { is_set: bool });

    /// A wrapper of a wrapper.
    #[derive(Debug, Clone, Copy, PartialEq, Default)]
    pub(crate) struct Height(pub(crate) Meters);
    collectives::element!(Height(Meters));

    #[derive(Debug, Clone, Copy, PartialEq, Default)]
    pub(crate) struct Weight(pub(crate) collectives::bf16);
    collectives::element!(Weight(collectives::bf16));
}

use wrappers::{Flag, Height, Meters, Weight};

fn is_an_element<T: Element>(dtype: DType) {
    assert_eq!((T::ELEMENT_TYPE, size_of::<T>()), (dtype, dtype.size_bytes()));
}

#[test]
fn wrappers_are_what_they_wrap() {
    is_an_element::<Meters>(DType::F64);
    is_an_element::<Flag>(DType::Bool);
    is_an_element::<Height>(DType::F64);
    is_an_element::<Weight>(DType::Bf16);
}

#[test]
fn wrappers_are_reduced_and_moved_as_their_fields_are() {
    for wiring in [Wiring::Shm, Wiring::Tcp, Wiring::Pairs] {
        threads(wiring, 3, |comm| {
            let me = comm.rank() as f64;
            // Rank 1 uses the type of the field.
            let (mut meters, mut numbers) = (vec![Meters(me + 1.0); 1000], vec![me + 1.0; 1000]);
            match comm.rank() {
                1 => comm.all_reduce(&mut numbers, ReduceOp::Avg).unwrap(),
                _ => comm.all_reduce(&mut meters, ReduceOp::Avg).unwrap(),
            }
            assert!(if me == 1.0 { numbers == [2.0; 1000] } else { meters == [Meters(2.0); 1000] });
            let mut one = Height(Meters(me));
            comm.all_reduce(&mut one, ReduceOp::PreMulSum(0.5)).unwrap();
            assert_eq!(one, Height(Meters(1.5)));
            let mut weights = [Weight(collectives::bf16::from_f32(me as f32)); 5];
            comm.all_reduce(&mut weights, ReduceOp::PreMulSum(2.0)).unwrap();
            assert_eq!(weights[4].0.to_f32(), 6.0);
            let mut flags = [Flag { is_set: me == 2.0 }, Flag { is_set: true }];
            comm.all_reduce(&mut flags, ReduceOp::Min).unwrap();
            assert_eq!(flags, [Flag { is_set: false }, Flag { is_set: true }]);
            messages(comm);
        });
    }
}

fn messages(comm: &Communicator) {
    let (n, me) = (comm.world_size(), comm.rank());
    let mut theirs = [Meters::default(); 2];
    let received = comm.send_recv(&[Meters(me as f64); 2], (me + 1) % n, &mut theirs, (me + n - 1) % n).unwrap();
    assert_eq!((theirs, received.count), ([Meters(((me + n - 1) % n) as f64); 2], 2));
    let work = comm.start_all_gather_into(vec![Height(Meters(me as f64))], vec![Height::default(); n]).unwrap();
    assert_eq!(work.wait().unwrap().1[n - 1], Height(Meters((n - 1) as f64)));
}

#[test]
fn ops_of_wrappers() {
    let farther = CustomOp::ordered("farther", |into: &mut [Meters], from: &[Meters]| {
        into.iter_mut().zip(from).for_each(|(into, from)| *into = if from.0.abs() > into.0.abs() { *from } else { *into });
    });
    threads(Wiring::Shm, 2, |comm| {
        let mut far = [[Meters(1.0), Meters(-4.0)], [Meters(-2.0), Meters(3.0)]][comm.rank()];
        comm.all_reduce(&mut far, &farther).unwrap();
        assert_eq!(far, [Meters(-2.0), Meters(-4.0)]);
    });
}

#[cfg(feature = "float8")]
mod float8_crate {
    use super::{Communicator, DType, ReduceOp, Wiring, is_an_element, threads};

    /// Both crates map every byte to the same value. NaNs may differ in their bits.
    #[test]
    fn every_byte_means_the_same_in_both_crates() {
        is_an_element::<float8::F8E4M3>(DType::F8E4M3);
        is_an_element::<float8::F8E5M2>(DType::F8E5M2);
        let same = |theirs: f32, ours: f32| theirs.to_bits() == ours.to_bits() || theirs.is_nan() && ours.is_nan();
        for bits in 0..=255 {
            let (theirs, ours) = (float8::F8E4M3::from_bits(bits).to_f32(), collectives::F8E4M3::from_bits(bits).to_f32());
            assert!(same(theirs, ours), "{bits:#04x} is {theirs} to float8 and {ours} here, as E4M3");
            let (theirs, ours) = (float8::F8E5M2::from_bits(bits).to_f32(), collectives::F8E5M2::from_bits(bits).to_f32());
            assert!(same(theirs, ours), "{bits:#04x} is {theirs} to float8 and {ours} here, as E5M2");
        }
    }

    fn sums(comm: &Communicator) {
        let (theirs, ours) = ([float8::F8E4M3::from_f32(1.5); 9], [collectives::F8E4M3::from_f32(1.5); 9]);
        let (mut theirs, mut ours) = (theirs, ours);
        // The ranks agree whichever type each of them uses.
        match comm.rank() {
            0 => comm.all_reduce(&mut theirs, ReduceOp::Sum).unwrap(),
            _ => comm.all_reduce(&mut ours, ReduceOp::Sum).unwrap(),
        }
        assert_eq!(if comm.rank() == 0 { theirs[8].to_f32() } else { ours[8].to_f32() }, 3.0);
        let mut one = float8::F8E5M2::from_f32(comm.rank() as f32);
        comm.all_reduce(&mut one, ReduceOp::Max).unwrap();
        assert_eq!(one.to_f32(), 1.0);
    }

    #[test]
    fn they_are_reduced() {
        threads(Wiring::Shm, 2, sums);
        threads(Wiring::Tcp, 2, sums);
    }
}
