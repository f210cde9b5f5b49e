//! Whole kernels, compiled by several versions of NVRTC and compared with plain Rust bit by bit. See `ptx/kernels.cu`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{Arguments, Device, Random, bytes, run, size, values};
use simgpu_ptx::{Launch, Module};

const COUNTS: [usize; 7] = [0, 1, 7, 8, 9, 1000, 70001];

/// Returns every compiled form of the kernels.
fn modules() -> Vec<(&'static str, Module)> {
    let texts = [
        ("NVRTC 11.8 for sm_70", include_str!("ptx/kernels_nvrtc11.8_sm70.ptx")),
        ("NVRTC 12.0 for sm_70", include_str!("ptx/kernels_nvrtc12.0_sm70.ptx")),
        ("NVRTC 12.0 for sm_80", include_str!("ptx/kernels_nvrtc12.0_sm80.ptx")),
        ("NVRTC 12.9 for sm_90", include_str!("ptx/kernels_nvrtc12.9_sm90.ptx")),
        ("NVRTC 13.0 for sm_100", include_str!("ptx/kernels_nvrtc13.0_sm100.ptx")),
    ];
    texts.into_iter().map(|(name, text)| (name, Module::parse(text).unwrap_or_else(|error| panic!("{name}: {error}")))).collect()
}

fn random_bytes(count: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    (0..count).map(|_| random.next() as u8).collect()
}

fn random_words(count: usize, seed: u64) -> Vec<u32> {
    let mut random = Random(seed);
    (0..count).map(|_| (random.next() >> (random.next() % 40)) as u32).collect()
}

#[test]
fn what_a_module_says_of_itself() {
    let found: Vec<_> = modules().iter().map(|(_, module)| (module.version(), module.target())).collect();
    assert_eq!(found, [((7, 8), 70), ((8, 0), 70), ((8, 0), 80), ((8, 8), 90), ((9, 0), 100)]);
    for (name, module) in modules() {
        assert_eq!(module.kernels().count(), 10, "{name}");
        let mean = module.kernel("mean16").unwrap();
        let parameters: Vec<_> = mean.parameters().iter().map(|p| (p.offset, p.bytes, p.align)).collect();
        assert_eq!((parameters, mean.parameter_bytes()), (vec![(0, 8, 8), (8, 72, 8), (80, 8, 8)], 88), "{name}");
        assert_eq!(module.kernel("xor_bytes").unwrap().max_threads(), Some([512, 1, 1]), "{name}");
        assert_eq!(mean.max_threads(), None, "{name}");
        assert_eq!(module.kernel("checksum").unwrap().shared_bytes(), 2048, "{name}");
        assert_eq!(module.kernel("histogram").unwrap().shared_bytes(), 0, "{name}");
        assert!(module.kernel("power").is_none(), "{name}");
        assert_eq!(module.globals_bytes(), module.globals_image(0).len(), "{name}");
    }
}

#[test]
fn bytes_are_combined_by_vectors_and_one_by_one() {
    for (name, module) in modules() {
        for count in COUNTS {
            let (a, b) = (random_bytes(count, 1), random_bytes(count, 2));
            let mut device = Device::default();
            let [out, at_a, at_b] = [&vec![0; count], &a, &b].map(|bytes| device.put(bytes));
            let arguments = Arguments::default().with(out).with(at_a).with(at_b).with(count as u64);
            let touched = run(&module, "xor_bytes", &size(3, 64), arguments, &mut device).unwrap();
            let expected: Vec<u8> = a.iter().zip(&b).map(|(a, b)| a ^ b).collect();
            assert_eq!(device.get(out), expected, "{name}, {count} bytes");
            let range = |at: u64| at..at + count as u64;
            let (reads, writes) = if count == 0 { (vec![], vec![]) } else { (vec![range(at_a), range(at_b)], vec![range(out)]) };
            assert_eq!((touched.reads, touched.writes), (reads, writes), "{name}, {count} bytes");
        }
    }
}

