//! The kernels that the crate ships, from `kernels/ptx` of the workspace: all of them are decoded, and some are run.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::Path;

use common::{Arguments, Device, Plain, Random, bytes, run, size, values};
use simgpu_ptx::{Launch, Module};

const COUNTS: [usize; 7] = [0, 1, 7, 8, 9, 1000, 70001];

/// Returns every module, with the name of its file.
fn modules() -> Vec<(String, Module)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let entries =
        ["kernels/ptx", "train/kernels/ptx"].map(|folder| root.join(folder).read_dir().unwrap_or_else(|error| panic!("{folder}: {error}")));
    let mut found = Vec::new();
    for path in entries
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "ptx"))
    {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&path).unwrap();
        found.push((name.clone(), Module::parse(&text).unwrap_or_else(|error| panic!("{name}: {error}"))));
    }
    assert!(found.len() >= 6, "only {} modules", found.len());
    found
}

/// Returns the modules that have this kernel, one for each target.
fn modules_with(kernel: &str) -> Vec<(String, Module)> {
    let found: Vec<_> = modules().into_iter().filter(|(_, module)| module.kernel(kernel).is_some()).collect();
    let mut targets: Vec<u32> = found.iter().map(|(_, module)| module.target()).collect();
    targets.sort_unstable();
    assert_eq!(targets, [70, 80], "{kernel}");
    found
}

#[test]
fn every_module_decodes_and_asks_for_no_more_than_the_oldest_driver_has() {
    for (name, module) in modules() {
        assert!(module.version() <= (8, 0), "{name} needs PTX {:?}", module.version());
        assert!(module.kernels().count() > 0, "{name} has no kernels");
        assert!(module.kernels().all(|kernel| kernel.max_threads().is_some()), "{name} has a kernel without bounds");
        assert!(name.ends_with(&format!("sm{}", module.target())), "{name} is for sm_{}", module.target());
    }
}

/// Runs one fold: `inputs` of equal length, that of rank `own` separate from the others, all shifted by some bytes.
fn fold(module: &Module, kernel: &str, inputs: &[Vec<u8>], own: usize, divisor: u32, shift: usize, launch: &Launch) -> Vec<u8> {
    let length = inputs[0].len();
    let stride = length.next_multiple_of(16);
    let mut gathered = vec![0xEE; shift];
    for (rank, input) in inputs.iter().enumerate() {
        gathered.extend(if rank == own { &[0xEE; 70001 * 8][..length] } else { &input[..] });
        if rank + 1 < inputs.len() {
            gathered.resize(shift + (rank + 1) * stride, 0xEE);
        }
    }
    let shifted = |bytes: &[u8]| [&vec![0xEE; shift], bytes].concat();
    let mut device = Device::default();
    let base = device.put(&gathered);
    let (at_own, out) = (device.put(&shifted(&inputs[own])), device.put(&shifted(&vec![0; length])));
    let elements = length / element_bytes(kernel);
    let arguments = Arguments::default()
        .with(base + shift as u64)
        .with(stride as u64)
        .with(at_own + shift as u64)
        .with(own as u32)
        .with(inputs.len() as u32)
        .with(out + shift as u64)
        .with(elements as u64)
        .with(divisor);
    let touched = run(module, kernel, launch, arguments, &mut device).unwrap_or_else(|fault| panic!("{fault}"));
    let start = out + shift as u64;
    let written: Vec<_> = touched.writes.iter().map(|range| (range.start, range.end)).collect();
    let expected = if length == 0 { vec![] } else { vec![(start, start + length as u64)] };
    assert_eq!(written, expected, "{kernel} writes");
    device.get(out)[shift..].to_vec()
}

/// Returns the bytes of an element, from the last part of the kernel's name.
fn element_bytes(kernel: &str) -> usize {
    match kernel.rsplit('_').next().unwrap() {
        name if name.contains("f8") => 1,
        name => name.trim_start_matches(|c: char| c.is_alphabetic()).parse::<usize>().unwrap() / 8,
    }
}

fn inputs<T: Plain>(ranks: usize, count: usize, seed: u64, element: impl Fn(u64) -> T) -> Vec<Vec<T>> {
    let mut random = Random(seed);
    (0..ranks).map(|_| (0..count).map(|_| element(random.next())).collect()).collect()
}

