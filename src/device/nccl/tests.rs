//! What can be said of NCCL without having it.

use nccl_sys::{NCCL_CONFIG_UNDEF_INT, Version, ncclDataType_t, ncclResult_t};

use half::{bf16, f16};

use super::raw::scalar_bytes;
use super::*;
use crate::ReduceOp;
use crate::host::reduce::premultiply;
use crate::nccl_config::{CtaPolicy, GraphUsage, NcclConfig};

const NEW: Version = Version::new(2, 28, 9);

fn code(code: u32, text: &str) -> Refusal {
    Refusal { call: "ncclAllReduce", reason: Reason::Code(ncclResult_t(code), text.to_owned()), grouped: false }
}

fn missing() -> Refusal {
    let missing = MissingSymbol { symbol: "ncclCommRevoke", since: Version::new(2, 28, 7), loaded: Version::new(2, 27, 5) };
    Refusal { call: "ncclCommRevoke", reason: Reason::Missing(missing), grouped: false }
}

#[test]
fn a_refusal_says_what_was_being_done_which_call_and_why() {
    let error = code(6, "remote process exited").into_error("rank 1 of 2: all_reduce".to_owned());
    assert_eq!(error.to_string(), "rank 1 of 2: all_reduce (ncclAllReduce): NCCL says 6 (ncclRemoteError): remote process exited");
    let error = missing().into_error("revoking".to_owned());
    assert!(error.is_unsupported());
    assert!(error.to_string().contains("revoking") && error.to_string().contains("2.28.7"), "{error}");
}

#[test]
fn only_wrong_arguments_and_missing_functions_are_harmless_and_not_in_groups() {
    for number in 1..10 {
        assert_eq!(code(number, "").is_harmless(), number == ncclResult_t::ncclInvalidArgument.0, "{number}");
        assert!(!code(number, "").in_group().is_harmless(), "{number}");
    }
    assert!(missing().is_harmless());
    assert!(!missing().in_group().is_harmless());
}

#[test]
fn every_code_has_a_name_and_strange_ones_too() {
    assert_eq!(code_name(ncclResult_t(0)), "ncclSuccess");
    assert_eq!(code_name(ncclResult_t(8)), "ncclTimeout");
    assert_eq!(code_name(ncclResult_t(99)), code_name(ncclResult_t(9)));
    let mut names: Vec<_> = (0..9).map(|number| code_name(ncclResult_t(number))).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), 9);
}

#[test]
fn element_types_have_the_numbers_of_nccl_and_sizes() {
    let sizes = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1];
    for dtype in DType::ALL {
        match data_type(dtype, NEW) {
            Some(number) => assert_eq!(sizes[number.0 as usize], dtype.size_bytes(), "{dtype}"),
            None => assert!(matches!(dtype, DType::I16 | DType::U16), "{dtype}"),
        }
    }
    assert_eq!(data_type(DType::Bf16, NEW), Some(ncclDataType_t::ncclBfloat16));
    assert_eq!(data_type(DType::F16, NEW), Some(ncclDataType_t::ncclFloat16));
    assert_eq!(data_type(DType::U32, NEW), Some(ncclDataType_t::ncclUint32));
    assert_eq!(data_type(DType::I32, NEW), Some(ncclDataType_t::ncclInt32));
}

#[test]
fn small_floats_need_a_newer_library() {
    for dtype in [DType::F8E4M3, DType::F8E5M2] {
        assert_eq!(data_type(dtype, Version::new(2, 23, 4)), None);
        assert!(data_type(dtype, Version::new(2, 24, 3)).is_some());
    }
}

#[test]
fn scalars_are_rounded_to_their_type() {
    let bytes = |dtype| scalar_bytes(1.0 / 3.0, dtype).unwrap();
    assert_eq!(bytes(DType::F32)[..4], (1.0f32 / 3.0).to_ne_bytes());
    assert_eq!(bytes(DType::F64), (1.0f64 / 3.0).to_ne_bytes());
    assert_eq!(bytes(DType::F16)[..2], 0x3555u16.to_ne_bytes());
    assert_eq!(bytes(DType::Bf16)[..2], 0x3eabu16.to_ne_bytes());
    assert_eq!(scalar_bytes(2.0, DType::F8E4M3).unwrap()[0], 0x40);
    assert_eq!(scalar_bytes(2.0, DType::F8E5M2).unwrap()[0], 0x40);
    assert_eq!(scalar_bytes(2.0, DType::I32), None);
}

/// The magnitudes of a 16-bit float type, from zero on, by their patterns; what comes after the largest finite one stands for infinity.
fn ladder(mantissa_bits: u32, bias: i32) -> Vec<f64> {
    let worth = |pattern: u32| {
        let (exponent, mantissa) = (pattern >> mantissa_bits, pattern & ((1 << mantissa_bits) - 1));
        let leading = u32::from(exponent > 0) << mantissa_bits;
        f64::from(leading + mantissa) * 2_f64.powi(exponent.max(1) as i32 - bias - mantissa_bits as i32)
    };
    (0..=(1 << 15) - (1 << mantissa_bits)).map(worth).collect()
}

