//! Ops of the caller's own.

use super::*;
use crate::call::Kind;
use crate::op::DeviceCode;

/// A kernel of a caller's: three quarters of what was folded so far, rounded down, plus the next rank's byte; the order shows.
const IMAGE: &str = "
.version 8.0
.target sm_70
.address_size 64
.visible .entry mix(.param .u64 mix_0, .param .u64 mix_1, .param .u64 mix_2, .param .u32 mix_3,
                    .param .u32 mix_4, .param .u64 mix_5, .param .u64 mix_6, .param .u32 mix_7)
{
    .reg .pred %p<4>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<12>;
    ld.param.u64 %rd1, [mix_0];
    ld.param.u64 %rd2, [mix_1];
    ld.param.u64 %rd3, [mix_2];
    ld.param.u32 %r1, [mix_3];
    ld.param.u32 %r2, [mix_4];
    ld.param.u64 %rd4, [mix_5];
    ld.param.u64 %rd5, [mix_6];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.u32 %r6, %r3, %r4, %r5;
    mov.u32 %r7, %nctaid.x;
    mul.lo.u32 %r8, %r7, %r4;
    cvt.u64.u32 %rd6, %r6;
    cvt.u64.u32 %rd7, %r8;
ELEMENT:
    setp.ge.u64 %p1, %rd6, %rd5;
    @%p1 bra DONE;
    mov.u32 %r9, 0;
    mov.u32 %r10, 0;
    mov.u64 %rd8, %rd1;
RANK:
    setp.eq.u32 %p2, %r10, %r1;
    selp.b64 %rd9, %rd3, %rd8, %p2;
    add.u64 %rd9, %rd9, %rd6;
    ld.global.u8 %r11, [%rd9];
    mul.lo.u32 %r9, %r9, 3;
    shr.u32 %r9, %r9, 2;
    add.u32 %r9, %r9, %r11;
    and.b32 %r9, %r9, 255;
    add.u64 %rd8, %rd8, %rd2;
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p3, %r10, %r2;
    @%p3 bra RANK;
    add.u64 %rd10, %rd4, %rd6;
    st.global.u8 [%rd10], %r9;
    add.u64 %rd6, %rd6, %rd7;
    bra ELEMENT;
DONE:
    ret;
}
";

fn mix() -> DeviceCode {
    DeviceCode::Ptx { image: IMAGE.into(), entry: "mix".into() }
}

fn mixed(inputs: &[Vec<u8>]) -> Vec<u8> {
    let element = |index: usize| inputs.iter().fold(0_u32, |sum, input| (sum * 3 / 4 + u32::from(input[index])) & 255) as u8;
    (0..inputs[0].len()).map(element).collect()
}

/// A case of a kind on blocks of `bytes`.
fn case(kind: Kind, n: usize, bytes: usize) -> Case {
    let mut case = Case::some(kind, true, 1, 1, &mut Random(1));
    (case.n, case.root, case.blocks) = (n, 0, vec![bytes; n]);
    case
}

#[test]
fn a_kernel_of_the_callers_folds_in_rank_order() {
    let sim = Sim::new();
    for n in [1, 2, 3] {
        ranks(n, &Options { scratch_bytes: 32 << 10, ..options() }, |plane| {
            let mut random = Random(120);
            for bytes in [5, 1000, 150_000] {
                for kind in [Kind::AllReduce, Kind::Reduce, Kind::ReduceScatter] {
                    let case = case(kind, n, bytes);
                    let memories = memories(&case, &mut random, |random, _| vec![random.below(256) as u8]);
                    run(plane, &case, &memories, DType::U8, Some(Reduction::User(mix())), &|inputs: &[Vec<u8>]| match inputs {
                        [one] => one.clone(),
                        inputs => mixed(inputs),
                    });
                }
            }
        });
    }
    sim.finish();
}

#[test]
fn what_cannot_be_loaded_says_why_and_leaves_the_communicator_usable() {
    let sim = Sim::new();
    ranks(2, &options(), |plane| {
        let case = case(Kind::AllReduce, 2, 64);
        let mut random = Random(121);
        let memories = memories(&case, &mut random, |random, _| vec![random.below(256) as u8]);
        let stream = plane.stream();
        let mut memory = upload(stream, &memories[plane.comm().rank()]);
        let base = address(stream, &mut memory);
        let attempt = |code| {
            let job = job_at(&case, plane.comm().rank(), base, DType::U8, Some(Reduction::User(code)));
            // SAFETY: the memory is as the case says.
            unsafe { plane.enqueue(&job, stream, LONG) }.unwrap_err().to_string()
        };
        let absent = attempt(DeviceCode::Ptx { image: IMAGE.into(), entry: "other".into() });
        assert!(absent.contains("\"other\""), "{absent}");
        let broken = attempt(DeviceCode::Ptx { image: IMAGE.replace("selp", "nonsense").into(), entry: "mix".into() });
        assert!(broken.contains("\"mix\"") && broken.contains("loading"), "{broken}");
        let zero = attempt(DeviceCode::Ptx { image: "\0".into(), entry: "mix".into() });
        assert!(zero.contains("zero byte"), "{zero}");
        let expression = attempt(DeviceCode::Expression("a[0]".into()));
        assert!(expression.contains("\"[\""), "{expression}");
        run(plane, &case, &memories, DType::U8, Some(Reduction::User(mix())), &|inputs: &[Vec<u8>]| mixed(inputs));
    });
    let reports = simgpu::reports();
    assert!(!reports.is_empty() && reports.iter().all(|report| report.contains("nonsense")), "{reports:?}");
    sim.finish();
}

#[test]
fn an_expression_folds_in_rank_order_or_says_that_there_is_no_compiler() {
    let sim = Sim::new();
    // SAFETY: opening the library runs its initialisers, which ask for nothing.
    let is_there = unsafe { cudarc::nvrtc::sys::is_culib_present() };
    ranks(3, &options(), |plane| {
        let case = case(Kind::AllReduce, 3, 4000);
        let values = |random: &mut Random, _| (random.below(2000) as f32 - 1000.0).to_ne_bytes().to_vec();
        let memories = memories(&case, &mut Random(122), values);
        let reduction = Reduction::User(DeviceCode::Expression("fabsf(b) > fabsf(a) ? b : a * 0.5f".into()));
        if is_there {
            let number = |input: &[u8], at: usize| f32::from_ne_bytes(input[4 * at..4 * at + 4].try_into().unwrap());
            let combine = |a: f32, b: f32| if b.abs() > a.abs() { b } else { a * 0.5 };
            let fold = |inputs: &[Vec<u8>]| {
                let element = |at| inputs[1..].iter().fold(number(&inputs[0], at), |a, b| combine(a, number(b, at)));
                (0..inputs[0].len() / 4).flat_map(|at| element(at).to_ne_bytes()).collect::<Vec<_>>()
            };
            let case = Case { element_bytes: 4, ..case };
            run(plane, &case, &memories, DType::F32, Some(reduction), &fold);
        } else {
            let (stream, me) = (plane.stream(), plane.comm().rank());
            let mut memory = upload(stream, &memories[me]);
            let job = job_at(&case, me, address(stream, &mut memory), DType::F32, Some(reduction));
            // SAFETY: nothing is queued.
            let error = unsafe { plane.enqueue(&job, stream, LONG) }.unwrap_err();
            assert!(error.is_unsupported() && error.to_string().contains("with_ptx"), "{error}");
        }
    });
    sim.finish();
}