fn in_bytes<T: Plain>(inputs: &[Vec<T>]) -> Vec<Vec<u8>> {
    inputs.iter().map(|input| bytes(input)).collect()
}

/// The ranks, the separate one, and the shift of all buffers in elements.
const CASES: [(usize, usize, usize); 4] = [(2, 0, 0), (3, 2, 1), (5, 1, 0), (8, 3, 3)];

#[test]
fn exclusive_or_of_bytes() {
    for (name, module) in modules_with("fold_xor_b8") {
        for count in COUNTS {
            for (ranks, own, shift) in CASES {
                let inputs = inputs(ranks, count, 3, |bits| bits as u8);
                let got = fold(&module, "fold_xor_b8", &inputs, own, 1, shift, &size(3, 96));
                let expected: Vec<u8> = (0..count).map(|i| inputs.iter().fold(0, |all, input| all ^ input[i])).collect();
                assert!(got == expected, "{name}: {ranks} inputs of {count} bytes, shifted by {shift}");
            }
        }
    }
}

/// Returns any finite number, including subnormal ones, and sometimes an infinity or a NaN.
fn odd_float(bits: u64) -> f32 {
    let single = f32::from_bits((bits >> 32) as u32);
    match bits % 64 {
        0 => f32::INFINITY,
        1 => -f32::INFINITY,
        2 => f32::NAN,
        3 => -0.0,
        4..20 => f32::from_bits(single.to_bits() & 0x80ff_ffff),
        _ => f32::from_bits(single.to_bits() & 0x83ff_ffff | 0x3c00_0000),
    }
}

#[test]
fn sums_of_f32_in_the_order_of_ranks() {
    for (name, module) in modules_with("fold_sum_f32") {
        for count in COUNTS {
            for (ranks, own, shift) in CASES {
                let inputs = inputs(ranks, count, 5, odd_float);
                let got = fold(&module, "fold_sum_f32", &in_bytes(&inputs), own, 1, 4 * shift, &size(2, 128));
                let sum = |i: usize| inputs[1..].iter().fold(inputs[0][i], |sum, input| sum + input[i]);
                let expected = (0..count).map(|i| if sum(i).is_nan() { 0x7fc0_0000 } else { sum(i).to_bits() });
                assert!(values::<u32>(&got).into_iter().eq(expected), "{name}: {ranks} inputs of {count}, shifted by {shift}");
            }
        }
    }
}

#[test]
fn means_of_bf16_are_rounded_once() {
    for (name, module) in modules_with("fold_avg_bf16") {
        for count in COUNTS {
            for (ranks, own, shift) in CASES {
                let inputs = inputs(ranks, count, 7, |bits| (odd_float(bits).to_bits() >> 16) as u16);
                let divisor = [ranks as u32, 1, 7, 4_194_304][count % 4];
                let got = fold(&module, "fold_avg_bf16", &in_bytes(&inputs), own, divisor, 2 * shift, &size(2, 128));
                let wide = |bits: u16| f32::from_bits(u32::from(bits) << 16);
                let mean = |i: usize| inputs[1..].iter().fold(wide(inputs[0][i]), |sum, input| sum + wide(input[i])) / divisor as f32;
                let narrow = |mean: f32| {
                    let bits = mean.to_bits();
                    if mean.is_nan() { 0x7fc0 } else { ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16 }
                };
                let expected = (0..count).map(|i| narrow(mean(i)));
                assert!(values::<u16>(&got).into_iter().eq(expected), "{name}: {ranks} inputs of {count} by {divisor}, shifted by {shift}");
            }
        }
    }
}

#[test]
fn every_fold_reads_and_writes_its_elements_only() {
    for (name, module) in modules() {
        for kernel in module.kernels().map(simgpu_ptx::Kernel::name).filter(|kernel| kernel.starts_with("fold_")) {
            let size_of = element_bytes(kernel);
            for (count, ranks, shift) in [(37, 1, 0), (1000, 3, 0), (77, 6, 1)] {
                let inputs = inputs(ranks, count * size_of, 11, |bits| bits as u8);
                let got = fold(&module, kernel, &inputs, ranks - 1, ranks as u32, shift * size_of, &size(2, 64));
                assert!(ranks > 1 || kernel.contains("avg") || got == inputs[0], "{name}: {kernel} of one input is a copy");
            }
        }
    }
}