#[test]
fn a_scalar_next_to_a_tie_has_the_same_bits_on_devices_and_on_the_host() {
    fn check<T: crate::Element>(dtype: DType, mantissa_bits: u32, bias: i32, one: T, bits: fn(T) -> u16) {
        let ladder = ladder(mantissa_bits, bias);
        let mut scaled = Vec::new();
        for (pattern, pair) in ladder.windows(2).enumerate() {
            let (low, high) = (pattern as u16, pattern as u16 + 1);
            // Exact: two neighbours have a bit less between them than an f64 can tell.
            let tie = (pair[0] + pair[1]) / 2.0;
            let even = if low % 2 == 0 { low } else { high };
            for (scalar, expected) in [(pair[0], low), (tie.next_down(), low), (tie, even), (tie.next_up(), high), (pair[1], high)] {
                for (scalar, expected) in [(scalar, expected), (-scalar, expected | 0x8000)] {
                    assert_eq!(scalar_bytes(scalar, dtype).unwrap()[..2], expected.to_ne_bytes(), "{scalar:e} as {dtype}");
                    premultiply(&ReduceOp::PreMulSum(scalar).into(), &[one], &mut scaled);
                    assert_eq!(bits(scaled[0]), expected, "{scalar:e} as {dtype}, on the host");
                }
            }
        }
    }
    check(DType::F16, 10, 15, f16::ONE, f16::to_bits);
    check(DType::Bf16, 7, 127, bf16::ONE, bf16::to_bits);
}

#[test]
fn an_empty_configuration_leaves_everything_but_blocking_to_nccl() {
    let raw = RawConfig::new(&NcclConfig::default()).unwrap().config;
    assert_eq!(raw, nccl_sys::ncclConfig_t { blocking: 0, ..nccl_sys::ncclConfig_t::new() });
    assert_eq!(raw.minCTAs, NCCL_CONFIG_UNDEF_INT);
}

#[test]
fn every_setting_reaches_its_field() {
    let config = NcclConfig::default()
        .cga_cluster_size(1)
        .min_ctas(2)
        .max_ctas(3)
        .network_name("Socket")
        .split_share(true)
        .traffic_class(4)
        .name("gradients")
        .collnet(true)
        .cta_policy(CtaPolicy::Zero)
        .shrink_share(false)
        .nvls_ctas(5)
        .channels_per_net_peer(6)
        .nvlink_centric_sched(true)
        .graph_usage(GraphUsage::One)
        .rma_contexts(7)
        .max_p2p_peers(8)
        .graph_stream_ordering(false)
        .launch_order_implicit(true);
    let RawConfig { config: raw, strings } = RawConfig::new(&config).unwrap();
    let [network_name, name] = &strings;
    let expected = nccl_sys::ncclConfig_t {
        blocking: 0,
        cgaClusterSize: 1,
        minCTAs: 2,
        maxCTAs: 3,
        netName: network_name.as_ref().unwrap().as_ptr(),
        splitShare: 1,
        trafficClass: 4,
        commName: name.as_ref().unwrap().as_ptr(),
        collnetEnable: 1,
        CTAPolicy: 2,
        shrinkShare: 0,
        nvlsCTAs: 5,
        nChannelsPerNetPeer: 6,
        nvlinkCentricSched: 1,
        graphUsageMode: 1,
        numRmaCtx: 7,
        maxP2pPeers: 8,
        graphStreamOrdering: 0,
        launchOrderImplicit: 1,
        ..nccl_sys::ncclConfig_t::new()
    };
    assert_eq!(raw, expected);
    assert_eq!((network_name.as_ref().unwrap().to_str(), name.as_ref().unwrap().to_str()), (Ok("Socket"), Ok("gradients")));
}

#[test]
fn settings_that_c_cannot_hold_are_quoted() {
    let error = RawConfig::new(&NcclConfig::default().max_ctas(u32::MAX)).unwrap_err().to_string();
    assert!(error.contains("max_ctas") && error.contains("4294967295"), "{error}");
    let error = RawConfig::new(&NcclConfig::default().name("a\0b")).unwrap_err().to_string();
    assert!(error.contains("name"), "{error}");
}

#[test]
fn a_library_that_is_too_old_is_named_with_its_version() {
    assert_eq!(judge(Version::new(2, 18, 1), "a"), Ok(()));
    let words = judge(Version::new(2, 4, 8), "/usr/lib/libnccl.so.2").unwrap_err();
    assert!(words.starts_with("NCCL 2.4.8 (/usr/lib/libnccl.so.2) is older than 2.18"), "{words}");
}