/// Returns a finite half precision number as `f32`.
fn widened(bits: u16, halves: bool) -> f32 {
    if !halves {
        return f32::from_bits(u32::from(bits) << 16);
    }
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 0x3ff));
    let magnitude = if exponent == 0 { fraction * 2_f32.powi(-24) } else { (fraction + 1024.0) * 2_f32.powi(exponent - 25) };
    if bits >> 15 == 1 { -magnitude } else { magnitude }
}

/// Rounds to the nearest, ties to even, using only the bits; the number is finite and not too large.
fn narrowed(value: f32, halves: bool) -> u16 {
    let bits = value.to_bits();
    if !halves {
        return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    }
    let unit = if value.abs() < 2_f32.powi(-14) { -24 } else { (bits >> 23 & 255) as i32 - 127 - 10 };
    let steps = (f64::from(value.abs()) * 2_f64.powi(-unit)).round_ties_even() as u32;
    let magnitude = if unit == -24 && steps < 1024 { steps } else { steps - 1024 + ((unit + 25) as u32) * 1024 };
    (magnitude | bits >> 31 << 15) as u16
}

#[test]
fn means_of_two_formats_are_rounded_once() {
    for (name, module) in modules() {
        for (count, ranks, halves) in
            COUNTS.iter().flat_map(|&count| [(count, 2, true), (count, 3, false), (count, 8, true), (count, 5, false)])
        {
            let mut random = Random(count as u64);
            let mut element = || {
                let bits = random.next() as u16;
                // Finite, and not so large that a sum overflows.
                if halves { bits & 0xdfff } else { bits & 0x807f | ((random.next() % 240 + 2) as u16) << 7 }
            };
            let inputs: Vec<Vec<u16>> = (0..ranks).map(|_| (0..count).map(|_| element()).collect()).collect();
            let mut device = Device::default();
            let out = device.put(&vec![0; 2 * count]);
            let mut arguments = Arguments::default().with(out);
            for rank in 0..8 {
                arguments = arguments.with(inputs.get(rank).map_or(0, |input| device.put(&bytes(input))));
            }
            let arguments = arguments.with(ranks as u32).with(u8::from(halves)).with(count as u64);
            run(&module, "mean16", &size(5, 96), arguments, &mut device).unwrap();
            let mean =
                |i: usize| narrowed(inputs.iter().map(|input| widened(input[i], halves)).fold(0.0, |a, b| a + b) / ranks as f32, halves);
            let expected: Vec<u16> = (0..count).map(mean).collect();
            assert_eq!(values::<u16>(&device.get(out)), expected, "{name}, {ranks} inputs of {count}, halves {halves}");
        }
    }
}

#[test]
fn sums_meet_in_shared_memory_and_atomics() {
    for (name, module) in modules() {
        for count in COUNTS {
            let words = random_words(count, 5);
            let mut device = Device::default();
            let total = device.put(&bytes(&[10_u64]));
            let largest = device.put(&bytes(&[3_u32]));
            let input = device.put(&bytes(&words));
            let arguments = Arguments::default().with(total).with(largest).with(input).with(count as u64);
            run(&module, "checksum", &size(3, 256), arguments, &mut device).unwrap();
            let of_thread = |thread: usize| {
                words.iter().skip(thread).step_by(768).fold(0_u64, |sum, &word| sum.wrapping_mul(31).wrapping_add(word.into()))
            };
            let expected = (0..768).map(of_thread).fold(10_u64, u64::wrapping_add);
            assert_eq!(values::<u64>(&device.get(total)), [expected], "{name}, {count} words");
            assert_eq!(values::<u32>(&device.get(largest)), [words.iter().copied().fold(3, u32::max)], "{name}, {count} words");
        }
    }
}

#[test]
fn dynamic_shared_memory_counts() {
    for (name, module) in modules() {
        for count in COUNTS {
            let input = random_bytes(count, 9);
            let mut device = Device::default();
            let (counts, at) = (device.put(&[0; 1024]), device.put(&input));
            let launch = Launch { dynamic_shared_bytes: 1024, ..size(4, 100) };
            let arguments = Arguments::default().with(counts).with(at).with(count as u32);
            run(&module, "histogram", &launch, arguments, &mut device).unwrap();
            let mut expected = vec![0_u32; 256];
            input.iter().for_each(|&byte| expected[byte as usize] += 1);
            assert_eq!(values::<u32>(&device.get(counts)), expected, "{name}, {count} bytes");
        }
    }
}