#[test]
fn bytes_become_truth_values() {
    for (name, module) in modules_with("truth_b8") {
        for (count, shift) in [(0, 0), (1, 3), (16, 0), (17, 15), (5000, 7), (70001, 16)] {
            let mut random = Random(17);
            let bytes: Vec<u8> = (0..count).map(|at| if at % 3 == 0 { random.next() as u8 } else { (random.next() % 2) as u8 }).collect();
            let mut device = Device::default();
            let (buffer, first) = shifted(&mut device, shift, &[&bytes[..], &[0xEE]].concat());
            run(&module, "truth_b8", &size(3, 64), Arguments::default().with(first).with(count as u64), &mut device).unwrap();
            let expected: Vec<u8> = bytes.iter().map(|byte| u8::from(*byte != 0)).collect();
            assert!(device.get(buffer) == [&vec![0xEE; shift], &expected[..], &[0xEE]].concat(), "{name}: {count} bytes, shift {shift}");
        }
    }
}

#[test]
fn patterns_are_filled_and_checked() {
    for (name, module) in modules_with("fill_pattern") {
        for (bytes_in, pattern_bytes, phase, shift) in
            [(0, 16, 0, 0), (1, 32, 5, 1), (5000, 48, 7, 7), (70001, 1024, 1000, 3), (4096, 64, 16, 0)]
        {
            let mut random = Random(13);
            let pattern: Vec<u8> = (0..pattern_bytes).map(|_| random.next() as u8).collect();
            let mut device = Device::default();
            let buffer = device.put(&vec![0xEE; shift + bytes_in]) + shift as u64;
            let (at, wrong) = (device.put(&pattern), device.put(&[0; 8]));
            let arguments = Arguments::default().with(buffer).with(bytes_in as u64).with(at).with(pattern_bytes as u64).with(phase as u64);
            run(&module, "fill_pattern", &size(3, 64), arguments, &mut device).unwrap();
            let filled = device.get(buffer - shift as u64);
            let expected: Vec<u8> = (0..bytes_in).map(|i| pattern[(i + phase) % pattern_bytes]).collect();
            assert!(filled[shift..] == expected, "{name}: {bytes_in} bytes, phase {phase}, shift {shift}");
            // Compared with the pattern one position further on, the differences are counted.
            for phase in [phase, phase + 1] {
                let arguments = Arguments::default().with(buffer).with(bytes_in as u64).with(1_u32).with(at);
                let arguments = arguments.with(pattern_bytes as u64).with(phase as u64).with(wrong);
                run(&module, "check_pattern", &size(3, 128), arguments, &mut device).unwrap();
            }
            let differs =
                (0..bytes_in).filter(|i| pattern[(i + phase) % pattern_bytes] != pattern[(i + phase + 1) % pattern_bytes]).count();
            assert_eq!(values::<u64>(&device.get(wrong)), [differs as u64], "{name}: {bytes_in} bytes");
        }
    }
}

/// Returns a buffer, and the address `shift` bytes after its start.
fn shifted(device: &mut Device, shift: usize, bytes: &[u8]) -> (u64, u64) {
    let start = device.put(&[&vec![0xEE; shift], bytes].concat());
    (start, start + shift as u64)
}

/// Adds halves to halves, as a block of threads does.
fn sum_of_halves(mut sums: Vec<f64>) -> f64 {
    for half in (0..9).rev().map(|power| 1 << power) {
        (0..half).filter(|at| at + half < sums.len()).collect::<Vec<_>>().into_iter().for_each(|at| sums[at] += sums[at + half]);
    }
    sums[0]
}

#[test]
fn squares_are_added_up_in_an_order_of_their_own() {
    const BLOCKS: usize = 3;
    const THREADS: usize = 96;
    for (name, module) in modules_with("squares_f32") {
        for count in COUNTS {
            for shift in [0, 1] {
                let mut random = Random(17);
                let elements: Vec<f32> = (0..count).map(|_| (random.next() >> 40) as f32 / 3e5 - 7.0).collect();
                let mut device = Device::default();
                let (_, data) = shifted(&mut device, 4 * shift, &bytes(&elements));
                let (partials, total) = (device.put(&[0xEE; 8 * BLOCKS]), device.put(&bytes(&[2.5_f64])));
                let arguments = Arguments::default().with(data).with(count as u64).with(partials);
                run(&module, "squares_f32", &size(BLOCKS as u32, THREADS as u32), arguments, &mut device).unwrap();
                let arguments = Arguments::default().with(partials).with(BLOCKS as u64).with(total);
                run(&module, "add_partials", &size(1, 512), arguments, &mut device).unwrap();
                let mut threads = vec![vec![0.0_f64; THREADS]; BLOCKS];
                for (at, element) in elements.iter().enumerate() {
                    let thread = if at < count / 4 * 4 { at / 4 % (BLOCKS * THREADS) } else { 0 };
                    threads[thread / THREADS][thread % THREADS] += f64::from(*element) * f64::from(*element);
                }
                let expected: Vec<f64> = threads.into_iter().map(sum_of_halves).collect();
                assert_eq!(values::<f64>(&device.get(partials)), expected, "{name}: {count} elements, shifted by {shift}");
                let all = 2.5 + sum_of_halves([&expected[..], &[0.0; 509]].concat());
                assert_eq!(values::<f64>(&device.get(total)), [all], "{name}: {count} elements, shifted by {shift}");
            }
        }
    }
}

#[test]
fn elements_are_weighted_in_f64_and_rounded_to_f32_and_then_to_bf16() {
    for (name, module) in modules_with("convert_f32_bf16") {
        for count in COUNTS {
            for (weight, shift) in [(1.0 / 3.0, 0), (1.0, 1), (1e-3, 0)] {
                let mut random = Random(19);
                let elements: Vec<f32> = (0..count).map(|_| odd_float(random.next())).collect();
                let mut device = Device::default();
                let (_, source) = shifted(&mut device, 4 * shift, &bytes(&elements));
                let (start, destination) = shifted(&mut device, 2 * shift, &vec![0xEE; 2 * count]);
                let arguments = Arguments::default().with(source).with(destination).with(count as u64).with(weight);
                let touched = run(&module, "convert_f32_bf16", &size(2, 96), arguments, &mut device).unwrap();
                let written: Vec<_> = touched.writes.iter().map(|range| (range.start, range.end)).collect();
                let all = (destination, destination + 2 * count as u64);
                assert_eq!(written, if count == 0 { vec![] } else { vec![all] }, "{name}");
                let narrow = |wide: f32| {
                    let bits = wide.to_bits();
                    if wide.is_nan() { 0x7fc0 } else { ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16 }
                };
                let expected = elements.iter().map(|x| narrow((f64::from(*x) * weight) as f32));
                let got = values::<u16>(&device.get(start)[2 * shift..]);
                assert!(got.into_iter().eq(expected), "{name}: {count} elements by {weight}, shifted by {shift}");
            }
        }
    }
}

#[test]
fn products_in_place_are_rounded_once() {
    for (name, module) in modules_with("weigh_f32") {
        for count in COUNTS {
            for (factor, shift) in [(1.0 / 3.0, 0), (0.7, 3), (1e300, 1)] {
                let mut random = Random(23);
                let elements: Vec<f32> = (0..count).map(|_| odd_float(random.next())).collect();
                let mut device = Device::default();
                let (start, data) = shifted(&mut device, 4 * shift, &bytes(&elements));
                let arguments = Arguments::default().with(data).with(count as u64).with(factor);
                run(&module, "weigh_f32", &size(2, 96), arguments, &mut device).unwrap();
                let product = |x: &f32| (f64::from(*x) * factor) as f32;
                let expected = elements.iter().map(|x| if product(x).is_nan() { 0x7fc0_0000 } else { product(x).to_bits() });
                let got = values::<u32>(&device.get(start)[4 * shift..]);
                assert!(got.into_iter().eq(expected), "{name}: {count} elements by {factor}, shifted by {shift}");
            }
        }
    }
}