fn power(base: u64, exponent: u32, modulus: u64, multiplications: &mut u64) -> u64 {
    if exponent == 0 {
        return 1 % modulus;
    }
    let root = power(base, exponent / 2, modulus, multiplications);
    *multiplications += 1;
    let square = root * root % modulus;
    if exponent % 2 == 1 { square * (base % modulus) % modulus } else { square }
}

fn digits_and_power(input: u64) -> u64 {
    let (mut digits, mut length, mut multiplications, mut rest) = ([0; 20], 0, 0, input);
    while rest != 0 {
        digits[length % 20] = rest % 7;
        length += 1;
        rest /= 7;
    }
    let mut sum = power(input, input as u32 & 63, 1_000_003, &mut multiplications) << 32;
    sum |= multiplications << 16;
    for k in 0..length {
        sum += digits[(input.wrapping_add(k as u64) % length as u64 % 20) as usize] * [2, 3, 5, 7, 11][k % 5];
    }
    sum
}

#[test]
fn calls_recursion_local_memory_and_variables_of_the_module() {
    for (name, module) in modules() {
        for count in [0, 1, 9, 1000] {
            let mut random = Random(13);
            let input: Vec<u64> = (0..count).map(|i| if i == 0 { 0 } else { random.next() >> (random.next() % 64) }).collect();
            let mut device = Device::default();
            let [out, real, at] = [vec![0; 8 * count], vec![0; 8 * count], bytes(&input)].map(|bytes| device.put(&bytes));
            let globals = device.put(&module.globals_image(device.next()));
            let arguments = Arguments::default().with(out).with(real).with(at).with(count as u32);
            let launch = size(count.div_ceil(64).max(1) as u32, 64);
            simgpu_ptx::launch(module.kernel("variables").unwrap(), &launch, &arguments.0, globals, &device).unwrap();
            let expected: Vec<u64> = input.iter().map(|&input| digits_and_power(input)).collect();
            assert_eq!(values::<u64>(&device.get(out)), expected, "{name}, {count}");
            let roots = input.iter().enumerate().map(|(i, &input)| (input as f64).sqrt() / 3.0 + [0.5, -1.25, 1e300][i % 3]);
            assert_eq!(device.get(real), bytes(&roots.collect::<Vec<f64>>()), "{name}, {count}");
            // The counter begins at 100 and is kept in the module's variables.
            let calls = device.put(&[0; 8]);
            let arguments = Arguments::default().with(calls);
            simgpu_ptx::launch(module.kernel("read_calls").unwrap(), &size(1, 1), &arguments.0, globals, &device).unwrap();
            assert_eq!(values::<u64>(&device.get(calls)), [100 + count as u64], "{name}, {count}");
        }
    }
}

fn switched(x: u32, i: u32) -> u32 {
    match x % 11 {
        0 => x.count_ones(),
        1 => x.leading_zeros() * 3,
        2 => x.reverse_bits() ^ i,
        3 => u32::from_le_bytes([x.to_le_bytes()[0], i.to_le_bytes()[0], x.to_le_bytes()[2], i.to_le_bytes()[2]]),
        4 => ((u64::from(i) << 32 | u64::from(x)) << (x & 31) >> 32) as u32,
        5 => ((u64::from(x) * 0x9e37_79b9) >> 32) as u32,
        6 => (x as i32).wrapping_div(-7) as u32 % 1000,
        7 => {
            if x == 0 {
                0
            } else {
                x.trailing_zeros() + 1
            }
        }
        8 => f32::from_bits(x & 0x4fff_ffff).round_ties_even() as i32 as u32,
        9 => (x & 0xff) << 24 | (x & 0xffff) >> 8,
        _ => ((x as i32).max(i as i32) as u32).wrapping_sub(x.min(i)),
    }
}

#[test]
fn switches_and_integer_instructions() {
    for (name, module) in modules() {
        for count in COUNTS {
            let input = random_words(count, 17);
            let mut device = Device::default();
            let (out, at) = (device.put(&vec![0; 4 * count]), device.put(&bytes(&input)));
            let arguments = Arguments::default().with(out).with(at).with(count as u32);
            run(&module, "switches", &size(7, 128), arguments, &mut device).unwrap();
            let expected: Vec<u32> = input.iter().enumerate().map(|(i, &x)| switched(x, i as u32)).collect();
            assert_eq!(values::<u32>(&device.get(out)), expected, "{name}, {count}");
        }
    }
}

/// Returns what one warp of the kernel `warps` writes.
fn warp(x: &[u32]) -> Vec<u32> {
    let total = x.iter().copied().fold(0, u32::wrapping_add);
    let lanes = |test: &dyn Fn(usize) -> bool| (0..32).filter(|&lane| test(lane)).fold(0_u32, |lanes, lane| lanes | 1 << lane);
    let votes = u32::from(x.iter().any(|&x| x > 4_000_000_000)) | if x.iter().all(|&x| x > 100) { 2 } else { 0 };
    let one = |lane: usize| {
        let scan = x[..=lane].iter().copied().fold(0, u32::wrapping_add);
        let third = if lane.is_multiple_of(3) { 11_000_u32.wrapping_add(x[3]) } else { 0 };
        let parts = [
            (scan, 3),
            (lanes(&|l| x[l] & 1 == 1), 5),
            (x[lane ^ 3], 7),
            (third, 11),
            (lanes(&|l| x[l] % 4 == x[lane] % 4), 13),
            (votes, 17),
        ];
        parts.iter().fold(total, |sum, &(part, factor)| sum ^ part.wrapping_mul(factor))
    };
    (0..32).map(one).collect()
}

#[test]
fn warps_shuffle_vote_and_match() {
    for (name, module) in modules() {
        let input: Vec<u32> = random_words(192, 23).into_iter().enumerate().map(|(i, x)| if i / 32 == 1 { x | 0x400 } else { x }).collect();
        let mut device = Device::default();
        let (out, at) = (device.put(&[0; 768]), device.put(&bytes(&input)));
        run(&module, "warps", &size(2, 96), Arguments::default().with(out).with(at), &mut device).unwrap();
        let expected: Vec<u32> = input.chunks(32).flat_map(warp).collect();
        assert_eq!(values::<u32>(&device.get(out)), expected, "{name}");
    }
}

#[test]
fn blocks_of_two_dimensions_turn_a_matrix_around() {
    for (name, module) in modules() {
        for (width, height) in [(1, 1), (16, 16), (37, 5), (70, 100)] {
            let input: Vec<f32> = (0..width * height).map(|i| i as f32 * 0.5).collect();
            let mut device = Device::default();
            let (out, at) = (device.put(&vec![0; 4 * width * height]), device.put(&bytes(&input)));
            let launch =
                Launch { grid: [width.div_ceil(16) as u32, height.div_ceil(16) as u32, 1], block: [16, 16, 1], dynamic_shared_bytes: 0 };
            let arguments = Arguments::default().with(out).with(at).with(width as u32).with(height as u32);
            run(&module, "transpose", &launch, arguments, &mut device).unwrap();
            let expected: Vec<f32> = (0..width).flat_map(|x| input.iter().skip(x).step_by(width).copied()).collect();
            assert_eq!(values::<f32>(&device.get(out)), expected, "{name}, {width}x{height}");
        }
    }
}

#[test]
fn threads_wait_for_one_another_through_memory_and_counting_barriers() {
    for (name, module) in modules() {
        let mut device = Device::default();
        let out = device.put(&[0; 256]);
        run(&module, "waiting", &size(1, 64), Arguments::default().with(out), &mut device).unwrap();
        assert_eq!(values::<u32>(&device.get(out)), [22 * 100 + 2 * 10 + 1; 64], "{name}");
    }
}
